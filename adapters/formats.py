"""File formats that hold tensors: what is in a file, and a copy of it with every tensor moved.

Nothing in a file is executed. Each format keeps what is no tensor as it is, so that a copy moved
there and back has the bytes it began with.
"""

from __future__ import annotations

import json
import math
import shutil
import zipfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from signed_align.adapters.archives import (
    TEXT,
    array_bytes,
    is_numeric,
    read_array,
    require_bounded,
    require_sane,
    rewrite_archive,
    to_tensor,
)
from signed_align.checkpoint import rewrite_safetensors
from signed_align.errors import ArtifactError, one_line
from signed_align.gauge import Gauge
from signed_align.labels import Axes, transport

Labelling = Callable[[str, tuple[int, ...]], Axes]
"""From a tensor's name and shape to its axis labels; raises for a tensor it does not know."""


SEPARATOR = "/"
"""Between the keys that lead to a tensor inside nested containers."""


def itself(_: str) -> Tensor | None:
    """Every tensor is made of the one of its own name."""
    return None


class TensorFile(ABC):
    """A file of named tensors.

    ``path`` is where it lies, ``shapes`` are those of its tensors, by name.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """One of its tensors, in the shape and the dtype in which it is stored."""

    @abstractmethod
    def rewrite(
        self,
        destination: Path,
        label: Labelling,
        gauge: Gauge,
        instead: Callable[[str], Tensor | None] = itself,
    ) -> None:
        """Write a copy in which every tensor is moved.

        Parameters
        ----------
        destination : Path
            The file to make.
        label : callable
            From a tensor's name and shape to its axis labels.
        gauge : Gauge
            The gauge to move through.
        instead : callable
            From a tensor's name to the tensor it is made of, where that is another than the one
            of its name.

        Raises
        ------
        SignedAlignError
            If a label does not fit, or a tensor cannot be moved exactly.
        """


class LoadedFile(TensorFile):
    """A file that is read whole and written whole."""

    @abstractmethod
    def write(self, destination: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write a copy that holds these tensors, of the same names, shapes and dtypes."""

    def rewrite(
        self,
        destination: Path,
        label: Labelling,
        gauge: Gauge,
        instead: Callable[[str], Tensor | None] = itself,
    ) -> None:
        """Write a copy in which every tensor is moved."""
        tensors = {}
        for name, shape in self.shapes.items():
            other = instead(name)
            tensor = self.tensor(name) if other is None else other
            tensors[name] = transport(tensor, label(name, tuple(shape)), gauge)
        self.write(destination, tensors)


class SafetensorsFile(TensorFile):
    """Moved tensor by tensor; the header stays byte for byte.

    ``renamed`` are other texts for some keys of its metadata, which a copy is written with.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.renamed: Mapping[str, str] = {}
        try:
            self._file = safe_open(path, framework="pt")
            self.metadata: Mapping[str, str] = self._file.metadata() or {}
            self.shapes: Mapping[str, tuple[int, ...]] = {
                name: tuple(self._file.get_slice(name).get_shape())
                for name in list(self._file.keys())
            }
        except (SafetensorError, OSError) as error:
            raise ArtifactError(
                f"{path} is not a readable safetensors file (truncated or damaged?): {error}."
            ) from error

    def tensor(self, name: str) -> Tensor:
        """One of its tensors."""
        return self._file.get_tensor(name)

    def rewrite(
        self,
        destination: Path,
        label: Labelling,
        gauge: Gauge,
        instead: Callable[[str], Tensor | None] = itself,
    ) -> None:
        """Write a copy in which every tensor is moved."""
        rewrite_safetensors(self.path, destination, label, gauge, origin=instead)
        if self.renamed:
            _write_metadata(destination, self.renamed)


def _write_metadata(path: Path, changes: Mapping[str, str]) -> None:
    """Write other texts under some keys of the metadata of a safetensors file."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] |= changes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


class TorchFile(LoadedFile):
    """What ``torch.save`` writes, read with ``weights_only=True``: nested containers of tensors.

    ``content`` is the whole of it; a tensor's name is the keys that lead to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._zipped = False
        try:
            self._zipped = zipfile.is_zipfile(path)
            if self._zipped:
                with zipfile.ZipFile(path) as archive:
                    require_bounded(archive, path)
            # mapped, so that a tensor is read only when it is asked for
            self.content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=self._zipped
            )
        except ArtifactError:
            raise
        except Exception as error:  # a damaged pickle fails in many ways
            raise ArtifactError(
                f"{path} is not read, because loading it safely (weights_only=True) fails: "
                f"{one_line(error)[:300]}"
            ) from error
        self._tensors: dict[str, Tensor] = {}
        try:
            _walk(self.content, (), self._tensors, path)
        except RecursionError as error:
            raise ArtifactError(f"{path} holds containers that hold themselves.") from error
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(tensor.shape) for name, tensor in self._tensors.items()
        }

    def tensor(self, name: str) -> Tensor:
        """One of its tensors."""
        return self._tensors[name].detach()

    def write(self, destination: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write a copy that holds these tensors."""
        shared = _sharing(dict(tensors), self._tensors)
        torch.save(
            _rebuilt(self.content, (), shared),
            destination,
            _use_new_zipfile_serialization=self._zipped,
        )


