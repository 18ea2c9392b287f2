"""Each kind of artifact through each kind of wrong gauge: refused, or it fails verification."""

import json
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from signed_align import Checkpoint, Gauge, SignedPermutation, apply, port, scramble
from signed_align.errors import SignedAlignError, SignedAlignWarning, VerificationError
from tests import tiny
from tests.test_lora import adapter_on
from tests.test_recovery import add_tokenizer
from tests.test_sae import build as build_sae

HOOK = "blocks.1.hook_resid_post"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, a twin, another model of its shape with a twin, a wider one, and the true gauges."""
    root = tmp_path_factory.mktemp("world")
    changes = {"model": {}, "other": {"seed": 9}, "wide": {"hidden_size": 64}}
    gauges = {}
    for seed, (name, change) in enumerate(changes.items()):
        add_tokenizer(tiny.save(tiny.build("qwen3", attention_bias=False, **change), root / name))
        gauges[name] = scramble(root / name, root / f"{name}-twin", seed=seed)
    return root, gauges


def _adapter(root, out):
    adapter_on(root / "model", out, target_modules=["q_proj", "o_proj", "up_proj"])


def _sae(root, out):
    build_sae("topk", out)
    config = json.loads((out / "cfg.json").read_text())
    metadata = config.get("metadata", config)
    metadata["model_name"] = str(root / "model")
    (out / "cfg.json").write_text(json.dumps(config))


def _vector(root, out):
    save_file({HOOK: torch.randn(tiny.WIDTH)}, out)


def _list(root, out):
    out.write_text(json.dumps({"hook": HOOK, "indices": [3, 5, 8]}))


def _named_list(root, out):
    out.write_text(json.dumps({"model": str(root / "model"), "hook": HOOK, "indices": [3, 5, 8]}))


def _optimizer(root, out):
    model = tiny.load(root / "model").train()
    optimizer = torch.optim.AdamW(model.parameters())
    model(tiny.tokens(), labels=tiny.tokens()).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), out)


def _training(root, out):
    shutil.copytree(root / "model", out)
    _optimizer(root, out / "optimizer.pt")
    (out / "trainer_state.json").write_text('{"global_step": 1}')


def _probe(root, out):
    save_file({HOOK: torch.randn(1, tiny.WIDTH)}, out)


def _checkpoint(root, out):
    shutil.copytree(root / "model", out)


ARTIFACTS = {
    "adapter": _adapter,
    "sae": _sae,
    "vector.safetensors": _vector,
    "list.json": _list,
    "named.json": _named_list,
    "optimizer.pt": _optimizer,
    "training": _training,
    "probe.safetensors": _probe,
    "checkpoint": _checkpoint,
}


def _with(element, change):
    return SignedPermutation(*change(element.perm.clone(), element.sign.clone()))


def _one_sign(perm, sign):
    sign[7] *= -1
    return perm, sign


def _two_swapped(perm, sign):
    perm[[3, 4]] = perm[[4, 3]]
    return perm, sign


def _changed(gauge, change):
    return replace(gauge, elements={"residual": _with(gauge.element("residual"), change)})


WRONG = {
    "inverted": lambda gauges: gauges["model"].inverse(),
    "of another model": lambda gauges: gauges["other"],
    "of another width": lambda gauges: gauges["wide"],
    "permutation only": lambda gauges: gauges["model"].without_signs(),
    "inverted element": lambda gauges: replace(
        gauges["model"], elements=gauges["model"].inverse().elements
    ),
    "element of another model": lambda gauges: replace(
        gauges["model"], elements=gauges["other"].elements
    ),
    "element of another width": lambda gauges: replace(
        gauges["model"], elements=gauges["wide"].elements
    ),
    "one wrong sign": lambda gauges: _changed(gauges["model"], _one_sign),
    "two coordinates swapped": lambda gauges: _changed(gauges["model"], _two_swapped),
}


def _move(path, gauge, root, out):
    """Move what lies at ``path`` as a user does who says truly which model it was made on."""
    if path.name == "checkpoint":
        return apply(gauge, path, out, verify=True)
    return port(path, gauge, out, made_on=str(root / "model"))


@pytest.mark.parametrize("name", ARTIFACTS)
def test_the_right_gauge_is_accepted(world, tmp_path, name):
    root, gauges = world
    ARTIFACTS[name](root, tmp_path / name)
    report = _move(tmp_path / name, gauges["model"], root, tmp_path / "out")
    assert report["verification"]["claim"] == "equal"


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ARTIFACTS)
def test_a_wrong_gauge_is_refused(world, tmp_path, name, wrong):
    root, gauges = world
    ARTIFACTS[name](root, tmp_path / name)
    if name == "checkpoint" and wrong in IN_THE_GROUP:
        pytest.skip("any element of the group makes a twin of a checkpoint, only another one")
    with pytest.raises(SignedAlignError):
        _move(tmp_path / name, WRONG[wrong](gauges), root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


IN_THE_GROUP = {
    "permutation only",
    "inverted element",
    "element of another model",
    "one wrong sign",
    "two coordinates swapped",
}


@pytest.mark.parametrize("end", ["model", "model-twin"])
@pytest.mark.parametrize("name", [name for name in ARTIFACTS if name != "checkpoint"])
def test_a_stale_gauge_is_refused(world, tmp_path, name, end):
    """A model that was trained on, in place, after the gauge was made."""
    root, gauges = world
    for model in ("model", "model-twin"):
        shutil.copytree(root / model, tmp_path / model)
    ARTIFACTS[name](tmp_path, tmp_path / name)
    gauge = gauges["model"]
    gauge = replace(
        gauge,
        source=replace(gauge.source, name=str(tmp_path / "model")),
        target=replace(gauge.target, name=str(tmp_path / "model-twin")),
    )
    weights = load_file(tmp_path / end / "model.safetensors")
    moved = {key: tensor + 0.01 for key, tensor in weights.items()}
    save_file(moved, tmp_path / end / "model.safetensors", {"format": "pt"})
    with pytest.raises(SignedAlignError, match=r"made for another checkpoint|changed since"):
        port(tmp_path / name, gauge, tmp_path / "out", made_on=str(tmp_path / "model"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["vector.safetensors", "list.json", "optimizer.pt"])
def test_what_does_not_say_its_model_is_refused(world, tmp_path, name):
    root, gauges = world
    ARTIFACTS[name](root, tmp_path / name)
    with pytest.raises(SignedAlignError, match="--made-on"):
        port(tmp_path / name, gauges["model"], tmp_path / "out")
    with pytest.raises(SignedAlignError, match="not"):
        port(tmp_path / name, gauges["model"], tmp_path / "out", made_on=str(root / "other"))


def test_where_the_models_are_gone_fingerprints_and_the_record_still_tell(world, tmp_path):
    root, gauges = world
    gauge = gauges["model"]
    away = {end: replace(getattr(gauge, end), name=f"nobody/{end}") for end in ("source", "target")}
    gone = replace(gauge, **away)
    _vector(root, tmp_path / "vector.safetensors")
    there = tmp_path / "there.safetensors"
    report = port(tmp_path / "vector.safetensors", gone, there, made_on="nobody/source")
    assert "not at hand" in report["verification"]["skipped"]
    with pytest.raises(SignedAlignError, match="was moved to the coordinates of nobody/target"):
        port(there, gone, tmp_path / "twice.safetensors", made_on="nobody/source")
    port(there, gone, tmp_path / "back.safetensors", inverse=True)
    before, after = (tmp_path / name for name in ("vector.safetensors", "back.safetensors"))
    assert before.read_bytes() == after.read_bytes()


def test_verification_by_running_notices_what_weights_do_not(world, tmp_path):
    """A gauge that is right in the residual stream and wrong in an MLP."""
    root, _ = world
    gauge = scramble(root / "model", tmp_path / "twin", seed=2, spaces=["residual", "mlp"])
    space = next(space for space in gauge.elements if space.startswith("mlp"))
    wrong = replace(gauge, elements={**gauge.elements, space: gauge.element(space).inverse()})
    adapter_on(root / "model", tmp_path / "adapter", target_modules=["down_proj", "up_proj"])
    right = port(tmp_path / "adapter", gauge, tmp_path / "right", verify=True)
    assert right["verification"]["claim"] == "equal"
    assert right["verification"]["effects"][0]["arrives"] == pytest.approx(1, abs=1e-3)
    with pytest.raises(VerificationError, match="mlp"):
        port(tmp_path / "adapter", wrong, tmp_path / "wrong", verify=True)
    assert not (tmp_path / "wrong").exists()


def test_a_gauge_file_between_other_models_is_refused_by_merges(world, tmp_path):
    from signed_align import merge

    root, gauges = world
    gauges["other"].save(tmp_path / "g.safetensors")
    (tmp_path / "recipe.yml").write_text(
        json.dumps(
            {
                "merge_method": "signed_align",
                "dtype": "float32",
                "models": [
                    {"model": str(root / "model"), "parameters": {"weight": 1}},
                    {
                        "model": str(root / "model-twin"),
                        "parameters": {"weight": 1, "gauge": str(tmp_path / "g.safetensors")},
                    },
                ],
            }
        )
    )
    with pytest.raises(SignedAlignError, match="the gauge file leads from"):
        merge(tmp_path / "recipe.yml", tmp_path / "out")


def test_a_merge_of_twins_through_a_wrong_gauge_fails_verification(world, tmp_path):
    from signed_align import merge

    root, gauges = world
    for name, gauge in (
        ("right", gauges["model"]),
        ("wrong", gauges["model"].without_signs()),
    ):
        gauge.save(tmp_path / f"{name}.safetensors")
        recipe = {
            "merge_method": "signed_align",
            "dtype": "float32",
            "models": [
                {"model": str(root / "model"), "parameters": {"weight": 1}},
                {
                    "model": str(root / "model-twin"),
                    "parameters": {"weight": 1, "gauge": str(tmp_path / f"{name}.safetensors")},
                },
            ],
        }
        (tmp_path / f"{name}.yml").write_text(json.dumps(recipe))
    right = merge(tmp_path / "right.yml", tmp_path / "right", verify=True)
    assert right["verification"]["claim"] == "equal"
    with pytest.raises(VerificationError, match="does not fit"):
        merge(tmp_path / "wrong.yml", tmp_path / "wrong", verify=True)
    assert not (tmp_path / "wrong").exists()


def test_gauges_are_loaded_with_the_ends_that_were_saved(world, tmp_path):
    _, gauges = world
    gauges["model"].save(tmp_path / "g.safetensors")
    loaded = Gauge.load(tmp_path / "g.safetensors")
    assert loaded.content_hash == gauges["model"].content_hash
    assert loaded.source.config_hash == gauges["model"].source.config_hash != ""
    assert set(loaded.provenance["versions"]) >= {"signed-align", "torch", "transformers"}


@pytest.mark.parametrize("name", ["adapter", "sae"])
def test_what_meets_a_model_in_other_coordinates_is_warned_of(world, tmp_path, name):
    """The silent failure: it loads, it runs, and what comes out is plausible and wrong."""
    from signed_align.adapters import recognise
    from signed_align.adapters.origin import warn_if_foreign

    root, gauges = world
    ARTIFACTS[name](root, tmp_path / name)

    def meet(artifact, model):
        says = recognise(artifact).inspect(artifact)
        warn_if_foreign(artifact, says, Checkpoint.open(model))

    tuned = tiny.load(root / "model")
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(1.01)
    add_tokenizer(tiny.save(tuned, tmp_path / "tuned"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SignedAlignWarning)
        meet(tmp_path / name, root / "model")
        meet(tmp_path / name, tmp_path / "tuned")
    for wrong in ("model-twin", "other", "wide"):
        with pytest.warns(SignedAlignWarning, match="plausible and wrong"):
            meet(tmp_path / name, root / wrong)
    port(tmp_path / name, gauges["model"], tmp_path / "ported")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SignedAlignWarning)
        meet(tmp_path / "ported", root / "model-twin")
    with pytest.warns(SignedAlignWarning, match="lives in the coordinates of .*model-twin"):
        meet(tmp_path / "ported", root / "model")
