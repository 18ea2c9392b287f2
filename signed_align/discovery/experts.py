"""Experts: modules that hold several as one tensor, with a router that chooses among them."""

from __future__ import annotations

from torch import Tensor

from signed_align.chart import Form, Layout, Part, Site, Templates
from signed_align.discovery import hidden_units
from signed_align.discovery.trial import Trial
from signed_align.groups import Within

UNITS = Site({"mlp": Form(("expert", "unit"), Within.PERMUTATION)})
"""The units inside each expert move; experts stay where they are."""

EXPERTS = Site({"experts": Form(("expert",), Within.PERMUTATION), **UNITS.spaces}, blocks_move=True)
"""Experts move too, as wholes."""


def modules(trial: Trial) -> list[str]:
    """The path of the first module of each pattern that holds experts as tensors.

    They have three axes, as many experts on the first, and the residual stream on another.
    """
    found = []
    for path in trial.first_modules():
        stacks = _stacks(trial, path)
        counts = {len(stack) for stack in stacks}
        touches = any(trial.width in stack.shape[1:] for stack in stacks)
        if touches and len(counts) == 1 and counts != {1}:
            found.append(path)
    return found


def settle(trial: Trial, path: str) -> None:
    """Draft the experts at ``path``, on all layers: with their router, or their units alone."""
    stacks = _stacks(trial, path)
    units = _units(trial, stacks)
    if units is None:
        return
    pattern = trial.pattern(path)
    hypotheses = list(hidden_units.layouts(trial, path, units, experts=True))
    router = _router_labels(trial, path, len(stacks[0]))
    for hypothesis in hypotheses:
        labels = trial.every({**router, **hypothesis})
        if trial.holds(labels, {pattern: UNITS}) and trial.holds(labels, {pattern: EXPERTS}):
            hidden_units.accept_with_signs(trial, pattern, EXPERTS, labels)
            return
    for hypothesis in hypotheses:
        labels = trial.every(hypothesis)
        if trial.holds(labels, {pattern: UNITS}):
            hidden_units.accept_with_signs(trial, pattern, UNITS, labels)
            return


def _stacks(trial: Trial, path: str) -> list[Tensor]:
    """A module's own tensors of several experts."""
    return [
        tensor
        for name, tensor in trial.state.items()
        if name.rpartition(".")[0] == path and tensor.ndim == 3
    ]


def _units(trial: Trial, stacks: list[Tensor]) -> int | None:
    """The number of hidden units in each expert; None if experts have no axis for them."""
    sizes = {size for stack in stacks for size in stack.shape[1:]} - {trial.width}
    return min(sizes, default=None)


def _router_labels(trial: Trial, path: str, experts: int) -> dict[str, Templates]:
    """Labels of axes that count experts, of the module around them and of its other tensors."""
    layout = Layout(trial.pattern(path), (Part(("expert",)),))
    labels = {}
    for name, tensor in trial.inside(path.rpartition(".")[0]).items():
        if tensor.ndim > 2 or experts not in tensor.shape:
            continue
        position = list(tensor.shape).index(experts)
        if trial.draft.axes[name][position] is None:
            labels[name] = trial.with_label(name, position, layout)
    return labels
