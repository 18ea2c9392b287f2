"""Which changes of a space's coordinates leave a model's function unchanged, and how to draw one.

Every such group here has one form: the coordinates lie in blocks of equal size, which may move as
wholes (heads, experts), and inside a block the coordinates move in a way that :class:`Within`
names. The residual stream is a single block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from signed_align.signed_permutation import SignedPermutation


class Within(str, Enum):
    """How the coordinates inside a block may move."""

    SIGNED_PERMUTATION = "signed_permutation"
    PERMUTATION_AND_GLOBAL_SIGN = "permutation_and_global_sign"
    PERMUTATION = "permutation"
    PLANE_SIGNS = "plane_signs"
    """Each rotary plane changes the sign of both its coordinates or of none; nothing else moves."""
    BLOCK_SIGN = "block_sign"
    """All of a block change sign together."""
    NOTHING = "nothing"

    @property
    def permutes(self) -> bool:
        """Whether coordinates may change places."""
        return self in (
            Within.SIGNED_PERMUTATION,
            Within.PERMUTATION_AND_GLOBAL_SIGN,
            Within.PERMUTATION,
        )


@dataclass(frozen=True)
class Group:
    """The native group of one space.

    Parameters
    ----------
    size : int
        The number of coordinates.
    within : Within
        How coordinates move inside a block.
    blocks : int
        The number of blocks of equal size.
    blocks_move : bool
        Whether the blocks may be permuted.
    planes : tuple of int
        For :attr:`Within.PLANE_SIGNS`: the number of the plane that each coordinate of a block
        lies in.
    """

    size: int
    within: Within
    blocks: int = 1
    blocks_move: bool = False
    planes: tuple[int, ...] = ()

    @property
    def block_size(self) -> int:
        """Coordinates per block."""
        return self.size // self.blocks

    def random(
        self,
        generator: torch.Generator,
        *,
        signed: bool = True,
        block_perm: Tensor | None = None,
    ) -> SignedPermutation:
        """A random element.

        Parameters
        ----------
        generator : torch.Generator
            The source of randomness.
        signed : bool
            False draws no signs.
        block_perm : Tensor, shape (blocks,), int64, optional
            How the blocks move; drawn too if absent. Spaces of the same heads share it.
        """
        if block_perm is None:
            block_perm = self.random_blocks(generator)
        inner = torch.arange(self.block_size).repeat(self.blocks, 1)
        if self.within.permutes:
            inner = torch.rand(self.blocks, self.block_size, generator=generator).argsort(dim=1)
        perm = block_perm[:, None] * self.block_size + inner
        sign = torch.ones(self.blocks, self.block_size, dtype=torch.int8)
        if signed:
            sign = self._random_signs(generator)
        return SignedPermutation(perm.reshape(-1), sign.reshape(-1))

    def random_blocks(self, generator: torch.Generator) -> Tensor:
        """How the blocks move in a random element, shape (blocks,)."""
        if self.blocks_move:
            return torch.randperm(self.blocks, generator=generator)
        return torch.arange(self.blocks)

    def _random_signs(self, generator: torch.Generator) -> Tensor:
        def draw(count: int) -> Tensor:
            flips = torch.randint(2, (self.blocks, count), generator=generator)
            return (1 - 2 * flips).to(torch.int8)

        if self.within is Within.SIGNED_PERMUTATION:
            return draw(self.block_size)
        if self.within is Within.PLANE_SIGNS:
            return draw(max(self.planes) + 1)[:, torch.tensor(self.planes)]
        if self.within is Within.BLOCK_SIGN:
            return draw(1).expand(-1, self.block_size)
        signs = torch.ones(self.blocks, self.block_size, dtype=torch.int8)
        return -signs if self.within is Within.PERMUTATION_AND_GLOBAL_SIGN else signs

    def block_perm(self, element: SignedPermutation) -> Tensor | None:
        """How an element moves the blocks, shape (blocks,); None if it tears one apart."""
        source = element.perm.reshape(self.blocks, self.block_size) // self.block_size
        return source[:, 0] if bool((source == source[:, :1]).all()) else None

    def violation(self, element: SignedPermutation) -> str | None:
        """Why ``element`` is not in the group, as the end of a sentence; None if it is."""
        if element.size != self.size:
            return f"has {element.size} coordinates, the model {self.size}"
        blocks = self.block_perm(element)
        if blocks is None:
            return "moves coordinates between heads or experts"
        if not self.blocks_move and not torch.equal(blocks, torch.arange(self.blocks)):
            return "moves whole heads or experts, which are not interchangeable here"
        inner = element.perm.reshape(self.blocks, self.block_size) % self.block_size
        if not self.within.permutes and not bool((inner == torch.arange(self.block_size)).all()):
            return "permutes coordinates that the rotary embedding or the norm tells apart"
        if self.within is Within.PERMUTATION_AND_GLOBAL_SIGN:
            return None if element.has_uniform_sign else "flips the signs of single coordinates"
        sign = element.sign.reshape(self.blocks, self.block_size)
        return None if self._allows(sign) else "flips signs that may not be flipped"

    def _allows(self, sign: Tensor) -> bool:
        if self.within is Within.SIGNED_PERMUTATION:
            return True
        if self.within is Within.PLANE_SIGNS:
            return all(
                bool((sign[:, group] == sign[:, group[:1]]).all())
                for group in _members(self.planes)
            )
        if self.within is Within.BLOCK_SIGN:
            return bool((sign == sign[:, :1]).all())
        return bool((sign == 1).all())


def _members(planes: Sequence[int]) -> list[list[int]]:
    return [
        [index for index, plane in enumerate(planes) if plane == number]
        for number in range(max(planes) + 1)
    ]
