"""Lists of neurons and coordinates: an index goes where its coordinate goes, a value turns with it.

Understood are, in JSON: ``[3, 17]``; ``[[layer, index], ...]``; ``[[layer, index, value], ...]``;
``[[index, 0.5], ...]``; one list for every layer of the model; objects whose keys are layers or
hooks and which hold any of these; records such as ``{"layer": 3, "neuron": 17, "activation": 0.5}``
in a list; records of lists such as ``{"hook": "blocks.3.mlp.hook_post", "indices": [3, 17],
"activations": [0.5, 2.0]}``; under a hook or a layer ``{"17": 0.5}``; and arrays of one boolean or
number for every coordinate. A table (CSV, TSV) is a list of records. In what ``torch.save`` wrote,
integer tensors are indices, in two columns (layer, index) or a row a layer; booleans are masks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signed_align.adapters.artifact import Artifact, Journey, Part, or_unmoved
from signed_align.adapters.formats import SEPARATOR, TensorFile, TorchFile
from signed_align.adapters.json_files import read_any_json
from signed_align.adapters.lists.names import Role, is_value, role
from signed_align.adapters.lists.reading import (
    LAYER_PLACE,
    Array,
    Content,
    NotAListError,
    Reader,
    Where,
)
from signed_align.adapters.lists.text import (
    Column,
    MarkedText,
    Record,
    Scalar,
    read_text,
    scan_json,
    scan_table,
)
from signed_align.adapters.parity import Parity, parity, words_of
from signed_align.chart import numbers_in
from signed_align.errors import ArtifactError, ChartError
from signed_align.hooks import find_hook
from signed_align.labels import Axes, Label, transport, transport_entries

MAX_BYTES = 64 * 2**20
"""A longer file is no list for people or scripts to read."""

DELIMITERS: Mapping[str, Sequence[str]] = {".csv": (",", ";", "\t"), ".tsv": ("\t",)}
SUFFIXES = (".json", ".pt", *DELIMITERS)
NOT_LISTS = re.compile(
    r"(.*_)?config\.json|cfg\.json|.*\.index\.json|.*tokenizer.*\.json|vocab\.json"
    r"|added_tokens\.json|special_tokens_map\.json|trainer_state\.json|.*_results\.json"
)
"""Files that live beside models and adapters."""

INTEGERS = (torch.int16, torch.int32, torch.int64)
MOST_NAMED = 20
"""So many coordinates are named in a note; of the others it says how many they are."""


@dataclass(frozen=True)
class Spot:
    """A place in the model: its hook, the label of its coordinates, and how many they are."""

    hook: str
    label: Label
    size: int

    @property
    def spaces(self) -> str:
        """For people."""
        return " and ".join(self.label.spaces)


class Itinerary:
    """Finds the places that a file speaks of, and notes what its indices cannot say."""

    def __init__(self, journey: Journey) -> None:
        self.journey = journey
        self.notes: list[str] = []
        self.entries: list[tuple[str, Label, Tensor]] = []
        self._spots: dict[Where, Spot] = {}

    def spot(self, where: Where) -> Spot:
        """The place; raises ArtifactError if it is not said, or not known."""
        if where not in self._spots:
            self._spots[where] = self._find(where)
        return self._spots[where]

    def relocated(
        self, spot: Spot, indices: Tensor, values: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Indices and values in the target, and the signs that the coordinates take."""
        outside = indices[(indices < 0) | (indices >= spot.size)]
        if len(outside):
            raise ArtifactError(
                f"the index {int(outside[0])} is listed at {spot.hook!r}, which has {spot.size} "
                f"coordinates, 0 to {spot.size - 1}."
            )
        if torch.iinfo(indices.dtype).max < spot.size - 1:
            raise ArtifactError(
                f"indices of dtype {indices.dtype} do not reach all {spot.size} coordinates at "
                f"{spot.hook!r}; store them as int64."
            )
        listed = torch.zeros(spot.size)
        listed[indices.long()] = 1
        self.entries.append((spot.hook, spot.label, listed))
        (moved,), values, sign = transport_entries(
            [indices], values, (spot.label,), (spot.size,), self.journey.gauge
        )
        return moved, values, sign

    def report(self, spot: Spot, moved: Tensor, sign: Tensor) -> None:
        """Note the coordinates that change their sign, where no value carries it."""
        turned = moved[sign < 0].tolist()
        if not turned:
            return
        named = ", ".join(map(str, turned[:MOST_NAMED]))
        more = f" and {len(turned) - MOST_NAMED} more" if len(turned) > MOST_NAMED else ""
        change = "change their" if len(moved) > 1 else "change its"
        self.notes.append(
            f"{len(turned)} of {len(moved)} listed coordinates of {spot.hook} {change} sign: "
            f"{named}{more} (numbers in the target)"
        )

    def _find(self, where: Where) -> Spot:
        hook = self._hook(where)
        chart = self.journey.chart
        self.journey.require_layer(hook)
        try:
            size = self.journey.width_at(find_hook(chart, hook))
        except ChartError as error:
            raise ArtifactError(str(error)) from error
        if size is None:
            raise ArtifactError(
                f"the gauge does not keep the config of its source, so it is not known how many "
                f"coordinates there are at {hook!r}; make the gauge again with this release."
            )
        return Spot(hook, self.journey.place(hook, size)[1], size)

    def _hook(self, where: Where) -> str:
        """The name of the hook, with its layer."""
        hook = where.hook or self.journey.hook
        if hook is None:
            example = "blocks.{layer}" if where.layer is not None else "blocks.3"
            raise ArtifactError(
                "the list does not say of which place its indices are; name it with --hook, such "
                f"as --hook '{example}.mlp.hook_post' for neurons or --hook "
                f"'{example}.hook_resid_post' for residual coordinates."
            )
        if LAYER_PLACE in hook:
            if where.layer is None:
                raise ArtifactError(
                    f"the hook {hook!r} has a place for a layer, and the list does not say which."
                )
            return hook.replace(LAYER_PLACE, str(where.layer))
        if where.layer is None:
            return hook
        numbers = numbers_in(hook)
        if where.hook is not None and not numbers and "hook_" in hook:
            return f"blocks.{where.layer}.{hook}"
        if where.hook is None or numbers[:1] != [str(where.layer)]:
            raise ArtifactError(
                f"the list says layer {where.layer}, the hook is {hook!r}; write the hook with "
                f"{LAYER_PLACE} in place of the number: 'blocks.{LAYER_PLACE}.mlp.hook_post'."
            )
        return hook


