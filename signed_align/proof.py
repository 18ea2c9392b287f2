"""Proof: a chart is believed only after a random model, moved by it, has computed the same.

The proof runs on a miniature with random gains, biases and routers, in float64 and float32, with a
random element of the native group in every space at once. It also shows that the group is not
larger than it claims, and which weights had no part in it: those are refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from signed_align import chart_cache
from signed_align.chart import Chart, without_prefixes
from signed_align.dimensions import Dimensions
from signed_align.discovery import TOLERANCE, Bench, Discovery, quiet, text_config
from signed_align.errors import ChartError, one_line
from signed_align.gauge import Gauge
from signed_align.groups import Within
from signed_align.labels import transport_all
from signed_align.miniature import VOCABULARY, miniature_config, miniature_model
from signed_align.signed_permutation import SignedPermutation
from signed_align.storage import stored_tensors

NOTICEABLE = 1e-3
"""A change of logits at least this large, relative, shows that a move is not a symmetry."""


@dataclass(frozen=True)
class Proof:
    """What was shown about a chart.

    ``changes`` are the largest relative changes of the logits, by dtype, under a random gauge in
    all ``spaces``; ``violation`` is the change under independent signs, where the native group
    does not have them.
    """

    spaces: tuple[str, ...]
    changes: Mapping[str, float]
    violation: float | None
    unproved: tuple[str, ...]
    unread: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether the function stayed, and whether the group is as small as it says."""
        return all(change <= TOLERANCE for change in self.changes.values()) and (
            self.violation is None or self.violation >= NOTICEABLE
        )


def prove(config: Any) -> tuple[Chart, Proof]:
    """Discover the chart of a config's model class on a miniature, and prove it.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        No weights are needed, and no network.

    Returns
    -------
    Chart, Proof
        The chart is bound to ``config``'s sizes.

    Raises
    ------
    ChartError
        With the reason: the class cannot be built or run, or no symmetry was found.
    """
    with quiet():
        small = miniature_config(config)
        try:
            model = _eager_experts(miniature_model(small)).double()
            inputs = _inputs(small)
            bench = Bench(model, inputs)
        except ChartError:
            raise
        except Exception as error:  # a class that needs float32, or one that does not run at all
            try:
                model = _eager_experts(miniature_model(small))
                bench = Bench(model, _inputs(small))
            except Exception:
                raise ChartError(
                    f"a miniature of {config.model_type} does not run: {one_line(error)}"
                ) from error
        chart = Discovery(bench, model.config).chart()
        chart = replace(chart, unproved=_unexercised(bench, chart))
        chart, unread = _with_stored(chart, bench)
        proof = replace(verify(chart, bench), unread=unread)
    if not proof.holds:
        raise ChartError(
            f"the chart of {config.model_type} models does not hold: the logits of a miniature "
            f"change by {max(proof.changes.values()):.1e}"
        )
    return replace(chart, dimensions=Dimensions.of(text_config(config))), proof


def verify(chart: Chart, bench: Bench, seed: int = 11) -> Proof:
    """Move a whole miniature by a random gauge in every space, in each dtype it runs in."""
    state = {name: tensor for name, tensor in bench.state.items() if _labelled(chart, name, tensor)}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    spaces = chart.spaces(shapes)
    elements = chart.random_gauge(spaces, seed=seed, kinds=chart.kinds)

    def change(elements: Mapping[str, SignedPermutation]) -> float:
        gauge = Gauge(elements)
        origin = functools.partial(chart.origin, gauge=gauge)
        return bench.change(transport_all(state, chart.axes, gauge, origin))

    changes = {}
    dtypes = [next(iter(bench.model.parameters())).dtype, torch.float32]
    for dtype in dict.fromkeys(dtypes):
        bench.to(dtype)
        state = {name: bench.state[name] for name in state}
        changes[str(dtype).removeprefix("torch.")] = change(elements)
    bench.to(dtypes[0])
    state = {name: bench.state[name] for name in state}
    violation = None
    if chart.native_group is not Within.SIGNED_PERMUTATION:
        random = SignedPermutation.random(chart.width, seed=seed)
        violation = change({"residual": random})
    return Proof(chart.kinds, changes, violation, tuple(sorted(chart.unproved)), ())


