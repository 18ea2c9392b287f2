"""What every artifact family has in common: files of labelled tensors, moved by one function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from signed_align.adapters.formats import Labelling, TensorFile
from signed_align.adapters.json_files import json_like
from signed_align.adapters.origin import doubt_about, is_proved_source
from signed_align.chart import RESIDUAL, VOCABULARY, Chart, numbers_in
from signed_align.checkpoint import carry_along
from signed_align.errors import (
    ArtifactError,
    ChartError,
    GaugeError,
)
from signed_align.gauge import Gauge, ModelIdentity
from signed_align.hooks import Hook, block_count, find_hook, width_at
from signed_align.labels import Axes, Label, axes_text, element_of, kind_of, moves, spaces_of
from signed_align.progress import track
from signed_align.provenance import Record, is_record
from signed_align.signed_permutation import SignedPermutation
from signed_align.skeleton import skeleton


@dataclass(frozen=True)
class Journey:
    """Where artifacts go, and what their user says of them.

    Parameters
    ----------
    chart : Chart
        The chart of the gauge's source.
    gauge : Gauge
        Leads from the model the artifacts were made on to the one they are wanted on.
    hook : str, optional
        The place in the model that an artifact belongs to which does not name one itself.
    allow_pickle : bool
        Files that can only be read by running code in them may be read.
    made_on : str, optional
        The model that artifacts were made on which do not name one themselves.
    """

    chart: Chart
    gauge: Gauge
    hook: str | None = None
    allow_pickle: bool = False
    made_on: str | None = None

    @classmethod
    def along(
        cls,
        gauge: Gauge,
        *,
        hook: str | None = None,
        allow_pickle: bool = False,
        made_on: str | None = None,
    ) -> Journey:
        """The journey that a gauge leads; raises GaugeError if it does not know its source."""
        if gauge.source is None:
            raise GaugeError(
                "the gauge does not say which model it starts from, so nothing can move."
            )
        chart = _chart_of(gauge.source, gauge)
        chart.require_native(gauge)
        return cls(chart, gauge, hook, allow_pickle, made_on)

    @cached_property
    def skeleton(self) -> Any:
        """The model the artifacts were made on, without its weights.

        Raises ArtifactError if the gauge does not keep the model's config.
        """
        assert self.gauge.source is not None
        if not self.gauge.source.config:
            raise ArtifactError(
                "the gauge does not keep the config of its source, which this artifact needs; "
                "make the gauge again with this release."
            )
        return skeleton(self.gauge.source.config)

    @cached_property
    def layers(self) -> int | None:
        """How many blocks the model has; None if the gauge does not keep its config."""
        known = self.gauge.source is not None and self.gauge.source.config
        return block_count(self.skeleton, self.chart) if known else None

    @property
    def target(self) -> str | None:
        """The name of the model the artifacts are wanted on."""
        return self.gauge.target.name if self.gauge.target else None

    def element(self, label: Label | None, size: int) -> SignedPermutation:
        """What happens to a labelled axis of ``size`` entries."""
        return element_of(label, size, self.gauge)

    def place(self, hook: str, size: int) -> tuple[Hook, Label]:
        """A hook and the label of its ``size`` coordinates.

        Raises
        ------
        ArtifactError
            If the hook is not known, has another size, or lies in a space that the gauge says
            nothing about.
        """
        self.require_layer(hook)
        try:
            found = find_hook(self.chart, hook)
            there = self.width_at(found)
            if there is not None and there != size:
                raise ChartError(f"there are {there} coordinates at {hook!r}, not {size}.")
            label = found.label(self.chart, size)
        except ChartError as error:
            raise ArtifactError(str(error)) from error
        if label == VOCABULARY:
            raise ArtifactError(f"what comes out at {hook!r} is the vocabulary, which stays.")
        if not moves(label, self.gauge):
            kinds = {kind_of(space) for space in label.spaces}
            raise ArtifactError(
                f"the coordinates at {hook!r} are those of the {' and '.join(sorted(kinds))} "
                f"space {label.spaces[0]!r}, about which the gauge says nothing; recover a gauge "
                "with --spaces all."
            )
        return found, label

    def width_at(self, hook: Hook) -> int | None:
        """How many coordinates a hook has; None if the gauge keeps no config to tell it from.

        Raises ChartError if none of the model's parameters tells.
        """
        if hook.template == RESIDUAL:
            return self.chart.width
        return None if self.layers is None else width_at(hook, self.chart, self.skeleton)

    def require_layer(self, hook: str) -> None:
        """Raise ArtifactError if a hook is of a layer that the model does not have."""
        numbers = numbers_in(hook)
        if numbers and self.layers is not None and not _is_below(numbers[0], self.layers):
            raise ArtifactError(
                f"there is no {hook!r}: the model has {self.layers} layers, counted from 0."
            )

    def coordinates(self, size: int, what: str) -> tuple[Label, list[str]]:
        """The label of ``size`` coordinates of ``what``, which names no hook, and notes.

        They are those of the hook that the user gave, or of the residual stream if it has as many.
        Raises ArtifactError if neither is so.
        """
        if self.hook is not None:
            return self.place(self.hook, size)[1], []
        if size != self.chart.width:
            raise ArtifactError(
                f"{what} has {size} coordinates and names no hook, and the residual stream has "
                f"{self.chart.width}; name the place in the model with --hook, such as "
                "blocks.3.mlp.hook_post."
            )
        if RESIDUAL.space not in self.gauge.elements:
            raise ArtifactError(
                f"{what} is as wide as the residual stream, about which the gauge says nothing."
            )
        return RESIDUAL, ["taken to be on the residual stream"]


@dataclass(frozen=True)
class Part:
    """One file of an artifact, and how its tensors are labelled.

    Parameters
    ----------
    file : TensorFile
        The file.
    label : callable
        From a tensor's name and shape to its axis labels; raises for a tensor it does not know.
    instead : callable
        From a tensor's name to the tensor it is made of, where that is not the one of its name:
        an expert that changes places with it, indices that have been relocated already.
    remarks : mapping of str to str
        What happens to tensors whose labels do not say it.
    """

    file: TensorFile
    label: Labelling
    instead: Callable[[str], Tensor | None] = lambda _: None
    remarks: Mapping[str, str] = field(default_factory=dict)


def or_unmoved(labels: Mapping[str, Axes]) -> Labelling:
    """A labelling from a table, in which tensors that are not named stay as they are."""
    return lambda name, shape: labels.get(name, (None,) * len(shape))


@dataclass(frozen=True, eq=False)
class Artifact:
    """An artifact on disk, recognised and labelled, ready to be moved.

    Parameters
    ----------
    kind : str
        What it is, in words.
    path : Path
        Its directory, or its only file.
    made_on : str or None
        The model it says it was made on.
    parts : sequence of Part
        Its files of tensors.
    settings : mapping of str to dict
        JSON files that name the model, by path relative to ``path``, as they read after the move.
    carried : frozenset of str
        Files that are known to hold no coordinates, relative to ``path``.
    notes : sequence of str
        What its user should know of the move.
    identity : ModelIdentity, optional
        The model that is itself part of the artifact: a training checkpoint's.
    entries : sequence of (str, Label, Tensor)
        For an artifact that lists coordinates instead of holding a number for each: what lists
        them, the label of their axis, and 1 for each coordinate of the source that it lists, else
        0.
    """

    kind: str
    path: Path
    made_on: str | None
    parts: Sequence[Part]
    settings: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    carried: frozenset[str] = frozenset()
    notes: Sequence[str] = ()
    identity: ModelIdentity | None = None
    entries: Sequence[tuple[str, Label, Tensor]] = ()

    def __post_init__(self) -> None:
        if self.made_on is not None and not isinstance(self.made_on, str):
            raise ArtifactError(
                f"{self.path.name} ({self.kind}) names its model by {self.made_on!r}, not by a "
                "name."
            )

    @property
    def files(self) -> set[Path]:
        """The files that are written anew."""
        written = {part.file.path for part in self.parts}
        return written | {self.path / name for name in self.settings}

    def explanation(self, gauge: Gauge) -> list[dict[str, Any]]:
        """How each tensor is labelled: ``file``, ``tensor``, ``shape``, ``axes``, ``moved``."""
        rows = []
        for part in self.parts:
            for name, shape in part.file.shapes.items():
                axes = part.label(name, tuple(shape))
                remark = part.remarks.get(name)
                rows.append(
                    {
                        "file": part.file.path.name,
                        "tensor": name,
                        "shape": list(shape),
                        "axes": remark or axes_text(axes),
                        "spaces": sorted(_spaces(axes)),
                        "moved": remark is not None or any(moves(axis, gauge) for axis in axes),
                    }
                )
        return rows


class Family(Protocol):
    """A kind of artifact: how to tell it from its files, and how to label it."""

    kind: str

    def recognises(self, path: Path) -> bool:
        """Whether the file or directory ``path`` looks like this kind of artifact."""
        ...

    def inspect(self, path: Path) -> dict[str, Any]:
        """What the artifact says of itself, as JSON; a ``kind`` of its own, if it has one."""
        ...

    def read(self, path: Path, journey: Journey) -> Artifact:
        """Read and label it; raises ArtifactError, with the reason, if it cannot be moved."""
        ...


def move(
    artifact: Artifact, journey: Journey, out: Path, record: Record, *, any_source: bool = False
) -> dict[str, Any]:
    """Write ``artifact``, moved, to the file ``out`` or into the directory ``out``, which exists.

    ``record`` is that of its earlier moves, as far as it still holds. Files of the directory that
    belong to no artifact are left to the caller. Returns a report:
    ``kind``, ``tensors``, ``made_on``, ``source_verified``, ``notes``, ``labels``. Raises
    SignedAlignError if anything is not understood.
    """
    doubt = doubt_about(artifact, journey, record) if any_source else None
    verified = False if any_source else is_proved_source(artifact, journey, record)
    labels = artifact.explanation(journey.gauge)
    for part in track(artifact.parts, f"moving {artifact.path.name}", unit="file"):
        destination = (
            out
            if part.file.path == artifact.path
            else out / part.file.path.relative_to(artifact.path)
        )
        destination.parent.mkdir(parents=True, exist_ok=True)
        part.file.rewrite(destination, part.label, journey.gauge, part.instead)
    for relative, settings in artifact.settings.items():
        text = (artifact.path / relative).read_text(encoding="utf-8")
        (out / relative).write_text(json_like(text, settings), encoding="utf-8")
    return {
        "kind": artifact.kind,
        "tensors": len(labels),
        "made_on": artifact.made_on or journey.made_on or (record.target or {}).get("name"),
        "source_verified": verified,
        "doubt": doubt,
        "notes": [*artifact.notes, *_unmoved(labels, journey.gauge)],
        "labels": labels,
    }


def _is_below(number: str, count: int) -> bool:
    """Whether digits, of which there may be too many for a number, are of one below ``count``."""
    return len(number) <= len(str(count)) and int(number) < count


def leftovers(
    path: Path, artifacts: Sequence[Artifact], left_out: Collection[Path], out: Path
) -> list[str]:
    """Copy what belongs to no artifact below ``path``; returns what is left out, weights too."""
    written = {file for artifact in artifacts for file in artifact.files}
    carried = {artifact.path / name for artifact in artifacts for name in artifact.carried}
    done = written | set(left_out)
    others = [
        file
        for file in path.rglob("*")
        if file.is_file() and file not in done and not is_record(file)  # of where it was
    ]
    named = [str(file.relative_to(path)) for file in left_out]
    return sorted([*named, *carry_along(others, path, out, harmless=carried)])


def _spaces(axes: Axes) -> set[str]:
    return spaces_of(axes) - {VOCABULARY.space}


def _unmoved(labels: Sequence[Mapping[str, Any]], gauge: Gauge) -> list[str]:
    """A note of the kinds of spaces that the artifact is indexed by and the gauge leaves out."""
    spaces = {space for row in labels for space in row["spaces"]}
    kinds = sorted({kind_of(space) for space in spaces - set(gauge.elements)})
    if not kinds:
        return []
    return [
        f"the gauge says nothing about {', '.join(kinds)}: these coordinates are taken to be the "
        "same in both models"
    ]


def _chart_of(model: ModelIdentity, gauge: Gauge) -> Chart:
    """The chart of the gauge's source, from the config that the gauge keeps of it.

    A gauge that keeps none (one made by hand) can say the width of the residual stream, no more.
    """
    settings = {
        name: value
        for name, value in model.config.items()
        if name not in ("model_type", "auto_map")
    }
    if settings:
        return Chart.for_model(model.model_type, **settings)
    width = gauge.element(RESIDUAL.space).size
    return Chart.for_model(model.model_type, width).residual_alone()
