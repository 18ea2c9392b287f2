"""Discovery: reading a model's chart off a miniature of it, by shapes, roles of names, and trial.

Every dimension of a miniature is distinct where its class allows, so most axes say by their size
which space they index. Where sizes tie, the role that a module's name has in the ecosystem
decides. Each further hypothesis (which half of a fused matrix is the gate, how rotary planes are
paired, whether heads are interchangeable) is put to the model: the candidate that leaves the
logits where they were is the answer, and none is assumed that was not tried.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from signed_align.chart import (
    RESIDUAL,
    VOCABULARY,
    Chart,
    Form,
    Layout,
    ModuleLabel,
    Part,
    Site,
    Template,
    Templates,
    Tiled,
    star,
    without_prefixes,
)
from signed_align.dimensions import Dimensions
from signed_align.errors import ChartError, SignedAlignError
from signed_align.gauge import Gauge
from signed_align.groups import Within
from signed_align.labels import Axes, moves, transport
from signed_align.signed_permutation import SignedPermutation

TOLERANCE = 1e-5
"""Largest relative change of logits that counts as none."""

RESIDUAL_GROUPS = (
    Within.SIGNED_PERMUTATION,
    Within.PERMUTATION_AND_GLOBAL_SIGN,
    Within.PERMUTATION,
)

# What a square matrix does, by the name of its module: only names tell when its two sizes tie.
READERS = re.compile(
    r"([qkv]|qkv|wqkv|[qkv]_lin|w[qkv]|to_[qkv]|[qkv]_proj|query|key|value|(query|key|value)_proj"
    r"|qkv_proj|query_key_value|c_attn|gate_proj|g_proj|up_proj|gate_up_proj|fc1|fc_in|c_fc|lin1"
    r"|in_proj|in_proj_.*|dense_h_to_4h|w1|w3|receptance|.*gate.*|.*_preact|router|r_proj)",
    re.IGNORECASE,
)
WRITERS = re.compile(
    r"(o|o_proj|out_proj|out_lin|wo|c_proj|fc2|fc_out|lin2|down_proj|dense_4h_to_h|w2|output"
    r"|proj_down|linear_out)",
    re.IGNORECASE,
)
INTERNAL_NORM = re.compile(
    r"(q|k|v|query|key|value|kv|q_a|kv_a)_?(layer)?_?norm|multihead_norm|attn_sub_norm"
)
PROJECTOR = re.compile(r"projector|connector|merger|embed_vision|visual_projection")
STATE_SPACE = re.compile(r"mamba|mixer|ssm|rglru|temporal|conv|lru")
NOT_RESIDUAL = re.compile(r".*(rel_attn\.r|time_decay|time_first|\b(q|kv)_b_proj\.(weight|bias))")
"""Weights of a block's own that may be as wide: relative positions, decays, latent projections."""
ELEMENTWISE = re.compile(r".*(mix|scale|scalar|gain|gamma|lambda|alpha|weight).*")

QUERY = ("q_proj", "query", "q", "q_lin", "wq", "query_proj", "to_q")
KEY = ("k_proj", "key", "k", "k_lin", "wk", "key_proj", "to_k")
VALUE = ("v_proj", "value", "v", "v_lin", "wv", "value_proj", "to_v")
OUTPUT = (
    "o_proj", "out_proj", "o", "out_lin", "wo", "dense", "c_proj", "output.dense", "output",
    "to_out",
)  # fmt: skip
FUSED_QKV = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "qkv", "W_pack")
GATES = ("gate_proj", "g_proj", "gate", "attn_gate", "linear_gate")


@dataclass
class Draft:
    """What is known so far of a model's chart, by concrete tensor name."""

    axes: dict[str, Templates] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)


class Bench:
    """A miniature on which hypotheses are tried: is the function moved by this gauge or not?"""

    def __init__(self, model: Any, inputs: Mapping[str, Tensor]) -> None:
        self.model = model
        self.inputs = dict(inputs)
        self.state = _distinct(model.state_dict())
        self.before = self.output()
        if not bool(torch.isfinite(self.before).all()) or float(self.before.abs().max()) == 0:
            raise ChartError("the miniature's logits are not finite, so nothing can be proved")

    @torch.no_grad()
    def output(self) -> Tensor:
        """The model's output on the fixed inputs."""
        return self.model(**self.inputs).logits.detach().clone()

    def change(self, moved: Mapping[str, Tensor]) -> float:
        """The largest change of the output, relative to its largest value, with tensors replaced.

        ``moved`` maps state-dict names to new values. The model is left as it was.
        """
        self._require_ties(moved)
        kept = {name: self.state[name].clone() for name in moved}
        try:
            with torch.no_grad():
                for name, tensor in moved.items():
                    self.state[name].copy_(tensor)
            after = self.output()
        finally:
            with torch.no_grad():
                for name, tensor in kept.items():
                    self.state[name].copy_(tensor)
        if not bool(torch.isfinite(after).all()):
            return float("inf")
        return float((after - self.before).abs().max() / self.before.abs().max())

    def _require_ties(self, moved: Mapping[str, Tensor]) -> None:
        """Raise if one tensor would get two values, under the names that share it."""
        first: dict[int, str] = {}
        for name, tensor in moved.items():
            other = first.setdefault(self.state[name].data_ptr(), name)
            if not torch.equal(moved[other], tensor):
                raise ChartError(f"{other} and {name} are one tensor with two different labels")

    def to(self, dtype: torch.dtype) -> None:
        """Go on in another floating-point dtype."""
        self.model = self.model.to(dtype)
        self.inputs = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self.inputs.items()
        }
        self.state = _distinct(self.model.state_dict())
        self.before = self.output()


