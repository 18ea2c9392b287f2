"""What a thing on disk is: a model, a gauge, an adapter or an SAE, for people and as JSON."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from signed_align.checkpoint import Checkpoint
from signed_align.errors import SignedAlignError
from signed_align.gauge import Gauge
from signed_align.labels import Axes


def inspect(thing: str) -> tuple[dict[str, Any], list[str]]:
    """Describe ``thing``: a JSON object with its ``kind``, and lines of text.

    Raises SignedAlignError if it is none of the things this package knows.
    """
    from signed_align.adapters import recognise

    path = Path(thing)
    if path.is_file():
        summary = Gauge.load(path).summary()
        return {"kind": "gauge", **summary}, _gauge_lines(summary)
    family = recognise(path) if path.is_dir() else None
    if family is not None:
        details = family.inspect(path)
        return {"kind": family.kind, **details}, [
            family.kind,
            *(f"  {key:24}{value}" for key, value in details.items()),
        ]
    if path.is_dir() and not (path / "config.json").is_file():
        raise SignedAlignError(f"{path} is not a model, a gauge, an adapter or an SAE.")
    return _model(Checkpoint.open(thing))


def _model(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    chart = checkpoint.chart
    labels: dict[str, Axes] = {}
    for name in checkpoint.files:
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        labels[pattern] = chart.axes(name, checkpoint.shape(name))
    tied = bool(getattr(checkpoint.config.get_text_config(), "tie_word_embeddings", False))
    data = {
        "kind": "model",
        "model_type": chart.model_type,
        "norm": chart.norm.value,
        "native_group": chart.native_group.value,
        "spaces": dict(chart.sizes),
        "tied_embeddings": tied,
        "tensors": len(checkpoint.files),
        "fingerprint": checkpoint.identity.fingerprint,
        "chart": {
            pattern: [
                {"space": axis.space, "signed": axis.signed} if axis else None for axis in axes
            ]
            for pattern, axes in labels.items()
        },
    }
    width = max(map(len, labels))
    return data, [
        f"{checkpoint.name}: a {chart.model_type} model of {len(checkpoint.files)} tensors",
        f"  norm           {chart.norm.value}",
        f"  native group   {chart.native_group.value.replace('_', ' ')}",
        *(f"  {space:14} {size} coordinates" for space, size in chart.sizes.items()),
        f"  embeddings     {'tied' if tied else 'not tied'}",
        f"  fingerprint    {checkpoint.identity.fingerprint[:12]}",
        "  chart (|x|: permuted, keeps its sign)",
        *(f"    {pattern:{width}}  {_axes_text(axes)}" for pattern, axes in labels.items()),
    ]


def _axes_text(axes: Axes) -> str:
    words = [
        "·" if axis is None else axis.space if axis.signed else f"|{axis.space}|" for axis in axes
    ]
    return f"({', '.join(words)})"


def _gauge_lines(summary: dict[str, Any]) -> list[str]:
    lines = ["gauge"]
    for end in ("source", "target"):
        model = summary[end]
        lines.append(
            f"  {end:10} {model['name']} ({model['model_type']}, {model['fingerprint'][:12]})"
            if model
            else f"  {end:10} not recorded"
        )
    for space, entry in summary["spaces"].items():
        lines.append(
            f"  {space:10} {entry['size']} coordinates, {entry['fixed_point_fraction']:.3f} "
            f"unmoved, {entry['positive_sign_fraction']:.3f} with sign +1"
        )
        if "margin" in entry:
            quantiles = "  ".join(f"{name} {value:.3f}" for name, value in entry["margin"].items())
            lines.append(f"  {'':10} margin {quantiles}, weak {entry['weak_fraction']:.3f}")
    for key, value in summary["provenance"].items():
        lines.append(f"  {key:10} {value}")
    return lines