# ---- the family ------------------------------------------------------------------------------


class ListFamily:
    """Neurons and coordinates by index, with or without values, and masks over them."""

    kind = "neuron list"

    def recognises(self, path: Path) -> bool:
        """Whether it is a file that holds nothing else than such lists."""
        if path.suffix not in SUFFIXES or not path.is_file() or NOT_LISTS.fullmatch(path.name):
            return False
        if not 0 < path.stat().st_size <= MAX_BYTES:
            return False
        try:
            if path.suffix == ".pt":
                _tensors(TorchFile(path))
            else:
                _content(path)
        except (NotAListError, RecursionError, OverflowError):
            return False
        except ArtifactError:
            # a list with a fault in it is refused with the reason; damaged files are not lists
            return path.suffix != ".pt" and _is_readable(path)
        return True

    def inspect(self, path: Path) -> dict[str, Any]:
        """The lists, by place, and how many coordinates are in each."""
        if path.suffix == ".pt":
            file = TorchFile(path)
            lists = {name: list(file.shapes[name]) for name in _tensors(file)[0]}
            return {"lists": lists, "model_name": _tensors(file)[1]}
        _, content = _content(path)
        found: dict[str, Any] = {}
        for one in content.entries:
            found[one.where.name] = found.get(one.where.name, 0) + len(one.indices)
        for array in content.arrays:
            found[array.where.name] = len(array.scalars)
        return {"lists": found, "model_name": content.model}

    def read(self, path: Path, journey: Journey) -> Artifact:
        """Read and label it; raises ArtifactError, with the reason, if it cannot be moved."""
        if path.stat().st_size > MAX_BYTES:
            raise ArtifactError(f"{path} is larger than {MAX_BYTES} bytes, too large for a list.")
        itinerary = Itinerary(journey)
        try:
            if path.suffix == ".pt":
                part, model = _tensor_part(TorchFile(path), itinerary)
            else:
                part, model = _text_part(path, itinerary)
        except NotAListError as error:
            raise ArtifactError(f"{path} holds no list of coordinates.") from error
        except (OverflowError, RecursionError) as error:
            raise ArtifactError(f"{path} holds numbers too large or lists too deep.") from error
        except ArtifactError as error:
            text = str(error)
            raise ArtifactError(text if str(path) in text else f"{path}: {text}") from error
        return Artifact(
            kind=self.kind,
            path=path,
            made_on=model,
            parts=[part],
            notes=itinerary.notes,
            entries=itinerary.entries,
        )


