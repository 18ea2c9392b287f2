"""Every PEFT type: what the table says moves computes the same, and what it refuses is refused."""

import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel, PeftType, get_peft_model
from safetensors.torch import load_file, save_file

from signed_align import scramble
from signed_align.adapters.peft_methods import METHODS, REFUSALS
from signed_align.adapters.peft_table import markdown, table
from signed_align.errors import ArtifactError, SignedAlignError
from tests import tiny
from tests.porting import port

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
DOCS = Path(__file__).parents[1] / "docs" / "peft.md"
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
    "lora, replicated, with biases": (
        "LORA",
        {
            "target_modules": LINEAR,
            "layer_replication": [[1, 2], [0, 2]],
            "bias": "all",
            "modules_to_save": ["input_layernorm"],
        },
        "llama with biases",
    ),
    "lora, one parameter stored transposed": (
        "LORA",
        {"target_modules": [], "target_parameters": ["attn.c_proj.weight", "c_fc.weight"]},
        "gpt2",
    ),
    "lora, activated": (
        "LORA",
        {"target_modules": ATTENTION, "alora_invocation_tokens": [int(tiny.tokens()[0, 3])]},
        "llama",
    ),
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
    "lora, rows": (
        "LORA",
        {"target_modules": ["v_proj"], "trainable_token_indices": {"q_proj": [1, 2]}},
        "change places",
    ),
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


FUSED = ["qkv_proj", "gate_up_proj", "o_proj", "down_proj", "lm_head"]
CONV1D = ["c_attn", "c_proj", "c_fc"]
TAKES_CONV1D = ["adalora", "deft, qr para", "gralora, one subspace", "hira", "unilora"]


def on_linear_layers(names):
    """The cases on all linear layers, whose targets can be exchanged for those of another model."""
    return [name for name in names if MOVING[name][1].get("target_modules") == LINEAR]


@pytest.mark.parametrize("name", on_linear_layers(MOVING))
def test_what_moves_moves_on_fused_layers_and_on_the_head(pairs, tmp_path, name):
    peft_type, settings, model = MOVING[name]
    if model != "llama" or peft_type == "SHADOW":
        pytest.skip("for models with biases")
    settings = {**settings, "target_modules": FUSED}
    if peft_type == "IA3":
        settings["feedforward_modules"] = ["down_proj"]
    settings.pop("layer_replication", None)
    rounded = settings.get("init_lora_weights") == "pissa" or peft_type == "OSF"
    check(pairs("phi3"), peft_type, settings, tmp_path, 5e-5 if rounded else 1e-5)


@pytest.mark.parametrize("name", TAKES_CONV1D)
def test_what_moves_moves_on_layers_that_are_stored_transposed(pairs, tmp_path, name):
    peft_type, settings, _ = MOVING[name]
    check(pairs("gpt2"), peft_type, {**settings, "target_modules": CONV1D}, tmp_path)


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


def test_an_xlora_mixture_moves_with_its_experts(pairs, tmp_path):
    source, target, gauge = pairs("llama")
    for name in ("0", "1"):
        make(
            "LORA",
            {"target_modules": LINEAR, "r": int(name) + 2},
            source,
            tmp_path / "experts" / name,
        )
    from peft import XLoraConfig

    def mixture(base, root):
        model = tiny.load(base)
        model.config.use_cache = False
        config = XLoraConfig(
            task_type="CAUSAL_LM",
            hidden_size=tiny.WIDTH,
            xlora_depth=1,
            adapters={name: str(root / name) for name in ("0", "1")},
        )
        return get_peft_model(model, config).eval()

    torch.manual_seed(0)
    home = mixture(source, tmp_path / "experts")
    with torch.no_grad():
        classifier = home.base_model.internal_xlora_classifier.layers[0]
        classifier.weight.normal_()
        classifier.bias.normal_()
    key = "base_model.internal_xlora_classifier.layers.0"
    (tmp_path / "experts" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "XLORA", "base_model_name_or_path": str(source)})
    )
    save_file(
        {f"{key}.weight": classifier.weight.data, f"{key}.bias": classifier.bias.data},
        tmp_path / "experts" / "adapter_model.safetensors",
    )
    report = port(tmp_path / "experts", gauge, tmp_path / "ported")
    assert len(report["artifacts"]) == 3
    away = mixture(target, tmp_path / "ported")
    state = load_file(tmp_path / "ported" / "adapter_model.safetensors")
    with torch.no_grad():
        moved = away.base_model.internal_xlora_classifier.layers[0]
        moved.weight.copy_(state[f"{key}.weight"])
        moved.bias.copy_(state[f"{key}.bias"])
    before, after = logits(home, "XLORA"), logits(away, "XLORA")
    assert tiny.relative_change(before, after) <= 1e-5
    with torch.no_grad():
        moved.weight.copy_(classifier.weight)
    assert tiny.relative_change(before, logits(away, "XLORA")) > 1e-3


