"""What a recipe says, read and checked where mergekit would pass over it in silence."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge_methods import registered_methods
from mergekit.merge_methods.base import ParameterScope

from signed_align.errors import ArtifactError, one_line
from signed_align.merge_methods.align import ALIGNMENT_PARAMETERS, GAUGE, GAUGES
from signed_align.recovery import vocabulary

MOST_ENTRIES = 100_000
"""A recipe has no more, with its anchors written out."""

MODEL_KEYS = {"model", "base_model", "path", "lora", "reference", "source", "tokenizer_source"}


def read_text(recipe: str | Path) -> str:
    """The text of a recipe; raises ArtifactError if it cannot be read."""
    try:
        return Path(recipe).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"the recipe {recipe} cannot be read: {error}.") from error


def parsed(text: str, recipe: str | Path) -> Any:
    """What a recipe says; raises ArtifactError if it is no YAML, or unfolds without end."""
    try:
        content = yaml.safe_load(text)
        entries = _unfolded(content, {})
    except Exception as error:  # a value that is not what its tag says fails in many ways
        raise ArtifactError(f"the recipe {recipe} is not valid: {one_line(error)}.") from error
    if entries > MOST_ENTRIES:
        raise ArtifactError(
            f"the recipe {recipe} repeats itself to more than {MOST_ENTRIES} entries; write out "
            "what its anchors stand for."
        )
    return content


def _unfolded(content: Any, known: dict[int, int]) -> int:
    """How many entries there are if each anchor is written out wherever it is used."""
    if not isinstance(content, (dict, list)):
        return 1
    if id(content) not in known:
        known[id(content)] = MOST_ENTRIES + 1  # of what holds itself, should it come again
        inside = content.values() if isinstance(content, dict) else content
        known[id(content)] = 1 + sum(_unfolded(item, known) for item in inside)
    return known[id(content)]


def with_absolute_paths(content: Any) -> Any:
    """The recipe with local models under absolute paths.

    mergekit takes a relative path with one slash in it for a Hub id and asks the Hub about it.
    """
    if isinstance(content, list):
        return [with_absolute_paths(entry) for entry in content]
    if not isinstance(content, dict):
        return content
    return {
        key: "+".join(
            str(Path(part).resolve()) if os.path.isdir(part) else part for part in value.split("+")
        )
        if key in MODEL_KEYS and isinstance(value, str) and value not in ("base", "union")
        else with_absolute_paths(value)
        for key, value in content.items()
    }


def reference_of(config: MergeConfiguration) -> str:
    """The base model, or the first model of the recipe where there is no base."""
    if config.base_model:
        return str(config.base_model)
    if config.models:
        return str(config.models[0].model)
    slices = config.slices or []
    for module in (config.modules or {}).values():
        if module.models:
            return str(module.models[0].model)
        slices = slices or module.slices or []
    if not slices or not slices[0].sources:
        raise ArtifactError("the recipe has a slice without a source.")
    return str(slices[0].base_model or slices[0].sources[0].model)


def require_one_vocabulary(config: MergeConfiguration) -> None:
    """Raise if mergekit would fill in embedding rows of one model from another's coordinates."""
    vocabularies = [vocabulary(GAUGES.checkpoint(model)) for model in config.referenced_models()]
    known = [entry for entry in vocabularies if entry is not None]
    for entry in known[1:]:
        moved = [token for token, row in entry.items() if known[0].get(token, row) != row]
        if moved:
            raise ArtifactError(
                f"the models of the recipe have {len(moved)} tokens, such as {moved[0]!r}, at "
                "different rows of their embeddings, which would be averaged row by row: give the "
                "models one vocabulary first."
            )
    if config.tokenizer is None and config.tokenizer_source is None:
        return
    plain = config.tokenizer is None or not config.tokenizer.tokens
    if not plain or any(entry != vocabularies[0] for entry in vocabularies):
        raise ArtifactError(
            "the recipe has mergekit change the vocabulary before the models are aligned, which "
            "would mix their coordinates: give the models one vocabulary first, or leave the "
            "tokenizer options out."
        )


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
                hint = f"{near[0]!r} may be meant" if near else "take it out"
                raise ArtifactError(
                    f"the recipe sets the parameter {name!r}, which no merge method knows and "
                    f"which would be ignored; {hint}."
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
