"""Matching inside a site: heads, their coordinates, experts and units, in one native element.

The spaces of a site (an attention module, an MLP, a mixture of experts) cannot be matched one by
one: key-value heads carry their query heads, keys and values along, experts their units. The
assignment is therefore nested. Every pair of a source block with a target block (a key-value head,
an expert) is solved inside, which says what the pair is worth; one more assignment then pairs the
blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from signed_align.errors import GaugeError
from signed_align.groups import Group, Within
from signed_align.labels import Axis, Fused, Label, Section, ravel
from signed_align.matching import Match, Objective, _assignment, _margins
from signed_align.signed_permutation import SignedPermutation

EXHAUSTIVE_ENTRIES = 2**27
"""Up to this many candidate pairs of coordinates, every pair of blocks is solved exactly.

The count is (pairs of blocks) × Σ (coordinates per block)², over the spaces whose coordinates
permute. 32 heads of 128 values come to 2²⁴. Beyond it, blocks are paired by an upper bound of what
they are worth, and only the chosen pairs are solved.
"""

ALTERNATIONS = 10
"""Most rounds of query heads given coordinates, coordinates given query heads."""

_SIGNED = (Within.SIGNED_PERMUTATION, Within.PLANE_SIGNS, Within.BLOCK_SIGN)
_SUPPORTED = (*_SIGNED, Within.PERMUTATION, Within.NOTHING)
_BLOCK = ""
"""Stands for the space of one coordinate per block (or query head): it moves only with it."""


def match_site(
    groups: Mapping[str, Group],
    evidence: Sequence[tuple[Label, Tensor]],
    objective: Objective = Objective.SIGN_MARGINALIZED,
) -> dict[str, Match]:
    """Find the element of a site's native group that the evidence speaks for.

    What is maximised is the sum, over all evidence, of the entries that pair a source position
    with the target position it moves to, each with the signs of the coordinates that its label
    calls signed.

    Parameters
    ----------
    groups : mapping of str to Group
        The native group of every space of the site, by name (``kind:path``). ``heads`` are query
        heads in blocks, one block per key-value head; ``experts`` are themselves the blocks that
        units lie in, and their own blocks are the groups of experts that routing tells apart. All
        other kinds are coordinates inside a block. Spaces with equally many blocks share them.
    evidence : sequence of (Label, Tensor)
        What the positions of one tensor axis index, and a matrix of shape (n, n), floating-point:
        the similarity of source position i with target position j, in [-1, 1] if margins are to
        be on that scale. Entries between different sections of the axis are not looked at.
        Axes of spaces that ``groups`` does not name are taken not to move.
    objective : Objective
        What to maximise, as in :func:`~signed_align.matching.match`.

    Returns
    -------
    dict of str to Match
        One for every space of ``groups``, in its order. Block permutations agree. Margins, shape
        (size,), float32, are means over the evidence on a coordinate:

        * coordinates that permute: the matched score minus the best rival's in its row or column
          inside the chosen pair of blocks, but no more than the absolute signed score;
        * coordinates that only change sign: the absolute signed score of their plane or block,
          which is half its distance to the other sign;
        * heads and experts: the score of the matched pair of blocks minus that of the best rival
          in its row or column, or the query head's own margin inside the block if that is less;
        * where there is no rival: the matched score itself.

    Raises
    ------
    GaugeError
        If evidence is not finite, or does not fit its label or the groups.

    Notes
    -----
    The assignment of blocks is exact up to :data:`EXHAUSTIVE_ENTRIES`, given what each pair is
    worth. Inside a pair, several query heads and the coordinates they share are solved by
    alternation, which can end in a local optimum; everything else inside a pair is exact.
    """
    for space, group in groups.items():
        if group.within not in _SUPPORTED:
            raise GaugeError(f"the group {group.within.value!r} of {space!r} is not one of a site.")
    runs = [run for label, gram in evidence for run in _runs(label, gram, groups)]
    found: dict[str, Match] = {}
    for count in sorted({_block_count(space, group) for space, group in groups.items()}):
        mine = {
            space: group for space, group in groups.items() if _block_count(space, group) == count
        }
        blocks = _Blocks(mine, [run for run in runs if run.blocks == count], objective)
        found.update(blocks.match())
    return {space: found[space] for space in groups}


def _kind(space: str) -> str:
    return space.partition(":")[0]


def _block_count(space: str, group: Group) -> int:
    return group.size if _kind(space) == "experts" else group.blocks


# ---- reading labels --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """The evidence of one section of an axis, in the order of blocks, query heads, coordinates.

    ``gram`` has shape (B, R, C, B, R, C), source first: R is 1 where the section does not tell
    query heads apart, C is 1 where it does not tell coordinates apart. Each entry is the sum over
    ``repeats`` positions. A run with ``only`` is of that block alone; its B is 1.
    """

    space: str
    signed: bool
    gram: Tensor
    blocks: int
    repeats: int
    only: int | None

    def between(self, source: int, target: int) -> Tensor | None:
        """The entries of one pair of blocks, shape (R, C, R, C); None if it has none."""
        if self.only is None:
            return self.gram[source, :, :, target]
        return self.gram[0, :, :, 0] if source == target == self.only else None


def _runs(label: Label, gram: Tensor, groups: Mapping[str, Group]) -> Iterator[_Run]:
    """The evidence of each section of a labelled axis that indexes any space of ``groups``."""
    if isinstance(label, Axis):
        label = Fused((), (Section((len(gram),), ((label, (0,)),)),))
    if gram.shape != (label.size, label.size):
        raise GaugeError(
            f"evidence of shape {tuple(gram.shape)} does not fit an axis of {label.size} positions."
        )
    if not all(math.isfinite(extreme) for extreme in gram.aminmax()):
        raise GaugeError("the evidence for a site's coordinates holds NaN or infinite values.")
    offset = 0
    for section in label.sections:
        axes = tuple((axis, which) for axis, which in section.axes if axis.space in groups)
        if axes:
            yield _run(label, Section(section.shape, axes), offset, gram, groups)
        offset += math.prod(section.shape)


def _run(
    label: Fused, section: Section, offset: int, gram: Tensor, groups: Mapping[str, Group]
) -> _Run:
    """One section's evidence, brought into the order of blocks, query heads and coordinates."""
    names = " and ".join(axis.space for axis, _ in section.axes)
    counts = {_block_count(axis.space, groups[axis.space]) for axis, _ in section.axes}
    inner = [axis for axis, _ in section.axes if _kind(axis.space) not in ("heads", "experts")]
    if len(counts) > 1 or len(inner) > 1:
        raise GaugeError(f"{names} lie on one axis in a way that cannot be matched.")
    blocks = counts.pop()
    index, position = _entries(label, section, offset)
    sizes, places = _places((*label.outer, *section.shape), section, index, blocks, groups)
    if label.only is not None:
        sizes[0], places[0] = 1, torch.zeros_like(position)
    key = ravel(places, sizes)
    if not torch.equal(key.sort().values, torch.arange(math.prod(sizes))):
        raise GaugeError(f"{names} do not share their blocks on one axis.")
    ordered = _reordered(gram, position[key.argsort()].reshape(sizes))
    repeats = sizes[-1]
    return _Run(
        space=inner[0].space if inner else _BLOCK,
        signed=bool(inner) and inner[0].signed,
        gram=ordered.diagonal(0, 3, 7).sum(-1) if repeats > 1 else ordered[:, :, :, 0, ..., 0],
        blocks=blocks,
        repeats=repeats,
        only=label.only,
    )


