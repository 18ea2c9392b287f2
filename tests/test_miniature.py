"""A miniature: its model's class, every kind of layer, small distinct sizes, random weights."""

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from signed_align import miniature
from signed_align.errors import ChartError
from signed_align.miniature import MAX_LAYERS, miniature_config, miniature_model

FEW_TYPES = (
    "bert",
    "blt",
    "dbrx",
    "deepseek_v3",
    "deepseek_v4",
    "falcon_mamba",
    "gemma3",
    "gemma4_text",
    "gpt2",
    "jamba",
    "llama",
    "musicgen",
    "nemotron_h",
    "opt",
    "qwen3_next",
    "rwkv",
    "xlnet",
    "zamba",
)
LAYERED_TYPES = (
    "bailing_hybrid",
    "deepseek_v3",
    "ernie4_5_moe",
    "gemma3n_text",
    "gemma4_text",
    "jamba",
    "kimi_linear",
    "lfm2",
    "nemotron_h",
    "qwen3_next",
    "recurrent_gemma",
    "zamba",
)
NOT_POSSIBLE = {
    "gemma3n": "timm",  # an optional dependency of its vision tower
    "gemma4_unified_assistant": "shared_kv_states",  # drafts from another model's states
}
# The defaults of this type's own config are refused by its own class.
REFUSED_DEFAULTS = {"gemma4_assistant"}


def logits(model, seed=0):
    tokens = torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(input_ids=tokens).logits


