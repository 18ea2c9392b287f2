"""JSON and CSV whose numbers can be exchanged in place: every byte around them stays as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from signed_align.adapters.formats import Labelling, TensorFile, itself
from signed_align.errors import ArtifactError
from signed_align.gauge import Gauge
from signed_align.labels import even, transport

JSON_TOKEN = re.compile(r'\s*(?:([\[\]{}:,])|("(?:[^"\\]|\\.)*"|[^\s\[\]{}:,"]+))')
INTEGER = re.compile(r"-?(0|[1-9]\d*)")
NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity|nan)", re.IGNORECASE)
BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True)
class Scalar:
    """A value, and where its text stands: between two places of the file's text."""

    value: Any
    start: int
    end: int

    @property
    def is_integer(self) -> bool:
        """Whether it is an integer; a boolean is none."""
        return type(self.value) is int

    @property
    def is_number(self) -> bool:
        """Whether it is a number; a boolean is none."""
        return type(self.value) in (int, float)


@dataclass(frozen=True)
class Record:
    """Names and what they name: a JSON object, or a row of a table."""

    members: Sequence[tuple[Scalar, Node]]

    @property
    def fields(self) -> dict[str, Node]:
        """What is under each name."""
        return {str(name.value): child for name, child in self.members}


Node: TypeAlias = "Scalar | Record | list[Any]"


def scan_json(text: str) -> Node:
    """Where every scalar of a valid JSON text stands; raises ArtifactError for doubled keys."""
    stack: list[list[Node]] = [[]]
    for match in JSON_TOKEN.finditer(text):
        mark = match[1]
        if mark is None:
            stack[-1].append(Scalar(json.loads(match[2]), *match.span(2)))
        elif mark in "[{":
            stack.append([])
        elif mark == "]":
            closed = stack.pop()
            stack[-1].append(closed)
        elif mark == "}":
            flat: list[Any] = stack.pop()
            members = list(zip(flat[::2], flat[1::2], strict=True))
            _require_distinct([str(name.value) for name, _ in members])
            stack[-1].append(Record(members))
    return stack[0][0]


def scan_table(text: str, delimiter: str) -> list[Record]:
    """The rows of a table below its header; raises ArtifactError if it is not well formed."""
    cell = re.compile(
        rf'(?:"((?:[^"]|"")*)"|([^"{delimiter}\r\n]*))({re.escape(delimiter)}|\r\n|\n|\r|\Z)'
    )
    rows: list[list[Scalar]] = [[]]
    place = 0
    while place < len(text):
        match = cell.match(text, place)
        if match is None:
            line = text.count("\n", 0, place) + 1
            raise ArtifactError(f"line {line} of the table has a quote inside a field.")
        inside = 2 if match[1] is None else 1
        rows[-1].append(Scalar(match[inside].replace('""', '"'), *match.span(inside)))
        place = match.end()
        if match[3] != delimiter:
            rows.append([])
        elif place == len(text):
            rows[-1].append(Scalar("", place, place))
    filled = [row for row in rows if len(row) > 1 or any(cell.value.strip() for cell in row)]
    header, *body = filled or [[]]
    names = [Scalar(name.value.strip("\ufeff "), name.start, name.end) for name in header]
    _require_distinct([str(name.value) for name in names])
    for row in body:
        if len(row) != len(names):
            line = text.count("\n", 0, row[0].start) + 1
            raise ArtifactError(
                f"line {line} of the table has {len(row)} fields, its header {len(names)}."
            )
    return [Record(list(zip(names, map(_typed, row), strict=True))) for row in body]


@dataclass(frozen=True)
class Column:
    """Scalars of one kind, in order, and their values as a tensor."""

    scalars: Sequence[Scalar]
    tensor: Tensor

    @classmethod
    def of(cls, scalars: Sequence[Scalar]) -> Column:
        """Integers, booleans or numbers."""
        values = [scalar.value for scalar in scalars]
        if all(isinstance(value, bool) for value in values):
            return cls(scalars, torch.tensor(values, dtype=torch.bool))
        if all(scalar.is_integer for scalar in scalars) and all(abs(v) < 2**63 for v in values):
            return cls(scalars, torch.tensor(values, dtype=torch.int64))
        return cls(scalars, torch.tensor(values, dtype=torch.float64))

    @property
    def as_numbers(self) -> Column:
        """The same, as floating-point numbers, whose sign can flip."""
        return Column(self.scalars, self.tensor.to(torch.float64))


