"""What an artifact does to a model, before and after its move: does its effect arrive?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signed_align.activations import Batch
from signed_align.adapters.artifact import Artifact
from signed_align.adapters.sae import activations_for, load_sae, reconstruction_error
from signed_align.adapters.steering import read_vectors, steered
from signed_align.checkpoint import Checkpoint
from signed_align.errors import ArtifactError, SignedAlignError, VerificationError, one_line
from signed_align.gauge import Gauge
from signed_align.verification import agreement, at_hand, look, sample, verify_gauge

EFFECT_TOLERANCE = 0.01
"""Between models of the same function, an effect differs by no more than this share of its largest
value: the rest is rounding, of logits that are much larger than what the artifact adds to them."""


@dataclass(frozen=True)
class Task:
    """What an artifact is run with: a model, the tokens, and where the artifact is added."""

    model: Checkpoint
    todo: Sequence[Batch]
    hook: str | None


Effect = Callable[[Path, Task], Tensor]
"""From where an artifact lies, and a task, to what it does: a tensor that no gauge changes."""


def adapter_effect(place: Path, task: Task) -> Tensor:
    """What a PEFT adapter adds to the logits, of shape (tokens, vocabulary)."""
    from peft import PeftModel

    @contextmanager
    def adapted(model: Any) -> Iterator[Any]:
        try:
            yield PeftModel.from_pretrained(model, str(place)).eval()
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"peft cannot run {place.name}: {one_line(error)}") from error

    return _added_to_logits(task, adapted)


def vector_effect(place: Path, task: Task) -> Tensor:
    """What steering vectors add to the logits, of shape (tokens, vocabulary)."""

    @contextmanager
    def with_vectors(model: Any) -> Iterator[Any]:
        chart = task.model.chart
        with steered(model, chart, read_vectors(place, model, chart, hook=task.hook), 1.0):
            yield model

    return _added_to_logits(task, with_vectors)


def dictionary_effect(place: Path, task: Task) -> Tensor:
    """The share of the activations' variance that an SAE explains, of shape (1,)."""
    dictionary = load_sae(place)
    activations = activations_for(dictionary, task.model, task.todo)
    error = reconstruction_error(dictionary, activations[0], activations[-1])
    return torch.tensor([1 - error])


def _added_to_logits(task: Task, change: Callable[[Any], Any]) -> Tensor:
    with_it = look(task.model, task.todo, change=change).logits
    return with_it - look(task.model, task.todo).logits


def verify_artifacts(
    artifacts: Sequence[tuple[Artifact, Path, Effect | None]],
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
    found = verify_gauge(gauge, source, target, sentences)
    todo = sample(source, sentences)
    effects = []
    for artifact, place, measure in artifacts:
        entry: dict[str, Any] = {"artifact": artifact.path.name, "kind": artifact.kind}
        effects.append(entry)
        if measure is None:
            entry["skipped"] = "its kind has no effect that can be run by itself"
            continue
        try:
            before = measure(artifact.path, Task(source, todo, hook))
            after = measure(place, Task(target, todo, hook))
        except VerificationError:
            raise
        except SignedAlignError as error:
            entry["skipped"] = str(error)
            continue
        entry |= _arrival(before, after)
        if found["claim"] == "equal" and entry["difference"] > EFFECT_TOLERANCE:
            raise VerificationError(
                f"{source.name} and {target.name} compute the same function, so that "
                f"{artifact.path.name} should do the same on both, but its effect differs by "
                f"{entry['difference']:.2g} of its largest ({entry['arrives']:.1%} of it arrives); "
                "nothing was kept.",
                {**found, "effects": effects},
            )
    return {**found, "effects": effects}


def _arrival(before: Tensor, after: Tensor) -> dict[str, float]:
    """How much of an effect arrives: its projection on what it was, and the largest difference."""
    power = float(before.double().square().sum())
    if power == 0:
        return {"arrives": 1.0 if not after.any() else 0.0, **agreement(before, after)}
    share = float((before.double() * after.double()).sum()) / power
    return {"arrives": share, **agreement(before, after)}
