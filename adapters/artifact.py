"""What every artifact family has in common: files of labelled tensors, moved by one function."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from signed_align.chart import RESIDUAL, Chart
from signed_align.checkpoint import Checkpoint, carry_along, rewrite_safetensors
from signed_align.errors import ArtifactError, CheckpointError, GaugeError, SignedAlignWarning
from signed_align.files import atomic_path
from signed_align.gauge import Gauge, ModelIdentity
from signed_align.labels import Axes


@dataclass(frozen=True)
class Artifact:
    """An artifact on disk, recognised and labelled, ready to be moved.

    Parameters
    ----------
    kind : str
        What it is, in words.
    path : Path
        Its directory.
    made_on : str or None
        The model it says it was made on.
    weights : sequence of str
        Its safetensors files, relative to ``path``.
    label : callable
        From a tensor's name and shape to its axis labels; raises for a tensor it does not know.
    settings : mapping of str to dict
        JSON files that name the model, by relative path, as they read after the move.
    """

    kind: str
    path: Path
    made_on: str | None
    weights: tuple[str, ...]
    label: Callable[[str, tuple[int, ...]], Axes]
    settings: Mapping[str, dict[str, Any]]


class Family(Protocol):
    """A kind of artifact: how to tell it from its files, and how to label it."""

    kind: str

    def recognises(self, path: Path) -> bool:
        """Whether the directory ``path`` looks like this kind of artifact."""
        ...

    def inspect(self, path: Path) -> dict[str, Any]:
        """What the artifact says of itself, as JSON."""
        ...

    def read(self, path: Path, chart: Chart, gauge: Gauge) -> Artifact:
        """Read and label it; raises ArtifactError, with the reason, if it cannot be moved."""
        ...


def move(
    family: Family,
    path: Path,
    gauge: Gauge,
    out: Path,
    *,
    any_source: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Move the artifact at ``path`` through ``gauge`` into the directory ``out``.

    Returns a report: ``kind``, ``out``, ``tensors``, ``made_on``, ``source_verified``,
    ``left_out``. Raises SignedAlignError, and leaves nothing behind, if anything is not understood.
    """
    if gauge.source is None:
        raise GaugeError("the gauge does not say which model it starts from, so nothing can move.")
    chart = _chart_of(gauge.source, gauge)
    chart.require_native(gauge)
    artifact = family.read(path, chart, gauge)
    verified = False if any_source else _is_gauge_source(artifact, gauge)
    tensors = 0
    with atomic_path(out, directory=True, force=force, inputs=[path]) as temporary:

        def count(name: str, shape: tuple[int, ...]) -> Axes:
            nonlocal tensors
            tensors += 1
            return artifact.label(name, shape)

        for name in artifact.weights:
            rewrite_safetensors(path / name, temporary / name, count, gauge)
        written = {path / name for name in (*artifact.weights, *artifact.settings)}
        others = [file for file in path.rglob("*") if file.is_file() and file not in written]
        left_out = carry_along(others, path, temporary)
        for relative, settings in artifact.settings.items():
            (temporary / relative).write_text(json.dumps(settings, indent=2) + "\n")
    return {
        "kind": artifact.kind,
        "out": str(out),
        "tensors": tensors,
        "made_on": artifact.made_on,
        "source_verified": verified,
        "left_out": left_out,
    }


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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises ArtifactError if it is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{path} holds no JSON object.")
    return content


def _is_gauge_source(artifact: Artifact, gauge: Gauge) -> bool:
    """Whether the artifact is proved to be made on the gauge's source; raises if it is not.

    A model that is at hand is compared by fingerprint. One that is not can only be compared by
    name, which is reported but not a proof.
    """
    assert gauge.source is not None
    made_on = artifact.made_on
    if not made_on:
        warnings.warn(
            f"the {artifact.kind} does not say which model it was made on; it is taken to be "
            f"{gauge.source.name}.",
            SignedAlignWarning,
            stacklevel=3,
        )
        return False
    if not isinstance(made_on, str):
        raise ArtifactError(f"the {artifact.kind} names its model by {made_on!r}, not by a name.")
    if os.path.isdir(made_on):
        try:
            identity = Checkpoint.open(made_on).identity
        except CheckpointError:
            identity = None
        if identity is not None:
            gauge.require_source(identity)
            return True
    if Path(made_on).name.lower() != Path(gauge.source.name).name.lower():
        raise ArtifactError(
            f"the {artifact.kind} was made on {made_on!r}, but the gauge leads from "
            f"{gauge.source.name!r}; pass --any-source if both are the same model or share its "
            "coordinates."
        )
    return False
