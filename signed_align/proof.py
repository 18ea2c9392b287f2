"""Proof: a chart is believed only after a random model, moved by it, has computed the same.

The proof runs on a miniature with random gains, biases and routers, in float64 and float32, with a
random element of the native group in every space at once. It also shows that the group is not
larger than it claims, and which weights had no part in it: those are refused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from signed_align import chart_cache
from signed_align.chart import Chart, Layout, star, without_prefixes
from signed_align.dimensions import Dimensions
from signed_align.discovery import TOLERANCE, Bench, Discovery, quiet, text_config
from signed_align.errors import ChartError, one_line
from signed_align.gauge import Gauge
from signed_align.groups import Within
from signed_align.labels import transport_all
from signed_align.miniature import VOCABULARY, miniature_config, miniature_model
from signed_align.progress import libraries_silent
from signed_align.signed_permutation import SignedPermutation
from signed_align.skeleton import named_classes
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
    with quiet(), _one_thread():
        bench, chart = _discovered(config)
        chart = _without_unproved_sites(replace(chart, unproved=_unexercised(bench, chart)))
        proof = verify(chart, bench)
        chart, unread = _with_stored(chart, bench)
        proof = replace(proof, unread=unread)
    if not proof.holds:
        raise ChartError(
            f"the chart of {config.model_type} models does not hold: the logits of a miniature "
            f"change by {max(proof.changes.values()):.1e}"
        )
    return replace(chart, dimensions=Dimensions.of(text_config(config))), proof


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run miniatures on one thread: on matrices this small, more only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def verify(chart: Chart, bench: Bench, seed: int = 11) -> Proof:
    """Move a whole miniature by a random gauge in every space, in each dtype it runs in."""
    state = {name: tensor for name, tensor in bench.state.items() if _labelled(chart, name, tensor)}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    spaces = chart.spaces(shapes)
    indexed = {
        space.partition(":")[0]
        for name, shape in shapes.items()
        for label in chart.axes(name, shape)
        if label is not None
        for space in label.spaces
    }
    if not set(chart.kinds) <= indexed:
        missing = ", ".join(sorted(set(chart.kinds) - indexed))
        raise ChartError(f"no weight of {chart.model_type} models indexes {missing}")
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


def _discovered(config: Any) -> tuple[Bench, Chart]:
    """A miniature and its chart: with images if its class is named for them, else on text alone."""
    import transformers

    if _class_of(config) is not transformers.AutoModelForCausalLM:
        try:
            bench = _bench(config, images=True)
            return bench, Discovery(bench).chart()
        except ChartError:  # what only images reach has no part in the proof then, and is refused
            pass
    bench = _bench(config, images=False)
    return bench, Discovery(bench).chart()


def _bench(config: Any, images: bool) -> Bench:
    """A miniature to try hypotheses on: in float64, or in float32 where the class needs that."""
    cls = _class_of(config)
    model = miniature_model(config, auto_class=cls)
    inputs = _inputs(model, images)
    try:
        return Bench(model.double(), {name: _double(tensor) for name, tensor in inputs.items()})
    except Exception:  # the class computes in float32 itself, or overflows
        return Bench(miniature_model(config, auto_class=cls), inputs)


def _class_of(config: Any) -> Any:
    """The class a config names; that of causal language models, where it names a bare model."""
    import transformers

    for cls in named_classes(getattr(config, "architectures", None)):
        if not cls.__name__.endswith(("Model", "LMHeadModel", "ForCausalLM")):
            return cls
    return transformers.AutoModelForCausalLM


def _inputs(model: Any, images: bool) -> dict[str, Tensor]:
    """What a miniature reads: random tokens of shape (2, 24), and images where it takes them."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, VOCABULARY - 3, (2, 24), generator=generator)
    config = model.config
    image_token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    vision = getattr(config, "vision_config", None)
    if vision is None or image_token is None or not images:
        return {"input_ids": tokens}
    size = int(
        vision.image_size[0] if isinstance(vision.image_size, (list, tuple)) else vision.image_size
    )
    pixels = torch.randn(2, 3, size, size, generator=generator)
    try:
        with torch.no_grad():
            features = model.get_image_features(pixel_values=pixels)
        features = getattr(features, "pooler_output", features)
        rows = sum(len(part) for part in features) if isinstance(features, (list, tuple)) else (
            features.reshape(-1, features.shape[-1]).shape[0]
        )  # fmt: skip
        placeholders = torch.full((2, rows // 2), int(image_token))
        inputs = {"input_ids": torch.cat([tokens, placeholders, tokens], 1), "pixel_values": pixels}
        if "token_type_ids" in inspect.signature(model.forward).parameters:
            inputs["token_type_ids"] = (inputs["input_ids"] == image_token).long()
        with torch.no_grad():
            model(**inputs)
    except Exception:  # a class that takes its images in a form of its own is run on text alone
        return {"input_ids": tokens}
    return inputs


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def verify_again(chart: Chart, seed: int) -> Proof:
    """As :meth:`Chart.verify`."""
    from transformers import AutoConfig

    settings = {name: value for name, value in chart.settings.items() if name != "model_type"}
    with quiet(), _one_thread():
        bench, _ = _discovered(AutoConfig.for_model(chart.model_type, **settings))
        small = replace(chart, dimensions=Dimensions.of(text_config(bench.model.config)))
        return verify(small, bench, seed)


def _labelled(chart: Chart, name: str, tensor: Tensor) -> bool:
    try:
        chart.axes(name, tensor.shape)
    except ChartError:
        return False
    return True


def _unexercised(bench: Bench, chart: Chart) -> frozenset[str]:
    """Patterns of weights that had no part in the proof, in any layer.

    A weight without a label is of no concern if it has no part in the function. Where a class
    sees or hears and was run on text alone, nothing can be said of the weights for that.
    """
    config = bench.model.config
    senses = {name for name in config.sub_configs if "text" not in name}
    blind = bool(senses) and not (senses == {"vision_config"} and "pixel_values" in bench.inputs)
    reached: dict[str, bool] = {}
    parameters = dict(bench.model.named_parameters(remove_duplicate=False))
    for parameter in parameters.values():
        parameter.requires_grad_(parameter.is_floating_point())
        parameter.grad = None
    with torch.inference_mode(False), torch.enable_grad():  # wherever it is called from
        bench.model(**bench.inputs).logits.square().sum().backward()
    for name, parameter in parameters.items():
        if name not in bench.state:
            continue
        pattern = chart.pattern(name)
        used = parameter.grad is not None and bool((parameter.grad != 0).any())
        labelled = any(axis is not None for axis in chart.axes(name, parameter.shape))
        if labelled or blind:
            reached[pattern] = reached.get(pattern, False) or used
    for parameter in parameters.values():
        parameter.requires_grad_(False)
        parameter.grad = None
    return frozenset(
        pattern
        for pattern, used in reached.items()
        if not used and not _matters(bench, chart, pattern)
    )


def _without_unproved_sites(chart: Chart) -> Chart:
    """The chart without sites all of whose weights are unproved: what they need never ran."""
    proved = {
        axis.site
        for pattern, label in chart.modules.items()
        for parameter, axes in label.parameters.items()
        if f"{pattern}.{parameter}" not in chart.unproved
        for axis in axes
        if isinstance(axis, Layout)
    }
    return replace(
        chart, sites={site: form for site, form in chart.sites.items() if site in proved}
    )


def _matters(bench: Bench, chart: Chart, pattern: str) -> bool:
    """Whether a change of a weight changes the function: one that ranks experts has no gradient."""
    noise = torch.Generator().manual_seed(3)
    changed = {
        name: tensor + torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
        for name, tensor in bench.state.items()
        if chart.pattern(name) == pattern and tensor.is_floating_point()
    }
    return bench.change(changed) > TOLERANCE


def _with_stored(chart: Chart, bench: Bench) -> tuple[Chart, tuple[str, ...]]:
    """The chart with the labels of stored tensors, and the stored keys that are not understood."""
    labels = {
        f"{pattern}.{parameter}": axes
        for pattern, label in chart.modules.items()
        for parameter, axes in label.parameters.items()
    }
    try:
        saved = _saved(bench)
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
    wrong = _disagreeing(chart, bench, saved)
    unread += sorted(wrong - set(unread))
    return replace(chart, unproved=chart.unproved | wrong), tuple(dict.fromkeys(map(star, unread)))


def _saved(bench: Bench) -> dict[str, Tensor]:
    """What a checkpoint of the miniature holds, as its class saves it."""
    with tempfile.TemporaryDirectory() as folder, libraries_silent():
        bench.model.save_pretrained(folder, max_shard_size="10GB")
        return load_file(Path(folder) / "model.safetensors")


def _disagreeing(chart: Chart, bench: Bench, saved: Mapping[str, Tensor]) -> set[str]:
    """Patterns of stored tensors that, moved, are not what the moved miniature stores."""
    known = {name: tensor for name, tensor in saved.items() if _labelled(chart, name, tensor)}
    spaces = chart.spaces({name: tuple(tensor.shape) for name, tensor in known.items()})
    gauge = Gauge(chart.random_gauge(spaces, seed=12, kinds=chart.kinds))
    origin = functools.partial(chart.origin, gauge=gauge)
    stored = {without_prefixes(name, chart.prefixes) for name in saved}
    distinct: dict[int, str] = {}  # of names that share a tensor, the one that is stored
    stored_first = sorted(
        bench.state, key=lambda name: without_prefixes(name, chart.prefixes) not in stored
    )
    for name in stored_first:
        distinct.setdefault(bench.state[name].data_ptr(), name)
    state = {
        name: bench.state[name]
        for name in distinct.values()
        if _labelled(chart, name, bench.state[name])
    }
    kept = {name: tensor.clone() for name, tensor in state.items()}
    moved = transport_all(kept, chart.axes, gauge, origin)
    with torch.no_grad():
        try:
            for name, tensor in state.items():
                tensor.copy_(moved[name])
            expected = _saved(bench)
        finally:
            for name, tensor in state.items():
                tensor.copy_(kept[name])
    found = transport_all(known, chart.axes, gauge, origin)
    return {
        chart.pattern(name)
        for name, tensor in found.items()
        if not torch.equal(tensor, expected[name])
    }


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
    except Exception as error:  # classes refuse sizes in ways of their own
        raise ChartError(f"{config.model_type} models have no chart: {one_line(error)}") from error
    key = _key(config, small)
    chart = _CHARTS.get(key) or chart_cache.load(key)
    if chart is None:
        try:
            chart, _ = prove(config)
        except Exception as error:  # and fail in them
            raise ChartError(
                f"{config.model_type} models have no chart: {one_line(error)}"
            ) from error
        chart_cache.store(key, chart)
    _CHARTS[key] = chart
    return replace(chart, dimensions=Dimensions.of(text_config(config)), settings=config.to_dict())


_CHARTS: dict[str, Chart] = {}


def _key(config: Any, small: Any) -> str:
    """Config class, what the miniature keeps of the config, and every version that matters."""
    import transformers

    settings = json.dumps(small.to_dict(), sort_keys=True, default=str)
    cls = f"{type(small).__module__}.{type(small).__qualname__}"
    told = [
        cls,
        _class_of(config).__name__,
        settings,
        transformers.__version__,
        torch.__version__,
        _sources(),
    ]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """A digest of the code that discovers and proves: its charts are no older than itself."""
    here = Path(__file__).parent
    names = ("chart", "dimensions", "groups", "labels", "miniature", "proof", "storage")
    files = [here / f"{name}.py" for name in names] + sorted((here / "discovery").glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
