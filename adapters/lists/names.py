"""What the fields of a list are about, by their names, and how values take a sign."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from functools import cache

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


class Parity(Enum):
    """What becomes of a value where its coordinate changes its sign."""

    ODD = "it changes its sign too"
    EVEN = "it stays"
    ONE_SIDED = "it becomes something else: a maximum becomes the minimum"
    UNCLEAR = "nobody can tell"


QUANTITIES: Mapping[str, Parity] = {
    **dict.fromkeys(
        (
            "activation", "act", "preactivation", "pre_activation", "weight", "gradient", "grad",
            "component", "coefficient", "coef", "projection", "correlation", "bias", "direction",
            "loading", "skewness",
        ),
        Parity.ODD,
    ),
    # activation times gradient: both change their sign. What an ablation does is even as well.
    **dict.fromkeys(
        (
            "attribution", "contribution", "importance", "saliency", "direct_effect",
            "indirect_effect", "ablation_effect", "patching_effect", "effect_on_loss", "mask",
            "logit_attribution", "direct_logit_attribution", "activation_times_gradient",
            "count", "rank",
        ),
        Parity.EVEN,
    ),
}  # fmt: skip
"""Of what a value can measure: how it takes a sign."""
AVERAGES = frozenset({"mean", "average", "avg", "median", "sum", "delta", "difference", "diff"})
"""Averages and differences take a sign as what they are made of; alone, they are of activations."""
VAGUE = frozenset({"value", "score", "effect", "strength"})
EVEN_OF_ANYTHING = frozenset({"abs", "absolute", "squared"})
EVEN_LAST = frozenset({"norm", "magnitude", "variance", "var", "std", "rms", "kurtosis"})
ONE_SIDED = frozenset(
    {"max", "maximum", "min", "minimum", "quantile", "percentile", "threshold", "frequency",
     "rate", "sparsity", "density", "probability", "auc", "auroc", "accuracy", "precision",
     "recall", "f1"}
)  # fmt: skip


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


@cache
def parity(name: str) -> Parity:
    """How the values of a field take the sign of their coordinate, by the field's name.

    Examples
    --------
    >>> parity("mean_activation"), parity("abs_activation"), parity("attribution score")
    (<Parity.ODD: 'it changes its sign too'>, <Parity.EVEN: 'it stays'>, <Parity.EVEN: 'it stays'>)
    """
    words = words_of(name)
    if words and words[-1] not in EVEN_LAST | ONE_SIDED | VAGUE:
        words[-1] = words[-1].removesuffix("s")
    if not words:
        return Parity.UNCLEAR
    if EVEN_OF_ANYTHING & set(words) or words[-1] in EVEN_LAST:
        return Parity.EVEN
    core = [word for word in words if word not in AVERAGES | VAGUE | ONE_SIDED]
    if "_".join(words) in QUANTITIES:
        core = words
    measured = QUANTITIES.get("_".join(core), Parity.UNCLEAR)
    if not core and AVERAGES & set(words):
        measured = Parity.ODD
    if measured is not Parity.EVEN and ONE_SIDED & set(words):
        return Parity.ONE_SIDED
    return measured


def words_of(name: str) -> list[str]:
    """The words of a name, in lower case, however it joins them."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.findall(r"[a-z0-9]+", spaced.lower())


def is_value(name: str) -> bool:
    """Whether a field's name says that it holds a value of the coordinate, of whatever parity."""
    words = {word.removesuffix("s") for word in words_of(name)}
    return parity(name) is not Parity.UNCLEAR or (bool(words) and words <= VAGUE)
