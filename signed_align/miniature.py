"""Miniatures: a model's class and architecture at a size at which every dimension is distinct.

A chart is read off shapes and proved by running, and neither needs the real widths: the
miniature of a 400B model has the same modules, a layer of each kind, and a few hundred thousand
parameters. What a config switches on (biases, norms, gating, layer kinds, tied embeddings, kinds
of rotation, shared key-value heads) is kept; what it counts is cut down.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from signed_align.errors import ChartError, one_line

MAX_PARAMETERS = 5_000_000
MAX_LAYERS = 6
VOCABULARY = 131
WIDTH = 48
HEADS = 4
KEY_VALUE_HEADS = 2
HEAD_SIZE = 16
TOKENS = 24
"""Length of the input on which a miniature is tried."""

# Sizes by the names that transformers configs give them. They, their products with the numbers of
# heads, and their doubles in fused matrices are pairwise distinct, so that a shape tells which
# dimension is which.
_SIZES: tuple[tuple[int, str], ...] = (
    (
        VOCABULARY,
        "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size"
        " ngram_vocab_size_base audio_vocab_size",
    ),
    (
        WIDTH,
        "hidden_size n_embd d_model dim n_embed emb_dim embedding_dim hidden_size_global"
        " out_hidden_size projector_output_dim adapter_out_dim",
    ),
    (40, "embedding_size word_embed_proj_dim input_embedding_size backbone_hidden_size"),
    (56, "output_embedding_size"),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"
        " encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"
        " swa_num_attention_heads num_attention_heads_per_layer conf_num_attention_heads",
    ),
    (
        KEY_VALUE_HEADS,
        "num_key_value_heads num_kv_heads n_head_kv kv_n_heads num_query_groups"
        " swa_num_key_value_heads num_global_key_value_heads",
    ),
    (
        HEAD_SIZE,
        "head_dim swa_head_dim kv_channels attention_head_dim attention_head_size dim_head d_kv",
    ),
    (28, "global_head_dim"),
    (14, "v_head_dim swa_v_head_dim"),
    (12, "qk_nope_head_dim"),
    (8, "qk_rope_head_dim rotary_dim"),
    (20, "qk_head_dim"),
    (26, "q_lora_rank"),
    (22, "kv_lora_rank"),
    (6, "o_lora_rank"),
    (2, "o_groups"),
    (12, "index_head_dim indexer_head_dim"),
    (3, "index_n_heads indexer_n_heads"),
    (8, "index_topk"),
    (
        72,
        "intermediate_size ffn_dim n_inner ffn_hidden_size decoder_ffn_dim encoder_ffn_dim d_ff"
        " inner_dim dim_ff dff d_inner feed_forward_size dense_intermediate_size mlp_dim",
    ),
    (78, "intermediate_size_mlp"),
    (44, "moe_intermediate_size expert_ffn_hidden_size expert_intermediate_size"),
    (
        52,
        "shared_expert_intermediate_size shared_experts_intermediate_size"
        " moe_shared_expert_intermediate_size shared_intermediate_size",
    ),
    (6, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (
        2,
        "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k top_k_experts moe_top_k"
        " num_selected_experts zero_expert_num",
    ),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts"),
    (2, "n_group num_expert_group"),
    (1, "topk_group num_nextn_predict_layers"),
    (
        90,
        "max_position_embeddings n_positions n_ctx max_seq_len seq_length model_max_length"
        " context_length max_target_positions max_source_positions",
    ),
    (30, "original_max_position_embeddings"),
    (
        64,
        "sliding_window sliding_window_size attention_window_size window_size local_attention"
        " attention_chunk_size keep_window_size local_attention_window_len",
    ),
    (7, "hidden_size_per_layer_input"),
    (5, "laurel_rank mamba_dt_rank time_step_rank"),
    (9, "mamba_d_state state_size ssm_state_size"),
    (2, "mamba_expand expand"),
    (8, "mamba_n_heads mamba_num_heads"),
    (12, "mamba_d_head mamba_head_dim mamba_headdim"),
    (1, "mamba_n_groups mamba_ngroups n_groups"),
    (96, "mamba_d_ssm"),
    (16, "mamba_chunk_size chunk_size"),
    (2, "linear_num_key_heads"),
    (4, "linear_num_value_heads linear_num_heads"),
    (12, "linear_key_head_dim"),
    (15, "linear_value_head_dim linear_head_dim"),
    (60, "lru_width"),
    (13, "router_hidden_size"),
    (10, "adapter_rank gated_norm_rank loop_gate_rank hc_lowrank"),
    (21, "rel_extent"),
    (17, "d_rel"),
    (28, "num_centroids"),
    (4, "centroid_intermediate_top_k"),
)


def _names(names: str) -> tuple[str, ...]:
    return tuple(names.split())


_SIZE_OF = {name: size for size, names in _SIZES for name in _names(names)}

# Sizes that are structure when they equal another: equal they stay.
_FOLLOWS: Mapping[str, Sequence[str]] = {
    "num_key_value_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_kv_heads": ("num_attention_heads",),
    "n_head_kv": ("n_head",),
    "kv_n_heads": ("n_heads",),
    "num_query_groups": ("num_attention_heads",),
    "swa_num_key_value_heads": ("swa_num_attention_heads",),
    "num_global_key_value_heads": ("num_attention_heads",),
    "linear_num_value_heads": ("linear_num_key_heads",),
    "topk_group": ("n_group", "num_expert_group"),
    "head_dim": ("qk_rope_head_dim", "qk_head_dim"),
    "embedding_size": ("hidden_size",),
    "word_embed_proj_dim": ("hidden_size",),
}
# Counts of which one is a structure of its own.
_MAY_BE_ONE = _names(
    "num_key_value_heads num_kv_heads n_head_kv kv_n_heads num_query_groups n_group"
    " num_expert_group num_experts num_experts_per_tok moe_topk moe_k top_k num_local_experts"
    " mamba_n_groups mamba_ngroups n_groups"
)

# Names of the number of layers, and of lists from which it follows where it has no name.
_LAYER_COUNTS = _names(
    "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers num_decoder_layers"
    " encoder_layers num_encoder_layers depth conf_num_hidden_layers num_global_layers"
)
_LAYER_KINDS = _names("layer_types layers_block_type attention_layers")


@dataclass(frozen=True)
class _LayerSetting:
    """A way in which configs tell layers apart.

    ``of_layer`` is what a value says of one layer, by its index and the number of layers;
    ``cut`` is the value that says the same of the layers kept, by their old indices.
    """

    names: tuple[str, ...]
    of_layer: Callable[[Any, int, int], Any]
    cut: Callable[[Any, Sequence[int], int], Any]


_LAYER_SETTINGS = (
    _LayerSetting(
        _names(
            "attn_layer_indices full_attn_idxs mlp_only_layers moe_layers cross_attention_layers"
            " hybrid_layer_ids global_attn_indexes intermediate_layers_indices"
        ),
        lambda indices, layer, count: layer in indices,
        lambda indices, kept, count: [new for new, old in enumerate(kept) if old in indices],
    ),
    _LayerSetting(  # layers are numbered from 1
        ("ple_layer_ids",),
        lambda numbers, layer, count: layer + 1 in numbers,
        lambda numbers, kept, count: [new for new, old in enumerate(kept, 1) if old + 1 in numbers],
    ),
    _LayerSetting(
        _names(
            "first_k_dense_replace num_dense_layers moe_layer_start_index max_window_layers"
            " loop_layer_index_start loop_layer_index_end"
        ),
        lambda boundary, layer, count: layer < boundary,
        lambda boundary, kept, count: sum(old < boundary for old in kept),
    ),
    _LayerSetting(  # -1 is the last of all
        ("moe_layer_end_index",),
        lambda last, layer, count: layer <= last % count,
        lambda last, kept, count: sum(old <= last % count for old in kept) - 1,
    ),
    _LayerSetting(
        ("num_kv_shared_layers",),
        lambda number, layer, count: layer >= count - number,
        lambda number, kept, count: sum(old >= count - number for old in kept),
    ),
    _LayerSetting(
        ("block_types",),
        lambda cycle, layer, count: cycle[layer % len(cycle)],
        lambda cycle, kept, count: [cycle[old % len(cycle)] for old in kept],
    ),
)
_LAYER_SETTING_OF = {name: setting for setting in _LAYER_SETTINGS for name in setting.names}
_LAYER_OVERRIDES = "per_layer_config"
_LAYER_STAGES = _names("n_input_layers n_recurrent_layers n_output_layers")
# Lists that may be as long as there are layers, by chance.
_NOT_OF_LAYERS = _names(
    "time_step_limit eos_token_id begin_suppress_tokens suppress_tokens languages ssm_multipliers"
    " mlp_multipliers axial_pos_shape axial_pos_embds_dim encoder_hash_byte_group_size L_bp_cycles"
)
# Sizes of the layers that are exceptions to the rest.
_EXCEPTIONAL: Mapping[str, int] = {
    "head_dim": 28,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 28,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 10,
    "v_head_dim": 15,
    "num_local_experts": 5,
    "intermediate_size": 144,
}
# A kind of layer that returns every so often returns every second or third one in a miniature.
_PERIODS: Mapping[str, int] = {
    "attn_layer_period": 3,
    "attn_layer_offset": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "decoder_sparse_step": 2,
    "moe_layer_interval": 2,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "global_attn_every_n_layers": 2,
    "sliding_window_pattern": 2,
    "_sliding_window_pattern": 2,
    "n_layers_per_attn_res_block": 2,
}
_PERIODIC_LAYERS = 4
_PLAIN_LAYERS = 2

# Where a config describes the rotary embedding, and its lists over rotary planes.
_ROTATION = ("rope_parameters", "rope_scaling")
_PLANE_FACTORS = ("short_factor", "long_factor")
_PLANE_SECTIONS = ("mrope_section",)

# Nothing is generated, so nothing is cached; encoders are built as the decoders they may be.
_SWITCHES: Mapping[str, bool] = {"use_cache": False, "is_decoder": True}
_TOKENS: Mapping[str, int] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_token_id": VOCABULARY - 3,
    "image_token_index": VOCABULARY - 3,
}
_DROPPED = _names(
    "_name_or_path transformers_version architectures dtype torch_dtype quantization_config"
    " auto_map attn_implementation _attn_implementation"
)

# Sizes of particular types, for arithmetic that the class demands of its numbers.
_SIZES_OF_TYPE: Mapping[str, Mapping[str, int]] = {
    # a head of 8, of which a quarter or three quarters are rotated in whole planes
    "phi3": {"num_attention_heads": 6},
    "phi4_multimodal": {"num_attention_heads": 6},
    "gpt_neox": {"num_attention_heads": 3},
    "stablelm": {"num_attention_heads": 6},
    "got_ocr2_vision": {"image_size": 64, "output_channels": 24},
    "phi4_multimodal_audio": {
        "bias_max_distance": 10,
        "nemo_conv_channels": 30,
        "ext_pw_out_channel": 40,
        "depthwise_separable_out_channel": 40,
    },
    # heads fill the residual width
    "helium": {"head_dim": 12},
    "xlnet": {"d_head": 12},
    # inner widths are twice the residual width
    "mamba2": {"num_heads": 8, "head_dim": 12},
    "zamba": {"attention_hidden_size": 96, "n_mamba_heads": 4},
    "zamba2": {"attention_hidden_size": 96, "attention_head_dim": 24, "kv_channels": 12},
    # bytes, patches of twice the width of bytes, and the model that cuts them
    "blt": {"encoder_hash_byte_group_vocab": 37},
    "blt_local_encoder": {"hidden_size_global": 96, "head_dim": 12},
    "blt_local_decoder": {"hidden_size_global": 96, "head_dim": 12},
    "blt_global_transformer": {"hidden_size": 96, "intermediate_size": 120, "head_dim": 24},
    "blt_patcher": {"hidden_size": 40, "intermediate_size": 60, "head_dim": 10},
    "cpmant": {
        "position_bias_num_buckets": 30,
        "position_bias_max_distance": 64,
        "prompt_types": 3,
        "prompt_length": 5,
        "segment_types": 7,
    },
    "dots3_note_text": {"head_dim": 18},
    "qwen4_exp_text": {
        "indexer_head_dim": 18,
        "indexer_budget": 64,
        "indexer_compress_ratio": 2,
        "ple_embed_dim": 56,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
    },
    "reformer": {"local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8},
    "roc_bert": {
        "pronunciation_vocab_size": 37,
        "pronunciation_embed_dim": 30,
        "shape_vocab_size": 41,
        "shape_embed_dim": 28,
    },
    "rwkv": {"attention_hidden_size": WIDTH},
    "paligemma": {"projection_dim": WIDTH},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "ffn_round_up_to_multiple_of": 4},
    "musicgen_decoder": {"num_codebooks": 2},
    "musicgen_melody_decoder": {"num_codebooks": 2},
    "minimax": {"block_size": 16},
    "lfm2": {"intermediate_size": 108, "block_multiple_of": 4},
    "fuyu": {"patch_size": 4, "image_size": 16},
    "mvp": {"prompt_length": 5, "prompt_mid_dim": 15},
}
# Encoders of other modalities have another width, so that they are not taken for the text model.
_TOWERS = _names(
    "vision_config audio_config vq_config audio_encoder audio_encoder_config text_encoder"
    " depth_decoder_config"
)
_TOWER_SIZES: Mapping[str, int] = {
    "hidden_size": 40,
    "d_model": 40,
    "adapter_in_dim": 40,
    "adapter_input_size": 40,
    "head_dim": 10,
    "intermediate_size": 60,
    "mlp_dim": 60,
    "image_size": 64,
    "projection_dim": WIDTH,
}
# Other settings of particular types.
_SETTINGS_OF_TYPE: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "reformer": {
        "axial_pos_shape": [10, 9],
        "axial_pos_embds_dim": [20, 28],
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "xlstm": {"v_dim_factor": 1.5},
}
# What a class cannot do without although its config may leave it unset. Lists are repeated over
# the layers.
_UNSET: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 2,
    },
    "xmod": {"default_language": "en_XX"},
}
# Types whose class takes a head size although its config need not name one; without it, heads
# would fill the residual width exactly. (They must all the same where the config asks for norms of
# heads or for factors of rotary planes: those are read off the width.)
_TAKES_HEAD_SIZE = frozenset(
    _names(
        "apertus apertus1p5_text cohere doge dots1 emu3_text_model ernie4_5_moe exaone4 exaone_moe"
        " falcon_h1 flex_olmo glm4_moe granite granite_swa granitemoe granitemoe_swa"
        " granitemoeshared jamba lfm2 lfm2_moe nanochat olmo olmo2 olmo3 olmo_hybrid phi phi3"
        " phi4_multimodal phimoe qwen2 qwen2_moe qwen3_moe smollm3 starcoder2"
    )
)
# Types whose layers share a block, so that one layer of a kind does not show what is shared.
_SHARED_BLOCKS = frozenset({"zamba", "zamba2"})


def miniature_config(config: Any) -> Any:
    """Cut a config down to one of the same class with small, distinct sizes and few layers.

    Parameters
    ----------
    config : transformers.PretrainedConfig
        The config of a causal language model, of any size; it is left as it is.

    Returns
    -------
    transformers.PretrainedConfig
        A config of the same class. Every kind of layer the config names is there once, where that
        takes at most ``MAX_LAYERS`` layers.

    Raises
    ------
    ChartError
        The class refuses the sizes.
    """
    settings = _cut_down(_settings(config), config.model_type, {})
    settings.pop("model_type")
    try:
        return type(config)(**settings)
    except Exception as error:
        raise ChartError(f"no miniature of {config.model_type}: {one_line(error)}") from error


def _settings(config: Any) -> dict[str, Any]:
    """A config's settings, copied, with those of its parts as dictionaries."""
    settings = {}
    for name, value in config.to_dict().items():
        value = vars(config).get(name, value)
        settings[name] = _settings(value) if hasattr(value, "to_dict") else copy.deepcopy(value)
    return settings


