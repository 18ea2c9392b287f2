"""Proved charts on disk, as JSON: what was proved once need not be proved again."""

from __future__ import annotations

import json
import os
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from signed_align.chart import (
    Chart,
    Form,
    Layout,
    ModuleLabel,
    Part,
    Site,
    StoredTensor,
    Tiled,
)
from signed_align.dimensions import Dimensions
from signed_align.errors import OutputError
from signed_align.files import atomic_path
from signed_align.groups import Within
from signed_align.labels import Axis

_CLASSES = {
    cls.__name__: cls
    for cls in (Axis, Chart, Dimensions, Form, Layout, ModuleLabel, Part, Site, StoredTensor, Tiled)
}


def load(key: str) -> Chart | None:
    """The chart stored under ``key``; None if there is none, or it cannot be read."""
    try:
        chart = _decoded(json.loads(_file(key).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return chart if isinstance(chart, Chart) else None


def store(key: str, chart: Chart) -> None:
    """Keep a chart; a cache that cannot be written is no error."""
    try:
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(_file(key), directory=False, force=True) as temporary:
            temporary.write_text(json.dumps(_encoded(chart)), encoding="utf-8")
    except (OSError, OutputError):
        return


def _file(key: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "signed-align" / "charts" / f"{key}.json"


def _encoded(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        content = {field.name: _encoded(getattr(value, field.name)) for field in fields(value)}
        return {"class": type(value).__name__, **content}
    if isinstance(value, (set, frozenset)):
        return {"class": "frozenset", "members": sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_encoded(member) for member in value]
    if isinstance(value, dict):
        return {str(name): _encoded(member) for name, member in value.items()}
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decoded(member) for member in value)
    if not isinstance(value, dict):
        return value
    content = {name: _decoded(member) for name, member in value.items() if name != "class"}
    if "class" not in value:
        return content
    if value["class"] == "frozenset":
        return frozenset(content["members"])
    for name in ("within", "native_group"):
        if name in content:
            content[name] = Within(content[name])
    return _CLASSES[value["class"]](**content)
