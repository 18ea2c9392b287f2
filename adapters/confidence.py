"""How much of an artifact stands on coordinates that its gauge is not sure of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from signed_align.adapters.artifact import Artifact
from signed_align.errors import UnreliableGaugeError
from signed_align.gauge import WEAK_MARGIN, Gauge
from signed_align.labels import Axes, Fused, transport
from signed_align.reliability import Verdict
from signed_align.signed_permutation import SignedPermutation

MOST_WEAK_ENERGY = 0.25
"""An artifact is not moved if more than this share of its energy is on weak coordinates."""

BLOCK_ENTRIES = 2**22
"""Energy is summed over blocks of rows of about so many entries."""


@dataclass(frozen=True)
class Confidence:
    """What share of an artifact stands on weak coordinates.

    Parameters
    ----------
    weak_energy : float or None
        The share of squared norm, mean over tensors, or for a list the share of its entries; None
        if the gauge has no margins where the artifact lives.
    margin : float
        Below it a coordinate is weak.
    worst : str or None
        The tensor with the largest share.
    """

    weak_energy: float | None
    margin: float
    worst: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the report."""
        return {
            "weak_energy": self.weak_energy,
            "weak_below": self.margin,
            "weakest_tensor": self.worst,
        }

    def require(self, artifact: Artifact) -> None:
        """Raise UnreliableGaugeError if too much of the artifact stands on weak coordinates."""
        if self.weak_energy is not None and self.weak_energy > MOST_WEAK_ENERGY:
            raise UnreliableGaugeError(
                f"{self.weak_energy:.1%} of the energy of {artifact.path.name} ({artifact.kind}) "
                f"is on coordinates that the gauge is not sure of (margin below {self.margin:.3f}; "
                f"at most {MOST_WEAK_ENERGY:.0%} was expected), so much of it would arrive "
                "nowhere in particular. Recover the gauge from more text or by other means, or "
                "pass --accept-weak.",
                self.to_dict(),
            )


def confidence_of(artifact: Artifact, gauge: Gauge) -> Confidence:
    """Say how much of an artifact stands on weak coordinates.

    Parameters
    ----------
    artifact : Artifact
        As it was read, in the source's coordinates.
    gauge : Gauge
        Leads from the source; its margins say which coordinates are weak.
    """
    verdict = Verdict.of(gauge)
    margin = verdict.needed_margin if verdict is not None else WEAK_MARGIN
    marks = _marks(gauge, margin)
    shares = {}
    for name, tensor, axes in _tensors(artifact):
        share = _weak_share(tensor, axes, marks)
        if share is not None:
            shares[name] = share
    if not shares:
        return Confidence(None, margin)
    worst = max(shares, key=lambda name: shares[name])
    return Confidence(sum(shares.values()) / len(shares), margin, worst)


def _marks(gauge: Gauge, margin: float) -> dict[str, Gauge]:
    """For each space a gauge that turns the sign of what is weak, and moves nothing."""
    marks = {}
    for space, known in gauge.inverse().margins.items():  # by source coordinate, as the artifact is
        turned = torch.where(known < margin, -1, 1).to(torch.int8)
        marks[space] = Gauge({space: SignedPermutation(torch.arange(len(known)), turned)})
    return marks


def _tensors(artifact: Artifact) -> Iterator[tuple[str, Tensor, Axes]]:
    for part in artifact.parts:
        for name, shape in part.file.shapes.items():
            axes = part.label(name, tuple(shape))
            if any(label is not None for label in axes):
                yield name, part.file.tensor(name), axes
    for what, label, mask in artifact.entries:
        yield what, mask, (label,)


def _weak_share(tensor: Tensor, axes: Axes, marks: Mapping[str, Gauge]) -> float | None:
    """The share of a tensor's energy at entries that any axis marks; None if none can."""
    masks = []
    for position, label in enumerate(axes):
        if label is None:
            continue
        covered = [position]
        if isinstance(label, Fused) and label.span > 1:
            covered = [place for place, other in enumerate(axes) if other == label]
        if position != covered[0]:
            continue
        here = [size if place in covered else 1 for place, size in enumerate(tensor.shape)]
        alone = [label.signed_everywhere if p in covered else None for p in range(len(axes))]
        masks += [
            transport(torch.ones(here), alone, marks[space]) < 0
            for space in label.spaces
            if space in marks
        ]
    if not masks:
        return None
    step = max(1, BLOCK_ENTRIES // max(1, tensor[:1].numel()))
    total, weak = 0.0, 0.0
    for start in range(0, len(tensor), step):
        rows = slice(start, start + step)
        energy = tensor[rows].detach().cpu().double().square().nan_to_num(0.0, 0.0, 0.0)
        marked = torch.zeros_like(energy, dtype=torch.bool)
        for mask in masks:
            marked |= mask if len(mask) == 1 else mask[rows]
        total += float(energy.sum(dtype=torch.float64))
        weak += float((energy * marked).sum(dtype=torch.float64))
    return weak / total if total > 0 else None