def _is_readable(path: Path) -> bool:
    try:
        read_text(path)
        if path.suffix == ".json":
            read_any_json(path)
    except ArtifactError:
        return False
    return True


def _content(path: Path) -> tuple[str, Content]:
    """The text of a file and the lists in it; raises NotAListError if there is anything else."""
    reader = Reader()
    text = read_text(path)
    if path.suffix == ".json":
        if not _could_be(read_any_json(path)):
            raise NotAListError
        reader.read(scan_json(text), Where())
    else:
        reader.records(_table(text, path.suffix), Where())
    content = reader.content
    if not any(one.indices for one in content.entries) and not content.arrays:
        raise NotAListError
    return text, content


def _could_be(content: Any) -> bool:
    """A first look, so that a long file of something else is not read any further."""
    if isinstance(content, list) and content:
        if isinstance(content[0], dict):
            return all(isinstance(item, dict) for item in content) and _could_be(content[0])
        return isinstance(content[0], (int, list))
    if not isinstance(content, dict) or not content:
        return False
    keys = [str(key) for key in content]
    return all(Where().at(key) for key in keys) or any(role(key) is not Role.VALUE for key in keys)


def _table(text: str, suffix: str) -> list[Record]:
    """The rows of a table, with the delimiter under which its header names an index."""
    header = re.split(r"[\r\n]", text, maxsplit=1)[0]
    for delimiter in DELIMITERS[suffix]:
        names = [name.strip('"\ufeff ') for name in header.split(delimiter)]
        if any(role(name) in (Role.INDEX, Role.BLOCK) for name in names):
            return scan_table(text, delimiter)
    raise NotAListError


def _text_part(path: Path, itinerary: Itinerary) -> tuple[Part, str | None]:
    """A JSON or CSV file as an artifact's part, and the model it names."""
    text, content = _content(path)
    _require_rows_of_layers(content.rows_of_layers, itinerary)
    columns: dict[str, Column] = {}
    instead: dict[str, Tensor] = {}
    remarks: dict[str, str] = {}
    axes: dict[str, Axes] = {}

    def named(where: Where, word: str) -> str:
        name = f"{where.name}{SEPARATOR}{word or 'value'}"
        number = 2
        while name in columns:
            name, number = f"{where.name}{SEPARATOR}{word or 'value'} ({number})", number + 1
        return name

    for one in content.entries:
        if not one.indices:
            continue
        spot = itinerary.spot(one.where)
        name = named(one.where, one.word)
        columns[name] = Column.of(one.indices)
        indices = columns[name].tensor
        if one.distinct and len(indices.unique()) != len(indices):
            raise ArtifactError(
                f"an index comes twice in the list at {spot.hook!r}; if the numbers are a mask, "
                "write true and false."
            )
        moved, _, sign = itinerary.relocated(spot, indices)
        instead[name], remarks[name] = moved, f"indices of {spot.spaces}"
        carried = False
        for field_name, entries in one.values.items():
            found = _values(field_name, entries, sign)
            if found is None:
                continue
            rows, column, is_odd = found
            name = named(one.where, field_name)
            columns[name] = column
            if is_odd:
                carried = True
                values = itinerary.relocated(spot, indices[rows], column.tensor)[1]
                assert values is not None
                instead[name] = values
                remarks[name] = f"values at indices of {spot.spaces}"
        if not carried:
            itinerary.report(spot, moved, sign)
    for array in content.arrays:
        spot = itinerary.spot(array.where)
        name = named(array.where, array.word)
        columns[name], axes[name] = _whole_array(array, spot, itinerary)
    replaced = []
    if itinerary.journey.target is not None:
        replaced = [
            (scalar, _spelled(itinerary.journey.target, scalar, text, path.suffix))
            for scalar in content.models
        ]
    file: TensorFile = MarkedText(path, text, columns, replaced)
    part = Part(file, or_unmoved(axes), instead.get, remarks)
    return part, content.model


