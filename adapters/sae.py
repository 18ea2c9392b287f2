"""SAELens sparse autoencoders and transcoders: features stay, the coordinates they read move.

Also here is how well one reconstructs a model's activations, which tells whether it has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signed_align.activations import (
    Batch,
    batches,
    hook_activations,
    load_tokenizer,
    sentences_of,
)
from signed_align.adapters.artifact import Artifact, Journey, Part
from signed_align.adapters.formats import open_tensors
from signed_align.adapters.json_files import read_json
from signed_align.checkpoint import Checkpoint
from signed_align.errors import ArtifactError, ChartError, one_line
from signed_align.hooks import find_hook
from signed_align.labels import Axes, Label

CONFIG_NAME = "cfg.json"
WEIGHTS_NAME = "sae_weights.safetensors"
SPARSITY_NAME = "sparsity.safetensors"
WHITENING_NAME = "activation_whitening.safetensors"
STORE_NAME = "activations_store_state.safetensors"

# What the axes of a saved tensor index: the coordinates read, those written, or features (None).
Sides = tuple[str | None, ...]
PER_FEATURE: Sides = (None,)
DICTIONARY: Mapping[str, Sides] = {
    "W_enc": ("read", None),
    "W_dec": (None, "written"),
    "b_dec": ("written",),
    "b_enc": PER_FEATURE,
}
SKIP: Mapping[str, Sides] = {"W_skip": ("written", "read")}
THRESHOLD: Mapping[str, Sides] = {"threshold": PER_FEATURE, "log_threshold": PER_FEATURE}
BATCH_THRESHOLD: Mapping[str, Sides] = {"topk_threshold": ()}
ARCHITECTURES: Mapping[str, Mapping[str, Sides]] = {
    "standard": DICTIONARY,
    "gated": {**DICTIONARY, **dict.fromkeys(("b_gate", "b_mag", "r_mag"), PER_FEATURE)},
    "jumprelu": {**DICTIONARY, **THRESHOLD},
    "topk": DICTIONARY,
    "abstopk": DICTIONARY,
    "batchtopk": {**DICTIONARY, **BATCH_THRESHOLD},
    "matryoshka_batchtopk": {**DICTIONARY, **BATCH_THRESHOLD},
    "matching_pursuit": DICTIONARY,
    "temporal": {**DICTIONARY},
    "transcoder": DICTIONARY,
    "skip_transcoder": {**DICTIONARY, **SKIP},
    "jumprelu_transcoder": {**DICTIONARY, **THRESHOLD},
    "jumprelu_skip_transcoder": {**DICTIONARY, **THRESHOLD, **SKIP},
}
"""Of every architecture of SAELens: what the axes of its tensors index."""

OLD_SCALING: Mapping[str, Sides] = {
    "scaling_factor": PER_FEATURE,
    "finetuning_scaling_factor": PER_FEATURE,
}
TEMPORAL_ATTENTION = "attn_layers."
"""A temporal SAE attends over positions, at the width of its features: nothing there moves."""

NORMALISATIONS: Mapping[str, str] = {
    "none": "the activations are read as they are",
    "expected_average_only_in": "one number scales all coordinates alike",
    "constant_norm_rescale": "a norm does not feel permutations and signs",
    "constant_scalar_rescale": "one number scales all coordinates alike",
    "layer_norm": "it subtracts the mean over coordinates: permutations and one common sign only",
    "covariance_whitening": "mean and matrices move; the dictionary itself is in whitened "
    "coordinates, which stay",
}
"""Of every ``normalize_activations`` of SAELens: how it takes a change of coordinates."""

DEFAULT_TOKENS = 4096


class SaeFamily:
    """Dictionaries as SAELens' ``save_model`` and ``save_inference_model`` write them."""

    kind = "SAELens SAE"

    def recognises(self, path: Path) -> bool:
        """Whether there are a cfg.json and SAE weights."""
        return (path / CONFIG_NAME).is_file() and (path / WEIGHTS_NAME).is_file()

    def inspect(self, path: Path) -> dict[str, Any]:
        """Architecture, sizes, hooks and model."""
        config = read_json(path / CONFIG_NAME)
        metadata = _metadata(config)
        return {
            "architecture": config.get("architecture", "standard"),
            "d_in": config.get("d_in"),
            "d_out": config.get("d_out"),
            "d_sae": config.get("d_sae"),
            "hook_name": metadata.get("hook_name") or metadata.get("hook_point"),
            "hook_name_out": metadata.get("hook_name_out"),
            "model_name": metadata.get("model_name"),
            "normalize_activations": _normalisation(config),
        }

    def read(self, path: Path, journey: Journey) -> Artifact:
        """Read and label it; raises ArtifactError, with the reason, if it cannot move."""
        config = read_json(path / CONFIG_NAME)
        details = self.inspect(path)
        sides = _sides(config, details, journey)
        whitened = details["normalize_activations"] == "covariance_whitening"
        table = ARCHITECTURES[str(details["architecture"])]
        if whitened and not (path / WHITENING_NAME).is_file():
            raise ArtifactError(
                f"the SAE reads whitened activations, and {WHITENING_NAME} is not beside it; fold "
                "the whitening into its weights (SAELens does at the end of training)."
            )
        if whitened:
            table = {name: (None,) * len(axes) for name, axes in table.items()}
        parts = [Part(open_tensors(path / WEIGHTS_NAME), partial(_label, table, sides))]
        if (path / SPARSITY_NAME).is_file():
            counts = {"sparsity": PER_FEATURE}
            parts.append(Part(open_tensors(path / SPARSITY_NAME), partial(_label, counts, sides)))
        if (path / WHITENING_NAME).is_file():
            whitening: Mapping[str, Sides] = {
                "mean": ("read",),
                "matrix": ("read", None),
                "inverse_matrix": (None, "read"),
            }
            parts.append(
                Part(open_tensors(path / WHITENING_NAME), partial(_label, whitening, sides))
            )
        return Artifact(
            kind=self.kind,
            path=path,
            made_on=details["model_name"],
            parts=parts,
            settings={CONFIG_NAME: _moved_config(config, journey)},
            carried=frozenset({STORE_NAME}),
        )


