"""Parallel transport: gauges between neighbours on a path of checkpoints, composed along it.

Training moves coordinates apart: the ends of a long run, or of two runs of one base, can resemble
each other too little to be matched, while every checkpoint still resembles the one before it.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from signed_align.activations import (
    Batch,
    hidden_states,
    load_model,
    load_tokenizer,
    sentences_of,
    typical,
)
from signed_align.chart import RESIDUAL
from signed_align.checkpoint import INCOMPLETE_NAME, Checkpoint
from signed_align.drawing import figure_in
from signed_align.errors import CheckpointError, GaugeError, SignedAlignWarning
from signed_align.gauge import WEAK_MARGIN, Gauge, margin_quantiles
from signed_align.matching import Correlation
from signed_align.progress import track
from signed_align.provenance import text_hash
from signed_align.recovery import (
    calibration,
    common_chart,
    evidence_from_weights,
    evidence_of,
)
from signed_align.reliability import Verdict, judge_path, require_reliable
from signed_align.signed_permutation import SignedPermutation

LOST_MARGIN = 0.0
"""Below this, on some step, another candidate was better than the partner a coordinate got."""

IN_MEMORY_BYTES = 256 * 2**20
"""Activations of one checkpoint that are larger than this wait in a temporary file."""

Truth = Gauge | Literal["identity"]
Pair = tuple[int, int]
"""Two positions on a path, the earlier first."""


@dataclass(frozen=True)
class Step:
    """One step of a path: from a checkpoint to its neighbour.

    Parameters
    ----------
    gauge : Gauge
        Leads from the step's checkpoint to the next one; its margins are the step's own.
    composed : Gauge
        Leads from the path's start to where the step ends. A composed margin is the smallest
        along the coordinate's path.
    lost : int
        How many coordinates have a composed margin below the threshold.
    accuracy : mapping of str to float
        ``permutation_accuracy`` and ``sign_accuracy`` of ``composed``, if the truth is known here.
    """

    gauge: Gauge
    composed: Gauge
    lost: int
    accuracy: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The step as JSON: its ends, its margins, and what has been lost so far."""
        moved = self.gauge.element(RESIDUAL.space).displaced
        return {
            "source": _name(self.gauge, "source"),
            "target": _name(self.gauge, "target"),
            **_margins(self.gauge),
            "moved_fraction": float(moved.double().mean()),
            "composed_margin": _margins(self.composed)["margin"],
            "lost": self.lost,
            "samples": self.gauge.provenance["samples"],
            "left_out": self.gauge.provenance["left_out"],
            **self.accuracy,
        }