def _eager_experts(model: Any) -> Any:
    """Have experts computed one by one: the grouped kernels do not know float64."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._experts_implementation = "eager"
    return model


def _inputs(config: Any) -> dict[str, Tensor]:
    """What a miniature reads: random tokens of shape (2, 24)."""
    generator = torch.Generator().manual_seed(5)
    return {"input_ids": torch.randint(3, VOCABULARY - 3, (2, 24), generator=generator)}


def _labelled(chart: Chart, name: str, tensor: Tensor) -> bool:
    try:
        chart.axes(name, tensor.shape)
    except ChartError:
        return False
    return True


def _unexercised(bench: Bench, chart: Chart) -> frozenset[str]:
    """Patterns of labelled weights that no gradient reaches in any layer."""
    reached: dict[str, bool] = {}
    parameters = dict(bench.model.named_parameters(remove_duplicate=False))
    for parameter in parameters.values():
        parameter.requires_grad_(parameter.is_floating_point())
        parameter.grad = None
    bench.model(**bench.inputs).logits.square().sum().backward()
    for name, parameter in parameters.items():
        pattern = chart.pattern(name)
        used = parameter.grad is not None and bool((parameter.grad != 0).any())
        labelled = any(axis is not None for axis in chart.axes(name, parameter.shape))
        if labelled:
            reached[pattern] = reached.get(pattern, False) or used
    for parameter in parameters.values():
        parameter.requires_grad_(False)
        parameter.grad = None
    return frozenset(pattern for pattern, used in reached.items() if not used)


def _with_stored(chart: Chart, bench: Bench) -> tuple[Chart, tuple[str, ...]]:
    """The chart with the labels of stored tensors, and the stored keys that are not understood."""
    labels = {
        f"{pattern}.{parameter}": axes
        for pattern, label in chart.modules.items()
        for parameter, axes in label.parameters.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            bench.model.save_pretrained(folder, max_shard_size="10GB")
            saved = load_file(Path(folder) / "model.safetensors")
        except Exception as error:  # not every class can be saved
            return chart, (f"a miniature cannot be saved: {one_line(error)}",)
    bare = {name: without_prefixes(name, chart.prefixes) for name in {*saved, *bench.state}}
    by_name = {
        bare[name]: labels[chart.pattern(name)]
        for name in bench.state
        if chart.pattern(name) in labels
    }
    stored, unread = stored_tensors(saved, bench.state, by_name, bare)
    chart = replace(chart, stored=stored)
    return chart, tuple(unread)


# ---- one proof per config class and version ------------------------------------------------------


def chart_of_type(model_type: str, hidden_size: int | None, settings: Mapping[str, Any]) -> Chart:
    """As :meth:`Chart.for_model`."""
    from transformers import AutoConfig

    width = {} if hidden_size is None else {"hidden_size": hidden_size}
    try:
        return proved_chart(AutoConfig.for_model(model_type, **settings, **width))
    except ChartError:
        raise
    except Exception as error:  # an unknown type, or settings that its class refuses
        if hidden_size is None or settings:
            raise ChartError(
                f"no chart is known for models of type {model_type!r}: {one_line(error)}"
            ) from error
    # a width alone does not go with the default number of heads; nothing else depends on it
    chart = chart_of_type(model_type, None, {})
    return replace(chart, dimensions=replace(chart.dimensions, width=hidden_size))


def proved_chart(config: Any) -> Chart:
    """As :meth:`Chart.of`: from the cache, or discovered and proved now."""
    try:
        small = miniature_config(config)
    except ChartError as error:
        raise ChartError(f"{config.model_type} models have no chart: {error}") from error
    key = _key(small)
    chart = _CHARTS.get(key) or chart_cache.load(key)
    if chart is None:
        try:
            chart, _ = prove(config)
        except ChartError as error:
            raise ChartError(f"{config.model_type} models have no chart: {error}") from error
        chart_cache.store(key, chart)
    _CHARTS[key] = chart
    return replace(chart, dimensions=Dimensions.of(text_config(config)))


_CHARTS: dict[str, Chart] = {}


def _key(small: Any) -> str:
    """Config class, what the miniature keeps of the config, and every version that matters."""
    import transformers

    settings = json.dumps(small.to_dict(), sort_keys=True, default=str)
    cls = f"{type(small).__module__}.{type(small).__qualname__}"
    told = [cls, settings, transformers.__version__, torch.__version__, _sources()]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """A digest of the code that discovers and proves: its charts are no older than itself."""
    here = Path(__file__).parent
    names = (
        "chart",
        "dimensions",
        "discovery",
        "groups",
        "labels",
        "miniature",
        "proof",
        "storage",
    )
    content = b"".join((here / f"{name}.py").read_bytes() for name in names)
    return hashlib.sha256(content).hexdigest()
