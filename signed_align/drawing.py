"""Image files of plots: how all of them look, and what has to be set up around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def figure_in(
    file: str | Path, title: str = "", size: tuple[float, float] = (8.0, 4.0)
) -> Iterator[Any]:
    """Yield a matplotlib figure to draw on; write it to an image file at the end.

    Parameters
    ----------
    file : str or Path
        Its suffix says the format (png, svg, pdf).
    title : str
        Stands above the axes, if there is one.
    size : tuple of float
        Width and height in inches.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False}):  # a name may hold dollar signs
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        for axis in figure.axes:
            axis.spines[["top", "right"]].set_visible(False)
        if title:
            first, *others = figure.axes
            untitled = not others and not first.get_title()
            (first.set_title if untitled else figure.suptitle)(title)
        figure.savefig(file, dpi=150)
