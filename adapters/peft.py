"""PEFT adapters, of every type: the tables of :mod:`.peft_methods`, applied to a saved adapter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signed_align.adapters.artifact import Artifact, Journey, Part
from signed_align.adapters.formats import TensorFile, open_tensors
from signed_align.adapters.json_files import read_json
from signed_align.adapters.peft_methods import (
    COLUMN,
    METHODS,
    PARAMETER,
    REFUSALS,
    SEEDED,
    SHARED_REASON,
    Case,
    Entries,
    Entry,
    Method,
    Need,
    Rule,
    Side,
)
from signed_align.adapters.peft_table import row_of
from signed_align.chart import VOCABULARY, Layout, ModuleLabel, Template
from signed_align.chart import Part as Run
from signed_align.errors import ArtifactError, ChartError, GaugeError
from signed_align.labels import (
    Axes,
    Fused,
    Label,
    joined,
    stacked_factor,
    transport_entries,
    transport_flat_entries,
)
from signed_align.model_card import without_metadata, without_section

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
"""In the order in which peft looks for them."""

PREFIXES = ("base_model.model.", "base_model.")
MOST_LAYERS = 1000
SHADOW_BACKBONE = "base_model.shadow_backbone."
XLORA_READER = "internal_xlora_classifier.layers.0.weight"
ADAPTION_MODELS = ("llama", "mistral")
KEPT_WITH_CARE: Mapping[str, str] = {
    "pissa": "the adapter's init_lora_weights takes a singular part out of the base when it is "
    "loaded: that part moves with the base up to rounding",
    "lora_ga": "peft does not restore what init_lora_weights lora_ga took out of the base; the "
    "moved adapter does what peft makes of it",
}


class PeftFamily:
    """Adapters as ``PeftModel.save_pretrained`` writes them."""

    kind = "PEFT adapter"

    def recognises(self, path: Path) -> bool:
        """Whether it is a directory with an adapter_config.json."""
        return path.is_dir() and (path / CONFIG_NAME).is_file()

    def inspect(self, path: Path) -> dict[str, Any]:
        """Type, rank, targets and base model."""
        config = read_json(path / CONFIG_NAME)
        keys = ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules", "bias")
        return {
            "kind": kind_of(config),
            **{key: config.get(key) for key in keys},
            "verdict": row_of(str(config.get("peft_type"))).verdict,
        }

    def read(self, path: Path, journey: Journey) -> Artifact:
        """Read and label the adapter; raises ArtifactError, with the reason, if it cannot move."""
        config = read_json(path / CONFIG_NAME)
        require_movable(config, journey)
        file = open_weights(path)
        labeller = Labeller(config, journey, file.shapes)
        labeller.require_shared()
        for name, shape in file.shapes.items():
            labeller(name, tuple(shape))
        instead, remarks = _moved_entries(labeller, file)
        init = str(config.get("init_lora_weights")).lower()
        return Artifact(
            kind=kind_of(config),
            path=path,
            made_on=config.get("base_model_name_or_path"),
            parts=[
                Part(
                    file,
                    labeller,
                    lambda name: (
                        instead[name] if name in instead else _other_expert(labeller, file, name)
                    ),
                    remarks,
                )
            ],
            settings={CONFIG_NAME: moved_config(config, journey, labeller)},
            notes=[
                *([KEPT_WITH_CARE[init]] if init in KEPT_WITH_CARE else []),
                *_outdated_card(path, config),
            ],
        )


def _outdated_card(path: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """A note, if the text of the model card names the base, which it goes on to do."""
    card, base = path / "README.md", config.get("base_model_name_or_path")
    if not base or not card.is_file():
        return
    text = card.read_text(encoding="utf-8", errors="replace")
    if str(base) in without_metadata(without_section(text)):
        yield f"the text of README.md still names {base} as the base model"


def kind_of(config: Mapping[str, Any]) -> str:
    """The kind of an adapter, for people."""
    names = {"LORA": "LoRA", "ADALORA": "AdaLoRA", "VERA": "VeRA", "LOHA": "LoHa", "LOKR": "LoKr"}
    peft_type = str(config.get("peft_type"))
    return f"PEFT {names.get(peft_type, peft_type)} adapter"


def open_weights(path: Path) -> TensorFile:
    """The tensors of the adapter in directory ``path``; raises ArtifactError if there are none."""
    for name in WEIGHTS_NAMES:
        if (path / name).is_file():
            return open_tensors(path / name)
    raise ArtifactError(f"{path} has no {' and no '.join(WEIGHTS_NAMES)}.")


def moved_config(
    config: dict[str, Any], journey: Journey, labeller: Labeller | None = None
) -> dict[str, Any]:
    """The ``adapter_config.json`` as it reads after the move."""
    moved = dict(config)
    if journey.target is not None:
        moved |= {"base_model_name_or_path": journey.target}
        if config.get("revision") is not None:
            moved["revision"] = None
    tied = labeller is not None and METHODS[str(config["peft_type"])].whole_paths
    if labeller is not None and tied and not labeller.ties_agree():
        moved["target_modules"] = labeller.adapted
    return moved


def require_movable(config: Mapping[str, Any], journey: Journey) -> None:
    """Raise ArtifactError for a type, or a setting of it, that cannot be moved."""
    peft_type = str(config.get("peft_type"))
    if peft_type in REFUSALS:
        refusal = REFUSALS[peft_type]
        raise ArtifactError(
            f"an adapter of PEFT type {peft_type} cannot be moved: {refusal.reason}; "
            f"{refusal.way_out}."
        )
    if peft_type not in METHODS:
        raise ArtifactError(
            f"the adapter is of PEFT type {peft_type!r}, which this release does not know."
        )
    method = METHODS[peft_type]
    for option, (forbids, reason) in method.options.items():
        if option in config and forbids(config[option]):
            raise ArtifactError(
                f"the adapter's {option} is {config[option]!r}, so it cannot be moved: {reason}; "
                f"{method.way_out or 'there is no way out'}."
            )
    if peft_type == "ADAPTION_PROMPT" and journey.chart.model_type not in ADAPTION_MODELS:
        raise ArtifactError(
            "this adaption prompt adds head coordinates to the residual stream, so it cannot be "
            f"moved on a {journey.chart.model_type} model."
        )


class Labeller:
    """The axis labels of one saved adapter's tensors.

    Parameters
    ----------
    config : mapping
        Its ``adapter_config.json``.
    journey : Journey
        Where it goes.
    shapes : mapping of str to tuple of int
        All of its tensors.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        journey: Journey,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.config, self.journey, self.shapes = config, journey, shapes
        self.chart = journey.chart
        self.method: Method = METHODS[str(config["peft_type"])]
        self._suffixes = {
            suffix: re.compile(rf"(?:(.*)\.)?{re.escape(suffix).replace(chr(92) + '*', '[0-9]+')}")
            for suffix in sorted(
                {*self.method.tensors, *self.method.shared, *self._entry_names()},
                key=lambda suffix: ("*" in suffix, -len(suffix)),
            )
        }

    def __call__(self, key: str, shape: tuple[int, ...]) -> Axes:
        """The axis labels of the tensor ``key``.

        Raises
        ------
        ArtifactError
            If the tensor is of no known kind, is of a module that the chart does not know, or the
            gauge moves what it needs to stay.
        """
        try:
            return self._axes(key, shape)
        except (ChartError, GaugeError) as error:
            raise ArtifactError(f"the adapter tensor {key!r} is not understood: {error}") from error

    @cached_property
    def adapted(self) -> list[str]:
        """The paths of the adapted modules, each once."""
        found: dict[str, None] = {}
        for key in self.shapes:
            path, suffix = self._split(key)
            if path and suffix and suffix not in self.method.shared:
                found[path] = None
        return list(found)

    @cached_property
    def _keys(self) -> dict[tuple[str, str | None], str]:
        return {self._split(key): key for key in self.shapes}

    def entries(self) -> Iterator[tuple[str, Entries]]:
        """The modules with tensors that are moved entry by entry."""
        for path in self.adapted:
            for one in self.method.entries:
                if self.key_of(path, one.values) or self.key_of(path, one.indices):
                    yield path, one

    def key_of(self, path: str, suffix: str) -> str | None:
        """The name of a module's tensor in the file, or None if it has none."""
        return self._keys.get((path, suffix))

    def weight_axes(self, path: str) -> tuple[Axes, tuple[int, int]]:
        """The labels of a module's outputs and inputs, and how many there are of each."""
        module, numbers = self.chart.module(path)
        shape = (self._size(path, "out"), self._size(path, "in"))
        return self.chart.bind(path, (module.output, module.input), shape, numbers), shape

    def require_shared(self) -> None:
        """Raise ArtifactError if a tensor that all modules share is not in the file."""
        present = {suffix for _, suffix in self._keys}
        for suffix in self.method.shared:
            if suffix not in present:
                raise ArtifactError(
                    f"the adapter has no {suffix}, which all its modules share, so it cannot be "
                    f"moved: {SEEDED}; {self.method.way_out}."
                )
        if self.config["peft_type"] == "XLORA" and XLORA_READER not in present:
            raise ArtifactError(
                f"the mixture has no {XLORA_READER}, which reads the residual stream: peft leaves "
                "it out when it saves, since its experts are called 0, 1, …; save the classifier's "
                "state_dict into the file."
            )

    def ties_agree(self) -> bool:
        """Whether copies of equal shape move alike, so that peft may tie them to each other."""
        moved: dict[tuple[str | None, tuple[int, ...]], list[Any]] = {}
        for key, shape in self.shapes.items():
            suffix = self._split(key)[1]
            axes = self(key, tuple(shape))
            moved.setdefault((suffix, tuple(shape)), []).append(
                [self.journey.element(axis, size) for axis, size in zip(axes, shape, strict=True)]
            )
        return all(copy == copies[0] for copies in moved.values() for copy in copies)

    def expert_key(self, key: str) -> str:
        """The name of the tensor that becomes the one called ``key``, where experts move.

        Raises ArtifactError if a setting may name the expert that changes places.
        """
        path, suffix = self._split(key)
        if not path or suffix is None:
            return key
        weight = f"{path}.weight"
        other = self.chart.origin(weight, self.journey.gauge)
        if other == weight:
            return key
        for option in ("rank_pattern", "alpha_pattern", "layer_replication"):
            if self.config.get(option):
                raise ArtifactError(
                    f"the adapter has a {option}, and is on single experts, which change places; "
                    "convert it to one rank and one scale for all (peft.save_as_lora)."
                )
        return key.replace(path, other.removesuffix(".weight"), 1)

    # ---- names -------------------------------------------------------------------------------

    def _entry_names(self) -> Iterator[str]:
        for one in self.method.entries:
            yield from (one.indices, one.values)

    def _split(self, key: str) -> tuple[str, str | None]:
        """The path of the module a tensor belongs to, and the table's name for the tensor."""
        name = re.sub(r"\.default(?=\.|$)", "", key)
        if not name.startswith(PREFIXES) and "prompt_embeddings" not in self.method.tensors:
            return "", None
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        for suffix, pattern in self._suffixes.items():
            match = pattern.fullmatch(name)
            if match:
                return self._original(match[1] or ""), suffix
        return "", None

    @cached_property
    def _layers(self) -> list[int]:
        """Of each layer of the adapted model: the layer of the base that it is a copy of."""
        replication = self.config.get("layer_replication") or ()
        count = self.journey.layers or MOST_LAYERS
        spans = replication if isinstance(replication, (list, tuple)) else [replication]
        for span in spans:
            pair = isinstance(span, (list, tuple)) and len(span) == 2
            numbers = pair and all(type(number) is int for number in span)
            if not numbers or not 0 <= span[0] < span[1] <= count:
                raise ArtifactError(
                    f"the adapter's layer_replication is {replication!r}; expected pairs of layers "
                    f"of the base, which has {count}."
                )
        return [layer for start, stop in spans for layer in range(start, stop)]

    def _original(self, path: str) -> str:
        """The name of a module or weight in the base, where layers were replicated."""
        if not self.config.get("layer_replication"):
            self.journey.require_layer(path)
            return path

        def number(match: re.Match[str]) -> str:
            copy = int(match[2]) if len(match[2]) < 10 else len(self._layers)
            if copy >= len(self._layers):
                raise ArtifactError(
                    f"the adapter is on {path!r}, and its layer_replication makes "
                    f"{len(self._layers)} layers."
                )
            return f"{match[1]}{self._layers[copy]}"

        return re.sub(rf"((?:^|\.){re.escape(self.chart.blocks)}\.)(\d+)", number, path)

    # ---- labels ------------------------------------------------------------------------------

    def _axes(self, key: str, shape: tuple[int, ...]) -> Axes:
        if key.startswith(SHADOW_BACKBONE):
            return self._backbone_axes(key, shape)
        copied = re.fullmatch(r"base_model\.model\.(.+)\.ln_tuning_layers\.(.+)", key)
        if PARAMETER in self._entries_of("ln_tuning_layers") and copied:
            return self.chart.axes(f"{copied[1]}.{copied[2]}", shape)
        path, suffix = self._split(key)
        if suffix is None:
            return self._base_axes(key, shape)
        if suffix in self.method.shared:
            return self._shared_axes(key, self.method.shared[suffix], shape)
        if suffix in set(self._entry_names()):
            return (None,) * len(shape)
        adapted = self._adapted_parameters(path)
        if adapted:
            return self._parameter_axes(path, adapted, suffix, shape)
        rule = self._rule(path, suffix, shape)
        for need in rule.needs:
            self._require(path, need)
        return self._bind(key, path, rule.axes, shape)

    def _entries_of(self, suffix: str) -> tuple[Entry, ...]:
        return tuple(axis for rule in self.method.tensors.get(suffix, ()) for axis in rule.axes)

    def _base_axes(self, key: str, shape: tuple[int, ...]) -> Axes:
        """Weights of the base that peft saves beside its own: biases, embeddings, whole modules."""
        if not key.startswith(PREFIXES[0]):
            raise ChartError(f"it does not start with {PREFIXES[0]!r}.")
        name = key.removeprefix(PREFIXES[0]).replace(".base_layer.", ".")
        return self.chart.axes(self._original(name), shape)

    def _rule(self, path: str, suffix: str, shape: tuple[int, ...]) -> Rule:
        rules = self.method.tensors[suffix]
        if path and self.method.embedding and self.chart.module(path)[0].input == VOCABULARY:
            rules = self.method.embedding.get(suffix, rules)
        case = Case(
            self.config, shape, lambda: self._size(path, "in"), lambda: self._size(path, "out")
        )
        for rule in rules:
            if len(rule.axes) == len(shape) and rule.when(case):
                return rule
        raise ChartError(f"a tensor of shape {shape} was not expected there.")

    def _bind(self, key: str, path: str, entries: Sequence[Entry], shape: tuple[int, ...]) -> Axes:
        if Side("cache") in entries:
            return (*[None] * (len(shape) - 1), self._cache_label(shape[-1]))
        sides = any(isinstance(entry, Side) for entry in entries)
        module, numbers = self.chart.module(path) if sides else (ModuleLabel(), ())
        templates = [
            self._template(path, module, entry) if isinstance(entry, Side) else entry
            for entry in entries
        ]
        return self.chart.bind(key, tuple(templates), shape, numbers)

    def _template(self, path: str, module: ModuleLabel, side: Side) -> Template | None:
        if side.of == COLUMN.of:
            template = module.parameters["weight"][1]
        else:
            template = module.input if self._of(path, side) == "in" else module.output
        return template.unsigned if template and not side.signed else template

    def _of(self, path: str, side: Side) -> str:
        """``in`` or ``out``, where a side is whichever is smaller or larger."""
        if side.of in ("in", "out"):
            return side.of
        fewer = "in" if self._size(path, "in") <= self._size(path, "out") else "out"
        more = "out" if fewer == "in" else "in"
        return fewer if side.of == "small" else more

    def _size(self, path: str, of: str) -> int:
        """How many coordinates go into, or come out of, a module of the base."""
        module = self._base_module(path)
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise ChartError(f"{path!r} is no linear layer or embedding.")
        rows_first = isinstance(module, torch.nn.Embedding) or "Conv1D" in type(module).__name__
        return int(weight.shape[0 if (of == "in") == rows_first else 1])

    def _base_module(self, path: str) -> Any:
        try:
            return self.journey.skeleton.get_submodule(path)
        except AttributeError as error:
            raise ChartError(f"the base model has no module {path!r}.") from error

    def _label(self, path: str, side: Side) -> tuple[Label | None, int]:
        module, numbers = self.chart.module(path)
        size = self._size(path, self._of(path, side))
        template = self._template(path, module, side)
        return self.chart.bind(path, (template,), (size,), numbers)[0], size

    def _require(self, path: str, need: Need) -> None:
        label, size = self._label(path, need.side)
        element = self.journey.element(label, size)
        if element.is_identity or (need.verb == "flip" and not element.flips):
            return
        side = {"in": "inputs", "out": "outputs"}[need.side.of]
        verb = "moves" if need.verb == "move" else "flips the signs of"
        raise ArtifactError(
            f"an adapter of PEFT type {self.config['peft_type']} on {path!r} cannot be moved by a "
            f"gauge that {verb} its {side}: {need.reason}; "
            f"{self.method.way_out or 'there is no way out'}."
        )

    def _shared_axes(self, key: str, rule: Rule, shape: tuple[int, ...]) -> Axes:
        """The labels of a tensor of which every adapted module uses the beginning."""
        axes: list[Label | None] = []
        for entry, size in zip(rule.axes, shape, strict=True):
            if not isinstance(entry, Side):
                axes.append(None)
                continue
            used = [self._label(path, entry) for path in self.adapted]
            label, most = max(used, key=lambda one: one[1], default=(None, size))
            if most > size:
                raise ChartError(f"it has {size} coordinates, its modules have {most}.")
            whole = self.journey.element(label, most)
            for other, count in used:
                if not whole.extends(self.journey.element(other, count)):
                    raise ArtifactError(
                        f"the adapter tensor {key!r} cannot be moved: {SHARED_REASON}; "
                        f"{self.method.way_out}."
                    )
            # what no module uses stays where it is
            axes.append(label if most == size else joined([label, None], [most, size - most]))
        return tuple(axes)

    def _backbone_axes(self, key: str, shape: tuple[int, ...]) -> Axes:
        """A shadow backbone reads the base's embeddings: its stream is the base's, if as wide."""
        if any("shadow_projection" in other for other in self.shapes):
            return (None,) * len(shape)
        name = re.sub(r"\.default(?=\.|$)", "", key).removeprefix(SHADOW_BACKBONE)
        return self.chart.residual_alone().axes(name, shape)

    def _cache_label(self, size: int) -> Label | None:
        """The label of all layers' keys and values: per layer the keys' heads, then the values'."""
        modules = (name for name, _ in self.journey.skeleton.named_modules())
        sites = self.chart.sites_among(modules, ("keys", "values"))
        if not sites:
            return None
        latent = any("nopes" in self.chart.sites[pattern].spaces for pattern, _ in sites)
        each, rest = divmod(size, 2 * len(sites))
        if latent or rest:
            raise ChartError("the layout of this model's key-value cache is not known.")
        labels: list[Label | None] = []
        for pattern, numbers in sites:
            for kind in ("key", "value"):
                run = Layout(pattern, (Run(("kv", kind)),))
                labels += self.chart.bind("prompt_embeddings", (run,), (each,), numbers)
        return joined(labels, [each] * len(labels))

    # ---- adapters on bare parameters ---------------------------------------------------------

    def _adapted_parameters(self, path: str) -> list[str]:
        """The parameters of a module that are adapted by themselves, in the order it has them."""
        targets = self.config.get("target_parameters")
        if not isinstance(targets, list) or not targets or not path:
            return []
        bare = re.sub(r"(\.base_layer)+$", "", path)
        return [
            name
            for name in self._base_module(bare)._parameters
            if any(f".{bare}.{name}".endswith(f".{target}") for target in targets)
        ]

    def _parameter_axes(
        self, path: str, names: Sequence[str], suffix: str, shape: tuple[int, ...]
    ) -> Axes:
        """A factor of the update of a bare parameter; of stacked experts it holds all of them.

        peft nests one wrapper a parameter around the module, the first registered innermost. The
        A factor runs over experts and rank, the B factor over rank and experts; A goes with the
        last axis of the parameter and B with the one before, or the other way round where the
        module says that it is transposed.
        """
        bare = re.sub(r"(\.base_layer)+$", "", path)
        module = self._base_module(bare)
        depth = path.count(".base_layer")
        if depth >= len(names):
            raise ChartError(f"target_parameters do not say which parameter of {bare!r} it adapts.")
        name = names[len(names) - 1 - depth]
        whole = tuple(module._parameters[name].shape)
        axes = self.chart.axes(f"{bare}.{name}", whole)
        first = suffix == "lora_A.weight"
        if len(whole) == 2:
            return self._matrix_factor(axes, first)
        if len(whole) != 3:
            raise ChartError(f"the parameter {name!r} has {len(whole)} axes.")
        swapped = not getattr(module, "is_transposed", False)
        rank = shape[0 if first else 1] // whole[0]
        return stacked_factor(axes, whole, 2 if first == swapped else 1, rank, last=not first)

    @staticmethod
    def _matrix_factor(axes: Axes, first: bool) -> Axes:
        if any(isinstance(axis, Fused) and axis.span > 1 for axis in axes):
            raise ChartError(
                "a low-rank update of one vector an expert has factors that no longer exist when "
                "every expert's units are permuted on their own."
            )
        return (None, axes[1]) if first else (axes[0], None)


