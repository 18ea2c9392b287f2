"""What the fields of a list are about, by their names, and how values take a sign."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache

from signed_align.adapters.parity import VAGUE, Parity, parity, words_of
from signed_align.errors import ArtifactError


class Role(Enum):
    """What the field of a record is about."""

    INDEX = "the index of a coordinate"
    LAYER = "the layer"
    HOOK = "the hook"
    MODEL = "the model"
    BLOCK = "a head or an expert, inside which an index counts"
    NEUTRAL = "nothing that depends on coordinates"
    VALUE = "a value of the coordinate"


INDEX_NAMES = (
    "neuron", "neurons", "neuron_index", "neuron_idx", "neuron_id", "neuron_indices", "top_neurons",
    "unit_index", "unit_idx", "channel", "channels", "channel_index", "channel_idx",
    "channel_indices", "outlier_channels", "coordinate", "coordinates", "coordinate_index",
)  # fmt: skip
GENERAL_INDEX_NAMES = ("index", "idx", "indices", "unit", "units")
"""These mean coordinates only in a record all of whose fields are understood."""
NEUTRAL_NAMES = (
    "", "unnamed_0", "rank", "position", "pos", "token", "token_id", "token_index", "prompt",
    "prompt_id", "prompt_index", "sample", "example", "example_id", "step", "seed", "k", "top_k",
    "n", "description", "label", "name", "text", "category", "concept", "feature", "feature_index",
    "feature_id", "latent", "p_value", "settings", "config", "metadata", "dataset", "checkpoint",
)  # fmt: skip
ROLES: Mapping[str, Role] = {
    **dict.fromkeys((*INDEX_NAMES, *GENERAL_INDEX_NAMES), Role.INDEX),
    **dict.fromkeys(("layer", "layers", "layer_index", "layer_idx", "layer_id"), Role.LAYER),
    **dict.fromkeys(("hook", "hooks", "hook_name", "hook_point", "module"), Role.HOOK),
    **dict.fromkeys(
        ("model", "model_name", "base_model", "base_model_name_or_path", "model_id"), Role.MODEL
    ),
    **dict.fromkeys(
        ("head", "heads", "head_index", "expert", "experts", "expert_index"), Role.BLOCK
    ),
    **dict.fromkeys(NEUTRAL_NAMES, Role.NEUTRAL),
}
"""By the name of a field; any other holds a value."""


@cache
def role(name: str) -> Role:
    """What a field is about, by its name alone."""
    return ROLES.get("_".join(words_of(name)), Role.VALUE)


@cache
def by_role(names: tuple[str, ...]) -> Mapping[Role, tuple[str, ...]]:
    """What the fields of one record are about: a general name of an index is none beside others.

    Raises ArtifactError if two of them say the same.
    """
    roles = {name: role(name) for name in names}
    indices = [name for name in names if roles[name] is Role.INDEX]
    special = [name for name in indices if "_".join(words_of(name)) in INDEX_NAMES]
    understood = all(kind is not Role.VALUE or is_value(name) for name, kind in roles.items())
    features = any({"feature", "latent"} & set(words_of(name)) for name in names)
    for name in indices:
        if name not in special and (special or features or not understood):
            roles[name] = Role.VALUE
    found = {kind: tuple(name for name in names if roles[name] is kind) for kind in Role}
    for kind in (Role.INDEX, Role.LAYER, Role.HOOK, Role.MODEL):
        if len(found[kind]) > 1:
            raise ArtifactError(
                f"{kind.value} has several fields in one record: {', '.join(found[kind])}."
            )
    return found


def is_value(name: str) -> bool:
    """Whether a field's name says that it holds a value of the coordinate, of whatever parity."""
    words = {word.removesuffix("s") for word in words_of(name)}
    return parity(name) is not Parity.UNCLEAR or (bool(words) and words <= VAGUE)
