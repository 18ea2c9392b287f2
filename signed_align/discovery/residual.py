"""The residual stream: which axes index its coordinates, and which group acts on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from signed_align.chart import RESIDUAL, VOCABULARY, Templates, Tiled
from signed_align.discovery.roles import (
    DENSE_WITHIN_STREAM,
    ELEMENTWISE,
    HYPER_CONNECTION,
    INTERNAL_NORM,
    NOT_RESIDUAL,
    PROJECTOR,
    READERS,
    STATE_SPACE,
    WRITERS,
)
from signed_align.discovery.trial import Trial, text_config
from signed_align.errors import ChartError
from signed_align.gauge import Gauge
from signed_align.groups import Within
from signed_align.signed_permutation import SignedPermutation

GROUPS = (
    Within.SIGNED_PERMUTATION,
    Within.PERMUTATION_AND_GLOBAL_SIGN,
    Within.PERMUTATION,
)
"""What the residual stream may admit, largest first."""

TILES = (2, 3, 4)
"""How many copies of the residual stream an axis may hold."""

Reading: TypeAlias = Mapping[str, Templates]
"""Labels of the residual stream on every tensor, by name."""
Doubt: TypeAlias = Callable[[Trial, Reading], Reading]
"""A change of a reading's labels that a size alone suggested."""


def settle(trial: Trial) -> None:
    """Draft the residual labels and the largest group for which a reading of the weights holds.

    Raises ChartError, with the obstacle as far as it can be seen, if none does.
    """
    first = {name: _axes(trial, name, tensor) for name, tensor in trial.state.items()}
    for group in GROUPS:
        for reading in _readings(trial, first):
            if all(trial.holds(reading, {}, group=group, seed=seed) for seed in (1, 2)):
                trial.draft.axes = dict(reading)
                trial.draft.native_group = group
                return
    raise ChartError(_obstacle(trial, first))


# ---- the first reading: by size and name ---------------------------------------------------------


def _axes(trial: Trial, name: str, tensor: Tensor) -> Templates:
    """The labels of one tensor, as far as sizes and names tell."""
    wide = [size == trial.width for size in tensor.shape]
    if not any(wide) or not tensor.is_floating_point() or NOT_RESIDUAL.fullmatch(name):
        return (None,) * tensor.ndim
    path = name.rpartition(".")[0]
    if sum(wide) == 1 and tensor.numel() == trial.width and not _is_matrix(trial, path, tensor):
        return _vector_axes(trial, name, wide)
    if sum(wide) == 1:
        return _matrix_axes(trial, tensor, wide)
    return _square_axes(trial, path) if tensor.ndim == 2 else _square_expert_axes(name, tensor)


def _is_matrix(trial: Trial, path: str, tensor: Tensor) -> bool:
    return isinstance(trial.modules.get(path), torch.nn.Linear) and tensor.ndim == 2


def _vector_axes(trial: Trial, name: str, wide: list[bool]) -> Templates:
    """A gain, a bias or another vector as wide as the stream: gains do not feel signs."""
    path, _, parameter = name.rpartition(".")
    leaf = path.rpartition(".")[2]
    is_bias = "bias" in parameter
    of_reader = READERS.fullmatch(leaf) and not WRITERS.fullmatch(leaf)
    if INTERNAL_NORM.fullmatch(leaf) or (is_bias and of_reader):
        return (None,) * len(wide)
    is_gain = not is_bias and (
        "norm" in type(trial.modules[path]).__name__.lower()
        or "norm" in leaf.lower()
        or ELEMENTWISE.fullmatch(parameter)
    )
    axis = RESIDUAL.unsigned if is_gain else RESIDUAL
    return tuple(axis if here else None for here in wide)


def _matrix_axes(trial: Trial, tensor: Tensor, wide: list[bool]) -> Templates:
    """A tensor with one axis as wide as the stream; another may run over the vocabulary."""
    vocabulary = getattr(text_config(trial.config), "vocab_size", None)
    return tuple(
        RESIDUAL if here else VOCABULARY if size == vocabulary and tensor.ndim == 2 else None
        for here, size in zip(wide, tensor.shape, strict=True)
    )


def _square_axes(trial: Trial, path: str) -> Templates:
    """A matrix whose two sizes tie: its module's name says whether it reads or writes."""
    module = trial.modules.get(path)
    if isinstance(module, torch.nn.Embedding):
        return (None, RESIDUAL)
    parent, _, leaf = path.rpartition(".")
    parent = parent.rpartition(".")[2]
    if leaf == "receptance" and parent == "feed_forward":
        # gates what the block writes, coordinate by coordinate
        return (RESIDUAL.unsigned, RESIDUAL)
    axes: Templates = (RESIDUAL, RESIDUAL)
    if WRITERS.fullmatch(leaf) or (leaf == "dense" and parent not in DENSE_WITHIN_STREAM):
        axes = (RESIDUAL, None)
    elif READERS.fullmatch(leaf):
        axes = (None, RESIDUAL)
    return axes[::-1] if "Conv1D" in type(module).__name__ else axes