def _entries(label: Fused, section: Section, offset: int) -> tuple[list[Tensor], Tensor]:
    """The index along every factor, and the position on the axis, of a section's entries."""
    factors = (*label.outer, *section.shape)
    index = list(torch.unravel_index(torch.arange(math.prod(factors)), factors))
    if label.only is not None:
        here = index[0] == label.only
        index = [values[here] for values in index]
    outer = len(label.outer)
    stride = sum(math.prod(other.shape) for other in label.sections)
    first = ravel(index[:outer], label.outer) * stride
    position = first + offset + ravel(index[outer:], section.shape)
    return index, position - (label.only or 0) * label.size


def _places(
    factors: Sequence[int],
    section: Section,
    index: Sequence[Tensor],
    blocks: int,
    groups: Mapping[str, Group],
) -> tuple[list[int], list[Tensor]]:
    """How many blocks, query heads, coordinates and repeats a section has; each entry's place."""
    nowhere = torch.zeros_like(index[0])
    block, query, coordinate = nowhere, nowhere, nowhere
    queries, coordinates = 1, 1
    for axis, which in section.axes:
        group = groups[axis.space]
        size = math.prod(factors[k] for k in which)
        if size != group.size:
            raise GaugeError(
                f"the evidence has {size} coordinates in the space {axis.space!r}, the group "
                f"{group.size}."
            )
        number = ravel([index[k] for k in which], [factors[k] for k in which])
        if _kind(axis.space) == "experts":
            block = number
            continue
        block = number // group.block_size
        if _kind(axis.space) == "heads":
            query, queries = number % group.block_size, group.block_size
        else:
            coordinate, coordinates = number % group.block_size, group.block_size
    free = [k for k in range(len(factors)) if all(k not in which for _, which in section.axes)]
    repeat = ravel([index[k] for k in free], [factors[k] for k in free])
    repeats = math.prod(factors[k] for k in free)
    return [blocks, queries, coordinates, repeats], [block, query, coordinate, repeat]


