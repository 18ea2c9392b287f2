"""Whole checkpoints of a training run: model or adapter, optimizer state, and what goes along."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from signed_align.adapters.artifact import Artifact, Journey, Part
from signed_align.adapters.formats import open_tensors
from signed_align.adapters.json_files import read_json
from signed_align.adapters.optimizer import (
    FILE_NAMES,
    OptimizerFamily,
    Shape,
    optimizer_part,
    parameter_labels,
)
from signed_align.adapters.peft import CONFIG_NAME as ADAPTER_CONFIG_NAME
from signed_align.adapters.peft import PeftFamily
from signed_align.checkpoint import INCOMPLETE_NAME, INDEX_NAME, SINGLE_NAME, Checkpoint
from signed_align.errors import ArtifactError, one_line
from signed_align.labels import Axes
from signed_align.skeleton import skeleton

STATE_NAME = "trainer_state.json"
SCHEDULER_NAME = "scheduler.pt"
MODEL_CONFIG_NAME = "config.json"

CARRIED = (SCHEDULER_NAME, "scheduler.bin", "scaler.pt", "rng_state*.pth", "random_states_*.pkl")
"""Files that look like weights by their name and hold learning rates, scales and random states."""

UNMOVABLE: Mapping[str, str] = {
    INCOMPLETE_NAME: "it was not written to its end; take an earlier one",
    "global_step*/*_states.pt": "DeepSpeed spreads flattened weights and moments over files, "
    "which a permutation crosses; make model.safetensors with its zero_to_fp32.py, move that, and "
    "continue with a fresh optimizer",
    "pytorch_model_fsdp*": "FSDP's files are keyed and sharded in its own way; save with "
    "FULL_STATE_DICT and as safetensors, or continue with a fresh optimizer",
    "optimizer_[0-9]": "FSDP shards the optimizer state; continue with a fresh optimizer",
    "optimizer_[0-9]_rank*": "FSDP shards the optimizer state; continue with a fresh optimizer",
    "optimizer.pt_*": "SageMaker shards the optimizer state; continue with a fresh optimizer",
    "rank*-of-*-optimizer.pt": "XLA's FSDP shards the optimizer state; continue with a fresh "
    "optimizer",
}
"""Patterns of file names in checkpoints that cannot be moved, each with the reason."""


class TrainingFamily:
    """Directories that transformers' Trainer resumes from."""

    kind = "Trainer checkpoint"

    def recognises(self, path: Path) -> bool:
        """Whether training state lies beside a model or an adapter."""
        if not path.is_dir():
            return False
        in_training = any((path / name).is_file() for name in (*FILE_NAMES, STATE_NAME))
        trained = any((path / name).is_file() for name in (MODEL_CONFIG_NAME, ADAPTER_CONFIG_NAME))
        return (in_training and trained) or _unmovable(path) is not None

    def inspect(self, path: Path) -> dict[str, Any]:
        """The step, what is trained, and what the optimizer's state consists of."""
        state = read_json(path / STATE_NAME) if (path / STATE_NAME).is_file() else {}
        optimizer = _optimizer(path)
        return {
            "global_step": state.get("global_step"),
            "trains": "adapter" if (path / ADAPTER_CONFIG_NAME).is_file() else "model",
            "optimizer": OptimizerFamily().inspect(optimizer) if optimizer else None,
        }

    def read(self, path: Path, journey: Journey) -> Artifact:
        """Read and label it; raises ArtifactError, with the reason, if it cannot move."""
        found = _unmovable(path)
        if found is not None:
            raise ArtifactError(
                f"the training checkpoint {path} cannot be moved: it has {found.name}, and "
                f"{_reason(found)}."
            )
        read = _read_adapter if (path / ADAPTER_CONFIG_NAME).is_file() else _read_model
        artifact, settings = read(path, _optimizer(path), journey)
        return replace(
            artifact,
            kind=self.kind,
            carried=artifact.carried | set(_carried(path)),
            notes=[*artifact.notes, *_notes(path, settings)],
        )


def _unmovable(path: Path) -> Path | None:
    """A file or directory that says the checkpoint is of a kind that cannot be moved."""
    return next((found for pattern in UNMOVABLE for found in sorted(path.glob(pattern))), None)


def _reason(found: Path) -> str:
    return next(reason for pattern, reason in UNMOVABLE.items() if found.match(pattern))


def _optimizer(path: Path) -> Path | None:
    return next((path / name for name in FILE_NAMES if (path / name).is_file()), None)


def _carried(path: Path) -> Iterator[str]:
    for pattern in CARRIED:
        for file in path.glob(pattern):
            yield file.name


# ---- a whole model in training ---------------------------------------------------------------


