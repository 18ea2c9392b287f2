"""The parts of JSON files that plots are drawn from: their shapes, checked before anything is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from signed_align.report.figures import Accuracies, Point, Series
from signed_align.report.tables import in_words

LARGEST = 1e12
"""Numbers beyond it are not drawn."""

Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]


class Shape(BaseModel):
    """Part of a JSON object; what else the object holds does not matter."""

    model_config = ConfigDict(strict=True)


class Accuracy(Shape):
    """How much of a gauge is right."""

    permutation_accuracy: Share
    sign_accuracy: Share


# ---- commands ------------------------------------------------------------------------------------


class Failure(Shape):
    """The sentence with which a command refused its input."""

    error: str


class GaugeOutput(Shape):
    """Where a command put a gauge."""

    gauge: str


class LossCurve(Shape):
    """A path of :class:`signed_align.barrier.LossPath`."""

    alphas: list[Number] = Field(min_length=2)
    losses: list[Number]
    chord: list[Number]
    barrier_nats: Number

    @model_validator(mode="after")
    def _as_many(self) -> LossCurve:
        if not len(self.alphas) == len(self.losses) == len(self.chord):
            raise ValueError("alphas, losses and chord have different lengths")
        return self


Paths = Annotated[dict[str, LossCurve], Field(min_length=1)]


class Barrier(Shape):
    """What ``barrier`` prints."""

    paths: Paths


class Step(Shape):
    """A step of :class:`signed_align.trajectory.Trajectory`."""

    lost: Count
    sign_accuracy: Share = 0.0


class Trajectory(GaugeOutput):
    """What ``transport`` prints."""

    size: Positive
    base: Count | None
    steps: list[Step] = Field(min_length=1)
    accuracy: dict[str, Accuracy]

    @model_validator(mode="after")
    def _of_transport(self) -> Trajectory:
        if self.accuracy and "transport" not in self.accuracy:
            raise ValueError("accuracy has no entry 'transport'")
        return self


class Chance(Shape):
    """What an audit expects of random coordinates."""

    jaccard: Share


class Compared(Shape):
    """Two sets of coordinates of an audit."""

    jaccard: Share


class Twin(Shape):
    """A twin of :class:`signed_align.audit.Audit`."""

    as_stated: Compared
    true_gauge: Compared
    recovered_gauge: Compared


class Audit(Shape):
    """What ``audit`` prints."""

    chance: Chance
    twins: list[Twin] = Field(min_length=1)


class Evidence(Shape):
    """The demo's gauges: by what they were recovered from, and by objective."""

    positive_sign_fraction: Share
    evidence: Annotated[dict[str, dict[str, Accuracy]], Field(min_length=1)]


class Demo(Shape):
    """What ``demo`` prints and writes."""

    recovery: Evidence
    merge: Barrier

    def accuracies(self) -> Accuracies:
        """Permutations and signs, each over the evidence."""
        evidence = self.recovery.evidence
        panels = {
            in_words(measure): _collected(
                (in_words(objective), where, getattr(found, measure))
                for where, objectives in evidence.items()
                for objective, found in objectives.items()
            )
            for measure in Accuracy.model_fields
        }
        level = ("share of + signs", self.recovery.positive_sign_fraction)
        return Accuracies(panels, "evidence", "accuracy", level=level)


# ---- benchmarks ----------------------------------------------------------------------------------


ALL_LAYERS = (None, "all", "all layers")


class Recovered(Accuracy):
    """A gauge recovered at some noise: from hidden states of some tokens, or from no tokens."""

    noise: Number | str
    layers: int | str | list[int] | None
    tokens: Positive | None
    objective: str

    @property
    def where(self) -> int | str:
        """The hidden states by their number, if they are one, or by name."""
        match self.layers:
            case [layer] | int(layer):
                return layer
            case list(layers):
                return in_words(", ".join(map(str, layers)))
            case str(name):
                return int(name) if re.fullmatch(r"[0-9]{1,9}", name) else in_words(name)
            case _:
                return "all"


class Ceiling(Shape):
    """What each objective recovers of a gauge with some share of + signs."""

    positive_fraction: Share
    signed: Share
    permutation: Share
    sign_marginalized: Share


