"""Negative controls: unrelated models and shuffled pairs have no gauge, a model has its own."""

import math
import shutil
from dataclasses import replace

import pytest
import torch
import yaml

from signed_align import Gauge, recover, scramble, transport_along
from signed_align.errors import GaugeError, SignedAlignWarning, UnreliableGaugeError
from signed_align.matching import Match, Objective, match
from signed_align.reliability import Finding, Verdict, judge, judge_path, require_reliable
from signed_align.signed_permutation import SignedPermutation
from tests import tiny
from tests.porting import port
from tests.test_cli import fails, run, run_json
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


@pytest.mark.parametrize("element", [SignedPermutation.identity(8), SignedPermutation.random(8)])
def test_a_path_on_which_other_coordinates_are_lost_at_each_step_is_no_identity(element):
    step = Verdict(Finding.GAUGE, sure_fraction=0.5, needed_margin=0.1, moved_fraction=0.5)
    lost = torch.full((8,), 0.01)  # each coordinate is sure on one of the two steps only
    assert judge_path([step, step], element, lost).finding is Finding.GAUGE
    kept = torch.tensor([0.5] * 4 + [0.01] * 4)
    expected = Finding.SAME_COORDINATES if element.is_identity else Finding.GAUGE
    assert judge_path([step, step], element, kept).finding is expected
    weak = replace(step, finding=Finding.NO_GAUGE, sure_fraction=0.49)
    assert judge_path([step, weak], element, kept).finding is Finding.NO_GAUGE


def test_the_step_without_a_gauge_is_named(models, tmp_path):
    scramble(models[1], tmp_path / "twin", seed=1)
    with pytest.raises(UnreliableGaugeError, match=r"from .*/1 to .*/2: fewer than 50%"):
        transport_along([tmp_path / "twin", models[1], models[2]], method="weights")


def test_a_constructed_gauge_has_no_verdict_and_is_relied_on(twin):
    assert Verdict.of(twin[2]) is None
    require_reliable(twin[2])


NUMBERS = {"sure_fraction": 0.25, "needed_margin": 0.1, "moved_fraction": 0.0}
DAMAGED = [
    5, "gauge", [], {}, {"finding": "gauge"}, {**NUMBERS, "finding": "perhaps"},
    {**NUMBERS, "finding": ["gauge"]}, {**NUMBERS, "finding": "gauge", "sure_fraction": "1"},
    {**NUMBERS, "finding": "gauge", "sure_fraction": 7},
    {**NUMBERS, "finding": "gauge", "needed_margin": math.inf},
    {**NUMBERS, "finding": "gauge", "moved_fraction": math.nan},
]  # fmt: skip


@pytest.mark.parametrize("recorded", DAMAGED, ids=str)
def test_a_damaged_verdict_is_refused_in_one_sentence(twin, tmp_path, recorded):
    source, _, gauge = twin
    file = tmp_path / "gauge.safetensors"
    replace(gauge, provenance={"verdict": recorded}).save(file)
    with pytest.raises(GaugeError, match="verdict that the gauge records is damaged"):
        Verdict.of(Gauge.load(file))
    torch.save(torch.randn(tiny.WIDTH), tmp_path / "vector.pt")
    hook = ["--hook", "blocks.0.hook_resid_post"]
    out = tmp_path / "out"
    fails("port", tmp_path / "vector.pt", "--gauge", file, *hook, "-o", out, match="damaged")
    fails("apply", file, source, "-o", out, match="damaged")
    assert not out.exists()
    assert "verdict" in run("inspect", file).stdout


def test_a_verdict_may_say_more_than_is_known(twin):
    recorded = {**NUMBERS, "finding": "no_gauge", "of_a_later_release": 1}
    verdict = Verdict.of(replace(twin[2], provenance={"verdict": recorded}))
    assert verdict.to_dict() == {**NUMBERS, "finding": "no_gauge"}


def test_json_never_holds_what_json_cannot(twin, tmp_path):
    file = tmp_path / "gauge.safetensors"
    replace(twin[2], provenance={"loss": math.nan}).save(file)
    assert run_json("inspect", file)["provenance"]["loss"] is None
    assert "nan" in run("inspect", file).stdout


def test_half_is_never_less_than_half(twin):
    """The sentence does not round what is found up to what is needed."""
    recorded = {**NUMBERS, "finding": "no_gauge", "sure_fraction": 287 / 576}
    with pytest.raises(UnreliableGaugeError, match=r"fewer than 50% .* \(49\.8%\)"):
        require_reliable(replace(twin[2], provenance={"verdict": recorded}))


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
    hook = {"hook": "blocks.0.hook_resid_post", "any_source": True, "accept_weak": True}
    gauge = recover(models[0], models[0])
    with pytest.warns(SignedAlignWarning, match="same coordinates.*the gauge moves nothing"):
        port(tmp_path / "vector.pt", gauge, tmp_path / "same.pt", **hook)
    swapped = SignedPermutation(
        torch.tensor([1, 0, *range(2, tiny.WIDTH)]), torch.ones(tiny.WIDTH, dtype=torch.int8)
    )
    unsure = replace(gauge, elements={"residual": swapped})
    with pytest.warns(SignedAlignWarning, match="2 coordinates that it is not sure of"):
        port(tmp_path / "vector.pt", unsure, tmp_path / "unsure.pt", verify=False, **hook)
    weak = recover(models[0], models[1], accept_weak=True)
    with pytest.warns(SignedAlignWarning, match="accepted although it is not reliable"):
        port(tmp_path / "vector.pt", weak, tmp_path / "weak.pt", verify=False, **hook)


