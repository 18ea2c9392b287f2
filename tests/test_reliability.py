"""Negative controls: unrelated models and shuffled pairs have no gauge, a model has its own."""

import math
from dataclasses import replace

import pytest
import torch

from signed_align import Gauge, port, recover, scramble
from signed_align.errors import GaugeError, SignedAlignWarning, UnreliableGaugeError
from signed_align.matching import Match, Objective, match
from signed_align.reliability import Finding, Verdict, judge, require_reliable
from signed_align.signed_permutation import SignedPermutation
from tests import tiny
from tests.test_cli import run, run_json
from tests.test_recovery import TEXT, add_tokenizer

TRIALS = range(20)
EVIDENCE = {"weights": {}, "activations": {"text": TEXT}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models of one shape and tokenizer, each with weights of its own."""
    root = tmp_path_factory.mktemp("models")
    paths = [root / str(seed) for seed in range(7)]
    for seed, path in enumerate(paths):
        add_tokenizer(tiny.save(tiny.build("llama", seed=seed), path))
    (root / "text.txt").write_text("\n".join(TEXT))
    return paths


@pytest.fixture(scope="module")
def unrelated(models):
    """Twenty pairs of unrelated models."""
    pairs = [(a, b) for a in models for b in models if a < b]
    return pairs[: len(TRIALS)]


@pytest.mark.parametrize("method", EVIDENCE)
def test_unrelated_models_have_no_gauge(unrelated, method):
    assert len(unrelated) == len(TRIALS)
    for pair in unrelated:
        with pytest.raises(UnreliableGaugeError, match="no reliable gauge leads from") as caught:
            recover(*pair, **EVIDENCE[method])
        assert caught.value.verdict["finding"] == "no_gauge"
        assert caught.value.verdict["sure_fraction"] < 1 / 3


@pytest.mark.parametrize("method", EVIDENCE)
def test_shuffled_pairs_have_no_gauge(models, method):
    for seed in TRIALS:
        model = models[seed % len(models)]
        with pytest.raises(UnreliableGaugeError):
            recover(model, model, shuffle_pairs=True, seed=seed, **EVIDENCE[method])
    gauge = recover(model, model, shuffle_pairs=True, accept_weak=True, **EVIDENCE[method])
    assert gauge.provenance["control"] == "shuffled pairs"


@pytest.mark.parametrize("method", EVIDENCE)
def test_a_model_has_its_own_coordinates(models, method):
    for seed in TRIALS:
        model = models[seed % len(models)]
        gauge = recover(model, model, seed=seed, **EVIDENCE[method])
        assert gauge.element("residual").is_identity
        assert Verdict.of(gauge).finding is Finding.SAME_COORDINATES


@pytest.mark.parametrize("objective", list(Objective))
def test_the_verdict_does_not_depend_on_the_objective(models, tmp_path, objective):
    """A baseline that is wrong about a twin is refused for two models without a gauge only."""
    scramble(models[0], tmp_path / "twin", seed=1)
    verdict = Verdict.of(recover(models[0], tmp_path / "twin", objective=objective))
    assert verdict.finding is Finding.GAUGE
    assert verdict == Verdict.of(recover(models[0], tmp_path / "twin"))
    with pytest.raises(UnreliableGaugeError):
        recover(models[0], models[1], objective=objective)


def test_other_spaces_are_not_searched_where_the_residual_stream_has_no_gauge(models):
    for settings in ({}, {"text": TEXT}, {"text": TEXT, "method": "both"}):
        with pytest.raises(UnreliableGaugeError):
            recover(models[0], models[1], spaces=["all"], **settings)
        with pytest.raises(GaugeError, match="control of the residual stream"):
            recover(models[0], models[1], spaces=["all"], shuffle_pairs=True, **settings)


def test_a_light_fine_tune_has_the_same_coordinates(models, tmp_path):
    model = tiny.load(models[0])
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            torch.manual_seed(number)
            parameter += 0.1 * parameter.std().nan_to_num() * torch.randn_like(parameter)
    add_tokenizer(tiny.save(model, tmp_path / "tuned"))
    for settings in EVIDENCE.values():
        verdict = Verdict.of(recover(models[0], tmp_path / "tuned", **settings))
        assert verdict.finding is Finding.SAME_COORDINATES
        assert verdict.moved_fraction == 0


@pytest.mark.parametrize("samples", [4, 16, 64, 1024])
@pytest.mark.parametrize("factors", [0, 1, 5, 20])
def test_noise_and_common_factors_are_no_gauge(samples, factors):
    """Unrelated coordinates that follow a few common factors correlate strongly with many."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        common = torch.randn(samples, max(factors, 1), generator=generator)

        def coordinates(common=common, generator=generator):
            loads = torch.randn(common.shape[1], 64, generator=generator)
            noise = torch.randn(samples, 64, generator=generator)
            return common @ loads + 0.3 * noise if factors else noise

        x, y = (sample - sample.mean(0) for sample in (coordinates(), coordinates()))
        correlation = (x / x.norm(dim=0)).T @ (y / y.norm(dim=0))
        assert judge(match(correlation.double()), samples).finding is Finding.NO_GAUGE


def test_few_samples_ask_for_large_margins():
    element, margin = SignedPermutation.identity(8), torch.full((8,), 0.3)
    assert judge(Match(element, margin), 1000).finding is Finding.SAME_COORDINATES
    assert judge(Match(element, margin), 16).finding is Finding.NO_GAUGE
    assert judge(Match(element, margin), 16).needed_margin == 2 / math.sqrt(16)
    assert judge(Match(element, margin), 10**9).needed_margin == 0.05


def test_weak_coordinates_that_move_do_not_speak_for_a_gauge():
    element = SignedPermutation(torch.tensor([1, 0, 2, 3, 4, 5]), torch.ones(6, dtype=torch.int8))
    weak = torch.tensor([0.01, 0.01, 0.5, 0.5, 0.5, 0.5])
    assert judge(Match(element, weak), 1000).finding is Finding.SAME_COORDINATES
    verdict = judge(Match(element, weak + 0.1), 1000)
    assert verdict.finding is Finding.GAUGE
    assert verdict.moved_fraction == pytest.approx(2 / 6)


def test_a_constructed_gauge_has_no_verdict_and_is_relied_on(twin):
    assert Verdict.of(twin[2]) is None
    require_reliable(twin[2])


def test_the_command_ends_with_its_own_code_and_writes_nothing(models, tmp_path):
    out = tmp_path / "gauge.safetensors"
    result = run("gauge", models[0], models[1], "-o", out, "--json", code=3)
    assert '"finding": "no_gauge"' in result.stdout
    assert "no reliable gauge" in result.stderr
    assert not out.exists()
    assert run("gauge", models[0], models[0], "-o", out, "--shuffle-pairs", code=3)
    taken = run_json("gauge", models[0], models[1], "-o", out, "--accept-weak")
    assert taken["verdict"]["finding"] == "no_gauge"
    assert Verdict.of(Gauge.load(out)).to_dict() == taken["verdict"]
    same = run("gauge", models[0], models[0], "-o", out, "--force")
    assert "same coordinates" in same.stdout


def test_porting_says_when_nothing_has_to_move(models, tmp_path):
    torch.save(torch.randn(tiny.WIDTH), tmp_path / "vector.pt")
    hook = {"hook": "blocks.0.hook_resid_post", "any_source": True}
    gauge = recover(models[0], models[0])
    with pytest.warns(SignedAlignWarning, match="same coordinates.*the gauge moves nothing"):
        port(tmp_path / "vector.pt", gauge, tmp_path / "same.pt", **hook)
    swapped = SignedPermutation(
        torch.tensor([1, 0, *range(2, tiny.WIDTH)]), torch.ones(tiny.WIDTH, dtype=torch.int8)
    )
    unsure = replace(gauge, elements={"residual": swapped})
    with pytest.warns(SignedAlignWarning, match="2 coordinates that it is not sure of"):
        port(tmp_path / "vector.pt", unsure, tmp_path / "unsure.pt", **hook)
    weak = recover(models[0], models[1], accept_weak=True)
    with pytest.warns(SignedAlignWarning, match="accepted although it is not reliable"):
        port(tmp_path / "vector.pt", weak, tmp_path / "weak.pt", **hook)
