"""Assembly: a finished draft as a chart, by patterns of names instead of the names of one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from signed_align.chart import RESIDUAL, Chart, ModuleLabel, Templates, star
from signed_align.discovery.roles import BLOCKS
from signed_align.discovery.trial import Trial


def chart(trial: Trial) -> Chart:
    """The chart of the miniature's class, bound to the miniature."""
    buffers = dict(trial.bench.model.named_buffers())
    return Chart(
        model_type=trial.config.model_type,
        norm=_norm(trial),
        native_group=trial.draft.native_group,
        modules=_module_labels(trial),
        sites=dict(trial.draft.sites),
        prefixes=trial.prefixes,
        blocks=_blocks(trial),
        dimensions=trial.dimensions,
        buffers=frozenset(trial.pattern(name) for name in buffers if name not in trial.state),
    )


def _module_labels(trial: Trial) -> dict[str, ModuleLabel]:
    """The labels of all modules by pattern."""
    alternatives: dict[str, set[Templates]] = {}
    for name, axes in trial.draft.axes.items():
        alternatives.setdefault(trial.pattern(name), set()).add(axes)
    parameters: dict[str, dict[str, Templates]] = {}
    for name, axes in trial.draft.axes.items():
        pattern = trial.pattern(name)
        # numbers that tell apart what is labelled differently are no layer numbers
        key = pattern if len(alternatives[pattern]) == 1 else trial.bare(name)
        path, _, parameter = key.rpartition(".")
        parameters.setdefault(path, {})[parameter] = axes
    modules: dict[str, Any] = {}
    for path, module in trial.modules.items():
        bare = trial.bare(path)
        modules.setdefault(bare, module)
        modules.setdefault(star(bare), module)
    return {path: _module_label(modules.get(path), own) for path, own in parameters.items()}


def _module_label(module: Any, parameters: Mapping[str, Templates]) -> ModuleLabel:
    """The labels of a module's parameters, and of what goes in and comes out of it."""
    weight = parameters.get("weight", ())
    if len(weight) == 1:
        return ModuleLabel(weight[0], weight[0], parameters)
    if len(weight) != 2:
        return ModuleLabel(None, None, parameters)
    first, second = weight
    if isinstance(module, torch.nn.Embedding) or "Conv1D" in type(module).__name__:
        return ModuleLabel(first, second, parameters)
    return ModuleLabel(second, first, parameters)


def _norm(trial: Trial) -> str:
    """The kinds of norms whose gains are residual, in words."""
    kinds = {
        "LayerNorm" if "LayerNorm" in kind and "RMS" not in kind else "RMSNorm"
        for path, module in trial.modules.items()
        for kind in [type(module).__name__]
        if "norm" in kind.lower() and _is_residual_norm(trial, path)
    }
    return " and ".join(sorted(kinds)) or "none"


def _is_residual_norm(trial: Trial, path: str) -> bool:
    """Whether the parameters of a norm, if it has any, are residual."""
    own = [axes for name, axes in trial.draft.axes.items() if name.rpartition(".")[0] == path]
    return not own or any(RESIDUAL.unsigned in axes or RESIDUAL in axes for axes in own)


def _blocks(trial: Trial) -> str:
    """The bare path of the list of decoder blocks; empty if there is none."""
    for path, module in trial.modules.items():
        if (
            isinstance(module, torch.nn.ModuleList)
            and path.rpartition(".")[2] in BLOCKS
            and "." not in trial.bare(path)
            and any(True for _ in module.parameters())
        ):
            return trial.bare(path)
    return ""
