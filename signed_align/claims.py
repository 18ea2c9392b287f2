"""Claims about coordinates: functions from a model to the coordinates that matter at a hook."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from signed_align.activations import (
    Batch,
    batches,
    hook_activations,
    load_model,
    load_tokenizer,
    sentences_of,
)
from signed_align.checkpoint import Checkpoint
from signed_align.errors import ArtifactError
from signed_align.hooks import changing, find_hook
from signed_align.progress import track

PENALTY = 1e-2
"""Of a probe's squared weights, relative to the mean variance of a coordinate."""

NEWTON_STEPS = 50

MOST_WEIGHT = 1e300
"""No weight of a probe is larger; an integer that is cannot be a number of torch."""


@dataclass(frozen=True)
class Coordinates:
    """An ordered set of coordinates, the most important first, each with a sign.

    Parameters
    ----------
    indices : tuple of int
        Counted from 0, none of them twice.
    signs : tuple of int
        1 or -1, one for each index.
    odd : bool
        The signs turn over when the coordinates do, as those of an activation do. Those of a
        product of two such quantities, activation × gradient for one, do not.

    Raises
    ------
    ArtifactError
        If they are none, repeated, or without a sign.
    """

    indices: tuple[int, ...]
    signs: tuple[int, ...]
    odd: bool = True

    def __post_init__(self) -> None:
        if not self.indices or len(set(self.indices)) != len(self.indices):
            raise ArtifactError("a claim names coordinates, at least one and none of them twice.")
        if len(self.signs) != len(self.indices) or not set(self.signs) <= {1, -1}:
            raise ArtifactError("a claim gives every coordinate a sign, 1 or -1.")

    @classmethod
    def top(cls, scores: Tensor, k: int, *, odd: bool = True) -> Coordinates:
        """The ``k`` coordinates of largest \\|score\\|, of scores of shape (d,).

        Raises ArtifactError if there are fewer, or if a tie leaves open which they are.
        """
        if k > len(scores):
            raise ArtifactError(f"the claim is about {k} coordinates, and there are {len(scores)}.")
        sizes, order = scores.abs().sort(descending=True)
        if not torch.isfinite(sizes).all():
            raise ArtifactError("the scores of the coordinates are not finite.")
        if sizes[k - 1] == 0 or (k < len(sizes) and sizes[k - 1] == sizes[k]):
            raise ArtifactError(
                f"which coordinates are the top {k} is open: scores of {float(sizes[k - 1]):.3g} "
                "are tied or zero; use a smaller k."
            )
        chosen = order[:k]
        return cls(tuple(chosen.tolist()), tuple(scores[chosen].sign().int().tolist()), odd)


class Claim(Protocol):
    """A function from a model to coordinates, at a hook."""

    @property
    def hook(self) -> str:
        """Where the coordinates are: ``blocks.3.hook_resid_post``, or ``model.layers.3``."""

    def coordinates(self, checkpoint: Checkpoint) -> Coordinates:
        """What the claim says of a checkpoint."""


@dataclass(frozen=True)
class TopMeanDifference:
    """The top k of \\|mean activation on positive texts − mean on negative texts\\|, over tokens.

    Parameters
    ----------
    hook : str
        Where activations are read.
    k : int
        How many coordinates.
    positive, negative : tuple of str
        The texts.
    """

    claim: ClassVar[str] = "top_mean_difference"
    hook: str
    k: int
    positive: tuple[str, ...]
    negative: tuple[str, ...]

    def __post_init__(self) -> None:
        _require_count(self.k)
        _require_texts(positive=self.positive, negative=self.negative)

    def coordinates(self, checkpoint: Checkpoint) -> Coordinates:
        """The claim, recomputed on a checkpoint."""
        positive, negative = _contrast(self, checkpoint)
        return Coordinates.top(_mean_difference(positive, negative), self.k)