@dataclass(frozen=True)
class Trajectory:
    """A gauge transported along a path of checkpoints, and what to compare it with.

    Parameters
    ----------
    gauge : Gauge
        Leads from the path's first checkpoint to its last, on the residual stream. Its margins are
        the smallest along each coordinate's path; ``provenance["lost"]`` lists the target
        coordinates whose margin is below ``lost_below``.
    steps : tuple of Step
        One for each pair of neighbours.
    endpoint : Gauge
        The baseline that matches the first checkpoint with the last directly.
    via_base : Gauge, optional
        The baseline of two matches: first checkpoint with base, base with last.
    holonomy : Gauge, optional
        Leads from the base along the first run backwards to the path's first checkpoint, directly
        to its last, and home to the base. Where there are no errors it is the identity. A
        coordinate comes back to itself exactly if ``endpoint`` and ``gauge`` agree on it.
    accuracy : mapping of str to mapping
        ``permutation_accuracy`` and ``sign_accuracy`` of ``transport``, ``endpoint`` and
        ``via_base``; empty without a truth.
    lost_below : float
        The threshold of lost coordinates.
    base : int, optional
        The position of the base on the path.
    """

    gauge: Gauge
    steps: tuple[Step, ...]
    endpoint: Gauge
    via_base: Gauge | None
    holonomy: Gauge | None
    accuracy: Mapping[str, Mapping[str, float]]
    lost_below: float
    base: int | None = None

    @property
    def size(self) -> int:
        """The number of residual coordinates d."""
        return self.gauge.element(RESIDUAL.space).size

    @property
    def lost(self) -> list[int]:
        """The target coordinates that were lost on the way, in ascending order."""
        return _lost(self.gauge, self.lost_below)

    @property
    def not_returned(self) -> list[int] | None:
        """The base's coordinates that do not come back to themselves with sign +1."""
        if self.holonomy is None:
            return None
        return _indices(self.holonomy.element(RESIDUAL.space).displaced)

    @property
    def baselines(self) -> dict[str, Gauge]:
        """The gauges to compare with, by name."""
        found = {"endpoint": self.endpoint, "via_base": self.via_base}
        return {name: gauge for name, gauge in found.items() if gauge is not None}

    def to_dict(self) -> dict[str, Any]:
        """The trajectory as JSON: size, base, steps, lost, baselines, holonomy, accuracy."""
        away = self.not_returned
        return {
            "size": self.size,
            "base": self.base,
            "steps": [step.to_dict() for step in self.steps],
            "lost": self.lost,
            "lost_below": self.lost_below,
            "baselines": {
                name: {**_margins(gauge), **self.accuracy.get(name, {})}
                for name, gauge in self.baselines.items()
            },
            "holonomy": None
            if away is None
            else {"returned_fraction": 1 - len(away) / self.size, "not_returned": away},
            "accuracy": {name: dict(scores) for name, scores in self.accuracy.items()},
        }


