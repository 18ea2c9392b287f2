"""JSON files: read, and written in the layout they had."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from signed_align.errors import ArtifactError

JSON_LAYOUTS: tuple[tuple[Any, ...], ...] = (
    (None, 0, 1, 2, 3, 4, "\t"),
    (None, (",", ":"), (", ", ": ")),
    (True, False),
    ("", "\n"),
)
"""Indents, separators, whether only ASCII is written, and the end: how Python writes JSON."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises ArtifactError if it is not one."""
    content = read_any_json(path)
    if not isinstance(content, dict):
        raise ArtifactError(f"{path} holds no JSON object.")
    return content


def read_any_json(path: Path) -> Any:
    """Any JSON value from a file; raises ArtifactError if it is not readable."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not readable JSON: {error}.") from error


def json_like(text: str, content: Any) -> str:
    """``content`` as JSON, laid out as ``text`` is, if that is a way in which Python writes it."""
    old = json.loads(text)
    for indent, separators, ascii_only, end in product(*JSON_LAYOUTS):
        dump = partial(json.dumps, indent=indent, separators=separators, ensure_ascii=ascii_only)
        if dump(old) + end == text:
            return dump(content) + end
    return json.dumps(content, indent=2) + "\n"


def holds_vector(content: Any, size: int) -> bool:
    """Whether a list of ``size`` numbers stands anywhere in the content of a JSON file."""
    if isinstance(content, dict):
        return any(holds_vector(item, size) for item in content.values())
    if not isinstance(content, list):
        return False
    if len(content) == size and all(type(item) in (int, float) for item in content):
        return True
    return any(holds_vector(item, size) for item in content)
