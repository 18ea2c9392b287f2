"""The one operation of the package: moving a tensor whose axes say which space they index."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from signed_align.errors import GaugeError
from signed_align.signed_permutation import SignedPermutation

if TYPE_CHECKING:
    from signed_align.gauge import Gauge


@dataclass(frozen=True)
class Axis:
    """A tensor axis that indexes the coordinates of one space.

    ``signed=False`` marks quantities that are even in the coordinate. An RMSNorm gain multiplies
    the coordinate it belongs to, so it follows the permutation and keeps its own sign; a second
    moment or a DoRA magnitude is a square or a norm and has no sign to flip.
    """

    space: str
    signed: bool = True

    @property
    def unsigned(self) -> Axis:
        """The same axis for an even quantity."""
        return Axis(self.space, signed=False)

    @property
    def signed_everywhere(self) -> Axis:
        """The same axis for a quantity that follows the sign."""
        return Axis(self.space)

    @property
    def spaces(self) -> tuple[str, ...]:
        """The spaces the axis indexes."""
        return (self.space,)


@dataclass(frozen=True)
class Section:
    """One run of a fused axis: sizes of its factors, and which of them index which space.

    The factors of the :class:`Fused` axis come first in the numbering, then those of ``shape``.

    Examples
    --------
    The rows of a query projection, with 2 key-value heads, 3 query heads for each, 16 coordinates:

    >>> Section((2, 3, 16), ((Axis("heads", signed=False), (0, 1)), (Axis("keys"), (0, 2))))
    ... # doctest: +SKIP
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[Axis, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Fused:
    """An axis whose entries are indexed by several spaces at once, or which holds several blocks.

    Read in row-major order the axis runs over the factors ``outer``, and inside over the
    ``sections`` one after the other: queries, keys and values in one projection, gate and up in
    one matrix, heads and their coordinates in the columns of an output projection.

    Parameters
    ----------
    outer : tuple of int
        Sizes of the factors that are shared by all sections.
    sections : tuple of Section
        What lies at each outer index, in order.
    span : int
        How many axes of the tensor, flattened, make up this one. The label then stands at each
        of them: the first two axes of experts that are stored as one tensor.
    only : int, optional
        The axis is just the part at this index of the first outer factor: one expert's weight,
        stored by itself.
    """

    outer: tuple[int, ...]
    sections: tuple[Section, ...]
    span: int = 1
    only: int | None = None

    @property
    def unsigned(self) -> Fused:
        """The same axis for an even quantity."""
        return self._relabelled(lambda axis: axis.unsigned)

    @property
    def signed_everywhere(self) -> Fused:
        """The same axis for a quantity that follows every sign."""
        return self._relabelled(lambda axis: axis.signed_everywhere)

    def _relabelled(self, change: Callable[[Axis], Axis]) -> Fused:
        sections = tuple(
            Section(section.shape, tuple((change(axis), which) for axis, which in section.axes))
            for section in self.sections
        )
        return replace(self, sections=sections)

    @property
    def leading(self) -> Label | None:
        """The label of the first outer factor by itself; None if nothing indexes it alone.

        Of the units of many experts, flattened: the experts.
        """
        alone = [axis for axis, which in self.sections[0].axes if which == (0,)]
        return alone[0] if self.outer and alone else None

    def with_rank(self, rank: int, *, last: bool) -> Fused:
        """The label where each index of the first outer factor comes ``rank`` times.

        A low-rank update of stacked experts has an axis that runs over experts and rank. Either
        it runs over the experts, for each over the rank, and the rest of this axis comes behind
        (expert, rank, rest); or, if ``last``, the rest comes first (rest, rank, expert).
        """
        first, *rest = self.outer
        if not last:
            outer: tuple[int, ...] = (first, rank, *rest)
            sections = self._renumbered(lambda _, k: k + (k > 0))
            return replace(self, outer=outer, sections=sections)

        def behind(section: Section, k: int) -> int:
            return k - 1 if k else len(rest) + len(section.shape) + 1

        sections = tuple(
            replace(section, shape=(*section.shape, rank, first))
            for section in self._renumbered(behind)
        )
        return replace(self, outer=tuple(rest), sections=sections)

    def _renumbered(self, number: Callable[[Section, int], int]) -> tuple[Section, ...]:
        return tuple(
            replace(
                section,
                axes=tuple(
                    (axis, tuple(number(section, k) for k in which)) for axis, which in section.axes
                ),
            )
            for section in self.sections
        )

    @property
    def size(self) -> int:
        """The number of entries of the (flattened) axis."""
        stride = sum(math.prod(section.shape) for section in self.sections)
        return stride * math.prod(self.outer[1:] if self.only is not None else self.outer)

    @property
    def spaces(self) -> tuple[str, ...]:
        """The spaces the axis indexes, each once."""
        return tuple(
            dict.fromkeys(axis.space for section in self.sections for axis, _ in section.axes)
        )

    def element(self, elements: Mapping[str, SignedPermutation]) -> SignedPermutation:
        """What the elements of the single spaces do to this axis.

        Raises
        ------
        GaugeError
            If they contradict each other: coordinates that leave their head, say.
        """
        stride = sum(math.prod(section.shape) for section in self.sections)
        position = torch.empty(self.size, dtype=torch.int64)
        sign = torch.ones_like(position, dtype=torch.int8)
        first = 0 if self.only is None else self.only * self.size
        offset = 0
        for section in self.sections:
            source, target, flips = self._moved(section, elements)

            def place(
                index: Sequence[Tensor],
                offset: int = offset,
                shape: tuple[int, ...] = section.shape,
            ) -> Tensor:
                inside = ravel(index[len(self.outer) :], shape)
                return ravel(index[: len(self.outer)], self.outer) * stride + offset + inside

            here = place(target) - first
            position[here] = place(source)
            sign[here] = flips
            offset += math.prod(section.shape)
        return SignedPermutation(position % len(position), sign)

    def _moved(
        self, section: Section, elements: Mapping[str, SignedPermutation]
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Indices of a section's entries in the source and in the target, and their signs."""
        factors = (*self.outer, *section.shape)
        entries = torch.arange(math.prod(factors))
        if self.only is not None:
            entries = entries.reshape(self.outer[0], -1)[self.only]
        target = list(torch.unravel_index(entries, factors))
        source: list[Tensor | None] = [None] * len(factors)
        flips = torch.ones_like(entries, dtype=torch.int8)
        for axis, which in section.axes:
            sizes = [factors[k] for k in which]
            index = ravel([target[k] for k in which], sizes)
            element = elements.get(axis.space)
            if element is not None:
                if element.size != math.prod(sizes):
                    raise GaugeError(
                        f"the gauge has {element.size} coordinates in the space {axis.space!r}, "
                        f"the tensor {math.prod(sizes)}."
                    )
                if axis.signed:
                    flips *= element.sign[index]
                index = element.perm[index]
            for k, value in zip(which, torch.unravel_index(index, sizes), strict=True):
                known = source[k]
                if known is not None and not torch.equal(known, value):
                    raise GaugeError(
                        f"the gauge contradicts itself: {' and '.join(self.spaces)} do not "
                        "move the same heads or experts."
                    )
                source[k] = value
        origin = [
            mine if mine is not None else own for mine, own in zip(source, target, strict=True)
        ]
        return origin, target, flips


def ravel(index: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Row-major number of each entry, given its index along factors of these sizes."""
    flat = torch.zeros((), dtype=torch.int64)
    for value, size in zip(index, sizes, strict=True):
        flat = flat * size + value
    return flat


Label: TypeAlias = Axis | Fused
Axes: TypeAlias = tuple[Label | None, ...]
"""One label per tensor axis; None marks an axis that no gauge moves."""


def moves(label: Label | None, gauge: Gauge) -> bool:
    """Whether ``gauge`` has an element for a space that the axis indexes."""
    return label is not None and any(space in gauge.elements for space in label.spaces)


def stacked_factor(axes: Axes, shape: Sequence[int], which: int, rank: int, *, last: bool) -> Axes:
    """The labels of one factor of a low-rank update of stacked matrices, all of them in one.

    Parameters
    ----------
    axes, shape
        The labels and the shape (matrices, rows, columns) of the stack.
    which : int
        The axis of the stack, 1 or 2, that the factor shares with it.
    rank : int
        The rank of each matrix's update.
    last : bool
        The factor has the shared axis first, and then an axis that runs over the rank and inside
        over the matrices. Otherwise an axis over the matrices and inside over the rank comes
        first, and then the shared one.
    """
    label = axes[which]
    if isinstance(label, Fused) and label.span > 1:
        fused = label.with_rank(rank, last=last)
        return (fused, fused)
    stacked = next((axis for axis in axes if isinstance(axis, Fused) and axis.span > 1), None)
    leading = stacked.leading if stacked is not None else axes[0]
    over: Label | None = None
    if isinstance(leading, Axis):
        sizes = (rank, shape[0]) if last else (shape[0], rank)
        over = Fused((), (Section(sizes, ((leading, (1 if last else 0,)),)),))
    return (label, over) if last else (over, label)


def even(axes: Axes) -> Axes:
    """The labels of a quantity that no sign flips: a square, a norm, a magnitude."""
    return tuple(label and label.unsigned for label in axes)


def reduced(axes: Axes, position: int, *, keep: bool = True) -> Axes:
    """The labels of an even quantity that is summed over one axis.

    Parameters
    ----------
    axes : tuple
        The labels before.
    position : int
        The axis that is summed over.
    keep : bool
        Whether it stays, as an axis of 1.

    Raises
    ------
    GaugeError
        If the axis is flattened with others that would not be left with a meaning.
    """
    gone, left = axes[position], list(even(axes))
    left[position] = None
    if isinstance(gone, Fused) and gone.span > 1:
        others = [p for p, label in enumerate(axes) if label == gone and p != position]
        if len(others) != 1 or others[0] > position:
            raise GaugeError("what is summed over all experts is not indexed by their units.")
        left[others[0]] = gone.unsigned.leading
    if not keep:
        del left[position]
    return tuple(left)


def joined(labels: Sequence[Label | None], sizes: Sequence[int]) -> Fused:
    """The label of an axis that holds several axes of these sizes, one after the other."""
    sections: list[Section] = []
    for label, size in zip(labels, sizes, strict=True):
        if label is None:
            sections.append(Section((size,)))
        elif isinstance(label, Axis):
            sections.append(Section((size,), ((label, (0,)),)))
        elif label.outer or label.span > 1:
            raise GaugeError("an axis whose blocks are interleaved cannot be part of another.")
        else:
            sections.extend(label.sections)
    return Fused((), tuple(sections))


def element_of(label: Label | None, size: int, gauge: Gauge) -> SignedPermutation:
    """What ``gauge`` does to an axis of ``size`` entries; the identity if it does nothing.

    Raises
    ------
    GaugeError
        If the label has another size.
    """
    element: SignedPermutation | None = None
    if isinstance(label, Axis):
        element = gauge.elements.get(label.space)
        if element is not None and not label.signed:
            element = element.unsigned
    elif isinstance(label, Fused):
        element = label.element(gauge.elements)
    element = element or SignedPermutation.identity(size)
    if element.size != size:
        raise GaugeError(f"the axis has {size} entries, the gauge moves {element.size}.")
    return element


def transport_entries(
    indices: Sequence[Tensor],
    values: Tensor | None,
    axes: Axes,
    shape: Sequence[int],
    gauge: Gauge,
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Move single entries of a tensor, given by where they are: a list, or a sparse tensor.

    Parameters
    ----------
    indices : sequence of Tensor
        For each axis of the tensor, the entries' indices along it: integers of one shape.
    values : Tensor, optional
        The entries' values, of the same shape.
    axes, shape
        The labels and the shape of the tensor that the entries are taken from.
    gauge : Gauge
        As in :func:`transport`.

    Returns
    -------
    tuple
        The indices in the target, the values there, and the sign that each entry takes, int8.

    Raises
    ------
    GaugeError
        If an index is out of range, or if the values' dtype has no sign to flip.
    """
    moved, sign = [], torch.ones(indices[0].shape, dtype=torch.int8)
    for index, label, size in zip(indices, axes, shape, strict=True):
        index, flips = element_of(label, size, gauge).relocate(index)
        moved.append(index)
        sign = sign * flips
    if values is not None and bool((sign < 0).any()):
        flat = SignedPermutation(torch.arange(sign.numel()), sign.reshape(-1))
        values = flat.apply(values.reshape(-1), 0).reshape(values.shape)
    return moved, values, sign


def transport_flat_entries(
    indices: Tensor, values: Tensor, axes: Axes, shape: Sequence[int], gauge: Gauge
) -> tuple[Tensor, Tensor]:
    """As :func:`transport_entries`, for indices that count a tensor's entries in row-major order.

    Returns the indices in the target, in their dtype, and the values there. Raises GaugeError for
    an index that is out of range, or a dtype that does not reach all entries.
    """
    count = math.prod(shape)
    flat = indices.long()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < count:
        raise GaugeError(f"an index is not between 0 and {count - 1}.")
    if not indices.is_floating_point() and torch.iinfo(indices.dtype).max < count - 1:
        raise GaugeError(f"indices of {indices.dtype} do not reach all {count} entries.")
    places = torch.unravel_index(flat, tuple(shape))
    moved, values_there, _ = transport_entries(places, values, axes, shape, gauge)
    assert values_there is not None
    return ravel(moved, shape).to(indices.dtype), values_there


def transport(
    tensor: Tensor, axes: Sequence[Label | None], gauge: Gauge, rows: slice = slice(None)
) -> Tensor:
    """Move ``tensor`` from the source's to the target's coordinates.

    Parameters
    ----------
    tensor : Tensor
        Any dtype and device.
    axes : sequence of Axis, Fused or None
        One label per axis of ``tensor``.
    gauge : Gauge
        A space that the gauge does not mention is left as it is.
    rows : slice
        Which entries of the result along the first axis to make; all by default.

    Returns
    -------
    Tensor
        Same shape (but for ``rows``) and dtype; a view of ``tensor`` if no labelled space is in
        the gauge.

    Raises
    ------
    GaugeError
        If the labels do not fit the tensor's shape.
    """
    if len(axes) != tensor.ndim:
        raise GaugeError(
            f"{len(axes)} axis labels were given for a tensor of shape {tuple(tensor.shape)}."
        )
    sliced = rows == slice(None) or not tensor.ndim
    for position, label in enumerate(axes):
        if label is None or not moves(label, gauge):
            continue
        if isinstance(label, Axis):
            part = slice(None) if position else rows
            element = gauge.elements[label.space]
            tensor = element.apply(tensor, position, signed=label.signed, part=part)
            sliced = sliced or not position
            continue
        element = label.element(gauge.elements)
        if label.span == 1:
            tensor = element.apply(tensor, position, part=slice(None) if position else rows)
            sliced = sliced or not position
            continue
        covered = [place for place, other in enumerate(axes) if other == label][: label.span]
        if position != covered[0]:
            continue
        places = tuple(range(label.span))
        front = tensor.movedim(tuple(covered), places)
        flat = front.reshape(-1, *front.shape[label.span :])
        moved = element.apply(flat, 0).reshape(front.shape)
        moved = moved.movedim(places, tuple(covered))
        tensor = moved.clone(memory_format=torch.contiguous_format)  # as it came, strides and all
    return tensor if sliced else tensor[rows]


def transport_all(
    tensors: Mapping[str, Tensor],
    axes: Callable[[str, tuple[int, ...]], Axes],
    gauge: Gauge,
    origin: Callable[[str], str] = lambda name: name,
) -> dict[str, Tensor]:
    """Move tensors by name, as :func:`transport` moves one.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        A state dict, or some of it.
    axes : callable
        From a name and a shape to axis labels; raises for a name it does not know.
    gauge : Gauge
        As in :func:`transport`.
    origin : callable
        From a name to that of the tensor it is made of: another expert's, if experts move.
    """
    return {
        name: transport(tensors[origin(name)], axes(name, tuple(tensor.shape)), gauge)
        for name, tensor in tensors.items()
    }


def spaces_of(axes: Axes) -> set[str]:
    """The spaces that the axes of a tensor index."""
    return {space for label in axes if label is not None for space in label.spaces}


def kind_of(space: str) -> str:
    """The kind of a space by its name: ``mlp`` of ``mlp:layers.3.mlp``."""
    return space.partition(":")[0]


def axes_text(axes: Axes) -> str:
    """Labels for people: ``(residual, |mlp|, ·)``; bars for what keeps its sign."""
    words = []
    for axis in axes:
        if axis is None:
            words.append("·")
        elif isinstance(axis, Axis):
            words.append(kind_of(axis.space) if axis.signed else f"|{kind_of(axis.space)}|")
        else:
            words.append("×".join(map(kind_of, axis.spaces)))
    return f"({', '.join(words)})"