def transport_along(
    path: Sequence[str | Path],
    *,
    base: int | None = None,
    method: Literal["activations", "weights"] = "activations",
    text: str | Path | Sequence[str] | None = None,
    truth: Truth | None = None,
    lost_below: float = LOST_MARGIN,
    max_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    accept_weak: bool = False,
) -> Trajectory:
    """Recover the gauge of the residual stream by composing gauges between neighbours.

    One model is loaded at a time and run on the text once. Four checkpoints' activations are kept
    at most: those of the path's first, of the base, of the last neighbour, and the current ones.

    Parameters
    ----------
    path : sequence of str or Path
        Checkpoints of one architecture, in order: local directories or Hub ids.
    base : int, optional
        Where on the path the checkpoint lies that both ends were trained from. With it there are
        the baseline via the base, and the holonomy.
    method : {"activations", "weights"}
        Run the models on text, or compare embeddings and unembeddings.
    text : path or sequence of str, optional
        Calibration text, as in :func:`~signed_align.recovery.recover`; by default English prose
        that ships with Python.
    truth : Gauge or "identity", optional
        The true gauge from the first checkpoint to the last. All gauges are scored against it;
        if it is the identity, so is every step, since it holds all along the path.
    lost_below : float
        A coordinate whose margin falls below this on the way is lost: it keeps its place, and is
        listed. Below 0, the default, another candidate was better than the partner it got.
    max_tokens : int, optional
        Calibration tokens to use at most; 8 per residual coordinate by default.
    dtype, device
        What the models run in and on.
    seed : int
        Chooses the sentences, if there are more than are used.
    accept_weak : bool
        Return a gauge with a step whose evidence does not speak for one.

    Returns
    -------
    Trajectory
        The composed gauge, its steps and its baselines.

    Raises
    ------
    UnreliableGaugeError
        If on some step too few coordinates have a partner with a clear margin.
    SignedAlignError
        If there is no path, the checkpoints do not belong to one architecture or have different
        tokenizers, or activations are not finite.

    Examples
    --------
    >>> path, base = path_of_runs("run-a", "run-b", "base")  # doctest: +SKIP
    >>> transport_along(path, base=base, text="text.txt").lost  # doctest: +SKIP
    [17, 301]
    """
    if len(path) < 2:
        raise GaugeError(f"a path needs two checkpoints or more; got {len(path)}.")
    last = len(path) - 1
    if base is not None and not 0 < base < last:
        raise GaugeError(f"the base must lie between the ends of the path, not at position {base}.")
    if not -1 <= lost_below <= 1:
        raise GaugeError(f"coordinates are lost below a margin from -1 to 1; got {lost_below}.")
    if method == "weights" and (text is not None or max_tokens is not None):
        raise GaugeError("text and tokens have no part in recovering a gauge from weights.")
    checkpoints = [Checkpoint.open(model) for model in path]
    for other in checkpoints[1:]:
        common_chart(checkpoints[0], other)
    true_element = _true_element(truth, checkpoints[0], checkpoints[-1])
    pairs = {(here, here + 1) for here in range(last)} | {(0, last)}
    if base is not None:
        pairs |= {(0, base), (base, last)}
    read: dict[str, Any] = {}
    if method == "weights":
        _require_tokenizers_everywhere_or_nowhere(checkpoints)
        gauges = {
            (i, j): evidence_from_weights(checkpoints[i], checkpoints[j]).gauge()
            for i, j in track(sorted(pairs), "matching checkpoints", unit="pair")
        }
    else:
        sentences = sentences_of(text)
        read = {"text_hash": text_hash(sentences)}
        todo = _calibration(checkpoints, sentences, max_tokens, seed)
        gauges = _from_activations(checkpoints, pairs, todo, dtype, device)

    steps = _steps(
        [gauges[here, here + 1] for here in range(last)],
        lost_below,
        true_element if truth == "identity" else None,
    )
    endpoint, via_base, holonomy = gauges[0, last], None, None
    if base is not None:
        via_base = gauges[0, base].then(gauges[base, last])
        to_base = steps[base - 1].composed
        from_base = reduce(Gauge.then, (step.gauge for step in steps[base:]))
        holonomy = to_base.inverse().then(endpoint).then(from_base.inverse())
    gauge = _with_provenance(steps, method, lost_below, read)
    if not accept_weak:
        for step in steps:
            require_reliable(step.gauge)
    found = {"transport": gauge, "endpoint": endpoint, "via_base": via_base}
    result = Trajectory(
        gauge=gauge,
        steps=steps,
        endpoint=endpoint,
        via_base=via_base,
        holonomy=holonomy,
        accuracy={name: _score(one, true_element) for name, one in found.items() if one is not None}
        if true_element is not None
        else {},
        lost_below=lost_below,
        base=base,
    )
    if result.lost:
        warnings.warn(
            f"{len(result.lost)} of {result.size} coordinates were lost on the way: their margin "
            f"fell below {lost_below:g}; the gauge's provenance lists them.",
            SignedAlignWarning,
            stacklevel=2,
        )
    return result


def path_of_runs(run_a: str | Path, run_b: str | Path, base: str | Path) -> tuple[list[str], int]:
    """The path from the last checkpoint of one run through the base to the last of another.

    Parameters
    ----------
    run_a, run_b : str or Path
        Output directories of transformers' Trainer. Their ``checkpoint-N`` directories are taken
        in the order of N, and nothing else.
    base : str or Path
        The checkpoint that both were trained from.

    Returns
    -------
    tuple of list of str and int
        The path A_n, …, A_1, base, B_1, …, B_n, and the position of the base on it.

    Raises
    ------
    CheckpointError
        If a run has no checkpoints, or one that was not written to its end.
    """
    back = _checkpoints_of(Path(run_a))[::-1]
    return [*back, str(base), *_checkpoints_of(Path(run_b))], len(back)


def plot_trajectory(trajectory: Trajectory, file: str | Path, title: str = "") -> None:
    """Draw the share of coordinates not lost, and the accuracies, over steps to an image file.

    The format follows the file's suffix (png, svg, pdf). Accuracy is that of signs, which counts
    only where the permutation is right; where it is known at the end alone, it is a point.
    """
    draw_trajectory(trajectory.to_dict(), file, title)