def _cut_down(
    settings: Mapping[str, Any], model_type: str, particular: Mapping[str, int]
) -> dict[str, Any]:
    whole = {**settings, **_defaults(settings, model_type)}
    sizes = {**_SIZE_OF, **particular, **_SIZES_OF_TYPE.get(model_type, {})}
    cut = {
        name: _cut(name, value, whole, sizes)
        for name, value in whole.items()
        if name not in _DROPPED
    }
    cut.update(_cut_layers(whole, sizes, 3 if model_type in _SHARED_BLOCKS else 1))
    cut.update(_SETTINGS_OF_TYPE.get(model_type, {}))
    cut.update({name: value for name, value in _SWITCHES.items() if name in cut})
    return cut


def _defaults(settings: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """What the class needs and the config leaves unset."""
    defaults = {
        name: value
        for name, value in _UNSET.get(model_type, {}).items()
        if settings.get(name) in (None, {})
    }
    if model_type in _TAKES_HEAD_SIZE and "head_dim" not in settings:
        rotation = settings.get("rope_parameters") or {}
        if not settings.get("qk_layernorm") and not set(_PLANE_FACTORS) & set(rotation):
            defaults["head_dim"] = None
    count = settings.get("num_hidden_layers")
    return {
        name: [value[index % len(value)] for index in range(count)]
        if isinstance(value, list) and count
        else value
        for name, value in defaults.items()
    }


def _cut(name: str, value: Any, settings: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """One setting at its size in a miniature."""
    if isinstance(value, dict) and "model_type" in value:
        towers = _TOWER_SIZES if name in _TOWERS else {}
        return _cut_down(value, value["model_type"] or name, towers)
    if name in _TOKENS and value is not None:
        return _TOKENS[name]
    if name == "head_dim" and value is None:
        return sizes["head_dim" if settings.get("qk_rope_head_dim") is None else "qk_rope_head_dim"]
    if name in _ROTATION and isinstance(value, dict):
        return _cut_rotation(value, settings, sizes)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name in _PERIODS:
        return min(value, _PERIODS[name])
    if name not in sizes or value == 0 or (value == 1 and name in _MAY_BE_ONE):
        return value
    for other in _FOLLOWS.get(name, ()):
        if settings.get(other) == value:
            return _cut(other, value, settings, sizes)
    return sizes[name]


def _cut_rotation(
    rotation: Mapping[str, Any], settings: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Settings of the rotary embedding, with lists over rotary planes cut to the planes left."""
    before, after = _rotary_size(settings, settings), _rotary_size(settings, sizes)
    cut: dict[str, Any] = {}
    for name, value in rotation.items():
        if isinstance(value, dict):
            cut[name] = _cut_rotation(value, settings, sizes)
        elif name in _PLANE_FACTORS and isinstance(value, Sequence):
            cut[name] = list(value[: max(1, len(value) * after // before)])
        elif name in _PLANE_SECTIONS and isinstance(value, Sequence):
            planes, parts = sum(value) * after // before, len(value)
            cut[name] = [(planes + part) // parts for part in reversed(range(parts))]
        else:
            cut[name] = _cut(name, value, rotation, sizes)
    return cut


def _rotary_size(settings: Mapping[str, Any], sizes: Mapping[str, Any]) -> int:
    """The size of a head, or of the part of it that is rotated, where a config names that part."""
    for name in ("qk_rope_head_dim", "head_dim"):
        if settings.get(name) and sizes.get(name):
            return int(sizes[name])
    if "head_dim" in settings and sizes is not settings:
        return int(sizes["head_dim"])
    return int(sizes.get("hidden_size", 1)) // int(sizes.get("num_attention_heads", 1))


def _cut_layers(
    settings: Mapping[str, Any], sizes: Mapping[str, int], copies: int
) -> dict[str, Any]:
    """The settings that speak of layers, for a few layers that cover every kind."""
    count = _layer_count(settings)
    columns = dict(_columns(settings, count))
    periodic = any(settings.get(name) not in (None, 0, 1) for name in _PERIODS)
    least = min(count, _PERIODIC_LAYERS if periodic else _PLAIN_LAYERS)
    kept = _representatives(list(columns.values()), count, least, copies)
    layers: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _LAYER_COUNTS and _is_count(value):
            layers[name] = len(kept) if value == count else min(value, _PLAIN_LAYERS)
        elif name in _LAYER_STAGES and name in columns:
            layers[name] = sum(columns[name][old] for old in kept)
        elif name == _LAYER_OVERRIDES and value:
            layers[name] = dict(_cut_overrides(value, kept, settings, sizes))
        elif name in _LAYER_SETTING_OF and name in columns:
            layers[name] = _LAYER_SETTING_OF[name].cut(value, kept, count)
        elif name in columns:
            layers[name] = _cut_list(value, kept, sizes.get(name))
    if "attention_types" in settings and "attention_layers" in layers:
        layers["attention_types"] = [[layers["attention_layers"], 1]]
    return layers


def _layer_count(settings: Mapping[str, Any]) -> int:
    counts = (settings[name] for name in _LAYER_COUNTS if _is_count(settings.get(name)))
    lists = (settings[name] for name in _LAYER_KINDS if isinstance(settings.get(name), list))
    return next(counts, None) or len(next(lists, ()))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _columns(settings: Mapping[str, Any], count: int) -> Iterator[tuple[str, list[Any]]]:
    """What each setting that tells layers apart says of each layer."""
    start = 0
    for name in _LAYER_STAGES:
        if _is_count(settings.get(name)):
            stop = start + settings[name]
            yield name, [start <= layer < stop for layer in range(count)]
            start = stop
    for name, value in settings.items():
        if name in _NOT_OF_LAYERS:
            continue
        if name in _LAYER_SETTING_OF and value is not None:
            of_layer = _LAYER_SETTING_OF[name].of_layer
            yield name, [of_layer(value, layer, count) for layer in range(count)]
        elif name == _LAYER_OVERRIDES and value:
            overrides = {int(layer): str(override) for layer, override in value.items()}
            yield name, [overrides.get(layer) for layer in range(count)]
        elif isinstance(value, (list, tuple)) and len(value) == count > 1:
            yield name, list(value)


def _representatives(
    columns: Sequence[Sequence[Any]], count: int, least: int, copies: int
) -> list[int]:
    """The first layers of each kind; where there are too many, every value in each column."""
    kinds = [tuple(str(column[layer]) for column in columns) for layer in range(count)]
    first = [layer for layer in range(count) if kinds[:layer].count(kinds[layer]) < copies]
    seen: set[tuple[int, str]] = set()
    telling = []
    for layer in first:
        values = set(enumerate(kinds[layer]))
        if not values <= seen:
            telling.append(layer)
        seen |= values
    order = [*telling, *(layer for layer in first if layer not in telling)][:MAX_LAYERS]
    order += [layer for layer in range(count) if layer not in order][: max(0, least - len(order))]
    return sorted(order)


def _cut_list(values: Sequence[Any], kept: Sequence[int], size: int | None) -> list[Any]:
    """A per-layer list at the layers kept; different sizes stay different."""
    if size is None:
        return [values[layer] for layer in kept]
    distinct = list(dict.fromkeys(values))
    return [size * (1 + distinct.index(values[layer])) for layer in kept]


def _cut_overrides(
    overrides: Mapping[Any, Mapping[str, Any]],
    kept: Sequence[int],
    settings: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Per-layer exceptions at the layers kept; an exceptional size stays exceptional."""
    by_layer = {int(layer): override for layer, override in overrides.items()}
    for new, old in enumerate(kept):
        override = by_layer.get(old, {})
        cut = {
            name: _EXCEPTIONAL[name]
            if name in _EXCEPTIONAL and value != settings.get(name)
            else _cut(name, value, {**settings, **override}, sizes)
            for name, value in override.items()
        }
        if cut:
            yield new, cut


def miniature_model(
    config: Any,
    seed: int = 0,
    auto_class: Any = AutoModelForCausalLM,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Build the miniature of a config's model, with every learnt tensor random.

    Parameters
    ----------
    config : transformers.PretrainedConfig
        The config of the model in full.
    seed : int
        Seed of the weights.
    auto_class : type
        The transformers class that builds a model from a config: an auto class, or a model class.
    dtype : torch.dtype
        Of the weights.

    Returns
    -------
    transformers.PreTrainedModel
        On the CPU, in eval mode, with eager attention. Norm gains lie about 1 (or about 0, where
        the class adds the 1 itself); biases and router biases are random too, so that nothing a
        chart could get wrong is hidden by a zero.

    Raises
    ------
    ChartError
        The class cannot be built from a miniature config, needs more than ``MAX_PARAMETERS``
        parameters, or does not turn tokens alone into finite logits that depend on them.
    """
    what = f"no miniature of {config.model_type}"
    small = miniature_config(config)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            size = _build(small, auto_class, dtype).num_parameters()
        if size > MAX_PARAMETERS:
            raise ChartError(f"{what}: {size:,} parameters are left, more than {MAX_PARAMETERS:,}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _build(small, auto_class, dtype).eval()
    except ChartError:
        raise
    except Exception as error:
        raise ChartError(f"{what}: its class cannot be built: {_sentence(error)}") from error
    _randomise(model, torch.Generator().manual_seed(seed))
    _try(model, what)
    return model


def _build(config: Any, auto_class: Any, dtype: torch.dtype) -> Any:
    """A model of the config, or of the part of it that the class takes."""
    options = {
        "attn_implementation": "eager", "experts_implementation": "eager", "dtype": dtype
    }  # fmt: skip
    if not hasattr(auto_class, "_model_mapping"):
        text = config.get_text_config(decoder=True)
        if getattr(text, "pad_token_id", None) is None:
            text.pad_token_id = 0  # classifiers look for the last token that is none
        return auto_class._from_config(config, **options)
    if type(config) not in auto_class._model_mapping:
        raise ValueError(f"{auto_class.__name__} of transformers has no such type")
    model_class = auto_class._model_mapping[type(config)]
    parts = [config, *(getattr(config, name) for name in config.sub_configs)]
    part = next((part for part in parts if isinstance(part, model_class.config_class)), None)
    if part is None or part is config:
        build, part = auto_class.from_config, config
    else:
        build = model_class._from_config
    return build(part, **options)


def _sentence(error: Exception) -> str:
    return one_line(error).split(". ")[0].rstrip(".")


@torch.no_grad()
def _try(model: Any, what: str) -> None:
    """Raise unless tokens alone give finite logits that depend on them."""
    tokens = 3 + torch.arange(2 * TOKENS).reshape(2, TOKENS) * 7 % (VOCABULARY - 4)
    try:
        logits = model(input_ids=tokens).logits
    except Exception as error:
        raise ChartError(
            f"{what}: its class does not run on tokens alone: {_sentence(error)}"
        ) from error
    if not bool(torch.isfinite(logits).all()):
        raise ChartError(f"{what}: its logits are not finite")
    if torch.equal(logits[0], logits[1]):
        raise ChartError(f"{what}: its logits do not depend on the tokens")


# Parameters that hold rates of decay or steps in time: far from their initial values, states
# explode or vanish.
_RATES = ("A_log", "dt_bias", "time_decay", "time_first", "recurrent_param")
# Buffers that training sets; others are constants, such as masks and tables of decay.
_LEARNT_BUFFERS = ("bias", "biases", "layer_scalar")
# Buffers that say which experts a token goes to.
_EXPERTS_OF_TOKENS = ("tid2eid",)


@torch.no_grad()
def _randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Replace every learnt tensor in place, so that tied tensors stay tied."""
    done: set[int] = set()
    for module_name, module in model.named_modules():
        for name, tensor in _learnt(module):
            if id(tensor) not in done:
                noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
                tensor.copy_(_random(f"{module_name}.{name}", module, tensor, noise))
                done.add(id(tensor))
        for name, table in module.named_buffers(recurse=False):
            if name in _EXPERTS_OF_TOKENS:
                order = torch.rand(len(table), module.num_experts, generator=generator).argsort(-1)
                table.copy_(order[:, : table.shape[1]])


def _learnt(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters and learnt buffers; a sinusoidal table is neither."""
    if "Sinusoidal" not in type(module).__name__:
        yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name.endswith(_LEARNT_BUFFERS) and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _random(name: str, module: nn.Module, tensor: Tensor, noise: Tensor) -> Tensor:
    """A random value of the scale its role asks for: gains about 1, matrices that keep variance."""
    if name.endswith(_RATES):
        return tensor + 0.1 * noise
    if tensor.ndim < 2:
        centre = tensor.float().mean().round().to(tensor.dtype)
        return centre + (0.5 if name.endswith("weight") else 0.3) * noise
    if isinstance(module, nn.Embedding):
        return noise
    if isinstance(module, nn.modules.conv._ConvNd):
        return noise * tensor[0].numel() ** -0.5
    return noise * tensor.shape[0 if isinstance(module, Conv1D) else -1] ** -0.5
