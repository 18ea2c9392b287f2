"""Progress on stderr: shown on a terminal, silent without one or when asked to be quiet."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

quiet: ContextVar[bool] = ContextVar("quiet", default=False)


def track(items: Iterable[T], description: str, unit: str) -> Iterable[T]:
    """Iterate over ``items`` with a progress line."""
    return tqdm(items, description, unit=unit, leave=False, disable=_disabled())


def byte_meter(description: str, total: int) -> tqdm:
    """A progress line that counts ``total`` bytes; call ``update`` and ``close`` on it."""
    return tqdm(
        desc=description,
        total=total,
        unit="B",
        unit_scale=True,
        leave=False,
        disable=_disabled(),
    )


def _disabled() -> bool | None:
    return True if quiet.get() else None  # None: tqdm asks whether stderr is a terminal


def say(message: str) -> None:
    """Name the stage that long work has reached."""
    if not quiet.get() and sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def libraries_silent() -> Iterator[None]:
    """Hide the progress lines that libraries draw, unless there is a terminal to draw them on."""
    if sys.stderr.isatty() and not quiet.get():
        yield
    else:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
