"""Numbers that JSON cannot write."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def finite(value: Any, instead: Callable[[float], Any]) -> Any:
    """A JSON value with something else for every NaN and infinity in it.

    Parameters
    ----------
    value : JSON value
        Objects may be mappings, lists tuples.
    instead : callable
        From such a number to what stands for it.
    """
    if isinstance(value, Mapping):
        return {name: finite(item, instead) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, instead) for item in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value
