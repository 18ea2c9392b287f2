"""Attention: how heads, and the coordinates in them, lie in projections, and how they may move."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor

from signed_align.chart import RESIDUAL, Form, Layout, Part, Site, Templates
from signed_align.discovery.roles import (
    FUSED_QKV,
    GATES,
    KEY,
    KEY_NORM,
    LATENT_KEY_VALUE,
    LATENT_QUERY,
    OUTPUT,
    QUERY,
    QUERY_NORM,
    VALUE,
)
from signed_align.discovery.trial import Trial
from signed_align.groups import Within

Labels: TypeAlias = dict[str, Templates]
"""Labels by tensor name."""

FACTORS = {
    "heads": ("kv", "query"),
    "values": ("kv", "value"),
    "keys": ("kv", "key"),
    "nopes": ("kv", "nope"),
}
"""The spaces of attention: key-value heads, with the queries or coordinates of each."""

MOVES: Mapping[str, tuple[tuple[Within, str], ...]] = {
    "values": ((Within.SIGNED_PERMUTATION, ""), (Within.PERMUTATION, "")),
    "keys": (
        (Within.SIGNED_PERMUTATION, ""),
        (Within.PLANE_SIGNS, "half"),
        (Within.PLANE_SIGNS, "interleaved"),
        (Within.BLOCK_SIGN, ""),
    ),
    "nopes": ((Within.SIGNED_PERMUTATION, ""),),
}
"""How coordinates inside a head may move, and how planes are paired, largest group first."""


def modules(trial: Trial) -> list[str]:
    """The path of the first attention module of each pattern."""
    children: dict[str, set[str]] = {}
    for path in trial.modules:
        parent, _, leaf = path.rpartition(".")
        children.setdefault(parent, set()).add(leaf)
    return [path for path in trial.first_modules() if _attends(children.get(path, set()))]


def _attends(children: set[str]) -> bool:
    """Whether a module with these children is one of attention."""
    separate = all(not children.isdisjoint(names) for names in (QUERY, KEY, VALUE))
    return separate or not children.isdisjoint(FUSED_QKV) or LATENT_KEY_VALUE in children


def settle(trial: Trial, path: str) -> None:
    """Draft the attention module at ``path``, on all layers, by the first layout that holds."""
    pattern = trial.pattern(path)
    for hypothesis in _AttentionLayouts(trial, path).hypotheses():
        labels = trial.every(hypothesis)
        site = _site(trial, pattern, labels)
        if site is not None and trial.holds(labels, {pattern: site}, seed=3):
            trial.accept(pattern, site, labels)
            return


def _site(trial: Trial, pattern: str, labels: Labels) -> Site | None:
    """The spaces that labels index, each moving as freely as holds; None if nothing moves."""
    used = _factors_of(labels)
    forms = {
        kind: Form(factors, Within.PERMUTATION if kind == "heads" else Within.NOTHING)
        for kind, factors in FACTORS.items()
        if set(factors) <= used
    }
    values = _freest(trial, pattern, "values", labels, forms)
    forms.update(values)
    heads_move = trial.holds(labels, {pattern: Site(forms, blocks_move=True)})
    if not values and not heads_move:
        return None
    for kind in ("keys", "nopes"):
        forms.update(_freest(trial, pattern, kind, labels, forms))
    if not heads_move:
        forms.pop("heads", None)
    return Site(forms, blocks_move=heads_move) if forms else None


def _factors_of(labels: Labels) -> set[str]:
    """The factors that the layouts among labels run over."""
    return {
        factor
        for axes in labels.values()
        for axis in axes
        if isinstance(axis, Layout)
        for part in axis.parts
        for factor in (*axis.outer, *part.factors)
    }


def _freest(
    trial: Trial, pattern: str, kind: str, labels: Labels, forms: Mapping[str, Form]
) -> dict[str, Form]:
    """The form of a kind of space with the largest group that holds, by kind; empty if none."""
    if kind in forms:
        for within, pairing in MOVES[kind]:
            form = Form(FACTORS[kind], within, pairing)
            if trial.holds(labels, {pattern: Site({kind: form})}):
                return {kind: form}
    return {}


class _AttentionLayouts:
    """How the tensors of one attention module may be laid out."""

    def __init__(self, trial: Trial, path: str) -> None:
        self.trial = trial
        self.path = path
        self.pattern = trial.pattern(path)
        self.query = self._layout(("kv", "query", "key"))
        self.gated_query = self._layout(("key",), ("value",), outer=("kv", "query"))
        self.key = self._layout(("kv", "key"))
        self.value = self._layout(("kv", "value"))
        self.output = self._layout(("kv", "query", "value"))
        self.heads = self._layout(("kv", "query"))

    def _layout(self, *parts: tuple[str, ...], outer: tuple[str, ...] = ()) -> Layout:
        return Layout(self.pattern, tuple(map(Part, parts)), outer)

    def hypotheses(self) -> Iterator[Labels]:
        """Labels of the module's tensors, likeliest first; none if it writes to no residual axis.

        Multi-head latent attention, separate projections and fused ones have layouts of their own.
        """
        trial, path = self.trial, self.path
        output = trial.tensor(path, OUTPUT) or trial.tensor(path.rpartition(".")[0], OUTPUT)
        if output is None or RESIDUAL not in trial.draft.axes[output]:
            return
        query, key, value = (trial.tensor(path, names) for names in (QUERY, KEY, VALUE))
        fused = trial.tensor(path, FUSED_QKV)
        latent = trial.tensor(path, (LATENT_KEY_VALUE,))
        if latent:
            yield from self._latent(latent, output)
        elif query and key and value:
            for queries in (self.query, self.gated_query):
                projections = {query: queries, key: self.key, value: self.value}
                yield self._labels(projections, output)
        elif fused:
            for layout in self._fused_layouts():
                yield self._labels({fused: layout}, output)

    def _fused_layouts(self) -> Iterator[Layout]:
        """Queries, keys and values one after the other; head by head; and with gates behind."""
        by_role = (("kv", "query", "key"), ("kv", "key"), ("kv", "value"))
        yield self._layout(*by_role)
        yield self._layout(("query", "key"), ("key",), ("value",), outer=("kv",))
        yield self._layout(*by_role, ("kv", "query", "value"))

    def _latent(self, key_value: str, output: str) -> Iterator[Labels]:
        """Rotated and other coordinates side by side in each query head, in either order."""
        query = self.trial.tensor(self.path, LATENT_QUERY)
        if query is None:
            return
        for order in ((("nope",), ("rope",)), (("rope",), ("nope",))):
            places = (
                (query, 0, self._layout(*order, outer=("kv", "query"))),
                (key_value, 0, self._layout(("nope",), ("value",), outer=("kv",))),
                (output, 1, self.output),
            )
            yield {
                name: self.trial.with_label(name, position, layout)
                for name, position, layout in places
                if self.trial.draft.axes[name][position] is None
            }

    def _labels(self, projections: Mapping[str, Layout], output: str) -> Labels:
        """Labels of projections and output, and of what follows from them in the module."""
        labels: Labels = {}
        for weight, layout in {**projections, output: self.output}.items():
            axes = self.trial.on_free_axis(weight, layout)
            if axes:
                labels[weight] = axes
        for weight, layout in projections.items():
            bias = weight.rpartition(".")[0] + ".bias"
            if bias in self.trial.state:
                labels[bias] = (layout,)
        for name, tensor in self.trial.inside(self.path).items():
            if name not in labels:
                axes = self._norm_axes(name, tensor) or self._gate_axes(name, tensor)
                if axes:
                    labels[name] = axes
        return labels

    def _norm_axes(self, name: str, tensor: Tensor) -> Templates | None:
        """Labels of a norm of queries, keys or outputs, over one head or over all; None if none."""
        leaf = self._leaf(name)
        of_query, of_key = QUERY_NORM.search(leaf), KEY_NORM.search(leaf)
        if tensor.ndim == 1 and (of_query or of_key or "norm" in leaf):
            layout = self.query if of_query else self.key if of_key else self.output
            if len(tensor) == self._size(layout):
                return (layout.unsigned if name.endswith("weight") else layout,)
        sizes = (self._size(self.query), self._size(self.key))
        if tensor.ndim == 2 and "norm" in leaf and tensor.numel() in sizes:
            layout = self.query if of_query else self.key
            by_head = replace(layout.unsigned, span=2)
            return (by_head, by_head)
        return None

    def _gate_axes(self, name: str, tensor: Tensor) -> Templates | None:
        """Labels of a gate of the output, or of a tensor with a value per head; None if none."""
        outputs, heads = self._size(self.output), self._size(self.heads)
        if self._leaf(name) in GATES and outputs in tensor.shape:
            return self.trial.on_axes_of_size(name, outputs, self.output.unsigned)
        if heads in tensor.shape and heads > 1:
            return self.trial.on_axes_of_size(name, heads, self.heads)
        return None

    def _leaf(self, name: str) -> str:
        """The path of a tensor's module inside the attention module."""
        return name.removeprefix(f"{self.path}.").rpartition(".")[0]

    def _size(self, layout: Layout) -> int:
        """The size of an axis, by what the config counts first; 0 if it does not count that."""
        counts = self.trial.dimensions.candidates[0]
        return sum(
            math.prod(counts.get(factor, 0) for factor in (*layout.outer, *part.factors))
            for part in layout.parts
        )
