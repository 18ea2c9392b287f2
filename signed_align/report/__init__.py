"""One self-contained HTML page, with plots, from what commands and benchmarks have printed."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from signed_align import __version__
from signed_align.errors import CheckpointError, SignedAlignError, one_line
from signed_align.files import atomic_path
from signed_align.progress import track
from signed_align.report.found import Found, Plot
from signed_align.report.kinds import FAILED
from signed_align.report.reading import Skipped, files_in, read, shown_name
from signed_align.report.tables import Table

__all__ = ["report"]

MOST_REASON = 300


@dataclass(frozen=True)
class Image:
    """A plot in the page."""

    name: str
    caption: str
    base64: str


@dataclass(frozen=True)
class Section:
    """What the page shows of one file."""

    number: int
    name: str
    heading: str
    failed: bool
    notes: Sequence[str]
    images: Sequence[Image]
    tables: Sequence[Table]


def report(
    directory: str | Path, out: str | Path, *, title: str = "", force: bool = False
) -> dict[str, Any]:
    """Write one HTML page of the results in a directory.

    Results are what commands print with ``--json``, ``demo.json``, results of benchmarks, and gauge
    files. Each has a section with its main figures and, where it applies, plots. The page
    needs no other file and runs no script. Its plots are also left as PNG files in a directory
    beside it that is named after it: ``report-plots`` beside ``report.html``.

    Parameters
    ----------
    directory : str or Path
        Its files ``*.json`` and ``*.safetensors`` are read, and none below it. Margins of a gauge
        are drawn if its file is at the recorded path, or here.
    out : str or Path
        The page.
    title : str
        Stands above it; by default it names the directory.
    force : bool
        Replace the page, and the directory of its plots, if they exist. A directory of that name
        that holds anything but PNG files is never replaced.

    Returns
    -------
    dict
        ``out``, ``plots`` (PNG files), ``files`` (for each that is shown ``file`` and ``kind``),
        ``skipped`` (for each other one ``file`` and ``reason``).

    Raises
    ------
    SignedAlignError
        If there is nothing of ours, or an output may not be written.

    Examples
    --------
    >>> report("results", "report.html")["plots"]  # doctest: +SKIP
    ['report-plots/01-barrier-barrier.png']
    """
    place, page = Path(directory), Path(out)
    files = files_in(place)
    found, skipped = _read_all(files)
    if not found:
        raise SignedAlignError(_nothing_in(place, skipped))
    drawings = [[_png_name(n, one, plot) for plot in one.plots] for n, one in enumerate(found, 1)]
    with ExitStack() as stack:
        draft = stack.enter_context(atomic_path(page, directory=False, force=force, inputs=files))
        plots = page.with_name(f"{page.stem}-plots")
        _require_plots_only(plots)
        folder = draft.parent
        if any(drawings) or plots.exists():  # plots of an earlier page must not stay beside it
            folder = stack.enter_context(
                atomic_path(plots, directory=True, force=force, inputs=files)
            )
        sections = [
            _section(number, one, names, folder)
            for number, (one, names) in enumerate(
                zip(track(found, "drawing", unit="file"), drawings, strict=True), 1
            )
        ]
        html = _page(title or f"signed-align: {shown_name(place.resolve())}", sections, skipped)
        draft.write_text(html, encoding="utf-8", errors="xmlcharrefreplace")
    return {
        "out": str(out),
        "plots": [str(plots / name) for names in drawings for name in names],
        "files": [{"file": one.name, "kind": one.kind.name} for one in found],
        "skipped": skipped,
    }


def _require_plots_only(folder: Path) -> None:
    """Raise CheckpointError if a directory that may be replaced holds more than plots."""
    entries = list(folder.iterdir()) if folder.is_dir() else []
    others = [path for path in entries if path.suffix != ".png" or path.is_dir()]
    if others:
        raise CheckpointError(
            f"{folder} is where the page's plots go, and it holds {others[0].name}, which no "
            "report wrote; choose another name for the page."
        )


def _read_all(files: Sequence[Path]) -> tuple[list[Found], list[dict[str, str]]]:
    found, skipped = [], []
    for file in files:
        try:
            found.append(read(file))
        except Skipped as reason:
            sentence = one_line(reason)[:MOST_REASON]
            skipped.append({"file": shown_name(file), "reason": sentence})
    return found, skipped


def _nothing_in(directory: Path, skipped: Sequence[dict[str, str]]) -> str:
    first = f"; {skipped[0]['file']} is skipped: {skipped[0]['reason']}" if skipped else ""
    return (
        f"{directory} holds nothing to report: neither JSON that a command printed with --json or "
        f"a benchmark wrote, nor a gauge file{first}."
    )


def _png_name(number: int, found: Found, plot: Plot) -> str:
    stem = re.sub(r"[^\w.-]+", "-", Path(found.name).stem)[:40]
    return f"{number:02}-{stem}-{plot.name}.png"


def _section(number: int, found: Found, names: Sequence[str], folder: Path) -> Section:
    """Draw a file's plots into ``folder`` and gather what the page shows of it."""
    images = []
    for plot, name in zip(found.plots, names, strict=True):
        plot.draw(found, folder / name, found.name[:80])
        content = base64.b64encode((folder / name).read_bytes()).decode()
        images.append(Image(name, plot.caption, content))
    warnings = found.data.get("warnings")
    said = [str(warning) for warning in warnings] if isinstance(warnings, list) else []
    return Section(
        number=number,
        name=found.name,
        heading=found.kind.heading,
        failed=found.kind is FAILED,
        notes=[*found.notes, *said],
        images=images,
        tables=found.tables,
    )


def _page(title: str, sections: Sequence[Section], skipped: Sequence[dict[str, str]]) -> str:
    from jinja2 import Environment, StrictUndefined

    text = resources.files(__name__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text).render(
        title=title, sections=sections, skipped=skipped, version=__version__
    )
