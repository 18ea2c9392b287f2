"""Output that appears under its final name only when it is complete."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from signed_align.atomic import Workplace, repair
from signed_align.errors import OutputError, SignedAlignError, SourceError, one_line
from signed_align.filesystem import flush

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than is allowed",
}
REASONS = {
    **FULL,
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission is denied",
    errno.EPERM: "permission is denied",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOTDIR: "a file stands where a directory is needed",
    errno.EEXIST: "something of that name is there already",
    errno.EIO: "the disk reports an error",
}
"""Why an output cannot be written, by what the operating system says."""

TORCH_CANNOT_WRITE = re.compile(r"PytorchStreamWriter failed|inline_container.*unexpected pos")
"""torch.save says no more than this, whatever the reason is."""


def require_free(
    final: Path, *, directory: bool, force: bool = False, inputs: Iterable[Path] = ()
) -> Path:
    """The resolved place of an output, if it may be written.

    What a killed run left there is cleared away first.

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
    try:
        _require_nameable(final)
        place = Path(os.path.realpath(final))
        if Path.cwd().is_relative_to(place):
            raise OutputError(f"{final} holds the working directory; choose another output.")
        for source in inputs:
            origin = Path(os.path.realpath(source))
            if place.is_relative_to(origin) or origin.is_relative_to(place):
                raise OutputError(f"the output {final} overlaps the input {source}.")
        _require_writable(final, place)
        repair(place)
        _require_unused(final, place, directory=directory, force=force)
    except OSError as error:
        raise OutputError(f"{final} cannot be written: {_reason(error)}.") from error
    return place


def _require_nameable(final: Path) -> None:
    try:
        if b"\0" in os.fsencode(final):
            raise ValueError("embedded null byte")
        final.name.encode()
    except ValueError as error:  # half of a surrogate pair cannot be encoded
        raise OutputError(
            f"the output {str(final)!r} has characters that a name should not have; choose another."
        ) from error


def _require_writable(final: Path, place: Path) -> None:
    """Raise, before the work, if there can be no workplace beside the output."""
    with suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(place)
    parent = next(folder for folder in place.parents if os.path.lexists(folder))
    if not parent.is_dir():
        raise OutputError(f"{final} cannot be written: {parent} is not a directory.")
    if not os.access(parent, os.W_OK | os.X_OK):
        read_only = os.statvfs(parent).f_flag & os.ST_RDONLY
        raise OutputError(
            f"{final} cannot be written: {REASONS[errno.EROFS if read_only else errno.EACCES]} "
            f"in {parent}; choose another output."
        )


def _require_unused(final: Path, place: Path, *, directory: bool, force: bool) -> None:
    if place.exists() and not (place.is_dir() or place.is_file()):
        raise OutputError(f"{final} is neither a file nor a directory; choose another output.")
    if place.exists() and place.is_dir() != directory:
        found, wanted = ("directory", "file") if place.is_dir() else ("file", "directory")
        raise OutputError(f"{final} is a {found}; the output is a {wanted}.")
    empty = place.is_dir() and not any(place.iterdir())
    if place.exists() and not empty and not force:
        raise OutputError(f"{final} exists already; choose another name or pass --force.")


@contextmanager
def atomic_path(
    final: Path, *, directory: bool, force: bool = False, inputs: Iterable[Path] = ()
) -> Iterator[Path]:
    """Yield a path beside ``final`` to write to; on success it becomes ``final``, at once.

    The yielded path has the final name, inside a hidden temporary directory. A directory is there
    already, a file is not. If the block raises, nothing is left behind and what existed stays. If
    the run is killed, the same holds, but for the temporary directory, which the next run into the
    same place removes. Everything is flushed to the disk before it has its final name, which holds
    a complete output at every instant at which it held one before.

    Companions of a file, written beside the yielded path under its name, a dot and more, are
    published with it, just before it; they replace what stands under their names. The record
    (``NAME.signed_align.json``) of an output that is replaced never stays beside the new one.

    Parameters
    ----------
    final, directory, force, inputs
        As for :func:`require_free`.

    Raises
    ------
    OutputError
        If the output may not be, or cannot be, written, or if one appeared there meanwhile and
        ``force`` is not given.
    SourceError
        If a file that is read inside the block disappears.
    """
    place = require_free(final, directory=directory, force=force, inputs=inputs)
    made: list[Path] = []
    workplace = None
    done = False
    try:
        made = _make_parents(place.parent)
        workplace = Workplace.make(place)
        if directory:
            workplace.staged.mkdir()
        yield workplace.staged
        workplace.publish(directory=directory, force=force)
        done = True
    except Exception as error:
        sentence = _explained(error, final, workplace)
        if sentence is None:
            raise
        raise sentence from error
    finally:
        if workplace is not None:
            workplace.remove()
        for folder in reversed(made if not done else ()):
            with suppress(OSError):
                folder.rmdir()


def _make_parents(parent: Path) -> list[Path]:
    """Make the missing directories down to ``parent``, and return them."""
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()][::-1]
    parent.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush(folder.parent)
    return missing


def _explained(
    error: Exception, final: Path, workplace: Workplace | None
) -> SignedAlignError | None:
    """The sentence for an error in writing or reading; None if it is not one, or has its own."""
    found = _system_error(error)
    code = found.errno if found else None
    full = code in FULL or bool(TORCH_CANNOT_WRITE.search(str(error)))
    if isinstance(error, (OutputError, SourceError)):
        return None
    if not (full or code == errno.EROFS or isinstance(error, OSError)):
        return None
    if full and workplace is not None:
        reason = REASONS.get(code or 0, "the disk is full, or reports an error")
        written, free = _size(workplace.path), shutil.disk_usage(workplace.path).free
        return OutputError(
            f"writing {final} failed: {reason} (this run had written {written:,} bytes, and "
            f"{free:,} were free); make room or choose another output, and run again."
        )
    where = str(found.filename) if found and found.filename else ""
    if where and workplace is not None and workplace.path.name not in where:
        if isinstance(found, FileNotFoundError):
            return SourceError(f"{where} disappeared while it was being read; run again.")
        return SourceError(f"{where} cannot be read: {_reason(error)}.")
    return OutputError(f"writing {final} failed: {_reason(found or error)}.")


def _system_error(error: BaseException | None) -> OSError | None:
    """The operating system's error that led to this one, if one did."""
    for _ in range(16):
        if isinstance(error, OSError) and error.errno is not None:
            return error
        told = re.search(r"\(os error (\d+)\)", str(error))  # as Rust's libraries word it
        if told:
            return OSError(int(told[1]), os.strerror(int(told[1])))
        if error is None:
            return None
        error = error.__cause__ or error.__context__
    return None


def _reason(error: Exception) -> str:
    code = error.errno if isinstance(error, OSError) else None
    return REASONS.get(code or 0) or getattr(error, "strerror", None) or one_line(error)


def _size(folder: Path) -> int:
    """Bytes on the disk of everything below a directory."""
    return sum(
        os.lstat(os.path.join(root, name)).st_blocks * 512
        for root, _, names in os.walk(folder)
        for name in names
    )