@dataclass
class MarkedText(TensorFile):
    """A text file with columns of numbers in it, as named tensors.

    Integers are written anew. Other numbers are never formatted: their texts change places, and a
    minus comes or goes.

    Parameters
    ----------
    path : Path
        The file.
    text : str
        What is in it.
    columns : mapping of str to Column
        By name.
    replaced : sequence of pairs of Scalar and str
        Other texts that are to be exchanged.
    """

    path: Path
    text: str
    columns: Mapping[str, Column]
    replaced: Sequence[tuple[Scalar, str]] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = {name: tuple(c.tensor.shape) for name, c in self.columns.items()}

    def tensor(self, name: str) -> Tensor:
        """The values of one column."""
        return self.columns[name].tensor

    def rewrite(
        self,
        destination: Path,
        label: Labelling,
        gauge: Gauge,
        instead: Callable[[str], Tensor | None] = itself,
    ) -> None:
        """Write a copy in which every column is moved."""
        edits = [(scalar.start, scalar.end, text) for scalar, text in self.replaced]
        for name, column in self.columns.items():
            axes = label(name, self.shapes[name])
            order = transport(torch.arange(len(column.scalars)), even(axes), gauge)
            new = instead(name)
            new = transport(column.tensor, axes, gauge) if new is None else new
            texts = self._texts(column, order, new)
            edits += [(s.start, s.end, t) for s, t in zip(column.scalars, texts, strict=True)]
        pieces, end = [], 0
        for start, stop, text in sorted(edits):
            pieces += [self.text[end:start], text]
            end = stop
        destination.write_bytes("".join([*pieces, self.text[end:]]).encode())

    def _texts(self, column: Column, order: Tensor, new: Tensor) -> list[str]:
        """The texts of a column's new values; ``order`` says which old one each is made of."""
        old = [self.text[scalar.start : scalar.end] for scalar in column.scalars]
        if column.tensor.dtype == torch.int64:
            # what stands around the digits stays
            return [
                text.replace(text.strip(), str(value), 1)
                for text, value in zip(old, new.tolist(), strict=True)
            ]
        texts = [old[origin] for origin in order.tolist()]
        if column.tensor.dtype == torch.bool:
            return texts
        flips = torch.signbit(new) != torch.signbit(column.tensor[order])
        return [negated(text) if flip else text for text, flip in zip(texts, flips, strict=True)]


def read_text(path: Path) -> str:
    """The text of a file, line ends as they are; raises ArtifactError if it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} is not readable text (UTF-8): {error}.") from error


def negated(text: str) -> str:
    """The text of a number with the other sign, otherwise as it was."""
    number = text.strip()
    before, _, after = text.partition(number)
    if number.lower().endswith("nan"):
        return text
    if number.startswith("+"):
        raise ArtifactError(
            f"the value {number!r} has to change its sign and is written with a plus; write it "
            "without."
        )
    return before + (number[1:] if number.startswith("-") else f"-{number}") + after


def _typed(cell: Scalar) -> Scalar:
    """A field of a table as the number or boolean that it spells, if it spells one."""
    text = str(cell.value).strip()
    value: Any = cell.value
    if not text:
        value = None
    elif INTEGER.fullmatch(text):
        value = int(text) if len(text) < 20 else float(text)
    elif NUMBER.fullmatch(text):
        value = float(text)
    elif text.lower() in BOOLEANS:
        value = BOOLEANS[text.lower()]
    return Scalar(value, cell.start, cell.end)


def _require_distinct(names: Sequence[str]) -> None:
    doubled = {name for name in names if names.count(name) > 1} if len(names) < 1000 else set()
    if doubled or len(set(names)) != len(names):
        raise ArtifactError(f"a name comes twice: {', '.join(sorted(doubled)) or 'among many'}.")
