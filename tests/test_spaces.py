"""Every space at once: twins scrambled in all of them are recovered, merged and ported to."""

import itertools

import pytest
import torch
from mergekit.options import MergeOptions
from transformers import AutoConfig

from signed_align import Checkpoint, Gauge, merge, recover, scramble
from signed_align.barrier import measure_barrier
from signed_align.errors import (
    ChartError,
    GaugeError,
    UnreliableGaugeError,
    VerificationError,
)
from signed_align.gauge import by_kind
from signed_align.matching import Objective
from signed_align.miniature import miniature_model
from signed_align.weight_matching import WeightMatching, partners_of, with_matches
from tests import tiny
from tests.test_cli import fails, run_json
from tests.test_lora import LINEAR, TARGETS, check
from tests.test_merge import recipe
from tests.test_recovery import TEXT, add_tokenizer

TYPES = ["llama", "qwen3", "gemma2", "phi3", "gpt2"]
EXPERTS = ["mixtral", "qwen3_moe", "granitemoe", "gpt_oss"]
MANY = [f"{a}{b}{c} {b}{a}" for a in "abcdefgh" for b in "hgfedcba" for c in "wxyz"]


def assert_recovered(gauge: Gauge, truth: Gauge):
    assert set(gauge.elements) == set(truth.elements)
    wrong = [space for space in truth.elements if gauge.element(space) != truth.element(space)]
    assert not wrong
    for space, margin in gauge.margins.items():
        assert float(margin.min()) > 0, space


@pytest.fixture(scope="module", params=TYPES)
def twins(request, tmp_path_factory):
    """A model, its twin in all spaces, and the gauge between them."""
    root = tmp_path_factory.mktemp("twins")
    source = add_tokenizer(tiny.save(tiny.build(request.param), root / "source"))
    return source, root / "twin", scramble(source, root / "twin", seed=3, spaces=["all"])


def test_a_twin_in_every_space_computes_the_same(twins):
    source, twin, gauge = twins
    assert {space.partition(":")[0] for space in gauge.elements} >= {"residual", "mlp", "heads"}
    before, after = tiny.logits(tiny.load(source)), tiny.logits(tiny.load(twin))
    assert tiny.relative_change(before, after) <= 1e-5


@pytest.mark.parametrize("method", ["weights", "activations", "both"])
def test_every_space_is_recovered(twins, method):
    source, twin, truth = twins
    text = None if method == "weights" else MANY
    assert_recovered(recover(source, twin, method=method, spaces=["all"], text=text), truth)


def test_the_whole_path_to_the_twin_is_flat(twins):
    source, twin, truth = twins
    paths = measure_barrier(source, twin, gauge=truth, text=TEXT, points=3)
    aligned, straight = paths["aligned"].losses, paths["straight"].losses
    assert max(aligned) - min(aligned) < 1e-4
    assert max(straight) - min(straight) > 1e-2


def test_a_lora_on_every_linear_layer_moves(twins, tmp_path):
    source, twin, gauge = twins
    kind = Checkpoint.open(source).model_type
    settings = {"fan_in_fan_out": True} if kind == "gpt2" else {}
    check(source, twin, gauge, tmp_path, target_modules=TARGETS.get(kind, LINEAR), **settings)


@pytest.mark.parametrize("model_type", EXPERTS)
def test_experts_their_units_and_routers_are_recovered(tmp_path, model_type):
    model = miniature_model(AutoConfig.for_model(model_type))
    model.save_pretrained(tmp_path / "source")
    truth = scramble(tmp_path / "source", tmp_path / "twin", seed=5, spaces=["all"])
    assert any(space.startswith("experts:") for space in truth.elements)
    before = tiny.logits(tiny.load(tmp_path / "source"))
    assert tiny.relative_change(before, tiny.logits(tiny.load(tmp_path / "twin"))) <= 1e-5
    found = recover(tmp_path / "source", tmp_path / "twin", spaces=["all"])
    assert_recovered(found, truth)


def test_a_recipe_aligns_every_space(tmp_path):
    source = tiny.save(tiny.build("qwen2", tie_word_embeddings=False), tmp_path / "source")
    scramble(source, tmp_path / "twin", seed=6, spaces=["all"])
    models = {source: {"weight": 0.5}, tmp_path / "twin": {"weight": 0.5}}
    truth = tiny.logits(tiny.load(source))
    for spaces, same in (("all", True), ("residual", False)):
        made = recipe(
            tmp_path / f"{spaces}.yml", "signed_align", models, parameters={"spaces": spaces}
        )
        if not same:  # a twin in every space, aligned in one: this is noticed
            with pytest.raises(VerificationError, match="spaces: all"):
                merge(made, tmp_path / spaces, MergeOptions(quiet=True))
        merge(made, tmp_path / spaces, MergeOptions(quiet=True), verify=same)
        change = tiny.relative_change(truth, tiny.logits(tiny.load(tmp_path / spaces)))
        assert (change <= 1e-5) is same, (spaces, change)


