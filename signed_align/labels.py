"""The one operation of the package: moving a tensor whose axes say which space they index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from signed_align.errors import GaugeError

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


Axes: TypeAlias = tuple[Axis | None, ...]
"""One label per tensor axis; None marks an axis that no gauge moves."""


def transport(
    tensor: Tensor, axes: Sequence[Axis | None], gauge: Gauge, rows: slice = slice(None)
) -> Tensor:
    """Move ``tensor`` from the source's to the target's coordinates.

    Parameters
    ----------
    tensor : Tensor
        Any dtype and device.
    axes : sequence of Axis or None
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
    for position, axis in enumerate(axes):
        part = slice(None) if position else rows
        if axis is not None and axis.space in gauge.elements:
            element = gauge.elements[axis.space]
            tensor = element.apply(tensor, position, signed=axis.signed, part=part)
        elif position == 0:
            tensor = tensor[part]
    return tensor
