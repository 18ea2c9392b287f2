"""signed-align: move artifacts and merges between checkpoints in different residual coordinates.

The public names below load on first use, so that importing the package (and ``signed-align
--help``) does not import torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Axis": "signed_align.labels",
    "Chart": "signed_align.chart",
    "Checkpoint": "signed_align.checkpoint",
    "Gauge": "signed_align.gauge",
    "Objective": "signed_align.matching",
    "SignedAlignError": "signed_align.errors",
    "SignedPermutation": "signed_align.signed_permutation",
    "apply": "signed_align.moving",
    "audit_claim": "signed_align.audit",
    "diagnose": "signed_align.diagnosis",
    "merge": "signed_align.merge_methods",
    "port": "signed_align.adapters",
    "recover": "signed_align.recovery",
    "scramble": "signed_align.moving",
    "transport": "signed_align.labels",
    "transport_along": "signed_align.trajectory",
}

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
