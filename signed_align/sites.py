"""Recovering the spaces inside MLPs, experts and attention, once the residual frame is aligned.

What two checkpoints' sites have in common is put as evidence for every axis: how alike source
position i and target position j are, by the weights that run along it or by its activations.
:func:`~signed_align.site_matching.match_site` then finds the native element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from signed_align.activations import Batch, load_model, typical
from signed_align.chart import Chart, Layout, Template
from signed_align.checkpoint import Checkpoint
from signed_align.groups import Group
from signed_align.labels import Axes, Label
from signed_align.matching import Correlation
from signed_align.progress import track

CORRELATION_BYTES = 2 * 2**30
"""Correlations held at one time while models run; beyond it the text is run through again."""


@dataclass
class SiteTensors:
    """One site of a checkpoint: its spaces' groups, and the tensors that have them on an axis."""

    path: str
    groups: dict[str, Group] = field(default_factory=dict)
    tensors: dict[str, Axes] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        """Whether hidden units lie inside experts."""
        return any(
            space.startswith("mlp:") and group.blocks > 1 for space, group in self.groups.items()
        )


def sites_of(checkpoint: Checkpoint, kinds: Iterable[str]) -> dict[str, SiteTensors]:
    """The sites of a checkpoint that have a space of one of ``kinds``, by path."""
    wanted = set(kinds)
    found: dict[str, SiteTensors] = {}
    for name in checkpoint.files:
        axes = checkpoint.chart.axes(name, checkpoint.shape(name))
        for label in axes:
            for space in label.spaces if label is not None else ():
                kind, _, path = space.partition(":")
                if kind in wanted and path:
                    site = found.setdefault(path, SiteTensors(path))
                    site.groups[space] = checkpoint.spaces[space].group
                    site.tensors[name] = axes
    return found


# ---- evidence from activations -------------------------------------------------------------------


@dataclass
class _Tap:
    """A place in the model where an axis of a site can be seen: a module's input or output."""

    module: str
    is_input: bool
    label: Label
    space_path: str
    correlation: Correlation

    @property
    def bytes(self) -> int:
        return 8 * self.correlation.size**2


def evidence_by_activations(
    source: Checkpoint,
    target: Checkpoint,
    sites: Mapping[str, SiteTensors],
    todo: Sequence[Batch],
    *,
    dtype: torch.dtype,
    device: str,
) -> dict[str, list[tuple[Label, Tensor]]]:
    """Run both models on text and correlate what goes through the sites.

    Returns, by site path, pairs of a label and a correlation matrix over the axis it labels. A
    site that no module shows (experts stored as one tensor) has none.
    """
    models = [load_model(end, head=False, dtype=dtype, device=device) for end in (source, target)]
    taps = list(_taps(models[0], source.chart, sites))
    evidence: dict[str, list[tuple[Label, Tensor]]] = {}
    while taps:
        batch_of_taps: list[_Tap] = []
        while taps and (
            not batch_of_taps
            or sum(tap.bytes for tap in batch_of_taps) + taps[0].bytes <= CORRELATION_BYTES
        ):
            batch_of_taps.append(taps.pop(0))
        _run(models, batch_of_taps, todo, device)
        for tap in batch_of_taps:
            matrix = tap.correlation.matrix().float()
            evidence.setdefault(tap.space_path, []).append((tap.label, matrix))
    return evidence


def _taps(model: Any, chart: Chart, sites: Mapping[str, SiteTensors]) -> Iterator[_Tap]:
    for path, _ in model.named_modules():
        try:
            module, numbers = chart.module(path)
        except Exception:  # a module without labels
            continue
        for is_input, template in ((True, module.input), (False, module.output)):
            if not isinstance(template, Layout) or (not is_input and not _needed(template)):
                continue
            size = _axis_size(model.get_submodule(path), is_input)
            if size is None:
                continue
            (label,) = chart.bind(path, (template,), (size,), numbers)
            if label is None:
                continue
            space_path = label.spaces[0].partition(":")[2] if label.spaces else ""
            if space_path in sites and not sites[space_path].has_experts:
                yield _Tap(path, is_input, label, space_path, Correlation(size))


def _needed(template: Template) -> bool:
    """Whether outputs along the axis show what no input does: queries and keys."""
    return isinstance(template, Layout) and any(
        {"key", "nope", "expert"} & {*template.outer, *part.factors} for part in template.parts
    )


def _axis_size(module: Any, is_input: bool) -> int | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    transposed = "Conv1D" in type(module).__name__
    return int(weight.shape[1 if is_input != transposed else 0])


@torch.inference_mode()
def _run(models: Sequence[Any], taps: Sequence[_Tap], todo: Sequence[Batch], device: str) -> None:
    with _listening(models[0], taps) as ours, _listening(models[1], taps) as theirs:
        for batch in track(todo, "running both models", unit="batch"):
            batch = batch.to(device)
            for model in models:
                model(
                    input_ids=batch.input_ids,
                    attention_mask=batch.attention_mask,
                    use_cache=False,
                )
            mask = batch.attention_mask.bool()
            for index, tap in enumerate(taps):
                x, y = (_rows(heard.pop(index), mask) for heard in (ours, theirs))
                kept = typical(x, y)
                tap.correlation.add(x[kept], y[kept])


def _rows(activations: Tensor, mask: Tensor) -> Tensor:
    # routers see (tokens, n)
    kept = mask if activations.ndim == 3 else mask.reshape(-1)
    return activations[kept].float().cpu()


@contextmanager
def _listening(model: Any, taps: Sequence[_Tap]) -> Iterator[dict[int, Tensor]]:
    heard: dict[int, Tensor] = {}
    handles = []
    for index, tap in enumerate(taps):
        module = model.get_submodule(tap.module)
        if tap.is_input:
            handles.append(
                module.register_forward_pre_hook(
                    lambda _module, inputs, index=index: heard.__setitem__(index, inputs[0])
                )
            )
        else:
            handles.append(
                module.register_forward_hook(
                    lambda _module, _inputs, output, index=index: heard.__setitem__(index, output)
                )
            )
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()
