"""What a thing on disk is: a model, a gauge or an artifact, for people and as JSON."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from signed_align.checkpoint import Checkpoint
from signed_align.errors import SignedAlignError
from signed_align.gauge import Gauge, by_kind
from signed_align.labels import Axes, Axis, Label, axes_text, kind_of
from signed_align.provenance import Record, is_record


def inspect(thing: str) -> tuple[dict[str, Any], list[str]]:
    """Describe ``thing``: a JSON object with its ``kind``, and lines of text.

    What moved it here, step by step, is under ``moves``, and files that are no longer what the
    last step wrote under ``changed``. Raises SignedAlignError if it is none of the things this
    package knows.
    """
    data, lines = _describe(thing)
    path = Path(thing)
    record = Record.of(path) if os.path.exists(path) else Record()
    if not record.steps:
        return data, lines
    changed = record.changed(path)
    if data["kind"] == "model" and record.target is not None:
        changed += ["weights"] if record.target.get("fingerprint") != data["fingerprint"] else []
    warning = [f"  changed since: {', '.join(changed)}"] if changed else []
    return (
        {**data, "moves": list(record.steps), "changed": changed},
        [*lines, "moved here by signed-align, the last step at the end", *record.lines(), *warning],
    )


def _describe(thing: str) -> tuple[dict[str, Any], list[str]]:
    from signed_align.adapters import recognise

    path = Path(thing)
    if not os.path.exists(path):
        return _model(Checkpoint.open(thing))
    is_gauge = path.is_file() and Gauge.recognises(path)
    family = recognise(path) if path.exists() and not is_gauge else None
    if family is not None:
        details = {"kind": family.kind, **family.inspect(path)}
        kind = details.pop("kind")
        return {"kind": kind, **details}, [
            kind,
            *(f"  {key:24}{value}" for key, value in details.items() if value is not None),
        ]
    if path.is_file() and path.suffix != ".safetensors" and not is_gauge:
        raise SignedAlignError(f"{path} is not a model, a gauge or an artifact.")
    if path.is_file():
        gauge = Gauge.load(path)
        summary, kinds = gauge.summary(), by_kind(gauge)
        return {"kind": "gauge", "kinds": kinds, **summary}, _gauge_lines(summary, kinds)
    found = _inside(path) if path.is_dir() and not (path / "config.json").is_file() else {}
    if found:
        kind = f"directory of {len(found)} artifacts"
        return {"kind": kind, "artifacts": found}, [
            kind,
            *(f"  {name:24}{what}" for name, what in found.items()),
        ]
    if path.is_dir() and not (path / "config.json").is_file():
        raise SignedAlignError(f"{path} is not a model, a gauge or an artifact.")
    return _model(Checkpoint.open(thing))


def _inside(path: Path) -> dict[str, str]:
    """The kinds of the artifacts in a directory that is none itself, by relative path."""
    from signed_align.adapters import recognise
    from signed_align.adapters.formats import is_readable

    found: dict[str, str] = {}
    try:
        children = sorted(path.rglob("*"))
    except OSError as error:
        raise SignedAlignError(f"{path} cannot be read: {error}.") from error
    for child in children:
        inside = any(str(child).startswith(f"{path / other}/") for other in found)
        known = inside or is_record(child) or not is_readable(child)
        family = None if known else recognise(child)
        if family is not None:
            found[str(child.relative_to(path))] = family.kind
    return found


def _model(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    chart = checkpoint.chart
    labels: dict[str, Axes] = {}
    for name in checkpoint.files:
        pattern = re.sub(r"\.\d+(?=\.)", ".*", name)
        if pattern not in labels:
            labels[pattern] = chart.axes(name, checkpoint.shape(name))
    tied = bool(getattr(checkpoint.config.get_text_config(), "tie_word_embeddings", False))
    spaces = _spaces(checkpoint)
    data = {
        "kind": "model",
        "model_type": chart.model_type,
        "norm": chart.norm,
        "native_group": chart.native_group.value,
        "spaces": {kind: entry["size"] for kind, entry in spaces.items()},
        "space_groups": spaces,
        "proof": "proved",
        "tied_embeddings": tied,
        "tensors": len(checkpoint.files),
        "fingerprint": checkpoint.identity.fingerprint,
        "chart": {pattern: [_axis_data(axis) for axis in axes] for pattern, axes in labels.items()},
    }
    width = max(map(len, labels))
    return data, [
        f"{checkpoint.name}: a {chart.model_type} model of {len(checkpoint.files)} tensors",
        f"  norm           {chart.norm}",
        f"  native group   {_words(chart.native_group.value)}",
        "  proof          proved on a miniature of its class",
        *(
            f"  {kind:14} {_counted(entry)}, {_words(entry['group'])}"
            for kind, entry in spaces.items()
        ),
        f"  embeddings     {'tied' if tied else 'not tied'}",
        f"  fingerprint    {checkpoint.identity.fingerprint[:12]}",
        "  chart (|x|: permuted, keeps its sign)",
        *(f"    {pattern:{width}}  {axes_text(axes)}" for pattern, axes in labels.items()),
    ]


def _spaces(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Per kind of space: how many there are, of what size, and how their coordinates may move."""
    found: dict[str, dict[str, Any]] = {}
    for space in checkpoint.spaces.values():
        entry = found.setdefault(
            space.kind,
            {
                "size": space.group.size,
                "count": 0,
                "blocks": space.group.blocks,
                "blocks_move": space.group.blocks_move,
                "group": space.group.within.value,
            },
        )
        entry["count"] += 1
    return found


def _counted(entry: dict[str, Any]) -> str:
    spaces = f"{entry['count']} spaces of " if entry["count"] > 1 else ""
    blocks = f" in {entry['blocks']} blocks" if entry["blocks"] > 1 else ""
    moving = " that move" if entry["blocks_move"] else ""
    return f"{spaces}{entry['size']} coordinates{blocks}{moving}"


def _words(value: str) -> str:
    return value.replace("_", " ")


def _axis_data(label: Label | None) -> dict[str, Any] | None:
    if label is None:
        return None
    if isinstance(label, Axis):
        return {"space": kind_of(label.space), "signed": label.signed}
    return {"spaces": [kind_of(space) for space in label.spaces], "blocks": len(label.sections)}


def _gauge_lines(summary: dict[str, Any], kinds: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["gauge", f"  hash       {summary['hash'][:12]}"]
    for end in ("source", "target"):
        model = summary[end]
        lines.append(
            f"  {end:10} {model['name']} ({model['model_type']}, {model['fingerprint'][:12]})"
            if model
            else f"  {end:10} not recorded"
        )
    for kind, entry in kinds.items():
        spaces = f" in {entry['spaces']} spaces" if entry["spaces"] > 1 else ""
        lines.append(
            f"  {kind:10} {entry['coordinates']} coordinates{spaces}, "
            f"{entry['fixed_point_fraction']:.3f} unmoved, "
            f"{entry['positive_sign_fraction']:.3f} with sign +1"
        )
        if "margin" in entry:
            quantiles = "  ".join(f"{name} {value:.3f}" for name, value in entry["margin"].items())
            lines.append(f"  {'':10} margin {quantiles}, weak {entry['weak_fraction']:.3f}")
    for key, value in summary["provenance"].items():
        lines.append(f"  {key:10} {value}")
    return lines
