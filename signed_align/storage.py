"""How checkpoints store a model: keys and layouts that differ from those of its class.

transformers renames, splits and fuses tensors when it loads and saves. Which stored tensor is
which part of which parameter is read off a saved miniature by content: its values are random, so
equal values are the same thing. Nothing of transformers' conversion rules is interpreted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from signed_align.chart import Layout, Part, StoredTensor, Template, Templates, numbers_in, star


@dataclass(frozen=True)
class _Piece:
    """A part of a parameter that a checkpoint may store by itself, with its labels."""

    name: str
    axes: Templates
    tensor: Tensor
    expert: int | None = None
    site: str = ""


def stored_tensors(
    saved: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    labels: Mapping[str, Templates],
    bare: Mapping[str, str],
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Labels of the stored tensors that are no parameter by name.

    Parameters
    ----------
    saved : mapping of str to Tensor
        What a checkpoint of the miniature holds.
    state : mapping of str to Tensor
        Its state dict, the same values.
    labels : mapping of str to Templates
        The labels of the state dict, by bare name.
    bare : mapping of str to str
        Every key of both, without prefixes.

    Returns
    -------
    dict of str to StoredTensor
        By pattern of the bare key.
    list of str
        Keys that are no recognisable part of any parameter.
    """
    known = {bare[name]: tensor for name, tensor in state.items()}
    odd = {
        bare[name]: tensor
        for name, tensor in saved.items()
        if bare[name] not in known or known[bare[name]].shape != tensor.shape
        or not _equal(known[bare[name]], tensor)
    }  # fmt: skip
    if not odd:
        return {}, []
    present = {bare[name] for name in saved} - set(odd)
    pieces: dict[tuple[object, ...], _Piece] = {}
    wholes = []
    for name, tensor in known.items():
        if name in present or name not in labels or not tensor.ndim:
            continue
        for part in _pieces(name, labels[name], tensor):
            pieces.setdefault(_fingerprint(part.tensor), part)
        wholes.append(_Piece(name, labels[name], tensor))
    found: dict[str, StoredTensor] = {}
    unknown = []
    for key, tensor in odd.items():
        piece: _Piece | None = pieces.get(_fingerprint(tensor))
        if piece is None or not _equal(piece.tensor, tensor):
            piece = _joined(tensor, wholes)
        if piece is None or not _same_numbers(key, piece):
            unknown.append(key)
            continue
        found.setdefault(star(key), StoredTensor(piece.axes, piece.site))
    return found, unknown


def _pieces(name: str, axes: Templates, tensor: Tensor) -> Iterator[_Piece]:
    """A parameter whole, transposed, by expert, and by block of a fused axis."""
    whole = _Piece(name, axes, tensor)
    yield from _turned(whole)
    yield from _blocks(whole)
    if tensor.ndim < 2 or tensor.shape[0] > 64:
        return
    for expert in range(tensor.shape[0]):
        piece = _Piece(name, _without_experts(axes), tensor[expert], expert, _expert_site(axes))
        yield from _turned(piece)
        yield from _blocks(piece)


def _turned(piece: _Piece) -> Iterator[_Piece]:
    yield piece
    if piece.tensor.ndim == 2:
        yield replace(piece, axes=piece.axes[::-1], tensor=piece.tensor.T)
    elif piece.tensor.ndim == 3:
        first, *rest = piece.axes
        yield replace(piece, axes=(first, *reversed(rest)), tensor=piece.tensor.transpose(1, 2))


def _blocks(piece: _Piece) -> Iterator[_Piece]:
    """The blocks of each axis that holds two or more, or halves of one without a label."""
    for position, axis in enumerate(piece.axes):
        size = piece.tensor.shape[position]
        for label, part in _split(axis, size):
            axes = tuple(
                label if place == position else own for place, own in enumerate(piece.axes)
            )
            block = piece.tensor[(slice(None),) * position + (part,)]
            yield from _turned(replace(piece, axes=axes, tensor=block))


def _split(axis: Template | None, size: int) -> Iterator[tuple[Template | None, slice]]:
    if axis is None and size % 2 == 0:
        yield None, slice(0, size // 2)
        yield None, slice(size // 2, size)
    if not isinstance(axis, Layout) or len(axis.parts) < 2 or axis.span > 1:
        return
    if "unit" in axis.outer:  # gate and up alternate
        step = len(axis.parts)
        for index, part in enumerate(axis.parts):
            inner = Part(("unit",), part.even)
            outer = tuple(factor for factor in axis.outer if factor != "unit")
            yield replace(axis, parts=(inner,), outer=outer), slice(index, size, step)
    elif size % len(axis.parts) == 0:
        step = size // len(axis.parts)
        for index, part in enumerate(axis.parts):
            yield replace(axis, parts=(part,)), slice(index * step, (index + 1) * step)


def _expert_site(axes: Templates) -> str:
    first = axes[0]
    if isinstance(first, Layout) and _runs_over_experts(first):
        return first.site
    return ""


def _runs_over_experts(layout: Layout) -> bool:
    return "expert" in layout.outer or any("expert" in part.factors for part in layout.parts)


def _without_experts(axes: Templates) -> Templates:
    """Labels of one expert's tensor, given those of all experts in one."""
    return tuple(
        replace(axis, span=1, only=True)
        if isinstance(axis, Layout) and _runs_over_experts(axis)
        else axis
        for axis in axes[1:]
    )


def _joined(tensor: Tensor, wholes: list[_Piece]) -> _Piece | None:
    """A stored tensor that holds several parameters one after the other along its first axis."""
    members: list[_Piece] = []
    start = 0
    while start < len(tensor):
        member = next(
            (
                piece
                for piece in wholes
                if piece.tensor.ndim == tensor.ndim
                and piece.tensor.shape[1:] == tensor.shape[1:]
                and _equal(piece.tensor, tensor[start : start + len(piece.tensor)])
            ),
            None,
        )
        if member is None:
            return None
        members.append(member)
        start += len(member.tensor)
    if not members or len({member.axes[1:] for member in members}) > 1:
        return None
    firsts = [member.axes[0] for member in members]
    if all(axis is None for axis in firsts):
        return replace(members[0], tensor=tensor)
    if not all(isinstance(axis, Layout) and not axis.outer for axis in firsts):
        return None
    layouts = [axis for axis in firsts if isinstance(axis, Layout)]
    if len({layout.site for layout in layouts}) > 1:
        return None
    parts = tuple(part for layout in layouts for part in layout.parts)
    return replace(
        members[0], axes=(replace(layouts[0], parts=parts), *members[0].axes[1:]), tensor=tensor
    )


def _same_numbers(key: str, piece: _Piece) -> bool:
    """Whether layers have the same numbers in both names, and experts come last in the key."""
    numbers, own = numbers_in(key), numbers_in(piece.name)
    if piece.expert is not None and piece.site:
        return numbers == [*own, str(piece.expert)]
    return numbers[: len(own)] == own


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _fingerprint(tensor: Tensor) -> tuple[object, ...]:
    flat = tensor.reshape(-1)
    return (
        tuple(tensor.shape),
        *(float(x) for x in flat[:3]),
        float(flat[math.floor(len(flat) / 2)]),
    )