def _reordered(gram: Tensor, position: Tensor) -> Tensor:
    """Rows and columns of ``gram`` at ``position``, of any shape: shape (*position, *position).

    A view where the position is linear in its indices, as on nearly every axis: no copy is made
    of what may be gigabytes.
    """
    first = int(position.flatten()[0])
    steps, linear = [], torch.full((), first)
    for axis, size in enumerate(position.shape):
        line = position.movedim(axis, 0).reshape(size, -1)[:, 0]
        steps.append(int(line[1] - line[0]) if size > 1 else 0)
        linear = linear[..., None] + torch.arange(size) * steps[-1]
    if not torch.equal(linear, position):
        rows = position.flatten()
        copy = gram.index_select(0, rows).index_select(1, rows)
        return copy.reshape(*position.shape, *position.shape)
    strides = [step * stride for stride in gram.stride() for step in steps]
    origin = gram.storage_offset() + first * sum(gram.stride())
    return gram.as_strided((*position.shape, *position.shape), strides, origin)


# ---- solving ---------------------------------------------------------------------------------


@dataclass
class _Evidence:
    """What speaks for the coordinates of one space in one pair of blocks.

    ``even`` and ``odd`` (C, C) are the scores without and with a sign; ``by_query`` holds those
    that depend on which query heads are paired, as (odd or not, (R, C, R, C)). ``count`` is the
    number of entries per coordinate, ``count_by_query`` that of entries per query head.
    """

    even: Tensor
    odd: Tensor
    by_query: list[tuple[bool, Tensor]] = field(default_factory=list)
    count: int = 0
    count_by_query: int = 0

    def given(self, pairing: Tensor) -> tuple[Tensor, Tensor]:
        """Even and odd scores, (C, C) each, where target query head r comes from pairing[r]."""
        scores = [self.even.clone(), self.odd.clone()]
        queries = torch.arange(len(pairing))
        for odd, gram in self.by_query:
            scores[odd] += gram[pairing, :, queries, :].sum(0, dtype=torch.float64)
        return scores[0], scores[1]

    def before_pairing(self) -> tuple[Tensor, Tensor]:
        """Scores before query heads are paired: their own, or, without any, means over pairings."""
        scores = [self.even.clone(), self.odd.clone()]
        if self.by_query and not (self.even.any() or self.odd.any()):
            for odd, gram in self.by_query:
                scores[odd] += gram.sum((0, 2), dtype=torch.float64) / len(gram)
        return scores[0], scores[1]


@dataclass(frozen=True)
class _Choice:
    """How the coordinates of one space move in one pair of blocks; ``margin`` is of the sums."""

    perm: Tensor
    sign: Tensor
    total: float
    margin: Tensor


@dataclass(frozen=True)
class _Inside:
    """The solution of one pair of blocks: query heads, coordinates by space, what it is worth.

    ``total`` is a mean over the entries of the evidence; ``query_margin`` has shape (R,).
    """

    pairing: Tensor
    query_margin: Tensor
    coordinates: dict[str, Match]
    total: float


