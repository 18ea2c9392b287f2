"""Probes: what they say of moved activations is what they said before, whoever fitted them."""

import json
import os
import pickle
import warnings
import zipfile

import joblib
import numpy as np
import pytest
import skops.io
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA, IncrementalPCA, TruncatedSVD
from sklearn.discriminant_analysis import (
    LinearDiscriminantAnalysis,
    QuadraticDiscriminantAnalysis,
)
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_selection import SelectKBest
from sklearn.linear_model import (
    ElasticNet,
    ElasticNetCV,
    Lasso,
    LassoCV,
    LinearRegression,
    LogisticRegression,
    LogisticRegressionCV,
    Perceptron,
    Ridge,
    RidgeClassifier,
    RidgeClassifierCV,
    RidgeCV,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.model_selection import GridSearchCV
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    PolynomialFeatures,
    RobustScaler,
    StandardScaler,
)
from sklearn.svm import SVC, SVR, LinearSVC, LinearSVR, NuSVC, NuSVR, OneClassSVM
from sklearn.tree import DecisionTreeClassifier

from signed_align import Gauge, SignedPermutation
from signed_align.adapters import archives, recognise
from signed_align.adapters.probes import ESTIMATORS, PickledFile, ProbeFamily
from signed_align.errors import ArtifactError, SignedAlignError
from signed_align.gauge import ModelIdentity
from tests import tiny
from tests.porting import port

WIDTH = tiny.WIDTH
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(120, WIDTH)) * GENERATOR.uniform(0.5, 2, WIDTH) + 0.3
X[:, 3] *= 4
THREE = (X @ GENERATOR.normal(size=(WIDTH, 3)) + GENERATOR.normal(size=(120, 3))).argmax(1)
TWO = THREE > 0
HALVES = X[:, 0] > np.median(X[:, 0])
NUMBERS = X @ GENERATOR.normal(size=WIDTH) + GENERATOR.normal(size=120)
NETWORK = {"hidden_layer_sizes": (7,), "max_iter": 15, "random_state": 0}