def _read_model(
    path: Path, optimizer: Path | None, journey: Journey
) -> tuple[Artifact, Mapping[str, Any]]:
    """A checkpoint of all weights, and the settings of the model."""
    checkpoint = Checkpoint.open(path)
    checkpoint.require_movable(journey.gauge)
    instead = partial(checkpoint.instead, journey.gauge)
    shards = sorted(set(checkpoint.files.values()))
    parts = [Part(open_tensors(shard), checkpoint.chart.axes, instead) for shard in shards]
    if optimizer is not None:
        label = parameter_labels(checkpoint.chart)
        parts.append(optimizer_part(optimizer, skeleton(checkpoint.settings), label))
    index = [] if shards == [path / SINGLE_NAME] else [INDEX_NAME]
    artifact = Artifact(
        kind=TrainingFamily.kind,
        path=path,
        made_on=str(path),
        parts=parts,
        carried=frozenset(index),
        identity=checkpoint.identity,
    )
    return artifact, checkpoint.config.to_dict()


# ---- an adapter in training ------------------------------------------------------------------


def _read_adapter(
    path: Path, optimizer: Path | None, journey: Journey
) -> tuple[Artifact, Mapping[str, Any]]:
    """A checkpoint of an adapter, and the settings of the model and of the adapter."""
    if any((path / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)):
        raise ArtifactError(
            f"{path} holds an adapter and a whole model, so it is not clear which of them was "
            "trained; remove one."
        )
    artifact = PeftFamily().read(path, journey)
    assert journey.gauge.source is not None
    settings = {**journey.gauge.source.config, **read_json(path / ADAPTER_CONFIG_NAME)}
    if optimizer is None:
        return artifact, settings
    moved = artifact.settings[ADAPTER_CONFIG_NAME]
    if moved.get("target_modules") != read_json(path / ADAPTER_CONFIG_NAME).get("target_modules"):
        raise ArtifactError(
            "the adapter's layers share factors that move differently and are untied, which its "
            "optimizer state cannot follow; remove the optimizer state and continue with a fresh "
            "one."
        )
    model, keys = _adapted(path, journey)
    (adapter,) = artifact.parts

    def label(name: str, shape: Shape) -> Axes:
        """A parameter is labelled as it is in the adapter's own file."""
        key = keys.get(name)
        if key is None or tuple(adapter.file.shapes.get(key, ())) != shape:
            raise ArtifactError(
                f"the adapter's parameter {name!r} of shape {shape} is not in "
                f"{adapter.file.path.name}, so it is not known how its optimizer state moves."
            )
        if key in adapter.remarks or adapter.instead(key) is not None:
            raise ArtifactError(
                f"the adapter's tensor {key!r} moves entry by entry, which its optimizer state "
                "cannot follow; remove the optimizer state and continue with a fresh one."
            )
        return adapter.label(key, shape)

    parts = [adapter, optimizer_part(optimizer, model, label)]
    return replace(artifact, parts=parts), settings


def _adapted(path: Path, journey: Journey) -> tuple[Any, dict[str, str]]:
    """The base with the adapter put in for training, without weights, and its saved keys."""
    from peft import PeftConfig, get_peft_model

    base = copy.deepcopy(journey.skeleton)
    try:
        config = PeftConfig.from_pretrained(str(path))
        config.inference_mode = False
        config.base_model_name_or_path = None  # the base is at hand
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # others need the weights of the base
        with torch.device("meta"):
            model = get_peft_model(base, config)
        return model, _saved_keys(model, config)
    except Exception as error:  # a bad config fails in many ways
        raise ArtifactError(
            f"PEFT cannot make the adapter of {path} again, which its optimizer state needs: "
            f"{one_line(error)}"
        ) from error


def _saved_keys(model: Any, config: Any) -> dict[str, str]:
    """By the name of a parameter in memory: its key in the adapter's file, as PEFT says."""
    from peft import get_peft_model_state_dict

    if config.is_prompt_learning:
        # a prompt is saved as its encoder makes it, which is its embedding where there is no more
        return {"prompt_encoder.default.embedding.weight": "prompt_embeddings"}
    state = model.state_dict(keep_vars=True)
    saved = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    keys = {id(tensor): key for key, tensor in saved.items()}
    return {
        name: keys[id(parameter)]
        for name, parameter in model.named_parameters()
        if id(parameter) in keys
    }


# ---- what its user should know ---------------------------------------------------------------


def _notes(path: Path, settings: Mapping[str, Any]) -> Iterator[str]:
    optimizer = _optimizer(path)
    if optimizer is None:
        yield "there is no optimizer state: training would go on with a fresh optimizer"
    elif optimizer.name == FILE_NAMES[0] and not (path / SCHEDULER_NAME).is_file():
        yield f"there is no {SCHEDULER_NAME}, without which Trainer does not load {optimizer.name}"
    drops = sorted(set(_dropouts(settings)))
    if drops:
        yield (
            f"the run has dropout ({', '.join(drops)}): its masks are drawn coordinate by "
            "coordinate and do not move, so the two runs agree on average, not step by step"
        )


def _dropouts(settings: Mapping[str, Any]) -> Iterator[str]:
    """The settings of dropout that are not zero."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _dropouts(value)
        elif "drop" in str(name) and isinstance(value, (int, float)) and value > 0:
            yield str(name)