class _Blocks:
    """The spaces of a site that have equally many blocks, and the evidence about them."""

    def __init__(
        self, groups: Mapping[str, Group], runs: Sequence[_Run], objective: Objective
    ) -> None:
        self.groups = groups
        self.runs = runs
        self.objective = objective
        space, group = next(iter(groups.items()))
        self.count = _block_count(space, group)
        self.inner = {
            space: group
            for space, group in groups.items()
            if _kind(space) not in ("heads", "experts")
        }
        self.inner[_BLOCK] = Group(self.count, Within.NOTHING, blocks=self.count)
        heads = [group for space, group in groups.items() if _kind(space) == "heads"]
        self.queries = heads[0].block_size if heads else 1
        self.queries_move = bool(heads) and heads[0].within.permutes
        self.fixed = self.count == 1 or any(
            not group.blocks_move for space, group in groups.items() if _kind(space) != "experts"
        )
        if not self.fixed and any(run.only is not None for run in runs):
            raise GaugeError(
                "the evidence on single experts says nothing of how experts move; stack it."
            )

    def match(self) -> dict[str, Match]:
        """The element and margins of every space."""
        blocks = torch.arange(self.count)
        scores = None
        if not self.fixed:
            scores = self._block_scores()
            blocks = self._assign_blocks(scores)
        insides = [self.solve(int(source), target) for target, source in enumerate(blocks)]
        margin = torch.tensor([inside.total for inside in insides])
        if scores is not None:
            beyond = _margins(scores, blocks)
            margin = torch.where(torch.isfinite(beyond), beyond, margin)
        return {space: self._gathered(space, blocks, insides, margin) for space in self.groups}

    def _gathered(
        self, space: str, blocks: Tensor, insides: Sequence[_Inside], margin: Tensor
    ) -> Match:
        """The match of one space, put together from those inside the blocks."""
        if _kind(space) == "experts":
            return Match(_permutation(blocks), margin)
        first = blocks[:, None] * self.groups[space].block_size
        if _kind(space) == "heads":
            perm = first + torch.stack([inside.pairing for inside in insides])
            own = torch.stack([inside.query_margin for inside in insides])
            return Match(
                _permutation(perm.reshape(-1)), torch.minimum(own, margin[:, None]).reshape(-1)
            )
        parts = [inside.coordinates[space] for inside in insides]
        perm = first + torch.stack([part.element.perm for part in parts])
        sign = torch.cat([part.element.sign for part in parts])
        if self.objective is Objective.PERMUTATION:
            sign = torch.ones_like(sign)
        return Match(
            SignedPermutation(perm.reshape(-1), sign), torch.cat([part.margin for part in parts])
        )

    # ---- pairs of blocks ---------------------------------------------------------------------

    def _block_scores(self) -> Tensor:
        """What each pair of blocks is worth, shape (B, B); -inf where it is not allowed."""
        allowed = self._allowed()
        permuting = [group for group in self.inner.values() if group.within.permutes]
        entries = int(allowed.sum()) * sum(group.block_size**2 for group in permuting)
        relaxed = entries > EXHAUSTIVE_ENTRIES
        scores = torch.full((self.count, self.count), -torch.inf, dtype=torch.float64)
        for source, target in allowed.nonzero().tolist():
            scores[source, target] = self.solve(source, target, relaxed=relaxed).total
        return scores

    def _sets(self) -> tuple[int, bool]:
        """How many sets the blocks lie in, inside which they permute; whether the sets move."""
        for space, group in self.groups.items():
            if _kind(space) == "experts":
                return group.blocks, group.blocks_move
        return 1, False

    def _allowed(self) -> Tensor:
        """Which source block may go to which target block, shape (B, B), bool."""
        sets, sets_move = self._sets()
        number = torch.arange(self.count) // (self.count // sets)
        return (number[:, None] == number) | sets_move

    def _assign_blocks(self, scores: Tensor) -> Tensor:
        """The source block of each target block, shape (B,): best sets of the best inside them."""
        sets, sets_move = self._sets()
        if sets == 1:
            return _assignment(scores)
        size = self.count // sets
        parts = scores.reshape(sets, size, sets, size)
        worth = torch.full((sets, sets), -torch.inf, dtype=torch.float64)
        perms = torch.zeros(sets, sets, size, dtype=torch.int64)
        pairs = [(a, b) for a in range(sets) for b in range(sets) if sets_move or a == b]
        for a, b in pairs:
            perms[a, b] = _assignment(parts[a, :, b])
            worth[a, b] = parts[a, :, b][perms[a, b], torch.arange(size)].sum()
        order = _assignment(worth) if sets_move else torch.arange(sets)
        chosen = perms[order, torch.arange(sets)]
        return (order[:, None] * size + chosen).reshape(-1)

    # ---- inside a pair -----------------------------------------------------------------------

    def solve(self, source: int, target: int, *, relaxed: bool = False) -> _Inside:
        """Solve one pair of blocks.

        ``relaxed`` lets source coordinates be used more than once, which is cheap and gives an
        upper bound of the total (where query heads do not have to be paired).
        """
        evidence = self._between(source, target)
        choices = {
            space: self._choose(space, *found.before_pairing(), relaxed=relaxed)
            for space, found in evidence.items()
        }
        pairing = torch.arange(self.queries)
        scores = self._query_scores(evidence, choices)
        for alternation in range(ALTERNATIONS if self.queries > 1 else 0):
            better = _assignment(scores) if self.queries_move else pairing
            if alternation and torch.equal(better, pairing):
                break
            pairing = better
            choices = {
                space: self._choose(space, *found.given(pairing), relaxed=relaxed)
                for space, found in evidence.items()
            }
            scores = self._query_scores(evidence, choices)
        entries = sum(
            found.count * self.inner[space].block_size for space, found in evidence.items()
        )
        by_query = sum(found.count_by_query for found in evidence.values())
        total = sum(choice.total for choice in choices.values()) / max(entries, 1)
        query_margin = torch.full((self.queries,), total)
        if self.queries > 1:
            query_margin = _margins(scores, pairing) / max(by_query, 1)
        return _Inside(
            pairing,
            query_margin,
            {
                space: Match(
                    SignedPermutation(choice.perm, choice.sign),
                    choice.margin / max(evidence[space].count, 1),
                )
                for space, choice in choices.items()
                if not relaxed
            },
            total,
        )

    def _between(self, source: int, target: int) -> dict[str, _Evidence]:
        """The evidence on each space in one pair of blocks."""
        found = {}
        for space, group in self.inner.items():
            shape = (2, group.block_size, group.block_size)
            even, odd = torch.zeros(shape, dtype=torch.float64)
            found[space] = _Evidence(even, odd)
        for run in self.runs:
            gram = run.between(source, target)
            if gram is None:
                continue
            mine = found[run.space]
            odd = run.signed and self._signs_free(run.space)
            mine.count += run.repeats * len(gram)
            if len(gram) > 1:
                mine.by_query.append((odd, gram))
                mine.count_by_query += run.repeats * gram.shape[1]
            elif odd:
                mine.odd += gram[0, :, 0]
            else:
                mine.even += gram[0, :, 0]
        return found

    def _signs_free(self, space: str) -> bool:
        return self.inner[space].within in _SIGNED and self.objective is not Objective.SIGNED

    def _query_scores(
        self, evidence: Mapping[str, _Evidence], choices: Mapping[str, _Choice]
    ) -> Tensor:
        """Scores of source query heads with target ones, (R, R), given the coordinates."""
        scores = torch.zeros(self.queries, self.queries, dtype=torch.float64)
        for space, found in evidence.items():
            choice = choices[space]
            for odd, gram in found.by_query:
                matched = gram[:, choice.perm, :, torch.arange(len(choice.perm))].double()
                if odd:
                    matched = matched * choice.sign[:, None, None]
                scores += matched.sum(0)
        return scores

    def _choose(self, space: str, even: Tensor, odd: Tensor, *, relaxed: bool) -> _Choice:
        """The best permutation and signs of a space's coordinates for scores of shape (C, C)."""
        if self.inner[space].within.permutes:
            return self._choose_partners(space, even, odd, relaxed)
        return self._choose_signs(space, even.diagonal(), odd.diagonal())

    def _choose_partners(self, space: str, even: Tensor, odd: Tensor, relaxed: bool) -> _Choice:
        score = even + odd.abs()
        target = torch.arange(len(score))
        if relaxed:
            margin = score.amax(dim=0)
            perm = score.argmax(dim=0) if self.queries > 1 else target
            total = float(margin.sum() + score.amax(dim=1).sum()) / 2
        else:
            perm = _assignment(score)
            total, margin = float(score[perm, target].sum()), _margins(score, perm)
        matched = odd[perm, target]
        if self._signs_free(space):
            margin = torch.minimum(margin, matched.abs().float())
        return _Choice(perm, _sign(matched), total, margin)

    def _choose_signs(self, space: str, even: Tensor, odd: Tensor) -> _Choice:
        """Signs of whole planes (or the block's) for scores of shape (C,)."""
        identity = torch.arange(len(even))
        if not self._signs_free(space):
            return _Choice(identity, _sign(odd), float(even.sum()), even.float())
        group = self.inner[space]
        planes = torch.tensor(group.planes or (0,) * group.block_size)
        strength = torch.zeros(int(planes.max()) + 1, dtype=torch.float64)
        strength = strength.index_add(0, planes, odd)
        margin = (strength.abs() / torch.bincount(planes))[planes].float()
        total = float(even.sum() + strength.abs().sum())
        return _Choice(identity, _sign(strength)[planes], total, margin)


def _sign(score: Tensor) -> Tensor:
    return torch.where(score < 0, -1, 1).to(torch.int8)


def _permutation(perm: Tensor) -> SignedPermutation:
    return SignedPermutation(perm, torch.ones(len(perm), dtype=torch.int8))
