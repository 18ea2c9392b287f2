"""What lists of neurons say: which coordinates of which place they name, with which values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from signed_align.adapters.formats import SEPARATOR
from signed_align.adapters.lists.names import Role, by_role, is_value
from signed_align.adapters.lists.text import Node, Record, Scalar
from signed_align.errors import ArtifactError

LAYER_PLACE = "{layer}"
"""Stands in the name of a hook for the number of a layer."""

LAYER_KEY = re.compile(r"(?:(?:layer|block)[_. ]?|L)?(0|[1-9]\d{0,17})", re.IGNORECASE)
HOOK_KEY = re.compile(r".*\bhook_.*|[a-zA-Z_]\w*(\.\w+)*\.(\d+|\{layer\})(\.\w+)*")


class NotAListError(Exception):
    """What a file holds is no list of coordinates."""


@dataclass(frozen=True)
class Where:
    """What a file says of the place of some coordinates."""

    hook: str | None = None
    layer: int | None = None

    @property
    def counts_layers(self) -> bool:
        """Whether a number found here is that of a layer."""
        return self.layer is None and (self.hook is None or LAYER_PLACE in self.hook)

    @property
    def is_somewhere(self) -> bool:
        """Whether anything is said."""
        return self.hook is not None or self.layer is not None

    @property
    def name(self) -> str:
        """What it is called in reports."""
        known = [str(part) for part in (self.hook, self.layer) if part is not None]
        return SEPARATOR.join(known) or "list"

    def within(self, hook: Any = None, layer: Any = None) -> Where:
        """The place further in; raises ArtifactError if it contradicts this one."""
        if hook is not None and not isinstance(hook, str):
            raise ArtifactError(f"the hook {hook!r} is not a name.")
        if layer is not None and type(layer) is not int:
            raise ArtifactError(f"the layer {layer!r} is not an integer.")
        for mine, other in ((self.hook, hook), (self.layer, layer)):
            if mine is not None and other is not None and mine != other:
                raise ArtifactError(f"a list of {mine} says that it is of {other}.")
        return Where(self.hook if hook is None else hook, self.layer if layer is None else layer)

    def at(self, key: Any) -> Where | None:
        """The place that a key leads to, or None if it is no layer and no hook."""
        layer = LAYER_KEY.fullmatch(str(key))
        if layer and self.counts_layers and not isinstance(key, bool):
            return self.within(layer=int(layer[1]))
        if self.hook is None and isinstance(key, str) and HOOK_KEY.fullmatch(key):
            return self.within(hook=key)
        return None


@dataclass
class Entries:
    """Some coordinates of one place, and values of them: each with the number of its entry."""

    where: Where
    word: str
    indices: list[Scalar] = field(default_factory=list)
    values: dict[str, list[tuple[int, Scalar]]] = field(default_factory=dict)
    distinct: bool = False

    def add(self, index: Scalar, values: Iterable[tuple[str, Scalar]] = ()) -> None:
        """One more coordinate."""
        if not index.is_integer:
            raise ArtifactError(f"the index {index.value!r} is not an integer.")
        for name, value in values:
            self.values.setdefault(name, []).append((len(self.indices), value))
        self.indices.append(index)


@dataclass(frozen=True)
class Array:
    """One value for every coordinate of a place."""

    where: Where
    word: str
    scalars: Sequence[Scalar]


@dataclass
class Content:
    """All lists of a file."""

    entries: list[Entries] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)
    models: list[Scalar] = field(default_factory=list)
    rows_of_layers: int | None = None
    """How many layers there are if rows, which do not say their layer, stand for one each."""

    @property
    def model(self) -> str | None:
        """The model the file names; raises ArtifactError if it names several."""
        names = {scalar.value for scalar in self.models}
        if len(names) > 1:
            raise ArtifactError(f"the list names several models: {', '.join(sorted(names))}.")
        return next(iter(names), None)


UNNAMED = ""
"""The name of values in a pair or a row, which have none."""


class Reader:
    """Finds the lists in nested containers.

    Raises NotAListError where there is something else, and ArtifactError for a list with a fault.
    """

    def __init__(self) -> None:
        self.content = Content()

    def read(self, node: Node, where: Where, word: str = "indices") -> None:
        """Whatever holds lists."""
        if isinstance(node, Record):
            self.mapping(node, where)
        elif isinstance(node, list):
            self.array(node, where, word)
        else:
            raise NotAListError

    def array(self, items: Sequence[Any], where: Where, word: str) -> None:
        """A list of indices, rows, records, or one value for every coordinate."""
        if all(isinstance(item, Record) for item in items):
            self.records(items, where)
        elif all(isinstance(item, list) for item in items):
            self.rows(items, where, word)
        elif not all(isinstance(item, Scalar) for item in items):
            raise NotAListError
        elif all(item.is_integer for item in items):
            found = self._entries(where, word, distinct=True)
            for item in items:
                found.add(item)
        elif all(isinstance(item.value, bool) for item in items):
            self.content.arrays.append(Array(where, "mask", items))
        elif all(item.is_number for item in items) and where.is_somewhere:
            self.content.arrays.append(Array(where, UNNAMED, items))
        else:
            raise NotAListError

    def rows(self, rows: Sequence[list[Any]], where: Where, word: str) -> None:
        """``[layer, index]``, ``[layer, index, value]``, ``[index, value]``, or a row a layer."""
        flat = [item for row in rows for item in row]
        if not all(isinstance(item, Scalar) and item.is_number for item in flat):
            raise NotAListError
        sizes = {len(row) for row in rows}
        whole = all(item.is_integer for item in flat)
        if sizes == {2} and not whole and all(row[0].is_integer for row in rows):
            found = self._entries(where, word)
            for index, value in rows:
                found.add(index, [(UNNAMED, value)])
        elif sizes in ({2}, {3}) and all(row[0].is_integer for row in rows):
            if not where.counts_layers:
                raise ArtifactError(
                    "rows of two or three integers are taken for [layer, index] and [layer, index, "
                    "value], but the layer is known already; write records with names instead."
                )
            groups: dict[Where, Entries] = {}
            for layer, index, *value in rows:
                place = where.within(layer=layer.value)
                found = groups.setdefault(place, Entries(place, word))
                found.add(index, [(UNNAMED, value[0])] if value else [])
            self.content.entries += groups.values()
        elif whole and where.counts_layers:
            self.content.rows_of_layers = len(rows)
            for layer, row in enumerate(rows):
                self.array(row, where.within(layer=layer), word)
        else:
            raise NotAListError

    def mapping(self, record: Record, where: Where) -> None:
        """An object: by layer or hook, from index to value, or a record."""
        keys = [name.value for name, _ in record.members]
        places = [where.at(key) for key in keys]
        if keys and all(places):
            for place, (_, child) in zip(places, record.members, strict=True):
                assert place is not None
                self.read(child, place)
        elif where.is_somewhere and not where.counts_layers and _indices(record):
            self.pairs(record, where, UNNAMED)
        else:
            self.records([record], where, alone=True)

    def pairs(self, record: Record, where: Where, name: str) -> None:
        """``{"17": 0.5}``: from index to value."""
        indices = _indices(record)
        if indices is None:
            raise ArtifactError(f"the field {name!r} does not lead from indices to numbers.")
        found = self._entries(where, "indices")
        for index, (_, value) in zip(indices, record.members, strict=True):
            assert isinstance(value, Scalar)
            found.add(index, [(name, value)])

    def records(self, records: Sequence[Record], where: Where, *, alone: bool = False) -> None:
        """Records, each of one coordinate or of some; ``alone`` if it is one outside of a list."""
        groups: dict[tuple[Where, str], Entries] = {}
        for record in records:
            fields = record.fields
            named = by_role(tuple(fields))
            layer, hook, index = (
                next((fields[name] for name in named[kind]), None)
                for kind in (Role.LAYER, Role.HOOK, Role.INDEX)
            )
            if alone and isinstance(index, Scalar) and hook is None and not where.is_somewhere:
                # a setting, such as {"channels": 3}
                raise NotAListError
            if named[Role.BLOCK] and (index is not None or (layer is not None and not alone)):
                raise ArtifactError(
                    f"the field {named[Role.BLOCK][0]!r} counts heads or experts, which change "
                    "places themselves; give the index among all coordinates of the hook instead."
                )
            for name in named[Role.MODEL]:
                self._model(fields[name])
            values = {name: fields[name] for name in named[Role.VALUE]}
            if index is None:
                self.whole(values, where.within(_value(hook), _value(layer)))
            elif _is_nested(index):
                _require_no_numbers(values)
                self.inside(index, where.within(_value(hook), _value(layer)), *named[Role.INDEX])
            else:
                for one, layer_, hook_, own in _entries_of(index, layer, hook, values):
                    key = where.within(hook_, layer_), named[Role.INDEX][0]
                    if key not in groups:
                        groups[key] = Entries(*key)
                    groups[key].add(one, own)
        self.content.entries += groups.values()

    def inside(self, node: Node, where: Where, word: str) -> None:
        """Lists under the name of indices: by layer, in rows, or records."""
        if isinstance(node, Record) and not where.counts_layers:
            raise ArtifactError(f"the field {word!r} is an object, but the layer is known already.")
        self.read(node, where, word)

    def whole(self, fields: Mapping[str, Node], where: Where) -> None:
        """A record without an index: its values are of all coordinates, or by index."""
        known = any(is_value(name) for name, child in fields.items() if _is_nested(child, 1))
        if not known or not where.is_somewhere:
            raise NotAListError
        for name, child in fields.items():
            if isinstance(child, Record):
                self.pairs(child, where, name)
            elif isinstance(child, list):
                if not all(isinstance(item, Scalar) for item in child):
                    raise ArtifactError(f"the field {name!r} is not understood.")
                if any(item.is_number or isinstance(item.value, bool) for item in child):
                    self.content.arrays.append(Array(where, name, child))

    def _entries(self, where: Where, word: str, *, distinct: bool = False) -> Entries:
        self.content.entries.append(Entries(where, word, distinct=distinct))
        return self.content.entries[-1]

    def _model(self, node: Node) -> None:
        if isinstance(node, Scalar) and isinstance(node.value, str):
            self.content.models.append(node)


def _value(node: Node | None) -> Any:
    """The value of a scalar; containers stay, and are refused where a value is wanted."""
    return node.value if isinstance(node, Scalar) else node


def _indices(record: Record) -> list[Scalar] | None:
    """The keys as indices, if all of them are, and lead to numbers."""
    found = []
    for name, child in record.members:
        is_pair = isinstance(child, Scalar) and child.is_number
        if not is_pair or not re.fullmatch(r"0|[1-9]\d{0,17}", str(name.value)):
            return None
        if name.end - name.start != len(name.value) + 2:
            return None
        found.append(Scalar(int(name.value), name.start + 1, name.end - 1))
    return found or None


def _is_nested(node: Node, depth: int = 2) -> bool:
    """Whether it holds more than one list of scalars (or, at depth 1, more than a scalar)."""
    if isinstance(node, Scalar):
        return False
    if isinstance(node, Record) or depth == 1:
        return True
    return not all(isinstance(item, Scalar) for item in node)


def _scalars(node: Node) -> Iterator[Scalar]:
    if isinstance(node, Scalar):
        yield node
    elif isinstance(node, Record):
        for _, child in node.members:
            yield from _scalars(child)
    else:
        for child in node:
            yield from _scalars(child)


def _require_no_numbers(fields: Mapping[str, Node]) -> None:
    """Raise ArtifactError for containers with numbers, which would stay where they are."""
    for name, child in fields.items():
        if not isinstance(child, Scalar) and any(s.is_number for s in _scalars(child)):
            raise ArtifactError(
                f"the field {name!r} holds numbers that are not understood; leave it out."
            )


Entry = tuple[Scalar, Any, Any, list[tuple[str, Scalar]]]


def _entries_of(
    index: Node, layer: Node | None, hook: Node | None, fields: Mapping[str, Node]
) -> Iterator[Entry]:
    """Each index of a record, its layer, its hook, and its values by name."""
    if isinstance(index, Scalar):
        own: list[tuple[str, Scalar]] = []
        for name, child in fields.items():
            if isinstance(child, Scalar):
                own.append((name, child))
            elif isinstance(child, list) and not _is_nested(child):
                own += [(name, item) for item in child if item.is_number]
            else:
                _require_no_numbers({name: child})
        yield index, _value(layer), _value(hook), own
        return
    assert isinstance(index, list)

    def along(node: Node | None, name: str) -> list[Any]:
        """A list as long as that of the indices; a scalar as often as that."""
        if not isinstance(node, list):
            return [node] * len(index)
        if len(node) != len(index):
            raise ArtifactError(
                f"the field {name!r} has {len(node)} entries, the list of indices {len(index)}."
            )
        return node

    parallel: dict[str, list[Any]] = {}
    for name, child in fields.items():
        if isinstance(child, list) and not _is_nested(child):
            if any(item.is_number for item in child):
                parallel[name] = along(child, name)
        else:
            _require_no_numbers({name: child})
    layers, hooks = along(layer, "layer"), along(hook, "hook")
    for number, item in enumerate(index):
        own = [(name, column[number]) for name, column in parallel.items()]
        yield item, _value(layers[number]), _value(hooks[number]), own
