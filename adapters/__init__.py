"""Artifacts that live in a model's coordinates, one module per family.

A family only labels tensors; :func:`port` moves them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from signed_align.activations import sentences_of
from signed_align.adapters.artifact import Artifact, Family, Journey, Part, leftovers, move
from signed_align.adapters.confidence import confidence_of
from signed_align.adapters.effects import (
    Measure,
    adapter_effect,
    dictionary_effect,
    vector_effect,
    verify_artifacts,
)
from signed_align.adapters.json_files import holds_vector, read_any_json
from signed_align.adapters.lists import ListFamily
from signed_align.adapters.optimizer import OptimizerFamily
from signed_align.adapters.peft import PeftFamily
from signed_align.adapters.probes import ProbeFamily
from signed_align.adapters.sae import SaeFamily
from signed_align.adapters.steering import SteeringFamily
from signed_align.adapters.training import TrainingFamily
from signed_align.checkpoint import NOT_WEIGHTS, is_weight_file
from signed_align.errors import ArtifactError
from signed_align.files import atomic_path
from signed_align.fit import check_gauge
from signed_align.gauge import Gauge
from signed_align.model_card import add_section
from signed_align.provenance import Record, end, gauge_summary, is_record
from signed_align.reliability import warn_of_verdict
from signed_align.sources import Sources

__all__ = [
    "FAMILIES",
    "Artifact",
    "Family",
    "Journey",
    "Part",
    "port",
    "read_all",
    "recognise",
]

FAMILIES: tuple[Family, ...] = (
    TrainingFamily(),
    PeftFamily(),
    SaeFamily(),
    OptimizerFamily(),
    ListFamily(),
    ProbeFamily(),
    SteeringFamily(),
)
"""In the order in which they are asked: what says what it is comes before what does not."""


EFFECTS: Mapping[type[Family], Measure] = {
    PeftFamily: adapter_effect,
    SaeFamily: dictionary_effect,
    SteeringFamily: vector_effect,
}
"""What ``port --verify`` measures, for the families that do something by themselves."""


def recognise(path: Path) -> Family | None:
    """The family of the artifact at ``path``, a directory or a file, or None."""
    return next((family for family in FAMILIES if family.recognises(path)), None)


UNRECOGNISED = "is not recognised"
MOST_JSON = 16 * 2**20
"""Bytes of a JSON file that is looked through for a vector."""


@dataclass
class Findings:
    """What lies in a directory: artifacts, and files that are left out, each with the reason."""

    artifacts: list[Artifact] = field(default_factory=list)
    left_out: dict[Path, str] = field(default_factory=dict)


def read_all(path: Path, journey: Journey, found: Findings | None = None) -> Findings:
    """Read and label the artifacts at and below ``path``.

    What lies beside an artifact and cannot be moved is left out.

    Raises
    ------
    ArtifactError
        If an artifact cannot be moved, or a directory that is no artifact itself holds something
        that cannot, or weights that no family recognises.
    """
    found = Findings() if found is None else found
    family = recognise(path)
    claimed: set[Path] = set()
    if family is not None:
        artifact = family.read(path, journey)
        found.artifacts.append(artifact)
        claimed = artifact.files | {path / name for name in artifact.carried}
    for child in sorted(path.iterdir()) if path.is_dir() else ():
        if child.name.startswith(".") or is_record(child):
            continue
        if child.is_dir() and child.is_symlink():
            raise ArtifactError(f"{child} is a link to a directory, which is not followed.")
        if child.is_dir():
            read_all(child, journey, found)
        elif child.is_file() and child not in claimed and child.name not in NOT_WEIGHTS:
            _read_file(child, journey, found, beside=family is not None)
    return found


def _read_file(file: Path, journey: Journey, found: Findings, *, beside: bool) -> None:
    """Read a file in a directory; ``beside`` an artifact it may be left out."""
    family = recognise(file)
    if family is None:
        reason = UNRECOGNISED if is_weight_file(file) else _unread(file, journey)
        if reason and not beside:
            raise ArtifactError(f"{file} {reason}, so the directory cannot be moved as a whole.")
        if reason:
            found.left_out[file] = reason
        return
    try:
        found.artifacts.append(family.read(file, journey))
    except ArtifactError as error:
        if not beside:
            raise
        found.left_out[file] = str(error)


def _unread(file: Path, journey: Journey) -> str | None:
    """Why a file that is no artifact should not be copied as it is; None if it may."""
    if file.suffix == ".json" and file.stat().st_size <= MOST_JSON:
        with suppress(ArtifactError):
            if holds_vector(read_any_json(file), journey.chart.width):
                return "holds a list of as many numbers as there are residual coordinates"
    return None


def port(
    artifact: str | Path,
    gauge: Gauge,
    out: str | Path,
    *,
    hook: str | None = None,
    inverse: bool = False,
    made_on: str | None = None,
    any_source: bool = False,
    accept_weak: bool = False,
    allow_pickle: bool = False,
    verify: bool | None = None,
    text: str | Path | Sequence[str] | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Move what was made on the gauge's source to its target, whatever family it is of.

    Parameters
    ----------
    artifact : str or Path
        A file or a directory; a directory may hold several artifacts.
    gauge : Gauge
        Leads from the model the artifact was made on to the model it is wanted on.
    out : str or Path
        The file or directory to make; the artifact's own library loads it from there.
    hook : str, optional
        The place in the model that an artifact belongs to which does not name one itself, such as
        ``blocks.3.mlp.hook_post`` or ``model.layers.3``.
    inverse : bool
        Use the inverse gauge.
    made_on : str, optional
        The model that an artifact was made on which does not name one itself.
    any_source : bool
        Accept an artifact that was made on another model than the gauge's source, or that does not
        say on which.
    accept_weak : bool
        Accept an artifact with more than a quarter of its energy on weak coordinates.
    allow_pickle : bool
        Accept files that can only be read by running code in them: joblib's.
    verify : bool, optional
        None checks the gauge against its two models where they are at hand, without running them.
        True runs them too, with the artifact where it has an effect, and needs both. False does
        neither.
    text : path or sequence of str, optional
        What the models are run on; prose that ships with Python by default.
    force : bool
        Replace ``out`` if it exists.

    Returns
    -------
    dict
        ``name`` (of the file or directory), ``kind`` (what was recognised), ``out``, ``tensors``
        (how many), ``made_on``, ``source_verified``, ``doubt`` (why its model does not seem to be
        the gauge's), ``notes``, ``labels`` (how each tensor was labelled), ``weak_energy``,
        ``weak_below`` and ``weakest_tensor`` (how much stands on coordinates that the gauge is not
        sure of), ``left_out`` (weight files that do not belong to the artifact), ``artifacts``
        (the same of each, where there are several), ``verification``.

    Raises
    ------
    UnreliableGaugeError
        If too much of the artifact stands on coordinates that the gauge is not sure of.
    VerificationError
        If the gauge does not fit its models, or the artifact's effect does not arrive.
    ArtifactError
        If the artifact, or any tensor in it, is not understood.
    """
    path = Path(artifact)
    if not os.path.exists(path):
        raise ArtifactError(f"there is no artifact at {path}.")
    sources = Sources.below(path)
    warn_of_verdict(gauge)
    gauge = gauge.inverse() if inverse else gauge
    journey = Journey.along(gauge, hook=hook, allow_pickle=allow_pickle, made_on=made_on)
    if (path / "config.json").is_file() and recognise(path) is None:
        raise _not_recognised(path)
    sentences = sentences_of(text) if verify or text is not None else []
    findings = read_all(path, journey)
    found = findings.artifacts
    if not found:
        raise _not_recognised(path)
    confidences = [confidence_of(one, gauge) for one in found]
    if not accept_weak:
        for one, confidence in zip(found, confidences, strict=True):
            confidence.require(one)
    verification: dict[str, Any] = {"skipped": "not asked for"}
    if verify is not False:
        rows = [row for one in found for row in one.explanation(gauge)]
        verification = check_gauge(gauge, {space for row in rows for space in row["spaces"]})
    reports = []
    left_out: list[str] = []
    with atomic_path(Path(out), directory=path.is_dir(), force=force, inputs=[path]) as temporary:
        places = {one: temporary / one.path.relative_to(path) for one in found}
        records = {one: Record.current(one.path) for one in found}
        for one, confidence in zip(found, confidences, strict=True):
            if one.path.is_dir():
                places[one].mkdir(parents=True, exist_ok=True)
            name = str(one.path.relative_to(path)) if len(found) > 1 else one.path.name
            record, changed = records[one]
            report = move(one, journey, places[one], record, any_source=any_source)
            if changed:
                report["notes"].append(f"changed since it was moved here: {', '.join(changed)}")
            reports.append({"name": name, **report, **confidence.to_dict()})
        if path.is_dir():
            left_out = leftovers(path, found, findings.left_out, temporary)
        if verify:
            moved = [(one, place, _effect_of(one.path)) for one, place in places.items()]
            verification = verify_artifacts(moved, gauge, sentences, hook)
        summary = {
            **(reports[0] if len(reports) == 1 else _summary(reports)),
            "verification": verification,
        }
        for (one, place), report in zip(places.items(), reports, strict=True):
            step = {**report, "verification": verification}
            record = _moved_on(records[one][0], gauge, step, any_source)
            if place.is_dir() and one.made_on and journey.target:
                add_section(place, record, base=(one.made_on, journey.target))
            record.save(place, [temporary / file.relative_to(path) for file in one.files])
        sources.require_unchanged()
    reasons = [
        f"{file.relative_to(path)} is left out: {reason}"
        for file, reason in findings.left_out.items()
        if not is_weight_file(file) or reason != UNRECOGNISED
    ]
    return {
        **summary,
        "notes": [*summary["notes"], *reasons],
        "out": str(out),
        "left_out": left_out,
    }


