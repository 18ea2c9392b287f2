"""Inputs that must stay as they are while they are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from signed_align.errors import SourceError


@dataclass(frozen=True)
class Sources:
    """Files as they were before they were read: size, time of change, and which file it is."""

    stamps: Mapping[Path, tuple[int, ...]]

    @classmethod
    def of(cls, files: Iterable[Path]) -> Sources:
        """Take note of files; raises SourceError if one is not there."""
        return cls({file: _stamp(file) for file in files})

    @classmethod
    def below(cls, place: Path) -> Sources:
        """Take note of a file, or of every file below a directory, but for hidden directories."""
        if not place.is_dir():
            return cls.of([place])
        found = []
        for root, folders, names in os.walk(place):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            found += [Path(root, name) for name in names]
        return cls.of(file for file in found if file.is_file())

    def require_unchanged(self) -> None:
        """Raise SourceError if a file is no longer the one that it was, or not as it was."""
        for file, stamp in self.stamps.items():
            if _stamp(file) != stamp:
                raise SourceError(
                    f"{file} changed while it was being read, so nothing is written; run again "
                    "when nothing else writes to it."
                )


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except FileNotFoundError as error:
        raise SourceError(
            f"{file} disappeared while it was being read, so nothing is written; run again."
        ) from error
    except OSError as error:
        raise SourceError(f"{file} cannot be read: {error.strerror}.") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
