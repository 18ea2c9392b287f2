"""LoRA adapters: source + adapter and target + ported adapter compute the same."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from signed_align import Gauge, SignedPermutation, scramble
from signed_align.errors import ArtifactError, GaugeError, SignedAlignError
from tests import tiny
from tests.porting import port

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}
VARIANTS = {
    "plain": {"target_modules": LINEAR},
    "rslora": {"target_modules": LINEAR, "use_rslora": True},
    "dora": {"target_modules": LINEAR, "use_dora": True},
    "bias all": {"target_modules": LINEAR, "bias": "all"},
    "bias lora_only": {"target_modules": ["o_proj", "q_proj"], "bias": "lora_only"},
    "lora_bias": {"target_modules": LINEAR, "lora_bias": True},
    "embedding": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    "embedding dora": {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    "modules_to_save": {
        "target_modules": ["q_proj", "down_proj"],
        "modules_to_save": ["lm_head", "embed_tokens", "norm", "input_layernorm"],
    },
    "patterns": {
        "target_modules": LINEAR,
        "rank_pattern": {"o_proj": 5, "layers.0.mlp.down_proj": 2},
        "alpha_pattern": {"q_proj": 32},
    },
    "one layer": {"target_modules": LINEAR, "layers_to_transform": [1]},
    "tokens": {"target_modules": ["o_proj"], "trainable_token_indices": [5, 9, 11]},
    "head tokens": {"target_modules": ["o_proj"], "trainable_token_indices": {"lm_head": [5, 11]}},
    "all tokens": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [5, 11]},
    },
}


def adapter_on(base, path, **settings):
    """A saved adapter with random non-zero weights everywhere, and the model with it."""
    torch.manual_seed(0)
    model = get_peft_model(tiny.load(base), LoraConfig(r=3, lora_alpha=7, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return model.eval()


def ported_logits(target, path):
    return tiny.logits(PeftModel.from_pretrained(tiny.load(target), path).eval())


def check(source, target, gauge, tmp_path, **settings):
    home = tiny.logits(adapter_on(source, tmp_path / "adapter", **settings))
    base = tiny.logits(tiny.load(source))
    assert tiny.relative_change(base, home) > 1e-2
    report = port(tmp_path / "adapter", gauge, tmp_path / "ported")
    assert report["kind"] == "PEFT LoRA adapter"
    assert report["source_verified"]
    away = ported_logits(target, tmp_path / "ported")
    assert tiny.relative_change(home, away) <= 1e-5
    config = json.loads((tmp_path / "ported" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(target)
    port(tmp_path / "ported", gauge, tmp_path / "back", inverse=True)
    original = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    assert (tmp_path / "back" / "adapter_model.safetensors").read_bytes() == original
    return home


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_moves(tmp_path, twin, variant):
    check(*twin, tmp_path, **VARIANTS[variant])


@pytest.mark.parametrize("model_type", tiny.ALL_TYPES)
@pytest.mark.parametrize("dora", [False, True], ids=["plain", "dora"])
def test_every_model_type_moves(tmp_path, model_type, dora):
    source = tiny.save(tiny.build(model_type), tmp_path / "source")
    gauge = scramble(source, tmp_path / "target", seed=3)
    settings = {"fan_in_fan_out": True} if model_type == "gpt2" else {}
    targets = TARGETS.get(model_type, LINEAR)
    check(
        source,
        tmp_path / "target",
        gauge,
        tmp_path,
        target_modules=targets,
        use_dora=dora,
        **settings,
    )


def test_tied_embedding_adapters_move(tmp_path):
    source = tiny.save(tiny.build("qwen2"), tmp_path / "source")
    gauge = scramble(source, tmp_path / "target", seed=3)
    check(source, tmp_path / "target", gauge, tmp_path, target_modules=["embed_tokens", "q_proj"])


def test_the_tempting_wrong_moves_are_wrong(tmp_path, twin):
    """Unported, permuted without signs, and moved the wrong way: each computes something else."""
    source, target, gauge = twin
    home = tiny.logits(adapter_on(source, tmp_path / "adapter", target_modules=LINEAR))
    perm = gauge.elements["residual"].perm
    permuted = Gauge(
        {"residual": SignedPermutation(perm, torch.ones_like(perm))}, {}, gauge.source, gauge.target
    )
    backwards = Gauge(gauge.inverse().elements, {}, gauge.source, gauge.target)
    port(tmp_path / "adapter", permuted, tmp_path / "permuted", verify=False)
    port(tmp_path / "adapter", backwards, tmp_path / "backwards", verify=False)
    for wrong in ("adapter", "permuted", "backwards"):
        away = ported_logits(target, tmp_path / wrong)
        assert tiny.relative_change(home, away) > 1e-2, wrong


def rewrite(path, **changes):
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA4"}, "'IA4'"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"use_bdlora": True}, "block-diagonal"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    ],
)
def test_adapters_that_cannot_move_are_refused(tmp_path, twin, changes, message):
    source, _, gauge = twin
    adapter_on(source, tmp_path / "adapter", target_modules=["q_proj"])
    rewrite(tmp_path / "adapter", **changes)
    with pytest.raises(ArtifactError, match=message):
        port(tmp_path / "adapter", gauge, tmp_path / "ported")
    assert not (tmp_path / "ported").exists()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight", (3, 48)),
        ("base_model.model.model.layers.0.mlp.router.lora_A.weight", (3, 48)),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", (3, 47)),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", (3, 48)),
    ],
)
def test_a_tensor_that_is_not_understood_is_named(tmp_path, twin, name, shape):
    source, _, gauge = twin
    adapter_on(source, tmp_path / "adapter", target_modules=["k_proj"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({**load_file(file), name: torch.zeros(shape)}, file)
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        port(tmp_path / "adapter", gauge, tmp_path / "ported")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["adapter"]


def test_an_adapter_of_another_model_is_refused(tmp_path, twin):
    source, target, gauge = twin
    adapter_on(target, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(GaugeError, match="other end of the gauge"):
        port(tmp_path / "adapter", gauge, tmp_path / "ported")
    report = port(tmp_path / "adapter", gauge, tmp_path / "ported", any_source=True)
    assert not report["source_verified"]
    rewrite(tmp_path / "adapter", base_model_name_or_path="someone/other-model")
    with pytest.raises(ArtifactError, match="--any-source"):
        port(tmp_path / "adapter", gauge, tmp_path / "again")
    rewrite(tmp_path / "adapter", base_model_name_or_path=f"someone/{source.name}")
    assert not port(tmp_path / "adapter", gauge, tmp_path / "by-name")["source_verified"]
    rewrite(tmp_path / "adapter", base_model_name_or_path=None)
    with pytest.raises(ArtifactError, match="does not say"):
        port(tmp_path / "adapter", gauge, tmp_path / "nameless", made_on=None)


def test_other_files_come_along(tmp_path, twin):
    source, _, gauge = twin
    adapter_on(source, tmp_path / "adapter", target_modules=["q_proj"])
    (tmp_path / "adapter" / "tokenizer.json").write_text("{}")
    (tmp_path / "adapter" / "backup.pt").write_bytes(b"old coordinates")
    report = port(tmp_path / "adapter", gauge, tmp_path / "ported")
    assert report["left_out"] == ["backup.pt"]
    assert (tmp_path / "ported" / "tokenizer.json").read_text() == "{}"


def test_directories_that_are_no_adapter_are_refused(tmp_path, twin):
    source, _, gauge = twin
    with pytest.raises(ArtifactError, match="signed-align apply"):
        port(source, gauge, tmp_path / "ported")
    with pytest.raises(ArtifactError, match="no artifact"):
        port(tmp_path / "nowhere", gauge, tmp_path / "ported")
    adapter_on(source, tmp_path / "adapter", target_modules=["q_proj"])
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    shutil.copy(weights, tmp_path / "whole")
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(SignedAlignError, match="truncated"):
        port(tmp_path / "adapter", gauge, tmp_path / "ported")
    weights.unlink()
    with pytest.raises(ArtifactError, match="safetensors"):
        port(tmp_path / "adapter", gauge, tmp_path / "ported")
    assert not (tmp_path / "ported").exists()
