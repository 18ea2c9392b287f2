"""Whether there is a gauge between two models at all, and whether it moves anything.

An assignment always finds partners, between unrelated models too. What tells a partner from the
best of many strangers is its margin: by how far its correlation exceeds that of every other
candidate.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from signed_align.chart import RESIDUAL
from signed_align.errors import GaugeError, SignedAlignWarning, UnreliableGaugeError
from signed_align.gauge import BASELINES, WEAK_MARGIN, Gauge
from signed_align.matching import Match
from signed_align.signed_permutation import SignedPermutation

NOISE_FACTOR = 2.0
"""A margin is sure above this many standard deviations, 1/√n, of a correlation of n samples.

Between unrelated samples of 48 coordinates or more, independent or driven by a few common factors,
less than a third of the coordinates have a margin above it.
"""

CONTROL = "control"
"""The key of a gauge's provenance that says that it was recovered as a negative control."""

RELIABLE_SHARE = 0.5
"""A gauge is reliable if at least this share of its coordinates is sure."""


class Finding(str, Enum):
    """What the evidence says of two models' residual coordinates."""

    SAME_COORDINATES = "same_coordinates"
    """Every sure coordinate stays where it is, with its sign: what lives there fits as it is."""

    GAUGE = "gauge"
    """Most coordinates have a sure partner, and some move."""

    NO_GAUGE = "no_gauge"
    """Too few coordinates have a sure partner: the models may be unrelated."""


@dataclass(frozen=True)
class Verdict:
    """What a recovered gauge is worth.

    Parameters
    ----------
    finding : Finding
        The verdict.
    sure_fraction : float
        The share of coordinates whose margin is at least ``needed_margin``; along a path, on its
        weakest step.
    needed_margin : float
        The margin, in |correlation|, above which a partner is sure at this number of samples.
    moved_fraction : float
        The share of coordinates that are sure and move, or change their sign.
    """

    finding: Finding
    sure_fraction: float
    needed_margin: float
    moved_fraction: float

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON, as it stands in a gauge's provenance."""
        return {
            "finding": self.finding.value,
            "sure_fraction": self.sure_fraction,
            "needed_margin": self.needed_margin,
            "moved_fraction": self.moved_fraction,
        }

    @classmethod
    def of(cls, gauge: Gauge) -> Verdict | None:
        """The verdict that a gauge was recovered with; None if it was constructed.

        Raises
        ------
        GaugeError
            If what its provenance records is no verdict.
        """
        recorded = gauge.provenance.get("verdict")
        if recorded is None:
            return None
        try:
            share, needed, moved = (
                recorded[name] for name in ("sure_fraction", "needed_margin", "moved_fraction")
            )
            if not (0 <= share <= 1 and 0 <= needed <= NOISE_FACTOR and 0 <= moved <= 1):
                raise ValueError("out of range")
            return cls(Finding(recorded["finding"]), float(share), float(needed), float(moved))
        except (KeyError, TypeError, ValueError) as error:
            raise GaugeError(
                "the verdict that the gauge records is damaged: expected a finding, two shares and "
                "a margin; recover the gauge again."
            ) from error

    def __str__(self) -> str:
        found = (
            f"{self.sure_fraction:.1%} of the coordinates are sure (margin "
            f"{self.needed_margin:.3f} or more)"
        )
        if self.finding is Finding.SAME_COORDINATES:
            return (
                f"same coordinates in the residual stream: {found}, and each of these is itself; "
                "artifacts there fit as they are"
            )
        if self.finding is Finding.GAUGE:
            return f"a gauge: {found}, {self.moved_fraction:.1%} are sure and move"
        return f"no reliable gauge: only {found}"


def sure_margin(samples: int) -> float:
    """The margin above which a partner is sure, in a correlation of so many samples."""
    return max(WEAK_MARGIN, NOISE_FACTOR / math.sqrt(max(samples, 1)))


def judge(found: Match, samples: int) -> Verdict:
    """Say what a sign-marginalised match is worth.

    Parameters
    ----------
    found : Match
        What the assignment found: element and margins of d coordinates.
    samples : int
        How many independent samples the correlation rests on: tokens of text, or rows of token
        matrices.
    """
    needed = sure_margin(samples)
    sure = found.margin >= needed
    return _verdict(_share(sure), needed, sure, found.element)


