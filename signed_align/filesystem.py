"""What the operating system offers to writers: locks, flushing, renames that replace nothing."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 5.0
"""Seconds to wait for another run that is publishing into the same directory."""

NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
NO_FLUSH = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
NO_SUCH_RENAME = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}

NOREPLACE, EXCHANGE = 1, 2
"""Flags of the Linux system call renameat2."""


def lock_file(file: Path, flags: int = 0) -> int:
    """Lock a file, and return its descriptor.

    Raises BlockingIOError if another run holds it, FileNotFoundError if it is gone, and another
    OSError where there are no locks. Programs that a run starts do not inherit the lock.
    """
    mode = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags
    descriptor = os.open(file, mode, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.stat(file)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def turn(parent: Path) -> Iterator[None]:
    """One run at a time publishes into a directory; where there are no locks, any."""
    try:
        descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a directory that may be written and not listed
        yield
        return
    try:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.002)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def keep(file: Path, aside: Path) -> None:
    """Keep what a file holds under a second name."""
    if not file.is_file():
        return
    try:
        os.link(file, aside)
    except OSError:
        shutil.copy2(file, aside)


def rename_onto_nothing(source: Path, target: Path) -> None:
    """Rename a file; raises FileExistsError if there is something under its new name."""
    if _rename_with(source, target, NOREPLACE):
        return
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError as error:  # no hard links either
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        os.rename(source, target)
        return
    os.unlink(source)


def exchange(one: Path, other: Path) -> bool:
    """Let two files or directories change places, at once; False where that cannot be done."""
    return _rename_with(one, other, EXCHANGE)


def _rename_with(source: Path, target: Path, flag: int) -> bool:
    """Rename with a flag of renameat2; False where there is no such thing."""
    call: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    here = ctypes.c_int(-100)  # AT_FDCWD
    old, new = os.fsencode(source), os.fsencode(target)
    if call(here, ctypes.c_char_p(old), here, ctypes.c_char_p(new), ctypes.c_uint(flag)) == 0:
        return True
    code = ctypes.get_errno()
    if code in NO_SUCH_RENAME:
        return False
    raise OSError(code, os.strerror(code), str(target))


def flush_tree(path: Path) -> None:
    """Flush everything below a directory to the disk, and the directories themselves."""
    for root, _, files in os.walk(path, topdown=False):
        for name in files:
            flush(Path(root, name))
        flush(Path(root))


def flush(path: Path) -> None:
    """Flush a file or a directory to the disk; a failing disk is an error, one that cannot is not.

    Raises OSError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.ELOOP):  # it may be written and not read, or a link
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FLUSH:
            raise
    finally:
        os.close(descriptor)
