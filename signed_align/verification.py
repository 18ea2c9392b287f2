"""Running what was made before it may stay: does it agree as its gauge promises?

Two models that compute the same function must agree exactly, up to rounding; models that were
trained apart agree to some extent, which is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from signed_align.activations import Batch, some_tokens
from signed_align.chart import RESIDUAL
from signed_align.checkpoint import Checkpoint
from signed_align.errors import CheckpointError, SignedAlignError, VerificationError
from signed_align.fit import matrices, require_fit, share_of, sure_coordinates
from signed_align.gauge import Gauge
from signed_align.labels import kind_of, transport
from signed_align.recovery import moved_tokens
from signed_align.running import Side, look, paired_tokens

TOKENS = 256
"""How many tokens a verification runs on."""

TOLERANCE = 1e-3
"""Equal means: no logit differs by more than this share of the largest; no coordinate by more than
ten times this share of its own norm. Rounding stays below 1e-5 in float32."""

MERGE_TOLERANCE = 0.05
"""What merging models of one function may change of their logits: it rounds, often to bfloat16."""

CHEAP_BYTES = 2 * 2**30
"""Models whose weights are smaller than this, together, are run without being asked to."""

EQUAL_COSINE = 0.9999
"""The cosine of weights that should be equal; rounding to bfloat16 stays above it."""

LEAST_COSINE = 0.1
"""Of weights that should be similar."""


def verified(
    verify: bool | None,
    models: Sequence[Checkpoint],
    run: Callable[[], dict[str, Any]],
    *,
    unless: str | None = None,
) -> dict[str, Any]:
    """What a verification found, or why it was skipped.

    Parameters
    ----------
    verify : bool, optional
        True always runs it. None runs it where the models are small, and skips it, with the
        reason, where it cannot be run. False skips it.
    models : sequence of Checkpoint
        The models that it has to run.
    run : callable
        The verification.
    unless : str, optional
        Why it is run only if it is asked for: what it would find is known.

    Raises
    ------
    VerificationError
        If it fails.
    SignedAlignError
        If it was asked for and cannot be run.
    """
    if verify is False:
        return {"skipped": "not asked for"}
    if verify:
        return run()
    if unless is not None:
        return {"skipped": unless}
    files = {file for model in models for file in model.files.values()}
    if sum(file.stat().st_size for file in files) > CHEAP_BYTES:
        return {"skipped": f"the models have more than {CHEAP_BYTES >> 30} GiB; --verify runs them"}
    try:
        return run()
    except VerificationError:
        raise
    except SignedAlignError as error:
        return {"skipped": str(error)}


def sample(checkpoint: Checkpoint, sentences: Sequence[str] | None = None) -> list[Batch]:
    """Some tokens to run models on: of the text, or random ones if there is no tokenizer."""
    matrices = checkpoint.chart.token_matrices(checkpoint.files)
    rows = torch.arange(min(checkpoint.shape(name)[0] for name in matrices))
    return some_tokens(checkpoint, sentences, rows, max_tokens=TOKENS, seed=1)[0]


def sides(
    source: Checkpoint,
    target: Checkpoint,
    sentences: Sequence[str] | None = None,
    *,
    device: str = "cpu",
) -> tuple[Side, Side]:
    """Both models, to be run on the same few tokens."""
    todo = sample(source, sentences)
    return paired_tokens(source, target, todo, moved_tokens(source, target), device=device)


def agreement(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """How far two results agree: ``difference``, the largest, as a share of the largest value;
    ``explained``, 1 minus the squared distance as a share of the squared norm.
    """
    if ours.shape != theirs.shape:
        return {"difference": 1.0, "explained": 0.0}
    gap, norm = (ours - theirs).double(), ours.double().square().sum().clamp_min(1e-30)
    return {
        "difference": float(gap.abs().max() / ours.double().abs().max().clamp_min(1e-30)),
        "explained": float(1 - gap.square().sum() / norm),
    }


def verify_same_function(
    before: Checkpoint, after: Checkpoint, sentences: Sequence[str] | None = None
) -> dict[str, Any]:
    """Whether a checkpoint that was moved computes what it did before.

    Returns ``claim`` (``equal``), ``of`` (``logits``), ``tokens``, and the :func:`agreement`.
    Raises VerificationError if they differ.
    """
    todo = sample(before, sentences)
    ours, theirs = (look(one, todo).logits for one in (before, after))
    found: dict[str, Any] = {"claim": "equal", "of": "logits", "tokens": len(ours)}
    found |= agreement(ours, theirs)
    if found["difference"] > TOLERANCE:
        raise VerificationError(
            f"the moved model should compute the same as {before.name}, but its logits differ by "
            f"{found['difference']:.2g} of the largest (at most {TOLERANCE:g} was expected); "
            "nothing was kept. Please report it.",
            found,
        )
    return found


def verify_gauge(
    gauge: Gauge,
    source: Checkpoint,
    target: Checkpoint,
    sentences: Sequence[str] | None = None,
    *,
    device: str = "cpu",
) -> dict[str, Any]:
    """Whether a gauge carries one model's hidden states, and weights, into the other's.

    Where both compute the same function the claim is that they are equal afterwards. Else it is
    that each coordinate's variation arrives for some part.

    Returns
    -------
    dict
        ``claim`` (``equal`` or ``similar``), ``of``, ``tokens``, ``difference`` (of the logits),
        ``explained`` (the mean share of a coordinate's squared norm that arrives), ``disagree``
        (the share of coordinates that the gauge is sure of and that are off by more than a
        hundredth of their norm), ``unsure_disagree`` (of the others), ``weights`` (for each further
        kind of space the cosine of moved weights and the target's).

    Raises
    ------
    VerificationError
        If the claim does not hold.
    """
    return verify_sides(gauge, *sides(source, target, sentences, device=device))


def verify_sides(gauge: Gauge, ours: Side, theirs: Side) -> dict[str, Any]:
    """As :func:`verify_gauge`, for models that are run on given tokens."""
    source, target = ours.model, theirs.model
    if RESIDUAL.space in gauge.elements:
        require_fit(gauge, source, target)
    functions = agreement(ours.logits, theirs.logits)
    equal = functions["difference"] <= TOLERANCE
    moved, wanted = transport(ours.seen.states, (None, None, RESIDUAL), gauge), theirs.seen.states
    off = (moved - wanted).flatten(0, 1).double().norm(dim=0)
    norm = wanted.flatten(0, 1).double().norm(dim=0)
    alive = norm > 0
    ratio = off[alive] / norm[alive]
    wrong = ratio > 10 * TOLERANCE
    sure = sure_coordinates(gauge, len(alive))[alive]
    found: dict[str, Any] = {
        "claim": "equal" if equal else "similar",
        "of": "hidden states",
        "tokens": len(ours.logits),
        "difference": functions["difference"],
        "explained": float((1 - ratio.square()).clamp_min(-1).mean()) if alive.any() else 1.0,
        "disagree": share_of(wrong & sure),
        "unsure_disagree": share_of(wrong & ~sure),
        "weights": _cosines(gauge, source, target),
    }
    least = EQUAL_COSINE if equal else LEAST_COSINE
    apart = [kind for kind, cosine in found["weights"].items() if not cosine >= least]
    ends = f"{source.name} and {target.name}"
    if equal and found["disagree"] > 0:
        raise VerificationError(
            f"{ends} compute the same function, so that the gauge should make their hidden states "
            f"equal, but {found['disagree']:.1%} of the coordinates differ: it is wrong there. "
            "Recover it from more text or from weights; --no-verify keeps it all the same.",
            found,
        )
    if apart:
        raise VerificationError(
            f"the gauge does not make the weights of {ends} {found['claim']} in "
            f"{' and '.join(apart)}: their cosine is {found['weights'][apart[0]]:.3f}, at least "
            f"{least:g} was expected. Recover these spaces by other means (--from), or leave them "
            "out; --no-verify keeps it all the same.",
            found,
        )
    if found["explained"] <= 0:
        raise VerificationError(
            f"moved through the gauge, the hidden states of {source.name} say nothing of those of "
            f"{target.name} (share explained {found['explained']:.3f}, more than 0 was expected): "
            "the gauge is wrong. --no-verify keeps it all the same.",
            found,
        )
    return found


def verify_merge(
    merged: Checkpoint,
    inputs: Sequence[Checkpoint],
    sentences: Sequence[str] | None = None,
    *,
    same_shape: bool = True,
) -> dict[str, Any]:
    """Whether a merged model is fit to be kept.

    Where all inputs compute the same function the claim is that the merged model does too, up to
    the rounding of its dtype. Else only that its loss is finite, which is set against its inputs'.

    Returns
    -------
    dict
        ``claim``, ``of``, ``tokens``, ``difference`` (of the logits, from the first input's),
        ``loss`` (nats per token), ``input_losses``, ``above_inputs`` (the merged model's loss minus
        the largest of its inputs').

    Raises
    ------
    VerificationError
        If the claim does not hold.
    """
    todo = sample(inputs[0], sentences)
    seen = [look(one, todo) for one in inputs]
    try:
        found = look(merged, todo)
    except CheckpointError as error:
        raise VerificationError(
            f"its inputs run, and the merged model does not: {error} Nothing was kept.",
            {"claim": "finite"},
        ) from error
    losses = [loss_of(one.logits, todo) for one in seen]
    equal = same_shape and all(
        agreement(seen[0].logits, one.logits)["difference"] <= TOLERANCE for one in seen[1:]
    )
    measured: dict[str, Any] = {
        "claim": "equal" if equal else "finite",
        "of": "logits",
        "tokens": len(found.logits),
        "difference": agreement(seen[0].logits, found.logits)["difference"],
        "loss": loss_of(found.logits, todo),
        "input_losses": losses,
        "above_inputs": loss_of(found.logits, todo) - max(losses),
    }
    if equal and measured["difference"] > MERGE_TOLERANCE:
        raise VerificationError(
            "all models of the recipe compute the same function, so that the merged model should "
            f"too, but its logits differ by {measured['difference']:.2g} of the largest (at most "
            f"{MERGE_TOLERANCE:g} was expected): they are not aligned, or the recipe does not keep "
            "a function that they share (weights that do not add up to 1, a scale). "
            "`signed-align diagnose` says what relates them, and `spaces: all` aligns all of them, "
            "not the residual stream alone; --no-verify keeps it all the same.",
            measured,
        )
    return measured


def loss_of(logits: Tensor, todo: Sequence[Batch]) -> float:
    """Mean cross-entropy of the next token, in nats, of logits in the order :func:`look` has."""
    total, count, start = 0.0, 0, 0
    for batch in todo:
        mask = batch.attention_mask.bool()
        for ids, present in zip(batch.input_ids, mask, strict=True):
            ids = ids[present]
            here = logits[start : start + len(ids)]
            start += len(ids)
            total += float(cross_entropy(here[:-1], ids[1:], reduction="sum"))
            count += len(ids) - 1
    return total / max(count, 1)


def _cosines(gauge: Gauge, source: Checkpoint, target: Checkpoint) -> dict[str, float]:
    """For each kind of space beside the residual stream: the cosine of the weights it moves."""
    products: dict[str, list[float]] = {}
    for name, partner, spaces in matrices(source, target):
        if not spaces or not spaces <= gauge.elements.keys():
            continue
        moved = source.moved(gauge, name).double()
        wanted = target.tensor(partner).double()
        for kind in set(map(kind_of, spaces)):
            sums = products.setdefault(kind, [0.0, 0.0, 0.0])
            for place, (x, y) in enumerate([(moved, wanted), (moved, moved), (wanted, wanted)]):
                sums[place] += float((x * y).sum())
    return {
        kind: xy / max((xx * yy) ** 0.5, 1e-30) for kind, (xy, xx, yy) in sorted(products.items())
    }
