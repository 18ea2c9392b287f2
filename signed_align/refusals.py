"""Which checkpoints are refused: quantised ones, absurd configs, and weights that are not finite.

Packed weights have no axis that a permutation could act on, and their scales belong to groups of
coordinates. A checkpoint of packed weights mostly says so in its config; where it does not, the
names of its tensors do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from signed_align.errors import CheckpointError

_CONFIG_KEYS = (
    "quantization_config", "compression_config", "quantization", "quant_config", "quantize_config",
)  # fmt: skip
_FILES = (
    "quantize_config.json", "quant_config.json", "quantization_config.json",
    "hf_quant_config.json", "quant_strategy.json",
)  # fmt: skip

_DEQUANTIZE = "load it with transformers, call model.dequantize() and save that"
_ON_LOADING = "load it with its scheme's option dequantize=True and save that"
_ORIGINAL = "take the unquantised checkpoint that it was made from"

# By scheme, what to do; what is not here is answered with the original checkpoint.
_ADVICE: Mapping[str, str] = {
    "bitsandbytes": _DEQUANTIZE,
    "fp8": _ON_LOADING,
    "mxfp4": _ON_LOADING,
    "compressed-tensors": _DEQUANTIZE,
}


@dataclass(frozen=True)
class _Packing:
    """Names of tensors that only a quantisation scheme stores."""

    scheme: str
    names: re.Pattern[str]


def _packing(scheme: str, *endings: str) -> _Packing:
    return _Packing(scheme, re.compile(rf"(?:^|\.)(?:{'|'.join(endings)})$"))


# In this order: the first that matches names the scheme.
_PACKINGS = (
    _packing("bitsandbytes", r"absmax", r"quant_map", r"quant_state\..*", r"SCB", r"weight_format"),
    _packing("compressed-tensors", "weight_packed", "weight_global_scale", "weight_zero_point"),
    _packing("gptq or awq", "qweight", "qzeros"),
    _packing("hqq", "W_q"),
    _packing("aqlm", "codebooks", "codes"),
    _packing("quanto", r"weight\._data", r"weight\._scale"),
    _packing("eetq", "weight_scales"),
    _packing("fp8", "weight_scale_inv"),
    _packing("fp8 or bitnet", "weight_scale", r"input_scale", "activation_scale"),
    _packing("vptq", "centroids", "res_centroids"),
    _packing("quip", "Qidxs"),
)
_MXFP4 = re.compile(r"^(.*_(?:proj|weight))_blocks$")

_INTEGERS = frozenset({"U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F4", "F6_E2M3"})


def require_unquantised(model: str, path: Path, settings: Mapping[str, Any]) -> None:
    """Raise CheckpointError, naming the scheme and what to do, if settings say it is quantised.

    Parameters
    ----------
    model, path : str, Path
        What the checkpoint was opened by, and its directory.
    settings : mapping
        Its config.json.
    """
    found = next(_said(settings), None) or _said_beside(path)
    if found is not None:
        _refuse(model, *found)


def require_unpacked(model: str, dtypes: Mapping[str, str]) -> None:
    """As :func:`require_unquantised`, by its tensors: the safetensors dtype of each, by name."""
    found = _seen(dtypes)
    if found is not None:
        _refuse(model, *found)


def _refuse(model: str, scheme: str, where: str) -> NoReturn:
    advice = _ADVICE.get(scheme.partition(" ")[0], _ORIGINAL)
    raise CheckpointError(
        f"{model} is quantised ({scheme}, by {where}): its packed weights cannot be permuted and "
        f"sign-flipped; {advice}."
    )


def _said(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The scheme that a config names, at the top or in one of its parts, and where."""
    for within, part in _parts(settings):
        for key in _CONFIG_KEYS:
            if part.get(key):
                yield _scheme(part[key]), f"{within}{key} in its config"


