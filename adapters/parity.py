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
EVEN_LAST = frozenset(
    {"norm", "magnitude", "variance", "var", "std", "stdev", "rms",
     "kurtosis", "mad", "iqr"}
)  # fmt: skip
"""As the last word they make an even quantity of any other; further in front nobody can tell."""
EVEN_WORDS = EVEN_OF_ANYTHING | EVEN_LAST
ONE_SIDED = frozenset(
    {"max", "maximum", "min", "minimum", "quantile", "percentile", "threshold", "frequency",
     "freq", "rate", "sparsity", "density", "probability", "auc", "auroc", "accuracy", "precision",
     "recall", "f1", "range"}
)  # fmt: skip
OTHER_EVEN_WORDS = frozenset(
    {"deviation", "sd", "sigma", "sq", "energy", "power", "moment", "cov", "covariance", "entropy",
     "information", "fisher", "hessian", "statistic", "chi2", "p", "gini", "mse", "loss", "usage",
     "alive", "active", "ptp", "scale", "absmax", "absmean", "meanabs", "l1", "l2"}
)  # fmt: skip
"""They speak against an odd quantity, and do not say what it is."""
KNOWN_WORDS = EVEN_WORDS | ONE_SIDED | VAGUE | OTHER_EVEN_WORDS | AVERAGES | DIFFERENCES
AGAINST_SIGNS = (
    EVEN_WORDS
    | ONE_SIDED
    | OTHER_EVEN_WORDS
    | {name for name, takes in QUANTITIES.items() if takes is Parity.EVEN and "_" not in name}
)
IN_QUANTITIES = frozenset(word for name in QUANTITIES for word in name.split("_"))


@cache
def parity(name: str) -> Parity:
    """How values take the sign of their coordinate, by the name of what they are.

    A name with a word that is not understood is unclear: the mean before a norm is no norm.

    Examples
    --------
    >>> parity("mean_activation"), parity("abs_activation"), parity("attribution score")
    (<Parity.ODD: 'it changes its sign too'>, <Parity.EVEN: 'it stays'>, <Parity.EVEN: 'it stays'>)
    """
    words = [_singular(word) for word in words_of(name)]
    if "_".join(words) in QUANTITIES:
        return QUANTITIES["_".join(words)]
    modifiers = KNOWN_WORDS - OTHER_EVEN_WORDS
    core = [word for word in words if word not in modifiers]
    measured = QUANTITIES.get("_".join(core), Parity.UNCLEAR)
    found = set(words)
    if core and measured is Parity.UNCLEAR:
        return Parity.ONE_SIDED if ONE_SIDED & found else Parity.UNCLEAR
    if EVEN_OF_ANYTHING & found or measured is Parity.EVEN or (words and words[-1] in EVEN_LAST):
        return Parity.EVEN
    if ONE_SIDED & found:
        return Parity.ONE_SIDED
    if EVEN_LAST & found:
        return Parity.UNCLEAR
    if VAGUE & found or (not core and not AVERAGES & found):
        return Parity.UNCLEAR
    return Parity.UNCLEAR if not core and DIFFERENCES & found else Parity.ODD


def speaks_against_signs(name: str) -> bool:
    """Whether a word of a name belongs to quantities that do not simply change their sign."""
    found = {_singular(word) for word in words_of(name)}
    return bool(found & AGAINST_SIGNS)


def words_of(name: str) -> list[str]:
    """The words of a name, in lower case, however it joins them."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.findall(r"[a-z0-9]+", spaced.lower())


def _singular(word: str) -> str:
    return word if word in KNOWN_WORDS | IN_QUANTITIES else word.removesuffix("s")