def _moved_on(record: Record, gauge: Gauge, report: Mapping[str, Any], any_source: bool) -> Record:
    """The record of an artifact after its move."""
    said = ("kind", "made_on", "source_verified", "doubt", "weak_energy", "verification")
    return record.then(
        action="port",
        source=end(gauge.source),
        target=end(gauge.target),
        gauge=gauge_summary(gauge),
        any_source=any_source,
        **{key: report[key] for key in said},
    )


def _summary(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of several artifacts."""
    kinds = list(dict.fromkeys(report["kind"] for report in reports))
    return {
        "name": ".",
        "kind": f"directory of {len(reports)} artifacts ({', '.join(kinds)})",
        "tensors": sum(report["tensors"] for report in reports),
        "made_on": ", ".join(dict.fromkeys(filter(None, (r["made_on"] for r in reports)))) or None,
        "source_verified": all(report["source_verified"] for report in reports),
        "doubt": next((report["doubt"] for report in reports if report["doubt"]), None),
        **_weakest(reports),
        "notes": [f"{r['name']}: {note}" for r in reports for note in r["notes"]],
        "labels": [row for report in reports for row in report["labels"]],
        "artifacts": reports,
    }


def _effect_of(path: Path) -> Measure | None:
    """What measures the effect of the artifact at ``path``, if anything does."""
    return next(
        (effect for family, effect in EFFECTS.items() if isinstance(recognise(path), family)), None
    )


def _weakest(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The confidence of the artifact that stands on weak coordinates most."""
    one = max(reports, key=lambda report: report["weak_energy"] or 0.0)
    return {key: one[key] for key in ("weak_energy", "weak_below", "weakest_tensor")}


def _not_recognised(path: Path) -> ArtifactError:
    hint = (
        "it looks like a whole checkpoint, which `signed-align apply` moves"
        if (path / "config.json").is_file()
        else "expected " + ", or ".join(family.kind for family in FAMILIES)
    )
    return ArtifactError(f"{path} is not an artifact that can be ported: {hint}.")
