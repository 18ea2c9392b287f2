"""What a file that was recognised is, and what a page shows of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from signed_align.gauge import Gauge
from signed_align.report.shapes import Shape
from signed_align.report.tables import Table, facts, grid, in_words, is_grid, pick

UNSHOWN = {"warnings"}
"""Keys that no table has: they are notes."""


@dataclass(frozen=True)
class Found:
    """A file that was recognised.

    Parameters
    ----------
    name : str
        The file's.
    kind : Kind
        What it is.
    data : mapping
        What it says.
    shape : Shape, optional
        What plots are drawn from, checked.
    gauge : Gauge, optional
        The gauge in the file, or the one it tells of.
    notes : sequence of str
        What a reader should know.
    """

    name: str
    kind: Kind
    data: Mapping[str, Any]
    shape: Any = None
    gauge: Gauge | None = None
    notes: Sequence[str] = ()

    @property
    def tables(self) -> list[Table]:
        """All tables that have something to show."""
        kind, shown, lists = self.kind, self.data, {}
        if kind.facts is None:
            shown = {name: value for name, value in self.data.items() if name not in UNSHOWN}
            lists = {name: shown.pop(name) for name in list(shown) if is_grid(shown[name])}
        names = None if kind.facts is None else kind.facts.split()
        tables = [
            facts("", shown, names),
            *(one.table(self.data) for one in kind.grids),
            *(grid(in_words(name), value) for name, value in lists.items()),
        ]
        return [table for table in tables if table is not None]

    @property
    def plots(self) -> list[Plot]:
        """The plots that can be drawn."""
        return [plot for plot in self.kind.plots if plot.applies(self)]


@dataclass(frozen=True)
class Grid:
    """A table with a row for each entry of a value, such as ``merge.paths``.

    ``columns`` are words, or None for all; ``depth`` is as in :func:`tables.grid`.
    """

    title: str
    key: str
    columns: str | None = None
    depth: int = 1

    def table(self, data: Mapping[str, Any]) -> Table | None:
        """The table, if the file has the value."""
        columns = None if self.columns is None else self.columns.split()
        value = pick(data, self.key.split("."))
        return grid(self.title, value, depth=self.depth, columns=columns)


def _always(found: Found) -> bool:
    return True


@dataclass(frozen=True)
class Plot:
    """A plot: ``draw`` writes it to an image file, with a title."""

    name: str
    caption: str
    draw: Callable[[Found, Path, str], None]
    applies: Callable[[Found], bool] = _always


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Parameters
    ----------
    name : str
        For reports.
    heading : str
        What it is, in words.
    required : str
        The keys that tell it from others.
    values : mapping of str to object
        What some of them must be.
    facts : str, optional
        Which values are in the table of two columns; all of them by default.
    grids : tuple of Grid
        Further tables.
    shape : type, optional
        What plots are drawn from.
    plots : tuple of Plot
        In order.
    """

    name: str
    heading: str
    required: str
    values: Mapping[str, Any] = field(default_factory=dict)
    facts: str | None = None
    grids: tuple[Grid, ...] = ()
    shape: type[Shape] | None = None
    plots: tuple[Plot, ...] = ()

    def recognises(self, data: Mapping[str, Any]) -> bool:
        """Whether a JSON object is of this kind."""
        return data.keys() >= set(self.required.split()) and all(
            data.get(key) == value for key, value in self.values.items()
        )
