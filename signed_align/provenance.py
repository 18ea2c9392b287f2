"""What an output says of its making: from which model to which, through which gauge, by what.

A directory keeps its record in ``signed_align.json``, a single file in ``FILE.signed_align.json``
beside it. Every move adds a step, so that a record is the chain from where an artifact was made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from signed_align.errors import ArtifactError
from signed_align.gauge import BASELINES, Gauge, ModelIdentity
from signed_align.json_values import finite
from signed_align.labels import kind_of

RECORD_NAME = "signed_align.json"
FORMAT = "signed-align-provenance"
FORMAT_VERSION = 1
MOST_BYTES = 16 * 2**20
"""No record is larger."""

PACKAGES = ("signed-align", "torch", "transformers", "safetensors", "peft", "sae-lens", "mergekit")

command: ContextVar[str | None] = ContextVar("command", default=None)
"""The command line that is running, if there is one."""


def stamp() -> dict[str, Any]:
    """What made something: the ``versions`` of the packages, and the ``command``, if it was one."""
    return {"versions": _versions(), **({"command": command.get()} if command.get() else {})}


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def text_hash(sentences: Iterable[str]) -> str:
    """SHA-256, in hexadecimal, of calibration text, a sentence a line."""
    return hashlib.sha256("\n".join(sentences).encode(errors="surrogatepass")).hexdigest()


def file_hash(file: Path) -> str:
    """SHA-256, in hexadecimal, of a file's bytes."""
    digest = hashlib.sha256()
    with open(file, "rb") as reader:
        while block := reader.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def gauge_summary(gauge: Gauge) -> dict[str, Any]:
    """What a record keeps of a gauge: its content hash, its spaces, and how it was found."""
    kept = ("method", "objective", "group", "text_hash", "verdict", "seed", "inverted")
    known = gauge.provenance
    stored = gauge.inverse() if known.get("inverted") else gauge  # as its file has it
    return {
        "hash": stored.content_hash,
        "spaces": sorted(set(map(kind_of, gauge.elements))),
        **{key: known[key] for key in kept if key in known},
        **({"steps": len(known["path"])} if isinstance(known.get("path"), list) else {}),
    }


def end(model: ModelIdentity | None) -> dict[str, Any] | None:
    """What a record keeps of a model."""
    return model.summary() if model else None


@dataclass(frozen=True)
class Record:
    """The steps that led to an output, the oldest first.

    Parameters
    ----------
    steps : sequence of dict
        Each has ``action`` (``port``, ``apply``, ``merge``), the ``source`` and
        ``target`` models, the ``gauge``, and what was said of it; ``versions`` and ``command``.
    files : mapping of str to str
        SHA-256 of the files that the last step wrote, by relative path; empty for checkpoints,
        which have a fingerprint.
    """

    steps: Sequence[Mapping[str, Any]] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def place(output: Path) -> Path:
        """Where the record of an output stands: in a directory, or beside a file."""
        if output.is_dir():
            return output / RECORD_NAME
        return output.with_name(f"{output.name}.{RECORD_NAME}")

    @classmethod
    def of(cls, output: Path) -> Record:
        """The record of an output, empty if there is none; raises ArtifactError if damaged."""
        place = cls.place(output)
        if not place.is_file():
            return cls()
        try:
            if place.stat().st_size > MOST_BYTES:
                raise ValueError("too large")
            content = json.loads(place.read_text(encoding="utf-8"))
            if content["format"] != FORMAT or content["version"] != FORMAT_VERSION:
                raise ValueError("another format")
            steps, files = content["steps"], content["files"]
            if not all(_is_step(step) for step in steps) or not isinstance(steps, list):
                raise ValueError("a step of another form")
            if not all(isinstance(value, str) for value in files.values()):
                raise ValueError("a hash of another form")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArtifactError(
                f"{place} is not a provenance record that this release reads; remove it if what "
                "it says of the artifact does not matter."
            ) from error
        return cls(tuple(steps), files)

    @classmethod
    def current(cls, output: Path) -> tuple[Record, list[str]]:
        """The record of an artifact, none if files changed since its last step; and those files."""
        record = cls.of(output)
        changed = record.changed(output)
        return (cls() if changed else record), changed

    @property
    def target(self) -> Mapping[str, Any] | None:
        """The model whose coordinates the output has; None if no step says it."""
        return self.steps[-1].get("target") if self.steps else None

    def then(self, **step: Any) -> Record:
        """The record after one more step, with the stamp of what is running."""
        return Record((*self.steps, {**step, **stamp()}), {})

    def changed(self, output: Path) -> list[str]:
        """The files that are not what the last step wrote, relative to ``output``."""
        root = output
        if not output.is_dir():  # it may have been renamed, with its record
            same = file_hash(output) in self.files.values()
            return [] if same or not self.files else [output.name]
        return sorted(
            name
            for name, digest in self.files.items()
            if not os.path.isfile(root / name) or file_hash(root / name) != digest
        )

    def save(self, output: Path, written: Iterable[Path] = ()) -> None:
        """Write the record of ``output``, with the hashes of the files that were written."""
        root = output if output.is_dir() else output.parent
        content = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "steps": list(self.steps),
            "files": {str(file.relative_to(root)): file_hash(file) for file in sorted(written)},
        }
        try:
            text = json.dumps(finite(content, instead=str), indent=2, allow_nan=False)
        except RecursionError as error:
            raise ArtifactError(
                f"the provenance of {output.name} is nested too deeply to be written; remove it "
                "from the gauge, or the earlier record, that holds it."
            ) from error
        self.place(output).write_text(f"{text}\n", encoding="utf-8")

    def lines(self) -> list[str]:
        """The chain in words, a step a line."""
        return [f"  {_words(step)}" for step in self.steps]


def is_record(file: Path) -> bool:
    """Whether a file is named as a record is."""
    return file.name == RECORD_NAME or file.name.endswith(f".{RECORD_NAME}")


def _is_step(step: Any) -> bool:
    return (
        isinstance(step, dict)
        and isinstance(step.get("action"), str)
        and all(
            model is None or (isinstance(model, dict) and isinstance(model.get("name"), str))
            for model in (step.get("source"), step.get("target"))
        )
    )


def _words(step: Mapping[str, Any]) -> str:
    models = step.get("models")
    sources = models if isinstance(models, list) else [step.get("source")]
    words = f"{step['action']:10}{', '.join(map(_named, sources))} -> {_named(step.get('target'))}"
    gauge = step.get("gauge")
    if isinstance(gauge, dict):
        found = gauge.get("verdict")
        finding = f", {found['finding']}" if isinstance(found, dict) and "finding" in found else ""
        inverse = "inverse of " if gauge.get("inverted") else ""
        objective = gauge.get("objective")
        known = f", baseline {objective}" if objective in BASELINES else ""
        words += f"  gauge {inverse}{str(gauge.get('hash'))[:12]} "
        words += f"({gauge.get('method')}{known}{finding})"
    doubt = step.get("doubt")
    return f"{words}  DOUBTFUL: {doubt}" if doubt else words


def _named(model: Any) -> str:
    if not isinstance(model, dict):
        return "a model"
    return f"{model.get('name')} ({str(model.get('fingerprint'))[:12]})"
