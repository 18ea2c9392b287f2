"""Hidden units: the MLP's units and the channels of state-space layers, and what gates them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from signed_align.chart import RESIDUAL, Form, Layout, Part, Site, Template, Templates, star
from signed_align.discovery.roles import READERS, STATE_SPACE
from signed_align.discovery.trial import Trial
from signed_align.groups import Within

Labels: TypeAlias = Mapping[str, Templates]
"""Labels by tensor name."""

FEWEST = 4
"""An axis with fewer entries is not one of hidden units."""


# ---- where they are ------------------------------------------------------------------------------


def modules(trial: Trial) -> list[tuple[str, int]]:
    """Modules of decoder blocks that write hidden units into the residual stream.

    Returns
    -------
    list of (str, int)
        The path of the first module of each pattern and size, and the number of its units. It is
        the parent of the matrix that writes, or the parent's parent, whichever holds another
        tensor with as many entries, or twice as many, on an axis.
    """
    found: dict[tuple[str, int], tuple[str, int]] = {}
    for name in trial.state:
        units = _units_written(trial, name)
        path = _module_of_units(trial, name, units) if units else None
        if units and path is not None:
            found.setdefault((star(path), units), (path, units))
    return list(found.values())


def _units_written(trial: Trial, name: str) -> int | None:
    """The size of the free axis of a matrix that writes to the residual stream; None if none."""
    axes = trial.draft.axes[name]
    if len(axes) != 2 or axes.count(RESIDUAL) != 1 or axes.count(None) != 1:
        return None
    path, _, leaf = name.rpartition(".")[0].rpartition(".")
    size = trial.state[name].shape[axes.index(None)]
    if size < FEWEST or READERS.fullmatch(leaf) or not re.search(r"\d", path):
        return None
    return int(size)


def _module_of_units(trial: Trial, writer: str, units: int) -> str | None:
    """The module around a writer that holds the units' other tensors, if it is still unlabelled."""
    parent = writer.rpartition(".")[0].rpartition(".")[0]
    for path in (parent, parent.rpartition(".")[0]):
        pattern = trial.pattern(path)
        if pattern in trial.draft.sites or "*" not in pattern:
            continue
        for name, tensor in trial.inside(path).items():
            if name != writer and not {units, 2 * units}.isdisjoint(tensor.shape):
                return path
    return None


# ---- how they lie in tensors ---------------------------------------------------------------------


@dataclass(frozen=True)
class UnitLayout:
    """How hidden units lie on the axes of one module's tensors.

    Parameters
    ----------
    units : int
        Their number: in each expert, if there are some.
    single : Layout
        Of an axis with one entry for each unit.
    double : Layout
        Of an axis with two: that of a gate and what it gates, in one matrix.
    experts : bool
        Whether the first axis of tensors counts experts, each with units of its own.
    """

    units: int
    single: Layout
    double: Layout
    experts: bool = False

    def axes(self, own: Templates, shape: Sequence[int]) -> Templates:
        """The labels of one tensor, given those it has; the same if it has no units."""
        labels = list(own)
        if any(isinstance(axis, Layout) for axis in own) or (self.experts and len(shape) < 2):
            return own
        for position, size in enumerate(shape):
            is_free = labels[position] is None and not (self.experts and position == 0)
            if is_free and size in (self.units, 2 * self.units):
                labels[position] = self.single if size == self.units else self.double
                if self.experts:
                    labels[0] = labels[position]
        return tuple(labels)


def layouts(
    trial: Trial, path: str, units: int, *, experts: bool = False
) -> Iterator[dict[str, Templates]]:
    """Labels of the module at ``path``: gate and units one after the other, then interleaved.

    Only the first if no tensor holds units twice, and none if no tensor has any.
    """
    pattern = trial.pattern(path)
    outer = ("expert",) if experts else ()
    span = 2 if experts else 1
    unit = Part(("unit",))
    single = Layout(pattern, (unit,), outer, span)
    in_halves = Layout(pattern, (unit, unit), outer, span)
    interleaved = Layout(pattern, (Part(()), Part(())), (*outer, "unit"), span)
    for double in (in_halves, interleaved):
        layout = UnitLayout(units, single, double, experts)
        labels = {}
        for name, tensor in trial.inside(path).items():
            own = trial.draft.axes[name]
            axes = layout.axes(own, tensor.shape)
            if axes != own:
                labels[name] = axes
        if labels:
            yield labels
        if not any(double in axes for axes in labels.values()):
            return


# ---- what they admit -----------------------------------------------------------------------------


def settle(trial: Trial, path: str, units: int) -> None:
    """Draft the hidden units of the module at ``path``, on all layers, if a layout holds."""
    pattern = trial.pattern(path)
    kind = "ssm" if STATE_SPACE.search(path) else "mlp"
    if pattern in trial.draft.sites:
        return
    site = Site({kind: Form(("unit",), Within.PERMUTATION)})
    for hypothesis in layouts(trial, path, units):
        labels = trial.every(hypothesis)
        if trial.holds(labels, {pattern: site}):
            accept_with_signs(trial, pattern, site, labels, kind)
            return


def accept_with_signs(
    trial: Trial, pattern: str, site: Site, labels: Labels, kind: str = "mlp"
) -> None:
    """Draft a site of hidden units, with signs where some choice of gates admits them."""
    form = replace(site.spaces[kind], within=Within.SIGNED_PERMUTATION)
    signed = replace(site, spaces={**site.spaces, kind: form})
    for gated in _gatings(labels, kind):
        if trial.holds(gated, {pattern: signed}, seed=4):
            trial.accept(pattern, signed, gated)
            return
    trial.accept(pattern, site, labels)


def _gatings(labels: Labels, kind: str) -> Iterator[Labels]:
    """Which part is the gate, whose sign the activation feels: each half, or each matrix."""
    names = [name for name, axes in labels.items() if any(map(_runs_over_units, axes))]
    if any(_has_halves(axis) for name in names for axis in labels[name]):
        for half in (0, 1):
            yield {
                name: tuple(_with_gate_half(axis, half, kind) for axis in axes)
                for name, axes in labels.items()
            }
        return
    for gate in dict.fromkeys(map(_gate_pattern, names)):
        yield {
            name: _unsigned(axes) if gate in (star(name), star(name).rpartition(".")[0]) else axes
            for name, axes in labels.items()
        }


def _unsigned(axes: Templates) -> Templates:
    return tuple(axis.unsigned if isinstance(axis, Layout) else axis for axis in axes)


def _gate_pattern(name: str) -> str:
    """What may be a gate: a module, or one tensor of a module that holds experts."""
    pattern = star(name)
    return pattern if "experts" in pattern else pattern.rpartition(".")[0]


def _runs_over_units(axis: Template | None) -> bool:
    return isinstance(axis, Layout) and any(
        "unit" in (*axis.outer, *part.factors) for part in axis.parts
    )


def _has_halves(axis: Template | None) -> bool:
    return isinstance(axis, Layout) and len(axis.parts) == 2


def _with_gate_half(axis: Template | None, half: int, kind: str) -> Template | None:
    """An axis of two halves, one of which does not feel the signs of a kind of space."""
    if not isinstance(axis, Layout) or not _has_halves(axis):
        return axis
    parts = list(axis.parts)
    parts[half] = Part(parts[half].factors, frozenset({kind}))
    return replace(axis, parts=tuple(parts))
