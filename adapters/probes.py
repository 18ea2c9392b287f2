"""Linear probes of scikit-learn: weights, means and components along the activations' coordinates.

A file of skops is read as data: its classes are compared by name, none is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from signed_align.adapters.artifact import Artifact, Journey, Part, or_unmoved
from signed_align.adapters.estimators import (
    Estimator,
    Opaque,
    PickledFile,
    SkopsFile,
    arrays_in,
    items_of,
)
from signed_align.errors import ArtifactError
from signed_align.labels import Axes, Label, joined

SKOPS_SUFFIX = ".skops"
PICKLE_SUFFIXES = (".joblib", ".pkl", ".pickle")


@dataclass(frozen=True)
class Rule:
    """What the arrays of a fitted attribute have in the coordinates of the activations.

    Parameters
    ----------
    axes : tuple of int
        The axes they index.
    signed : bool
        False for what is even in them: variances and scales.
    intercept : bool
        One entry more may stand behind the coordinates: the intercept.
    first : bool
        Only the first of a list of arrays has them: a network's first layer.
    within : bool
        The attribute is an object with a table of its own.
    """

    axes: tuple[int, ...] = (-1,)
    signed: bool = True
    intercept: bool = False
    first: bool = False
    within: bool = False


SIGNED = Rule()
EVEN = Rule(signed=False)
ROWS = Rule(axes=(0,))
BOTH = Rule(axes=(-2, -1))
FIRST_LAYER = Rule(axes=(0,), first=True)
FIRST_SQUARES = replace(FIRST_LAYER, signed=False)
Table = Mapping[str, Rule | None]
"""By attribute; None for what is not along the coordinates and stays."""


def _stay(*names: str) -> Table:
    return dict.fromkeys(names)


COMMON = _stay(
    *("classes_", "class_weight", "class_weight_", "_expanded_class_weight", "_label_binarizer"),
    *("intercept_", "n_iter_", "t_", "n_samples_seen_", "random_state", "priors", "priors_"),
    *("class_prior_", "class_count_", "best_score_", "alpha", "alpha_", "alphas", "alphas_"),
    *("dual_gap_", "l1_ratio", "l1_ratio_", "mse_path_", "singular_", "rank_", "cv_results_"),
)
LINEAR: Table = {"coef_": SIGNED}
STOCHASTIC: Table = {
    **LINEAR,
    **dict.fromkeys(("_standard_coef", "_average_coef"), SIGNED),
    **_stay("_standard_intercept", "_average_intercept", "_loss_function_"),
}
CROSS_VALIDATED: Table = {
    **LINEAR,
    "coefs_paths_": Rule(intercept=True),
    **_stay("scores_", "C_", "Cs", "Cs_", "l1_ratios", "l1_ratios_"),
}
SUPPORT_VECTORS: Table = {
    "support_vectors_": SIGNED,
    **_stay("support_", "_n_support", "dual_coef_", "_dual_coef_", "_intercept_", "_gamma"),
    **_stay("_probA", "_probB", "_num_iter", "shape_fit_", "offset_"),
}
NETWORK: Table = {
    **dict.fromkeys(("coefs_", "_best_coefs"), FIRST_LAYER),
    "_optimizer": Rule(within=True),
    **_stay("intercepts_", "_best_intercepts", "_random_state", "loss_", "loss_curve_"),
    **_stay("validation_scores_", "best_validation_score_", "best_loss_"),
}
COMPONENTS: Table = {
    "components_": SIGNED,
    "mean_": SIGNED,
    **_stay("explained_variance_", "explained_variance_ratio_", "singular_values_"),
    **_stay("noise_variance_"),
}

ESTIMATORS: Mapping[str, Table] = {
    **dict.fromkeys(
        (
            *("LinearRegression", "Ridge", "RidgeCV", "RidgeClassifier", "RidgeClassifierCV"),
            *("Lasso", "LassoCV", "ElasticNet", "ElasticNetCV", "LogisticRegression"),
            *("LinearSVC", "LinearSVR"),
        ),
        LINEAR,
    ),
    "LogisticRegressionCV": CROSS_VALIDATED,
    **dict.fromkeys(
        (
            *("SGDClassifier", "SGDRegressor", "Perceptron"),
            *("PassiveAggressiveClassifier", "PassiveAggressiveRegressor"),
        ),
        STOCHASTIC,
    ),
    "LinearDiscriminantAnalysis": {
        **dict.fromkeys(("coef_", "means_", "xbar_"), SIGNED),
        "scalings_": ROWS,
        "covariance_": BOTH,
        **_stay("explained_variance_ratio_"),
    },
    "QuadraticDiscriminantAnalysis": {
        "means_": SIGNED,
        "rotations_": ROWS,
        "covariance_": BOTH,
        **_stay("scalings_"),
    },
    "GaussianNB": {"theta_": SIGNED, "var_": EVEN, **_stay("epsilon_")},
    "NearestCentroid": {
        **dict.fromkeys(("centroids_", "deviations_"), SIGNED),
        "within_class_std_dev_": EVEN,
    },
    **dict.fromkeys(("SVC", "NuSVC", "SVR", "NuSVR", "OneClassSVM"), SUPPORT_VECTORS),
    **dict.fromkeys(("MLPClassifier", "MLPRegressor"), NETWORK),
    "AdamOptimizer": {"ms": FIRST_LAYER, "vs": FIRST_SQUARES},
    "SGDOptimizer": {"velocities": FIRST_LAYER},
    "StandardScaler": {"mean_": SIGNED, "var_": EVEN, "scale_": EVEN, "n_samples_seen_": EVEN},
    "RobustScaler": {"center_": SIGNED, "scale_": EVEN},
    "MaxAbsScaler": {"max_abs_": EVEN, "scale_": EVEN},
    "Normalizer": {},
    "PCA": COMPONENTS,
    "IncrementalPCA": {**COMPONENTS, "var_": EVEN},
    "TruncatedSVD": COMPONENTS,
}
"""Of every estimator that can be moved, by class: what its fitted attributes index."""

KEEPING_COORDINATES = {"StandardScaler", "RobustScaler", "MaxAbsScaler", "Normalizer"}
"""Behind these steps of a pipeline come the same coordinates; behind others come new ones."""

KERNELS = ("linear", "poly", "rbf", "sigmoid")
"""Kernels of inner products and distances, which permutations and signs keep."""

UNWRAP = "save the fitted estimator inside it by itself ({})"
NOT_ODD = "it shifts each coordinate by its range, which a sign flip turns around"
THRESHOLDS = "it compares single coordinates with thresholds, which a sign flip turns around"
REFUSED: Mapping[str, str] = {
    "MinMaxScaler": NOT_ODD,
    "QuantileTransformer": THRESHOLDS,
    "PowerTransformer": "it bends each coordinate differently on both sides of zero",
    "PolynomialFeatures": "it multiplies coordinates with each other",
    "KBinsDiscretizer": THRESHOLDS,
    "Binarizer": THRESHOLDS,
    "SelectKBest": "it selects coordinates by a mask",
    "SelectFromModel": "it selects coordinates by a mask",
    "VarianceThreshold": "it selects coordinates by a mask",
    "GridSearchCV": UNWRAP.format("best_estimator_"),
    "RandomizedSearchCV": UNWRAP.format("best_estimator_"),
    "OneVsRestClassifier": UNWRAP.format("estimators_"),
    "CalibratedClassifierCV": UNWRAP.format("calibrated_classifiers_[i].estimator"),
    "ColumnTransformer": "it treats coordinates by their number",
    "FeatureUnion": "it lays coordinates of several kinds side by side",
}
REFUSED_MODULES: Mapping[str, str] = {"sklearn.tree.": THRESHOLDS, "sklearn.ensemble.": THRESHOLDS}


class ProbeFamily:
    """Fitted estimators and pipelines as skops, joblib or pickle save them."""

    kind = "scikit-learn probe"

    def recognises(self, path: Path) -> bool:
        """Whether it is a file of a suffix that estimators are saved under."""
        return path.suffix in (SKOPS_SUFFIX, *PICKLE_SUFFIXES) and path.is_file()

    def inspect(self, path: Path) -> dict[str, Any]:
        """The estimators and the number of coordinates; of a pickle only that it is one."""
        if path.suffix in PICKLE_SUFFIXES:
            return {"format": path.suffix.removeprefix(".")}
        steps = [step.name for _, step in _steps(_estimator(SkopsFile(path)))]
        return {"format": "skops", "estimators": steps, "n_features_in": _width(SkopsFile(path))}

    def read(self, path: Path, journey: Journey) -> Artifact:
        """Read and label it; raises ArtifactError, with the reason, if it cannot move."""
        file: SkopsFile | PickledFile
        if path.suffix == SKOPS_SUFFIX:
            file = SkopsFile(path)
        elif journey.allow_pickle:
            file = PickledFile(path)
        else:
            raise ArtifactError(
                f"{path} can only be read by running the code in it; save it with skops, or pass "
                "--allow-pickle if you trust whoever made it."
            )
        width = _width(file)
        label, notes = journey.coordinates(width, f"the probe in {path}")
        labels = _labels(_estimator(file), label, width, path)
        return Artifact(
            kind=self.kind,
            path=path,
            made_on=None,
            parts=[Part(file, or_unmoved(labels))],
            notes=notes,
        )


# ---- files ---------------------------------------------------------------------------------------


# ---- labels --------------------------------------------------------------------------------------


def _estimator(file: SkopsFile | PickledFile) -> Estimator:
    if not isinstance(file.content, Estimator):
        raise ArtifactError(
            f"{file.path} holds no fitted estimator of scikit-learn by itself; save each in a "
            "file of its own."
        )
    return file.content


def _steps(
    estimator: Estimator, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Estimator]]:
    """The estimators that the activations go through, one after the other."""
    if estimator.name != "Pipeline" or not estimator.module.startswith("sklearn.pipeline"):
        yield path, estimator
        return
    steps = estimator.attributes.get("steps")
    if not isinstance(steps, list) or any(_length(step) != 2 for step in steps):
        raise ArtifactError("the pipeline's steps are not pairs of a name and an estimator.")
    for k, (_, step) in enumerate(steps):
        if isinstance(step, Estimator):
            yield from _steps(step, (*path, "steps", str(k), "1"))
        elif step not in ("passthrough", None):
            raise ArtifactError(f"step {k} of the pipeline is {step!r}, which is not understood.")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def _width(file: SkopsFile | PickledFile) -> int:
    """How many coordinates the activations have."""
    for _, step in _steps(_estimator(file)):
        _require_movable(step, file.path)
        width = step.attributes.get("n_features_in_")
        if isinstance(width, int):
            return width
        raise ArtifactError(
            f"{file.path} holds a {step.name} without n_features_in_: it is not fitted."
        )
    raise ArtifactError(f"{file.path} holds a pipeline without steps.")


def _labels(estimator: Estimator, label: Label, width: int, path: Path) -> dict[str, Axes]:
    """The labels of every array along the coordinates."""
    labels: dict[str, Axes] = {}
    for place, step in _steps(estimator):
        if step.attributes.get("n_features_in_", width) != width:
            raise ArtifactError(
                f"the {step.name} in {path} reads {step.attributes['n_features_in_']} "
                f"coordinates, the step in front of it {width}."
            )
        labels |= _labels_of(step, place, label, width, path)
        if step.name not in KEEPING_COORDINATES:
            break
    return labels


def _labels_of(
    estimator: Estimator, place: tuple[str, ...], label: Label, width: int, path: Path
) -> dict[str, Axes]:
    """The labels of one estimator's arrays; raises for what is not understood."""
    _require_movable(estimator, path)
    table = ESTIMATORS[estimator.name]
    labels: dict[str, Axes] = {}
    for name, value in estimator.attributes.items():
        rule = table[name] if name in table else COMMON.get(name, SIGNED)
        known = name in table or name in COMMON
        inside = list(arrays_in(value, (*place, name)))
        if not known:
            inside = [(key, stored) for key, stored in inside if stored.array.ndim]
        if rule is None or (not known and not inside and not _opaque(value)):
            continue
        if not known:
            raise ArtifactError(
                f"the {estimator.name} in {path} has {name}, which is not understood."
            )
        if rule.within and isinstance(value, Estimator):
            labels |= _labels_of(value, (*place, name), label, width, path)
            continue
        if _opaque(value):
            raise ArtifactError(
                f"{name} of the {estimator.name} in {path} is a {_opaque(value)}, not an array; "
                "if it is sparse, call densify() and save it again."
            )
        for key, stored in inside[:1] if rule.first else inside:
            labels[key] = _axes(stored.array, rule, label, width, f"{name} in {path}")
    return labels