def _moved_entries(
    labeller: Labeller, file: TensorFile
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors that hold single entries of an update, moved; and what to say of them."""
    moved: dict[str, Tensor] = {}
    remarks: dict[str, str] = {}
    for path, one in labeller.entries():
        indices, values = labeller.key_of(path, one.indices), labeller.key_of(path, one.values)
        if indices is None or values is None:
            raise ArtifactError(
                f"the adapter on {path!r} has only one of {one.indices} and {one.values}, so it is "
                "not known which values stand where."
            )
        _require_places(file, indices, values, one)
        axes, shape = labeller.weight_axes(path)
        places = file.tensor(indices)
        gauge = labeller.journey.gauge
        if one.flat:
            moved[indices], moved[values] = transport_flat_entries(
                places, file.tensor(values), axes, shape, gauge
            )
        else:
            pairs, there, _ = transport_entries(
                tuple(places), file.tensor(values), axes, shape, gauge
            )
            assert there is not None
            moved[indices], moved[values] = torch.stack(pairs), there
        remarks |= {indices: "entries of (out, in)", values: "values at entries of (out, in)"}
    return moved, remarks


def _require_places(file: TensorFile, indices: str, values: str, one: Entries) -> None:
    """Raise ArtifactError unless there is one place, in whole numbers, for every value."""
    places, count = file.tensor(indices), file.shapes[values]
    whole = not places.is_floating_point() or bool((places == places.round()).all())
    if not whole or len(count) != 1 or tuple(places.shape) != (count if one.flat else (2, *count)):
        raise ArtifactError(
            f"the adapter tensor {indices!r} of shape {tuple(places.shape)} does not give one "
            f"place for each of the values of shape {tuple(count)}."
        )


def _other_expert(labeller: Labeller, file: TensorFile, name: str) -> Tensor | None:
    other = labeller.expert_key(name)
    if other == name:
        return None
    if file.shapes.get(other) != file.shapes[name]:
        raise ArtifactError(
            f"the adapter has {name!r} but no {other!r} of the same shape, which moves there: all "
            "experts of a layer must be adapted alike."
        )
    return file.tensor(other)