def _square_expert_axes(name: str, tensor: Tensor) -> Templates:
    """Experts of square matrices: the name of the parameter tells whether they read or write."""
    axes = [None] * tensor.ndim
    if "expert" not in name:
        return tuple(axes)
    parameter = name.rpartition(".")[2]
    writes = "down" in parameter or "output" in parameter
    position = tensor.ndim - 2 if writes else tensor.ndim - 1
    return (*axes[:position], RESIDUAL, *axes[position + 1 :])


# ---- further readings: what a size alone suggested is doubted ------------------------------------


def _readings(trial: Trial, first: Reading) -> Iterator[Reading]:
    """The first reading, and what any doubts that apply to it make of it, fewest doubts first."""
    seen: list[Reading] = []
    for count in range(len(DOUBTS) + 1):
        for doubts in itertools.combinations(DOUBTS, count):
            reading = _doubted(trial, first, doubts)
            if reading is not None and reading not in seen:
                seen.append(reading)
                yield reading


def _doubted(trial: Trial, reading: Reading, doubts: tuple[Doubt, ...]) -> Reading | None:
    """A reading after some doubts, one after the other; None if one of them changes nothing."""
    for doubt in doubts:
        changed = doubt(trial, reading)
        if changed == reading:
            return None
        reading = changed
    return reading


def _inner_convolutions(trial: Trial, reading: Reading) -> Reading:
    """Take the channels of convolutions for a block's own, although they are as many."""
    return {
        name: (None,) * len(axes)
        if isinstance(trial.modules.get(name.rpartition(".")[0]), torch.nn.Conv1d)
        else axes
        for name, axes in reading.items()
    }


def _tiled_axes(trial: Trial, reading: Reading) -> Reading:
    """Take axes of two, three or four times the width for copies of the residual stream."""
    return {name: _with_tiles(trial, name, axes) for name, axes in reading.items()}


def _with_tiles(trial: Trial, name: str, axes: Templates) -> Templates:
    """The labels of a vector, or of a matrix that reads, with copies of the stream."""
    path = name.rpartition(".")[0]
    if STATE_SPACE.search(path) or WRITERS.fullmatch(path.rpartition(".")[2]) or not axes:
        return axes
    shape = trial.state[name].shape
    tiles = [trial.width * copies for copies in TILES]
    if axes[-1] is not None or shape[-1] not in tiles:
        return axes
    is_gain = len(shape) == 1 and "bias" not in name
    return (*axes[:-1], Tiled(RESIDUAL.unsigned if is_gain else RESIDUAL))


def _hidden_projections(trial: Trial, reading: Reading) -> Reading:
    """Take all but the last matrix of a projector for steps on the way to the stream."""
    matrices = [
        path
        for path, module in trial.modules.items()
        if PROJECTOR.search(path) and isinstance(module, torch.nn.Linear)
    ]
    last = {path.rpartition(".")[0]: path for path in matrices}
    changed = dict(reading)
    for name, axes in reading.items():
        path = name.rpartition(".")[0]
        parent = path.rpartition(".")[0]
        if parent not in last or not isinstance(trial.modules[path], torch.nn.Linear):
            continue
        if path != last[parent]:
            changed[name] = (None,) * len(axes)
        elif len(axes) == 2:
            changed[name] = (RESIDUAL, None)
    return changed


def _open_squares(_: Trial, reading: Reading) -> Reading:
    """Take square matrices without a role for readers of the residual stream."""
    return {
        name: (None, RESIDUAL) if axes == (RESIDUAL, RESIDUAL) else axes
        for name, axes in reading.items()
    }


DOUBTS: tuple[Doubt, ...] = (
    _inner_convolutions,
    _tiled_axes,
    _hidden_projections,
    _open_squares,
)

# ---- the obstacle --------------------------------------------------------------------------------


def _obstacle(trial: Trial, reading: Reading) -> str:
    """Why no labels hold, as far as it can be seen."""
    table = _fixed_positions(trial)
    if table:
        return (
            f"it adds a fixed table of positions ({trial.pattern(table)}) to the "
            "residual stream, which is none of its weights, so coordinates cannot move"
        )
    mixer = _mixer_of_streams(trial)
    if mixer:
        return (
            "its residual streams run side by side and are mixed "
            f"({trial.pattern(mixer)}), which no label that was tried covers"
        )
    permutation = SignedPermutation.random(trial.width, seed=1, signed=False)
    change = trial.change(reading, Gauge({RESIDUAL.space: permutation}))
    return (
        "no relabelling of its weights by a permutation of the residual coordinates that was "
        f"tried leaves the function of a miniature unchanged (its logits change by {change:.1e})"
    )


def _fixed_positions(trial: Trial) -> str | None:
    """The name of a table as wide as the stream that a module holds and no checkpoint does."""
    for path, module in trial.modules.items():
        own = {**module.__dict__, **dict(module.named_buffers(recurse=False))}
        for name, value in own.items():
            if (
                isinstance(value, Tensor)
                and value.ndim > 1
                and value.shape[-1] == trial.width
                and f"{path}.{name}" not in trial.state
            ):
                return f"{path}.{name}"
    return None


def _mixer_of_streams(trial: Trial) -> str | None:
    """The name of a weight of a hyper-connection that spans several residual streams."""
    for name, tensor in trial.state.items():
        spans = any(size > trial.width and size % trial.width == 0 for size in tensor.shape)
        if spans and HYPER_CONNECTION.search(name):
            return name
    return None