def _parts(settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A config and every object in it, outermost first, each with the path to it."""
    todo = [("", settings)]
    for within, part in todo:  # not by recursion: a hostile config is nested without end
        yield within, part
        todo += [
            (f"{within}{key}.", value)
            for key, value in part.items()
            if isinstance(value, Mapping) and key not in _CONFIG_KEYS
        ]


def _said_beside(path: Path) -> tuple[str, str] | None:
    for name in _FILES:
        if not (path / name).is_file():
            continue
        try:
            content = json.loads((path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            content = None
        return _scheme(content, name), f"the file {name}"
    return None


def _seen(dtypes: Mapping[str, str]) -> tuple[str, str] | None:
    """The scheme that names and dtypes of tensors betray."""
    for name in sorted(dtypes):
        for packing in _PACKINGS:
            if packing.names.search(name):
                return packing.scheme, f"its tensor {name!r}"
        blocks = _MXFP4.match(name)
        if blocks and f"{blocks[1]}_scales" in dtypes:
            return "mxfp4", f"its tensor {name!r}"
    for name, dtype in sorted(dtypes.items()):
        if name.endswith("weight") and dtype in _INTEGERS:
            return "scheme unknown", f"the dtype {dtype} of its tensor {name!r}"
    return None


def _scheme(config: Any, file: str = "") -> str:
    """What a quantisation config calls its scheme, in words."""
    if isinstance(config, str):
        return config
    if not isinstance(config, Mapping):
        return "scheme unknown"
    inner = config.get("quantization")
    if isinstance(inner, Mapping):
        return _scheme(inner)
    name = next(
        (
            str(config[key])
            for key in ("quant_method", "quant_algo", "quant_type", "format", "version", "mode")
            if isinstance(config.get(key), str) and config[key]
        ),
        "",
    )
    if not name and file == "quantize_config.json":
        name = "gptq"  # the name that only AutoGPTQ gave its settings
    bits = _bits(config)
    words = [name or "scheme unknown", *([f"{bits} bit"] if bits else [])]
    return " ".join(words)


def _bits(config: Mapping[str, Any]) -> int | None:
    for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if config.get(key) is True or config.get(f"_{key}") is True:
            return bits
    for key in ("bits", "w_bit", "nbits", "num_bits"):
        if isinstance(config.get(key), int):
            return int(config[key])
    return None


# ---- sizes ---------------------------------------------------------------------------------------

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")
_SIZES = (
    "hidden_size", "n_embd", "d_model", "dim", "vocab_size", "intermediate_size", "ffn_dim",
    "n_inner", "num_attention_heads", "num_key_value_heads", "n_head", "head_dim", "num_experts",
    "num_local_experts", "n_routed_experts", "moe_intermediate_size", "max_position_embeddings",
    "n_positions",
)  # fmt: skip

_NEVER_ZERO = ("hidden_size", "n_embd", "d_model", "vocab_size")

LEAST_LAYERS = 200
"""So many layers a config may name however few tensors there are."""

MOST_LAYERS = 2_000
"""What a config by itself may name: about ten times what the deepest models have."""

MOST_ENTRIES = 2**24
"""As :data:`MOST_LAYERS`, of the entries of an axis."""

_LONGEST = 2**31
"""Positions need no weights where they are rotated, but no model has more than these."""


def require_sensible(model: str, settings: Mapping[str, Any], tensors: int, stored: int) -> None:
    """Raise CheckpointError if a config has sizes that no checkpoint of its files can have.

    Every index of an axis takes a byte at least, and every layer a tensor. Classes make lists of
    all layers, and tables of all positions, before they look at a weight.

    Parameters
    ----------
    model : str
        What the checkpoint was opened by.
    settings : mapping
        Its config.json.
    tensors, stored : int
        How many tensors its files hold, and of how many bytes.
    """
    found = _absurd(settings, max(LEAST_LAYERS, tensors), stored)
    if found is not None:
        raise CheckpointError(
            f"the config of {model} says {found}, which its {tensors} tensors of {stored} bytes "
            "cannot have; give the checkpoint its own config.json."
        )


def require_plausible(model: str, settings: Mapping[str, Any]) -> None:
    """As :func:`require_sensible`, of a config whose checkpoint is not at hand."""
    found = _absurd(settings, MOST_LAYERS, MOST_ENTRIES)
    if found is not None:
        raise CheckpointError(
            f"the config that is kept of {model} says {found}, which no model has; make the file "
            "that keeps it again from the model."
        )


def _absurd(settings: Mapping[str, Any], layers: int, entries: int) -> str | None:
    """The first size of a config, or of its text part, that is negative or beyond its limit."""
    limits = dict.fromkeys(_LAYERS, layers) | dict.fromkeys(_SIZES, entries)
    limits |= dict.fromkeys(("max_position_embeddings", "n_positions"), _LONGEST)
    for within, part in _parts(settings):
        if within and not within.endswith("text_config."):
            continue
        for name, limit in limits.items():
            value = part.get(name)
            if isinstance(value, bool) or not isinstance(value, int):
                continue
            if not (name in _NEVER_ZERO) <= value <= limit:
                shown = value if abs(value) < 10**30 else "a number of more than 30 digits"
                return f"{within}{name} = {shown}"
    return None


# ---- values --------------------------------------------------------------------------------------


def require_finite(tensors: Iterable[tuple[str, Tensor]], model: str) -> None:
    """Raise CheckpointError, naming the weight, if one holds NaN or infinite values."""
    for name, tensor in tensors:
        if not tensor.numel() or not tensor.is_floating_point():
            continue
        extremes = torch.aminmax(tensor if tensor.element_size() > 1 else tensor.float())
        if not all(bool(torch.isfinite(extreme)) for extreme in extremes):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"the weight {name!r} of {model} holds NaN or infinite values in {dtype}, and what "
                "is not finite says nothing; repair the checkpoint, or run it in a wider dtype."
            )
