"""Reading a directory of results: what is ours, and for everything else the reason why not."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from signed_align.errors import SignedAlignError
from signed_align.gauge import Gauge, by_kind
from signed_align.report.found import Found
from signed_align.report.kinds import GAUGE_FILE, MARGINS, kind_of_data
from signed_align.report.shapes import GaugeOutput
from signed_align.report.tables import pick

SUFFIXES = (".json", ".safetensors")
MOST_BYTES = 64 * 2**20
"""JSON files that are larger are no output of ours."""


class Skipped(Exception):  # noqa: N818
    """A file that is not shown, with the reason."""


def files_in(directory: Path) -> list[Path]:
    """The files of a directory that may be ours, by name; raises SignedAlignError."""
    if not directory.is_dir():
        raise SignedAlignError(f"{directory} is not a directory.")
    try:
        return sorted(
            path
            for path in directory.iterdir()
            if path.suffix in SUFFIXES and not path.name.startswith(".") and path.is_file()
        )
    except OSError as error:
        raise SignedAlignError(f"{directory} cannot be read: {error.strerror}.") from error


def read(file: Path) -> Found:
    """What a file is; raises Skipped if it is none of ours, or not what it should be."""
    return _gauge_file(file) if file.suffix == ".safetensors" else _output(file)


def shown_name(file: Path) -> str:
    """A file's name as text that can be encoded."""
    return os.fsencode(file.name).decode(errors="replace")


def _gauge_file(file: Path) -> Found:
    if not Gauge.recognises(file):
        raise Skipped("it is a safetensors file, but not a gauge")
    try:
        gauge = Gauge.load(file)
    except SignedAlignError as error:
        raise Skipped(str(error).rstrip(".")) from error
    data = {**gauge.summary(), "kinds": by_kind(gauge)}
    notes = () if gauge.margins else ("The gauge has no margins: it was made, not recovered.",)
    return Found(shown_name(file), GAUGE_FILE, data, gauge=gauge, notes=notes)


def _output(file: Path) -> Found:
    data = _json_object(file)
    kind = kind_of_data(data)
    if kind is None:
        raise Skipped("it is not the output of a command or benchmark")
    shape, gauge, note = None, None, None
    if kind.shape is not None:
        try:
            shape = kind.shape.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "it"
            raise Skipped(
                f"it seems to be of the kind {kind.name!r}, but {place}: {first['msg']}"
            ) from error
    if MARGINS in kind.plots and isinstance(shape, GaugeOutput):
        gauge, note = _companion(file.parent, shape.gauge, data)
    return Found(shown_name(file), kind, data, shape, gauge, (note,) if note else ())


def _json_object(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MOST_BYTES:
            raise Skipped(f"it is larger than {MOST_BYTES // 2**20} MiB")
        data = json.loads(file.read_bytes(), parse_constant=_not_json)
        # a lone surrogate could neither be drawn nor written
        json.dumps(data, ensure_ascii=False).encode()
    except OSError as error:
        raise Skipped(f"it cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise Skipped("it is nested too deeply") from error
    except UnicodeError as error:
        raise Skipped("it holds what is not text") from error
    except ValueError as error:
        raise Skipped(f"it is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise Skipped("it does not hold a JSON object")
    return data


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"it holds {constant}")


def _companion(
    directory: Path, given: str, data: Mapping[str, Any]
) -> tuple[Gauge | None, str | None]:
    """The gauge that an output tells of, if its file is still there; else a note."""
    name = os.path.basename(given)
    places = [place for place in (given, directory / name) if os.path.isfile(place)]
    for place in places:
        try:
            gauge = Gauge.load(place)
        except SignedAlignError:
            continue
        if _is_told_of(gauge, data):
            return gauge, None
    why = "is not the one that this was printed for" if places else "is not there"
    return None, f"The gauge file {given} {why}: of its margins there are only quantiles."


def _is_told_of(gauge: Gauge, data: Mapping[str, Any]) -> bool:
    """Whether a gauge has the ends and the margins that an output tells of."""
    ends = {name: end.summary() if end else None for name, end in _ends(gauge).items()}
    if any(data.get(name) != end for name, end in ends.items()):
        return False
    return all(
        _close(value, pick(data, ("kinds", kind, "margin", quantile)))
        for kind, entry in by_kind(gauge).items()
        for quantile, value in entry.get("margin", {}).items()
    )


def _ends(gauge: Gauge) -> dict[str, Any]:
    return {"source": gauge.source, "target": gauge.target}


def _close(value: float, told: Any) -> bool:
    return isinstance(told, float | int) and math.isclose(value, told, abs_tol=1e-6)
