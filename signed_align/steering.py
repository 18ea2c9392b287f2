"""Steering: vectors added to a model's activations while it runs, and what that changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signed_align.activations import load_model, load_tokenizer, padded
from signed_align.chart import Chart
from signed_align.checkpoint import Checkpoint
from signed_align.errors import SignedAlignError
from signed_align.hooks import Hook, changing, find_hook, listening

BATCH_SIZE = 16


@contextmanager
def steered(
    model: Any, chart: Chart, vectors: Mapping[str, Tensor], strength: float = 1.0
) -> Iterator[None]:
    """Add vectors at hooks of a model, at every position, while it runs.

    Parameters
    ----------
    model : PreTrainedModel
        From transformers.
    chart : Chart
        Its chart.
    vectors : mapping of str to Tensor, shape (d,)
        By the name of the hook: ``blocks.3.hook_resid_post``, or ``model.layers.3``.
    strength : float
        What they are multiplied by.

    Raises
    ------
    ChartError
        If a hook is not known, cannot be changed, or has another size.
    """
    with ExitStack() as stack:
        for name, vector in vectors.items():
            hook = find_hook(chart, name)
            hook.label(chart, vector.shape[-1])
            stack.enter_context(changing(model, chart, hook, partial(_plus, strength * vector)))
        yield


def _plus(vector: Tensor, activations: Tensor) -> Tensor:
    return activations + vector.to(activations)


def log_odds(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    positive: Sequence[str],
    negative: Sequence[str],
) -> Tensor:
    """The log odds of positive over negative continuations, in nats, of shape (prompts,), float64.

    ``log Σ p(positive | prompt) − log Σ p(negative | prompt)``, where the probability of a
    continuation is that of all its tokens.
    """
    continuations = [*positive, *negative]
    pairs = [(prompt, text) for prompt in prompts for text in continuations]
    scores = continuation_scores(model, tokenizer, pairs).reshape(len(prompts), -1)
    chosen, other = scores.split([len(positive), len(negative)], 1)
    return chosen.logsumexp(1) - other.logsumexp(1)


@torch.inference_mode()
def continuation_scores(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> Tensor:
    """The log probability, in nats, of each continuation given its prompt.

    Parameters
    ----------
    model, tokenizer
        From transformers.
    pairs : sequence of (str, str)
        Prompts and continuations, which are tokenised together.

    Returns
    -------
    Tensor, shape (pairs,), float64

    Raises
    ------
    SignedAlignError
        If a prompt or a continuation has no token.
    """
    encoded = [_split_tokens(tokenizer, *pair) for pair in pairs]
    scores = []
    for first in range(0, len(encoded), BATCH_SIZE):
        rows = encoded[first : first + BATCH_SIZE]
        batch = padded([tokens for tokens, _ in rows]).to(model.device)
        ids = batch.input_ids
        logits = model(input_ids=ids, attention_mask=batch.attention_mask, use_cache=False).logits
        logs = logits[:, :-1].double().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        for row, (tokens, start) in zip(logs.cpu(), rows, strict=True):
            scores.append(row[start - 1 : len(tokens) - 1].sum())
    return torch.stack(scores)


def _split_tokens(tokenizer: Any, prompt: str, continuation: str) -> tuple[list[int], int]:
    """The tokens of both together, and how many of them the continuation does not change."""
    alone = list(tokenizer(prompt)["input_ids"])
    tokens = list(tokenizer(prompt + continuation)["input_ids"])
    shared = 0
    for one, other in zip(alone, tokens, strict=False):
        if one != other:
            break
        shared += 1
    if not shared or shared == len(tokens):
        raise SignedAlignError(
            f"the prompt {prompt!r} and its continuation {continuation!r} must each have a token."
        )
    return tokens, shared


def contrast_direction(
    model: str | Path,
    positive: Sequence[str],
    negative: Sequence[str],
    hook: str,
    *,
    normalise: bool = False,
    device: str = "cpu",
) -> Tensor:
    """A steering vector: the mean activation at the last token of some texts, less that of others.

    Parameters
    ----------
    model : str or Path
        A local directory or a Hub id.
    positive, negative : sequence of str
        The texts.
    hook : str
        Where activations are read: ``blocks.3.hook_resid_post``, or ``model.layers.3``.
    normalise : bool
        Give it the length 1.
    device : str
        Where to run.

    Returns
    -------
    Tensor, shape (d,), float32

    Raises
    ------
    SignedAlignError
        If the model does not load, the hook cannot be read, or a text has no token.
    """
    checkpoint = Checkpoint.open(model)
    network = load_model(checkpoint, head=True, dtype=torch.float32, device=device)
    tokenizer = load_tokenizer(checkpoint)
    place = find_hook(checkpoint.chart, hook)
    direction = _mean_at_last_token(
        network, tokenizer, checkpoint.chart, place, positive
    ) - _mean_at_last_token(network, tokenizer, checkpoint.chart, place, negative)
    return direction / direction.norm() if normalise else direction


@torch.inference_mode()
def _mean_at_last_token(
    model: Any, tokenizer: Any, chart: Chart, hook: Hook, texts: Sequence[str]
) -> Tensor:
    rows = [list(tokenizer(text)["input_ids"]) for text in texts]
    if not rows or not all(rows):
        raise SignedAlignError("every text must have a token, and there must be one.")
    found = []
    with listening(model, chart, hook) as caught:
        for first in range(0, len(rows), BATCH_SIZE):
            batch = padded(rows[first : first + BATCH_SIZE]).to(model.device)
            model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
            last = batch.attention_mask.sum(1) - 1
            found.append(caught.pop()[torch.arange(len(last)), last].float().cpu())
    return torch.cat(found).mean(0)