def _label(
    table: Mapping[str, Sides], sides: Mapping[str, Label], name: str, shape: tuple[int, ...]
) -> Axes:
    """The axis labels of one tensor of a saved dictionary."""
    axes = table.get(name, OLD_SCALING.get(name))
    if table is ARCHITECTURES["temporal"] and name.startswith(TEMPORAL_ATTENTION):
        return (None,) * len(shape)
    if axes is None:
        raise ArtifactError(
            f"the SAE tensor {name!r} is not understood; known are {', '.join(table)}."
        )
    if len(axes) != len(shape):
        raise ArtifactError(f"the SAE tensor {name!r} has shape {shape}, not {len(axes)} axes.")
    return tuple(None if side is None else sides[side] for side in axes)


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    """SAELens 6 keeps hook and model under ``metadata``, older releases at the top."""
    metadata = config.get("metadata")
    return {**config, **metadata} if isinstance(metadata, dict) else config


def _normalisation(config: dict[str, Any]) -> str:
    """The normalisation; old configs say True for what is now called by name."""
    value = config.get("normalize_activations", "none")
    if isinstance(value, bool) or value is None:
        return "expected_average_only_in" if value else "none"
    return str(value)


def _sides(config: dict[str, Any], details: dict[str, Any], journey: Journey) -> dict[str, Label]:
    """The labels of the coordinates it reads and of those it writes; raises if it cannot move."""
    if str(details["architecture"]) not in ARCHITECTURES:
        raise ArtifactError(
            f"the SAE's architecture is {details['architecture']!r}; known are "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    normalisation = details["normalize_activations"]
    if normalisation not in NORMALISATIONS:
        raise ArtifactError(
            f"the SAE normalises with {normalisation!r}; known are {', '.join(NORMALISATIONS)}."
        )
    metadata = _metadata(config)
    hook = details["hook_name"] or journey.hook
    if not isinstance(hook, str) or not hook:
        raise ArtifactError(
            "the SAE does not say which hook it reads, so its space is not known; name it with "
            "--hook."
        )
    for key in ("hook_head_index", "hook_head_index_out", "hook_point_head_index"):
        if metadata.get(key) is not None:
            raise ArtifactError(
                f"the SAE reads a single head ({key} {metadata[key]}), and heads change places."
            )
    loading = metadata.get("model_from_pretrained_kwargs") or {}
    if isinstance(loading, dict) and loading.get("refactor_factored_attn_matrices"):
        raise ArtifactError(
            "the SAE was trained with refactor_factored_attn_matrices, which gives heads other "
            "coordinates than the checkpoint has."
        )
    read = _side(hook, config.get("d_in"), journey)
    out = details["hook_name_out"]
    written = _side(str(out), config.get("d_out"), journey) if out else read
    if "transcoder" in str(details["architecture"]) and not out:
        raise ArtifactError(
            "the transcoder does not say which hook it writes (hook_name_out), so the space of "
            "its outputs is not known."
        )
    if normalisation == "layer_norm":
        element = journey.element(read, int(config["d_in"]))
        if not element.has_uniform_sign:
            raise ArtifactError(
                "the SAE normalises with layer_norm, which subtracts the mean over coordinates; a "
                "gauge that flips single signs changes that mean, so the SAE cannot follow it."
            )
    return {"read": read, "written": written}


def _side(hook: str, size: Any, journey: Journey) -> Label:
    if not isinstance(size, int):
        raise ArtifactError(f"the SAE's config gives the width {size!r} at {hook!r}.")
    return journey.place(hook, size)[1]


def _moved_config(config: dict[str, Any], journey: Journey) -> dict[str, Any]:
    """The config as it reads after the move: it names the new model, and what was done.

    A move that takes the last one back leaves no trace of either.
    """
    source, target = journey.gauge.source, journey.gauge.target
    if source is None or target is None:
        return config
    top = not isinstance(config.get("metadata"), dict)
    metadata = dict(config if top else config["metadata"])
    metadata["model_name"] = target.name
    step = {"from": source.summary(), "to": target.summary()}
    steps = metadata.pop("signed_align_moves", [])
    if not isinstance(steps, list):
        raise ArtifactError(f"the SAE's signed_align_moves is {steps!r}, not a list of moves.")
    steps = list(steps)
    if steps and steps[-1] == {"from": step["to"], "to": step["from"]}:
        steps.pop()
    else:
        steps.append(step)
    if steps:
        metadata["signed_align_moves"] = steps
    return metadata if top else {**config, "metadata": metadata}


def nmse(original: Tensor, reconstruction: Tensor) -> float:
    """Squared error over variance: Σ‖x − x̂‖² / Σ‖x − mean‖², for rows x of shape (n, d).

    0 is perfect, 1 is no better than always answering with the mean.
    """
    error = (original - reconstruction).square().sum()
    return float(error / (original - original.mean(0)).square().sum())


def evaluate_sae(
    model: str | Path,
    sae: str | Path,
    *,
    text: str | Path | Sequence[str] | None = None,
    max_tokens: int = DEFAULT_TOKENS,
    device: str = "cpu",
) -> dict[str, Any]:
    """The reconstruction error of a saved SAE on a model's activations.

    Parameters
    ----------
    model : str or Path
        A local directory or a Hub id.
    sae : str or Path
        A directory that ``SAE.load_from_disk`` reads.
    text : path or sequence of str, optional
        What the model reads; by default English prose that ships with Python.
    max_tokens : int
        How much of the text to use.
    device : str
        Where to run.

    Returns
    -------
    dict
        ``nmse``, ``tokens`` (tokens measured: those with massive activations are left out),
        ``hook_name``.

    Raises
    ------
    SignedAlignError
        If the SAE does not load, or its hook cannot be read in this model.
    """
    checkpoint = Checkpoint.open(model)
    dictionary = load_sae(sae, device)
    hook = str(dictionary.cfg.metadata.hook_name)
    todo = batches(load_tokenizer(checkpoint), sentences_of(text), max_tokens=max_tokens)
    activations = activations_for(dictionary, checkpoint, todo, device)
    return {
        "nmse": reconstruction_error(dictionary, activations[0], activations[-1]),
        "tokens": len(activations[0]),
        "hook_name": hook,
    }


def load_sae(path: str | Path, device: str = "cpu") -> Any:
    """A saved SAE; raises ArtifactError if SAELens cannot load it."""
    from sae_lens import SAE

    try:
        return SAE.load_from_disk(str(path), device=device)
    except Exception as error:  # a damaged SAE fails in many ways
        raise ArtifactError(f"SAELens cannot load {path}: {one_line(error)}") from error


def activations_for(
    sae: Any, checkpoint: Checkpoint, todo: Sequence[Batch], device: str = "cpu"
) -> list[Tensor]:
    """What an SAE reads in a model and, for a transcoder, what it should make of it.

    Each has shape (tokens, d). Raises ArtifactError if its hooks are not there, or another size.
    """
    metadata = sae.cfg.metadata
    hook = str(metadata.hook_name)
    try:
        places = [find_hook(checkpoint.chart, hook)]
        if metadata.hook_name_out:
            places.append(find_hook(checkpoint.chart, str(metadata.hook_name_out)))
        activations = hook_activations(checkpoint, places, todo, device=device)
    except ChartError as error:
        raise ArtifactError(f"the SAE reads {hook!r}: {error}") from error
    if activations[0].shape[1] != sae.cfg.d_in:
        raise ArtifactError(
            f"the SAE reads {sae.cfg.d_in} coordinates, the model has {activations[0].shape[1]}."
        )
    return activations


@torch.inference_mode()
def reconstruction_error(sae: Any, activations: Tensor, wanted: Tensor | None = None) -> float:
    """The :func:`nmse` of what an SAELens SAE makes of activations of shape (n, d).

    ``wanted`` is what it should make of them: the activations themselves, but for a transcoder.
    """
    sae.eval()
    return nmse(activations if wanted is None else wanted, sae(activations.to(sae.device)).cpu())