def draw_trajectory(data: Mapping[str, Any], file: str | Path, title: str = "") -> None:
    """As :func:`plot_trajectory`, of a trajectory as :meth:`Trajectory.to_dict` writes it."""
    steps, last = data["steps"], len(data["steps"])
    kept = [1.0, *(1 - step["lost"] / data["size"] for step in steps)]
    scores = {name: one["sign_accuracy"] for name, one in data["accuracy"].items()}
    known = {n: step["sign_accuracy"] for n, step in enumerate(steps, 1) if "sign_accuracy" in step}
    with figure_in(file, title) as figure:
        axis = figure.subplots()
        label = f"not lost: {kept[-1]:.3f}"
        axis.plot(range(last + 1), kept, marker="o", markersize=4, label=label)
        if scores:
            end = scores.pop("transport")
            known = known or {last: end}
            label = f"transport right: {end:.3f}"
            axis.plot(list(known), list(known.values()), marker="s", markersize=4, label=label)
        for (name, value), colour in zip(scores.items(), ("C2", "C3"), strict=False):
            label = f"{name.replace('_', ' ')} right: {value:.3f}"
            axis.axhline(value, linestyle=":", linewidth=1, color=colour, label=label)
        if data["base"] is not None:
            axis.axvline(data["base"], linestyle="--", linewidth=1, color="grey", label="base")
        axis.set_xlabel("steps along the path")
        axis.set_ylabel("share of coordinates")
        axis.set_ylim(-0.02, 1.02)
        axis.xaxis.get_major_locator().set_params(integer=True)
        figure.legend(loc="outside right upper", frameon=False)


# ---- the path ------------------------------------------------------------------------------------


def _checkpoints_of(run: Path) -> list[str]:
    if not run.is_dir():
        raise CheckpointError(f"{run} is not a directory that transformers' Trainer wrote to.")
    steps = {
        int(found[1]): directory
        for directory in run.iterdir()
        if (found := re.fullmatch(r"checkpoint-(\d+)", directory.name)) and directory.is_dir()
    }
    if not steps:
        raise CheckpointError(
            f"{run} has no checkpoints: an output directory of transformers' Trainer has "
            "directories checkpoint-N, one for each step N that was saved."
        )
    for directory in steps.values():
        if (directory / INCOMPLETE_NAME).exists():
            raise CheckpointError(f"{directory} was not written to its end; remove it.")
    return [str(steps[step]) for step in sorted(steps)]


def _true_element(
    truth: Truth | None, first: Checkpoint, last: Checkpoint
) -> SignedPermutation | None:
    if truth is None:
        return None
    if not isinstance(truth, Gauge):
        return SignedPermutation.identity(first.chart.width)
    if RESIDUAL.space not in truth.elements:
        raise GaugeError("the true gauge does not move the residual stream.")
    truth.require_source(first.identity)
    truth.require_target(last.identity)
    return truth.element(RESIDUAL.space)


# ---- tokenizers ----------------------------------------------------------------------------------


def _tokenizer(checkpoint: Checkpoint) -> Any | None:
    """The checkpoint's tokenizer; None if it has none."""
    try:
        return load_tokenizer(checkpoint)
    except CheckpointError:
        return None


def _shared_tokenizer(checkpoints: Sequence[Checkpoint]) -> Any:
    """The tokenizer of all; Trainer does not always save one, so some may have none."""
    owner: Checkpoint | None = None
    shared: Any = None
    for checkpoint in checkpoints:
        tokenizer = _tokenizer(checkpoint)
        if tokenizer is None:
            continue
        if owner is None:
            owner, shared = checkpoint, tokenizer
        elif tokenizer.get_vocab() != shared.get_vocab():
            raise CheckpointError(
                f"{owner.name} and {checkpoint.name} have different tokenizers, so they cannot be "
                "run on the same tokens; transport from weights instead."
            )
    if owner is None:
        raise CheckpointError(
            f"none of the {len(checkpoints)} checkpoints has a tokenizer; copy its files into one "
            "of them, or transport from weights."
        )
    return shared


