"""Fitted estimators of scikit-learn on disk: skops files, and what joblib and pickle wrote."""

from __future__ import annotations

import copy
import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from signed_align.adapters.archives import (
    array_bytes,
    is_numeric,
    ordered_like,
    read_array,
    require_sane,
    rewrite_archive,
    to_tensor,
)
from signed_align.adapters.formats import SEPARATOR, LoadedFile
from signed_align.errors import ArtifactError, one_line

SCHEMA_NAME = "schema.json"


@dataclass(frozen=True)
class Estimator:
    """A fitted object of scikit-learn: its class, by module and name, and what it holds."""

    module: str
    name: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Stored:
    """An array, and the member of the archive that holds it, if one does."""

    array: np.ndarray[Any, Any]
    member: str = ""


@dataclass(frozen=True)
class Opaque:
    """A value that is not looked into."""

    kind: str


class EstimatorFile(LoadedFile):
    """A file of a fitted estimator; ``content`` is a view of it, ``stored`` are its arrays."""

    content: Any
    stored: Mapping[str, Stored]

    def tensor(self, name: str) -> Tensor:
        """One of its arrays."""
        return to_tensor(self.stored[name].array)

    def _hold(self, content: Any) -> None:
        self.content = content
        self.stored = {
            name: stored for name, stored in arrays_in(content) if is_numeric(stored.array)
        }
        self.shapes = {name: tuple(one.array.shape) for name, one in self.stored.items()}


class SkopsFile(EstimatorFile):
    """What ``skops.io.dump`` writes: a description in JSON and ``.npy`` arrays, in an archive.

    ``content`` is the described object, of :class:`Estimator`, :class:`Stored`, plain containers
    and values; what is of any other kind is :class:`Opaque`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                require_sane(archive, path)
                schema = json.loads(archive.read(SCHEMA_NAME))
                content = _described(schema, archive, path, {})
        except ArtifactError:
            raise
        except Exception as error:  # a damaged file fails in many ways
            raise ArtifactError(f"{path} is not readable as skops: {one_line(error)}") from error
        self._hold(content)

    def write(self, destination: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write a copy that holds these arrays."""
        contents: dict[str, bytes] = {}
        for name, tensor in tensors.items():
            stored = self.stored[name]
            data = array_bytes(tensor.numpy(), like=stored.array)
            if contents.setdefault(stored.member, data) != data:
                raise ArtifactError(
                    f"{self.path} uses one array in two places that move differently, one of them "
                    f"{name!r}."
                )
        rewrite_archive(self.path, destination, contents)


class PickledFile(EstimatorFile):
    """What joblib or pickle writes. Reading it runs the code in it."""

    def __init__(self, path: Path) -> None:
        try:
            import joblib
        except ImportError as error:
            raise ArtifactError(
                f"reading {path} needs scikit-learn: pip install 'signed-align[probes]'."
            ) from error

        self.path = path
        try:
            data = path.read_bytes()
            # joblib lays arrays between the opcodes, where pickle does not find them
            self._plain = data[:1] == b"\x80" and b"joblib.numpy_pickle" not in data
            self._protocol = data[1] if self._plain else None
            self.object = joblib.load(path)
        except Exception as error:  # code fails in many ways
            raise ArtifactError(f"{path} cannot be loaded: {one_line(error)}") from error
        self._hold(_examined(self.object))

    def write(self, destination: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the object again, that holds these arrays."""
        import joblib

        copied = copy.deepcopy(self.object)
        for name, tensor in tensors.items():
            old = self.stored[name].array
            new = ordered_like(tensor.numpy(), old)
            if new.tobytes() != old.tobytes():
                _put(copied, name.split(SEPARATOR), new)
        if self._plain:
            destination.write_bytes(pickle.dumps(copied, protocol=self._protocol))
        else:
            joblib.dump(copied, destination)


def _described(node: Any, archive: zipfile.ZipFile, path: Path, seen: dict[Any, Any]) -> Any:
    """The value that a node of a skops file describes."""
    kind = node["__loader__"]
    if kind == "CachedNode":
        return seen[node["__id__"]]
    value: Any = Opaque(f"{node.get('__module__')}.{node.get('__class__')}")
    content = node.get("content")
    if kind == "JsonNode":
        value = json.loads(content)
    elif kind == "NdArrayNode" and node.get("type") == "numpy":
        value = Stored(read_array(archive.read(node["file"]), path), node["file"])
    elif kind in ("ListNode", "TupleNode"):
        value = [_described(item, archive, path, seen) for item in content]
    elif kind == "DictNode":
        value = {key: _described(item, archive, path, seen) for key, item in content.items()}
    elif kind == "ObjectNode" and str(node["__module__"]).startswith("sklearn."):
        attributes = {} if content is None else _described(content, archive, path, seen)
        if isinstance(attributes, dict):
            value = Estimator(node["__module__"], node["__class__"], attributes)
    seen[node.get("__id__")] = value
    return value


def _examined(value: Any) -> Any:
    """The same view of an object in memory."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return Stored(value)
    if value is None or isinstance(value, (str, int, float, bool, np.generic)):
        return value
    if type(value) in (list, tuple):
        return [_examined(item) for item in value]
    if type(value) is dict:
        return {str(key): _examined(item) for key, item in value.items()}
    kind = type(value)
    if kind.__module__.startswith("sklearn.") and hasattr(value, "__dict__"):
        attributes = {name: _examined(item) for name, item in vars(value).items()}
        return Estimator(kind.__module__, kind.__name__, attributes)
    return Opaque(f"{kind.__module__}.{kind.__name__}")


def arrays_in(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Stored]]:
    """The arrays inside a value, each under the keys that lead to it."""
    if isinstance(value, Stored):
        if any(SEPARATOR in key for key in path):
            raise ArtifactError(
                f"{path[-1]!r} is under a key with a slash, which is not supported."
            )
        yield SEPARATOR.join(path), value
    for key, item in items_of(value):
        yield from arrays_in(item, (*path, key))


def items_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds, each under its key."""
    if isinstance(value, Estimator):
        yield from value.attributes.items()
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from ((str(k), item) for k, item in enumerate(value))


def _put(value: Any, keys: list[str], array: np.ndarray[Any, Any]) -> None:
    """Set the array under ``keys`` of an object in memory."""
    first, *rest = keys
    if isinstance(value, dict):
        (key,) = (key for key in value if str(key) == first)
        value, step = value, key
    elif isinstance(value, (list, tuple)):
        step = int(first)
    else:
        value, step = vars(value), first
    if rest:
        _put(value[step], rest, array)
    else:
        value[step] = array
