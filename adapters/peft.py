"""PEFT LoRA adapters: the factors index what goes into and comes out of the module they adapt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from signed_align.adapters.artifact import Artifact, read_json
from signed_align.chart import Chart, ModuleLabel, Template, Templates
from signed_align.errors import ArtifactError, ChartError
from signed_align.gauge import Gauge
from signed_align.labels import Axes

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."


def _even(axis: Template | None) -> Template | None:
    return axis.unsigned if axis else None


# What a saved tensor's suffix says of its axes, given the label of the module in front of it.
# A magnitude is a norm over the inputs, so it is even in the output coordinate.
FACTORS: Mapping[str, Callable[[ModuleLabel], Templates]] = {
    ".lora_A.weight": lambda module: (None, module.input),
    ".lora_B.weight": lambda module: (module.output, None),
    ".lora_B.bias": lambda module: (module.output,),
    ".lora_embedding_A": lambda module: (None, module.input),
    ".lora_embedding_B": lambda module: (module.output, None),
    ".lora_magnitude_vector": lambda module: (_even(module.output),),
    # rows of an embedding or of a head, whichever way its weight is laid out
    ".token_adapter.trainable_tokens_delta": lambda module: (None, module.parameters["weight"][1]),
}

# Options under which an adapter's tensors do not determine what it computes on a moved base.
REFUSED_OPTIONS: Mapping[str, str] = {
    "use_qalora": "QA-LoRA averages groups of neighbouring coordinates, which a permutation splits",
    "use_bdlora": "block-diagonal factors tie coordinates to blocks, which a permutation breaks",
    "kasa_config": "KaSA changes the base weights by an SVD when it is loaded",
    "arrow_config": "an Arrow router holds prototypes of further adapters",
    "monteclora_config": "MonteCLoRA keeps sampling state beside the factors",
    "megatron_config": "Megatron shards the adapted layers",
    "target_parameters": "adapters on bare parameters (experts) have no chart yet",
}
PLAIN_INITS = {"true", "false", "gaussian", "orthogonal", "eva", "none"}


class LoraFamily:
    """LoRA adapters as ``PeftModel.save_pretrained`` writes them."""

    kind = "PEFT LoRA adapter"

    def recognises(self, path: Path) -> bool:
        """Whether there is an adapter_config.json."""
        return (path / CONFIG_NAME).is_file()

    def inspect(self, path: Path) -> dict[str, Any]:
        """Rank, targets and base model."""
        config = read_json(path / CONFIG_NAME)
        keys = ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules", "bias")
        return {key: config.get(key) for key in keys}

    def read(self, path: Path, chart: Chart, gauge: Gauge) -> Artifact:
        """Read and label the adapter; raises ArtifactError, with the reason, if it cannot move."""
        config = read_json(path / CONFIG_NAME)
        _require_movable(config)
        if not (path / WEIGHTS_NAME).is_file():
            raise ArtifactError(
                f"{path} has no {WEIGHTS_NAME}; load it with PEFT and save it again, which writes "
                "safetensors."
            )
        moved = dict(config)
        if gauge.target is not None:
            moved |= {"base_model_name_or_path": gauge.target.name, "revision": None}
        return Artifact(
            kind=self.kind,
            path=path,
            made_on=config.get("base_model_name_or_path"),
            weights=(WEIGHTS_NAME,),
            label=partial(label, chart),
            settings={CONFIG_NAME: moved},
        )


def label(chart: Chart, key: str, shape: tuple[int, ...]) -> Axes:
    """The axis labels of one tensor of a saved LoRA adapter.

    Parameters
    ----------
    chart : Chart
        The chart of the base model.
    key : str
        The name in ``adapter_model.safetensors``.
    shape : tuple of int
        The tensor's shape.

    Raises
    ------
    ArtifactError
        If the tensor is of no known kind, is of a module that the chart does not know, or does
        not have the shape that the module gives it.
    """
    if not key.startswith(PREFIX):
        raise ArtifactError(f"the adapter tensor {key!r} does not start with {PREFIX!r}.")
    name = key.removeprefix(PREFIX)
    try:
        for suffix, axes_of in FACTORS.items():
            if name.endswith(suffix):
                module, numbers = chart.module(name.removesuffix(suffix))
                return chart.bind(key, axes_of(module), shape, numbers)
        # modules_to_save, biases, and whole layers that PEFT saves beside their factors
        return chart.axes(name.replace(".base_layer.", "."), shape)
    except ChartError as error:
        raise ArtifactError(f"the adapter tensor {key!r} is not understood: {error}") from error


def _require_movable(config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ArtifactError(
            f"the adapter is of PEFT type {config.get('peft_type')!r}; this release moves LORA."
        )
    for option, reason in REFUSED_OPTIONS.items():
        if config.get(option):
            raise ArtifactError(f"the adapter uses {option}, which cannot be moved: {reason}.")
    init = str(config.get("init_lora_weights", True)).lower()
    if init not in PLAIN_INITS:
        raise ArtifactError(
            f"the adapter's init_lora_weights is {init!r}, which changes the base weights when it "
            "is loaded; save it as a plain LoRA first (save_pretrained with "
            "path_initial_model_for_weight_conversion)."
        )
