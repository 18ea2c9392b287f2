"""Charts: which axis of which weight indexes the residual stream, and which group acts on it.

A chart is data. A family of models is a table from module paths to :class:`ModuleLabel`; a model
type names its family and its norm. Nothing here moves a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import torch

from signed_align.errors import ChartError, GaugeError
from signed_align.gauge import Gauge
from signed_align.labels import Axes, Axis
from signed_align.signed_permutation import SignedPermutation

RESIDUAL = Axis("residual")
VOCABULARY = Axis("vocabulary", signed=False)


class NativeGroup(str, Enum):
    """The coordinate changes under which a model computes the same function."""

    SIGNED_PERMUTATION = "signed_permutation"
    PERMUTATION_AND_GLOBAL_SIGN = "permutation_and_global_sign"

    def contains(self, element: SignedPermutation) -> bool:
        """Whether ``element`` leaves the function of a model with this group unchanged."""
        return self is NativeGroup.SIGNED_PERMUTATION or element.has_uniform_sign


class Norm(str, Enum):
    """The normalisation in front of every reader, which decides the native group."""

    RMS_NORM = "RMSNorm"
    LAYER_NORM = "LayerNorm"

    @property
    def native_group(self) -> NativeGroup:
        """RMSNorm commutes with sign flips; LayerNorm's mean over coordinates does not."""
        if self is Norm.RMS_NORM:
            return NativeGroup.SIGNED_PERMUTATION
        return NativeGroup.PERMUTATION_AND_GLOBAL_SIGN


@dataclass(frozen=True)
class ModuleLabel:
    """The labels of one module: of its parameters, and of what goes in and comes out.

    ``input`` and ``output`` are what the two factors of a low-rank update index, however the
    module lays out its weight. Tensors named in ``internal`` have no axis in any space; nor
    have ``buffers``, which a checkpoint may leave out.
    """

    input: Axis | None = None
    output: Axis | None = None
    parameters: Mapping[str, Axes] = field(default_factory=dict)
    internal: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()

    def axes(self, parameter: str, rank: int) -> Axes | None:
        """Labels of ``parameter`` (a tensor with ``rank`` axes), or None if it is not known."""
        if parameter in self.internal or parameter in self.buffers:
            return (None,) * rank
        return self.parameters.get(parameter)


def linear(input: Axis | None, output: Axis | None) -> ModuleLabel:
    """A ``torch.nn.Linear``: weight (out, in), bias (out,)."""
    return ModuleLabel(input, output, {"weight": (output, input), "bias": (output,)})


def conv1d(input: Axis | None, output: Axis | None) -> ModuleLabel:
    """GPT-2's ``Conv1D``: weight (in, out), bias (out,)."""
    return ModuleLabel(input, output, {"weight": (input, output), "bias": (output,)})


def embedding(index: Axis | None, output: Axis) -> ModuleLabel:
    """A lookup table: weight (entries, d)."""
    return ModuleLabel(index, output, {"weight": (index, output)})


def norm(axis: Axis) -> ModuleLabel:
    """A norm: its gain follows the permutation and keeps its sign, its bias is a vector."""
    return ModuleLabel(axis, axis, {"weight": (axis.unsigned,), "bias": (axis,)})


def internal(*parameters: str) -> ModuleLabel:
    """A module whose tensors live inside attention heads."""
    return ModuleLabel(internal=frozenset(parameters))


def buffers(*names: str) -> ModuleLabel:
    """Constants that older checkpoints save: rotary frequencies, causal masks."""
    return ModuleLabel(buffers=frozenset(names))


READER = linear(RESIDUAL, None)
WRITER = linear(None, RESIDUAL)
NORM = norm(RESIDUAL)
TOKEN_EMBEDDING = embedding(VOCABULARY, RESIDUAL)
UNEMBEDDING = linear(RESIDUAL, VOCABULARY)


