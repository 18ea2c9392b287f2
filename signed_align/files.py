"""Output that appears under its final name only when it is complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from signed_align.errors import CheckpointError


def require_free(final: Path, *, force: bool = False) -> None:
    """Raise CheckpointError if ``final`` exists, is not an empty directory, and may not go."""
    occupied = final.exists() and not (final.is_dir() and not any(final.iterdir()))
    if occupied and not force:
        raise CheckpointError(f"{final} exists already; choose another name or pass --force.")


@contextmanager
def atomic_path(final: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a path beside ``final`` to write a file or directory to; rename it on success.

    The yielded path has the final name, inside a hidden temporary directory, and does not exist
    yet. If the block raises, nothing is left behind.

    Raises
    ------
    CheckpointError
        If ``final`` exists and ``force`` is False, or its parent cannot be written.
    """
    final = Path(os.path.abspath(final))
    require_free(final, force=force)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        holder = Path(tempfile.mkdtemp(prefix=f".{final.name}.partial-", dir=final.parent))
    except OSError as error:
        raise CheckpointError(f"{final} cannot be written: {error.strerror}.") from error
    try:
        temporary = holder / final.name
        try:
            yield temporary
        except OSError as error:
            raise CheckpointError(f"writing {final} failed: {error}.") from error
        if final.is_dir():
            os.replace(final, holder / "replaced")
        os.replace(temporary, final)
    finally:
        shutil.rmtree(holder, ignore_errors=True)