def _require_tokenizers_everywhere_or_nowhere(checkpoints: Sequence[Checkpoint]) -> None:
    """Rows of token matrices belong together by token, or by number where there are no tokens."""
    known = {_tokenizer(checkpoint) is not None: checkpoint for checkpoint in checkpoints}
    if len(known) == 2:
        raise CheckpointError(
            f"{known[True].name} has a tokenizer and {known[False].name} has none, so it is not "
            "known which rows of their embeddings belong together; copy the tokenizer's files to "
            "every checkpoint."
        )


def _calibration(
    checkpoints: Sequence[Checkpoint], sentences: Sequence[str], max_tokens: int | None, seed: int
) -> list[Batch]:
    tokenizer, width = _shared_tokenizer(checkpoints), checkpoints[0].chart.width
    return calibration(tokenizer, sentences, width, max_tokens, seed)


# ---- activations, each checkpoint's once ---------------------------------------------------------


@dataclass(frozen=True)
class _Activations:
    """A checkpoint's residual stream on the text: per batch a tensor (states, tokens, d)."""

    batches: list[Tensor]


def _from_activations(
    checkpoints: Sequence[Checkpoint],
    pairs: set[Pair],
    todo: Sequence[Batch],
    dtype: torch.dtype,
    device: str,
) -> dict[Pair, Gauge]:
    """Match each pair as soon as its later checkpoint has run; keep only what is needed again."""
    held: dict[int, _Activations] = {}
    gauges: dict[Pair, Gauge] = {}
    for here, checkpoint in enumerate(track(checkpoints, "transporting", unit="checkpoint")):
        held[here] = _activations(checkpoint, todo, dtype, device)
        for there in [place for place in held if (place, here) in pairs]:
            gauges[there, here] = _match(
                checkpoints[there], held[there], checkpoint, held[here], todo
            )
        needed = {i for i, j in pairs if i <= here < j}
        held = {place: activations for place, activations in held.items() if place in needed}
    return gauges


def _match(
    source: Checkpoint,
    seen_by_source: _Activations,
    target: Checkpoint,
    seen_by_target: _Activations,
    todo: Sequence[Batch],
) -> Gauge:
    """The gauge between two checkpoints; samples massive or zero in either are left out of both."""
    correlation = Correlation(source.chart.width)
    seen = 0
    for in_source, in_target in zip(seen_by_source.batches, seen_by_target.batches, strict=True):
        for state, (x, y) in enumerate(zip(in_source, in_target, strict=True)):
            kept = typical(x, y)
            seen += len(kept)
            correlation.add(x[kept], y[kept], stream=str(state))
    tokens = sum(batch.tokens for batch in todo)
    return evidence_of(
        correlation,
        source.chart,
        source,
        target,
        {"method": "activations", "tokens": tokens, "left_out": seen - correlation.samples},
        min(tokens, correlation.samples),
    ).gauge()


def _activations(
    checkpoint: Checkpoint, todo: Sequence[Batch], dtype: torch.dtype, device: str
) -> _Activations:
    width = checkpoint.chart.width
    blocks = int(checkpoint.config.get_text_config().num_hidden_layers)
    size = 4 * width * (blocks + 1) * sum(batch.tokens for batch in todo)
    running = _hidden_states(checkpoint, todo, dtype, device)
    if size <= IN_MEMORY_BYTES:
        return _Activations(list(running))
    try:
        return _Activations(_in_a_file(running))
    except OSError as error:
        raise CheckpointError(
            f"the activations of {checkpoint.name} ({size / 2**30:.1f} GiB) cannot be written to "
            f"{tempfile.gettempdir()}: {error.strerror}; set TMPDIR, or use fewer tokens."
        ) from error


