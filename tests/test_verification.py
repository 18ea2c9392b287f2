"""What a verification sees, and what it must not take for an error."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from signed_align import Checkpoint, SignedPermutation, apply, merge, port, recover, scramble
from signed_align.errors import VerificationError
from signed_align.fit import check_gauge, rows_agreement
from signed_align.verification import verify_gauge
from tests import tiny
from tests.test_lora import adapter_on
from tests.test_recovery import add_tokenizer
from tests.test_sae import build as build_sae

HOOK = "blocks.1.hook_resid_post"


def changed(source, out, change):
    """A copy of a checkpoint whose weights were changed."""
    model = tiny.load(source)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            change(name, parameter)
    return add_tokenizer(tiny.save(model, out))


def noisy(name, parameter):
    parameter.add_(0.01 * parameter.std() * torch.randn_like(parameter))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, its twin in residual stream and MLPs, a fine-tune of the twin, the true gauge."""
    root = tmp_path_factory.mktemp("verification")
    source = add_tokenizer(tiny.save(tiny.build("qwen3", attention_bias=False), root / "model"))
    gauge = scramble(source, root / "twin", seed=1, spaces=["residual", "mlp"])
    tuned = changed(root / "twin", root / "tuned", noisy)
    to_tuned = replace(gauge, target=replace(Checkpoint.open(tuned).identity, name=str(tuned)))
    return root, gauge, to_tuned


def wrong_in(gauge, space, count):
    """The gauge with some coordinates of a space in a cycle."""
    element = gauge.element(space)
    perm = element.perm.clone()
    perm[:count] = perm[:count].roll(1)
    return replace(gauge, elements={**gauge.elements, space: SignedPermutation(perm, element.sign)})


@pytest.mark.parametrize("count", [2, 10, 40])
def test_some_wrong_coordinates_to_a_fine_tune(world, count):
    _, _, gauge = world
    assert check_gauge(gauge)["against"] == 0
    with pytest.raises(VerificationError, match="does not fit"):
        check_gauge(wrong_in(gauge, "residual", count))


@pytest.mark.parametrize("which", ["gauge", "to_tuned"])
def test_a_wrong_mlp(world, which, tmp_path):
    root, *gauges = world
    gauge = gauges[which == "to_tuned"]
    target = Checkpoint.open(gauge.target.name)
    source = Checkpoint.open(root / "model")
    assert verify_gauge(gauge, source, target)["weights"]["mlp"] > 0.99
    space = next(space for space in gauge.elements if space.startswith("mlp"))
    size = gauge.element(space).size
    wrong = wrong_in(gauge, space, size)
    for one in gauge.elements:
        wrong = wrong_in(wrong, one, size) if one.startswith("mlp") else wrong
    with pytest.raises(VerificationError, match="mlp"):
        verify_gauge(wrong, source, target)
    if which == "gauge":  # where weights should be equal a few units are seen too
        with pytest.raises(VerificationError, match="mlp"):
            verify_gauge(wrong_in(gauge, space, 2), source, target)


def test_a_gauge_of_mlps_alone(tmp_path, world):
    root, _, _ = world
    gauge = scramble(root / "model", tmp_path / "twin", seed=2, spaces=["mlp"])
    source, target = Checkpoint.open(root / "model"), Checkpoint.open(tmp_path / "twin")
    assert verify_gauge(gauge, source, target)["weights"]["mlp"] == pytest.approx(1)
    space = next(iter(gauge.elements))
    with pytest.raises(VerificationError, match="mlp"):
        verify_gauge(wrong_in(gauge, space, 5), source, target)


