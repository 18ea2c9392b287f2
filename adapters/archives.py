"""Zip archives and NumPy arrays as bytes: read with suspicion, and written as they were."""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from signed_align.errors import ArtifactError

MOST_UNPACKED = 2**30, 100
"""An archive that says it unpacks to more bytes than this, and to so many times its own size."""


TEXT = "SU"
"""The kinds of NumPy arrays that hold text: they stay as they are."""


ZIP64 = b"\x01\x00"
"""The mark of 64-bit sizes in a zip header."""


def require_bounded(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise ArtifactError for an archive that says it unpacks to too much."""
    unpacked = sum(member.file_size for member in archive.infolist())
    most, times = MOST_UNPACKED
    if unpacked > most and unpacked > times * path.stat().st_size:
        raise ArtifactError(
            f"{path} says that it unpacks to {unpacked} bytes, more than {times} times its size."
        )


def require_sane(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise ArtifactError for an archive that unpacks to too much, or out of its folder."""
    require_bounded(archive, path)
    names = archive.namelist()
    if len(set(names)) != len(names) or any(Path(name).name != name for name in names):
        raise ArtifactError(f"{path} is an archive with doubled or nested names.")


def rewrite_archive(source: Path, destination: Path, contents: Mapping[str, bytes]) -> None:
    """Copy a zip archive, member by member, with other contents for some of them.

    Order, dates and compression of the members stay, and the form of their headers.
    """
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(destination, "w") as new:
        missing = sorted(set(contents) - set(old.namelist()))
        if missing:
            raise ArtifactError(f"{source} has no member {missing[0]!r}.")
        for member in old.infolist():
            data = contents.get(member.filename)
            data = old.read(member) if data is None else data
            wide = _has_wide_header(source, member)
            with new.open(member, "w", force_zip64=wide) as writer:
                writer.write(data)


def _has_wide_header(path: Path, member: zipfile.ZipInfo) -> bool:
    """Whether a member's header has room for 64-bit sizes, as NumPy asks for."""
    with open(path, "rb") as file:
        file.seek(member.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", file.read(4))
        file.seek(name_length, 1)
        return file.read(extra_length)[:2] == ZIP64


def array_bytes(array: np.ndarray[Any, Any], like: np.ndarray[Any, Any]) -> bytes:
    """An array as the bytes of an ``.npy`` file, in the order in memory of another."""
    buffer = BytesIO()
    np.lib.format.write_array(buffer, ordered_like(array, like), allow_pickle=False)
    return buffer.getvalue()


def ordered_like(array: np.ndarray[Any, Any], like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array in the order in memory, and the byte order, of another."""
    typed = array.astype(like.dtype, copy=False)
    if like.flags.f_contiguous and not like.flags.c_contiguous:
        return np.asfortranarray(typed)
    return np.asarray(typed, order="C")


def is_numeric(array: np.ndarray[Any, Any]) -> bool:
    """Whether an array holds numbers of a type that torch has too."""
    return array.dtype.kind in "fiubc" and array.dtype.itemsize <= 8 + 8 * (array.dtype.kind == "c")


def to_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """An array as a tensor, which has the machine's own byte order and lies in order."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.array(native, order="C"))


def read_array(data: bytes, path: Path) -> np.ndarray[Any, Any]:
    """An array from the bytes of an ``.npy`` file, if its header says how many there are."""
    buffer = BytesIO(data)
    version = np.lib.format.read_magic(buffer)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read_header is None:
        raise ArtifactError(f"{path} holds an array of an unknown version of the .npy format.")
    shape, _, dtype = read_header(buffer)
    if dtype.hasobject:
        raise ArtifactError(f"{path} holds pickled objects, which are not loaded: they are code.")
    if math.prod(shape) * dtype.itemsize != len(data) - buffer.tell():
        raise ArtifactError(f"{path} holds an array whose size is not what its header says.")
    buffer.seek(0)
    return np.lib.format.read_array(buffer, allow_pickle=False)