def layer_kinds(config):
    """For each list of layers, the sets of parameter names its layers have."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers: dict[tuple[str, str], set[str]] = {}
    for name, _ in model.named_parameters():
        if found := re.fullmatch(r"(.*?)\.(\d+)\.(.*)", name):
            layers.setdefault((found[1], found[2]), set()).add(found[3])
    return {(stack, frozenset(names)) for (stack, _), names in layers.items()}


def check(model_type):
    model = miniature_model(AutoConfig.for_model(model_type))
    first = logits(model)
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert bool(torch.isfinite(first).all())
    assert torch.equal(first, logits(model)), "not deterministic"
    assert not torch.equal(first, logits(model, seed=1)), "blind to its input"
    for name, parameter in model.named_parameters():
        learnt = "Sinusoidal" not in type(model.get_submodule(name.rpartition(".")[0])).__name__
        assert not learnt or bool(parameter.count_nonzero()), f"{name} is all zeros"


@pytest.mark.parametrize("model_type", FEW_TYPES)
def test_miniatures_run_on_tokens(model_type):
    check(model_type)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*NOT_POSSIBLE, *REFUSED_DEFAULTS}),
)
def test_every_causal_type_has_a_miniature(model_type):
    check(model_type)


@pytest.mark.parametrize("model_type", NOT_POSSIBLE)
def test_what_cannot_be_built_is_said_in_one_line(model_type):
    with pytest.raises(ChartError, match=NOT_POSSIBLE[model_type]) as caught:
        miniature_model(AutoConfig.for_model(model_type))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", LAYERED_TYPES)
def test_every_kind_of_layer_is_there(model_type):
    config = AutoConfig.for_model(model_type)
    small = miniature_config(config)
    assert layer_kinds(small) == layer_kinds(config)
    assert small.num_hidden_layers <= MAX_LAYERS


def test_layers_are_renumbered_in_lists_of_indices():
    config = AutoConfig.for_model("bamba", attn_layer_indices=[9, 18, 27])
    small = miniature_config(config)
    assert (small.num_hidden_layers, small.attn_layer_indices) == (2, [1])
    config = AutoConfig.for_model("qwen4_exp_text", ple_layer_ids=[2, 10], eos_token_id=5)
    small = miniature_config(config)
    assert small.ple_layer_ids == [2], "numbered from 1"
    assert layer_kinds(small)


@pytest.mark.parametrize(("before", "after"), [(32, 4), (8, 2), (1, 1)])
def test_sharing_of_key_value_heads_is_kept(before, after):
    config = AutoConfig.for_model("llama", num_attention_heads=32, num_key_value_heads=before)
    small = miniature_config(config)
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, after)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "olmo2", "gemma3_text", "cohere"])
def test_heads_do_not_fill_the_width_where_the_class_allows(model_type):
    model = miniature_model(AutoConfig.for_model(model_type))
    shape = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].shape
    assert tuple(shape) == (64, 48)


def test_experts_are_grouped_as_they_were():
    small = miniature_config(AutoConfig.for_model("deepseek_v3", n_group=8, topk_group=4))
    assert (small.n_group, small.topk_group) == (2, 1)
    small = miniature_config(AutoConfig.for_model("deepseek_v3", n_group=1, topk_group=1))
    assert (small.n_group, small.topk_group) == (1, 1)


@pytest.mark.parametrize("tied", [True, False])
def test_ties_are_kept(tied):
    model = miniature_model(AutoConfig.for_model("llama", tie_word_embeddings=tied))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert torch.equal(embedding, head) is tied
    assert (embedding.data_ptr() == head.data_ptr()) is tied


def test_switches_are_kept():
    config = AutoConfig.for_model("llama", attention_bias=True, mlp_bias=True, hidden_act="gelu")
    model = miniature_model(config)
    assert model.config.hidden_act == "gelu"
    assert {"model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.up_proj.bias"} <= set(
        model.state_dict()
    )


@pytest.mark.parametrize(
    ("model_type", "fraction", "planes"),
    [("phi3", 1.0, 4), ("phi3", 0.75, 3), ("minicpm3", 1.0, 4)],
)
def test_factors_of_rotary_planes_are_cut(model_type, fraction, planes):
    count = {"phi3": int(48 * fraction), "minicpm3": 16}[model_type]
    rotation = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": fraction,
        "short_factor": [1.0] * count,
        "long_factor": [1.1] * count,
        "original_max_position_embeddings": 4096,
    }
    model = miniature_model(AutoConfig.for_model(model_type, rope_parameters=rotation))
    assert len(model.config.rope_parameters["short_factor"]) == planes


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "gemma4_text", "jamba", "mamba2"])
def test_a_miniature_is_its_own_miniature(model_type):
    config = AutoConfig.for_model(model_type)
    before = config.to_dict()
    small = miniature_config(config)
    assert config.to_dict() == before
    assert miniature_config(small).to_dict() == small.to_dict()


def test_the_seed_decides_the_weights_and_nothing_else():
    config = AutoConfig.for_model("qwen3_next")
    state = torch.random.get_rng_state()
    one, same, other = (miniature_model(config, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(logits(one), logits(same))
    assert not torch.equal(logits(one), logits(other))


def test_weights_have_the_dtype_asked_for():
    model = miniature_model(AutoConfig.for_model("mixtral"), dtype=torch.float64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert logits(model).dtype == torch.float64


def test_learnt_buffers_are_random_and_constant_ones_are_not():
    router = miniature_model(AutoConfig.for_model("deepseek_v3")).state_dict()
    biases = [tensor for name, tensor in router.items() if name.endswith("correction_bias")]
    assert biases
    assert all(bool(bias.all()) for bias in biases)
    decay = miniature_model(AutoConfig.for_model("minimax")).state_dict()
    masks = [tensor for name, tensor in decay.items() if name.endswith("diagonal_decay")]
    assert masks
    assert all(bool((mask.triu(1) == 0).all()) for mask in masks)


def test_too_many_parameters_are_refused(monkeypatch):
    monkeypatch.setattr(miniature, "MAX_PARAMETERS", 1000)
    with pytest.raises(ChartError, match="parameters are left"):
        miniature_model(AutoConfig.for_model("llama"))


def test_a_config_of_no_causal_type_is_refused():
    with pytest.raises(ChartError, match="no such type"):
        miniature_model(AutoConfig.for_model("clip"))