def _values(
    name: str, entries: Sequence[tuple[int, Scalar]], sign: Tensor
) -> tuple[list[int], Column, bool] | None:
    """The numbers of a field, the entries they belong to, and whether signs flip them.

    None if there are no numbers in it. Raises ArtifactError if a sign would have to flip and it is
    not known whether these values do.
    """
    present = [(row, value) for row, value in entries if value.is_number]
    others = [value for _, value in entries if isinstance(value.value, str)]
    takes = parity(name)
    if others and is_value(name):
        raise ArtifactError(f"the {name} {others[0].value!r} is text, not a number.")
    if not present:
        return None
    rows = [row for row, _ in present]
    flipped = int((sign[rows] < 0).sum())
    if name and not is_value(name) and all(value.is_integer for _, value in present):
        raise ArtifactError(
            f"the field {name!r} holds integers, which may be indices too, and is not understood; "
            "leave it out, or name it for what it is."
        )
    if flipped:
        _require_clear(name, takes, flipped)
        _require_no_numbering(name, takes, [value for _, value in present])
    column = Column.of([value for _, value in present]).as_numbers
    return rows, column, takes is Parity.ODD


def _require_clear(name: str, takes: Parity, flipped: int) -> None:
    """Raise ArtifactError if values cannot follow a sign, or nobody can tell whether they do."""
    title = f"the field {name!r}" if name else "numbers without a name"
    if takes is Parity.UNCLEAR:
        raise ArtifactError(
            f"{flipped} of the listed coordinates change their sign, and it is not clear whether "
            f"{title} does so with them; write records with a field that is named for what it "
            "holds, such as 'activation' (it changes its sign) or 'attribution' (it does not)."
        )
    if takes is Parity.ONE_SIDED:
        raise ArtifactError(
            f"{flipped} of the listed coordinates change their sign, under which {title} becomes "
            "another quantity (a maximum becomes the minimum), so it cannot be moved; leave it out."
        )


def _require_no_numbering(name: str, takes: Parity, values: Sequence[Scalar]) -> None:
    """Raise ArtifactError for whole numbers that could count something: directions, components."""
    counts = {"component", "direction", "projection", "loading"} & set(words_of(name))
    if takes is Parity.ODD and counts and all(value.is_integer for value in values):
        raise ArtifactError(
            f"the field {name!r} holds whole numbers, which could count something and would change "
            "their sign; leave it out, or write its values with a decimal point."
        )


def _whole_array(array: Array, spot: Spot, itinerary: Itinerary) -> tuple[Column, Axes]:
    """One value for every coordinate, and its label."""
    if len(array.scalars) != spot.size:
        raise ArtifactError(
            f"there are {len(array.scalars)} values at {spot.hook!r}, which has {spot.size} "
            "coordinates."
        )
    is_mask = all(isinstance(scalar.value, bool) for scalar in array.scalars)
    if not is_mask and not all(scalar.is_number for scalar in array.scalars):
        raise ArtifactError(f"not all values at {spot.hook!r} are numbers.")
    takes = Parity.EVEN if is_mask else parity(array.word)
    flips = itinerary.journey.element(spot.label, spot.size).flips
    if flips:
        _require_clear(array.word, takes, flips)
    column = Column.of(array.scalars)
    signed = takes is Parity.ODD
    label = spot.label if signed else spot.label.unsigned
    return column if is_mask else column.as_numbers, (label,)


def _spelled(name: str, old: Scalar, text: str, suffix: str) -> str:
    """The name of a model in the way of the file, in place of an old one."""
    if suffix == ".json":
        return json.dumps(name, ensure_ascii=text.isascii())
    if text[old.start - 1 : old.start] == '"':
        return name.replace('"', '""')
    if re.search(r'[",;\t\r\n]', name):
        raise ArtifactError(f"the name {name!r} does not fit into the table without quotes.")
    return name


# ---- what torch.save wrote -------------------------------------------------------------------


def _tensors(file: TorchFile) -> tuple[dict[str, Where], str | None]:
    """Where the coordinates of each tensor are, by the keys around it; the model that is named."""
    places: dict[str, Where] = {}
    models: list[str] = []

    def walk(value: Any, path: tuple[str, ...], where: Where) -> None:
        if isinstance(value, Tensor):
            if value.dtype not in (*INTEGERS, torch.bool) or value.ndim not in (1, 2):
                raise NotAListError
            places[SEPARATOR.join(path) or "tensor"] = where
        elif isinstance(value, dict):
            inner = _said(value, where, models if not path else None)
            for key, child in value.items():
                place = inner.at(key)
                if place is None and role(str(key)) in (Role.HOOK, Role.LAYER, Role.MODEL):
                    continue
                if place is None and role(str(key)) is not Role.INDEX and key != "mask":
                    raise NotAListError
                walk(child, (*path, str(key)), place or inner)
        else:
            raise NotAListError

    walk(file.content, (), Where())
    if not places or set(places) != set(file.shapes):
        raise NotAListError
    return places, next(iter(models), None)


