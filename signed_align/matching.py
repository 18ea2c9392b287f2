"""From paired samples to a group element: correlation, then a linear assignment.

The method is sign-marginalised: an assignment on |C| finds each coordinate's partner whatever its
sign, and the sign of the matched correlation is then the sign of the gauge. The other two
objectives are baselines that permutation-only tools amount to.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from signed_align.errors import GaugeError
from signed_align.groups import Within
from signed_align.signed_permutation import SignedPermutation


class Objective(str, Enum):
    """What the assignment maximises over permutations π, given the correlation matrix C."""

    SIGN_MARGINALIZED = "sign_marginalized"
    """Σ |C[i, π(i)]|; the sign is read off afterwards."""

    SIGNED = "signed"
    """Σ C[i, π(i)], every sign +1. Can be right only where the true sign is +1."""

    PERMUTATION = "permutation"
    """The sign-marginalised permutation, every sign forced to +1."""


class Correlation:
    """Streamed Pearson correlation between source and target coordinates on the same samples.

    Several streams (layers, weight matrices) can be pooled into one d × d matrix: each is first
    centred and scaled per coordinate by its own first batch, so that no stream drowns the others,
    and what is left of mean and scale is removed exactly at the end. Memory is one d × d matrix
    and O(d) per stream, however many samples are added.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.samples = 0
        self._scales: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._sum_source = torch.zeros(size, dtype=torch.float64)
        self._sum_target = torch.zeros(size, dtype=torch.float64)
        self._square_source = torch.zeros(size, dtype=torch.float64)
        self._square_target = torch.zeros(size, dtype=torch.float64)
        self._product = torch.zeros(size, size, dtype=torch.float64)

    def add(self, source: Tensor, target: Tensor, stream: str = "") -> None:
        """Add paired samples of shape (n, d); raises GaugeError if any value is not finite."""
        if not len(source):
            return
        source, target = source.float(), target.float()
        if not (torch.isfinite(source).all() and torch.isfinite(target).all()):
            raise GaugeError(
                "the samples hold NaN or infinite values, so no correlation can be trusted; "
                "check the checkpoints, or run them in float32."
            )
        if stream not in self._scales:
            self._scales[stream] = (*_mean_and_scale(source), *_mean_and_scale(target))
        mean_source, scale_source, mean_target, scale_target = self._scales[stream]
        x = (source - mean_source) / scale_source
        y = (target - mean_target) / scale_target
        self.samples += len(x)
        self._sum_source += x.sum(0, dtype=torch.float64)
        self._sum_target += y.sum(0, dtype=torch.float64)
        self._square_source += x.square().sum(0, dtype=torch.float64)
        self._square_target += y.square().sum(0, dtype=torch.float64)
        self._product += x.T @ y

    def matrix(self) -> Tensor:
        """The correlation matrix C, shape (d, d): source coordinates by target coordinates.

        A coordinate that never varies correlates with nothing: its row or column is 0.
        """
        n = max(self.samples, 1)
        covariance = self._product / n - torch.outer(self._sum_source, self._sum_target) / n**2
        variance_source = self._square_source / n - (self._sum_source / n).square()
        variance_target = self._square_target / n - (self._sum_target / n).square()
        scale = torch.outer(variance_source.clamp_min(0), variance_target.clamp_min(0)).sqrt()
        return torch.where(scale > 1e-12, covariance / scale.clamp_min(1e-12), 0.0).clamp(-1, 1)


def _mean_and_scale(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per coordinate, computed where no square leaves the range."""
    samples = samples.double()
    deviation = samples.std(0, correction=0).float()
    scale = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    return samples.mean(0).float(), scale


@dataclass(frozen=True)
class Match:
    """A recovered element and, per target coordinate, the margin it was matched with."""

    element: SignedPermutation
    margin: Tensor


def match(
    correlation: Tensor,
    objective: Objective = Objective.SIGN_MARGINALIZED,
    group: Within = Within.SIGNED_PERMUTATION,
) -> Match:
    """Find the group element that a correlation matrix speaks for.

    Parameters
    ----------
    correlation : Tensor, shape (d, d)
        Source coordinates by target coordinates, entries in [-1, 1].
    objective : Objective
        What to maximise.
    group : Within
        The group to stay in. Where only a global sign is free, the sign-marginalised objective is
        the better of the assignments on C and on -C.

    Returns
    -------
    Match
        The element, and margins of shape (d,): the matched score minus the best score of any
        other candidate in the coordinate's row or column.

    References
    ----------
    The assignment is :func:`scipy.optimize.linear_sum_assignment`.
    """
    if not torch.isfinite(correlation).all():
        raise GaugeError("the correlation matrix holds NaN or infinite values.")
    if objective is Objective.SIGNED:
        scores = {1: correlation}
    elif group is Within.SIGNED_PERMUTATION:
        scores = {1: correlation.abs()}
    elif group is Within.PERMUTATION_AND_GLOBAL_SIGN:
        scores = {1: correlation, -1: -correlation}
    else:
        scores = {1: correlation}
    perms = {sign: _assignment(score) for sign, score in scores.items()}
    target = torch.arange(len(correlation))
    best = max(scores, key=lambda sign: float(scores[sign][perms[sign], target].sum()))
    perm = perms[best]
    sign = torch.ones(len(perm), dtype=torch.int8)
    if objective is Objective.SIGN_MARGINALIZED:
        if group is Within.SIGNED_PERMUTATION:
            sign[correlation[perm, target] < 0] = -1
        else:
            sign *= best
    return Match(SignedPermutation(perm, sign), _margins(scores[best], perm))


def _assignment(score: Tensor) -> Tensor:
    """The permutation with the highest total score: each target coordinate's source, shape (d,)."""
    rows, columns = linear_sum_assignment(score.numpy(), maximize=True)
    perm = torch.empty(len(rows), dtype=torch.int64)
    perm[torch.from_numpy(columns)] = torch.from_numpy(rows)
    return perm


def _margins(score: Tensor, perm: Tensor) -> Tensor:
    if len(perm) == 1:
        return score.reshape(1).abs().float()
    target = torch.arange(len(perm))
    matched = score[perm, target]
    others = score.clone()
    others[perm, target] = -torch.inf
    rival = torch.maximum(others.amax(dim=1)[perm], others.amax(dim=0))
    return (matched - rival).float()
