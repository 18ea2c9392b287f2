"""What relates two checkpoints: one verdict, from config, then weights, then activations.

Each stage either is sure and ends the diagnosis, or leaves it to the next. What was found on the
way is kept as evidence, in order.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signed_align.activations import sentences_of
from signed_align.chart import RESIDUAL
from signed_align.checkpoint import Checkpoint
from signed_align.differences import (
    Vocabularies,
    compare_vocabularies,
    differing_parts,
    differing_settings,
)
from signed_align.errors import SignedAlignError, one_line
from signed_align.gauge import Gauge
from signed_align.labels import kind_of
from signed_align.likeness import Agreement, TokenRows, compare_functions, embedding_rows
from signed_align.matching import Objective
from signed_align.progress import track
from signed_align.recovery import (
    Evidence,
    common_chart,
    evidence_from_activations,
    evidence_from_weights,
    moved_tokens,
)
from signed_align.reliability import RELIABLE_SHARE, Finding, Verdict, judge, sure_margin
from signed_align.weight_matching import WeightMatching, partners_of, with_matches

ROTATED_R2 = 0.5
"""A rotation has to explain this much of the token rows that it was not fitted on.

Between models trained from different seeds it is below 0, between a model and one that was rotated
and then trained for a while above 0.9.
"""

NO_STRANGERS_R2 = 0.8
"""Above it a rotation is believed of models that do not compute the same: one was trained on."""

ALIKE_R2 = 0.5
"""Functions agree above this R² of logits; see :class:`~signed_align.likeness.Agreement`."""

SAME_FUNCTION_R2 = 0.99
"""Above it, functions agree so well that their models cannot be strangers."""

NEARLY_ALL = 0.9
"""Where fewer coordinates are sure, a rotation must not explain the token rows better."""

CLEARLY_BETTER = 0.1
"""By so much R² a rotation has to be better."""

SAMPLES_PER_COORDINATE = 2
"""With fewer samples, not having found a gauge says little."""


class Relation(str, Enum):
    """What relates two checkpoints."""

    IDENTICAL = "identical"
    """Every tensor is equal, bit by bit, and settings are too."""

    SAME_COORDINATES = "same_coordinates"
    """A coordinate is the same thing in both: a fine-tune, or a copy in another dtype."""

    PERMUTATION = "permutation"
    """Coordinates change places, in the residual stream or another space, and keep their signs."""

    SIGNED_PERMUTATION = "signed_permutation"
    """Coordinates change their signs too."""

    DENSE_ROTATION = "dense_rotation"
    """The residual stream is rotated: no coordinate of one is a coordinate of the other."""

    UNRELATED = "unrelated"
    """The same architecture; nothing that was looked at relates the weights."""

    DIFFERENT_ARCHITECTURE = "different_architecture"
    """The weights do not correspond."""

    DIFFERENT_VOCABULARY = "different_vocabulary"
    """Tokens differ in number, order or kind; what tokens both have show of the coordinates is
    said beside it."""

    @property
    def is_portable(self) -> bool:
        """Whether what lives on coordinates of one fits the other, as it is or moved."""
        return self in _PORTABLE


_PORTABLE = {
    Relation.IDENTICAL,
    Relation.SAME_COORDINATES,
    Relation.PERMUTATION,
    Relation.SIGNED_PERMUTATION,
}
_MOVING = {Relation.PERMUTATION, Relation.SIGNED_PERMUTATION}

MEANING: Mapping[Relation, str] = {
    Relation.IDENTICAL: "every tensor is equal",
    Relation.SAME_COORDINATES: "the same coordinates, as in a fine-tune",
    Relation.PERMUTATION: "coordinates change places",
    Relation.SIGNED_PERMUTATION: "coordinates change places and signs",
    Relation.DENSE_ROTATION: "a dense rotation of the residual stream",
    Relation.UNRELATED: "one architecture, unrelated training",
    Relation.DIFFERENT_ARCHITECTURE: "different architectures",
    Relation.DIFFERENT_VOCABULARY: "different vocabularies",
}

ADVICE: Mapping[Relation, str] = {
    Relation.IDENTICAL: "Use artifacts as they are.",
    Relation.SAME_COORDINATES: "Use artifacts as they are; no gauge is needed.",
    Relation.PERMUTATION: "Recover the gauge, then port artifacts through it.",
    Relation.SIGNED_PERMUTATION: "Recover the gauge, then port artifacts through it.",
    Relation.DENSE_ROTATION: "What names single residual coordinates cannot move: there is no "
    "coordinate in the other model that it would be. Use the checkpoint from before the rotation.",
    Relation.UNRELATED: "Nothing can be moved. If one was trained from the other, checkpoints in "
    "between may show it (signed-align transport); other text may too (--text).",
    Relation.DIFFERENT_ARCHITECTURE: "Nothing can be moved: weights and coordinates do not "
    "correspond.",
}


@dataclass(frozen=True)
class Diagnosis:
    """What relates two checkpoints, how sure that is, and what it rests on.

    Parameters
    ----------
    verdict : Relation
        The one answer.
    coordinates : Relation or None
        What the coordinates show: the verdict itself, but for a different vocabulary what the
        tokens that both have say. None if they say nothing.
    confidence : float
        In [0, 1]. 1 where every number was compared, or a config differs. The share of residual
        coordinates that are sure for a permutation, signed or not, and for the same coordinates.
        The R² on rows held out for a rotation, half of it unless the functions agree.
        For unrelated models: by how much of the bound the share of sure coordinates falls short
        of it, times the share of the function that they do not have in common, times the samples
        there were, if these were fewer than 2 a coordinate. For a different vocabulary it is that
        of ``coordinates``, and half of it if rows could be paired by number only.
    stage : str
        Where it stopped: ``config``, ``weights`` or ``activations``.
    spaces : mapping
        By kind of space: ``relation`` (or ``not_recovered``), ``spaces``, ``coordinates``, and
        the shares ``sure`` (of all), ``moved`` and ``negative`` (of the sure).
    evidence : tuple of mapping
        What was found: ``stage``, ``found`` in words, and numbers.
    source, target : str
        The two, as they were named.
    next : str or None
        The command to run, if there is one.
    advice : str
        What to do, in words.
    gauge : Gauge, optional
        The gauge between the two, if there is one, with margins.
    """

    verdict: Relation
    coordinates: Relation | None
    confidence: float
    stage: str
    spaces: Mapping[str, Mapping[str, Any]]
    evidence: tuple[Mapping[str, Any], ...]
    source: str
    target: str
    next: str | None
    advice: str
    gauge: Gauge | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON."""
        return {
            "verdict": self.verdict.value,
            "coordinates": self.coordinates.value if self.coordinates else None,
            "confidence": self.confidence,
            "stage": self.stage,
            "spaces": {kind: dict(entry) for kind, entry in self.spaces.items()},
            "evidence": [dict(entry) for entry in self.evidence],
            "source": self.source,
            "target": self.target,
            "next": self.next,
            "advice": self.advice,
        }


