"""Checkpoints on disk: opened lazily, fingerprinted, and rewritten tensor by tensor.

A rewritten safetensors file keeps its header byte for byte (moving coordinates changes neither
names, dtypes nor shapes), so the data section is streamed: one tensor, or one block of a large
tensor's rows, is in memory at a time.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from signed_align.chart import CHOICES, Chart, Space
from signed_align.errors import (
    ChartError,
    CheckpointError,
    GaugeError,
    SignedAlignError,
    one_line,
)
from signed_align.gauge import Gauge, ModelIdentity
from signed_align.labels import Axes, Fused, moves, transport
from signed_align.refusals import require_sensible, require_unpacked, require_unquantised

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
INCOMPLETE_NAME = "checkpoint-is-incomplete.txt"
"""What Trainer leaves in a checkpoint that it could not write to its end."""

BLOCK_BYTES = 2**20
"""Tensors are moved and written in blocks of rows of about this size, which stay in the cache."""

LARGE_BYTES = 256 * 2**20
"""Of tensors above this size that must be read whole, one is in memory at a time."""

# Files that hold weights or training state in some coordinates. `apply` moves the safetensors
# that transformers loads; copying another copy in the old coordinates beside them would be a trap.
_WEIGHT_SUFFIXES = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".h5", ".msgpack",
    ".npy", ".npz", ".pkl", ".pickle", ".joblib", ".skops", ".tflite",
    ".th", ".torch", ".hdf5", ".mat", ".dill",
}  # fmt: skip
_WEIGHT_INDEXES = {"pytorch_model.bin.index.json", INDEX_NAME}
NOT_WEIGHTS = {"training_args.bin"}

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Checkpoint:
    """A transformers checkpoint directory whose weights are safetensors.

    Open one with :meth:`open`; no tensor is read until it is asked for.
    """

    name: str
    path: Path
    settings: dict[str, Any]
    files: dict[str, Path]

    @classmethod
    def open(cls, model: str | Path) -> Checkpoint:
        """Open a local directory or a Hub id.

        Raises
        ------
        CheckpointError
            If it cannot be found, is quantised, has no safetensors weights, or a file is damaged.
        """
        path = _local_directory(str(model))
        settings = _read_settings(path)
        require_unquantised(str(model), path, settings)
        checkpoint = cls(name=str(model), path=path, settings=settings, files=_weight_files(path))
        require_unpacked(checkpoint.name, checkpoint._dtypes)
        stored = sum(file.stat().st_size for file in set(checkpoint.files.values()))
        require_sensible(checkpoint.name, settings, len(checkpoint.files), stored)
        return checkpoint

    @cached_property
    def config(self) -> Any:
        """The transformers config, defaults filled in; raises CheckpointError if it cannot be."""
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        except Exception as error:  # a config of wrong types fails in many ways
            raise CheckpointError(
                f"transformers cannot read the config of {self.path}: {one_line(error)}"
            ) from error

    @property
    def model_type(self) -> str:
        """The transformers model type."""
        return str(self.settings.get("model_type"))

    @cached_property
    def chart(self) -> Chart:
        """The proved chart of the model; raises ChartError, with the reason, if it has none."""
        return Chart.of(self.config)

    @cached_property
    def spaces(self) -> dict[str, Space]:
        """The spaces of the model by name, residual first; raises as :attr:`chart` and for weights
        that the chart does not know.
        """
        return self.chart.spaces({name: self.shape(name) for name in self.files})

    @cached_property
    def identity(self) -> ModelIdentity:
        """The checkpoint's name and fingerprint.

        The fingerprint is a SHA-256 over every tensor's name, dtype, shape and first row. It does
        not depend on how the checkpoint is sharded. Twins have different ones, and so have
        fine-tunes unless they leave the first row of every tensor as it was.
        """
        digest = hashlib.sha256()
        for name in sorted(self.files):
            view = self._handles[self.files[name]].get_slice(name)
            digest.update(f"{name} {view.get_dtype()} {view.get_shape()}\n".encode())
            first = view[:1] if view.get_shape() else self.tensor(name)
            digest.update(_bytes_of(first.contiguous()))
        return ModelIdentity(
            self.name, digest.hexdigest(), self.model_type, self.settings, self.revision
        )

    @property
    def revision(self) -> str:
        """The commit of a model from the Hub's cache; empty for any other."""
        *_, parent, name = ("", *self.path.resolve().parts)
        return name if parent == "snapshots" else ""

    @cached_property
    def _handles(self) -> dict[Path, Any]:
        return {path: _opened(path) for path in set(self.files.values())}

    @property
    def _dtypes(self) -> dict[str, str]:
        """The safetensors dtype of each tensor."""
        return {
            name: self._handles[path].get_slice(name).get_dtype()
            for name, path in self.files.items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, read from its file's header."""
        return tuple(self._handles[self.files[name]].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """One tensor, in the dtype it is stored in."""
        return self._handles[self.files[name]].get_tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of a tensor."""
        return self._handles[self.files[name]].get_slice(name)[start:stop]

    def instead(self, gauge: Gauge, name: str) -> Tensor | None:
        """The tensor that ``gauge`` moves to ``name``, where that is not the one of that name.

        Raises CheckpointError if the checkpoint does not have it.
        """
        source = self.chart.origin(name, gauge)
        if source == name:
            return None
        if source not in self.files:
            raise CheckpointError(f"{self.name} has no weight {source!r}, which {name!r} needs.")
        return self.tensor(source)

    def moved(self, gauge: Gauge, name: str) -> Tensor:
        """One tensor as it is after the whole checkpoint is moved through ``gauge``."""
        other = self.instead(gauge, name)
        tensor = self.tensor(name) if other is None else other
        return transport(tensor, self.chart.axes(name, tuple(tensor.shape)), gauge)

    def require_movable(self, gauge: Gauge) -> None:
        """Raise unless every tensor of the checkpoint is understood and ``gauge`` fits it."""
        self.chart.require_native(gauge)
        for path in sorted(set(self.files.values())):
            for name, _, shape, _ in _entries(path):
                self.chart.axes(name, shape)
        unknown = sorted(set(gauge.elements) - set(self.spaces))
        if unknown:
            raise GaugeError(f"the gauge moves {unknown[0]!r}, which {self.name} does not have.")


def require_kinds(chart: Chart, spaces: Sequence[str]) -> tuple[str, ...]:
    """The kinds of spaces that a user's list means; raises ChartError for one the chart lacks."""
    kinds: dict[str, None] = {}
    if not spaces:
        raise ChartError(f"no spaces are named; choose from {', '.join([*CHOICES, 'all'])}.")
    for name in spaces:
        members = chart.kinds if name == "all" else CHOICES.get(name, ())
        present = [kind for kind in members if kind in chart.kinds]
        if not present or (name == "experts" and name not in present):
            proved = [choice for choice in CHOICES if set(CHOICES[choice]) & set(chart.kinds)]
            if "experts" not in chart.kinds:
                proved.remove("experts")
            raise ChartError(
                f"{name!r} names no spaces that are proved for {chart.model_type} models; choose "
                f"from {', '.join([*proved, 'all'])}."
            )
        kinds |= dict.fromkeys(present)
    return tuple(kinds)


def rewrite_safetensors(
    source: Path,
    destination: Path,
    label: Callable[[str, tuple[int, ...]], Axes],
    gauge: Gauge,
    advance: Callable[[int], object] = lambda _: None,
    *,
    origin: Callable[[str], Tensor | None] = lambda _: None,
) -> None:
    """Write a copy of a safetensors file in which every tensor is moved through ``gauge``.

    Parameters
    ----------
    source, destination : Path
        The file to read, and the file to make.
    label : callable
        From a tensor's name and shape to its axis labels; raises for a tensor it does not know.
    gauge : Gauge
        The gauge to move through.
    advance : callable
        Called with the number of bytes done.
    origin : callable
        From a tensor's name to the tensor it is made of, where that is another one: an expert that
        changes places with it. None for itself.
    """
    labelled = [(entry, label(entry.name, entry.shape)) for entry in _entries(source)]
    with open(source, "rb") as reader, open(destination, "wb") as writer:
        length = reader.read(8)
        header = length + reader.read(int.from_bytes(length, "little"))
        _reserve(writer, source.stat().st_size)
        os.pwrite(writer.fileno(), header, 0)
        advance(len(header))
        mover = _TensorMover(reader.fileno(), writer.fileno(), len(header), gauge, origin)
        with _workers() as pool:
            work = [pool.submit(mover.move, entry, axes) for entry, axes in labelled]
            try:
                for move in as_completed(work):
                    advance(move.result())
            finally:
                pool.shutdown(cancel_futures=True)


def carry_along(
    files: Iterable[Path], root: Path, destination: Path, harmless: Collection[Path] = ()
) -> list[str]:
    """Copy files to the same place below ``destination``, but for those that hold weights.

    Parameters
    ----------
    files : iterable of Path
        Files below ``root``.
    root, destination : Path
        The directory they come from, and the one they go to.
    harmless : collection of Path
        Files that look like weights by their name and hold none.

    Returns
    -------
    list of str
        What was left out, relative to ``root``, sorted: it would stay in the old coordinates.
    """
    left_out = []
    for file in files:
        relative = file.relative_to(root)
        if is_weight_file(file) and file not in harmless:
            left_out.append(str(relative))
            continue
        (destination / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, destination / relative)
    return sorted(left_out)


def is_weight_file(file: Path) -> bool:
    """Whether a file holds weights, or an index of weights, rather than text or settings."""
    return (
        file.suffix.lower() in _WEIGHT_SUFFIXES or file.name in _WEIGHT_INDEXES
    ) and file.name not in NOT_WEIGHTS


class _Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _entries(path: Path) -> Iterator[_Entry]:
    with _opened(path):  # safetensors itself validates header, offsets and length
        pass
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"the tensor {name!r} of {path} has dtype {entry['dtype']}, which cannot be moved."
            )
        yield _Entry(name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"][0])


class _TensorMover:
    """Moves the tensors of one file, each from its place in the source to the same place.

    Every thread reads into a buffer of its own, which it uses again for each tensor.
    """

    def __init__(
        self,
        source: int,
        destination: int,
        data_start: int,
        gauge: Gauge,
        origin: Callable[[str], Tensor | None],
    ) -> None:
        self._source, self._destination = source, destination
        self._data_start, self._gauge, self._origin = data_start, gauge, origin
        self._local = threading.local()
        self._large = threading.Lock()

    def move(self, entry: _Entry, axes: Axes) -> int:
        """Move one tensor, in blocks of rows; returns its size in bytes."""
        whole = bool(axes) and moves(axes[0], self._gauge)
        try:
            with self._large if whole and entry.nbytes > LARGE_BYTES else nullcontext():
                return self._move(entry, axes, whole)
        except SignedAlignError as error:
            raise type(error)(f"{entry.name}: {error}") from error

    def _move(self, entry: _Entry, axes: Axes, whole: bool) -> int:
        offset = self._data_start + entry.offset
        if not entry.shape:
            self._write(self._read(entry.dtype, entry.shape, offset), offset)
            return entry.nbytes
        other = self._origin(entry.name)
        if other is not None and (other.shape != entry.shape or other.dtype != entry.dtype):
            raise CheckpointError(
                f"it is made of a tensor of shape {tuple(other.shape)} and dtype {other.dtype}, "
                f"and is itself {entry.shape} and {entry.dtype}."
            )
        if other is not None or (whole and isinstance(axes[0], Fused)):
            origin = self._read(entry.dtype, entry.shape, offset) if other is None else other
            self._write(transport(origin, axes, self._gauge), offset)
            return entry.nbytes
        count, *rest = entry.shape
        row_bytes = torch.Size(rest).numel() * entry.dtype.itemsize
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        # Where the gauge moves rows, a block of the result is made of rows from everywhere.
        tensor = self._read(entry.dtype, entry.shape, offset) if whole else None
        for start in range(0, count, step):
            place = offset + start * row_bytes
            if tensor is None:
                shape = (min(step, count - start), *rest)
                block = transport(self._read(entry.dtype, shape, place), axes, self._gauge)
            else:
                block = transport(tensor, axes, self._gauge, rows=slice(start, start + step))
            self._write(block, place)
        return entry.nbytes

    def _read(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = getattr(self._local, "buffer", None)
        if size > LARGE_BYTES:
            buffer = torch.empty(size, dtype=torch.uint8)  # not kept: see LARGE_BYTES
        elif buffer is None or size > len(buffer):
            buffer = self._local.buffer = torch.empty(size, dtype=torch.uint8)
        left = memoryview(buffer.numpy())[:size]
        while left:
            count = os.preadv(self._source, [left], offset)
            if not count:
                raise CheckpointError("the file ended while it was being read; did it change?")
            left, offset = left[count:], offset + count
        return buffer[:size].view(dtype).reshape(shape)

    def _write(self, tensor: Tensor, offset: int) -> None:
        left = memoryview(_bytes_of(tensor.contiguous()))
        while left:
            count = os.pwrite(self._destination, left, offset)
            left, offset = left[count:], offset + count


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """Two threads that move tensors side by side, each without torch's own threads."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _bytes_of(tensor: Tensor) -> Any:
    """The tensor's own memory, as an array of bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _reserve(file: BinaryIO, size: int) -> None:
    """Claim disk space: a full disk is noticed now, and writing is about twice as fast."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file (truncated or damaged?): {error}."
        ) from error


def _local_directory(model: str) -> Path:
    path = Path(model)
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise CheckpointError(f"{model} is a file; a checkpoint is a directory.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model,
                ignore_patterns=["*.bin", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.h5", "*.msgpack"],
            )
        )
    except HFValidationError as error:
        raise CheckpointError(f"{model} is neither a directory nor a Hub id.") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{model} is not a local directory, and the Hub did not give it: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} has no config.json, so it is not a transformers checkpoint."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the config.json of {path} cannot be read: {error}.") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
        raise CheckpointError(f"the config.json of {path} does not name a model_type.")
    return settings


def _weight_files(path: Path) -> dict[str, Path]:
    if (path / SINGLE_NAME).is_file():
        # with both, transformers loads the single file too
        weight_map, shards = None, {SINGLE_NAME}
    elif (path / INDEX_NAME).is_file():
        try:
            weight_map = json.loads((path / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"]
            shards = {str(shard) for shard in weight_map.values()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{path / INDEX_NAME} is not a valid index: {error!r}."
            ) from error
        for shard in sorted(shards):
            if Path(shard).name != shard:
                raise CheckpointError(f"{path / INDEX_NAME} points outside its folder: {shard!r}.")
            if not os.path.isfile(path / shard):
                raise CheckpointError(f"the shard {shard} that {INDEX_NAME} names is missing.")
    else:
        pickles = sorted(file.name for file in path.glob("*.bin") if file.name not in NOT_WEIGHTS)
        held = f", only {pickles[0]}, a pickle, which could run code" if pickles else ""
        raise CheckpointError(
            f"{path} has no {SINGLE_NAME} and no {INDEX_NAME}{held}; save the model as safetensors "
            "first (save_pretrained does)."
        )
    files = {}
    for shard in sorted(shards):
        with _opened(path / shard) as file:
            files.update(dict.fromkeys(file.keys(), path / shard))
    if weight_map is not None and set(files) != set(weight_map):
        odd = sorted(set(files) ^ set(weight_map))[0]
        raise CheckpointError(f"{INDEX_NAME} and the shards of {path} disagree about {odd!r}.")
    return files


def other_files(checkpoint: Checkpoint) -> Iterator[Path]:
    """The files of a checkpoint beside its weights, but for hidden directories."""
    moved = set(checkpoint.files.values())
    for file in sorted(checkpoint.path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(checkpoint.path).parts[:-1])
        if file.is_file() and file not in moved and not hidden:
            yield file