@dataclass(frozen=True)
class Family:
    """Models that name their modules alike.

    ``modules`` maps path patterns to labels: ``*`` is a layer number, ``{a,b}`` is a choice.
    ``prefix`` is what the causal-LM class puts in front and the bare model class leaves out;
    ``blocks`` is the list of decoder blocks, each of which adds to the residual stream.
    """

    prefix: str
    blocks: str
    modules: Mapping[str, ModuleLabel]

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], ModuleLabel]]:
        return [
            (re.compile(rf"(?:{re.escape(self.prefix)})?{_as_regex(pattern)}"), label)
            for pattern, label in self.modules.items()
        ]

    def module(self, path: str) -> ModuleLabel | None:
        """The label of the module at ``path``, or None if the family has no such module."""
        for pattern, label in self._patterns:
            if pattern.fullmatch(path):
                return label
        return None

    def blocks_before(self, hook: str) -> int | None:
        """How many blocks have written to the residual stream at a Hugging Face ``hook``.

        A hook is a module path whose output is meant; None if it is not the residual stream.
        """
        path = hook.removeprefix(self.prefix)
        block = re.fullmatch(rf"{re.escape(self.blocks)}\.(\d+)", path)
        return int(block[1]) + 1 if block else None


def _as_regex(pattern: str) -> str:
    escaped = re.escape(pattern).replace(r"\*", r"\d+")
    return re.sub(r"\\\{(.*?)\\\}", lambda match: "(?:" + match[1].replace(",", "|") + ")", escaped)


LLAMA = Family(
    prefix="model.",
    blocks="layers",
    modules={
        "embed_tokens": TOKEN_EMBEDDING,
        "layers.*.{input,post_attention,pre_feedforward,post_feedforward}_layernorm": NORM,
        "layers.*.self_attn.{q,k,v,qkv}_proj": READER,
        "layers.*.self_attn.{q,k}_norm": internal("weight"),
        "layers.*.self_attn.rotary_emb": buffers("inv_freq"),
        "layers.*.self_attn.o_proj": WRITER,
        "layers.*.mlp.{gate,up,gate_up}_proj": READER,
        "layers.*.mlp.down_proj": WRITER,
        "norm": NORM,
        "rotary_emb": buffers("inv_freq", "original_inv_freq"),
        "lm_head": UNEMBEDDING,
        "score": READER,
    },
)

GPT2 = Family(
    prefix="transformer.",
    blocks="h",
    modules={
        "wte": TOKEN_EMBEDDING,
        "wpe": embedding(None, RESIDUAL),
        "h.*.{ln_1,ln_2}": NORM,
        "h.*.attn": buffers("bias", "masked_bias"),
        "h.*.attn.c_attn": conv1d(RESIDUAL, None),
        "h.*.attn.c_proj": conv1d(None, RESIDUAL),
        "h.*.mlp.c_fc": conv1d(RESIDUAL, None),
        "h.*.mlp.c_proj": conv1d(None, RESIDUAL),
        "ln_f": NORM,
        "lm_head": UNEMBEDDING,
        "score": READER,
    },
)

GPT_NEOX = Family(
    prefix="gpt_neox.",
    blocks="layers",
    modules={
        "embed_in": TOKEN_EMBEDDING,
        "layers.*.{input,post_attention}_layernorm": NORM,
        "layers.*.attention": buffers("bias", "masked_bias"),
        "layers.*.attention.rotary_emb": buffers("inv_freq"),
        "layers.*.attention.query_key_value": READER,
        "layers.*.attention.dense": WRITER,
        "layers.*.mlp.dense_h_to_4h": READER,
        "layers.*.mlp.dense_4h_to_h": WRITER,
        "final_layer_norm": NORM,
        "{embed_out,lm_head}": UNEMBEDDING,
        "score": READER,
    },
)

RMS_NORM_TYPES = (
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
)
MODEL_TYPES: Mapping[str, tuple[Family, Norm]] = {
    **dict.fromkeys(RMS_NORM_TYPES, (LLAMA, Norm.RMS_NORM)),
    "gpt2": (GPT2, Norm.LAYER_NORM),
    "gpt_neox": (GPT_NEOX, Norm.LAYER_NORM),
}


