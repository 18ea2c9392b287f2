"""Weight matching: every space's coordinates matched by the weights, in turn, until none changes.

With the elements of all other spaces held fixed, the inner product of the moved source and the
target over all weights is linear in a space's permutation, so the best one is an assignment, and
going round the spaces only ever raises it. That is Algorithm 1 of Ainsworth, Hayase and Srinivasa,
"Git Re-Basin", ICLR 2023, for permutations; here the same for the native group of each space,
signs included.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from signed_align.chart import RESIDUAL
from signed_align.checkpoint import Checkpoint
from signed_align.errors import CheckpointError
from signed_align.gauge import Gauge
from signed_align.groups import Group, Within
from signed_align.labels import Axes, Axis, Fused, Label, Section, transport
from signed_align.matching import Match, Objective, match
from signed_align.progress import track
from signed_align.refusals import require_finite
from signed_align.signed_permutation import SignedPermutation
from signed_align.site_matching import match_site
from signed_align.sites import SiteTensors, sites_of

MAX_ROUNDS = 20
"""Rounds over all spaces at most."""


class WeightMatching:
    """Two checkpoints whose spaces are matched by weights.

    Parameters
    ----------
    source, target : Checkpoint
        Of one architecture.
    partners : mapping of str to str
        The target's name of each of the source's weights.
    kinds : iterable of str
        The kinds of spaces to match.
    objective : Objective
        ``signed`` maximises the inner product over permutations alone, as Git Re-Basin does.
    cosines : bool
        Compare the directions of what runs along two coordinates, each tensor weighed by how much
        that is; margins are then on the scale of a cosine. False takes inner products as they
        are, as Git Re-Basin does.
    """

    def __init__(
        self,
        source: Checkpoint,
        target: Checkpoint,
        partners: Mapping[str, str],
        kinds: Iterable[str],
        objective: Objective,
        *,
        cosines: bool = True,
    ) -> None:
        self.source, self.target = source, target
        self.partners = partners
        self.objective = objective
        self.cosines = cosines
        self.sites = sites_of(source, kinds)
        self.axes = {name: source.chart.axes(name, source.shape(name)) for name in partners}

    def identity(self) -> Gauge:
        """The gauge that moves nothing, to start from."""
        groups = {RESIDUAL.space: self.source.spaces[RESIDUAL.space].group}
        for site in self.sites.values():
            groups |= site.groups
        return Gauge({name: SignedPermutation.identity(g.size) for name, g in groups.items()})

    def run(self, start: Gauge, *, seed: int | None = None) -> Gauge:
        """Go round the spaces from ``start`` until none changes.

        Parameters
        ----------
        start : Gauge
            Elements to begin with; sites it says nothing of are matched first.
        seed : int, optional
            Visit the spaces in random order, anew each round; by default sites as they come, then
            the residual stream.

        Returns
        -------
        Gauge
            With margins; its provenance says how many rounds it took, and whether the last one
            still changed something.
        """
        order = random.Random(seed)
        gauge, rounds, before = start, 0, {}
        for rounds in range(1, MAX_ROUNDS + 1):
            before = dict(gauge.elements)
            steps: list[SiteTensors | None] = [*self.sites.values(), None]
            if seed is not None:
                order.shuffle(steps)
            for site in track(steps, f"matching weights, round {rounds}", unit="space"):
                found = self.match_residual(gauge) if site is None else self.match(site, gauge)
                gauge = with_matches(gauge, found)
            if gauge.elements == before:
                break
        settled = gauge.elements == before
        provenance = {**gauge.provenance, "rounds": rounds, "settled": settled}
        return replace(gauge, provenance=provenance)

    def inner_product(self, gauge: Gauge) -> float:
        """The inner product of the moved source and the target over all weights: what rises."""
        total = 0.0
        for name in self.axes:
            x, y = self._pair(name, gauge)
            total += float((x * y).sum())
        return total

    # ---- one space ---------------------------------------------------------------------------

    @property
    def residual_rows(self) -> int:
        """How many numbers of either model each entry of the residual evidence rests on."""
        size = self.source.spaces[RESIDUAL.space].group.size
        along = {RESIDUAL, RESIDUAL.unsigned}
        return sum(
            math.prod(self.source.shape(name)) // size
            for name, axes in self.axes.items()
            if sum(label in along for label in axes) == 1 and len(axes) > 1
        )

    def match_residual(self, gauge: Gauge) -> dict[str, Match]:
        """Match the residual stream over all weights, the sites as ``gauge`` has them."""
        group = self.source.spaces[RESIDUAL.space].group
        others = Gauge({s: e for s, e in gauge.elements.items() if s != RESIDUAL.space})
        sums = {axis: torch.zeros(group.size, group.size) for axis in (RESIDUAL, RESIDUAL.unsigned)}
        weight = 0.0
        for name, axes in self.axes.items():
            places = [k for k, label in enumerate(axes) if label in sums]
            if len(places) != 1:
                continue
            x, y = self._pair(name, others)
            label = axes[places[0]]
            assert isinstance(label, Axis)
            gram = self._products(x, y, places[0])
            if gram is None:
                continue
            rows = x.numel() / group.size if self.cosines else 1.0
            sums[label] += gram * rows
            weight += rows
        evidence = [(label, gram / max(weight, 1.0)) for label, gram in sums.items() if gram.any()]
        if group.within in (Within.SIGNED_PERMUTATION, Within.PERMUTATION):
            return match_site({RESIDUAL.space: group}, evidence, self.objective)
        # gains have no part where a global sign is free: it would be weighed against them
        return {RESIDUAL.space: match(evidence[0][1].double(), self.objective, group.within)}

    def match(self, site: SiteTensors, gauge: Gauge) -> dict[str, Match]:
        """Match a site's spaces, all others as ``gauge`` has them."""
        others = Gauge({s: e for s, e in gauge.elements.items() if s not in site.groups})
        if site.has_experts:
            return self._match_experts(site, others)
        evidence = []
        for name in site.tensors:
            if name in self.axes:
                x, y = self._pair(name, others)
                evidence += list(self._evidence(site.groups, self.axes[name], x, y))
        return match_site(site.groups, evidence, self.objective)

    def _pair(self, name: str, others: Gauge) -> tuple[Tensor, Tensor]:
        """A source weight, moved by all other spaces, and its partner; cut to common rows."""
        origin, partner = self.source.chart.origin(name, others), self.partners[name]
        x, y = self.source.tensor(origin), self.target.tensor(partner)
        require_finite([(origin, x)], self.source.name)
        require_finite([(partner, y)], self.target.name)
        x, y = transport(x, self.axes[name], others).float(), y.float()
        count = min(len(x), len(y)) if x.ndim else 0
        return (x[:count], y[:count]) if count else (x, y)

    def _evidence(
        self, groups: Mapping[str, Group], axes: Axes, x: Tensor, y: Tensor
    ) -> Iterator[tuple[Label, Tensor]]:
        """The inner products of what runs along the axis of a site."""
        mine = [
            position
            for position, label in enumerate(axes)
            if label is not None and any(space in groups for space in label.spaces)
        ]
        if len(mine) == 1:
            label = axes[mine[0]]
            assert label is not None
            gram = self._products(x, y, mine[0])
            if gram is not None:
                yield label, gram

    def _products(self, x: Tensor, y: Tensor, position: int) -> Tensor | None:
        """Inner products, or cosines, of slices of both along one axis, shape (n, n).

        None for the cosines of single numbers, which say nothing but their sign.
        """
        x = x.movedim(position, 0).reshape(x.shape[position], -1)
        y = y.movedim(position, 0).reshape(y.shape[position], -1)
        if not self.cosines:
            return x @ y.T
        if x.shape[1] < 2:
            return None
        return torch.nn.functional.normalize(x, dim=1) @ torch.nn.functional.normalize(y, dim=1).T

    # ---- experts -----------------------------------------------------------------------------

    def _match_experts(self, site: SiteTensors, others: Gauge) -> dict[str, Match]:
        """Experts by their rows of the router, then the units of each pair of experts."""
        units = next(space for space in site.groups if space.startswith("mlp:"))
        experts = next((space for space in site.groups if space.startswith("experts:")), None)
        count, size = site.groups[units].blocks, site.groups[units].block_size
        found: dict[str, Match] = {}
        pairs = torch.arange(count)
        if experts is not None:
            group = {experts: site.groups[experts]}
            evidence = []
            for name, axes in site.tensors.items():
                if not any(label is not None and units in label.spaces for label in axes):
                    evidence += list(self._evidence(group, axes, *self._pair(name, others)))
            found |= match_site(group, evidence, self.objective)
            pairs = found[experts].element.perm
        inside = {units: Group(size, site.groups[units].within)}
        perm, sign, margin = [], [], []
        for expert in range(count):
            origin = int(pairs[expert])
            evidence = []
            for x, y, axes in self._expert_tensors(site, units, origin, expert):
                moved = transport(x, axes, others).float()
                evidence += list(self._evidence(inside, axes, moved, y.float()))
            unit = match_site(inside, evidence, self.objective)[units]
            perm.append(unit.element.perm + origin * size)
            sign.append(unit.element.sign)
            margin.append(unit.margin)
        element = SignedPermutation(torch.cat(perm), torch.cat(sign))
        return found | {units: Match(element, torch.cat(margin))}

    def _expert_tensors(
        self, site: SiteTensors, units: str, origin: int, expert: int
    ) -> Iterator[tuple[Tensor, Tensor, Axes]]:
        """Weights of the source's expert ``origin`` and the target's ``expert``, with labels."""
        for name, axes in site.tensors.items():
            label = next(
                (label for label in axes if isinstance(label, Fused) and units in label.spaces),
                None,
            )
            if label is None:
                continue
            inner = tuple(_inside(axis, units) if axis == label else axis for axis in axes)
            partner = self.target.tensor(self.partners[name])
            if label.only is None:
                yield self.source.tensor(name)[origin], partner[expert], inner[1:]
            elif label.only == expert:
                before, _, after = name.rpartition(f".{expert}.")
                yield self.source.tensor(f"{before}.{origin}.{after}"), partner, inner


