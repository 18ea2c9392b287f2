"""What a recipe says, checked where mergekit would pass over it in silence."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mergekit.merge_methods import registered_methods
from mergekit.merge_methods.base import ParameterScope

from signed_align.errors import ArtifactError
from signed_align.merge_methods.align import ALIGNMENT_PARAMETERS, GAUGE


def gauge_files(content: Any) -> list[Path]:
    """The gauge files that a recipe names."""
    named = (parameters.get(GAUGE) for parameters, _ in _parameters(content))
    return [Path(name) for name in named if isinstance(name, str)]


def require_known_parameters(content: Any) -> None:
    """Raise ArtifactError for a parameter that would have no effect.

    mergekit ignores a name that no method knows, a misspelt ``gauge`` say, and a parameter of the
    whole recipe that stands with one model.
    """
    known = {spec.name for method in registered_methods() for spec in method.spec.parameters}
    whole = {spec.name for spec in ALIGNMENT_PARAMETERS if spec.scope is ParameterScope.SHARED}
    for parameters, of_a_model in _parameters(content):
        for name in parameters:
            if name not in known:
                near = difflib.get_close_matches(str(name), sorted(known), n=1)
                hint = f"did you mean {near[0]!r}" if near else "take it out"
                raise ArtifactError(
                    f"the recipe sets the parameter {name!r}, which no merge method knows and "
                    f"which would be ignored: {hint}?"
                )
            if of_a_model and name in whole:
                raise ArtifactError(
                    f"the recipe sets {name!r} for one model, where it would be ignored; it is a "
                    "parameter of the whole recipe: move it to the top level's `parameters`."
                )


def _parameters(content: Any, inside: bool = False) -> Iterator[tuple[dict[Any, Any], bool]]:
    """Every ``parameters`` of a recipe, and whether it is that of a single model."""
    todo = [(content, inside)]
    for part, of_a_model in todo:  # not by recursion: a recipe can be nested without end
        if isinstance(part, list):
            todo += [(entry, of_a_model) for entry in part]
        if not isinstance(part, dict):
            continue
        found = part.get("parameters")
        if isinstance(found, dict):
            yield found, "model" in part
        todo += [(value, False) for key, value in part.items() if key != "parameters"]
