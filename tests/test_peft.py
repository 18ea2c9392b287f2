"""Every PEFT type: what the table says moves computes the same, and what it refuses is refused."""

import warnings

import peft
import pytest
import torch
from peft import PeftModel, PeftType, get_peft_model

from signed_align import port, scramble
from signed_align.adapters.peft_methods import METHODS, REFUSALS
from signed_align.errors import ArtifactError
from tests import tiny

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LINEAR = ATTENTION + MLP
EVERYWHERE = [*LINEAR, "lm_head", "embed_tokens"]
MODELS = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "llama with biases": {},
    "gpt2": {},
    "phi3": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "decoder_sparse_step": 1,
        "head_dim": 16,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 40,
        "head_dim": 16,
    },
}
CAUSAL = {"task_type": "CAUSAL_LM"}
CPT = {
    "cpt_token_ids": [5, 6, 7, 8],
    "cpt_mask": [1] * 4,
    "cpt_tokens_type_mask": [1, 2, 3, 4],
}
ADALORA = {"init_r": 4, "target_r": 2, "total_step": 100}
# what moves under any gauge: a name, the type, its settings, and the model it is tried on
MOVING = {
    "lora": ("LORA", {"target_modules": EVERYWHERE}, "llama"),
    "lora, biases": ("LORA", {"target_modules": LINEAR, "bias": "all"}, "llama with biases"),
    "lora, fused": ("LORA", {"target_modules": "all-linear"}, "phi3"),
    "dora, fused": ("LORA", {"target_modules": "all-linear", "use_dora": True}, "phi3"),
    "lora, conv1d": ("LORA", {"target_modules": ["c_attn", "c_proj", "c_fc", "wte"]}, "gpt2"),
    "dora, conv1d": ("LORA", {"target_modules": ["c_attn", "c_fc"], "use_dora": True}, "gpt2"),
    "lora, pissa": ("LORA", {"target_modules": LINEAR, "init_lora_weights": "pissa"}, "llama"),
    "lora, mica": ("LORA", {"target_modules": LINEAR, "init_lora_weights": "mica"}, "llama"),
    "lora, experts": (
        "LORA",
        {"target_modules": ["gate", "q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
        "qwen3_moe",
    ),
    "lora, one expert parameter": (
        "LORA",
        {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
        "qwen3_moe",
    ),
    "lora, transposed experts": (
        "LORA",
        {"target_modules": ["v_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
        "gpt_oss",
    ),
    "lora, plain experts": (
        "LORA",
        {"target_modules": ["v_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
        "llama4_text",
    ),
    "lora, replicated": (
        "LORA",
        {"target_modules": LINEAR, "layer_replication": [[0, 2], [0, 1]]},
        "llama",
    ),
    "adalora": ("ADALORA", {"target_modules": LINEAR, **ADALORA}, "llama"),
    "adaption prompt": ("ADAPTION_PROMPT", {"adapter_len": 4, "adapter_layers": 2}, "square"),
    "beft": ("BEFT", {"target_modules": LINEAR}, "llama with biases"),
    "boft, one block": ("BOFT", {"target_modules": ["q_proj"], "boft_block_size": 48}, "llama"),
    "c3a, dense": ("C3A", {"target_modules": LINEAR, "block_size": 1}, "llama"),
    "cartridge": ("CARTRIDGE", {"num_virtual_tokens": 5, "num_frozen_tokens": 1}, "llama"),
    "cpt": ("CPT", CPT, "llama"),
    "deft, qr para": (
        "DEFT",
        {"target_modules": LINEAR, "decomposition_method": "qr", "para": True},
        "llama",
    ),
    "delora": ("DELORA", {"target_modules": LINEAR}, "llama"),
    "glora": ("GLORA", {"target_modules": LINEAR}, "llama"),
    "glora, vectors": (
        "GLORA",
        {"target_modules": LINEAR, "config_D_E": "vector", "config_C": "vector"},
        "llama with biases",
    ),
    "gralora, one subspace": (
        "GRALORA",
        {"target_modules": LINEAR, "gralora_k": 1, "hybrid_r": 2},
        "llama",
    ),
    "hira": ("HIRA", {"target_modules": EVERYWHERE}, "llama"),
    "hra": ("HRA", {"target_modules": LINEAR}, "llama"),
    "hra, orthonormal": ("HRA", {"target_modules": LINEAR, "apply_GS": True}, "llama"),
    "ia3": ("IA3", {"target_modules": LINEAR, "feedforward_modules": MLP}, "llama"),
    "ia3, conv1d": (
        "IA3",
        {"target_modules": ["c_attn", "c_fc"], "feedforward_modules": ["c_fc"]},
        "gpt2",
    ),
    "lily": ("LILY", {"target_modules": LINEAR, "stride_A": 2, "num_B": 2}, "llama"),
    "ln tuning": (
        "LN_TUNING",
        {"target_modules": ["norm", "input_layernorm", "v_proj", "embed_tokens"]},
        "llama",
    ),
    "ln tuning, layer norm": ("LN_TUNING", {"target_modules": ["ln_1", "ln_2", "c_fc"]}, "gpt2"),
    "loha": ("LOHA", {"target_modules": LINEAR}, "llama"),
    "lokr, one factor": (
        "LOKR",
        {"target_modules": LINEAR, "decompose_factor": 1, "r": 4},
        "llama",
    ),
    "multitask prompt": (
        "MULTITASK_PROMPT_TUNING",
        {"num_virtual_tokens": 5, "num_tasks": 3, "num_ranks": 2},
        "llama",
    ),
    "osf": ("OSF", {"target_modules": LINEAR, "effective_rank": 8}, "llama"),
    "peanut, odd": ("PEANUT", {"target_modules": LINEAR, "r": 4, "act_fn": "tanh"}, "llama"),
    "poly": ("POLY", {"target_modules": LINEAR, "r": 4, "n_tasks": 2, "n_skills": 3}, "llama"),
    "prefix": ("PREFIX_TUNING", {"num_virtual_tokens": 5}, "llama"),
    "prefix, projected": (
        "PREFIX_TUNING",
        {"num_virtual_tokens": 5, "prefix_projection": True, "encoder_hidden_size": 16},
        "llama",
    ),
    "prefix, gpt2": ("PREFIX_TUNING", {"num_virtual_tokens": 5}, "gpt2"),
    "prompt": ("PROMPT_TUNING", {"num_virtual_tokens": 5}, "llama"),
    "p-tuning": ("P_TUNING", {"num_virtual_tokens": 5, "encoder_hidden_size": 16}, "llama"),
    "randlora, one module": (
        "RANDLORA",
        {"target_modules": ["down_proj"], "r": 4, "layers_to_transform": [1]},
        "llama",
    ),
    "shadow": ("SHADOW", {"r": 4}, "llama"),
    "shira": ("SHIRA", {"target_modules": LINEAR, "r": 2}, "llama"),
    "supertuning": (
        "SUPERTUNING",
        {"target_modules": LINEAR, "r": 2, "save_precomputed_indices": True},
        "llama",
    ),
    "tinylora": (
        "TINYLORA",
        {"target_modules": [*LINEAR, "embed_tokens"], "r": 2, "u": 5},
        "llama",
    ),
    "trainable tokens": (
        "TRAINABLE_TOKENS",
        {"target_modules": ["embed_tokens"], "token_indices": [3, 5, 7]},
        "llama",
    ),
    "unilora": (
        "UNILORA",
        {"target_modules": LINEAR, "r": 4, "theta_d_length": 16, "save_indices": True},
        "llama",
    ),
    "vera, one module": (
        "VERA",
        {"target_modules": r".*\.1\.mlp\.down_proj", "r": 4},
        "llama",
    ),
    "pvera, one module": (
        "PVERA",
        {"target_modules": r".*\.1\.mlp\.down_proj", "r": 4},
        "llama",
    ),
}
# what moves if the gauge moves the residual stream alone
RESIDUAL_ONLY = {
    "boft": ("BOFT", {"target_modules": ["o_proj"], "boft_block_size": 4}),
    "miss": ("MISS", {"target_modules": ["o_proj", "down_proj"], "r": 4}),
    "oft": ("OFT", {"target_modules": ["o_proj", "down_proj"], "oft_block_size": 8}),
    "peanut": ("PEANUT", {"target_modules": ["o_proj", "down_proj"], "r": 4}),
    "deft": ("DEFT", {"target_modules": ["q_proj", "up_proj"], "r": 4}),
    "deft, qr": (
        "DEFT",
        {"target_modules": ["q_proj"], "r": 4, "decomposition_method": "qr"},
    ),
    "road": ("ROAD", {"target_modules": ["q_proj", "gate_proj"], "group_size": 8}),
    "vera, readers": ("VERA", {"target_modules": ["q_proj", "v_proj", "up_proj"], "r": 4}),
    "vera, writers": ("VERA", {"target_modules": ["down_proj"], "r": 4}),
    "randlora": ("RANDLORA", {"target_modules": ["up_proj", "down_proj"], "r": 4}),
}
REFUSED = {
    "adamss": (
        "ADAMSS",
        {"target_modules": ["q_proj"], "r": 6, "num_subspaces": 3, "subspace_rank": 2},
        "k-means",
    ),
    "boft": ("BOFT", {"target_modules": ["q_proj"], "boft_block_size": 4}, "blocks"),
    "c3a": ("C3A", {"target_modules": ["q_proj"], "block_size": 8}, "circulant"),
    "deft": ("DEFT", {"target_modules": ["q_proj"], "r": 4}, "relu"),
    "fourierft": ("FOURIERFT", {"target_modules": ["q_proj"], "n_frequency": 20}, "Fourier"),
    "frod": ("FROD", {"target_modules": ["q_proj"], "progressbar": False}, "bases"),
    "gralora": ("GRALORA", {"target_modules": ["q_proj"], "r": 4, "gralora_k": 2}, "neighbouring"),
    "lokr": ("LOKR", {"target_modules": ["q_proj"], "r": 4}, "Kronecker"),
    "miss": ("MISS", {"target_modules": ["q_proj"], "r": 4}, "r-th input"),
    "oft": ("OFT", {"target_modules": ["q_proj"], "oft_block_size": 8}, "blocks"),
    "peanut": ("PEANUT", {"target_modules": ["q_proj"], "r": 4}, "not odd"),
    "poly": ("POLY", {"target_modules": ["q_proj"], "r": 4, "n_splits": 2}, "blocks"),
    "psoft": (
        "PSOFT",
        {"target_modules": ["q_proj"], "r": 4, "psoft_alpha": 4},
        "singular vectors",
    ),
    "pvera": (
        "PVERA",
        {"target_modules": ["q_proj"], "r": 4, "save_projection": False},
        "not saved",
    ),
    "road": ("ROAD", {"target_modules": ["q_proj"], "group_size": 8}, "rotates"),
    "supertuning": (
        "SUPERTUNING",
        {"target_modules": ["q_proj"], "save_precomputed_indices": False},
        "ties",
    ),
    "trainable rows": (
        "TRAINABLE_TOKENS",
        {"target_modules": ["q_proj"], "token_indices": [1]},
        "change places",
    ),
    "unilora": (
        "UNILORA",
        {"target_modules": ["q_proj"], "r": 4, "theta_d_length": 16},
        "not saved",
    ),
    "vblora": (
        "VBLORA",
        {"target_modules": ["q_proj"], "num_vectors": 10, "vector_length": 8},
        "bank",
    ),
    "vera": ("VERA", {"target_modules": ["q_proj", "v_proj"], "r": 4}, "shared"),
    "randlora": ("RANDLORA", {"target_modules": ["q_proj", "o_proj"], "r": 4}, "shared"),
    "waveft": ("WAVEFT", {"target_modules": ["q_proj"], "n_frequency": 50}, "wavelet"),
    "olora": ("LORA", {"target_modules": ["q_proj"], "init_lora_weights": "olora"}, "OLoRA"),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """By model: the source, a twin changed in all spaces, and one changed in the stream alone."""
    made = {}

    def pair(name, spaces=("all",)):
        if (name, spaces) not in made:
            root = tmp_path_factory.mktemp("pair")
            settings = {**MODELS.get(name, {}), **({"head_dim": 12} if name == "square" else {})}
            model_type = {"llama with biases": "llama", "square": "llama"}.get(name, name)
            source = tiny.save(tiny.build(model_type, **settings), root / "source")
            gauge = scramble(source, root / "target", seed=3, spaces=spaces)
            made[name, spaces] = source, root / "target", gauge
        return made[name, spaces]

    return pair


def make(peft_type, settings, source, path):
    """A saved adapter with random weights everywhere, and the model with it."""
    config_class = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(peft_type)]
    fields = config_class.__dataclass_fields__
    config = (
        config_class(**settings, **CAUSAL) if "task_type" in fields else config_class(**settings)
    )
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(tiny.load(source), config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(
                        (1.0 if "unilora" in name else 0.1) * torch.randn_like(parameter)
                    )
        model.save_pretrained(path)
    return model


def logits(model, peft_type):
    extra = (
        {"task_ids": torch.tensor([0, 1])}
        if peft_type in ("POLY", "MULTITASK_PROMPT_TUNING")
        else {}
    )
    with torch.no_grad():
        return model(input_ids=tiny.tokens(), **extra).logits


def on(base, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(tiny.load(base), path).eval()


def check(pair, peft_type, settings, tmp_path, tolerance=1e-5):
    source, target, gauge = pair
    make(peft_type, settings, source, tmp_path / "adapter")
    home = logits(on(source, tmp_path / "adapter"), peft_type)
    base = tiny.logits(tiny.load(source))
    assert home.shape != base.shape or tiny.relative_change(base, home) > 1e-3
    port(tmp_path / "adapter", gauge, tmp_path / "ported")
    away = logits(on(target, tmp_path / "ported"), peft_type)
    assert tiny.relative_change(home, away) <= tolerance
    port(tmp_path / "ported", gauge, tmp_path / "back", inverse=True)
    weights = "adapter_model.safetensors"
    assert (tmp_path / "back" / weights).read_bytes() == (
        tmp_path / "adapter" / weights
    ).read_bytes()
    return home


@pytest.mark.parametrize("name", MOVING)
def test_what_moves_computes_the_same(pairs, tmp_path, name):
    peft_type, settings, model = MOVING[name]
    pair = pairs(model)
    # peft decomposes the base in float32 whenever it loads these, which rounds
    rounded = settings.get("init_lora_weights") == "pissa" or peft_type == "OSF"
    home = check(pair, peft_type, settings, tmp_path, 5e-5 if rounded else 1e-5)
    unmoved = logits(on(pair[1], tmp_path / "adapter"), peft_type)
    assert tiny.relative_change(home, unmoved) > 1e-3


@pytest.mark.parametrize("name", RESIDUAL_ONLY)
def test_what_a_gauge_of_the_stream_leaves_alone_moves(pairs, tmp_path, name):
    peft_type, settings = RESIDUAL_ONLY[name]
    check(pairs("llama", ("residual",)), peft_type, settings, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_move_is_refused_with_the_reason(pairs, tmp_path, name):
    peft_type, settings, reason = REFUSED[name]
    source, _, gauge = pairs("llama")
    make(peft_type, settings, source, tmp_path / "adapter")
    with pytest.raises(ArtifactError, match=reason):
        port(tmp_path / "adapter", gauge, tmp_path / "ported")
    assert not (tmp_path / "ported").exists()


def test_no_type_is_unknown():
    known = {kind.value for kind in PeftType}
    assert set(METHODS) | set(REFUSALS) == known
    assert not set(METHODS) & set(REFUSALS)
    tried = {case[0] for case in [*MOVING.values(), *RESIDUAL_ONLY.values()]}
    assert set(METHODS) - tried == {"XLORA"}
    assert len({case[0] for case in MOVING.values()}) >= 20
    assert set(REFUSALS) <= {case[0] for case in REFUSED.values()}
