"""How an output appears at once: a hidden workplace with a lock, flushing, publishing, repair.

A workplace is a directory ``.NAME.partial-XXXXXXXX`` beside the output. It holds

* ``lock``, which its run keeps locked: a workplace that can be locked belongs to a dead run;
* ``staged/NAME``, the output while it is made, and its companions ``staged/NAME.*``;
* ``publishing``, written when all of that is complete: what is about to be replaced;
* ``aside``, what was replaced, until the output stands.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from signed_align.errors import OutputError
from signed_align.filesystem import (
    NO_LOCKS,
    exchange,
    flush,
    flush_tree,
    keep,
    lock_file,
    rename_onto_nothing,
    turn,
)

LOCK, STAGED, ASIDE, PUBLISHING = "lock", "staged", "aside", "publishing"
RECORD_SUFFIX = ".signed_align.json"
"""Of the companion that must not outlive the output it was written with."""

PREFIX_BYTES = 64
"""Of the output's name in the workplace's, which must stay below the longest name there is."""

OCCUPIED = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}


@dataclass(frozen=True)
class Workplace:
    """Where one run makes one output; ``place`` is where the output will stand."""

    path: Path
    place: Path
    lock: int | None

    @classmethod
    def make(cls, place: Path) -> Workplace:
        """A workplace beside ``place``, locked where the file system has locks."""
        for _ in range(100):
            path = Path(tempfile.mkdtemp(prefix=_prefix(place.name), dir=place.parent))
            lock = None
            try:
                lock = lock_file(path / LOCK, os.O_CREAT)
            except (BlockingIOError, FileNotFoundError):
                continue  # another run took it for a dead one's before it was locked
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    _discard(path)
                    raise
            workplace = cls(path, place, lock)
            try:
                (path / STAGED).mkdir()
                (path / ASIDE).mkdir()
            except OSError:
                workplace.remove()
                raise
            if lock is None:  # what has no lock file is never taken for a dead run's
                (path / LOCK).unlink()
            return workplace
        raise OutputError(f"{place} cannot be written: other runs remove its workplace.")

    @property
    def staged(self) -> Path:
        """Where the output is made."""
        return self.path / STAGED / self.place.name

    def publish(self, *, directory: bool, force: bool) -> None:
        """Move the output and its companions to their final names, all flushed to the disk.

        Companions are files beside a staged file whose names start with its name and a dot. They
        are published before it, and replace what has their names.

        Raises
        ------
        OutputError
            If an output has appeared there meanwhile, and ``force`` is not given.
        """
        os.lstat(self.staged)  # raises if nothing was written
        flush_tree(self.staged.parent)
        companions, stale = ([], []) if directory else self._companions()
        with turn(self.place.parent):
            if not force:
                self._require_still_free()
            for name in [*companions, *stale]:
                keep(self.place.with_name(name), self.path / ASIDE / name)
            self._note([*companions, *stale])
            for name in companions:
                os.replace(self.staged.with_name(name), self.place.with_name(name))
            for name in stale:
                self.place.with_name(name).unlink()
            self._move(directory=directory, force=force)
        flush(self.place.parent)

    def remove(self) -> None:
        """Take the workplace away; what was replaced goes back if the output does not stand."""
        try:
            with suppress(OSError):
                _restore(self.path)
                _discard(self.path)
        finally:
            if self.lock is not None:
                os.close(self.lock)

    def _companions(self) -> tuple[list[str], list[str]]:
        """Names of the companions, and of a record that belongs to an earlier output."""
        start = f"{self.place.name}."
        names = sorted(file.name for file in self.staged.parent.iterdir() if file.is_file())
        companions = [name for name in names if name.startswith(start)]
        record = self.place.name + RECORD_SUFFIX
        stale = record not in companions and self.place.with_name(record).is_file()
        return companions, [record] if stale else []

    def _note(self, companions: list[str]) -> None:
        note = {
            "output": self.place.name,
            "companions": companions,
            "found": _stamp(self.place),
        }
        file = self.path / PUBLISHING
        file.write_text(json.dumps(note), encoding="utf-8")
        flush(file)
        flush(self.path)

    def _require_still_free(self) -> None:
        empty = self.place.is_dir() and not any(self.place.iterdir())
        if os.path.lexists(self.place) and not empty:
            raise self._appeared()

    def _appeared(self) -> OutputError:
        return OutputError(
            f"{self.place} appeared while this run was writing and is left as it is; choose "
            "another name or pass --force."
        )

    def _move(self, *, directory: bool, force: bool) -> None:
        try:
            if directory:
                os.rename(self.staged, self.place)  # onto nothing, or an empty directory
            elif force:
                os.replace(self.staged, self.place)
            else:
                rename_onto_nothing(self.staged, self.place)
        except OSError as error:
            if error.errno not in OCCUPIED:
                raise
            if not (force and directory and self.place.is_dir()):
                raise self._appeared() from error
            self._exchange()

    def _exchange(self) -> None:
        if exchange(self.staged, self.place):
            return
        os.rename(self.place, self.path / ASIDE / self.place.name)
        os.rename(self.staged, self.place)  # if this is never reached, _restore moves it back


def repair(place: Path) -> None:
    """Clear away what killed runs left beside ``place``; what they had set aside goes back.

    Workplaces of live runs stay, and so does whatever cannot be told from them.
    """
    pattern = re.compile(re.escape(_prefix(place.name)) + "[a-z0-9_]{8}")
    try:
        with os.scandir(place.parent) as entries:
            found = [
                Path(entry.path)
                for entry in entries
                if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return
    for path in found:
        with suppress(OSError):
            _repair(path)


def _repair(path: Path) -> None:
    try:
        lock = lock_file(path / LOCK)
    except FileNotFoundError:  # killed before there was a lock file, or after it was removed
        path.rmdir()  # only if it is empty
        return
    try:
        if set(os.listdir(path)) <= {LOCK, STAGED, ASIDE, PUBLISHING}:
            _restore(path)
            _discard(path)
    finally:
        os.close(lock)


def _restore(path: Path) -> None:
    """Undo a publication that was not finished."""
    try:
        note = json.loads((path / PUBLISHING).read_text(encoding="utf-8"))
        name, companions, found = note["output"], note["companions"], note["found"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # it had not begun
    place, staged = path.parent / name, path / STAGED / name
    published = not staged.exists() or (place.exists() and staged.samefile(place))
    if published:
        return
    if (path / ASIDE / name).exists() and not place.exists():
        os.rename(path / ASIDE / name, place)
        flush(path.parent)
    if _stamp(place) != found:
        return  # another run has published since; the companions are its own
    for companion in companions:
        if (path / ASIDE / companion).exists():
            os.replace(path / ASIDE / companion, path.parent / companion)
        elif not (path / STAGED / companion).exists():
            (path.parent / companion).unlink(missing_ok=True)


def _discard(path: Path) -> None:
    """Remove a workplace, the lock file last, so that no half of it ever lacks one."""
    for part in (STAGED, ASIDE):
        shutil.rmtree(path / part, ignore_errors=True)
    (path / PUBLISHING).unlink(missing_ok=True)
    if set(os.listdir(path)) <= {LOCK}:
        (path / LOCK).unlink(missing_ok=True)
        path.rmdir()


def _prefix(name: str) -> str:
    return f".{os.fsencode(name)[:PREFIX_BYTES].decode('utf-8', 'ignore')}.partial-"


def _stamp(place: Path) -> list[int] | None:
    """What tells whether another output stands there now."""
    try:
        found = os.lstat(place)
    except OSError:
        return None
    return [found.st_dev, found.st_ino, found.st_mtime_ns]
