"""The hyperoctahedral group B_d = S_d ⋉ {±1}^d: how the coordinates of twins can differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from signed_align.errors import GaugeError

_SIGN_BIT = {
    1: (torch.uint8, 0x80),
    2: (torch.int16, -(2**15)),
    4: (torch.int32, -(2**31)),
    8: (torch.int64, -(2**63)),
}
# These formats have no negative zero: the bit pattern that would be -0 is their NaN.
_NO_NEGATIVE_ZERO = {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
# One has no sign at all, the other packs two values into a byte.
_NO_SIGN = {
    getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)
}


@dataclass(frozen=True, eq=False)
class SignedPermutation:
    """An element of B_d, acting on row vectors as ``x_target[j] = sign[j] * x_source[perm[j]]``.

    Parameters
    ----------
    perm : Tensor, shape (d,), int64
        ``perm[j]`` is the source coordinate that target coordinate ``j`` is made of.
    sign : Tensor, shape (d,), int8
        +1 or -1 for each target coordinate.

    Raises
    ------
    GaugeError
        If ``perm`` is not a permutation of 0 … d-1, or ``sign`` holds anything but +1 and -1.

    Examples
    --------
    >>> g = SignedPermutation(torch.tensor([2, 0, 1]), torch.tensor([1, -1, 1], dtype=torch.int8))
    >>> g.apply(torch.tensor([10.0, 20.0, 30.0]), axis=0)
    tensor([ 30., -10.,  20.])
    """

    perm: Tensor
    sign: Tensor

    def __post_init__(self) -> None:
        perm, sign = self.perm, self.sign
        if perm.ndim != 1 or sign.shape != perm.shape:
            raise GaugeError(
                f"perm and sign must be vectors of one length; got shapes {tuple(perm.shape)} "
                f"and {tuple(sign.shape)}."
            )
        if perm.is_floating_point() or sign.is_floating_point():
            raise GaugeError(
                f"perm and sign must hold integers; got {perm.dtype} and {sign.dtype}."
            )
        perm = perm.detach().to(device="cpu", dtype=torch.int64)
        if not torch.equal(perm.sort().values, torch.arange(len(perm))):
            raise GaugeError(f"perm is not a permutation of 0 … {len(perm) - 1}.")
        sign = sign.detach().cpu()
        if not bool(((sign == 1) | (sign == -1)).all()):
            raise GaugeError("sign may hold only +1 and -1.")
        object.__setattr__(self, "perm", perm)
        object.__setattr__(self, "sign", sign.to(torch.int8))

    @classmethod
    def identity(cls, size: int) -> SignedPermutation:
        """The element that changes nothing on ``size`` coordinates."""
        return cls(torch.arange(size), torch.ones(size, dtype=torch.int8))

    @classmethod
    def random(cls, size: int, *, seed: int = 0, signed: bool = True) -> SignedPermutation:
        """A uniform random element of B_d, or of S_d if ``signed`` is False."""
        generator = torch.Generator().manual_seed(seed)
        perm = torch.randperm(size, generator=generator)
        sign = torch.ones(size, dtype=torch.int8)
        if signed:
            sign -= 2 * torch.randint(2, (size,), generator=generator, dtype=torch.int8)
        return cls(perm, sign)

    @property
    def size(self) -> int:
        """The number of coordinates d."""
        return len(self.perm)

    @property
    def is_identity(self) -> bool:
        """Whether every coordinate stays where and as it is."""
        return self == SignedPermutation.identity(self.size)

    @property
    def has_uniform_sign(self) -> bool:
        """Whether all signs agree: the element is then in S_d × {±1}."""
        return bool((self.sign == self.sign[:1]).all())

    @property
    def flips(self) -> int:
        """How many coordinates change their sign."""
        return int((self.sign < 0).sum())

    @property
    def unsigned(self) -> SignedPermutation:
        """The same permutation with every sign +1."""
        return SignedPermutation(self.perm, torch.ones_like(self.sign))

    def extends(self, other: SignedPermutation) -> bool:
        """Whether this element does to the first coordinates, as many, what ``other`` does."""
        return torch.equal(self.perm[: other.size], other.perm) and torch.equal(
            self.sign[: other.size], other.sign
        )

    def apply(
        self, tensor: Tensor, axis: int, *, signed: bool = True, part: slice = slice(None)
    ) -> Tensor:
        """Move ``tensor`` from source to target coordinates along ``axis``.

        Parameters
        ----------
        tensor : Tensor
            Any shape and dtype; ``tensor.shape[axis]`` must be ``self.size``.
        axis : int
            The axis that is indexed by the coordinates.
        signed : bool
            False for quantities that are even in the coordinate (norm gains, second moments,
            DoRA magnitudes): they are permuted and keep their sign.
        part : slice
            Which of the target coordinates to make; all by default.

        Returns
        -------
        Tensor
            A new tensor of the same shape (but for ``part``), dtype and device. Only bits are
            moved and sign bits flipped, so applying the inverse gives the input back bit by bit,
            in every dtype.

        Raises
        ------
        GaugeError
            If the size does not fit, or a sign would be needed in a dtype that has none.
        """
        if tensor.shape[axis] != self.size:
            raise GaugeError(
                f"axis {axis} of a tensor of shape {tuple(tensor.shape)} has {tensor.shape[axis]} "
                f"coordinates; the gauge has {self.size}."
            )
        flips = signed and bool((self.sign < 0).any())
        if flips and (not tensor.is_floating_point() or tensor.dtype in _NO_SIGN):
            raise GaugeError(
                f"a tensor of dtype {tensor.dtype} cannot be sign-flipped exactly; "
                "dequantise it to a floating-point dtype first."
            )
        if tensor.is_complex():
            raise GaugeError(f"complex tensors ({tensor.dtype}) are not supported.")
        axis = axis % tensor.ndim
        perm, sign = self.perm[part].to(tensor.device), self.sign[part]
        bits_dtype, sign_bit = _SIGN_BIT[tensor.element_size()]
        bits = tensor.contiguous().view(bits_dtype)
        if axis and axis == tensor.ndim - 1:
            # along the last axis gather is several times faster than index_select
            moved = torch.gather(bits, axis, perm.expand(*bits.shape[:-1], -1))
        else:
            moved = torch.index_select(bits, axis, perm)
        if flips:
            mask = torch.zeros(len(sign), dtype=bits_dtype)
            mask[sign < 0] = sign_bit
            mask = mask.to(tensor.device).reshape([-1] + [1] * (tensor.ndim - 1 - axis))
            if tensor.dtype in _NO_NEGATIVE_ZERO:
                mask = torch.where((moved & 0x7F) != 0, mask, torch.zeros_like(mask))
            moved.bitwise_xor_(mask)
        return moved.view(tensor.dtype)

    def relocate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Where source coordinates go, and with which sign.

        Parameters
        ----------
        indices : Tensor, any shape and integer dtype
            Source coordinates, counted from 0.

        Returns
        -------
        tuple of Tensor
            The target coordinates, in the dtype of ``indices``, and their signs, int8.

        Raises
        ------
        GaugeError
            If an index is not that of a coordinate.
        """
        flat = indices.detach().cpu().to(torch.int64)
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.size:
            raise GaugeError(f"an index is not between 0 and {self.size - 1}.")
        back = self.inverse()
        return back.perm[flat].to(indices), back.sign[flat]

    def then(self, other: SignedPermutation) -> SignedPermutation:
        """The composition along a path: first this element, then ``other``."""
        if other.size != self.size:
            raise GaugeError(f"cannot compose gauges on {self.size} and {other.size} coordinates.")
        return SignedPermutation(self.perm[other.perm], other.sign * self.sign[other.perm])

    def inverse(self) -> SignedPermutation:
        """The element that leads back: ``g.then(g.inverse())`` is the identity."""
        perm = torch.argsort(self.perm)
        return SignedPermutation(perm, self.sign[perm])

    @property
    def displaced(self) -> Tensor:
        """Which target coordinates come from elsewhere or change their sign, shape (d,), bool."""
        return (self.perm != torch.arange(self.size)) | (self.sign < 0)

    def as_matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The orthogonal d × d matrix G with ``x_target = x_source @ G``."""
        matrix = torch.zeros(self.size, self.size, dtype=dtype)
        matrix[self.perm, torch.arange(self.size)] = self.sign.to(dtype)
        return matrix

    def describe(self) -> dict[str, Any]:
        """What a report says of the element: how many coordinates it moves, and how."""
        return {
            "size": self.size,
            "identity": self.is_identity,
            "positive_sign_fraction": float((self.sign > 0).double().mean()),
            "fixed_point_fraction": float((self.perm == torch.arange(self.size)).double().mean()),
        }

    def agreement(self, truth: SignedPermutation) -> dict[str, float]:
        """Share of coordinates whose partner, and whose sign, this element gets right.

        Returns ``permutation_accuracy`` and ``sign_accuracy``; a sign counts as right only where
        the permutation is, since it belongs to a pair of coordinates.
        """
        if self.size != truth.size:
            raise GaugeError(
                f"the gauge has {self.size} coordinates and the true one {truth.size}."
            )
        right = self.perm == truth.perm
        return {
            "permutation_accuracy": float(right.double().mean()),
            "sign_accuracy": float((right & (self.sign == truth.sign)).double().mean()),
        }

    def to_tensors(self) -> dict[str, Tensor]:
        """The tensors that define the element in a gauge file."""
        return {"perm": self.perm, "sign": self.sign}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> SignedPermutation:
        """The element that :meth:`to_tensors` described; raises GaugeError if one is missing."""
        missing = {"perm", "sign"} - set(tensors)
        if missing:
            raise GaugeError(f"a signed permutation needs {' and '.join(sorted(missing))}.")
        return cls(tensors["perm"], tensors["sign"])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SignedPermutation):
            return NotImplemented
        return torch.equal(self.perm, other.perm) and torch.equal(self.sign, other.sign)

    __hash__ = None  # type: ignore[assignment]