def test_weight_matching_never_lowers_the_inner_product(tmp_path):
    """The law behind it: each assignment is the best one given all others."""
    paths = [tiny.save(tiny.build("llama", seed=seed), tmp_path / str(seed)) for seed in (1, 2)]
    source, target = map(Checkpoint.open, paths)
    kinds = source.chart.kinds
    matching = WeightMatching(
        source, target, partners_of(source, target), kinds, Objective.SIGNED, cosines=False
    )
    gauge = matching.identity()
    reached = [matching.inner_product(gauge)]
    for site in [*matching.sites.values(), None]:
        found = matching.match_residual(gauge) if site is None else matching.match(site, gauge)
        gauge = with_matches(gauge, found)
        reached.append(matching.inner_product(gauge))
    assert all(after >= before - 1e-3 for before, after in itertools.pairwise(reached))
    assert reached[-1] > reached[0] + 1


def test_spaces_that_a_model_lacks_are_refused(twins, tmp_path):
    source, twin, _ = twins
    with pytest.raises(ChartError, match="'experts' names no spaces"):
        scramble(source, tmp_path / "out", spaces=["experts"])
    with pytest.raises(GaugeError, match="name it among the spaces"):
        recover(source, twin, spaces=["mlp"])
    assert not (tmp_path / "out").exists()


def test_by_kind_sums_up(twins):
    _, _, gauge = twins
    kinds = by_kind(gauge, gauge)
    total = sum(entry["coordinates"] for entry in kinds.values())
    assert total == sum(element.size for element in gauge.elements.values())
    for entry in kinds.values():
        assert entry["permutation_accuracy"] == entry["sign_accuracy"] == 1.0


def test_the_command_line_takes_spaces(tmp_path):
    source = tiny.save(tiny.build("llama"), tmp_path / "source")
    made = run_json(
        "scramble", source, "-o", tmp_path / "twin", "--spaces", "residual,mlp,heads",
        "--save-gauge", tmp_path / "true.safetensors",
    )  # fmt: skip
    assert {space.partition(":")[0] for space in made["spaces"]} == {
        "residual", "mlp", "heads", "values", "keys",
    }  # fmt: skip
    found = run_json(
        "gauge", source, tmp_path / "twin", "-o", tmp_path / "found.safetensors",
        "--spaces", "all", "--truth", tmp_path / "true.safetensors",
    )  # fmt: skip
    for entry in found["kinds"].values():
        assert entry["permutation_accuracy"] == entry["sign_accuracy"] == 1.0
    applied = run_json("apply", tmp_path / "found.safetensors", source, "-o", tmp_path / "applied")
    twin = Checkpoint.open(tmp_path / "twin")
    assert applied["fingerprint"] == twin.identity.fingerprint


def test_support_says_what_is_proved():
    models = run_json("support", "llama", "gpt2", "xglm")["models"]
    llama, gpt2, xglm = (
        next(model for model in models if model["model_type"] == name)
        for name in ("llama", "gpt2", "xglm")
    )
    assert llama["native_group"] == "signed_permutation"
    assert {"residual", "mlp", "heads"} <= set(llama["spaces_proved"])
    assert llama["reason"] is None
    assert gpt2["native_group"] == "permutation_and_global_sign"
    assert xglm["spaces_proved"] == []
    assert "positions" in xglm["reason"]
    fails("support", "no-such-type", match="'no-such-type'")


def test_noise_is_no_evidence(tmp_path):
    """Unrelated models give a gauge that is native all the same, with margins that say so."""
    paths = [tiny.save(tiny.build("llama", seed=seed), tmp_path / str(seed)) for seed in (3, 4)]
    with pytest.raises(UnreliableGaugeError, match="no reliable gauge"):
        recover(*paths, spaces=["all"])
    gauge = recover(*paths, spaces=["all"], accept_weak=True)
    Checkpoint.open(paths[0]).chart.require_native(gauge)
    assert float(torch.median(gauge.margins["residual"])) < 0.2