PROBES = {
    "two classes": (LogisticRegression(), TWO),
    "three classes": (LogisticRegression(), THREE),
    "named classes": (LogisticRegression(), np.array(["a", "b", "c"])[THREE]),
    "LogisticRegressionCV": (LogisticRegressionCV(cv=2, Cs=3), THREE),
    "LogisticRegressionCV without intercept": (
        LogisticRegressionCV(cv=2, Cs=[0.1, 1], fit_intercept=False),
        TWO,
    ),
    "LinearSVC": (LinearSVC(), THREE),
    "LinearSVR": (LinearSVR(), NUMBERS),
    "RidgeClassifier": (RidgeClassifier(), THREE),
    "RidgeClassifierCV": (RidgeClassifierCV(alphas=np.array([0.1, 1.0])), THREE),
    "SGDClassifier": (SGDClassifier(random_state=0), THREE),
    "SGDClassifier averaged": (SGDClassifier(average=True, random_state=0), TWO),
    "Perceptron": (Perceptron(random_state=0), THREE),
    "LinearRegression": (LinearRegression(), NUMBERS),
    "several targets": (LinearRegression(), np.stack([NUMBERS, X[:, 0]], 1)),
    "Ridge": (Ridge(), NUMBERS),
    "RidgeCV": (RidgeCV(), NUMBERS),
    "Lasso": (Lasso(0.01), NUMBERS),
    "LassoCV": (LassoCV(alphas=5, cv=2), NUMBERS),
    "ElasticNet": (ElasticNet(0.01), NUMBERS),
    "ElasticNetCV": (ElasticNetCV(alphas=5, cv=2), NUMBERS),
    "SGDRegressor": (make_pipeline(StandardScaler(), SGDRegressor(random_state=0)), NUMBERS),
    "SGDRegressor averaged": (
        make_pipeline(StandardScaler(), SGDRegressor(average=True, random_state=0)),
        NUMBERS,
    ),
    "LDA by svd": (LinearDiscriminantAnalysis(store_covariance=True), THREE),
    "LDA by lsqr": (LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"), THREE),
    "LDA by eigen": (LinearDiscriminantAnalysis(solver="eigen", shrinkage="auto"), THREE),
    "QDA": (QuadraticDiscriminantAnalysis(reg_param=0.5, store_covariance=True), HALVES),
    "GaussianNB": (GaussianNB(), THREE),
    "NearestCentroid": (NearestCentroid(shrink_threshold=0.1), THREE),
    "linear SVC": (SVC(kernel="linear"), THREE),
    "SVC": (SVC(), TWO),
    "NuSVC": (NuSVC(nu=0.2, kernel="poly"), TWO),
    "SVR": (SVR(kernel="sigmoid"), NUMBERS),
    "NuSVR": (NuSVR(), NUMBERS),
    "OneClassSVM": (OneClassSVM(), TWO),
    "MLPClassifier": (MLPClassifier(**NETWORK), THREE),
    "MLPClassifier stopped early": (MLPClassifier(early_stopping=True, **NETWORK), THREE),
    "MLPClassifier by lbfgs": (MLPClassifier(solver="lbfgs", **NETWORK), THREE),
    "MLPRegressor": (MLPRegressor(solver="sgd", learning_rate_init=1e-4, **NETWORK), NUMBERS),
    "StandardScaler": (StandardScaler(), None),
    "RobustScaler": (RobustScaler(), None),
    "MaxAbsScaler": (MaxAbsScaler(), None),
    "PCA": (PCA(5, whiten=True), None),
    "IncrementalPCA": (IncrementalPCA(5), None),
    "TruncatedSVD": (TruncatedSVD(5, random_state=0), None),
    "scaled": (make_pipeline(StandardScaler(), LogisticRegression()), THREE),
    "scaled without means": (
        make_pipeline(StandardScaler(with_mean=False), RobustScaler(), LinearSVC()),
        THREE,
    ),
    "normed": (make_pipeline(MaxAbsScaler(), Normalizer(), SVC()), THREE),
    "passed through": (make_pipeline("passthrough", Normalizer(norm="max"), Ridge()), NUMBERS),
    "components": (make_pipeline(StandardScaler(), PCA(9), LogisticRegression()), THREE),
    "all components": (make_pipeline(PCA(), StandardScaler(), LogisticRegression()), THREE),
    "trees behind components": (
        make_pipeline(PCA(9), MinMaxScaler(), DecisionTreeClassifier(random_state=0)),
        THREE,
    ),
    "nested": (make_pipeline(make_pipeline(StandardScaler(), PCA(4)), GaussianNB()), THREE),
    "discriminants": (make_pipeline(LinearDiscriminantAnalysis(), LogisticRegression()), THREE),
}
OPTIMIZERS = ("AdamOptimizer", "SGDOptimizer")
TRUSTED = [
    *(f"sklearn.neural_network._stochastic_optimizers.{name}" for name in OPTIMIZERS),
    "sklearn.tree._tree.Tree",
]


@pytest.fixture(scope="module")
def gauge():
    return Gauge(
        {"residual": SignedPermutation.random(WIDTH, seed=2)},
        {},
        ModelIdentity("someone/model", "a" * 64, "llama"),
        ModelIdentity("someone/twin", "b" * 64, "llama"),
    )


@pytest.fixture(scope="module", params=PROBES)
def probe(request):
    estimator, wanted = PROBES[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return estimator.fit(X, wanted)


def answers(estimator, rows):
    for method in ("decision_function", "predict_proba", "predict", "transform"):
        if hasattr(estimator, method):
            answer = getattr(estimator, method)(rows)
            if answer.dtype.kind == "f":
                return answer
    return (estimator.predict(rows) == estimator.classes_[0]).astype(float)


def moved_rows(gauge):
    return gauge.element("residual").apply(torch.from_numpy(X), 1).numpy()


def change(one, other, *, coordinates=False, gauge=None):
    if coordinates:
        one = gauge.element("residual").apply(torch.from_numpy(one), 1).numpy()
    return np.abs(one - other).max() / np.abs(one).max()


def check(gauge, home, away):
    """The moved estimator says of moved rows what it said; the unmoved one does not."""
    last = home[-1] if hasattr(home, "steps") else home
    same = isinstance(last, (StandardScaler, RobustScaler, MaxAbsScaler))
    before = answers(home, X)
    assert change(before, answers(away, moved_rows(gauge)), coordinates=same, gauge=gauge) < 1e-10
    lost = answers(home, moved_rows(gauge))
    assert change(before, lost, coordinates=same, gauge=gauge) > 1e-2


def same_bits(one, other):
    return one.numpy().tobytes() == other.numpy().tobytes()


def refused(path, gauge, match, **options):
    with pytest.raises(SignedAlignError, match=match):
        port(path, gauge, path.parent / "refused", **options)
    assert not (path.parent / "refused").exists()


def dumped(estimator, tmp_path, name="probe.skops"):
    skops.io.dump(estimator, tmp_path / name)
    return tmp_path / name


# ---- the law -------------------------------------------------------------------------------------


def test_skops_probes_decide_alike(tmp_path, gauge, probe):
    path = dumped(probe, tmp_path)
    report = port(path, gauge, tmp_path / "moved.skops")
    assert report["kind"] == "scikit-learn probe"
    assert report["notes"] == ["taken to be on the residual stream"]
    check(gauge, probe, skops.io.load(tmp_path / "moved.skops", trusted=TRUSTED))
    port(tmp_path / "moved.skops", gauge, tmp_path / "back.skops", inverse=True)
    assert (tmp_path / "back.skops").read_bytes() == path.read_bytes()


def test_pickled_probes_decide_alike(tmp_path, gauge, probe):
    joblib.dump(probe, tmp_path / "probe.joblib")
    (tmp_path / "probe.pkl").write_bytes(pickle.dumps(probe, protocol=4))
    for name, load in (
        ("probe.joblib", joblib.load),
        ("probe.pkl", lambda path: pickle.loads(path.read_bytes())),
    ):
        refused(tmp_path / name, gauge, "--allow-pickle")
        port(tmp_path / name, gauge, tmp_path / f"moved-{name}", allow_pickle=True)
        away = load(tmp_path / f"moved-{name}")
        check(gauge, probe, away)
        options = {"inverse": True, "allow_pickle": True}
        port(tmp_path / f"moved-{name}", gauge, tmp_path / f"back-{name}", **options)
        home, back = (PickledFile(tmp_path / prefix) for prefix in (name, f"back-{name}"))
        assert home.shapes == back.shapes
        assert all(same_bits(home.tensor(key), back.tensor(key)) for key in home.shapes)


def test_every_estimator_of_the_table_is_tried():
    tried = {"PassiveAggressiveClassifier", "PassiveAggressiveRegressor", *OPTIMIZERS}
    for estimator, _ in PROBES.values():
        stack = [estimator]
        while stack:
            one = stack.pop()
            tried.add(type(one).__name__)
            stack += [step for _, step in getattr(one, "steps", [])]
    assert set(ESTIMATORS) <= tried


def test_what_is_fitted_further_goes_on_alike(tmp_path, gauge):
    """The moments of a network's optimizer move too, so training goes on as it would have."""
    home = MLPClassifier(solver="adam", warm_start=True, shuffle=False, **NETWORK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        home.partial_fit(X, THREE, classes=[0, 1, 2])
        port(dumped(home, tmp_path), gauge, tmp_path / "moved.skops")
        away = skops.io.load(tmp_path / "moved.skops", trusted=TRUSTED)
        # the optimizer updates the arrays of the network it is of
        for one, rows in ((home, X), (away, moved_rows(gauge))):
            one._optimizer.update_params(one.coefs_ + one.intercepts_, gradients(one, rows))
    check(gauge, home, away)


def gradients(network, rows):
    """What a step may look like: the same in all but the first layer's coordinates."""
    return [
        rows[:7].T.copy() if k == 0 else np.ones_like(value)
        for k, value in enumerate(network.coefs_ + network.intercepts_)
    ]


def test_paths_of_coefficients_move_and_intercepts_stay(tmp_path, gauge):
    home = LogisticRegressionCV(cv=2, Cs=3).fit(X, THREE)
    port(dumped(home, tmp_path), gauge, tmp_path / "moved.skops")
    away = skops.io.load(tmp_path / "moved.skops")
    element = gauge.element("residual")
    for name, path in home.coefs_paths_.items():
        wanted = element.apply(torch.from_numpy(path[..., :WIDTH].copy()), -1).numpy()
        assert np.array_equal(away.coefs_paths_[name][..., :WIDTH], wanted)
        assert np.array_equal(away.coefs_paths_[name][..., WIDTH], path[..., WIDTH])


# ---- hooks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory):
    from signed_align import scramble

    root = tmp_path_factory.mktemp("everywhere")
    source = tiny.save(tiny.build("llama"), root / "source")
    return scramble(source, root / "twin", seed=3, spaces=["all"])


def test_a_probe_of_another_place_needs_its_hook(tmp_path, everywhere):
    rows = np.random.default_rng(1).normal(size=(60, 80))
    home = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, rows[:, 0] > 0)
    path = dumped(home, tmp_path)
    refused(path, everywhere, "80 coordinates and names no hook.*48.*--hook")
    report = port(path, everywhere, tmp_path / "moved.skops", hook="blocks.1.mlp.hook_post")
    assert report["notes"] == []
    element = everywhere.element("mlp:layers.1.mlp")
    moved = element.apply(torch.from_numpy(rows), 1).numpy()
    away = skops.io.load(tmp_path / "moved.skops")
    assert change(answers(home, rows), answers(away, moved)) < 1e-10
    spaces = {row["tensor"]: row["axes"] for row in report["labels"] if row["moved"]}
    assert spaces == {
        "steps/0/1/mean_": "(mlp)",
        "steps/0/1/var_": "(|mlp|)",
        "steps/0/1/scale_": "(|mlp|)",
        "steps/1/1/coef_": "(·, mlp)",
    }


def test_a_probe_of_head_outputs_moves_with_the_heads(tmp_path, everywhere):
    rows = np.random.default_rng(1).normal(size=(60, 64))
    home = LogisticRegressionCV(cv=2, Cs=2).fit(rows, rows[:, 0] > 0)
    path = dumped(home, tmp_path)
    port(path, everywhere, tmp_path / "moved.skops", hook="blocks.0.attn.hook_z")
    away = skops.io.load(tmp_path / "moved.skops")
    assert not np.array_equal(away.coef_, home.coef_)
    assert np.array_equal(np.sort(np.abs(away.coef_)), np.sort(np.abs(home.coef_)))
    port(tmp_path / "moved.skops", everywhere, tmp_path / "back.skops", inverse=True,
         hook="blocks.0.attn.hook_z")  # fmt: skip
    assert (tmp_path / "back.skops").read_bytes() == path.read_bytes()


# ---- refusals ------------------------------------------------------------------------------------


def with_attribute(name, value):
    estimator = LogisticRegression().fit(X, TWO)
    setattr(estimator, name, value)
    return estimator


REFUSALS = {
    "MinMaxScaler": (make_pipeline(MinMaxScaler(), LogisticRegression()), "sign flip"),
    "trees": (DecisionTreeClassifier(), "thresholds"),
    "forests": (RandomForestClassifier(2), "thresholds"),
    "neighbours": (KNeighborsClassifier(), "not known which"),
    "products": (make_pipeline(PolynomialFeatures(1), LogisticRegression()), "multiplies"),
    "selection": (make_pipeline(SelectKBest(k=9), LogisticRegression()), "mask"),
    "searches": (GridSearchCV(LogisticRegression(), {"C": [1]}, cv=2), "best_estimator_"),
    "calibration": (CalibratedClassifierCV(LogisticRegression(), cv=2), r"calibrated_classifiers_"),
    "precomputed kernels": (SVC(kernel="precomputed"), "kernel"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_estimators_that_cannot_move_are_refused_with_the_reason(tmp_path, gauge, name):
    estimator, match = REFUSALS[name]
    rows = X @ X.T if "precomputed" in name else X
    wide = Gauge({"residual": SignedPermutation.random(120)}, {}, gauge.source, gauge.target)
    chosen = wide if "precomputed" in name else gauge
    estimator.fit(rows, TWO)
    refused(dumped(estimator, tmp_path), chosen, match)
    joblib.dump(estimator, tmp_path / "probe.joblib")
    refused(tmp_path / "probe.joblib", chosen, match, allow_pickle=True)


@pytest.mark.parametrize(
    ("estimator", "match"),
    [
        (with_attribute("feature_names_in_", np.array(["x"] * WIDTH, dtype=object)), "names"),
        (with_attribute("extra_", np.zeros(WIDTH)), "extra_, which is not understood"),
        (with_attribute("extra_", LogisticRegression()), "extra_, which is not understood"),
        (with_attribute("coef_", np.zeros((1, 5))), "shape"),
        (with_attribute("coef_", np.zeros((1, WIDTH), dtype=int)), "int64"),
        (with_attribute("n_features_in_", WIDTH + 1), "--hook"),
        (LogisticRegression().fit(X, TWO).sparsify(), "densify"),
        (LogisticRegression(), "not fitted"),
        ({"probe": LogisticRegression().fit(X, TWO)}, "by itself"),
        (X, "by itself"),
        (make_pipeline("passthrough"), "without steps"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, gauge, estimator, match):
    refused(dumped(estimator, tmp_path), gauge, match)
    joblib.dump(estimator, tmp_path / "probe.joblib")
    refused(tmp_path / "probe.joblib", gauge, match, allow_pickle=True)


def test_an_estimator_of_another_package_is_refused(tmp_path, gauge):
    path = dumped(LogisticRegression().fit(X, TWO), tmp_path)
    rewrite_schema(path, lambda schema: schema | {"__module__": "evil.module"})
    refused(path, gauge, "by itself")


def rewrite_schema(path, edit):
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["schema.json"] = json.dumps(edit(json.loads(members["schema.json"]))).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def test_one_array_in_two_places_moves_once_or_not_at_all(tmp_path, gauge):
    pipeline = make_pipeline(StandardScaler(), SGDClassifier(average=True, random_state=0))
    pipeline.fit(X, TWO)
    pipeline[0].scale_ = pipeline[0].var_
    path = dumped(pipeline, tmp_path)
    with zipfile.ZipFile(path) as archive:
        assert len(archive.namelist()) == len(set(archive.namelist()))
    port(path, gauge, tmp_path / "moved.skops")
    check(gauge, pipeline, skops.io.load(tmp_path / "moved.skops"))
    pipeline[0].mean_ = pipeline[0].var_
    refused(dumped(pipeline, tmp_path), gauge, "two places")


# ---- hostile files -------------------------------------------------------------------------------


class Bomb:
    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("name", ["probe.joblib", "probe.pkl", "probe.pickle"])
def test_code_in_pickles_is_not_run_without_consent(tmp_path, gauge, name):
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    refused(tmp_path / name, gauge, "--allow-pickle")
    ProbeFamily().inspect(tmp_path / name)
    assert not (tmp_path / "mark").exists()
    refused(tmp_path / name, gauge, "by itself", allow_pickle=True)
    assert (tmp_path / "mark").exists()


def test_pickles_inside_skops_are_not_run(tmp_path, gauge):
    mark, path = tmp_path / "mark", dumped(LogisticRegression().fit(X, TWO), tmp_path)
    np.save(tmp_path / "evil.npy", np.array([Bomb(mark)], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            evil = (tmp_path / "evil.npy").read_bytes()
            archive.writestr(name, evil if name.endswith(".npy") else data)
    refused(path, gauge, "code")
    assert not mark.exists()


@pytest.mark.parametrize("member", ["../evil.npy", "/etc/evil.npy", "a/b.npy"])
def test_archives_with_paths_are_refused(tmp_path, gauge, member):
    path = dumped(LogisticRegression().fit(X, TWO), tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(member, b"x")
    refused(path, gauge, "nested")


def test_archives_that_unpack_to_too_much_are_refused(tmp_path, gauge, monkeypatch):
    path = dumped(LogisticRegression().fit(X, TWO), tmp_path)
    monkeypatch.setattr(archives, "MOST_UNPACKED", (100, 0))
    refused(path, gauge, "unpacks to")


@pytest.mark.parametrize(
    "edit",
    [
        lambda schema: [],
        lambda schema: {},
        lambda schema: {"__loader__": "CachedNode", "__id__": 5},
        lambda schema: schema | {"content": {"__loader__": "NdArrayNode", "type": "numpy"}},
        lambda schema: schema | {"content": None},
    ],
)
def test_damaged_descriptions_are_refused(tmp_path, gauge, edit):
    path = dumped(LogisticRegression().fit(X, TWO), tmp_path)
    rewrite_schema(path, edit)
    refused(path, gauge, "readable as skops|not fitted|by itself")


def test_damaged_files_are_refused(tmp_path, gauge):
    path = dumped(LogisticRegression().fit(X, TWO), tmp_path)
    whole = path.read_bytes()
    for data in (b"", b"nothing", whole[: len(whole) // 2]):
        path.write_bytes(data)
        refused(path, gauge, "readable as skops")
    (tmp_path / "probe.joblib").write_bytes(b"nothing")
    refused(tmp_path / "probe.joblib", gauge, "cannot be loaded", allow_pickle=True)


def test_inspection_reads_without_running(tmp_path):
    home = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, TWO)
    path = dumped(home, tmp_path)
    assert isinstance(recognise(path), ProbeFamily)
    assert ProbeFamily().inspect(path) == {
        "format": "skops",
        "estimators": ["StandardScaler", "LogisticRegression"],
        "n_features_in": WIDTH,
    }
    (tmp_path / "folder.skops").mkdir()
    assert not ProbeFamily().recognises(tmp_path / "folder.skops")
    with pytest.raises(ArtifactError, match="by itself"):
        ProbeFamily().inspect(dumped([1, 2], tmp_path))