class NumpyFile(LoadedFile):
    """An ``.npy`` array, called ``array``, or an ``.npz`` archive of several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._members: dict[str, str] = {}
        try:
            if path.suffix == ".npy":
                self._arrays["array"] = read_array(path.read_bytes(), path)
            else:
                with zipfile.ZipFile(path) as archive:
                    require_sane(archive, path)
                    self._members = {name.removesuffix(".npy"): name for name in archive.namelist()}
                    if len(self._members) != len(archive.namelist()):
                        raise ArtifactError(f"{path} holds two arrays of one name.")
                    for name, member in self._members.items():
                        self._arrays[name] = read_array(archive.read(member), path)
        except ArtifactError:
            raise
        except Exception as error:  # a damaged file fails in many ways
            raise ArtifactError(f"{path} is not readable by NumPy: {one_line(error)}") from error
        numbers = {n: a for n, a in self._arrays.items() if a.dtype.kind not in TEXT}
        self.texts = [
            (name, str(text))
            for name, array in self._arrays.items()
            if array.dtype.kind in TEXT
            for text in array.reshape(-1).tolist()
        ]
        for name, array in numbers.items():
            if not is_numeric(array):
                raise ArtifactError(
                    f"the array {name!r} of {path} is of the type {array.dtype}, which cannot be "
                    "moved exactly."
                )
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(array.shape) for name, array in numbers.items()
        }

    def tensor(self, name: str) -> Tensor:
        """One of its arrays."""
        return to_tensor(self._arrays[name])

    def write(self, destination: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write a copy that holds these tensors."""
        contents = {
            name: array_bytes(tensor.numpy(), like=self._arrays[name])
            for name, tensor in tensors.items()
        }
        if self.path.suffix == ".npy":
            destination.write_bytes(contents["array"])
            return
        rewrite_archive(
            self.path, destination, {self._members[name]: data for name, data in contents.items()}
        )