@dataclass(frozen=True)
class TopAttribution:
    """The top k of activation × gradient, summed over the tokens of some texts.

    Its signs are even: where a coordinate turns over, so does its gradient.

    Parameters
    ----------
    hook : str
        Where activations are read.
    k : int
        How many coordinates.
    texts : tuple of str
        What the model runs on.
    logits : tuple of str
        Two words of one token each, such as ``(" great", " terrible")``: what is explained is
        the first one's logit less the second's, behind the last token of each text. Without them
        it is the loss.
    """

    claim: ClassVar[str] = "top_attribution"
    hook: str
    k: int
    texts: tuple[str, ...]
    logits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_count(self.k)
        _require_texts(texts=self.texts)
        if len(self.logits) not in (0, 2):
            raise ArtifactError("the logits of a claim are two words, one less the other.")

    def coordinates(self, checkpoint: Checkpoint) -> Coordinates:
        """The claim, recomputed on a checkpoint."""
        tokenizer = load_tokenizer(checkpoint)
        words = [_only_token(tokenizer, word) for word in self.logits]
        model = load_model(checkpoint, head=True, dtype=torch.float32, device="cpu")
        model.requires_grad_(False)
        hook = find_hook(checkpoint.chart, self.hook)
        caught: list[Tensor] = []

        def leaf(activations: Tensor) -> Tensor:
            caught.append(activations.detach().requires_grad_())
            return caught[-1]

        total: Tensor | None = None
        with changing(model, checkpoint.chart, hook, leaf):
            for batch in track(_all_of(tokenizer, self.texts), "attributing", unit="batch"):
                with torch.enable_grad():
                    value = _explained(model, batch, words)
                    (gradient,) = torch.autograd.grad(value, caught[-1])
                seen = (caught.pop().detach() * gradient)[batch.attention_mask.bool()]
                summed = seen.double().sum(0)
                total = summed if total is None else total + summed
        assert total is not None
        return Coordinates.top(total, self.k, odd=False)


@dataclass(frozen=True)
class TopWeights:
    """The top k of the \\|weights\\| of a linear probe, fitted on a checkpoint's activations.

    Parameters
    ----------
    hook : str
        Where activations are read.
    k : int
        How many coordinates.
    positive, negative : tuple of str
        The texts that the probe tells apart, token by token.
    probe : str
        ``difference_of_means``, ``ridge`` or ``logistic``.
    direction : tuple of float
        The weights as they were published, for the model that is audited. A stored vector does not
        change with a model, so on every twin a probe is fitted anew and compared with it. Without
        one the probe fitted on the model itself stands in its place.
    """

    claim: ClassVar[str] = "top_weights"
    hook: str
    k: int
    positive: tuple[str, ...]
    negative: tuple[str, ...]
    probe: str = "difference_of_means"
    direction: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _require_count(self.k)
        _require_texts(positive=self.positive, negative=self.negative)
        if self.probe not in PROBES:
            raise ArtifactError(f"there is no probe {self.probe!r}; choose from {_all(PROBES)}.")

    def coordinates(self, checkpoint: Checkpoint) -> Coordinates:
        """The claim, recomputed on a checkpoint."""
        return Coordinates.top(PROBES[self.probe](*_contrast(self, checkpoint)), self.k)

    def stated(self, size: int) -> Coordinates | None:
        """The claim as published, where there are ``size`` coordinates; None if it is not given."""
        if not self.direction:
            return None
        if len(self.direction) != size:
            raise ArtifactError(
                f"the direction has {len(self.direction)} weights, and there are {size} "
                f"coordinates at {self.hook!r}."
            )
        return Coordinates.top(torch.tensor(self.direction, dtype=torch.float64), self.k)


CLAIMS: Mapping[str, type[TopMeanDifference] | type[TopAttribution] | type[TopWeights]] = {
    "top_mean_difference": TopMeanDifference,
    "top_attribution": TopAttribution,
    "top_weights": TopWeights,
}
AnyClaim: TypeAlias = Claim | Callable[[Checkpoint], Coordinates]