def diagnose(
    a: str | Path,
    b: str | Path,
    *,
    text: str | Path | Sequence[str] | None = None,
    max_tokens: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Diagnosis:
    """Say what relates two checkpoints, and what to do about it.

    Parameters
    ----------
    a, b : str or Path
        Local directories or Hub ids.
    text : path or sequence of str, optional
        What models are run on, if weights do not decide; by default English prose that ships with
        Python.
    max_tokens : int, optional
        Calibration tokens to use at most; 8 per residual coordinate by default.
    device : str
        Where models run.
    seed : int
        Chooses the text.

    Returns
    -------
    Diagnosis
        The verdict, whatever it is.

    Raises
    ------
    SignedAlignError
        If a checkpoint cannot be read, is quantised, or has no proved chart.
    """
    # an option that cannot be is an error, whether it is needed or not
    if text is not None:
        sentences_of(text)
    _require_device(device)
    pair = _Pair(Checkpoint.open(a), Checkpoint.open(b), _Running(text, max_tokens, device, seed))
    found = next(found for stage in STAGES if (found := stage(pair)) is not None)
    return _told(pair, found)


def _require_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it has CUDA
        raise SignedAlignError(
            f"torch cannot use the device {device!r}: {one_line(error)}"
        ) from error


# ---- what stages share ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """What a stage is sure of."""

    relation: Relation | None
    stage: str
    confidence: float = 1.0
    spaces: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gauge: Gauge | None = None
    accept_weak: bool = False
    """Whether the token matrices, which `signed-align gauge` starts from, did not find it."""


@dataclass(frozen=True)
class _Running:
    """How models are run, if they are."""

    text: str | Path | Sequence[str] | None
    max_tokens: int | None
    device: str
    seed: int


@dataclass
class _Pair:
    """Two checkpoints, what was found of them so far, and what several stages need."""

    source: Checkpoint
    target: Checkpoint
    running: _Running
    evidence: list[dict[str, Any]] = field(default_factory=list)
    sure: float = 0.0
    """The largest share of residual coordinates that any evidence was sure of."""

    samples: int = 0
    """How many independent samples that evidence had."""

    def note(self, stage: str, found: str, **numbers: Any) -> None:
        self.evidence.append({"stage": stage, "found": found, **numbers})

    @property
    def ends(self) -> tuple[Checkpoint, Checkpoint]:
        return self.source, self.target

    @cached_property
    def vocabularies(self) -> Vocabularies:
        return compare_vocabularies(self.source, self.target)

    @cached_property
    def token_pairs(self) -> Tensor | None:
        """Pairs of rows of the same token; None if the row's number is what pairs them."""
        return moved_tokens(self.source, self.target)

    @cached_property
    def rows(self) -> TokenRows | None:
        """Token rows of both; None if they have none in common."""
        if not self.vocabularies.shared:
            return None
        return embedding_rows(self.source, self.target, self.token_pairs)

    @cached_property
    def functions(self) -> Agreement | None:
        """How alike the functions are; None, with the reason in evidence, if that is not known."""
        if not self.vocabularies.shared:
            return None
        how = self.running
        try:
            agreement = compare_functions(
                *self.ends, self.token_pairs, text=how.text, device=how.device, seed=how.seed
            )
        except SignedAlignError as error:
            self.note("activations", f"the functions cannot be compared: {error}")
            return None
        self.note(
            "activations",
            "the functions agree" if agreement.r2 >= ALIKE_R2 else "the functions differ",
            **agreement.to_dict(),
        )
        return agreement

    @cached_property
    def partners(self) -> dict[str, str]:
        """The target's name of each of the source's weights, as far as rows correspond."""
        partners = partners_of(self.source, self.target)
        if self.vocabularies.parts:
            for name in self.source.chart.token_matrices(self.source.files):
                partners.pop(name, None)
        return partners

    @cached_property
    def matching(self) -> WeightMatching:
        kinds = self.source.chart.kinds
        return WeightMatching(*self.ends, self.partners, kinds, Objective.SIGN_MARGINALIZED)


def _told(pair: _Pair, found: _Found) -> Diagnosis:
    """The diagnosis that a stage's finding amounts to, the vocabulary taken into account."""
    verdict, confidence = found.relation, found.confidence
    if verdict is not Relation.DIFFERENT_ARCHITECTURE and pair.vocabularies.parts:
        verdict = Relation.DIFFERENT_VOCABULARY
        confidence *= 1.0 if pair.vocabularies.by_token else 0.5
    assert verdict is not None
    return Diagnosis(
        verdict=verdict,
        coordinates=found.relation,
        confidence=confidence,
        stage=found.stage,
        spaces=found.spaces,
        evidence=tuple(pair.evidence),
        source=pair.source.name,
        target=pair.target.name,
        next=_next(pair, found),
        advice=_advice(verdict, found),
        gauge=found.gauge,
    )


def _next(pair: _Pair, found: _Found) -> str | None:
    if found.relation not in _MOVING:
        return None
    moving = [kind for kind, entry in found.spaces.items() if entry["relation"] in _MOVING]
    words = ["signed-align", "gauge", pair.source.name, pair.target.name, "-o"]
    words += ["a-to-b.safetensors"]
    if moving != [RESIDUAL.space]:
        words += ["--spaces", "all"]
    words += ["--accept-weak"] if found.accept_weak else []
    text = pair.running.text
    if found.stage == "activations":
        words += ["--text", str(text)] if isinstance(text, str | Path) else []
        words += ["--from", "activations"]
    return shlex.join(words)


def _advice(verdict: Relation | None, found: _Found) -> str:
    if found.relation is None:
        return "They share no token, and nothing else says whether their coordinates correspond."
    said = ADVICE[found.relation]
    unknown = [k for k, entry in found.spaces.items() if entry["relation"] == NOT_RECOVERED]
    if unknown:
        said += (
            f" Not so what lives in {' or '.join(unknown)}: coordinates there are not recognised."
        )
    if verdict is Relation.DIFFERENT_VOCABULARY and found.relation.is_portable:
        return f"Of what does not touch the vocabulary: {said}"
    return said


# ---- config --------------------------------------------------------------------------------------


def by_config(pair: _Pair) -> _Found | None:
    """Architectures that differ, as their configs, and then names and shapes of weights, say."""
    parts = differing_parts(*pair.ends)
    if parts:
        said = "; ".join(f"{part} {x} and {y}" for part, (x, y) in parts.items())
        pair.note("config", f"the architectures differ: {said}", parts=parts)
        return _Found(Relation.DIFFERENT_ARCHITECTURE, "config")
    common_chart(*pair.ends)
    differing = differing_settings(*pair.ends)
    also = f", with other settings of {', '.join(differing)}" if differing else ""
    pair.note(
        "config",
        f"one architecture: {pair.source.chart.model_type}, {pair.source.chart.width} residual "
        f"coordinates{also}",
        settings=differing,
    )
    if pair.vocabularies.parts:
        pair.note("config", pair.vocabularies.said, **pair.vocabularies.numbers)
    return None


# ---- weights -------------------------------------------------------------------------------------


def by_equality(pair: _Pair) -> _Found | None:
    """Tensors that are equal, bit by bit or but for their dtype; the first that is not decides."""
    partners = pair.source.chart.partners(pair.source.files, pair.target.files)
    exact = set(pair.source.files) == set(pair.target.files) == set(partners)
    exact = exact and not differing_settings(*pair.ends)
    dtypes: tuple[set[str], set[str]] = set(), set()
    for name in sorted(partners, key=lambda name: math.prod(pair.source.shape(name))):
        x, y = pair.source.tensor(name), pair.target.tensor(partners[name])
        if x.shape != y.shape or not _equal_but_for_dtype(x, y):
            return None
        exact = exact and _same_bits(x, y)
        for tensor, seen in zip((x, y), dtypes, strict=True):
            seen.add(str(tensor.dtype).removeprefix("torch."))
    numbers = {"tensors": len(partners), "dtypes": [sorted(seen) for seen in dtypes]}
    if exact:
        pair.note("weights", "every tensor is equal, bit by bit", **numbers)
        return _Found(Relation.IDENTICAL, "weights", spaces=_untouched(pair))
    pair.note(
        "weights",
        "every tensor that both have is equal, but for dtypes, names or settings",
        **numbers,
    )
    return _Found(Relation.SAME_COORDINATES, "weights", spaces=_untouched(pair))


def _same_bits(x: Tensor, y: Tensor) -> bool:
    if x.dtype != y.dtype:
        return False
    return torch.equal(*(one.contiguous().reshape(-1).view(torch.uint8) for one in (x, y)))


def _equal_but_for_dtype(x: Tensor, y: Tensor) -> bool:
    if _same_bits(x, y):
        return True
    narrow = min(x.dtype, y.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(x.to(narrow), y.to(narrow))


def by_weights(pair: _Pair) -> _Found | None:
    """A gauge that the token matrices speak for, or else all weights with their sites in place.

    Training moves token matrices most, where it is hot; what else reads and writes the residual
    stream may still be recognised.
    """
    if pair.vocabularies.shared:
        found = _by_evidence(pair, evidence_from_weights(*pair.ends), "weights")
        if found is not None:
            return found
    matching = pair.matching
    match = matching.match_residual(Gauge({}))[RESIDUAL.space]
    samples = matching.residual_rows
    verdict = judge(match, samples)
    _note_verdict(pair, verdict, samples, "weights", "over all weights, the residual stream")
    gauge = Gauge(
        elements={RESIDUAL.space: match.element},
        margins={RESIDUAL.space: match.margin},
        source=pair.source.identity,
        target=pair.target.identity,
        provenance={"method": "weights", "verdict": verdict.to_dict()},
    )
    found = _through(pair, gauge, verdict, "weights")
    return None if found is None else replace(found, accept_weak=True)


def _by_evidence(pair: _Pair, evidence: Evidence, stage: str) -> _Found | None:
    """What evidence about the residual stream amounts to, if it speaks for a gauge."""
    gauge = evidence.gauge()
    verdict = Verdict.of(gauge)
    assert verdict is not None
    _note_verdict(pair, verdict, evidence.independent_samples, stage, "residual stream")
    return _through(pair, gauge, verdict, stage)


def _note_verdict(pair: _Pair, verdict: Verdict, samples: int, stage: str, what: str) -> None:
    if verdict.sure_fraction >= pair.sure:
        pair.sure, pair.samples = verdict.sure_fraction, samples
    pair.note(stage, f"{what}: {verdict}", samples=samples, **verdict.to_dict())


def _rotation_is_better(pair: _Pair, gauge: Gauge) -> bool:
    """Whether a rotation explains token rows that this gauge does not."""
    fit = pair.rows.rotation if pair.rows is not None else None
    if fit is None or pair.rows is None or fit.r2 < ROTATED_R2:
        return False
    return fit.r2 > pair.rows.explained_by(gauge.element(RESIDUAL.space)) + CLEARLY_BETTER


def _through(pair: _Pair, gauge: Gauge, verdict: Verdict, stage: str) -> _Found | None:
    """What a gauge of the residual stream amounts to, with the spaces of sites.

    None if it is not reliable, or a rotation explains more.
    """
    if verdict.finding is Finding.NO_GAUGE:
        return None
    if verdict.sure_fraction < NEARLY_ALL and _rotation_is_better(pair, gauge):
        return None
    kinds = pair.source.chart.kinds
    needed = {RESIDUAL.space: verdict.needed_margin}
    exact = _is_twin(pair, gauge)
    if not exact:
        matching = pair.matching
        for site in track(matching.sites.values(), "matching sites", unit="site"):
            gauge = with_matches(gauge, matching.match(site, gauge))
        exact = _is_twin(pair, gauge)
    distances = _distances(pair, gauge)
    pair.note(
        "weights",
        "moved through the gauge, the weights are those of the other, exactly"
        if exact
        else f"relative distance of the weights: {distances[0]:.3g} as they are, "
        f"{distances[1]:.3g} moved through the gauge",
        relative_distance=distances[0],
        relative_distance_moved=distances[1],
    )
    others = sure_margin(pair.source.chart.width)
    spaces = {
        kind: _space_of(gauge, kind, None if exact else needed.get(kind, others)) for kind in kinds
    }
    untouched = _untouched(pair) if exact else {}
    spaces = {k: entry or untouched.get(k, {}) for k, entry in spaces.items()}
    spaces = {kind: entry for kind, entry in spaces.items() if entry}
    found = {entry["relation"] for entry in spaces.values()}
    relation = next(one for one in _STRONGEST if one in found)
    return _Found(relation, stage, 1.0 if exact else verdict.sure_fraction, spaces, gauge)


_STRONGEST = (Relation.SIGNED_PERMUTATION, Relation.PERMUTATION, Relation.SAME_COORDINATES)
NOT_RECOVERED = "not_recovered"


def _space_of(gauge: Gauge, kind: str, needed: float | None) -> dict[str, Any]:
    """What a gauge is in the spaces of one kind, if it has any.

    Every coordinate is sure if no margin is needed.
    """
    names = [space for space in gauge.elements if kind_of(space) == kind]
    elements = [gauge.elements[space] for space in names]
    if not elements:
        return {}
    displaced = torch.cat([element.displaced for element in elements])
    negative = torch.cat([element.sign < 0 for element in elements])
    sure = (
        torch.ones_like(displaced)
        if needed is None
        else torch.cat([gauge.margins[space] for space in names]) >= needed
    )
    count, total = int(sure.sum()), len(sure)
    if count < RELIABLE_SHARE * total:
        relation: str = NOT_RECOVERED
    elif bool((sure & negative).any()):
        relation = Relation.SIGNED_PERMUTATION.value
    elif bool((sure & displaced).any()):
        relation = Relation.PERMUTATION.value
    else:
        relation = Relation.SAME_COORDINATES.value
    return {
        "relation": relation,
        "spaces": len(names),
        "coordinates": total,
        "sure": count / total,
        "moved": int((sure & displaced).sum()) / max(count, 1),
        "negative": int((sure & negative).sum()) / max(count, 1),
    }


def _untouched(pair: _Pair) -> dict[str, dict[str, Any]]:
    """The spaces of two checkpoints whose tensors are equal."""
    found: dict[str, dict[str, Any]] = {}
    for space in pair.source.spaces.values():
        entry = found.setdefault(
            space.kind,
            {
                "relation": Relation.SAME_COORDINATES.value, "spaces": 0, "coordinates": 0,
                "sure": 1.0, "moved": 0.0, "negative": 0.0,
            },
        )  # fmt: skip
        entry["spaces"] += 1
        entry["coordinates"] += space.group.size
    return found


def _moved_weights(pair: _Pair, gauge: Gauge) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Every weight of the source as it is, moved through the gauge, and its partner."""
    for name, partner in pair.partners.items():
        if pair.source.shape(name) == pair.target.shape(partner):
            yield (
                pair.source.tensor(name),
                pair.source.moved(gauge, name),
                pair.target.tensor(partner),
            )


def _is_twin(pair: _Pair, gauge: Gauge) -> bool:
    """Whether the source, moved, is the target; the first weight that is not decides."""
    shapes = (
        (pair.source.shape(name), pair.target.shape(partner))
        for name, partner in pair.partners.items()
    )
    if pair.vocabularies.parts or any(x != y for x, y in shapes):
        return False
    return all(_equal_but_for_dtype(moved, y) for _, moved, y in _moved_weights(pair, gauge))


def _distances(pair: _Pair, gauge: Gauge) -> tuple[float, float]:
    """‖A - B‖ / ‖B‖ over all weights, before and after A is moved through the gauge."""
    before, after, size = 0.0, 0.0, 0.0
    for x, moved, y in track(_moved_weights(pair, gauge), "comparing weights", unit="weight"):
        y = y.float()
        before += float((x.float() - y).square().sum(dtype=torch.float64))
        after += float((moved.float() - y).square().sum(dtype=torch.float64))
        size += float(y.square().sum(dtype=torch.float64))
    return ((before / size) ** 0.5, (after / size) ** 0.5) if size else (0.0, 0.0)


def by_rotation(pair: _Pair) -> _Found | None:
    """A rotation that explains token rows, of models that compute the same."""
    fit = pair.rows.rotation if pair.rows is not None else None
    if fit is None:
        rows = 0 if pair.rows is None else len(pair.rows.source)
        pair.note(
            "weights",
            f"whether the stream is rotated cannot be seen from {rows} token rows",
            rows=rows,
        )
        return None
    rotated = fit.r2 >= ROTATED_R2
    pair.note(
        "weights",
        f"a rotation explains {max(fit.r2, 0.0):.1%} of token rows that it was not fitted on, "
        f"and leaves a relative difference of Gram matrices of {fit.gram_difference:.3g}",
        **fit.to_dict(),
    )
    if not rotated:
        return None
    functions = pair.functions
    if functions is not None and functions.r2 >= ALIKE_R2:
        return _Found(Relation.DENSE_ROTATION, "activations", fit.r2)
    if functions is None or fit.r2 >= NO_STRANGERS_R2:
        return _Found(Relation.DENSE_ROTATION, "activations", fit.r2 / 2)
    return None


# ---- activations ---------------------------------------------------------------------------------


def by_activations(pair: _Pair) -> _Found | None:
    """A gauge that hidden states on the same tokens speak for."""
    how = pair.running
    try:
        (evidence,) = evidence_from_activations(
            *pair.ends,
            sentences_of(how.text),
            layer_groups={"all": None},
            max_tokens=how.max_tokens,
            device=how.device,
            seed=how.seed,
        ).values()
    except SignedAlignError as error:
        pair.note("activations", f"hidden states cannot be compared: {error}")
        return None
    return _by_evidence(pair, evidence, "activations")


def by_function(pair: _Pair) -> _Found:
    """What is left: strangers, or models that compute the same without a gauge between them."""
    if not pair.vocabularies.shared:
        return _Found(None, "weights", 0.0)
    functions = pair.functions
    r2 = functions.r2 if functions is not None else 0.0
    short = max(0.0, 1 - pair.sure / RELIABLE_SHARE)
    undecided = pair.rows is None or pair.rows.rotation is None
    if undecided and r2 >= SAME_FUNCTION_R2:
        return _Found(Relation.DENSE_ROTATION, "activations", short / 2)
    enough = min(1.0, pair.samples / (SAMPLES_PER_COORDINATE * pair.source.chart.width))
    confidence = short * (1 - max(r2, 0.0)) * enough
    return _Found(Relation.UNRELATED, "activations", confidence)


STAGES = (by_config, by_equality, by_weights, by_rotation, by_activations, by_function)
"""In the order in which they are asked."""