@dataclass(frozen=True)
class Chart:
    """The labels of every weight of one model, its spaces with their sizes, its native group.

    Examples
    --------
    >>> chart = Chart.for_model("llama", hidden_size=576)
    >>> chart.axes("model.layers.3.mlp.down_proj.weight", (576, 1536))
    (Axis(space='residual', signed=True), None)
    """

    model_type: str
    family: Family
    norm: Norm
    sizes: Mapping[str, int]

    @classmethod
    def for_model(cls, model_type: str, hidden_size: int) -> Chart:
        """The chart of a transformers ``model_type``; raises ChartError if there is none."""
        if model_type not in MODEL_TYPES:
            raise ChartError(
                f"no chart is known for models of type {model_type!r}; known types are "
                f"{', '.join(sorted(MODEL_TYPES))}."
            )
        family, norm_kind = MODEL_TYPES[model_type]
        return cls(model_type, family, norm_kind, {RESIDUAL.space: hidden_size})

    @property
    def native_group(self) -> NativeGroup:
        """The group that leaves the model's function unchanged."""
        return self.norm.native_group

    def module(self, path: str) -> ModuleLabel:
        """The label of the module at ``path``; raises ChartError if it is not understood."""
        label = self.family.module(path)
        if label is None:
            raise ChartError(
                f"{path!r} is not a module that the chart of {self.model_type} models knows, "
                "so it is not known how to move it."
            )
        return label

    def axes(self, name: str, shape: Iterable[int]) -> Axes:
        """The labels of the weight ``name`` (a state-dict key), one per axis.

        Raises
        ------
        ChartError
            If the weight is not understood, or a labelled axis does not have its space's size.
        """
        shape = tuple(shape)
        path, _, parameter = name.rpartition(".")
        label = self.family.module(path)
        axes = label.axes(parameter, len(shape)) if label else None
        if axes is None:
            raise ChartError(
                f"the weight {name!r} is not one that the chart of {self.model_type} models "
                "knows, so it is not known how to move it."
            )
        self.require_fit(name, shape, axes)
        return axes

    def require_fit(self, name: str, shape: tuple[int, ...], axes: Axes) -> None:
        """Raise ChartError unless every labelled axis of a tensor has its space's size."""
        expected = [self.sizes.get(axis.space) if axis else None for axis in axes]
        fits = len(axes) == len(shape) and all(
            size is None or size == found for size, found in zip(expected, shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if size is None else str(size) for size in expected)
            raise ChartError(
                f"the tensor {name!r} has shape {tuple(shape)}; a {self.model_type} model with "
                f"{self.sizes[RESIDUAL.space]} residual coordinates has ({wanted}) there."
            )

    def is_buffer(self, name: str) -> bool:
        """Whether ``name`` is a constant that a checkpoint may leave out."""
        path, _, parameter = name.rpartition(".")
        label = self.family.module(path)
        return label is not None and parameter in label.buffers

    def token_matrices(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` with one residual vector per token: embedding and unembedding."""
        found = []
        for name in names:
            path, _, parameter = name.rpartition(".")
            label = self.family.module(path)
            if label and label.parameters.get(parameter) in (
                (VOCABULARY, RESIDUAL),
                (RESIDUAL, VOCABULARY),
            ):
                found.append(name)
        return found

    def require_native(self, gauge: Gauge) -> None:
        """Raise GaugeError unless ``gauge`` acts on this model's spaces by its native group."""
        for space, element in gauge.elements.items():
            if space not in self.sizes:
                raise GaugeError(
                    f"the gauge moves the space {space!r}, which the chart of {self.model_type} "
                    f"models does not cover (it covers {', '.join(self.sizes)})."
                )
            if element.size != self.sizes[space]:
                raise GaugeError(
                    f"the gauge has {element.size} {space} coordinates, the model "
                    f"{self.sizes[space]}."
                )
            if not self.native_group.contains(element):
                raise GaugeError(
                    f"the gauge flips the signs of single coordinates, but {self.model_type} "
                    "models use LayerNorm, which subtracts the mean over coordinates: only "
                    "permutations and one global sign leave their function unchanged."
                )

    def random_gauge(self, *, seed: int = 0, signed: bool = True) -> dict[str, SignedPermutation]:
        """A random element of the native group in every space, or of S_d if ``signed`` is False."""
        elements = {}
        for space, size in self.sizes.items():
            independent = signed and self.native_group is NativeGroup.SIGNED_PERMUTATION
            element = SignedPermutation.random(size, seed=seed, signed=independent)
            if signed and not independent:
                element = SignedPermutation(element.perm, -torch.ones_like(element.sign))
            elements[space] = element
        return elements
