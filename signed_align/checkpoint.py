"""Checkpoints on disk: opened lazily, fingerprinted, and rewritten tensor by tensor.

A rewritten safetensors file keeps its header byte for byte (moving coordinates changes neither
names, dtypes nor shapes), so the data section is streamed: one tensor, or one block of a large
tensor's rows, is in memory at a time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from signed_align.chart import Chart
from signed_align.errors import CheckpointError, SignedAlignError
from signed_align.files import atomic_path
from signed_align.gauge import Gauge, ModelIdentity
from signed_align.labels import Axes, transport
from signed_align.progress import byte_meter

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
BLOCK_BYTES = 64 * 2**20
"""Tensors above this size are moved in blocks of rows where their rows stay in place."""

# Files that hold weights or training state in some coordinates. `apply` moves the safetensors
# that transformers loads; copying another copy in the old coordinates beside them would be a trap.
_WEIGHT_SUFFIXES = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".h5", ".msgpack",
    ".npz", ".pkl", ".tflite",
}  # fmt: skip
_WEIGHT_INDEXES = {"pytorch_model.bin.index.json"}
_NOT_WEIGHTS = {"training_args.bin"}

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
    config: Any
    files: dict[str, Path]

    @classmethod
    def open(cls, model: str | Path, *, revision: str | None = None) -> Checkpoint:
        """Open a local directory or a Hub id.

        Raises
        ------
        CheckpointError
            If it cannot be found, is quantised, has no safetensors weights, or a file is damaged.
        """
        path = _local_directory(str(model), revision)
        config = _load_config(path)
        quantisation = getattr(config, "quantization_config", None)
        if quantisation:
            scheme = (
                quantisation.get("quant_method", "unknown")
                if isinstance(quantisation, dict)
                else getattr(quantisation, "quant_method", "unknown")
            )
            raise CheckpointError(
                f"{model} is quantised ({getattr(scheme, 'value', scheme)}): its packed weights "
                "cannot be permuted and sign-flipped; save a dequantised copy and use that."
            )
        return cls(name=str(model), path=path, config=config, files=_weight_files(path))

    @cached_property
    def chart(self) -> Chart:
        """The chart of the model; raises ChartError for a model type that has none."""
        return Chart.for_model(
            self.config.model_type, getattr(self.config.get_text_config(), "hidden_size", 0)
        )

    @cached_property
    def identity(self) -> ModelIdentity:
        """The checkpoint's name and fingerprint.

        The fingerprint is a SHA-256 over every tensor's name, dtype, shape and first row. It does
        not depend on how the checkpoint is sharded; twins and fine-tunes have different ones.
        """
        digest = hashlib.sha256()
        for name in sorted(self.files):
            view = self._handles[self.files[name]].get_slice(name)
            digest.update(f"{name} {view.get_dtype()} {view.get_shape()}\n".encode())
            first = view[:1] if view.get_shape() else self.tensor(name)
            digest.update(first.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return ModelIdentity(self.name, digest.hexdigest(), self.config.model_type)

    @cached_property
    def _handles(self) -> dict[Path, Any]:
        return {path: _opened(path) for path in set(self.files.values())}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, read from its file's header."""
        return tuple(self._handles[self.files[name]].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """One tensor, in the dtype it is stored in."""
        return self._handles[self.files[name]].get_tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of a tensor."""
        return self._handles[self.files[name]].get_slice(name)[start:stop]

    def require_movable(self, gauge: Gauge) -> None:
        """Raise unless every tensor of the checkpoint is understood and ``gauge`` fits it."""
        self.chart.require_native(gauge)
        for path in sorted(set(self.files.values())):
            for name, _, shape, _ in _entries(path):
                self.chart.axes(name, shape)


def apply(
    gauge: Gauge,
    model: str | Path,
    out: str | Path,
    *,
    inverse: bool = False,
    any_source: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Move a whole checkpoint through a gauge and write it to ``out``.

    Parameters
    ----------
    gauge : Gauge
        Leads from ``model`` to the wanted coordinates (or back from them, with ``inverse``).
    model : str or Path
        A local directory or a Hub id.
    out : str or Path
        The directory to make. Config, tokenizer and all other files are carried along; weights in
        further formats are not, since they would stay in the old coordinates.
    inverse : bool
        Apply the inverse gauge: ``model`` is then the gauge's target.
    any_source : bool
        Accept a model whose fingerprint is not the gauge's source, such as a fine-tune of it.
    force : bool
        Replace ``out`` if it exists.

    Returns
    -------
    dict
        ``out``, ``tensors``, ``bytes``, ``left_out`` (names of files not carried along), and the
        ``fingerprint`` of the result.

    Raises
    ------
    SignedAlignError
        If the gauge does not belong to the model, or a tensor is not understood.
    """
    checkpoint = Checkpoint.open(model)
    gauge = gauge.inverse() if inverse else gauge
    if not any_source:
        gauge.require_source(checkpoint.identity)
    checkpoint.require_movable(gauge)
    shards = sorted(set(checkpoint.files.values()))
    left_out = []
    with atomic_path(Path(out), force=force) as temporary:
        temporary.mkdir()
        meter = byte_meter("moving weights", sum(shard.stat().st_size for shard in shards))
        for shard in shards:
            rewrite_safetensors(
                shard, temporary / shard.name, checkpoint.chart.axes, gauge, meter.update
            )
        meter.close()
        for file in _other_files(checkpoint):
            relative = file.relative_to(checkpoint.path)
            if is_weight_file(file):
                left_out.append(str(relative))
                continue
            (temporary / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, temporary / relative)
    result = Checkpoint.open(out)
    return {
        "out": str(out),
        "tensors": len(checkpoint.files),
        "bytes": sum(shard.stat().st_size for shard in shards),
        "left_out": sorted(left_out),
        "fingerprint": result.identity.fingerprint,
    }


def scramble(
    model: str | Path, out: str | Path, *, seed: int = 0, signed: bool = True, force: bool = False
) -> Gauge:
    """Write a twin of ``model``: the same function in randomly changed coordinates.

    Parameters
    ----------
    model, out : str or Path
        The model, and the directory to make.
    seed : int
        Chooses the group element.
    signed : bool
        Draw from the native group: B_d for an RMSNorm model, a permutation with the global sign -1
        for a LayerNorm model. False draws a permutation only.
    force : bool
        Replace ``out`` if it exists.

    Returns
    -------
    Gauge
        The true gauge from ``model`` to its twin.
    """
    checkpoint = Checkpoint.open(model)
    gauge = Gauge(
        elements=checkpoint.chart.random_gauge(seed=seed, signed=signed),
        source=checkpoint.identity,
        provenance={"method": "scramble", "seed": seed, "signed": signed},
    )
    apply(gauge, model, out, force=force)
    return Gauge(
        elements=gauge.elements,
        source=gauge.source,
        target=Checkpoint.open(out).identity,
        provenance=gauge.provenance,
    )


def rewrite_safetensors(
    source: Path,
    destination: Path,
    label: Callable[[str, tuple[int, ...]], Axes],
    gauge: Gauge,
    advance: Callable[[int], object] = lambda _: None,
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
    """
    entries = sorted(_entries(source), key=lambda entry: entry.offset)
    with open(source, "rb") as reader, open(destination, "wb") as writer:
        length = reader.read(8)
        writer.write(length)
        writer.write(reader.read(int.from_bytes(length, "little")))
        data_start = reader.tell()
        advance(data_start)
        for name, dtype, shape, offset in entries:
            axes = label(name, shape)
            try:
                for block in _blocks(reader, data_start + offset, dtype, shape, axes, gauge):
                    moved = transport(block, axes, gauge).contiguous()
                    writer.write(moved.reshape(-1).view(torch.uint8).numpy())
                    advance(moved.nbytes)
            except SignedAlignError as error:
                raise type(error)(f"{name}: {error}") from error


def is_weight_file(file: Path) -> bool:
    """Whether a file holds weights, or an index of weights, rather than text or settings."""
    return (
        file.suffix in _WEIGHT_SUFFIXES or file.name in _WEIGHT_INDEXES
    ) and file.name not in _NOT_WEIGHTS


class _Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


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


def _blocks(
    file: BinaryIO,
    offset: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    axes: Axes,
    gauge: Gauge,
) -> Iterator[Tensor]:
    """The tensor at ``offset``, whole or (if the gauge leaves its rows in place) in row blocks."""
    file.seek(offset)
    if not shape:
        yield _read(file, dtype, shape)
        return
    rows = shape[0]
    row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
    first = axes[0]
    if first is None or first.space not in gauge.elements:
        rows = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, shape[0], max(1, rows)):
        yield _read(file, dtype, (min(rows, shape[0] - start), *shape[1:]))


def _read(file: BinaryIO, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    buffer = tensor.reshape(-1).view(torch.uint8).numpy()
    if file.readinto(buffer) != tensor.nbytes:  # type: ignore[attr-defined]
        raise CheckpointError("the file ended while it was being read; did it change?")
    return tensor


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file (truncated or damaged?): {error}."
        ) from error


def _local_directory(model: str, revision: str | None) -> Path:
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{model} is a file; a checkpoint is a directory.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
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


def _load_config(path: Path) -> Any:
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json, so it is not a transformers checkpoint.")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"transformers cannot read the config of {path}: {str(error).splitlines()[0]}"
        ) from error


def _weight_files(path: Path) -> dict[str, Path]:
    if (path / INDEX_NAME).is_file():
        try:
            weight_map = json.loads((path / INDEX_NAME).read_text())["weight_map"]
            shards = {str(shard) for shard in weight_map.values()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{path / INDEX_NAME} is not a valid index: {error!r}."
            ) from error
        for shard in sorted(shards):
            if Path(shard).name != shard:
                raise CheckpointError(f"{path / INDEX_NAME} points outside its folder: {shard!r}.")
            if not (path / shard).is_file():
                raise CheckpointError(f"the shard {shard} that {INDEX_NAME} names is missing.")
    elif (path / SINGLE_NAME).is_file():
        weight_map, shards = None, {SINGLE_NAME}
    else:
        raise CheckpointError(
            f"{path} has no {SINGLE_NAME} and no {INDEX_NAME}; save the model as safetensors "
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


def _other_files(checkpoint: Checkpoint) -> Iterator[Path]:
    moved = set(checkpoint.files.values())
    for file in sorted(checkpoint.path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(checkpoint.path).parts[:-1])
        if file.is_file() and file not in moved and not hidden:
            yield file