def test_the_same_residual_stream_does_not_speak_for_other_spaces(models, tmp_path):
    """A twin in its MLPs alone: what lives in the stream fits, what lives in MLPs does not."""
    scramble(models[0], tmp_path / "twin", seed=1, spaces=["mlp"])
    gauge = recover(models[0], tmp_path / "twin", spaces=["residual", "mlp"])
    assert Verdict.of(gauge).finding is Finding.SAME_COORDINATES
    assert "in the residual stream" in str(Verdict.of(gauge))
    torch.save(torch.randn(80), tmp_path / "units.pt")
    for chosen in (gauge, gauge.restricted(["mlp"])):
        with pytest.warns(SignedAlignWarning, match="the gauge moves other spaces only"):
            port(
                tmp_path / "units.pt", chosen, tmp_path / "moved.pt",
                hook="blocks.0.mlp.hook_post", any_source=True, force=True,
            )  # fmt: skip
        assert not torch.equal(torch.load(tmp_path / "units.pt"), torch.load(tmp_path / "moved.pt"))


def test_whole_models_are_not_moved_in_silence(tmp_path):
    models = [
        tiny.save(tiny.build("qwen2", seed=seed, tie_word_embeddings=False), tmp_path / str(seed))
        for seed in range(2)
    ]
    file = tmp_path / "weak.safetensors"
    run("gauge", *models, "-o", file, "--accept-weak")
    warning = f"warning: the gauge from {models[0]} to {models[1]} was accepted although"
    assert warning in run("apply", file, models[0], "-o", tmp_path / "applied").stderr
    inputs = [
        {"model": str(models[0]), "parameters": {"weight": 1, "gauge": str(file)}},
        {"model": str(models[1]), "parameters": {"weight": 1}},
    ]
    recipe = {"merge_method": "signed_align", "base_model": str(models[1]), "models": inputs}
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(recipe))
    assert warning in run("merge", tmp_path / "recipe.yml", tmp_path / "merged").stderr


def test_outputs_never_replace_what_a_command_reads(models, twin, tmp_path):
    source, target, gauge = twin
    text, truth = tmp_path / "text.txt", tmp_path / "truth.safetensors"
    text.write_text("\n".join(TEXT))
    gauge.save(truth)
    forced = ["--force", "-o"]
    for command in ("gauge", "transport"):
        pair = [command, source, target, "--text", text, "--truth", truth, *forced]
        for taken in (text, truth):
            fails(*pair, taken, match="overlaps the input")
    plain = shutil.copytree(models[0], tmp_path / "model")
    fails("scramble", plain, "-o", tmp_path / "twin", "--force", "--save-gauge",
          plain / "config.json", match="overlaps the input")  # fmt: skip
    (tmp_path / "out").mkdir()
    for name in ("gauge.safetensors", "recipe.yml"):
        shutil.copy(truth, tmp_path / "out" / name)
    inside = tmp_path / "out" / "gauge.safetensors"
    fails("apply", inside, source, *forced, tmp_path / "out", match="overlaps the input")
    fails("merge", tmp_path / "out" / "recipe.yml", tmp_path / "out", "--force",
          match="overlaps the input")  # fmt: skip
    assert inside.read_bytes() == truth.read_bytes()


@pytest.mark.parametrize("objective", ["signed", "permutation"])
def test_a_baseline_is_not_moved_through_in_silence(models, tmp_path, objective):
    scramble(models[0], tmp_path / "twin", seed=1)
    gauge = recover(models[0], tmp_path / "twin", objective=objective)
    torch.save(torch.randn(tiny.WIDTH), tmp_path / "vector.pt")
    with pytest.warns(SignedAlignWarning, match=f"is the baseline '{objective}'"):
        port(
            tmp_path / "vector.pt",
            gauge,
            tmp_path / "moved.pt",
            hook="blocks.0.hook_resid_post",
            any_source=True,
            accept_weak=True,
            verify=False,
        )


def test_a_control_that_passes_says_so(models):
    with pytest.raises(UnreliableGaugeError, match="as it should be, no gauge") as found:
        recover(models[0], models[0], shuffle_pairs=True)
    assert found.value.details["verdict"]["control"] == "shuffled pairs"