def load_claim(source: str | Path | Mapping[str, Any]) -> Claim:
    """A built-in claim from a JSON object or a file with one.

    Parameters
    ----------
    source : path or mapping
        ``{"claim": "top_mean_difference", "hook": "blocks.1.hook_resid_post", "k": 10,
        "positive": [...], "negative": {"file": "negative.txt"}}``: the other keys are the
        parameters of the claim. Texts are given in a list or as a UTF-8 file with one a line, a
        direction in a list or as a JSON file with one, its path relative to the claim's own.

    Raises
    ------
    ArtifactError
        If it is not such an object; the message names the key.
    """
    folder = Path()
    if not isinstance(source, Mapping):
        folder, source = Path(source).parent, _json_of(Path(source), "claim")
        if not isinstance(source, Mapping):
            raise ArtifactError("a claim is a JSON object, with the keys claim, hook and k.")
    kind = CLAIMS.get(str(source.get("claim")))
    if kind is None:
        raise ArtifactError(
            f"a claim is one of {_all(CLAIMS)}; 'claim' is {source.get('claim')!r}."
        )
    known = {field.name: field for field in fields(kind)}
    unknown = sorted(set(source) - set(known) - {"claim"})
    if unknown:
        raise ArtifactError(
            f"a claim {kind.claim!r} has no key {unknown[0]!r}; its keys are {_all(known)}."
        )
    missing = [name for name, f in known.items() if f.default is MISSING and name not in source]
    if missing:
        raise ArtifactError(f"the claim {kind.claim!r} lacks the key {missing[0]!r}.")
    values = {name: _READERS[name](name, source[name], folder) for name in known if name in source}
    return kind(**values)