def _distinct(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A state dict's tensors, without those that a later layer shares with an earlier one."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, str]] = set()
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and (tensor.data_ptr(), star(name)) not in seen:
            seen.add((tensor.data_ptr(), star(name)))
            found[name] = tensor
    return found


class Discovery:
    """The discovery of one chart on one miniature."""

    def __init__(self, bench: Bench, config: Any) -> None:
        self.bench = bench
        self.config = config
        self.dimensions = Dimensions.of(text_config(config))
        self.width = self.dimensions.width
        self.modules = dict(bench.model.named_modules())
        base = getattr(bench.model, "base_model_prefix", "")
        wrappers = ("base_model.model.", "model.", "language_model.", f"{base}.")
        self.prefixes = tuple(dict.fromkeys(wrapper for wrapper in wrappers if wrapper != "."))
        self.draft = Draft()

    # ---- the result --------------------------------------------------------------------------

    def chart(self) -> Chart:
        """The chart, every label of it tried; raises ChartError, with the reason, if none holds."""
        self._label_residual()
        group = self._residual_group()
        for path in self._attention_sites():
            self._try_attention(path, group)
        for path in self._expert_sites():
            self._try_experts(path, group)
        for path, size in self._unit_sites():
            self._try_units(path, size, group)
        self._drop_sites_that_fail(group)
        return self._chart(group)

    def _drop_sites_that_fail(self, group: Within) -> None:
        """Leave out sites whose labels, found on one layer, do not hold on all of them."""
        for site, form in list(self.draft.sites.items()):
            mine = {
                name: axes
                for name, axes in self.draft.axes.items()
                if any(isinstance(axis, Layout) and axis.site == site for axis in axes)
            }
            if not self._holds(mine, {site: form}, tuple(form.spaces), group, seed=7):
                del self.draft.sites[site]
                for name, axes in mine.items():
                    self.draft.axes[name] = tuple(
                        None if isinstance(axis, Layout) else axis for axis in axes
                    )

    def _chart(self, group: Within) -> Chart:
        patterns: dict[str, set[Templates]] = {}
        for name, axes in self.draft.axes.items():
            patterns.setdefault(star(self._bare(name)), set()).add(axes)
        modules: dict[str, dict[str, Templates]] = {}
        for name, axes in self.draft.axes.items():
            bare = self._bare(name)
            # numbers that tell apart what is labelled differently are no layer numbers
            pattern = star(bare) if len(patterns[star(bare)]) == 1 else bare
            path, _, parameter = pattern.rpartition(".")
            modules.setdefault(path, {})[parameter] = axes
        labels = {}
        for pattern, parameters in modules.items():
            labels[pattern] = self._module_label(pattern, parameters)
        return Chart(
            model_type=self.config.model_type,
            norm=self._norm(),
            native_group=group,
            modules=labels,
            sites=dict(self.draft.sites),
            prefixes=self.prefixes,
            blocks=self._blocks(),
            dimensions=self.dimensions,
            buffers=frozenset(
                star(self._bare(name))
                for name, _ in self.bench.model.named_buffers()
                if name not in self.bench.state
            ),
        )

    def _module_label(self, pattern: str, parameters: Mapping[str, Templates]) -> ModuleLabel:
        weight = parameters.get("weight")
        if weight is None or len(weight) != 2:
            axis = weight[0] if weight and len(weight) == 1 else None
            return ModuleLabel(axis, axis, parameters)
        module = next(
            module
            for path, module in self.modules.items()
            if pattern in (star(self._bare(path)), self._bare(path))
        )
        if isinstance(module, torch.nn.Embedding) or "Conv1D" in type(module).__name__:
            return ModuleLabel(weight[0], weight[1], parameters)
        return ModuleLabel(weight[1], weight[0], parameters)

    def _norm(self) -> str:
        kinds = {
            "LayerNorm" if "LayerNorm" in kind and "RMS" not in kind else "RMSNorm"
            for path, module in self.modules.items()
            for kind in [type(module).__name__]
            if "norm" in kind.lower() and self._is_residual_norm(path)
        }
        return " and ".join(sorted(kinds)) or "none"

    def _is_residual_norm(self, path: str) -> bool:
        own = [axes for name, axes in self.draft.axes.items() if name.rpartition(".")[0] == path]
        return not own or any(RESIDUAL.unsigned in axes or RESIDUAL in axes for axes in own)

    def _blocks(self) -> str:
        stacks = [
            (len(module), path)
            for path, module in self.modules.items()
            if isinstance(module, torch.nn.ModuleList)
            and "." not in self._bare(path)
            and len(list(module.parameters())) > 0
        ]
        names = ("layers", "h", "blocks", "layer", "block")
        preferred = [path for _, path in stacks if path.rpartition(".")[2] in names]
        return self._bare(preferred[0]) if preferred else ""

    def _bare(self, name: str) -> str:
        return without_prefixes(name, self.prefixes)

    # ---- trying ------------------------------------------------------------------------------

    def _bound(
        self, axes: Mapping[str, Templates], chart: Chart
    ) -> dict[str, tuple[Axes, Sequence[int]]]:
        """The labels of each tensor, bound to its layer and sizes, beside its shape."""
        found: dict[str, tuple[Axes, Sequence[int]]] = {}
        for name, labels in axes.items():
            shape = tuple(self.bench.state[name].shape)
            numbers = re.findall(r"(?<=\.)\d+(?=\.)", f".{self._bare(name)}")
            found[name] = chart.bind(name, labels, shape, numbers), shape
        return found

    def _moved(
        self, axes: Mapping[str, Templates], gauge: Gauge, chart: Chart
    ) -> dict[str, Tensor]:
        moved = {}
        for name, (labels, _) in self._bound(axes, chart).items():
            if any(moves(label, gauge) for label in labels):
                moved[name] = transport(self.bench.state[name], labels, gauge)
        return moved

    def _holds(
        self,
        axes: Mapping[str, Templates],
        sites: Mapping[str, Site],
        kinds: Sequence[str],
        group: Within,
        seed: int = 1,
    ) -> bool:
        """Whether the function stays when a random gauge of these kinds moves the tensors."""
        chart = Chart(
            self.config.model_type, "", group, {}, sites, self.prefixes, "", self.dimensions
        )
        try:
            spaces = chart.spaces_of(self._bound(axes, chart).values())
            elements = chart.random_gauge(spaces, seed=seed, kinds=kinds)
            if all(element.is_identity for element in elements.values()):
                return False
            return self.bench.change(self._moved(axes, Gauge(elements), chart)) <= TOLERANCE
        except SignedAlignError:
            return False

    # ---- residual ----------------------------------------------------------------------------

    def _label_residual(self) -> None:
        vocabulary = {
            size
            for size in (getattr(text_config(self.config), "vocab_size", 0),)
            if size and size != self.width
        }
        for name, tensor in self.bench.state.items():
            self.draft.axes[name] = self._residual_axes(name, tensor, vocabulary)

    def _residual_axes(self, name: str, tensor: Tensor, vocabulary: set[int]) -> Templates:
        path, _, parameter = name.rpartition(".")
        leaf = path.rpartition(".")[2]
        here = [size == self.width for size in tensor.shape]
        none: Templates = (None,) * tensor.ndim
        if not any(here) or not tensor.is_floating_point() or NOT_RESIDUAL.fullmatch(name):
            return none
        is_matrix = isinstance(self.modules.get(path), torch.nn.Linear) and tensor.ndim == 2
        if sum(here) == 1 and tensor.numel() == self.width and not is_matrix:
            if INTERNAL_NORM.fullmatch(leaf):
                return none
            even = "bias" not in parameter and (
                "norm" in type(self.modules[path]).__name__.lower()
                or "norm" in leaf.lower()
                or bool(ELEMENTWISE.fullmatch(parameter))
            )
            axis = RESIDUAL.unsigned if even else RESIDUAL
            if "bias" in parameter and READERS.fullmatch(leaf) and not WRITERS.fullmatch(leaf):
                return none
            return tuple(axis if mine else None for mine in here)
        if sum(here) == 2 and tensor.ndim == 2:
            return self._square(path, leaf)
        if sum(here) > 1:
            if "expert" not in name:
                return none
            # experts of square matrices: the names of the parameter tell
            reads = "down" not in parameter and "output" not in parameter
            last = tensor.ndim - 1
            wanted = last if reads else last - 1
            return tuple(RESIDUAL if index == wanted else None for index in range(tensor.ndim))
        return tuple(
            RESIDUAL if mine else VOCABULARY if size in vocabulary and tensor.ndim == 2 else None
            for mine, size in zip(here, tensor.shape, strict=True)
        )

    def _square(self, path: str, leaf: str) -> Templates:
        module = self.modules.get(path)
        transposed = module is not None and "Conv1D" in type(module).__name__
        if isinstance(module, torch.nn.Embedding):
            return (None, RESIDUAL)
        parent = path.rpartition(".")[0].rpartition(".")[2]
        axes: Templates
        if leaf == "receptance" and parent == "feed_forward":
            # gates what the block writes, coordinate by coordinate
            return (RESIDUAL.unsigned, RESIDUAL)
        if WRITERS.fullmatch(leaf) or (leaf == "dense" and parent not in ("transform", "lm_head")):
            axes = (RESIDUAL, None)
        elif READERS.fullmatch(leaf):
            axes = (None, RESIDUAL)
        else:
            axes = (RESIDUAL, RESIDUAL)
        return axes[::-1] if transposed else axes

    def _residual_group(self) -> Within:
        """The group that the labels hold for, after changing those that a size alone suggested."""
        first = dict(self.draft.axes)
        doubts = (
            self._inner_convolutions,
            self._tiled_axes,
            self._hidden_projections,
            self._open_squares,
        )
        readings = []
        for count in range(len(doubts) + 1):
            for chosen in itertools.combinations(doubts, count):
                self.draft.axes = dict(first)
                applied = [doubt() for doubt in chosen]
                if all(applied):
                    readings.append(self.draft.axes)
        for group in RESIDUAL_GROUPS:
            for axes in readings:
                if all(self._holds(axes, {}, ("residual",), group, seed=seed) for seed in (1, 2)):
                    self.draft.axes = axes
                    return group
        self.draft.axes = first
        raise ChartError(self._obstacle())

    def _inner_convolutions(self) -> bool:
        """Take the channels of convolutions for a block's own, although they are as many."""
        return self._relabel(
            lambda path, axes: (
                (None,) * len(axes) if isinstance(self.modules.get(path), torch.nn.Conv1d) else axes
            )
        )

    def _tiled_axes(self) -> bool:
        """Take axes of two, three or four times the width for copies of the residual stream."""
        changed = False
        for name, axes in self.draft.axes.items():
            path = name.rpartition(".")[0]
            if STATE_SPACE.search(path) or WRITERS.fullmatch(path.rpartition(".")[2]):
                continue
            shape = self.bench.state[name].shape
            even = len(shape) == 1 and "bias" not in name
            tile = Tiled(RESIDUAL.unsigned if even else RESIDUAL)
            tiled = tuple(
                tile
                if axis is None and size % self.width == 0 and 1 < size // self.width <= 4
                else axis
                for axis, size in zip(axes, shape, strict=True)
            )
            reads = len(shape) < 2 or isinstance(tiled[-1], Tiled)
            if tiled != axes and reads:
                keep = tiled if len(shape) < 2 else (*axes[:-1], tiled[-1])
                self.draft.axes[name] = keep
                changed = True
        return changed

    def _hidden_projections(self) -> bool:
        """Take all but the last matrix of a projector for steps on the way to the stream."""
        last = {
            path.rpartition(".")[0]: path
            for path, module in self.modules.items()
            if PROJECTOR.search(path) and isinstance(module, torch.nn.Linear)
        }

        def change(path: str, axes: Templates) -> Templates:
            parent = path.rpartition(".")[0]
            if parent not in last or not isinstance(self.modules[path], torch.nn.Linear):
                return axes
            if path != last[parent]:
                return (None,) * len(axes)
            return (RESIDUAL, None) if len(axes) == 2 else axes

        return self._relabel(change)

    def _open_squares(self) -> bool:
        """Take square matrices without a role for readers of the residual stream."""
        return self._relabel(
            lambda path, axes: (None, RESIDUAL) if axes == (RESIDUAL, RESIDUAL) else axes
        )

    def _relabel(self, change: Callable[[str, Templates], Templates]) -> bool:
        before = dict(self.draft.axes)
        self.draft.axes = {
            name: change(name.rpartition(".")[0], axes) for name, axes in before.items()
        }
        return self.draft.axes != before

    def _obstacle(self) -> str:
        """Why no labels hold, as far as it can be seen."""
        for path, module in self.modules.items():
            own = {**module.__dict__, **dict(module.named_buffers(recurse=False))}
            for name, value in own.items():
                full = f"{path}.{name}"
                if (
                    isinstance(value, Tensor)
                    and value.ndim > 1
                    and value.shape[-1] == self.width
                    and full not in self.bench.state
                ):
                    return (
                        f"it adds a fixed table of positions ({star(self._bare(full))}) to the "
                        "residual stream, which is none of its weights, so coordinates cannot move"
                    )
        for name, tensor in self.bench.state.items():
            if any(
                size > self.width and size % self.width == 0 for size in tensor.shape
            ) and re.search(r"hc_|_hc\b|hyper", name):
                return (
                    "its residual streams run side by side and are mixed "
                    f"({star(self._bare(name))}), which no label that was tried covers"
                )
        return (
            "no relabelling of its weights by a permutation of the residual coordinates that was "
            "tried leaves the function of a miniature unchanged (its logits change by "
            f"{self._smallest_change():.1e})"
        )

    def _smallest_change(self) -> float:
        chart = Chart(
            self.config.model_type, "", Within.PERMUTATION, {}, {}, self.prefixes, "",
            self.dimensions,
        )  # fmt: skip
        element = SignedPermutation.random(self.width, seed=1, signed=False)
        return self.bench.change(self._moved(self.draft.axes, Gauge({"residual": element}), chart))

    # ---- attention ---------------------------------------------------------------------------

    def _paths(self) -> Iterator[tuple[str, Any]]:
        """Modules of the first instance of each pattern."""
        seen = set()
        for path, module in self.modules.items():
            if star(path) not in seen:
                seen.add(star(path))
                yield path, module

    def _attention_sites(self) -> list[str]:
        found = []
        for path, _ in self._paths():
            names = {name for name in self.modules if name.rpartition(".")[0] == path}
            leaves = {name.rpartition(".")[2] for name in names}
            separate = leaves & set(QUERY) and leaves & set(KEY) and leaves & set(VALUE)
            if separate or leaves & set(FUSED_QKV) or "kv_b_proj" in leaves:
                found.append(path)
        return found

    def _tensor(self, path: str, leaves: Iterable[str], parameter: str = "weight") -> str | None:
        for leaf in leaves:
            name = f"{path}.{leaf}.{parameter}"
            if name in self.bench.state:
                return name
        return None

    def _every(self, axes: Mapping[str, Templates]) -> dict[str, Templates]:
        """The same labels on all layers of the same pattern."""
        by_pattern = {star(name): labels for name, labels in axes.items()}
        return {
            name: by_pattern[star(name)]
            for name, tensor in self.bench.state.items()
            if star(name) in by_pattern and tensor.ndim == len(by_pattern[star(name)])
        }

    def _with(self, name: str, position: int, label: Template) -> Templates:
        """The labels that a tensor has already, with one more."""
        axes = list(self.draft.axes[name])
        axes[position] = label
        return tuple(axes)

    def _on_free_axis(self, name: str, label: Template) -> Templates | None:
        """``label`` on the one axis of a tensor that is not labelled yet."""
        free = [index for index, axis in enumerate(self.draft.axes[name]) if axis is None]
        return self._with(name, free[0], label) if len(free) == 1 else None

    def _try_attention(self, path: str, group: Within) -> None:
        site = star(self._bare(path))
        for axes in self._attention_labels(path, site):
            labels = self._every(axes)
            values = self._first_that_holds(
                labels, site, "values", ("kv", "value"),
                ((Within.SIGNED_PERMUTATION, ""), (Within.PERMUTATION, "")), group,
            )  # fmt: skip
            moving = self._attention_site(values, Form(("kv", "key"), Within.NOTHING), labels)
            heads_move = self._holds(
                labels, {site: replace(moving, blocks_move=True)},
                ("heads", "values", "keys", "nopes"), group,
            )  # fmt: skip
            if values is None and not heads_move:
                continue
            keys = self._first_that_holds(
                labels, site, "keys", ("kv", "key"),
                (
                    (Within.SIGNED_PERMUTATION, ""),
                    (Within.PLANE_SIGNS, "half"),
                    (Within.PLANE_SIGNS, "interleaved"),
                    (Within.BLOCK_SIGN, ""),
                ),
                group,
            )  # fmt: skip
            nopes = self._first_that_holds(
                labels, site, "nopes", ("kv", "nope"), ((Within.SIGNED_PERMUTATION, ""),), group
            )
            final = self._attention_site(values, keys, labels, nopes)
            final = replace(final, blocks_move=heads_move)
            if not heads_move:
                final = replace(
                    final,
                    spaces={kind: form for kind, form in final.spaces.items() if kind != "heads"},
                )
            if not final.spaces or not self._holds(
                labels, {site: final}, tuple(final.spaces), group, seed=3
            ):
                continue
            self._accept(site, final, labels)
            return

    def _accept(self, site: str, final: Site, labels: Mapping[str, Templates]) -> None:
        self.draft.sites[site] = final
        self.draft.axes.update(labels)

    def _attention_site(
        self,
        values: Form | None,
        keys: Form | None,
        labels: Mapping[str, Templates],
        nopes: Form | None = None,
    ) -> Site:
        used = {
            factor
            for axes in labels.values()
            for axis in axes
            if isinstance(axis, Layout)
            for part in axis.parts
            for factor in (*axis.outer, *part.factors)
        }
        forms = {
            "heads": Form(("kv", "query"), Within.PERMUTATION),
            "values": values or Form(("kv", "value"), Within.NOTHING),
            "keys": keys or Form(("kv", "key"), Within.NOTHING),
            "nopes": nopes or Form(("kv", "nope"), Within.NOTHING),
        }
        return Site({kind: form for kind, form in forms.items() if set(form.factors) <= used})

    def _first_that_holds(
        self,
        labels: Mapping[str, Templates],
        site: str,
        kind: str,
        factors: tuple[str, ...],
        options: Sequence[tuple[Within, str]],
        group: Within,
    ) -> Form | None:
        for within, pairing in options:
            form = Form(factors, within, pairing)
            if self._holds(labels, {site: Site({kind: form})}, (kind,), group):
                return form
        return None

    def _attention_labels(self, path: str, site: str) -> Iterator[dict[str, Templates]]:
        """Hypotheses of how an attention module's tensors are laid out, likeliest first."""
        output = self._tensor(path, OUTPUT) or self._tensor(path.rpartition(".")[0], OUTPUT)
        if output is None or RESIDUAL not in self.draft.axes[output]:
            return
        query, key, value = (self._tensor(path, names) for names in (QUERY, KEY, VALUE))
        fused = self._tensor(path, FUSED_QKV)

        def layout(*parts: tuple[str, ...], outer: tuple[str, ...] = (), even: str = "") -> Layout:
            marks = frozenset({even} if even else ())
            return Layout(site, tuple(Part(part, marks) for part in parts), outer)

        rows = {
            "query": layout(("kv", "query", "key")),
            "gated query": layout(("key",), ("value",), outer=("kv", "query")),
            "key": layout(("kv", "key")),
            "value": layout(("kv", "value")),
            "output": layout(("kv", "query", "value")),
            "heads": layout(("kv", "query")),
        }
        if self._tensor(path, ("kv_b_proj",)):
            yield from self._latent_labels(path, layout, output)
        elif query and key and value:
            for queries in ("query", "gated query"):
                yield self._assembled(
                    path,
                    output,
                    rows,
                    {query: rows[queries], key: rows["key"], value: rows["value"]},
                )
        elif fused:
            for label in (
                layout(("kv", "query", "key"), ("kv", "key"), ("kv", "value")),
                layout(("query", "key"), ("key",), ("value",), outer=("kv",)),
                layout(
                    ("kv", "query", "key"),
                    (
                        "kv",
                        "key",
                    ),
                    ("kv", "value"),
                    ("kv", "query", "value"),
                ),
            ):
                yield self._assembled(path, output, rows, {fused: label})

    def _assembled(
        self,
        path: str,
        output: str,
        rows: Mapping[str, Layout],
        projections: Mapping[str, Layout],
    ) -> dict[str, Templates]:
        axes: dict[str, Templates] = {}

        def put(name: str | None, label: Layout) -> None:
            found = self._on_free_axis(name, label) if name else None
            if name and found:
                axes[name] = found

        for weight, projection in projections.items():
            put(weight, projection)
            bias = weight.rpartition(".")[0] + ".bias"
            if bias in self.bench.state:
                axes[bias] = (projection,)
        put(output, rows["output"])
        sizes = self._axis_sizes(rows, path)
        for name, tensor in self.bench.state.items():
            if not name.startswith(f"{path}.") or name in axes:
                continue
            leaf = name.removeprefix(f"{path}.").rpartition(".")[0]
            label: Layout | None = None
            if tensor.ndim == 1 and re.search(r"q\w*norm", leaf):
                label = rows["query"] if len(tensor) == sizes["query"] else None
            elif tensor.ndim == 1 and re.search(r"k\w*norm", leaf):
                label = rows["key"] if len(tensor) == sizes["key"] else None
            elif tensor.ndim == 1 and "norm" in leaf:
                label = rows["output"] if len(tensor) == sizes["output"] else None
            if label is not None:
                axes[name] = (label.unsigned if name.endswith("weight") else label,)
                continue
            if tensor.ndim == 2 and "norm" in leaf and tensor.numel() in (
                sizes["query"], sizes["key"]
            ):  # fmt: skip
                row = rows["query"] if re.search(r"q\w*norm", leaf) else rows["key"]
                spanning = replace(row.unsigned, span=2)
                axes[name] = (spanning, spanning)
            elif leaf in GATES and sizes["output"] in tensor.shape:
                gate = rows["output"].unsigned
                axes[name] = tuple(
                    gate if size == sizes["output"] and own is None else own
                    for size, own in zip(tensor.shape, self.draft.axes[name], strict=True)
                )
            elif sizes["heads"] in tensor.shape and sizes["heads"] > 1:
                axes[name] = tuple(
                    rows["heads"] if size == sizes["heads"] and own is None else own
                    for size, own in zip(tensor.shape, self.draft.axes[name], strict=True)
                )
        return axes

    def _axis_sizes(self, rows: Mapping[str, Layout], path: str) -> dict[str, int]:
        sizes = {}
        candidate = self.dimensions.candidates[0]
        for role, label in rows.items():
            total = 0
            for part in label.parts:
                count = 1
                for factor in (*label.outer, *part.factors):
                    count *= candidate.get(factor, 0)
                total += count
            sizes[role] = total
        return sizes

    def _latent_labels(self, path: str, layout: Any, output: str) -> Iterator[dict[str, Templates]]:
        query = self._tensor(path, ("q_b_proj", "q_proj"))
        keys = self._tensor(path, ("kv_b_proj",))
        if query is None or keys is None:
            return
        for queries in (
            layout(("nope",), ("rope",), outer=("kv", "query")),
            layout(("rope",), ("nope",), outer=("kv", "query")),
        ):
            axes: dict[str, Templates] = {}
            for name, label in {
                query: queries,
                keys: layout(("nope",), ("value",), outer=("kv",)),
                output: layout(("kv", "query", "value")),
            }.items():
                free = [i for i, axis in enumerate(self.draft.axes[name]) if axis is None]
                position = 1 if name == output else 0
                if position in free:
                    axes[name] = self._with(name, position, label)
            yield axes

    # ---- experts -----------------------------------------------------------------------------

    def _expert_sites(self) -> list[str]:
        """Modules that hold experts as tensors with an axis of experts, by their parent's path."""
        found = []
        for path, _ in self._paths():
            own = [
                tensor
                for name, tensor in self.bench.state.items()
                if name.rpartition(".")[0] == path and tensor.ndim == 3
            ]
            counts = {tensor.shape[0] for tensor in own}
            touches = any(self.width in tensor.shape[1:] for tensor in own)
            if touches and len(counts) == 1 and counts != {1}:
                found.append(path)
        return found

    def _try_experts(self, path: str, group: Within) -> None:
        site = star(self._bare(path))
        count = next(
            tensor.shape[0]
            for name, tensor in self.bench.state.items()
            if name.rpartition(".")[0] == path and tensor.ndim == 3
        )
        form = Form(("expert",), Within.PERMUTATION)
        units = self._units_under(path, skip_first=True)
        for inside in self._unit_layouts(site, path, units, experts=True):
            for router in self._router_labels(path, site, count):
                labels = self._every({**router, **inside})
                move_units = Site({"mlp": Form(("expert", "unit"), Within.PERMUTATION)})
                if not self._holds(labels, {site: move_units}, ("mlp",), group):
                    break
                both = Site({"experts": form, **move_units.spaces}, blocks_move=True)
                if self._holds(labels, {site: both}, ("experts", "mlp"), group):
                    self._accept_signed(site, both, labels, group)
                    return
            else:
                continue
        for inside in self._unit_layouts(site, path, units, experts=True):
            labels = self._every(inside)
            alone = Site({"mlp": Form(("expert", "unit"), Within.PERMUTATION)})
            if self._holds(labels, {site: alone}, ("mlp",), group):
                self._accept_signed(site, alone, labels, group)
                return

    def _router_labels(self, path: str, site: str, count: int) -> Iterator[dict[str, Templates]]:
        parent = path.rpartition(".")[0]
        label = Layout(site, (Part(("expert",)),))
        axes = {}
        for name, tensor in self.bench.state.items():
            inside = name.startswith(f"{path}.")
            if not name.startswith(f"{parent}.") or (inside and tensor.ndim > 2):
                continue
            if count in tensor.shape and tensor.ndim <= 2:
                index = list(tensor.shape).index(count)
                if self.draft.axes[name][index] is None and name not in axes:
                    axes[name] = self._with(name, index, label)
        yield axes

    # ---- hidden units ------------------------------------------------------------------------

    def _unit_sites(self) -> list[tuple[str, int]]:
        """Parents of a matrix that writes hidden units into the residual stream."""
        taken = set(self.draft.sites)
        found: list[tuple[str, int]] = []
        for name, tensor in self.bench.state.items():
            if tensor.ndim != 2 or self.draft.axes[name].count(RESIDUAL) != 1:
                continue
            path = name.rpartition(".")[0].rpartition(".")[0]
            free = [i for i, axis in enumerate(self.draft.axes[name]) if axis is None]
            if len(free) != 1 or tensor.shape[free[0]] < 4:
                continue
            leaf = name.rpartition(".")[0].rpartition(".")[2]
            if READERS.fullmatch(leaf) or not re.search(r"\d", path):
                continue
            for candidate in (path, path.rpartition(".")[0]):
                pattern = star(self._bare(candidate))
                size = tensor.shape[free[0]]
                if pattern in taken or not re.search(r"\*", pattern):
                    continue
                partners = [
                    other
                    for other, mine in self.bench.state.items()
                    if other.startswith(f"{candidate}.")
                    and other != name
                    and (size in mine.shape or 2 * size in mine.shape)
                ]
                if partners:
                    if not any(star(p) == star(candidate) and s == size for p, s in found):
                        found.append((candidate, size))
                    break
        return found

    def _units_under(self, path: str, skip_first: bool = False) -> list[int]:
        sizes = []
        for name, tensor in self.bench.state.items():
            if name.rpartition(".")[0] != path or tensor.ndim != 3:
                continue
            for size in tensor.shape[1:]:
                if size != self.width and size not in sizes:
                    sizes.append(size)
        return sorted(sizes)

    def _unit_layouts(
        self, site: str, path: str, sizes: Sequence[int], *, experts: bool = False
    ) -> Iterator[dict[str, Templates]]:
        """Hypotheses of which axes run over hidden units: alone, doubled, or interleaved."""
        if not sizes:
            return
        unit = min(sizes)
        first = ("expert",) if experts else ()
        span = 2 if experts else 1
        single = Layout(site, (Part(("unit",)),), first, span)
        doubles = [
            Layout(site, (Part(("unit",)), Part(("unit",))), first, span),
            Layout(site, (Part(()), Part(())), (*first, "unit"), span),
        ]
        for double in doubles:
            axes: dict[str, Templates] = {}
            doubled = False
            for name, tensor in self.bench.state.items():
                if not name.startswith(f"{path}."):
                    continue
                labels = list(self.draft.axes[name])
                if any(isinstance(axis, Layout) for axis in labels):
                    continue
                for index, size in enumerate(tensor.shape):
                    if labels[index] is not None or (experts and (index == 0 or tensor.ndim < 2)):
                        continue
                    if size == unit:
                        labels[index] = single
                    elif size == 2 * unit:
                        labels[index] = double
                        doubled = True
                    else:
                        continue
                    if experts:
                        labels[0] = labels[index]
                if tuple(labels) != self.draft.axes[name]:
                    axes[name] = tuple(labels)
            if axes:
                yield axes
            if not doubled:
                return

    def _try_units(self, path: str, size: int, group: Within) -> None:
        site = star(self._bare(path))
        kind = "ssm" if STATE_SPACE.search(path) else "mlp"
        if site in self.draft.sites:
            return
        for axes in self._unit_layouts(site, path, [size]):
            labels = self._every(axes)
            form = Site({kind: Form(("unit",), Within.PERMUTATION)})
            if self._holds(labels, {site: form}, (kind,), group):
                self._accept_signed(site, form, labels, group, kind)
                return

    def _accept_signed(
        self,
        site: str,
        form: Site,
        labels: Mapping[str, Templates],
        group: Within,
        kind: str = "mlp",
    ) -> None:
        """Accept a site of hidden units, with signs where some choice of gates admits them."""
        spaces = {**form.spaces, kind: replace(form.spaces[kind], within=Within.SIGNED_PERMUTATION)}
        signed = replace(form, spaces=spaces)
        for option in self._gate_options(labels, kind):
            if self._holds(option, {site: signed}, tuple(spaces), group, seed=4):
                self._accept(site, signed, option)
                return
        self._accept(site, form, labels)

    def _gate_options(
        self, labels: Mapping[str, Templates], kind: str
    ) -> Iterator[dict[str, Templates]]:
        """Which part is the gate, whose sign the activation feels: each matrix, or each half."""
        names = [
            name
            for name, axes in labels.items()
            if any(isinstance(axis, Layout) and _runs_over_units(axis) for axis in axes)
        ]
        halves = {
            star(name) for name in names
            if any(isinstance(axis, Layout) and len(axis.parts) == 2 for axis in labels[name])
        }  # fmt: skip
        if halves:
            for gate in (0, 1):
                yield {
                    name: tuple(_even_part(axis, gate, kind) for axis in axes)
                    for name, axes in labels.items()
                }
            return
        modules = dict.fromkeys(
            star(name).rpartition(".")[0] if "experts" not in star(name) else star(name)
            for name in names
        )
        for gate_module in modules:
            yield {
                name: tuple(
                    axis.unsigned
                    if isinstance(axis, Layout)
                    and gate_module in (star(name), star(name).rpartition(".")[0])
                    else axis
                    for axis in axes
                )
                for name, axes in labels.items()
            }


def _runs_over_units(axis: Layout) -> bool:
    return any("unit" in (*axis.outer, *part.factors) for part in axis.parts)


def _even_part(axis: Template | None, gate: int, kind: str) -> Template | None:
    if not isinstance(axis, Layout) or len(axis.parts) != 2:
        return axis
    parts = tuple(
        Part(part.factors, frozenset({kind})) if index == gate else part
        for index, part in enumerate(axis.parts)
    )
    return replace(axis, parts=parts)


def text_config(config: Any) -> Any:
    """The config of the decoder that the residual stream runs through."""
    return config.get_text_config(decoder=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what classes say of themselves when they are built at odd sizes."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
