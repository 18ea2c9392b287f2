"""Output that appears under its final name only when it is complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from signed_align.errors import OutputError


def require_free(
    final: Path, *, directory: bool, force: bool = False, inputs: Iterable[Path] = ()
) -> Path:
    """The resolved place of an output, if it may be written.

    Parameters
    ----------
    final : Path
        Where the output is wanted.
    directory : bool
        Whether the output is a directory or a file. One is never replaced by the other.
    force : bool
        Replace what exists.
    inputs : iterable of Path
        What is read: it may not be, hold, or lie around the output, whatever ``force`` says.

    Raises
    ------
    OutputError
        If the output may not be written there.
    """
    if not str(final) or str(final) == ".":
        raise OutputError("the output has no name of its own.")
    place = Path(os.path.realpath(final))
    if Path.cwd().is_relative_to(place):
        raise OutputError(f"{final} holds the working directory; choose another output.")
    for source in inputs:
        origin = Path(os.path.realpath(source))
        if place.is_relative_to(origin) or origin.is_relative_to(place):
            raise OutputError(f"the output {final} overlaps the input {source}.")
    if place.exists() and not (place.is_dir() or place.is_file()):
        raise OutputError(f"{final} is neither a file nor a directory; choose another output.")
    if place.exists() and place.is_dir() != directory:
        found, wanted = ("directory", "file") if place.is_dir() else ("file", "directory")
        raise OutputError(f"{final} is a {found}; the output is a {wanted}.")
    empty = place.is_dir() and not any(place.iterdir())
    if place.exists() and not empty and not force:
        raise OutputError(f"{final} exists already; choose another name or pass --force.")
    return place


@contextmanager
def atomic_path(
    final: Path, *, directory: bool, force: bool = False, inputs: Iterable[Path] = ()
) -> Iterator[Path]:
    """Yield a path beside ``final`` to write to; rename it on success.

    The yielded path has the final name, inside a hidden temporary directory. A directory is there
    already, a file is not. If the block raises, nothing is left behind and what existed stays.

    Parameters
    ----------
    final, directory, force, inputs
        As for :func:`require_free`.

    Raises
    ------
    OutputError
        If the output may not be, or cannot be, written.
    """
    place = require_free(final, directory=directory, force=force, inputs=inputs)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        holder = Path(tempfile.mkdtemp(prefix=f".{place.name[:64]}.partial-", dir=place.parent))
    except OSError as error:
        raise OutputError(f"{final} cannot be written: {error.strerror}.") from error
    try:
        temporary, replaced = holder / place.name, holder / "replaced"
        if directory:
            temporary.mkdir()
        yield temporary
        if place.exists():
            os.replace(place, replaced)
        try:
            os.replace(temporary, place)
        except OSError:
            if replaced.exists():
                os.replace(replaced, place)
            raise
    except OSError as error:
        raise OutputError(f"writing {final} failed: {error}.") from error
    finally:
        shutil.rmtree(holder, ignore_errors=True)
