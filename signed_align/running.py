"""Running causal language models on a few tokens, two of them on the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from signed_align.activations import Batch, load_model
from signed_align.checkpoint import Checkpoint
from signed_align.errors import CheckpointError, one_line


@dataclass(frozen=True)
class Seen:
    """What a model computes on some tokens.

    ``logits`` has shape (tokens, vocabulary), ``states`` (hidden states, tokens, d).
    """

    logits: Tensor
    states: Tensor


def look(
    checkpoint: Checkpoint,
    todo: Sequence[Batch],
    *,
    change: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
    device: str = "cpu",
) -> Seen:
    """Run a causal language model in float32, as it is or as ``change`` makes it.

    Raises CheckpointError if it cannot be run, or if its logits are not finite: then nothing can
    be compared.
    """
    named = [str(name) for name in checkpoint.settings.get("architectures") or ()]
    if any("Classification" in name for name in named):
        raise CheckpointError(
            f"{checkpoint.name} is a classifier ({named[0]}); only causal language models are run."
        )
    network = load_model(checkpoint, head=True, dtype=torch.float32, device=device)
    logits, states = [], []
    with torch.inference_mode(), change(network) as model:
        for batch in todo:
            mask = batch.attention_mask.bool()
            try:
                found = model(
                    input_ids=batch.input_ids.to(device),
                    attention_mask=batch.attention_mask.to(device),
                    output_hidden_states=True,
                    use_cache=False,
                )
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                raise CheckpointError(
                    f"{checkpoint.name} does not run: {one_line(error)}"
                ) from error
            here = slice(-mask.shape[1], None)  # a soft prompt stands in front
            logits.append(found.logits[:, here].cpu()[mask].float())
            inside = [state[:, here].cpu()[mask].float() for state in found.hidden_states]
            states.append(torch.stack(inside))
    seen = Seen(torch.cat(logits), torch.cat(states, dim=1))
    if not torch.isfinite(seen.logits).all():
        raise CheckpointError(f"the logits of {checkpoint.name} are not finite.")
    return seen


@dataclass(frozen=True, eq=False)
class Side:
    """One of two models: the tokens that it runs on, and which logits both have, in one order."""

    model: Checkpoint
    todo: Sequence[Batch]
    rows: Tensor
    device: str = "cpu"

    @cached_property
    def seen(self) -> Seen:
        """What the model computes, run once."""
        return look(self.model, self.todo, device=self.device)

    @property
    def logits(self) -> Tensor:
        """Its logits of the tokens that both models have, shape (tokens, shared)."""
        return self.seen.logits[:, self.rows]


def paired_tokens(
    source: Checkpoint,
    target: Checkpoint,
    todo: Sequence[Batch],
    moved: Tensor | None,
    *,
    device: str = "cpu",
) -> tuple[Side, Side]:
    """The same tokens for both models, whose tokenizers may number them differently.

    ``todo`` is as the source numbers them, and ``moved`` as
    :func:`~signed_align.recovery.moved_tokens` has it. Tokens that only the source has are replaced
    by one that both have.
    """
    shared = shared_rows(source, target, moved)
    size = 1 + max(int(batch.input_ids.max()) for batch in todo)
    tables = _translation(shared, size)
    ours, theirs = (
        Side(model, [Batch(table[b.input_ids], b.attention_mask) for b in todo], rows, device)
        for model, table, rows in zip((source, target), tables, shared, strict=True)
    )
    return ours, theirs


def shared_rows(
    source: Checkpoint, target: Checkpoint, moved: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The rows of the tokens that both have, in both."""
    counts = [
        min(end.shape(name)[0] for name in end.chart.token_matrices(end.files))
        for end in (source, target)
    ]
    if moved is None:
        same = torch.arange(min(counts))
        return same, same
    present = (moved[0] < counts[0]) & (moved[1] < counts[1])
    return moved[0, present], moved[1, present]


def _translation(shared: tuple[Tensor, Tensor], size: int) -> tuple[Tensor, Tensor]:
    """For both models, by a token of the source below ``size``, the token to run instead."""
    ours, theirs = shared
    within = ours < size
    tables = torch.full((size,), int(ours[0])), torch.full((size,), int(theirs[0]))
    for table, rows in zip(tables, shared, strict=True):
        table[ours[within]] = rows[within]
    return tables
