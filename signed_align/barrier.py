"""Loss along the straight line between two checkpoints, and its peak above the chord."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signed_align.activations import Batch, batches, load_model, load_tokenizer, sentences_of
from signed_align.checkpoint import Checkpoint
from signed_align.drawing import figure_in
from signed_align.errors import CheckpointError, SignedAlignError, SignedAlignWarning
from signed_align.gauge import Gauge
from signed_align.labels import transport_all
from signed_align.progress import track
from signed_align.reliability import warn_of_verdict

DEFAULT_POINTS = 11
DEFAULT_TOKENS = 4096

# What a config may say differently without changing what the weights compute.
SILENT_SETTINGS = {
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


@dataclass(frozen=True)
class LossPath:
    """Mean loss in nats per token at points along θ(α) = (1 - α) θ_A + α θ_B."""

    alphas: list[float]
    losses: list[float]

    @property
    def chord(self) -> list[float]:
        """The losses of the two ends, interpolated."""
        start, end = self.losses[0], self.losses[-1]
        return [(1 - alpha) * start + alpha * end for alpha in self.alphas]

    @property
    def barrier(self) -> float:
        """The peak of the loss above the chord, in nats per token; never below 0."""
        return max(loss - chord for loss, chord in zip(self.losses, self.chord, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """The path as JSON: ``alphas``, ``losses``, ``chord`` and ``barrier_nats``."""
        return {**asdict(self), "chord": self.chord, "barrier_nats": self.barrier}


@dataclass
class Barrier:
    """Losses of one architecture on one text; the model is loaded once and its weights swapped.

    Parameters
    ----------
    start : Checkpoint
        The end of the path at α = 0.
    sentences : sequence of str
        The text the loss is measured on.
    max_tokens : int
        How much of the text to use.
    dtype, device
        What the model runs in and on.
    """

    start: Checkpoint
    sentences: Sequence[str]
    max_tokens: int = DEFAULT_TOKENS
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        self._batches = [
            batch.to(self.device)
            for batch in batches(
                load_tokenizer(self.start), self.sentences, max_tokens=self.max_tokens
            )
        ]
        self._model = load_model(self.start, head=True, dtype=self.dtype, device=self.device)
        self._start_weights = {
            name: parameter.detach().clone() for name, parameter in self._model.named_parameters()
        }

    def path(self, end: Checkpoint, gauge: Gauge | None = None, points: int = 5) -> LossPath:
        """The loss along the line to ``end``, of which ``gauge`` (from start to end) is undone.

        Raises CheckpointError if ``end`` does not have the start's weights.
        """
        weights = self._weights_of(end, gauge.inverse() if gauge else None)
        alphas = torch.linspace(0, 1, points, dtype=torch.float64).tolist()
        losses = []
        for alpha in track(alphas, "measuring the path", unit="point"):
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():
                    parameter.copy_(torch.lerp(self._start_weights[name], weights[name], alpha))
            losses.append(self._loss())
        return LossPath(alphas, losses)

    def loss(self, checkpoint: Checkpoint) -> float:
        """Mean loss of a checkpoint in nats per token."""
        weights = self._weights_of(checkpoint, None)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])
        return self._loss()

    def _weights_of(self, checkpoint: Checkpoint, gauge: Gauge | None) -> dict[str, Tensor]:
        model = load_model(checkpoint, head=True, dtype=self.dtype, device=self.device)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        if shapes != {name: tensor.shape for name, tensor in self._start_weights.items()}:
            raise CheckpointError(
                f"{checkpoint.name} does not have the same weights as {self.start.name}, so there "
                "is no straight line between them."
            )
        if gauge is not None:
            chart = checkpoint.chart
            weights = transport_all(
                weights, chart.axes, gauge, lambda name: chart.origin(name, gauge)
            )
        return weights

    @torch.inference_mode()
    def _loss(self) -> float:
        total, count = 0.0, 0
        for batch in self._batches:
            loss, tokens = _token_loss(self._model, batch)
            total, count = total + loss, count + tokens
        if not count:
            raise SignedAlignError("the text has no token to predict: its lines are too short.")
        if not math.isfinite(total):
            raise SignedAlignError("the loss is not finite; check the weights of both checkpoints.")
        return total / count


def measure_barrier(
    a: str | Path,
    b: str | Path,
    *,
    gauge: Gauge | None = None,
    text: str | Path | Sequence[str] | None = None,
    points: int = DEFAULT_POINTS,
    max_tokens: int = DEFAULT_TOKENS,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, LossPath]:
    """The loss on the straight path from ``a`` to ``b``, and on the path after alignment.

    Parameters
    ----------
    a, b : str or Path
        Checkpoints with the same weights: local directories or Hub ids.
    gauge : Gauge, optional
        Leads from ``a`` to ``b``. With it there is a second path, to ``b`` in ``a``'s coordinates.
    text : path or sequence of str, optional
        What the loss is measured on; by default English prose that ships with Python.
    points : int
        Points on each path, both ends included.
    max_tokens : int
        How much of the text to use.
    dtype, device
        What the model runs in and on.

    Returns
    -------
    dict of str to LossPath
        ``straight``, and ``aligned`` if there is a gauge.

    Raises
    ------
    SignedAlignError
        If the gauge does not lead from ``a`` to ``b``, or there is no straight line between them.
    """
    if points < 3:
        raise SignedAlignError(f"a path needs 3 points or more to have a peak; got {points}.")
    start, end = Checkpoint.open(a), Checkpoint.open(b)
    if gauge is not None:
        warn_of_verdict(gauge)
        gauge.require_source(start.identity)
        gauge.require_target(end.identity)
        start.chart.require_native(gauge)
    differing = sorted(
        key
        for key in (start.settings.keys() | end.settings.keys()) - SILENT_SETTINGS
        if start.settings.get(key) != end.settings.get(key)
    )
    if differing:
        warnings.warn(
            f"the configs of {a} and {b} differ in {', '.join(differing)}; the whole path is run "
            f"with that of {a}.",
            SignedAlignWarning,
            stacklevel=2,
        )
    barrier = Barrier(start, sentences_of(text), max_tokens, dtype, device)
    paths = {"straight": barrier.path(end, points=points)}
    if gauge is not None:
        paths["aligned"] = barrier.path(end, gauge, points=points)
    return paths


def _token_loss(model: Any, batch: Batch) -> tuple[float, int]:
    logits = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
    ).logits[:, :-1]
    targets = batch.input_ids[:, 1:]
    mask = batch.attention_mask[:, 1:].bool()
    loss = torch.nn.functional.cross_entropy(logits[mask].float(), targets[mask], reduction="sum")
    return float(loss), int(mask.sum())


def require_plottable(file: Path) -> None:
    """Raise SignedAlignError unless the file's suffix is an image format that can be drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    formats = FigureCanvasAgg.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in formats:
        raise SignedAlignError(
            f"{file} does not end in an image format; use one of .png, .svg, .pdf."
        )


def plot_paths(paths: dict[str, LossPath], file: str | Path, title: str = "") -> None:
    """Draw loss against α for each path, with its chord, to an image file.

    The format follows the file's suffix (png, svg, pdf).
    """
    draw_paths({name: path.to_dict() for name, path in paths.items()}, file, title)


def draw_paths(paths: Mapping[str, Mapping[str, Any]], file: str | Path, title: str = "") -> None:
    """As :func:`plot_paths`, of paths as :meth:`LossPath.to_dict` writes them."""
    with figure_in(file, title) as figure:
        axis = figure.subplots()
        for name, path in paths.items():
            alphas, label = path["alphas"], f"{name}: {path['barrier_nats']:.3f}"
            (line,) = axis.plot(alphas, path["losses"], marker="o", markersize=4, label=label)
            colour = line.get_color()
            axis.plot(alphas, path["chord"], linestyle=":", linewidth=1, color=colour)
        axis.set_xlabel("α  (0: A, 1: B)")
        axis.set_ylabel("loss, nats per token")
        axis.plot([], [], linestyle=":", color="grey", label="chords")
        figure.legend(loc="outside right upper", title="peak above chord, nats", frameon=False)