class GgufFile(LoadedFile):
    """A GGUF file whose tensors are plain floating-point numbers; patched in a copy."""

    def __init__(self, path: Path) -> None:
        from gguf import GGMLQuantizationType, GGUFReader

        self.path = path
        dtypes = {
            GGMLQuantizationType.F64: torch.float64,
            GGMLQuantizationType.F32: torch.float32,
            GGMLQuantizationType.F16: torch.float16,
            GGMLQuantizationType.BF16: torch.bfloat16,
        }
        try:
            self.reader = GGUFReader(path)
            self.dtypes = {tensor.name: tensor.tensor_type for tensor in self.reader.tensors}
            self.shapes: Mapping[str, tuple[int, ...]] = {
                tensor.name: tuple(int(size) for size in reversed(tensor.shape))
                for tensor in self.reader.tensors
            }
        except Exception as error:  # a damaged file fails in many ways
            raise ArtifactError(f"{path} is not a readable GGUF file: {one_line(error)}") from error
        if self.reader.byte_order != "I":
            raise ArtifactError(f"{path} is written in the byte order of another machine.")
        for name, kind in self.dtypes.items():
            if not math.prod(self.shapes[name]):
                raise ArtifactError(f"the tensor {name!r} of {path} is empty.")
            if kind not in dtypes:
                raise ArtifactError(
                    f"the tensor {name!r} of {path} is quantised ({kind.name}), so it cannot be "
                    "permuted and sign-flipped exactly."
                )
        self._dtypes = {name: dtypes[kind] for name, kind in self.dtypes.items()}

    def tensor(self, name: str) -> Tensor:
        """One of its tensors."""
        return self._view(self.reader, name, np.array)

    def field(self, name: str) -> Any:
        """A metadata value, or None; raises ArtifactError if it is not readable."""
        found = self.reader.get_field(name)
        try:
            return None if found is None else found.contents()
        except Exception as error:  # a damaged value fails in many ways
            raise ArtifactError(f"{name} of {self.path} is not readable: {error!r}.") from error

    def write(self, destination: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write a copy that holds these tensors."""
        from gguf import GGUFReader

        shutil.copyfile(self.path, destination)
        copy = GGUFReader(destination, "r+")
        for name, tensor in tensors.items():
            self._view(copy, name).copy_(tensor)
        copy.data.flush()

    def _view(self, reader: Any, name: str, see: Callable[[Any], Any] = np.asarray) -> Tensor:
        (found,) = (tensor for tensor in reader.tensors if tensor.name == name)
        raw = torch.from_numpy(see(found.data.reshape(-1).view(np.uint8)))
        return raw.view(self._dtypes[name]).reshape(self.shapes[name])


FORMATS: Mapping[str, Callable[[Path], TensorFile]] = {
    ".safetensors": SafetensorsFile,
    ".bin": TorchFile,
    ".pt": TorchFile,
    ".pth": TorchFile,
    ".npy": NumpyFile,
    ".npz": NumpyFile,
    ".gguf": GgufFile,
}
"""By the suffix of the file's name."""


def open_tensors(path: Path) -> TensorFile:
    """The tensors of a file; raises ArtifactError if it is damaged or of no known format."""
    if path.suffix not in FORMATS:
        raise ArtifactError(f"{path} is in none of the formats {', '.join(FORMATS)}.")
    return FORMATS[path.suffix](path)


def is_readable(path: Path) -> bool:
    """Whether a file is not damaged, if its name says that it holds tensors."""
    try:
        return path.suffix not in FORMATS or bool(open_tensors(path))
    except ArtifactError:
        return False


def _walk(value: Any, path: tuple[Any, ...], found: dict[str, Tensor], file: Path) -> None:
    """Collect the tensors in nested containers under the keys that lead to them."""
    if isinstance(value, Tensor):
        name = SEPARATOR.join(map(str, path)) or "tensor"
        if name in found:
            raise ArtifactError(f"{file} holds two tensors that would both be called {name!r}.")
        if value.is_meta:
            raise ArtifactError(f"the tensor {name!r} of {file} was saved without its values.")
        lazy = value.layout == torch.strided and (value.is_neg() or value.is_conj())
        if lazy:
            raise ArtifactError(
                f"the tensor {name!r} of {file} is a view that negates or conjugates another; save "
                "tensor.resolve_neg().resolve_conj()."
            )
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            raise ArtifactError(
                f"the tensor {name!r} of {file} is of the kind {type(value).__name__} "
                f"({value.layout}), which cannot be moved exactly."
            )
        found[name] = value
    elif isinstance(value, (torch.UntypedStorage, torch.storage.TypedStorage)):
        raise ArtifactError(f"{file} holds bare storage rather than a tensor.")
    elif isinstance(value, dict):
        for key, item in value.items():
            _walk(item, (*path, key), found, file)
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            _walk(item, (*path, key), found, file)


def _sharing(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, sharing memory as those do that they are made of, where values allow.

    What tensors share is written once: the rows of one matrix under several keys.
    """
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in like.values())
    copies: dict[int, torch.UntypedStorage] = {}
    views: dict[int, Tensor] = {}
    result = dict(tensors)
    for name, old in like.items():
        new, storage = tensors[name], old.untyped_storage()
        fills = old.is_contiguous() and storage.nbytes() == old.numel() * old.element_size()
        alone = fills and users[storage.data_ptr()] == 1
        repeats = 0 in old.stride() or not old.numel()
        if alone or repeats or (new.shape, new.dtype) != (old.shape, old.dtype):
            continue
        if storage.data_ptr() not in copies:
            copies[storage.data_ptr()] = storage.clone()
        place = (old.storage_offset(), old.size(), old.stride())
        if id(old) not in views:  # the same tensor in two places stays the same
            views[id(old)] = torch.empty(0, dtype=old.dtype).set_(
                copies[storage.data_ptr()], *place
            )
        result[name] = views[id(old)].copy_(new)
    return {
        name: tensor if _same_bits(tensor, tensors[name]) else tensors[name]
        for name, tensor in result.items()
    }


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    return torch.equal(
        one.reshape(-1).contiguous().view(torch.uint8),
        other.reshape(-1).contiguous().view(torch.uint8),
    )


def _rebuilt(value: Any, path: tuple[Any, ...], tensors: Mapping[str, Any]) -> Any:
    """The containers again, with the tensors that are given in place of the old ones."""
    if isinstance(value, Tensor):
        moved = tensors.get(SEPARATOR.join(map(str, path)) or "tensor")
        if not isinstance(moved, Tensor):
            return value if moved is None else moved
        if moved.stride() != value.stride():  # in the order in memory of the old one
            moved = torch.empty_like(value).copy_(moved)
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(moved, value.requires_grad)
        return moved.requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        items = {key: _rebuilt(item, (*path, key), tensors) for key, item in value.items()}
        if all(items[key] is value[key] for key in value):
            return value
        copy = value.copy()
        copy.update(items)
        return copy
    if isinstance(value, (list, tuple)):
        parts = [_rebuilt(item, (*path, key), tensors) for key, item in enumerate(value)]
        if all(part is item for part, item in zip(parts, value, strict=True)):
            return value  # one object in several places stays one
        return parts if isinstance(value, list) else tuple(parts)
    return value