def test_adapters_saved_as_bin_move(pairs, tmp_path):
    source, target, gauge = pairs("llama")
    model = make("LORA", {"target_modules": LINEAR}, source, tmp_path / "safe")
    model.save_pretrained(tmp_path / "adapter", safe_serialization=False)
    assert not (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    home = logits(on(source, tmp_path / "adapter"), "LORA")
    port(tmp_path / "adapter", gauge, tmp_path / "ported")
    away = logits(on(target, tmp_path / "ported"), "LORA")
    assert tiny.relative_change(home, away) <= 1e-5
    port(tmp_path / "ported", gauge, tmp_path / "back", inverse=True)
    name = "adapter_model.bin"
    assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()


class Code:
    """What a hostile pickle holds: unpickling it runs a command."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        import os

        return os.system, (f"touch {self.mark}",)


def test_a_bin_that_holds_code_is_refused_and_not_run(pairs, tmp_path):
    source, _, gauge = pairs("llama")
    make("LORA", {"target_modules": ["q_proj"]}, source, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save({"weight": Code(tmp_path / "mark")}, tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(ArtifactError, match="weights_only"):
        port(tmp_path / "adapter", gauge, tmp_path / "ported")
    assert not (tmp_path / "mark").exists()
    assert not (tmp_path / "ported").exists()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lora_magnitude_vector", "lora_magnitude_vector.weight"),
        ("lora_magnitude_vector", "lora_magnitude_vector.default.weight"),
        (".lora_A.weight", ".lora_A.default.weight"),
    ],
)
def test_old_key_styles_that_peft_still_loads_move(pairs, tmp_path, old, new):
    source, target, gauge = pairs("llama")
    make("LORA", {"target_modules": LINEAR, "use_dora": True}, source, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    state = load_file(file)
    save_file({name.replace(old, new): tensor for name, tensor in state.items()}, file)
    home = logits(on(source, tmp_path / "adapter"), "LORA")
    port(tmp_path / "adapter", gauge, tmp_path / "ported")
    away = logits(on(target, tmp_path / "ported"), "LORA")
    assert tiny.relative_change(home, away) <= 1e-5


def test_adapters_on_experts_that_are_stored_one_by_one_change_places(pairs, tmp_path):
    """The keys of transformers 4, which peft fuses when it loads them."""
    source, target, gauge = pairs("qwen3_moe")
    make(
        "LORA",
        {"target_modules": ["q_proj"], "r": 3, "lora_alpha": 3},
        source,
        tmp_path / "adapter",
    )
    generator = torch.Generator().manual_seed(0)
    state = {}
    sizes = {"gate_proj": (20, 48), "up_proj": (20, 48), "down_proj": (48, 20)}
    for layer in range(2):
        for expert in range(4):
            for name, (rows, columns) in sizes.items():
                path = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                for factor, shape in (("A", (3, columns)), ("B", (rows, 3))):
                    state[f"{path}.lora_{factor}.weight"] = torch.randn(shape, generator=generator)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(state, file)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["target_modules"] = list(sizes)
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    home = logits(on(source, tmp_path / "adapter"), "LORA")
    assert tiny.relative_change(home, tiny.logits(tiny.load(source))) > 1e-2
    port(tmp_path / "adapter", gauge, tmp_path / "ported")
    assert tiny.relative_change(home, logits(on(target, tmp_path / "ported"), "LORA")) <= 1e-5
    save_file({k: v for k, v in state.items() if "experts.2.up" not in k}, file)
    with pytest.raises(ArtifactError, match="all experts"):
        port(tmp_path / "adapter", gauge, tmp_path / "again")


@pytest.mark.parametrize("saved", [None, 0, False])
def test_projections_that_are_not_in_the_file_are_refused(pairs, tmp_path, saved):
    source, _, gauge = pairs("llama", ("residual",))
    settings = {"target_modules": ["q_proj"], "r": 4, "save_projection": False}
    make("VERA", settings, source, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    for change in ({"save_projection": saved}, {}):
        del config["save_projection"]
        file.write_text(json.dumps(config | change))
        with pytest.raises(ArtifactError, match="not saved"):
            port(tmp_path / "adapter", gauge, tmp_path / "ported")
        config["save_projection"] = saved


@pytest.mark.parametrize(
    "replication", [[[0, 1, 2]], "0-2", 5, [[0, "2"]], [0, 2], {"a": 1}, [[0, 10**7]], [[0, 1]]]
)
def test_layer_replication_that_makes_no_sense_is_refused(pairs, tmp_path, replication):
    source, _, gauge = pairs("llama")
    make("LORA", {"target_modules": ["q_proj"]}, source, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"layer_replication": replication}))
    with pytest.raises(ArtifactError, match="layer_replication"):
        port(tmp_path / "adapter", gauge, tmp_path / "ported")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("shira_indices", lambda indices: indices[:, :-1]),
        ("shira_indices", lambda indices: indices.float() + 0.5),
        ("shira_indices", lambda indices: indices + 1000),
        ("shira_indices", None),
        ("shira_weight", None),
        ("supertuning_indices", lambda indices: indices + 10**6),
        ("supertuning_indices", lambda indices: (indices % 100).to(torch.int8)),
    ],
)
def test_places_and_values_must_go_together(pairs, tmp_path, name, change):
    source, _, gauge = pairs("llama")
    method = "SHIRA" if name.startswith("shira") else "SUPERTUNING"
    make(method, {"target_modules": ["q_proj"], "r": 2}, source, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    state = load_file(file)
    key = next(key for key in state if key.endswith(name))
    whole = state.pop(key)
    if change is not None:
        state[key] = change(whole).contiguous()
    save_file(state, file)
    with pytest.raises(SignedAlignError):
        port(tmp_path / "adapter", gauge, tmp_path / "ported")
    assert not (tmp_path / "ported").exists()


def test_experts_of_different_ranks_do_not_change_places(pairs, tmp_path):
    source, _, gauge = pairs("qwen3_moe")
    make("LORA", {"target_modules": ["q_proj"]}, source, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    path = "base_model.model.model.layers.{}.mlp.experts.{}.up_proj.lora_{}.weight"
    state = {}
    for layer in range(2):
        for expert in range(4):
            rank = 4 if expert == 1 else 2
            state[path.format(layer, expert, "A")] = torch.ones(rank, 48)
            state[path.format(layer, expert, "B")] = torch.ones(20, rank)
    save_file(state, file)
    with pytest.raises(ArtifactError, match="same shape"):
        port(tmp_path / "adapter", gauge, tmp_path / "ported")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["rank_pattern"] = {"experts.1.up_proj": 4}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="rank_pattern"):
        port(tmp_path / "adapter", gauge, tmp_path / "ported")


def test_what_lies_beside_an_adapter_moves_too(pairs, tmp_path):
    source, _, gauge = pairs("llama")
    make("LORA", {"target_modules": ["q_proj"]}, source, tmp_path / "adapter")
    vector = torch.randn(tiny.WIDTH)
    torch.save(vector, tmp_path / "adapter" / "vector.pt")
    (tmp_path / "adapter" / "training_args.bin").write_bytes(b"settings")
    (tmp_path / "adapter" / "link.txt").symlink_to(tmp_path / "adapter" / "README.md")
    port(tmp_path / "adapter", gauge, tmp_path / "ported")
    moved = torch.load(tmp_path / "ported" / "vector.pt")
    assert torch.equal(moved, gauge.element("residual").apply(vector, 0))
    # what cannot move is left out, with the reason
    (tmp_path / "adapter" / "neurons.json").write_text("[1, 2, 3]")
    (tmp_path / "adapter" / "vector.json").write_text(json.dumps({"v": [0.5] * tiny.WIDTH}))
    (tmp_path / "adapter" / "metrics.json").write_text(json.dumps({"accuracy": 0.5}))
    report = port(tmp_path / "adapter", gauge, tmp_path / "again")
    assert report["left_out"] == ["neurons.json", "vector.json"]
    assert sum("left out" in note for note in report["notes"]) == 2
    assert (tmp_path / "again" / "metrics.json").exists()
    (tmp_path / "adapter" / "again").symlink_to(tmp_path / "adapter")
    with pytest.raises(ArtifactError, match="link to a directory"):
        port(tmp_path / "adapter", gauge, tmp_path / "second")


def test_several_adapters_in_one_directory_move_together(pairs, tmp_path):
    source, target, gauge = pairs("llama")
    make("LORA", {"target_modules": LINEAR}, source, tmp_path / "run" / "first")
    make(
        "IA3",
        {"target_modules": LINEAR, "feedforward_modules": MLP},
        source,
        tmp_path / "run" / "second",
    )
    (tmp_path / "run" / "notes.txt").write_text("both were good")
    report = port(tmp_path / "run", gauge, tmp_path / "ported")
    assert [one["kind"] for one in report["artifacts"]] == ["PEFT LoRA adapter", "PEFT IA3 adapter"]
    for name in ("first", "second"):
        home = logits(on(source, tmp_path / "run" / name), "")
        away = logits(on(target, tmp_path / "ported" / name), "")
        assert tiny.relative_change(home, away) <= 1e-5
    assert (tmp_path / "ported" / "notes.txt").read_text() == "both were good"
    (tmp_path / "run" / "old.ckpt").write_bytes(b"weights")
    with pytest.raises(ArtifactError, match=r"old\.ckpt is not recognised"):
        port(tmp_path / "run", gauge, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_the_table_says_what_the_tests_show():
    rows = {row.peft_type: row for row in table()}
    assert set(rows) == {kind.value for kind in PeftType}
    assert {row.verdict for row in rows.values()} <= {"moves", "moves if", "refused"}
    always = {case[0] for case in MOVING.values()}
    assert {name for name, row in rows.items() if row.verdict == "moves"} - {"XLORA"} <= always
    for name, row in rows.items():
        if row.verdict == "refused":
            assert row.conditions
            assert row.way_out, name
    assert markdown(list(rows.values())) in DOCS.read_text() + "\n"