def judge_path(steps: Sequence[Verdict], composed: SignedPermutation, margin: Tensor) -> Verdict:
    """Say what a composition is worth: as much as its weakest step.

    That both ends have the same coordinates is said only where at least half of the coordinates
    are sure all along the path: coordinates that are lost on the way do not speak for it.

    Parameters
    ----------
    steps : sequence of Verdict
        The verdicts of the steps.
    composed : SignedPermutation
        Their composition, on d coordinates.
    margin : Tensor, shape (d,)
        The smallest margin along the path of each target coordinate.
    """
    needed = max(step.needed_margin for step in steps)
    weakest = min(step.sure_fraction for step in steps)
    return _verdict(weakest, needed, margin >= needed, composed)


def _verdict(share: float, needed: float, sure: Tensor, element: SignedPermutation) -> Verdict:
    moved = sure & element.displaced
    if share < RELIABLE_SHARE:
        finding = Finding.NO_GAUGE
    elif bool(moved.any()) or _share(sure) < RELIABLE_SHARE:
        finding = Finding.GAUGE
    else:
        finding = Finding.SAME_COORDINATES
    return Verdict(finding, share, needed, _share(moved))


def _share(mask: Tensor) -> float:
    return float(mask.double().mean())


def require_reliable(gauge: Gauge) -> None:
    """Raise UnreliableGaugeError if a gauge was recovered from evidence that speaks for none."""
    verdict = Verdict.of(gauge)
    if verdict is None or verdict.finding is not Finding.NO_GAUGE:
        return
    source, target = _ends(gauge)
    found = (
        f"fewer than {RELIABLE_SHARE:.0%} of the coordinates ({verdict.sure_fraction:.1%}) have a "
        f"partner with a margin of {verdict.needed_margin:.3f} or more"
    )
    if CONTROL in gauge.provenance:
        raise UnreliableGaugeError(
            f"as it should be, no gauge is found between {gauge.provenance[CONTROL]} of {source} "
            f"and {target}: {found}.",
            {**verdict.to_dict(), CONTROL: gauge.provenance[CONTROL]},
        )
    raise UnreliableGaugeError(
        f"no reliable gauge leads from {source} to {target}: {found}. The models may be unrelated, "
        "rotated against each other, or trained too far apart. More text, weights instead of "
        "activations or the reverse, or checkpoints in between may help; to go on all the same, "
        "pass --accept-weak (in a recipe accept_weak: true, from Python accept_weak=True).",
        verdict.to_dict(),
    )


def warn_of_verdict(gauge: Gauge) -> None:
    """Warn, before something is moved, if the verdict says that nothing should be.

    So too if the gauge is a baseline, which is not the one that the verdict speaks of.
    """
    verdict = Verdict.of(gauge)
    objective = gauge.provenance.get("objective")
    baseline = objective in BASELINES
    if verdict is None or (verdict.finding is Finding.GAUGE and not baseline):
        return
    source, target = _ends(gauge)
    if verdict.finding is Finding.GAUGE:
        message = (
            f"the gauge from {source} to {target} is the baseline {objective!r}, which gives every "
            "coordinate the sign +: what is moved through it breaks unless these signs are right."
        )
    elif verdict.finding is Finding.SAME_COORDINATES:
        message = (
            f"{source} and {target} have the same coordinates in the residual stream: what lives "
            f"there fits as it is, and {_moved_all_the_same(gauge)}."
        )
    else:
        message = (
            f"the gauge from {source} to {target} was accepted although it is not reliable "
            f"({verdict})."
        )
    warnings.warn(message, SignedAlignWarning, stacklevel=3)


def _moved_all_the_same(gauge: Gauge) -> str:
    """What a gauge between models with the same coordinates moves, in words."""
    moved = {space for space, element in gauge.elements.items() if not element.is_identity}
    if RESIDUAL.space in moved:
        count = int(gauge.element(RESIDUAL.space).displaced.sum())
        return f"what the gauge moves there are {count} coordinates that it is not sure of"
    return "the gauge moves other spaces only" if moved else "the gauge moves nothing"


def _ends(gauge: Gauge) -> list[str]:
    return [end.name if end else "a model" for end in (gauge.source, gauge.target)]
