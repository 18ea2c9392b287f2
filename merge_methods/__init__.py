"""The mergekit side: importing this package registers `signed_align` and its variants.

`signed_align` aligns and averages; `signed_align_<method>` aligns and then does what mergekit's
`<method>` does, for every method that mergekit has registered.
"""

from __future__ import annotations

from mergekit.merge_methods import register, registered_methods

from signed_align.merge_methods.align import AlignedMergeMethod
from signed_align.merge_methods.run import merge

__all__ = ["AlignedMergeMethod", "merge"]

PREFIX = "signed_align"


def _register_all() -> None:
    methods = {method.spec.name: method for method in registered_methods()}
    register(AlignedMergeMethod(methods["linear"], PREFIX))
    for name, method in methods.items():
        register(AlignedMergeMethod(method, f"{PREFIX}_{name}"))


_register_all()
