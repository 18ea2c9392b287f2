"""Tables of what a JSON object says: any value becomes rows, of whatever shape it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

SEPARATOR = " · "
MOST_ROWS = 400
MOST_COLUMNS = 20
MOST_LISTED = 12
"""Entries of a list in one cell."""
MOST_LETTERS = 400
DEEPEST = 8
OPEN_ROWS = 12
"""A table with more rows than these is folded."""

Path = tuple[str, ...]


class Cell(NamedTuple):
    """What stands in one place of a table; numbers are set flush right."""

    text: str
    is_number: bool = False


@dataclass(frozen=True)
class Table:
    """A table of a page; ``left_out`` rows of the file are not in it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    left_out: int = 0

    @property
    def folded(self) -> bool:
        """Whether the reader has to open it."""
        return len(self.rows) > OPEN_ROWS


def facts(title: str, data: Mapping[str, Any], names: Sequence[str] | None = None) -> Table | None:
    """A table of two columns: names and values; None if there is nothing to show.

    Parameters
    ----------
    title : str
        Stands above it.
    data : mapping
        A JSON object; objects in it are flattened, to rows such as ``margin · median``.
    names : sequence of str, optional
        Which of its values, such as ``margin`` or ``source.name``; those it lacks are left out.
        By default all.
    """
    pairs = list(_values(data, names))
    rows = [
        [Cell(SEPARATOR.join(map(in_words, path))), _cell(path, value)] for path, value in pairs
    ]
    return _table(title, ("", ""), rows)


def grid(
    title: str, value: Any, *, depth: int = 1, columns: Sequence[str] | None = None
) -> Table | None:
    """A table with a row for each entry; None if there is nothing to show.

    Parameters
    ----------
    title : str
        Stands above it.
    value : list of objects, or object of objects
        The names of an object's entries are the first column.
    depth : int
        How many levels of objects make one row's name.
    columns : sequence of str, optional
        Which values of an entry, such as ``margin`` or ``source.name``; by default all.
    """
    entries = list(_entries(value, depth))
    named = isinstance(value, Mapping)
    rows = []
    for path, entry in entries:
        rows.append((path, dict(islice(_values(entry, columns), MOST_COLUMNS))))
    heads = list(dict.fromkeys(name for _, row in rows for name in row))[:MOST_COLUMNS]
    if not heads:
        return None
    return _table(
        title,
        [*([""] if named else []), *(SEPARATOR.join(map(in_words, head)) for head in heads)],
        [
            [
                *([Cell(SEPARATOR.join(map(in_words, path)))] if named else []),
                *(_cell(head, row[head]) if head in row else Cell("") for head in heads),
            ]
            for path, row in rows
        ],
    )


def is_grid(value: Any) -> bool:
    """Whether a value is a list of objects, which :func:`grid` shows best."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def pick(data: Any, path: Sequence[str]) -> Any:
    """The value under the keys of nested objects; None if there is none."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def in_words(name: str) -> str:
    """A key of a JSON object as people write it."""
    return _clipped(name.replace("_", " "))


def text_of(value: Any, *, inside: bool = False) -> str:
    """A value on one line, numbers with four significant digits; ``inside`` a list, lists are …"""
    if value is None:
        return "−"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return _clipped(f"{value:,}")
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, list) and not inside:
        entries = [text_of(one, inside=True) for one in value[:MOST_LISTED]]
        shown = ("; " if any("," in entry for entry in entries) else ", ").join(entries) or "none"
        more = len(value) - MOST_LISTED
        return _clipped(shown) + (f", … ({more:,} more)" if more > 0 else "")
    if isinstance(value, Mapping | list):
        return "…" if value else "none"
    return _clipped(str(value))


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table | None:
    if not rows:
        return None
    return Table(title, columns, rows[:MOST_ROWS], max(0, len(rows) - MOST_ROWS))


def _values(data: Mapping[str, Any], names: Sequence[str] | None) -> Iterator[tuple[Path, Any]]:
    """The values of an object, or those under some names that it has."""
    paths = [(name,) for name in data] if names is None else [tuple(n.split(".")) for n in names]
    for path in paths:
        value = data[path[0]] if names is None else pick(data, path)
        if value is not None or names is None:
            yield from _flat(value, path)


def _flat(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values at the ends of nested objects, and lists of objects, by their path."""
    if is_grid(value) and len(path) < DEEPEST:
        value = {str(number): entry for number, entry in enumerate(value, 1)}
    if isinstance(value, Mapping) and value and len(path) < DEEPEST:
        for name, entry in value.items():
            yield from _flat(entry, (*path, name))
    else:
        yield path, value


def _entries(value: Any, depth: int) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The objects that are rows of a grid, each with its name."""
    children: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, Mapping):
        children = iter(value.items())
    elif isinstance(value, list):
        children = ((str(number), entry) for number, entry in enumerate(value, 1))
    for name, entry in children:
        if depth > 1:
            yield from (((name, *path), below) for path, below in _entries(entry, depth - 1))
        elif isinstance(entry, Mapping):
            yield (name,), entry


def _cell(path: Path, value: Any) -> Cell:
    if path and path[-1] == "fingerprint" and isinstance(value, str):
        return Cell(value[:12])
    return Cell(text_of(value), isinstance(value, int | float) and not isinstance(value, bool))


def _clipped(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"
