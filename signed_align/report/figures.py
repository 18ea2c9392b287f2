"""Plots that are drawn for pages only: accuracies over anything, and margins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from signed_align.drawing import figure_in
from signed_align.gauge import WEAK_MARGIN, Gauge
from signed_align.labels import kind_of

T = TypeVar("T")

MOST_PANELS = 12
COLUMNS = 3
PANEL_SIZE = (3.6, 3.0)
BINS = 50
MOST_TICKS = 8


class Point(NamedTuple):
    """A value, and how far it spreads downwards and upwards."""

    value: float
    below: float = 0.0
    above: float = 0.0


Series = Mapping[str, Mapping[Any, Point]]
"""By the name of a series, values over numbers or over names."""


@dataclass(frozen=True)
class Accuracies:
    """Accuracies of several series, in a panel or several.

    Parameters
    ----------
    panels : mapping of str to Series
        By title.
    x_label, y_label : str
        What is on the axes.
    diagonal : bool
        Whether the line y = x is drawn.
    level : tuple of str and float, optional
        A horizontal line, and what it is.
    logarithmic : bool
        Whether x, which is above 0, is.
    """

    panels: Mapping[str, Series]
    x_label: str
    y_label: str = "sign accuracy"
    diagonal: bool = False
    level: tuple[str, float] | None = None
    logarithmic: bool = False


def draw_accuracies(data: Accuracies, file: str | Path, title: str = "") -> None:
    """Draw lines where x is a number, and bars where it is a name, to an image file."""
    names = list(dict.fromkeys(name for series in data.panels.values() for name in series))
    with figure_in(file, title, _size(data.panels)) as figure:
        for axis, panel, series in _panels(figure, data.panels):
            axis.set_title(panel, fontsize="medium")
            _draw_series(axis, series, names, logarithmic=data.logarithmic)
            if data.diagonal:
                axis.axline((0, 0), slope=1, label="y = x", **REFERENCE)
            if data.level is not None:
                axis.axhline(data.level[1], label=data.level[0], **REFERENCE)
            axis.set_ylim(-0.02, 1.05)
        figure.supxlabel(data.x_label + _more(data.panels), fontsize="medium")
        figure.supylabel(data.y_label, fontsize="medium")
        known = {
            label: handle
            for axis in figure.axes
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(known.values(), known.keys(), loc="outside right upper", frameon=False)


REFERENCE: dict[str, Any] = {"linestyle": "--", "linewidth": 1, "color": "grey"}
MARKERS = "osD^v<>"


def _draw_series(axis: Any, series: Series, names: list[str], *, logarithmic: bool) -> None:
    """Draw what one panel has of the series ``names``, whose colours are the same in all panels."""
    places = list(dict.fromkeys(x for points in series.values() for x in points))
    numbers = not any(isinstance(place, str) for place in places)
    for number, name in enumerate(names):
        points = series.get(name, {})
        shown = [x for x in (sorted(points) if numbers else places) if x in points]
        style: dict[str, Any] = {"color": f"C{number}", "label": name}
        values = [points[x].value for x in shown]
        ends = np.array([[points[x].below, points[x].above] for x in shown]).reshape(-1, 2).T
        spread = ends if ends.any() else None
        if numbers:  # larger marks behind smaller ones, so that equal values can be told apart
            mark = {"marker": MARKERS[number % len(MARKERS)], "markersize": max(9 - 2 * number, 3)}
            # side by side, where they have spreads that would cover each other
            apart = spread is not None and len(places) > 1 and not logarithmic
            step = (max(places) - min(places)) / len(places) / 20 if apart else 0.0
            at = [x + (number - (len(names) - 1) / 2) * step for x in shown]
            axis.errorbar(at, values, yerr=spread, capsize=3, **mark, **style)
        else:
            width = 0.8 / len(names)
            shift = (number - (len(names) - 1) / 2) * width
            at = [places.index(x) + shift for x in shown]
            axis.bar(at, values, width=width, yerr=spread, capsize=2, **style)
    if not numbers:
        axis.set_xticks(range(len(places)), places, rotation=30, ha="right")
    elif logarithmic:
        axis.set_xscale("log", base=2)
        axis.minorticks_off()
        if len(places) <= MOST_TICKS:
            axis.set_xticks(places)
        axis.xaxis.set_major_formatter("{x:,g}")


def pooled_margins(gauge: Gauge) -> dict[str, torch.Tensor]:
    """A gauge's margins by kind of space."""
    found: dict[str, list[torch.Tensor]] = {}
    for space, margin in gauge.margins.items():
        found.setdefault(kind_of(space), []).append(margin)
    return {kind: torch.cat(margins) for kind, margins in found.items()}


def draw_margins(gauge: Gauge, file: str | Path, title: str = "") -> None:
    """Draw a histogram of the margins of each kind of space to an image file."""
    pooled = pooled_margins(gauge)
    with figure_in(file, title, _size(pooled)) as figure:
        for axis, kind, margins in _panels(figure, pooled):
            values = margins.double().numpy()
            ends = (min(0.0, float(values.min())), max(1.0, float(values.max())))
            weights = np.full(len(values), 1 / len(values))
            axis.hist(values, bins=BINS, range=ends, weights=weights)
            axis.axvline(WEAK_MARGIN, label=f"weak below {WEAK_MARGIN:g}", **REFERENCE)
            axis.set_title(f"{kind}: {len(values):,} coordinates", fontsize="medium")
        figure.supxlabel("margin" + _more(pooled), fontsize="medium")
        figure.supylabel("share of coordinates", fontsize="medium")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False)


def _more(panels: Mapping[str, Any]) -> str:
    more = len(panels) - MOST_PANELS
    return f" ({more} more panels are not drawn)" if more > 0 else ""


def _size(panels: Mapping[str, Any]) -> tuple[float, float]:
    count = min(len(panels), MOST_PANELS)
    columns, rows = min(count, COLUMNS), -(-count // COLUMNS)
    width, height = PANEL_SIZE
    return (max(8.0, columns * width + 2.5), 4.0 if rows == 1 else rows * height)


def _panels(figure: Any, panels: Mapping[str, T]) -> Iterator[tuple[Any, str, T]]:
    """An axis for each of the first panels, with its title and content."""
    count = min(len(panels), MOST_PANELS)
    rows = -(-count // COLUMNS)
    for place, (title, content) in enumerate(islice(panels.items(), MOST_PANELS), 1):
        yield figure.add_subplot(rows, min(count, COLUMNS), place), title, content
