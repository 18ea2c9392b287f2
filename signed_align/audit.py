"""Gauge-sweep audits: does a claim about coordinates survive when only the coordinates change?

A scrambled twin computes the same function, so a claim about the function would hold for it as it
stands. A claim such as "these are the ten coordinates for sentiment" does not: it holds in one
gauge, and has to be transported to be compared.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from signed_align.chart import CHOICES, RESIDUAL
from signed_align.checkpoint import Checkpoint
from signed_align.claims import CLAIMS, AnyClaim, Coordinates, TopWeights
from signed_align.drawing import figure_in
from signed_align.errors import ArtifactError
from signed_align.gauge import Gauge, ModelIdentity
from signed_align.hooks import find_hook, width_at
from signed_align.labels import Label, element_of, even, kind_of, transport_entries
from signed_align.moving import scramble
from signed_align.progress import track
from signed_align.recovery import recover
from signed_align.skeleton import skeleton

DEFAULT_TWINS = 20
COUNTED = {"positive", "negative", "texts", "direction"}
"""Parameters of claims of which a report gives the length alone."""

Source = Literal["weights", "activations"]


@dataclass(frozen=True)
class Comparison:
    """Two sets of coordinates, what was stated and what was found: how many they share.

    ``agreeing`` of the ``shared`` ones have the same sign in both.
    """

    stated: int
    found: int
    shared: int
    agreeing: int

    @classmethod
    def of(cls, stated: Coordinates, found: Coordinates) -> Comparison:
        """Compare two sets of coordinates, index by index."""
        signs = dict(zip(found.indices, found.signs, strict=True))
        shared = [
            sign == signs[index]
            for index, sign in zip(stated.indices, stated.signs, strict=True)
            if index in signs
        ]
        return cls(len(stated.indices), len(found.indices), len(shared), sum(shared))

    @property
    def overlap(self) -> float:
        """The share of the stated coordinates that were found."""
        return self.shared / self.stated

    @property
    def jaccard(self) -> float:
        """The shared coordinates by those that are in either set."""
        return self.shared / (self.stated + self.found - self.shared)

    @property
    def sign_agreement(self) -> float | None:
        """The share of the shared coordinates whose sign is the same; None if none is shared."""
        return self.agreeing / self.shared if self.shared else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "shared": self.shared,
            "overlap": self.overlap,
            "jaccard": self.jaccard,
            "sign_agreement": self.sign_agreement,
        }


@dataclass(frozen=True)
class Twin:
    """What became of the claim on one twin.

    Parameters
    ----------
    seed : int
        Of the twin, as ``scramble`` takes it.
    as_stated, true_gauge, recovered_gauge : Comparison
        The stated coordinates as they are, after transport through the true gauge, and after
        transport through the recovered one, each against those found on the twin.
    recovery : mapping
        ``permutation_accuracy`` and ``sign_accuracy`` of the recovered gauge at the hook.
    """

    seed: int
    as_stated: Comparison
    true_gauge: Comparison
    recovered_gauge: Comparison
    recovery: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seed": self.seed,
            **{way: getattr(self, way).to_dict() for way in WAYS},
            "recovery": dict(self.recovery),
        }


WAYS = {
    "as_stated": "as stated",
    "true_gauge": "after transport, true gauge",
    "recovered_gauge": "after transport, recovered",
}


@dataclass(frozen=True)
class Audit:
    """How often a claim survives a change of coordinates.

    Parameters
    ----------
    claim : mapping
        The claim, with its texts counted.
    model : ModelIdentity
        What it is about.
    hook : str
        Where its coordinates are.
    size : int
        How many coordinates there are.
    coordinates : Coordinates
        The claim as stated.
    spaces : tuple of str
        The kinds of spaces that were scrambled.
    recovered_from : str
        What gauges were recovered from.
    control : Comparison
        The claim recomputed on the model itself: below 1 it does not even reproduce.
    twins : tuple of Twin
        The sweep.
    """

    claim: Mapping[str, Any]
    model: ModelIdentity
    hook: str
    size: int
    coordinates: Coordinates
    spaces: tuple[str, ...]
    recovered_from: str
    control: Comparison
    twins: tuple[Twin, ...]

    @property
    def chance(self) -> dict[str, float]:
        """The expected overlap and Jaccard index of k of d coordinates with k random others."""
        k, d = len(self.coordinates.indices), self.size
        ways = {m: math.comb(k, m) * math.comb(d - k, k - m) for m in range(k + 1)}
        return {
            "overlap": k / d,
            "jaccard": sum(m * ways[m] / ((2 * k - m) * math.comb(d, k)) for m in ways),
        }

    def mean(self, way: str) -> dict[str, float | None]:
        """Averages over twins of one of ``as_stated``, ``true_gauge`` and ``recovered_gauge``.

        Signs are counted over all coordinates that any twin shares; ``exact`` is the share of
        twins on which all coordinates and signs agree.
        """
        seen: list[Comparison] = [getattr(twin, way) for twin in self.twins]
        shared = sum(one.shared for one in seen)
        jaccards = [one.jaccard for one in seen]
        return {
            "overlap": statistics.fmean(one.overlap for one in seen),
            "jaccard": statistics.fmean(jaccards),
            "jaccard_deviation": statistics.stdev(jaccards) if len(seen) > 1 else 0.0,
            "sign_agreement": sum(one.agreeing for one in seen) / shared if shared else None,
            "exact": statistics.fmean(one.jaccard == 1 == one.sign_agreement for one in seen),
        }

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "claim": dict(self.claim),
            "model": self.model.summary(),
            "hook": self.hook,
            "size": self.size,
            "k": len(self.coordinates.indices),
            "coordinates": asdict(self.coordinates),
            "spaces": list(self.spaces),
            "recovered_from": self.recovered_from,
            "chance": self.chance,
            "control": self.control.to_dict(),
            "mean": {way: self.mean(way) for way in WAYS},
            "twins": [twin.to_dict() for twin in self.twins],
        }


def audit_claim(
    model: str | Path,
    claim: AnyClaim,
    *,
    twins: int = DEFAULT_TWINS,
    seed: int = 0,
    hook: str | None = None,
    recovered_from: Source = "weights",
    text: str | Path | Sequence[str] | None = None,
) -> Audit:
    """Recompute a claim on scrambled twins of a model, with and without transport.

    Parameters
    ----------
    model : str or Path
        A local directory or a Hub id.
    claim : Claim or callable
        A built-in claim, or any function from a checkpoint to coordinates.
    twins : int
        How many twins; they are written one at a time to a temporary directory.
    seed : int
        Of the first twin; the next ones count on from it.
    hook : str, optional
        Where the coordinates are, for a claim that does not say so itself.
    recovered_from : {"weights", "activations"}
        What the gauge to each twin is recovered from.
    text : path or sequence of str, optional
        Calibration text for activations; by default English prose that ships with Python.

    Returns
    -------
    Audit

    Raises
    ------
    SignedAlignError
        If the claim does not fit the model, or nothing at the hook can be scrambled.
    """
    if twins < 1:
        raise ArtifactError(f"a sweep needs 1 twin or more; got {twins}.")
    if text is not None and recovered_from == "weights":
        raise ArtifactError("text has no part in recovering gauges from weights.")
    checkpoint = Checkpoint.open(model)
    place = hook or getattr(claim, "hook", None)
    if place is None:
        raise ArtifactError("the claim does not say at which hook its coordinates are; name it.")
    found = find_hook(checkpoint.chart, place)
    size = width_at(found, checkpoint.chart, skeleton(checkpoint.settings))
    k = getattr(claim, "k", 1)
    if k > size:
        raise ArtifactError(
            f"the claim is about {k} coordinates, and there are {size} at {place!r}."
        )
    sweep = _Sweep(checkpoint, claim, found.label(checkpoint.chart, size), size, recovered_from)
    spaces = sweep.spaces(place)
    published = claim.stated(size) if isinstance(claim, TopWeights) else None
    stated = published or sweep.recomputed(checkpoint)
    control = Comparison.of(stated, sweep.recomputed(checkpoint))
    seeds = track(range(seed, seed + twins), "auditing twins", unit="twin")
    return Audit(
        claim=_described(claim),
        model=checkpoint.identity,
        hook=place,
        size=size,
        coordinates=stated,
        spaces=spaces,
        recovered_from=recovered_from,
        control=control,
        twins=tuple(sweep.twin(stated, one, spaces, text) for one in seeds),
    )


@dataclass(frozen=True)
class _Sweep:
    checkpoint: Checkpoint
    claim: AnyClaim
    label: Label
    size: int
    recovered_from: Source

    def recomputed(self, checkpoint: Checkpoint) -> Coordinates:
        claim: Any = self.claim
        found = getattr(claim, "coordinates", claim)(checkpoint)
        if not isinstance(found, Coordinates):
            raise ArtifactError(f"a claim returns Coordinates; got {type(found).__name__}.")
        if not 0 <= min(found.indices) <= max(found.indices) < self.size:
            raise ArtifactError(f"a coordinate of the claim is not between 0 and {self.size - 1}.")
        return found

    def spaces(self, place: str) -> tuple[str, ...]:
        """The kinds of spaces to scramble, as users name them."""
        kinds = {kind_of(space) for space in self.label.spaces}
        chosen = {
            next((name for name, members in CHOICES.items() if kind in members), "")
            for kind in kinds
        }
        if not chosen or "" in chosen:
            raise ArtifactError(f"no gauge moves the coordinates at {place!r}.")
        return ("experts",) if "experts" in chosen else tuple(sorted(chosen))

    def twin(
        self,
        stated: Coordinates,
        seed: int,
        spaces: tuple[str, ...],
        text: str | Path | Sequence[str] | None,
    ) -> Twin:
        source = self.checkpoint.path
        with tempfile.TemporaryDirectory(prefix="signed-align-audit-") as folder:
            path = Path(folder) / "twin"
            truth = scramble(source, path, seed=seed, spaces=spaces)
            found = self.recomputed(Checkpoint.open(path))
            recovered = recover(
                source,
                path,
                method=self.recovered_from,
                text=text,
                spaces=tuple(dict.fromkeys((RESIDUAL.space, *spaces))),
            )
        true, ours = (element_of(self.label, self.size, gauge) for gauge in (truth, recovered))
        return Twin(
            seed=seed,
            as_stated=Comparison.of(stated, found),
            true_gauge=Comparison.of(self.moved(stated, truth), found),
            recovered_gauge=Comparison.of(self.moved(stated, recovered), found),
            recovery=ours.agreement(true),
        )

    def moved(self, stated: Coordinates, gauge: Gauge) -> Coordinates:
        """The same coordinates at the other end of a gauge."""
        axes = (self.label,) if stated.odd else even((self.label,))
        places = [torch.tensor(stated.indices)]
        (indices,), _, flips = transport_entries(places, None, axes, (self.size,), gauge)
        signs = torch.tensor(stated.signs) * flips
        return Coordinates(tuple(indices.tolist()), tuple(signs.tolist()), stated.odd)


def _described(claim: AnyClaim) -> dict[str, Any]:
    """What a report says of a claim: long lists by their length."""
    kind = type(claim)
    if CLAIMS.get(getattr(kind, "claim", "")) is not kind:
        return {"claim": getattr(claim, "__name__", kind.__name__)}
    values = {field.name: getattr(claim, field.name) for field in fields(kind)}
    return {"claim": kind.claim} | {
        name: len(value) if name in COUNTED else value for name, value in values.items()
    }


# ---- for people ----------------------------------------------------------------------------------


def audit_lines(result: Audit) -> list[str]:
    """The audit as text: averages, then a row a twin."""
    chance, control = result.chance, result.control
    k = len(result.coordinates.indices)
    width = max(map(len, WAYS.values()))

    def row(label: str, overlap: float, jaccard: float, signs: float | None) -> str:
        agreement = "    -" if signs is None else f"{signs:.3f}"
        return f"  {label:{width}}  {overlap:7.3f}  {jaccard:7.3f}  {agreement}"

    lines = [
        f"{result.claim['claim']} at {result.hook}: {k} of {result.size} coordinates; "
        f"twins written: {len(result.twins)}; gauges recovered from {result.recovered_from}.",
        f"  {'mean of twins':{width}}  overlap  Jaccard  signs",
    ]
    for way, label in WAYS.items():
        mean = result.mean(way)
        assert mean["overlap"] is not None
        assert mean["jaccard"] is not None
        lines.append(row(label, mean["overlap"], mean["jaccard"], mean["sign_agreement"]))
    lines += [
        row("chance", chance["overlap"], chance["jaccard"], None),
        row("model itself", control.overlap, control.jaccard, control.sign_agreement),
        f"  {'Jaccard of twin':{width}}   stated     true  recovered",
    ]
    lines += [
        f"  {twin.seed:<{width}}  {twin.as_stated.jaccard:7.3f}  {twin.true_gauge.jaccard:7.3f}  "
        f"{twin.recovered_gauge.jaccard:9.3f}"
        for twin in result.twins
    ]
    return lines


def plot_audit(result: Audit, file: str | Path, title: str = "") -> None:
    """Draw Jaccard indices as bars, with a point a twin, to an image file (png, svg, pdf)."""
    draw_audit(result.to_dict(), file, title)


def draw_audit(data: Mapping[str, Any], file: str | Path, title: str = "") -> None:
    """As :func:`plot_audit`, of an audit as :meth:`Audit.to_dict` writes it."""
    seen = {label: [twin[way]["jaccard"] for twin in data["twins"]] for way, label in WAYS.items()}
    (stated, values), *transported = seen.items()
    groups = [(stated, values), ("chance", [data["chance"]["jaccard"]]), *transported]
    with figure_in(file, title) as figure:
        axis = figure.subplots()
        for place, (_, values) in enumerate(groups):
            mean = statistics.fmean(values)
            axis.bar(place, mean, width=0.6, color=("C0", "C7", "C2", "C9")[place])
            axis.annotate(
                f"{mean:.3f}", (place, max(values)), (0, 5), textcoords="offset points", ha="center"
            )
            if len(values) > 1:
                places = [place] * len(values)
                axis.scatter(places, values, s=12, color="black", alpha=0.4, zorder=3)
        names = [label.replace(", ", ",\n") for label, _ in groups]
        axis.set_xticks(range(len(groups)), names)
        axis.set_ylabel("Jaccard index")
        axis.set_ylim(0, 1.12)
