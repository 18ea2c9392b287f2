"""Random tiny models of every charted type: gains, biases and weights all random, none special."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

WIDTH = 48
VOCABULARY = 120

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXTRA = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "mistral": {"head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "attention_bias": True},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "granite": {"attention_bias": True, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "gpt_neox": {"rotary_pct": 0.5},
}
RMS_TYPES = [
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
]
LAYER_NORM_TYPES = ["gpt2", "gpt_neox"]
ALL_TYPES = RMS_TYPES + LAYER_NORM_TYPES


def build(model_type: str, seed: int = 0, **overrides):
    """A random model in float32; every parameter is drawn, norm gains and biases included."""
    settings = {**COMMON, **EXTRA.get(model_type, {}), **overrides}
    if model_type == "gpt2":
        settings = {
            "vocab_size": VOCABULARY,
            "n_embd": WIDTH,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **overrides,
        }
    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.copy_(1 + 0.5 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model


def save(model, path: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """Save a model in a dtype, sharded as asked."""
    model.to(dtype).save_pretrained(path, max_shard_size=shard)
    model.to(torch.float32)
    return path


def tokens(count: int = 24, seed: int = 5) -> torch.Tensor:
    """Random token ids of shape (2, count)."""
    return torch.randint(3, VOCABULARY, (2, count), generator=torch.Generator().manual_seed(seed))


def logits(model) -> torch.Tensor:
    """The model's logits on the fixed tokens."""
    with torch.no_grad():
        return model(tokens()).logits


def load(path: Path, dtype: torch.dtype = torch.float32):
    """Load a checkpoint for evaluation."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.eval()


def relative_change(before: torch.Tensor, after: torch.Tensor) -> float:
    """The largest change, relative to the largest value."""
    return float((before - after).abs().max() / before.abs().max())