def test_a_reordered_vocabulary(tmp_path, world):
    """The same tokens at other rows: both models read the same text."""
    root, gauge, _ = world
    twin = tmp_path / "reordered"
    apply(gauge, root / "model", twin)
    file = twin / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    rows = list(vocabulary.values())
    turned = rows[1:] + rows[:1]
    content["model"]["vocab"] = dict(zip(vocabulary, turned, strict=True))
    for token in content.get("added_tokens", []):
        token["id"] = content["model"]["vocab"].get(token["content"], token["id"])
    file.write_text(json.dumps(content))
    weights = load_file(twin / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            moved = weights[name].clone()
            moved[turned] = weights[name][rows]
            weights[name] = moved
    save_file(weights, twin / "model.safetensors", {"format": "pt"})
    found = recover(root / "model", twin, spaces=["residual", "mlp"])
    measured = verify_gauge(
        found, Checkpoint.open(root / "model"), Checkpoint.open(twin), ["some words of text"] * 4
    )
    assert measured["claim"] == "equal"
    assert measured["disagree"] == 0


def test_a_fine_tune_of_some_coordinates_is_no_twin(tmp_path, world):
    """Half of the embedding as it was, the rest trained: the gauge is right."""
    root, gauge, _ = world

    def partly(name, parameter):
        if parameter.ndim == 2 and parameter.shape[1] == tiny.WIDTH:
            noise = 0.1 * parameter.std() * torch.randn_like(parameter)
            parameter[:, :15] += noise[:, :15]

    target = changed(root / "twin", tmp_path / "tuned", partly)
    gauge = replace(gauge, target=replace(Checkpoint.open(target).identity, name=str(target)))
    found = check_gauge(gauge)
    assert found["claim"] == "equal"
    assert found["disagree"] > 0
    assert found["against"] == 0


def test_rows_agreement_is_a_correlation(world):
    root, gauge, to_tuned = world
    source, tuned = (Checkpoint.open(root / name) for name in ("model", "tuned"))
    found = rows_agreement(to_tuned, source, tuned)
    x = source.tensor("model.embed_tokens.weight").double()
    y = tuned.tensor("model.embed_tokens.weight").double()
    moved = gauge.element("residual").apply(x, 1)
    by_hand = torch.corrcoef(torch.stack([moved[:, 3], y[:, 3]]))[0, 1]
    assert 0.99 < float(by_hand) < 1
    assert found["correlation"] == pytest.approx(float(by_hand), abs=0.01)


@pytest.mark.parametrize("scale", [0.0, 1e-7, 1.0])
def test_effects_of_every_size(world, tmp_path, scale):
    root, gauge, _ = world
    save_file({HOOK: scale * torch.randn(tiny.WIDTH)}, tmp_path / "v.safetensors")
    report = port(
        tmp_path / "v.safetensors", gauge, tmp_path / "out.safetensors",
        made_on=str(root / "model"), verify=True,
    )  # fmt: skip
    (effect,) = report["verification"]["effects"]
    expected = pytest.approx(1, abs=1e-3) if scale == 1.0 else None
    assert effect["arrives"] == expected


def test_an_effect_that_is_not_finite_is_not_taken_for_one(world, tmp_path):
    root, gauge, _ = world
    build_sae("topk", tmp_path / "sae")
    config = json.loads((tmp_path / "sae" / "cfg.json").read_text())
    config.get("metadata", config)["model_name"] = str(root / "model")
    (tmp_path / "sae" / "cfg.json").write_text(json.dumps(config))
    file = tmp_path / "sae" / "sae_weights.safetensors"
    weights = load_file(file)
    weights["W_dec"][:] = torch.nan
    save_file(weights, file)
    report = port(tmp_path / "sae", gauge, tmp_path / "out", verify=True, accept_weak=True)
    assert "skipped" in report["verification"]["effects"][0]


def test_a_merge_with_a_wrong_gauge_to_a_fine_tune(world, tmp_path):
    root, _, gauge = world
    wrong = replace(
        gauge, elements={**gauge.elements, "residual": gauge.element("residual").unsigned}
    )
    wrong.save(tmp_path / "wrong.safetensors")
    own = {"weight": 1, "gauge": str(tmp_path / "wrong.safetensors")}
    recipe = {
        "merge_method": "signed_align",
        "dtype": "float32",
        "models": [
            {"model": str(root / "model"), "parameters": {"weight": 1}},
            {"model": str(root / "tuned"), "parameters": own},
        ],
    }
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe))
    with pytest.raises(VerificationError, match="does not fit"):
        merge(tmp_path / "recipe.yml", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_artifact_in_spaces_that_the_gauge_lacks(world, tmp_path):
    """A twin in residual stream and MLPs, through a gauge of the residual stream alone."""
    root, gauge, to_tuned = world
    adapter_on(root / "model", tmp_path / "mlp", target_modules=["down_proj"])
    adapter_on(root / "model", tmp_path / "attention", target_modules=["q_proj"])
    for one in (gauge, to_tuned):
        alone = one.restricted(["residual"])
        with pytest.raises(VerificationError, match=r"lives in mlp too.*--spaces all"):
            port(tmp_path / "mlp", alone, tmp_path / "out")
        port(tmp_path / "attention", alone, tmp_path / "out", force=True)
        port(tmp_path / "mlp", one, tmp_path / "out", force=True)


def test_both_axes_of_a_square_matrix_are_weak(world):
    """Marks of two axes of one space do not cancel."""
    from signed_align import Axis
    from signed_align.adapters.confidence import _marks, _weak_share

    gauge = replace(world[1], margins={"residual": torch.zeros(tiny.WIDTH)})
    square, axis = torch.randn(tiny.WIDTH, tiny.WIDTH), Axis("residual")
    assert _weak_share(square, (axis, axis), _marks(gauge, 0.05)) == 1
    assert _weak_share(square, (axis, None), _marks(gauge, 0.05)) == 1