@torch.inference_mode()
def _hidden_states(
    checkpoint: Checkpoint, todo: Sequence[Batch], dtype: torch.dtype, device: str
) -> Iterator[Tensor]:
    """Per batch the hidden states (states, tokens, d), padding removed, float32, on the CPU."""
    model = load_model(checkpoint, head=False, dtype=dtype, device=device)
    for batch in todo:
        batch = batch.to(device)
        rows = torch.stack(hidden_states(model, batch))
        if not torch.isfinite(rows).all():
            raise GaugeError(
                f"the activations of {checkpoint.name} hold NaN or infinite values; check the "
                "checkpoint, or run it in float32."
            )
        yield rows


def _in_a_file(blocks: Iterable[Tensor]) -> list[Tensor]:
    """The same tensors, mapped from a file without a name, which goes when they are let go."""
    shapes = []
    with tempfile.TemporaryFile() as file:
        for block in blocks:
            file.write(block.numpy().data)
            shapes.append(block.shape)
        file.flush()
        # copy on write: writable, as torch wants it, and nothing ever writes
        flat = torch.from_numpy(np.memmap(file, dtype=np.float32, mode="c"))
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


# ---- composing and scoring -----------------------------------------------------------------------


def _steps(
    gauges: Sequence[Gauge], lost_below: float, truth: SignedPermutation | None
) -> tuple[Step, ...]:
    """Compose neighbours' gauges; ``truth`` is what holds all along the path."""
    steps = []
    composed: Gauge | None = None
    for gauge in gauges:
        composed = gauge if composed is None else composed.then(gauge)
        composed = replace(composed, provenance={"method": "transport"})
        accuracy = {} if truth is None else _score(composed, truth)
        steps.append(Step(gauge, composed, len(_lost(composed, lost_below)), accuracy))
    return tuple(steps)


def _with_provenance(
    steps: Sequence[Step], method: str, lost_below: float, read: Mapping[str, Any]
) -> Gauge:
    composed = steps[-1].composed
    common = {
        key: value
        for key, value in steps[0].gauge.provenance.items()
        if key not in ("method", "left_out", "samples", "verdict")
    }
    verdicts = [verdict for step in steps if (verdict := Verdict.of(step.gauge)) is not None]
    verdict = judge_path(
        verdicts, composed.element(RESIDUAL.space), composed.margins[RESIDUAL.space]
    )
    return replace(
        composed,
        provenance={
            "method": "transport",
            "from": method,
            **common,
            **read,
            "verdict": verdict.to_dict(),
            "lost_below": lost_below,
            "lost": _lost(composed, lost_below),
            "path": [_name(steps[0].gauge, "source"), *(_name(s.gauge, "target") for s in steps)],
            **{
                count: [step.gauge.provenance[count] for step in steps]
                for count in ("samples", "left_out")
            },
        },
    )


def _score(gauge: Gauge, truth: SignedPermutation) -> dict[str, float]:
    return gauge.element(RESIDUAL.space).agreement(truth)


def _lost(gauge: Gauge, below: float) -> list[int]:
    return _indices(gauge.margins[RESIDUAL.space] < below)


def _indices(mask: Tensor) -> list[int]:
    return [int(index) for index in mask.nonzero().flatten()]


def _margins(gauge: Gauge) -> dict[str, Any]:
    margin = gauge.margins[RESIDUAL.space]
    return {
        "margin": margin_quantiles(margin),
        "weak_fraction": float((margin < WEAK_MARGIN).double().mean()),
    }


def _name(gauge: Gauge, end: Literal["source", "target"]) -> str:
    identity = gauge.source if end == "source" else gauge.target
    assert identity is not None
    return identity.name
