"""What an artifact does to a model, before and after its move: does its effect arrive?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signed_align.adapters.artifact import Artifact
from signed_align.adapters.sae import activations_for, load_sae, reconstruction_error
from signed_align.adapters.steering import read_vectors, steered
from signed_align.checkpoint import Checkpoint
from signed_align.errors import ArtifactError, SignedAlignError, VerificationError, one_line
from signed_align.fit import at_hand
from signed_align.gauge import Gauge
from signed_align.running import Side, look
from signed_align.verification import sides, verify_sides

LEAST_ARRIVAL = 0.1
"""An effect of which less arrives has not arrived."""

EFFECT_TOLERANCE = 0.01
"""Between models of the same function, an effect differs by no more than this share of its largest
value: the rest is rounding, of logits that are much larger than what the artifact adds to them."""


@dataclass(frozen=True)
class Task:
    """What an artifact is run with: a model, the tokens, and where the artifact is added."""

    side: Side
    hook: str | None

    @property
    def model(self) -> Checkpoint:
        """The model."""
        return self.side.model


@dataclass(frozen=True)
class Effect:
    """What an artifact does: a tensor that no gauge changes, and what of it is rounding."""

    value: Tensor
    rounding: float


Measure = Callable[[Path, Task], Effect]
"""From where an artifact lies, and a task, to what it does."""

ROUNDING = 1e-5
"""Of float32, in the logits of a model, as a share of the largest."""


def adapter_effect(place: Path, task: Task) -> Effect:
    """What a PEFT adapter adds to the logits, of shape (tokens, vocabulary)."""
    from peft import PeftModel

    @contextmanager
    def adapted(model: Any) -> Iterator[Any]:
        try:
            yield PeftModel.from_pretrained(model, str(place)).eval()
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"peft cannot run {place.name}: {one_line(error)}") from error

    return _added_to_logits(task, adapted)


def vector_effect(place: Path, task: Task) -> Effect:
    """What steering vectors add to the logits, of shape (tokens, vocabulary)."""

    @contextmanager
    def with_vectors(model: Any) -> Iterator[Any]:
        chart = task.model.chart
        with steered(model, chart, read_vectors(place, model, chart, hook=task.hook), 1.0):
            yield model

    return _added_to_logits(task, with_vectors)


def dictionary_effect(place: Path, task: Task) -> Effect:
    """The share of the activations' variance that an SAE explains, of shape (1,)."""
    dictionary = load_sae(place)
    activations = activations_for(dictionary, task.model, task.side.todo)
    try:
        error = reconstruction_error(dictionary, activations[0], activations[-1])
    except (RuntimeError, ValueError, TypeError) as problem:
        raise ArtifactError(f"SAELens cannot run {place.name}: {one_line(problem)}") from problem
    return Effect(torch.tensor([1 - error]), ROUNDING)


def _added_to_logits(task: Task, change: Callable[[Any], Any]) -> Effect:
    side, without = task.side, task.side.logits
    with_it = look(side.model, side.todo, change=change).logits[:, side.rows]
    return Effect(with_it - without, ROUNDING * float(without.abs().max()))


def verify_artifacts(
    artifacts: Sequence[tuple[Artifact, Path, Measure | None]],
    gauge: Gauge,
    sentences: Sequence[str],
    hook: str | None,
) -> dict[str, Any]:
    """Run both models of a gauge, with and without what was moved.

    Parameters
    ----------
    artifacts : sequence of (Artifact, Path, callable or None)
        Each artifact, where it lies after the move, and what measures its effect, if anything does.
    gauge : Gauge
        What they were moved through.
    sentences : sequence of str
        What the models are run on.
    hook : str, optional
        Where artifacts are added that do not say it.

    Returns
    -------
    dict
        As :func:`~signed_align.verification.verify_gauge` returns, and ``effects``: for each
        artifact ``arrives``, the share of its effect on the source that it has on the target, or
        ``skipped``.

    Raises
    ------
    VerificationError
        If the gauge does not fit, or an effect that should be equal is not.
    SignedAlignError
        If a model is not at hand.
    """
    source, target = at_hand(gauge.source), at_hand(gauge.target)
    if source is None or target is None:
        end = gauge.source if source is None else gauge.target
        raise ArtifactError(
            f"--verify runs both models of the gauge, and {end.name if end else 'one'} is not at "
            "hand: run it where the model lies under that name, or leave --verify out."
        )
    ours, theirs = sides(source, target, sentences)
    found = verify_sides(gauge, ours, theirs)
    effects = []
    for artifact, place, measure in artifacts:
        entry: dict[str, Any] = {"artifact": artifact.path.name, "kind": artifact.kind}
        effects.append(entry)
        if measure is None:
            entry["skipped"] = "its kind has no effect that can be run by itself"
            continue
        try:
            before = measure(artifact.path, Task(ours, hook))
        except SignedAlignError as error:
            entry["skipped"] = str(error)
            continue
        if not torch.isfinite(before.value).all():
            entry["skipped"] = "its effect is not finite"
            continue
        try:
            after = measure(place, Task(theirs, hook))
            if not torch.isfinite(after.value).all():
                raise ArtifactError("its effect is not finite.")
        except SignedAlignError as error:
            raise VerificationError(
                f"{artifact.path.name} runs on {source.name}, and moved to {target.name} it does "
                f"not: {error} Nothing was kept.",
                {**found, "effects": effects},
            ) from error
        entry |= _arrival(before, after)
        if entry["arrives"] is None:
            continue
        equal = found["claim"] == "equal"
        if (equal and entry["difference"] > EFFECT_TOLERANCE) or entry["arrives"] < LEAST_ARRIVAL:
            expected = "should do the same on both" if equal else "should do much the same on both"
            raise VerificationError(
                f"{artifact.path.name} {expected}, {source.name} and {target.name}, but of its "
                f"effect {entry['arrives']:.1%} arrives (largest difference "
                f"{entry['difference']:.2g}): the gauge is wrong where it lives. Nothing was kept; "
                "leave --verify out to keep it all the same.",
                {**found, "effects": effects},
            )
    return {**found, "effects": effects}


def _arrival(before: Effect, after: Effect) -> dict[str, Any]:
    """How much of an effect arrives: its projection on what it was, and the largest difference.

    ``difference`` is a share of the largest value, what may be rounding taken off. Both are None if
    the effect is no larger than rounding.
    """
    ours, theirs = before.value.double(), after.value.double()
    largest = float(ours.abs().max())
    if largest <= before.rounding:
        return {"arrives": None, "difference": None}
    gap = float((ours - theirs).abs().max()) - before.rounding - after.rounding
    share = float((ours * theirs).sum() / ours.square().sum())
    return {"arrives": share, "difference": max(gap, 0.0) / largest}
