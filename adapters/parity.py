"""How a quantity takes the sign of its coordinate, as far as its name says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from functools import cache


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
AVERAGES = frozenset({"mean", "average", "avg", "median"})
"""They take a sign as what they are of; alone, they are of activations."""
DIFFERENCES = frozenset({"sum", "delta", "difference", "diff"})
"""They take a sign as what they are of; alone, nobody can tell: of a loss, they are even."""
VAGUE = frozenset({"value", "score", "effect", "strength"})
EVEN_OF_ANYTHING = frozenset({"abs", "absolute", "squared"})
EVEN_LAST = frozenset({"norm", "magnitude", "variance", "var", "std", "rms", "kurtosis"})
ONE_SIDED = frozenset(
    {"max", "maximum", "min", "minimum", "quantile", "percentile", "threshold", "frequency",
     "rate", "sparsity", "density", "probability", "auc", "auroc", "accuracy", "precision",
     "recall", "f1"}
)  # fmt: skip
KNOWN_WORDS = (
    EVEN_LAST
    | ONE_SIDED
    | VAGUE
    | frozenset(word for name in QUANTITIES for word in name.split("_"))
)


@cache
def parity(name: str) -> Parity:
    """How the values of a field take the sign of their coordinate, by the field's name.

    Examples
    --------
    >>> parity("mean_activation"), parity("abs_activation"), parity("attribution score")
    (<Parity.ODD: 'it changes its sign too'>, <Parity.EVEN: 'it stays'>, <Parity.EVEN: 'it stays'>)
    """
    words = words_of(name)
    if words and words[-1] not in KNOWN_WORDS:
        words[-1] = words[-1].removesuffix("s")
    if not words:
        return Parity.UNCLEAR
    if EVEN_OF_ANYTHING & set(words) or words[-1] in EVEN_LAST:
        return Parity.EVEN
    core = [word for word in words if word not in AVERAGES | DIFFERENCES | VAGUE | ONE_SIDED]
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