def _said(value: Mapping[Any, Any], where: Where, models: list[str] | None) -> Where:
    """The place inside a dictionary that may name its hook, its layer and its model."""
    for key, child in value.items():
        kind = role(str(key))
        if kind is Role.HOOK and isinstance(child, str):
            where = where.within(hook=child)
        elif kind is Role.LAYER and type(child) is int:
            where = where.within(layer=child)
        elif kind is Role.MODEL and isinstance(child, str) and models is not None:
            models.append(child)
        elif kind in (Role.HOOK, Role.LAYER, Role.MODEL):
            raise NotAListError
    return where


def _tensor_part(file: TorchFile, itinerary: Itinerary) -> tuple[Part, str | None]:
    """A torch file as an artifact's part, and the model it names."""
    places, model = _tensors(file)
    instead: dict[str, Tensor] = {}
    remarks: dict[str, str] = {}
    axes: dict[str, Axes] = {}
    for name, where in places.items():
        tensor = file.tensor(name)
        if tensor.ndim == 1 and tensor.dtype == torch.bool:
            spot = itinerary.spot(where)
            if len(tensor) != spot.size:
                raise ArtifactError(
                    f"the mask {name!r} has {len(tensor)} entries, {spot.hook!r} {spot.size}."
                )
            axes[name] = (spot.label.unsigned,)
        elif tensor.ndim == 1:
            instead[name], remarks[name] = _moved_indices(tensor, itinerary.spot(where), itinerary)
        else:
            instead[name], remarks[name] = _moved_rows(name, tensor, where, itinerary)
    if model is not None and itinerary.journey.target is not None:
        content = file.content.copy()
        content.update(
            {key: itinerary.journey.target for key in content if role(str(key)) is Role.MODEL}
        )
        file.content = content
    part = Part(file, or_unmoved(axes), instead.get, remarks)
    return part, model


def _moved_indices(indices: Tensor, spot: Spot, itinerary: Itinerary) -> tuple[Tensor, str]:
    """Indices in the target, and the remark that says so."""
    if len(indices.unique()) != len(indices):
        raise ArtifactError(
            f"an index comes twice in the list at {spot.hook!r}; if the numbers are a mask, store "
            "booleans."
        )
    moved, _, sign = itinerary.relocated(spot, indices)
    itinerary.report(spot, moved, sign)
    return moved, f"indices of {spot.spaces}"


def _moved_rows(
    name: str, tensor: Tensor, where: Where, itinerary: Itinerary
) -> tuple[Tensor, str]:
    """Rows of (layer, index), or a row of indices or a mask for every layer."""
    if not where.counts_layers:
        raise ArtifactError(
            f"the tensor {name!r} has shape {tuple(tensor.shape)}, but its layer is known already."
        )
    moved = tensor.clone()
    is_mask = tensor.dtype == torch.bool
    if tensor.shape[1] == 2 and not is_mask and len(tensor) == itinerary.journey.layers:
        raise ArtifactError(
            f"the tensor {name!r} has as many rows as the model has layers, and two columns, so "
            "its rows could be (layer, index) or the two indices of a layer; save a dictionary."
        )
    if tensor.shape[1] == 2 and not is_mask:
        for layer in tensor[:, 0].unique().tolist():
            spot = itinerary.spot(where.within(layer=layer))
            rows = tensor[:, 0] == layer
            new, _, sign = itinerary.relocated(spot, tensor[rows, 1])
            itinerary.report(spot, new, sign)
            moved[rows, 1] = new
        return moved, "layers, and indices in each"
    _require_rows_of_layers(len(tensor), itinerary)
    for layer, row in enumerate(tensor):
        spot = itinerary.spot(where.within(layer=layer))
        if not is_mask:
            moved[layer] = _moved_indices(row, spot, itinerary)[0]
        elif len(row) == spot.size:
            moved[layer] = transport(row, (spot.label.unsigned,), itinerary.journey.gauge)
        else:
            raise ArtifactError(
                f"the mask {name!r} has {len(row)} entries a layer, {spot.hook!r} {spot.size}."
            )
    return moved, "a mask for each layer" if is_mask else "indices for each layer"


def _require_rows_of_layers(rows: int | None, itinerary: Itinerary) -> None:
    """Raise ArtifactError if rows stand for layers and are not as many."""
    if rows is not None and rows != itinerary.journey.layers:
        raise ArtifactError(
            f"there are {rows} rows that do not say their layer, and the model has "
            f"{itinerary.journey.layers or 'an unknown number of'} layers."
        )
