"""Hook points: what the activations at a named place of a model index, and where to read them.

Dictionaries, probes, steering vectors and lists of neurons name the place they belong to, either
as TransformerLens does (``blocks.3.hook_resid_post``) or by the path of the module whose output is
meant (``model.layers.3``).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from signed_align.chart import (
    RESIDUAL,
    VOCABULARY,
    Chart,
    Layout,
    ModuleLabel,
    Part,
    Template,
    numbers_in,
)
from signed_align.errors import ChartError
from signed_align.labels import Label

BLOCK_HOOK = re.compile(r"blocks\.(\d+)\.(.+)")
RESIDUAL_HOOKS = re.compile(
    r"hook_(resid_pre|resid_mid|resid_post|attn_out|mlp_in|mlp_out)"
    r"|ln[12](_post)?\.hook_normalized"
)
OTHER_RESIDUAL_HOOKS = {"hook_embed", "ln_final.hook_normalized"}
MLP_HOOKS = {"mlp.hook_pre", "mlp.hook_pre_linear", "mlp.hook_post"}
HEAD_HOOKS = {"attn.hook_z"}
QUERY_KEY_VALUE_HOOKS: Mapping[str, tuple[str, ...]] = {
    "attn.hook_q": ("kv", "query", "key"),
    "attn.hook_rot_q": ("kv", "query", "key"),
    "attn.hook_k": ("kv", "key"),
    "attn.hook_rot_k": ("kv", "key"),
    "attn.hook_v": ("kv", "value"),
}
"""What queries, keys and values run over, head by head."""
# Why some hooks have no coordinates of their own, or none that a gauge knows.
WITHOUT_COORDINATES = {
    "hook_scale": "a norm's scale is one number a token and has no coordinates",
    "hook_pattern": "attention patterns are indexed by positions, not by coordinates",
    "hook_attn_scores": "attention scores are indexed by positions, not by coordinates",
    "hook_attn_in": "it holds a copy of the residual stream for every head",
    "hook_result": "it holds what every head writes, one vector a head",
    "hook_q_input": "it holds a copy of the residual stream for every head",
    "hook_k_input": "it holds a copy of the residual stream for every head",
    "hook_v_input": "it holds a copy of the residual stream for every head",
}


@dataclass(frozen=True)
class Hook:
    """A place in a model.

    Parameters
    ----------
    name : str
        As its user wrote it.
    template : Axis, Layout or Tiled
        What the last axis of the activations indexes.
    numbers : tuple of str
        The numbers in the path of the module it belongs to.
    module : str
        The module, by path without prefixes; empty if there is none to read it at.
    reads : bool
        The activations are the module's input rather than its output.
    """

    name: str
    template: Template
    numbers: tuple[str, ...] = ()
    module: str = ""
    reads: bool = False

    def label(self, chart: Chart, size: int) -> Label:
        """The label of the ``size`` coordinates; raises ChartError if there are others."""
        (label,) = chart.bind(self.name, (self.template,), (size,), self.numbers)
        assert label is not None
        return label


def find_hook(chart: Chart, name: str) -> Hook:
    """The hook called ``name`` in the models of a chart.

    Raises
    ------
    ChartError
        If there is no such place, or it is not known what its activations index.
    """
    last = name.rpartition(".")[2]
    if last in WITHOUT_COORDINATES:
        raise ChartError(f"nothing at {name!r} can be moved: {WITHOUT_COORDINATES[last]}.")
    lens = BLOCK_HOOK.fullmatch(name)
    if lens and "hook_" in lens[2]:
        return _lens_hook(chart, name, lens[1], lens[2])
    if name in OTHER_RESIDUAL_HOOKS:
        embeddings = [
            path
            for path, label in chart.modules.items()
            if (label.input, label.output) == (VOCABULARY, RESIDUAL)
        ]
        known = name == "hook_embed" and len(embeddings) == 1
        return Hook(name, RESIDUAL, module=embeddings[0] if known else "")
    found = _module_hook(chart, name)
    if found is None:
        raise ChartError(
            f"{name!r} is no hook whose coordinates the chart of {chart.model_type} models knows."
        )
    return found


def block_count(model: Any, chart: Chart) -> int:
    """How many decoder blocks a model has; raises ChartError if it has no list of them."""
    for name, module in model.named_modules():
        if chart.blocks in chart.bare(name):
            return len(module)
    raise ChartError(f"the {chart.model_type} model has no list of blocks {chart.blocks!r}.")


def width_at(hook: Hook, chart: Chart, model: Any) -> int:
    """How many coordinates there are at a hook, from the shapes of a model's parameters.

    Raises ChartError if none of the parameters is indexed by them.
    """
    for name, parameter in model.named_parameters():
        if tuple(numbers_in(name)[: len(hook.numbers)]) != hook.numbers:
            continue
        with suppress(ChartError):
            for label, size in zip(chart.axes(name, parameter.shape), parameter.shape, strict=True):
                with suppress(ChartError):
                    if label is not None and hook.label(chart, size) == label:
                        return int(size)
    raise ChartError(f"it is not known how many coordinates there are at {hook.name!r}.")


@contextmanager
def listening(model: Any, chart: Chart, hook: Hook) -> Iterator[list[Tensor]]:
    """Collect what passes at a hook while a model runs: a list that grows with every call.

    Raises ChartError if there is no module to read it at.
    """
    module = submodule(model, chart, hook)
    if not hook.reads and "residual" in inspect.signature(module.forward).parameters:
        raise ChartError(f"the module at {hook.name!r} puts out the residual stream with its own.")
    caught: list[Tensor] = []

    def keep(value: Any) -> None:
        caught.append(value if isinstance(value, Tensor) else value[0])

    handle = (
        module.register_forward_pre_hook(
            lambda _module, inputs, named: keep(inputs or next(iter(named.values()))),
            with_kwargs=True,
        )
        if hook.reads
        else module.register_forward_hook(lambda _module, _inputs, output: keep(output))
    )
    try:
        yield caught
    finally:
        handle.remove()


@contextmanager
def changing(
    model: Any, chart: Chart, hook: Hook, change: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Replace what passes at a hook by ``change`` of it while a model runs.

    Raises ChartError if there is no module to change it at.
    """

    def before(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if inputs:
            return (change(inputs[0]), *inputs[1:]), named
        first = next(iter(named))
        return inputs, {**named, first: change(named[first])}

    def behind(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return change(output)
        return (change(output[0]), *output[1:])

    module = submodule(model, chart, hook)
    handle = (
        module.register_forward_pre_hook(before, with_kwargs=True)
        if hook.reads
        else module.register_forward_hook(behind)
    )
    try:
        yield
    finally:
        handle.remove()


def submodule(model: Any, chart: Chart, hook: Hook) -> Any:
    """The module of a model that a hook belongs to; raises ChartError if there is none."""
    for name, module in model.named_modules():
        if hook.module and hook.module in chart.bare(name):
            return module
    raise ChartError(
        f"it is not known at which module of a {chart.model_type} model {hook.name!r} is read."
    )


def _lens_hook(chart: Chart, name: str, number: str, hook: str) -> Hook:
    """A hook inside block ``number``, by its TransformerLens name."""
    block = f"{chart.blocks}.{number}"
    if RESIDUAL_HOOKS.fullmatch(hook):
        place = {"hook_resid_pre": (block, True), "hook_resid_post": (block, False)}
        module, reads = place.get(hook, ("", False))
        if hook in ("hook_attn_out", "hook_mlp_out"):
            module = _part_of_block(chart, number, hook)
        return Hook(name, RESIDUAL, module=module, reads=reads)
    if hook not in MLP_HOOKS | HEAD_HOOKS | set(QUERY_KEY_VALUE_HOOKS):
        raise ChartError(
            f"it is not known which coordinates {name!r} has; name the module whose output is "
            "meant, as Hugging Face does."
        )
    kind = "mlp" if hook in MLP_HOOKS else "values"
    written = [
        (path, label.input)
        for path, label in _modules_of_block(chart)
        if label.output == RESIDUAL
        and isinstance(label.input, Layout)
        and kind in chart.sites[label.input.site].spaces
        and "experts" not in chart.sites[label.input.site].spaces
    ]
    if len(written) != 1:
        raise ChartError(
            f"a {chart.model_type} model has {'no' if not written else 'more than one'} place of "
            f"proved coordinates that {name!r} could mean."
        )
    ((path, template),) = written
    module = path.replace("*", number, 1)
    if hook in QUERY_KEY_VALUE_HOOKS:
        site = Layout(template.site, (Part(QUERY_KEY_VALUE_HOOKS[hook]),))
        return Hook(name, site, (number,))
    if hook == "mlp.hook_pre":
        # the gate, where there is one, does not feel the sign of a unit
        return Hook(name, template.unsigned, (number,))
    if hook == "mlp.hook_pre_linear":
        return Hook(name, template, (number,))
    return Hook(name, template, (number,), module=module, reads=True)


def _modules_of_block(chart: Chart) -> Iterator[tuple[str, ModuleLabel]]:
    """The modules inside a decoder block with their patterns; only those with one number."""
    for pattern, label in chart.modules.items():
        if pattern.startswith(f"{chart.blocks}.*.") and pattern.count("*") == 1:
            yield pattern, label


def _part_of_block(chart: Chart, number: str, hook: str) -> str:
    """The path of attention or MLP, whichever ``hook`` is of; empty if that is not plain."""
    kind = "values" if hook == "hook_attn_out" else "mlp"
    sites = [
        site
        for site, contents in chart.sites.items()
        if kind in contents.spaces and site.startswith(f"{chart.blocks}.*.")
    ]
    # a norm behind the part stands between it and what TransformerLens calls its output
    norms = [path for path, label in _modules_of_block(chart) if label.input == RESIDUAL.unsigned]
    behind = len(norms) > 2 or any("post_feedforward" in path for path in norms)
    if len(sites) != 1 or sites[0].count("*") != 1 or behind:
        return ""
    return sites[0].removesuffix(".experts").replace("*", number, 1)


def _module_hook(chart: Chart, name: str) -> Hook | None:
    """The output of the module called ``name``."""
    if chart.blocks_before(name) is not None:
        return Hook(name, RESIDUAL, module=chart.bare(name)[-1])
    for path in chart.bare(name):
        # attention, MLP and mixture of experts write to the residual stream
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", path)
        inside = pattern.startswith(f"{chart.blocks}.*.")
        if inside and any(f"{site}.".startswith(f"{pattern}.") for site in chart.sites):
            return Hook(name, RESIDUAL, module=path)
    try:
        label, numbers = chart.module(name)
    except ChartError:
        return None
    template = RESIDUAL if label.output == RESIDUAL.unsigned else label.output
    if template is None:
        return None
    return Hook(name, template, numbers, module=chart.bare(name)[-1])