def _json_of(file: Path, what: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"the {what} {file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"the {what} {file} is not JSON: {error}.") from error


def _text(name: str, value: Any, _: Path) -> str:
    if not isinstance(value, str):
        raise ArtifactError(f"the key {name!r} of a claim is a string; got {value!r}.")
    return value


def _count(name: str, value: Any, _: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArtifactError(f"the key {name!r} of a claim is a whole number; got {value!r}.")
    return value


def _texts(name: str, value: Any, folder: Path) -> tuple[str, ...]:
    file = _file(value, folder)
    if file is not None:
        return tuple(sentences_of(file))
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ArtifactError(f'the key {name!r} of a claim is a list of texts or {{"file": PATH}}.')
    return tuple(value)


def _weights(name: str, value: Any, folder: Path) -> tuple[float, ...]:
    file = _file(value, folder)
    value = value if file is None else _json_of(file, name)
    if (
        not isinstance(value, list)
        or not value
        or not all(type(weight) in (int, float) and abs(weight) <= MOST_WEIGHT for weight in value)
    ):
        raise ArtifactError(
            f'the key {name!r} of a claim is a list of numbers, or {{"file": PATH}} of one in JSON.'
        )
    return tuple(map(float, value))


def _file(value: Any, folder: Path) -> Path | None:
    if isinstance(value, Mapping) and set(value) == {"file"} and isinstance(value["file"], str):
        file = folder / value["file"]
        if os.path.exists(file) and not os.path.isfile(file):  # a device has no end
            raise ArtifactError(f"{file}, which the claim names, is not a plain file.")
        return file
    return None


_READERS: Mapping[str, Callable[[str, Any, Path], Any]] = {
    "hook": _text,
    "k": _count,
    "positive": _texts,
    "negative": _texts,
    "texts": _texts,
    "logits": _texts,
    "probe": _text,
    "direction": _weights,
}


def _require_count(k: int) -> None:
    if k < 1:
        raise ArtifactError(f"a claim is about 1 coordinate or more; k is {k}.")


def _require_texts(**texts: Sequence[str]) -> None:
    for name, given in texts.items():
        if isinstance(given, str) or not any(text.strip() for text in given):
            raise ArtifactError(f"the claim has no {name} text: give a list of one or more.")


def _all(names: Mapping[str, Any]) -> str:
    return ", ".join(names)


# ---- what claims are computed from ---------------------------------------------------------------


def _all_of(tokenizer: Any, texts: Sequence[str]) -> list[Batch]:
    return batches(tokenizer, texts, max_tokens=2**62)


def _contrast(claim: TopMeanDifference | TopWeights, checkpoint: Checkpoint) -> list[Tensor]:
    """Activations on positive and on negative texts, each of shape (tokens, d), float64."""
    tokenizer = load_tokenizer(checkpoint)
    hook = find_hook(checkpoint.chart, claim.hook)
    found = []
    for texts in (claim.positive, claim.negative):
        (rows,) = hook_activations(checkpoint, [hook], _all_of(tokenizer, texts))
        found.append(rows.double())
    return found


def _mean_difference(positive: Tensor, negative: Tensor) -> Tensor:
    return positive.mean(0) - negative.mean(0)


def _ridge(positive: Tensor, negative: Tensor) -> Tensor:
    """Least squares on labels ±1. As every penalty on length, this one is the same in any gauge."""
    rows, labels = _centred(positive, negative)
    return _solved(rows.T @ rows + _penalty(rows), rows.T @ (labels - labels.mean()))


def _logistic(positive: Tensor, negative: Tensor) -> Tensor:
    """Penalised logistic regression with an intercept, by Newton's method."""
    rows, labels = _centred(positive, negative)
    design = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], 1)
    penalty = torch.zeros(design.shape[1], design.shape[1], dtype=rows.dtype)
    penalty[:-1, :-1] = _penalty(rows)
    weights = torch.zeros(design.shape[1], dtype=rows.dtype)
    for _ in range(NEWTON_STEPS):
        chance = torch.sigmoid(design @ weights)
        gradient = design.T @ (chance - (labels + 1) / 2) + penalty @ weights
        curvature = design.T @ (design * (chance * (1 - chance))[:, None]) + penalty
        step = _solved(curvature, gradient)
        weights = weights - step
        if step.norm() <= 1e-10 * weights.norm():
            return weights[:-1]
    raise ArtifactError("the logistic probe does not converge on these texts; try ridge.")


def _centred(positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.cat([positive, negative])
    labels = torch.cat([torch.ones(len(positive)), -torch.ones(len(negative))]).to(rows)
    return rows - rows.mean(0), labels


def _solved(matrix: Tensor, values: Tensor) -> Tensor:
    try:
        return torch.linalg.solve(matrix, values)
    except torch.linalg.LinAlgError as error:
        raise ArtifactError("no probe can be fitted on these texts: they are too alike.") from error


def _penalty(rows: Tensor) -> Tensor:
    return torch.eye(rows.shape[1], dtype=rows.dtype) * PENALTY * rows.square().sum(0).mean()


PROBES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "difference_of_means": _mean_difference,
    "ridge": _ridge,
    "logistic": _logistic,
}


def _only_token(tokenizer: Any, word: str) -> int:
    tokens = tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(tokens) != 1:
        raise ArtifactError(
            f"the word {word!r} has {len(tokens)} tokens; the logits of a claim are those of words "
            "of one token."
        )
    return int(tokens[0])


def _explained(model: Any, batch: Batch, words: Sequence[int]) -> Tensor:
    """What gradients are taken of: a logit difference, or the loss, summed over a batch."""
    mask = batch.attention_mask
    logits = model(input_ids=batch.input_ids, attention_mask=mask, use_cache=False).logits.float()
    if words:
        behind = logits[torch.arange(len(logits)), mask.sum(1) - 1]
        return (behind[:, words[0]] - behind[:, words[1]]).sum()
    kept = mask[:, 1:].bool()
    return torch.nn.functional.cross_entropy(
        logits[:, :-1][kept], batch.input_ids[:, 1:][kept], reduction="sum"
    )
