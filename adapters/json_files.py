"""JSON files: read, and written in the layout they had."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from signed_align.errors import ArtifactError

JSON_LAYOUTS: tuple[tuple[Any, ...], ...] = (
    (None, (",", ":"), (", ", ": ")),
    (True, False),
    ("", "\n"),
)
"""Separators, whether only ASCII is written, and the end: how Python writes JSON."""

MOST_INDENT = 16

MOST_NESTED = 64
"""A file whose containers lie deeper in each other holds nothing for people."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises ArtifactError if it is not one."""
    content = read_any_json(path)
    if not isinstance(content, dict):
        raise ArtifactError(f"{path} holds no JSON object.")
    return content


def read_any_json(path: Path) -> Any:
    """Any JSON value from a file; raises ArtifactError if it is not readable."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not readable JSON: {error}.") from error
    if _is_deeper(content, MOST_NESTED):
        raise ArtifactError(f"{path} is nested more than {MOST_NESTED} levels deep.")
    return content


def _is_deeper(content: Any, most: int) -> bool:
    level = [content]
    for _ in range(most):
        holders = [holder for holder in level if isinstance(holder, (dict, list))]
        level = [
            item
            for holder in holders
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
    return bool(level)


def json_like(text: str, content: Any) -> str:
    """``content`` as JSON, laid out as ``text`` is, if that is a way in which Python writes it."""
    old, indent = json.loads(text), _indent(text)
    for separators, ascii_only, end in product(*JSON_LAYOUTS):
        dump = partial(json.dumps, indent=indent, separators=separators, ensure_ascii=ascii_only)
        if dump(old) + end == text:
            return dump(content) + end
    return json.dumps(content, indent=2) + "\n"


def _indent(text: str) -> int | str | None:
    """What stands in front of the second line, if there is one."""
    rest = text.partition("\n")[2]
    if not rest.strip():
        return None
    blank = rest[: len(rest) - len(rest.lstrip(" \t"))]
    if len(blank) > MOST_INDENT:
        return None
    return blank if "\t" in blank else len(blank)


def holds_vector(content: Any, size: int) -> bool:
    """Whether a list of ``size`` numbers stands anywhere in the content of a JSON file."""
    if isinstance(content, dict):
        return any(holds_vector(item, size) for item in content.values())
    if not isinstance(content, list):
        return False
    if len(content) == size and all(type(item) in (int, float) for item in content):
        return True
    return any(holds_vector(item, size) for item in content)