class Recovery(Shape):
    """``recovery.json`` of the benchmarks."""

    grid: list[Recovered] = Field(min_length=1)
    ceiling: list[Ceiling] = Field(min_length=1)

    def _by_noise(self) -> dict[str, list[Recovered]]:
        found: dict[str, list[Recovered]] = {}
        for row in self.grid:
            noise = row.noise if isinstance(row.noise, str) else f"{row.noise:g}"
            found.setdefault(in_words(f"noise: {noise}"), []).append(row)
        return found

    def by_tokens(self) -> Accuracies:
        """A panel for each noise: all hidden states together, else the mean over them."""
        panels = {}
        for noise, rows in self._by_noise().items():
            together = [row for row in rows if row.layers in ALL_LAYERS]
            panels[noise] = _collected(
                (in_words(row.objective), row.tokens, row.sign_accuracy)
                for row in together or rows
                if row.tokens is not None
            )
        return Accuracies(panels, "tokens", logarithmic=True)

    def by_layer(self) -> Accuracies:
        """A panel for each noise, at its greatest number of tokens."""
        panels = {}
        for noise, rows in self._by_noise().items():
            most = max((row.tokens for row in rows if row.tokens is not None), default=0)
            panels[f"{noise}, {most:,} tokens"] = _collected(
                (in_words(row.objective), row.where, row.sign_accuracy)
                for row in rows
                if row.tokens in (most, None)
            )
        return Accuracies(panels, "hidden states")

    def ceilings(self) -> Accuracies:
        """Against the share of + signs."""
        series = _collected(
            (in_words(objective), row.positive_fraction, getattr(row, objective))
            for row in self.ceiling
            for objective in Ceiling.model_fields
            if objective != "positive_fraction"
        )
        return Accuracies({"": series}, "share of + signs", diagonal=True)


class Spread(Shape):
    """A mean over seeds, and the value of each."""

    mean: Share
    values: Annotated[list[Share], Field(min_length=1)]


class Curve(Shape):
    """Gauges along runs of some length, with a checkpoint at every interval."""

    learning_rate: Number
    interval: Positive
    steps: Positive
    transport: Spread
    endpoint: Spread | None = None
    via_base: Spread | None = None

    def means(self, transport: str) -> dict[str, Spread]:
        """By the name of a series, of which that of ``transport`` is given."""
        found = {transport: self.transport, "endpoint": self.endpoint, "via base": self.via_base}
        return {name: spread for name, spread in found.items() if spread is not None}


class Curves(Shape):
    """``trajectories.json`` of the benchmarks."""

    curves: list[Curve] = Field(min_length=1)

    def _by_rate(self) -> dict[float, list[Curve]]:
        rates = sorted({curve.learning_rate for curve in self.curves})
        return {rate: [c for c in self.curves if c.learning_rate == rate] for rate in rates}

    def by_steps(self) -> Accuracies:
        """A panel for each learning rate, a series for each interval of several lengths."""
        panels = {}
        for rate, curves in self._by_rate().items():
            lengths: dict[int, set[int]] = {}
            for curve in curves:
                lengths.setdefault(curve.interval, set()).add(curve.steps)
            most = max(map(len, lengths.values()))
            names = {
                interval: f"transport, every {interval:,}"
                for interval in sorted(lengths)
                if len(lengths[interval]) > 1 or most == 1
            }
            series: dict[str, dict[Any, Point]] = {name: {} for name in names.values()}
            for curve in curves:
                if curve.interval in names:
                    _add(series, curve.means(names[curve.interval]), curve.steps)
            panels[f"learning rate {rate:g}"] = series
        return Accuracies(panels, "steps of training")

    def by_interval(self) -> Accuracies:
        """A panel for each learning rate, of its longest runs."""
        panels = {}
        for rate, curves in self._by_rate().items():
            longest = max(curve.steps for curve in curves)
            series: dict[str, dict[Any, Point]] = {}
            for curve in curves:
                if curve.steps == longest:
                    _add(series, curve.means("transport"), curve.interval)
            panels[f"learning rate {rate:g}, {longest:,} steps"] = series
        return Accuracies(panels, "steps between checkpoints", logarithmic=True)


def _add(series: dict[str, dict[Any, Point]], means: Mapping[str, Spread], x: int) -> None:
    for name, spread in means.items():
        # the mean may be rounded, and then lie outside the values
        below = max(0.0, round(spread.mean - min(spread.values), 6))
        above = max(0.0, round(max(spread.values) - spread.mean, 6))
        series.setdefault(name, {})[x] = Point(spread.mean, below, above)


def _collected(values: Iterable[tuple[str, Any, float]]) -> Series:
    """Series by name, from (name, x, y); of several y at one x the mean, and how far they go."""
    found: dict[str, dict[Any, list[float]]] = {}
    for name, x, y in values:
        found.setdefault(name, {}).setdefault(x, []).append(y)
    return {name: {x: _point(ys) for x, ys in points.items()} for name, points in found.items()}


def _point(values: list[float]) -> Point:
    mean = fmean(values)
    return Point(mean, mean - min(values), max(values) - mean)