def _inside(label: Label | None, units: str) -> Label:
    """The label of one expert's axis of units, given that of all experts' axes."""
    assert isinstance(label, Fused)
    sections = tuple(
        Section(
            section.shape,
            tuple(
                (axis, tuple(k - 1 for k in which if k))
                for axis, which in section.axes
                if axis.space == units
            ),
        )
        for section in label.sections
    )
    return Fused(label.outer[1:], sections)


def with_matches(gauge: Gauge, matches: Mapping[str, Match]) -> Gauge:
    """The gauge with further spaces, or other elements in their place."""
    return replace(
        gauge,
        elements={**gauge.elements, **{space: m.element for space, m in matches.items()}},
        margins={**gauge.margins, **{space: m.margin for space, m in matches.items()}},
    )


def partners_of(source: Checkpoint, target: Checkpoint) -> dict[str, str]:
    """The target's name of each of the source's weights: prefixes may differ.

    Raises CheckpointError if a weight has another shape, but for its number of rows.
    """
    partners = source.chart.partners(source.files, target.files)
    for name, partner in partners.items():
        if source.shape(name)[1:] != target.shape(partner)[1:]:
            raise CheckpointError(
                f"{name!r} has shape {source.shape(name)} in {source.name} and "
                f"{target.shape(partner)} in {target.name}; no gauge leads between them."
            )
    return partners
