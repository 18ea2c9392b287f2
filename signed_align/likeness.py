"""How alike two checkpoints are whatever their coordinates: up to a rotation, and as functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signed_align.activations import Batch, sentences_of, some_tokens, typical
from signed_align.chart import RESIDUAL
from signed_align.checkpoint import Checkpoint
from signed_align.recovery import paired_rows
from signed_align.running import paired_tokens, shared_rows
from signed_align.signed_permutation import SignedPermutation

LEAST_SAMPLE = 4096
ROWS_PER_COORDINATE = 2
"""Token rows that a rotation is fitted on and tested by: 4096, or 2 a coordinate if that is more.

Of these a quarter is held out.
"""

FUNCTION_TOKENS = 256


# ---- up to a rotation ----------------------------------------------------------------------------


@dataclass(frozen=True)
class RotationFit:
    """The orthogonal matrix that fits two sets of paired rows best, judged by rows held out.

    Parameters
    ----------
    fitted_rows, held_out_rows : int
        How many pairs of rows there were for either.
    r2 : float
        How much of the held-out rows it explains, as :meth:`TokenRows.explained` has it. 1 is a
        rotation; strangers are near 0 or below.
    gram_difference : float
        ‖X Xᵀ - Y Yᵀ‖ / √(‖X Xᵀ‖ ‖Y Yᵀ‖) of the held-out rows. A rotation leaves 0.
    """

    fitted_rows: int
    held_out_rows: int
    r2: float
    gram_difference: float

    def to_dict(self) -> dict[str, Any]:
        """The fit as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class TokenRows:
    """Rows of both input embeddings that belong to the same tokens, shape (n, d), float64."""

    source: Tensor
    target: Tensor

    @property
    def held_out(self) -> Tensor:
        """Which rows no rotation is fitted on: every fourth."""
        return torch.arange(len(self.source)) % 4 == 3

    @cached_property
    def rotation(self) -> RotationFit | None:
        """The best rotation; None if no more rows would be fitted than there are coordinates.

        References
        ----------
        :func:`scipy.linalg.orthogonal_procrustes`.
        """
        from scipy.linalg import orthogonal_procrustes

        fitted = ~self.held_out
        count = int(fitted.sum())
        if count <= self.source.shape[1]:
            return None
        rotation, _ = orthogonal_procrustes(
            self.source[fitted].numpy(), self.target[fitted].numpy()
        )
        x, y = self.source[self.held_out], self.target[self.held_out]
        grams = x @ x.T, y @ y.T
        size = math.sqrt(float(grams[0].norm()) * float(grams[1].norm()))
        return RotationFit(
            count,
            len(x),
            self.explained(x @ torch.from_numpy(rotation)),
            float((grams[0] - grams[1]).norm()) / size,
        )

    def explained_by(self, element: SignedPermutation) -> float:
        """How much of the held-out rows is explained when the source's are moved by an element."""
        return self.explained(element.apply(self.source[self.held_out], 1))

    def explained(self, predicted: Tensor) -> float:
        """The R² of the target's held-out rows, shape (n, d): a median over its principal axes.

        Strangers share the few directions in which all vocabularies vary most, how frequent a
        token is and whether it was ever seen; over all axes at once their R² can reach 0.85.
        """
        rows = self.target[self.held_out]
        centred = self.target - self.target.mean(0)
        axes = torch.linalg.eigh(centred.T @ centred).eigenvectors
        error = ((predicted - rows) @ axes).square().sum(0)
        spread = ((rows - rows.mean(0)) @ axes).square().sum(0)
        varies = spread > 0
        if not varies.any():
            return 0.0
        return float((1 - error[varies] / spread[varies]).median())


def embedding_rows(
    source: Checkpoint, target: Checkpoint, moved: Tensor | None
) -> TokenRows | None:
    """A bounded sample of the rows of both input embeddings, massive and empty ones left out.

    ``moved`` pairs rows as :func:`~signed_align.recovery.moved_tokens` does. None if the two have
    no input embedding of one width in common. Unembeddings are not looked at: they are read
    through a norm, whose gains are no part of a rotation.
    """
    chart = source.chart
    names = [
        name
        for name in chart.token_matrices(source.files)
        if chart.module(name.rpartition(".")[0])[0].output == RESIDUAL
    ]
    partners = chart.partners(names, target.files)
    if not partners:
        return None
    name, partner = next(iter(partners.items()))
    total = moved.shape[1] if moved is not None else source.shape(name)[0]
    step = max(1, total // max(LEAST_SAMPLE, ROWS_PER_COORDINATE * chart.width))
    blocks = [(x[::step], y[::step]) for x, y in paired_rows(source, target, name, partner, moved)]
    x, y = (torch.cat(side).double() for side in zip(*blocks, strict=True))
    kept = typical(x, y)
    return TokenRows(x[kept], y[kept])


# ---- as functions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """How alike the logits of two models are on the same tokens.

    Parameters
    ----------
    tokens : int
        How many tokens were run.
    text : str
        What they were.
    r2 : float
        1 minus the squared difference of the logits over their own squares, the mean of each
        token's logits and that of each vocabulary entry taken off: what depends on the context.
        1 is one function; between small models trained from different seeds it is about 0.3.
    same_prediction : float
        The share of tokens after which both think the same token most likely.
    """

    tokens: int
    text: str
    r2: float
    same_prediction: float

    def to_dict(self) -> dict[str, Any]:
        """The agreement as JSON."""
        return asdict(self)


@torch.inference_mode()
def compare_functions(
    source: Checkpoint,
    target: Checkpoint,
    moved: Tensor | None,
    *,
    text: str | Path | Sequence[str] | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Agreement:
    """Run both models on some tokens and compare their logits.

    The tokens are text as the source's tokenizer reads it, or drawn at random if it has none.
    Tokens that only the source has are replaced by one that both have.

    Raises
    ------
    CheckpointError
        If a model cannot be run, or its logits are not finite.
    """
    said, todo = _tokens(source, text, shared_rows(source, target, moved)[0], seed)
    ours, theirs = paired_tokens(source, target, todo, moved, device=device)
    return _agreement(ours.logits, theirs.logits, said)


def _tokens(
    source: Checkpoint, text: str | Path | Sequence[str] | None, rows: Tensor, seed: int
) -> tuple[str, list[Batch]]:
    """What is run, in words, and as the source's tokens."""
    todo, drawn = some_tokens(
        source, sentences_of(text), rows, max_tokens=FUNCTION_TOKENS, seed=seed
    )
    if drawn:
        return "random tokens", todo
    return "the language reference of Python" if text is None else "the given text", todo


def _agreement(ours: Tensor, theirs: Tensor, text: str) -> Agreement:
    same = float((ours.argmax(1) == theirs.argmax(1)).double().mean())
    x, y = _contextual(ours), _contextual(theirs)
    total = _squares(x) + _squares(y)
    r2 = 1 - 2 * _squares(x - y) / total if total > 0 else 0.0
    return Agreement(len(ours), text, r2, same)


def _contextual(logits: Tensor) -> Tensor:
    """Logits less the mean of each token's and that of each vocabulary entry."""
    centred = logits.double() - logits.double().mean(1, keepdim=True)
    return centred - centred.mean(0)


def _squares(tensor: Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))
