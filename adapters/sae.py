"""SAELens sparse autoencoders on the residual stream: features stay, coordinates move.

Also here is how well one reconstructs a model's activations, which tells whether it has arrived.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signed_align.activations import (
    batches,
    load_tokenizer,
    residual_activations,
    sentences_of,
)
from signed_align.adapters.artifact import Artifact, read_json
from signed_align.chart import RESIDUAL, Chart, Templates
from signed_align.checkpoint import Checkpoint
from signed_align.errors import ArtifactError, one_line
from signed_align.gauge import Gauge
from signed_align.labels import Axes

CONFIG_NAME = "cfg.json"
WEIGHTS_NAME = "sae_weights.safetensors"
SPARSITY_NAME = "sparsity.safetensors"

PER_FEATURE: Templates = (None,)
TENSORS: Mapping[str, Templates] = {
    "W_enc": (RESIDUAL, None),
    "W_dec": (None, RESIDUAL),
    "b_dec": (RESIDUAL,),
    "b_enc": PER_FEATURE,
    "b_gate": PER_FEATURE,
    "b_mag": PER_FEATURE,
    "r_mag": PER_FEATURE,
    "threshold": PER_FEATURE,
    "log_threshold": PER_FEATURE,
    "scaling_factor": PER_FEATURE,
    "sparsity": PER_FEATURE,
    "topk_threshold": (),
}
ARCHITECTURES = {"standard", "gated", "jumprelu", "topk", "batchtopk"}
TRANSFORMER_LENS_HOOK = re.compile(
    r"hook_embed|blocks\.(\d+)\.hook_(resid_pre|resid_mid|resid_post|attn_out|mlp_out)"
)
DEFAULT_TOKENS = 4096


class SaeFamily:
    """SAEs as SAELens' ``save_model`` and ``save_inference_model`` write them."""

    kind = "SAELens SAE"

    def recognises(self, path: Path) -> bool:
        """Whether there are a cfg.json and SAE weights."""
        return (path / CONFIG_NAME).is_file() and (path / WEIGHTS_NAME).is_file()

    def inspect(self, path: Path) -> dict[str, Any]:
        """Architecture, sizes, hook and model."""
        config = read_json(path / CONFIG_NAME)
        metadata = _metadata(config)
        return {
            "architecture": config.get("architecture", "standard"),
            "d_in": config.get("d_in"),
            "d_sae": config.get("d_sae"),
            "hook_name": metadata.get("hook_name"),
            "model_name": metadata.get("model_name"),
            "normalize_activations": config.get("normalize_activations", "none"),
        }

    def read(self, path: Path, chart: Chart, gauge: Gauge) -> Artifact:
        """Read and label the SAE; raises ArtifactError, with the reason, if it cannot move."""
        config = read_json(path / CONFIG_NAME)
        details = self.inspect(path)
        _require_movable(details, config, chart, gauge)
        moved = dict(config)
        if gauge.target is not None:
            if isinstance(moved.get("metadata"), dict):
                moved["metadata"] = {**moved["metadata"], "model_name": gauge.target.name}
            else:
                moved["model_name"] = gauge.target.name
        present = [name for name in (WEIGHTS_NAME, SPARSITY_NAME) if (path / name).is_file()]
        return Artifact(
            kind=self.kind,
            path=path,
            made_on=details["model_name"],
            weights=tuple(present),
            label=partial(label, chart),
            settings={CONFIG_NAME: moved},
        )


def label(chart: Chart, name: str, shape: tuple[int, ...]) -> Axes:
    """The axis labels of one tensor of a saved SAE.

    Raises ArtifactError for a tensor that is not known, ChartError for one of another width.
    """
    if name not in TENSORS:
        raise ArtifactError(
            f"the SAE tensor {name!r} is not understood; known are {', '.join(TENSORS)}."
        )
    return chart.bind(name, TENSORS[name], shape)


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    """SAELens 6 keeps hook and model under ``metadata``, older releases at the top."""
    metadata = config.get("metadata")
    return {**config, **metadata} if isinstance(metadata, dict) else config


def _require_movable(
    details: dict[str, Any], config: dict[str, Any], chart: Chart, gauge: Gauge
) -> None:
    if str(details["architecture"]) not in ARCHITECTURES:
        raise ArtifactError(
            f"the SAE's architecture is {details['architecture']!r}; this release moves "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    hook = details["hook_name"]
    if not isinstance(hook, str) or not hook:
        raise ArtifactError("the SAE does not say which hook it reads, so its space is not known.")
    if not (TRANSFORMER_LENS_HOOK.fullmatch(hook) or chart.blocks_before(hook)):
        raise ArtifactError(
            f"the SAE reads {hook!r}, whose coordinates are not those of the residual stream; "
            "the gauge says nothing about them."
        )
    if config.get("reshape_activations", "none") != "none":
        raise ArtifactError("the SAE reshapes head outputs, which are not residual coordinates.")
    normalisation = details["normalize_activations"]
    if normalisation == "covariance_whitening":
        raise ArtifactError(
            "the SAE expects whitened activations, and the whitening matrix is not saved with it; "
            "fold it into the weights first (fold_activation_whitening in SAELens)."
        )
    if normalisation == "layer_norm" and not gauge.element(RESIDUAL.space).has_uniform_sign:
        raise ArtifactError(
            "the SAE normalises with layer_norm, which subtracts the mean over coordinates; a "
            "gauge that flips single signs changes that mean, so the SAE cannot follow it."
        )


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
        A directory that ``SAE.load_from_disk`` reads, on a residual hook.
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
        If the SAE does not load, or is not on a residual hook of this model.
    """
    from sae_lens import SAE

    checkpoint = Checkpoint.open(model)
    try:
        dictionary = SAE.load_from_disk(str(sae), device=device)
    except Exception as error:  # a damaged SAE fails in many ways
        raise ArtifactError(f"SAELens cannot load {sae}: {one_line(error)}") from error
    hook = str(dictionary.cfg.metadata.hook_name)
    activations = residual_activations(
        checkpoint,
        _blocks_before(hook, checkpoint.chart),
        batches(load_tokenizer(checkpoint), sentences_of(text), max_tokens=max_tokens),
        device=device,
    )
    if activations.shape[1] != dictionary.cfg.d_in:
        raise ArtifactError(
            f"the SAE reads {dictionary.cfg.d_in} coordinates, the model has "
            f"{activations.shape[1]}."
        )
    return {
        "nmse": reconstruction_error(dictionary, activations),
        "tokens": len(activations),
        "hook_name": hook,
    }


@torch.inference_mode()
def reconstruction_error(sae: Any, activations: Tensor) -> float:
    """The :func:`nmse` of an SAELens SAE on activations of shape (n, d)."""
    sae.eval()
    return nmse(activations, sae(activations.to(sae.device)).cpu())


def _blocks_before(hook: str, chart: Chart) -> int:
    """How many blocks have run at a hook on the input or output of a block."""
    lens = TRANSFORMER_LENS_HOOK.fullmatch(hook)
    blocks = chart.blocks_before(hook)
    if lens and lens[2] in ("resid_pre", "resid_post"):
        blocks = int(lens[1]) + (lens[2] == "resid_post")
    if blocks is None:
        raise ArtifactError(
            f"the SAE reads {hook!r}; reconstruction is measured at the input or output of a block."
        )
    return blocks