def _require_movable(estimator: Estimator, path: Path) -> None:
    reason = REFUSED.get(estimator.name) or next(
        (why for module, why in REFUSED_MODULES.items() if estimator.module.startswith(module)),
        None,
    )
    if reason is None and estimator.name not in ESTIMATORS:
        reason = "it is not known which of its arrays are along the coordinates"
    if reason is None and estimator.attributes.get("kernel", KERNELS[0]) not in KERNELS:
        reason = f"its kernel is none of {', '.join(KERNELS)}"
    if reason is None and "feature_names_in_" in estimator.attributes:
        reason = "it names its columns; fit it on an array without names"
    if reason is not None:
        raise ArtifactError(f"the {estimator.name} in {path} cannot be moved: {reason}.")


def _opaque(value: Any) -> str | None:
    """What kind of value that is not looked into ``value`` is or holds; None if none."""
    if isinstance(value, (Opaque, Estimator)):
        return value.kind if isinstance(value, Opaque) else value.name
    return next((found for _, item in items_of(value) if (found := _opaque(item))), None)


def _axes(array: np.ndarray[Any, Any], rule: Rule, label: Label, width: int, what: str) -> Axes:
    """The labels of one array's axes."""
    if not array.ndim and rule is EVEN:
        return ()  # a count that is the same for all coordinates
    positions = {axis % array.ndim for axis in rule.axes} if array.ndim else set()
    sizes = {array.shape[position] for position in positions}
    if rule.intercept and sizes == {width + 1}:
        along: Label = joined([label, None], [width, 1])
    elif len(positions) == len(rule.axes) and sizes == {width}:
        along = label if rule.signed else label.unsigned
    else:
        raise ArtifactError(
            f"{what} has the shape {array.shape}, which does not go with {width} coordinates."
        )
    if rule.signed and array.dtype.kind != "f":
        raise ArtifactError(f"{what} holds {array.dtype}, not floating-point numbers.")
    return tuple(along if k in positions else None for k in range(array.ndim))
