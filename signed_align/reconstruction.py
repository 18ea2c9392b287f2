"""How well an SAE reconstructs a model's residual stream: normalised mean squared error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signed_align.activations import (
    Batch,
    batches,
    load_model,
    load_tokenizer,
    sentences_of,
    typical,
)
from signed_align.chart import Family
from signed_align.checkpoint import Checkpoint
from signed_align.errors import ArtifactError
from signed_align.progress import track

DEFAULT_TOKENS = 4096
TRANSFORMER_LENS_HOOK = re.compile(r"blocks\.(\d+)\.hook_resid_(pre|post)")


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
        raise ArtifactError(f"SAELens cannot load {sae}: {' '.join(str(error).split())}") from error
    hook = str(dictionary.cfg.metadata.hook_name)
    activations = residual_activations(
        checkpoint,
        _blocks_before(hook, checkpoint.chart.family),
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


@torch.inference_mode()
def residual_activations(
    checkpoint: Checkpoint, blocks: int, todo: Sequence[Batch], *, device: str = "cpu"
) -> Tensor:
    """The residual stream after the first ``blocks`` decoder blocks, of shape (tokens, d), float32.

    Only those blocks are run. Padding and tokens with massive activations are left out.
    """
    model = load_model(checkpoint, head=False, dtype=torch.float32, device=device)
    stack = model.get_submodule(checkpoint.chart.family.blocks)
    if not 0 <= blocks <= len(stack):
        raise ArtifactError(f"the model has {len(stack)} blocks, so none after block {blocks}.")
    caught: list[Tensor] = []
    if blocks:
        del stack[blocks:]
        stack[-1].register_forward_hook(
            lambda _module, _inputs, output: caught.append(
                output if isinstance(output, Tensor) else output[0]
            )
        )
    else:
        del stack[1:]
        stack[0].register_forward_pre_hook(lambda _module, inputs: caught.append(inputs[0]))
    rows = []
    for batch in track(todo, "collecting activations", unit="batch"):
        batch = batch.to(device)
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        rows.append(caught.pop()[batch.attention_mask.bool()].float().cpu())
    activations = torch.cat(rows)
    if not torch.isfinite(activations).all():
        raise ArtifactError(f"the activations of {checkpoint.name} are not finite.")
    return activations[typical(activations)]


def _blocks_before(hook: str, family: Family) -> int:
    lens = TRANSFORMER_LENS_HOOK.fullmatch(hook)
    blocks = int(lens[1]) + (lens[2] == "post") if lens else family.blocks_before(hook)
    if blocks is None:
        raise ArtifactError(
            f"the SAE reads {hook!r}; reconstruction is measured at the input or output of a block."
        )
    return blocks
