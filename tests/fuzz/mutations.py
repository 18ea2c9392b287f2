"""Mutations of files, by format; each draws from a ``random.Random``.

A mutation takes the bytes of a valid file and returns those of one that is broken, or hostile, or
valid and unexpected: structure is changed where a format has one, bytes in any case.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import shutil
import struct
import subprocess
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
import torch
import yaml

from tests.fuzz.guard import CANARY

Mutation = Callable[[bytes, Random, Sequence[str]], bytes]
"""From the file's bytes, a source of chance and words that mean something in it, to other bytes."""

BIG = (2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64)
SMALL = (0, 1, 2, 3, 4, 7, 8, 11, 12, 13, 24, -1, -2, -(2**31), -(2**63))
FLOATS = (0.0, -0.0, 0.5, 1.5, -1e308, 1e308, 5e-324, math.nan, math.inf, -math.inf)
TEXTS = (
    "", " ", ".", "..", "/", "a/b", "../../x", "../../../../../../tmp/signed_align_stray",
    "/etc/passwd", "/tmp/signed_align_stray", "~", "\x00", "a\x00b", "\n", "two\nlines", "\r\n",
    "\u2028", "\x1b[31mred", "\ud800", "\udcff", "🌀", "İ", "ﬁ", "x" * 5000, "%s%n", "{0}",
    "${HOME}", "__class__", "__metadata__", "null", "true", "nan", "-1", "1e999", "0x10", "1_000",
    "٣", "9" * 400, "model", "weight", "blocks.0.hook_resid_post", "blocks.1.mlp.hook_post",
    "blocks.0.attn.hook_z", "blocks.99.hook_resid_post", f"blocks.{'9' * 30}.hook_resid_post",
    "blocks.-1.hook_resid_post", f"blocks.{'9' * 5000}.hook_resid_post",
    "blocks.٣.hook_resid_post", "model.layers.1", "model.layers.1.mlp",
    "model.layers.0.self_attn.q_proj", "lm_head", "model.embed_tokens", f"{CANARY}.py",
    f"__import__('{CANARY}')", "!!python/object/apply:os.system [x]",
)  # fmt: skip


# ---- values --------------------------------------------------------------------------------------


class Raw(str):
    """A piece of JSON text that stands as it is."""


def odd_value(random: Random, words: Sequence[str]) -> Any:
    """A JSON value that a reader may not be ready for."""
    kind = random.randrange(12)
    if kind < 3:
        return random.choice([*SMALL, *BIG])
    if kind == 3:
        return random.choice(FLOATS)
    if kind < 6:
        return random.choice(words or TEXTS)
    if kind == 6:
        return random.choice(TEXTS)
    if kind == 7:
        return random.choice([None, True, False])
    if kind == 8:
        return random.choice([[], {}, [[]], {"": {}}, [None], [{}], {"a": None}, ["x", 1]])
    if kind == 9:
        count = random.choice([1, 2, 3, 8, 12, 24, 1000])
        return [odd_number(random) for _ in range(count)]
    if kind == 10:
        return {
            random.choice(words or TEXTS): odd_number(random) for _ in range(random.randrange(4))
        }
    return Raw(
        random.choice(
            ["9" * 5000, "-" + "9" * 400, "1e400", "1e-400", "NaN", "-Infinity", "01", "+1", "'x'",
             "[" * 50_000, "[" * 900 + "]" * 900, '{"a":' * 600 + "1" + "}" * 600, '"\\ud800"',
             '{"a": 1, "a": 2}', "// x", "", ",", "}", "\ufeff1", '"\\u0000"', "0" * 30, "tru"]
        )
    )  # fmt: skip


def odd_number(random: Random) -> Any:
    return random.choice([*SMALL, *SMALL, *BIG, *FLOATS])


class Pairs(list):  # type: ignore[type-arg]
    """An object whose keys may come twice."""


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict):
        for key, item in value.items():
            found += _places(item, (*path, key))
    elif isinstance(value, list):
        for key, item in enumerate(value[:40]):
            found += _places(item, (*path, key))
    return found


def change(value: Any, random: Random, odd: Callable[[], Any], words: Sequence[str]) -> Any:
    """Nested containers, changed in one place."""
    place = random.choice(_places(value))
    if not place:
        return odd() if random.random() < 0.2 else _changed_here(value, random, odd, words)
    *way, last = place
    holder = value
    for key in way:
        holder = holder[key]
    action = random.randrange(7)
    if action < 3:
        holder[last] = odd()
    elif action == 3:
        del holder[last]
    elif action == 4 and isinstance(holder, dict):
        content = holder.pop(last)
        holder[random.choice(words or TEXTS)] = content
    elif action == 5:
        holder[last] = [holder[last]] * random.choice([1, 2, 3])
    else:
        holder[last] = _changed_here(holder[last], random, odd, words)
    return value


def _changed_here(value: Any, random: Random, odd: Callable[[], Any], words: Sequence[str]) -> Any:
    if isinstance(value, dict):
        key = random.choice(list(words) or TEXTS)
        return {**value, (random.choice(TEXTS) if random.random() < 0.2 else key): odd()}
    if isinstance(value, list):
        return [*value, odd()]
    if type(value) is int:
        return random.choice([value + 1, value - 1, -value, value * 2, float(value), str(value)])
    if isinstance(value, str):
        return random.choice(
            [value.upper(), value + ".", value[1:], value[::-1], value + "\n", [value], value * 50]
        )
    return odd()


def json_text(value: Any) -> bytes:
    """JSON in which :class:`Raw` texts stand as they are and NaN is written as Python does."""
    raws: list[str] = []

    def plain(item: Any) -> Any:
        if isinstance(item, Raw):
            raws.append(item)
            return f"@@raw{len(raws) - 1}@@"
        if isinstance(item, dict):
            return {str(key): plain(child) for key, child in item.items()}
        if isinstance(item, list):
            return [plain(child) for child in item]
        return item

    text = json.dumps(plain(value))
    for number, raw in enumerate(raws):
        text = text.replace(f'"@@raw{number}@@"', raw)
    return text.encode("utf-8", "surrogatepass")


def mutate_json(data: bytes, random: Random, words: Sequence[str]) -> bytes:
    """Another object of the same kind, or text that is none."""
    if random.random() < 0.08:
        return mutate_text(data, random, words)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_text(data, random, words)
    try:
        for _ in range(random.choice([1, 1, 1, 2, 3])):
            value = change(value, random, lambda: odd_value(random, words), words)
        text = json_text(value)
    except RecursionError:  # it was nested before
        return mutate_text(data, random, words)
    if random.random() < 0.03 and text.startswith(b"{") and len(text) > 2:
        text = b"{" + text[1:-1] + b", " + text[1:-1] + b"}"  # every key twice
    return text


def mutate_text(data: bytes, random: Random, words: Sequence[str]) -> bytes:
    """Text with something put in, taken out or doubled."""
    action = random.randrange(9)
    place = random.randrange(len(data) + 1)
    if action == 0:
        return data[:place] + random.choice(TEXTS).encode("utf-8", "surrogatepass") + data[place:]
    if action == 1 and words:
        return data[:place] + random.choice(words).encode("utf-8", "surrogatepass") + data[place:]
    if action == 2:
        lines = data.split(b"\n")
        lines.insert(random.randrange(len(lines) + 1), random.choice(lines))
        return b"\n".join(lines)
    if action == 3:
        lines = data.split(b"\n")
        del lines[random.randrange(len(lines))]
        return b"\n".join(lines)
    if action == 4:
        text = json_text(odd_value(random, words))
        end = min(len(data), place + random.randrange(20))
        return data[:place] + text + data[end:]
    if action == 5:
        return random.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"\x1f\x8b"]) + data
    if action == 6:
        return data.decode("utf-8", "replace").encode(random.choice(["utf-16", "utf-32", "utf-7"]))
    if action == 7:
        old = random.choice([b",", b":", b'"', b"{", b"[", b"\n", b" ", b"0", b"1"])
        return data.replace(old, random.choice([b"", b",", b'"', b"\t", b"\r", b";"]), 3)
    return mutate_bytes(data, random, words)


def mutate_bytes(data: bytes, random: Random, words: Sequence[str] = ()) -> bytes:
    """Bytes flipped, cut, doubled, patched with numbers, or drawn anew."""
    action = random.randrange(9)
    if action == 0 or not data:
        return _noise(random, random.choice([0, 1, 2, 7, 8, 9, 64, 300]))
    if action == 1:
        return data[: random.randrange(len(data))]
    if action == 2:
        return data + _noise(random, random.choice([1, 8, 100]))
    changed = bytearray(data)
    place = random.randrange(len(data))
    if action == 3:
        for _ in range(random.choice([1, 1, 2, 8])):
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    elif action == 4:
        end = min(len(changed), place + random.randrange(1, 32))
        del changed[place:end]
    elif action == 5:
        changed[place:place] = changed[place : place + random.randrange(1, 64)]
    elif action == 6:
        size = random.choice([1, 2, 4, 8])
        number = random.choice([*SMALL, *BIG]) % 2 ** (8 * size)
        changed[place : place + size] = number.to_bytes(size, random.choice(["little", "big"]))
    elif action == 7:  # near the start there are counts and sizes
        place = random.randrange(min(len(data), 64))
        size = random.choice([4, 8])
        number = random.choice([*SMALL, *BIG]) % 2 ** (8 * size)
        changed[place : place + size] = number.to_bytes(size, "little")
    else:
        changed[place] = random.randrange(256)
    return bytes(changed)


def _noise(random: Random, count: int) -> bytes:
    return bytes(random.randrange(256) for _ in range(count))


# ---- safetensors ---------------------------------------------------------------------------------

DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8",
          "BOOL", "U16", "U32", "U64", "F8_E8M0", "F4", "C64", "F6_E2M3", "Q4_0", "")  # fmt: skip
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "U16": 2, "U32": 4,
          "U64": 8, "C64": 8}  # fmt: skip


def _packed(entries: dict[str, tuple[str, list[int], bytes]], metadata: Any) -> bytes:
    """A consistent file of these tensors."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, content) in entries.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def mutate_safetensors(data: bytes, random: Random, words: Sequence[str]) -> bytes:
    """A consistent file of other tensors, or one whose header lies."""
    length = int.from_bytes(data[:8], "little")
    text, body = data[8 : 8 + length], data[8 + length :]
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", None)
        entries = {
            name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
        return mutate_bytes(data, random)
    action = random.randrange(12)
    if action < 5 and entries:
        for _ in range(random.choice([1, 1, 2])):
            _change_tensors(entries, random, words)
        return _packed(entries, metadata)
    if action < 7 and isinstance(metadata, dict) and metadata:
        return _packed(entries, _changed_metadata(metadata, random, words))
    if action == 7:
        lie = random.choice([0, 1, 2, length - 1, length + 1, length + 8, *BIG]) % 2**64
        return lie.to_bytes(8, "little") + text + body
    if action < 10:
        header = json.loads(text)
        text = _lying_header(header, random, words)
        return len(text).to_bytes(8, "little") + text + body
    if action == 10:
        text = mutate_text(text, random, words)
        return len(text).to_bytes(8, "little") + text + body
    return mutate_bytes(data, random)


def _change_tensors(
    entries: dict[str, tuple[str, list[int], bytes]], random: Random, words: Sequence[str]
) -> None:
    if not entries:
        return
    name = random.choice(list(entries))
    dtype, shape, content = entries[name]
    action = random.randrange(7)
    if action == 0:
        del entries[name]
    elif action == 1:
        del entries[name]
        names = [*words, *TEXTS, *entries, name.replace("0", "9"), name + ".bias", f"a.{name}"]
        entries[random.choice(names)] = (dtype, shape, content)
    elif action == 2:
        dtype = random.choice(DTYPES)
        width = _SIZES.get(dtype, 1)
        entries[name] = (dtype, shape, _tiled(content, math.prod(shape) * width))
    elif action == 3:
        sizes = (0, 1, 2, 3, 4, 7, 8, 9, 12, 16, 24)
        new = [random.choice(sizes) for _ in range(random.choice([0, 1, 1, 2, 2, 3, 4]))]
        width = _SIZES.get(dtype, 1)
        entries[name] = (dtype, new, _tiled(content, math.prod(new) * width))
    elif action == 4:
        entries[name] = (dtype, shape[::-1], content)
    elif action == 5:
        fill = random.choice([b"\x00", b"\xff", b"\x7f\xc0\x00\x00"[::-1], b"\x00\x00\x80\x7f"])
        entries[name] = (dtype, shape, _tiled(fill, len(content)))
    else:
        entries[random.choice(words or TEXTS)] = (dtype, list(shape), content)


def _tiled(content: bytes, size: int) -> bytes:
    content = content or b"\x00"
    if size > 2**20:
        return content
    return (content * (size // len(content) + 1))[:size]


def _changed_metadata(metadata: dict[str, Any], random: Random, words: Sequence[str]) -> Any:
    """Metadata in which a text, often JSON itself, is another."""
    key = random.choice(list(metadata))
    action = random.randrange(6)
    if action == 0:
        return {name: text for name, text in metadata.items() if name != key}
    if action == 1:
        return {
            **metadata,
            key: random.choice([*TEXTS[:30], *words]).encode(errors="replace").decode(),
        }
    if action == 2:
        return {**metadata, key: odd_number(random)}
    changed = mutate_json(str(metadata[key]).encode("utf-8", "replace"), random, words)
    return {**metadata, key: changed.decode("utf-8", "replace")}


def _lying_header(header: dict[str, Any], random: Random, words: Sequence[str]) -> bytes:
    names = [name for name in header if name != "__metadata__"]
    action = random.randrange(5)
    if names and action < 2:
        entry = header[random.choice(names)]
        if action == 0:
            begin, end = entry["data_offsets"]
            entry["data_offsets"] = random.choice(
                [[end, begin], [begin, end + 1], [begin, end - 1], [begin + 1, end + 1], [0, end],
                 [0, 0], [-1, end], [begin, 2**64 - 1], [2**63, 2**63 + 4], [begin], [], None,
                 [begin, end, end], [float(begin), end], [str(begin), end]]
            )  # fmt: skip
        else:
            shape = list(entry["shape"])
            entry["shape"] = random.choice(
                [[*shape, 0], [2**32, 2**32], [2**63], [-1], [1.5], ["8"], None, [], shape[::-1],
                 [1] * 300, [2**62, 4, *shape], [*shape, 1]]
            )  # fmt: skip
        return json.dumps(header).encode()
    if names and action == 2:
        name = random.choice(names)
        twice = json.dumps(header)[:-1] + ", " + json.dumps({name: header[name]})[1:]
        return twice.encode()
    if action == 3:
        return json.dumps(header).encode() + b" " * random.choice([1, 7, 1000])
    return json_text(change(header, random, lambda: odd_value(random, words), words))


# ---- archives and what is in them ----------------------------------------------------------------


class _Call:
    """What a pickle of it does when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self._reduced


@cache
def _payloads() -> tuple[bytes, ...]:
    """Pickles that run code when they are loaded, by every way that gadgets go."""
    setting = f"import os; os.environ[{CANARY!r}] = '1'"
    calls = [
        _Call(os.system, f"echo {CANARY}"),
        _Call(exec, setting),
        _Call(eval, f"__import__('os').putenv('{CANARY}', '1')"),
        _Call(subprocess.Popen, ["echo", CANARY]),
        _Call(open, f"/tmp/{CANARY}", "w"),
        _Call(os.mkdir, f"/tmp/{CANARY}"),
        _Call(shutil.rmtree, f"/tmp/{CANARY}", True),
        _Call(__import__, CANARY),
        _Call(torch.load, f"/tmp/{CANARY}"),
        _Call(np.load, f"/tmp/{CANARY}"),
        _Call(torch.hub.load, CANARY, CANARY),
        _Call(pickle.loads, pickle.dumps(_Call(exec, setting))),
    ]
    contents = [call for one in calls for call in (one, {"state": one, "param_groups": []}, [one])]
    found = [pickle.dumps(one, protocol) for one in contents for protocol in (0, 2, 4)]
    by_hand = [
        b"cos\nsystem\n(S'echo signed_align_fuzz_canary'\ntR.",
        b"\x80\x02cbuiltins\nexec\nX\x05\x00\x00\x00print\x85R.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04echo\x85R.",
        b"(cos\nsystem\nS'echo signed_align_fuzz_canary'\no.",
        b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01h\x00u.",  # a dictionary that holds itself
        b"\x80\x02]q\x00h\x00a.",
        b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".",
        b"\x80\x02" + b"(" * 20000,
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02X\xff\xff\xff\x7f.",
        b"\x80\x02\x8a\xff" + b"\xff" * 255 + b".",
        b"\x80\x02U\x01x\x94" * 3 + b".",
    ]
    return (*found, *by_hand)


def odd_tensor(random: Random) -> Any:
    """A tensor, or what is near one, that a reader may not be ready for."""
    makers: list[Callable[[], Any]] = [
        lambda: torch.zeros(()),
        lambda: torch.zeros(0),
        lambda: torch.zeros(0, 8),
        lambda: torch.zeros(8, 0),
        lambda: torch.randn(8, generator=torch.Generator().manual_seed(random.randrange(99))),
        lambda: torch.ones(8, 8),
        lambda: torch.ones(2, 8),
        lambda: torch.ones(7),
        lambda: torch.full((8,), math.nan),
        lambda: torch.full((8,), math.inf),
        lambda: torch.arange(8),
        lambda: torch.arange(8, dtype=torch.uint8),
        lambda: torch.tensor([-1, 2**62]),
        lambda: torch.ones(8, dtype=torch.bool),
        lambda: torch.ones(8, dtype=torch.complex64),
        lambda: torch.ones(8, dtype=torch.bfloat16),
        lambda: torch.ones(8, dtype=torch.float8_e4m3fn),
        lambda: torch.ones(8, dtype=torch.float16).expand(2, 8),
        lambda: torch.ones(1).expand(8),
        lambda: torch.randn(4, 8).T,
        lambda: torch.randn(16)[::2],
        lambda: torch.eye(8).to_sparse(),
        lambda: torch.eye(8).to_sparse_csr(),
        lambda: torch.nn.Parameter(torch.ones(8)),
        lambda: torch.empty(8, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8),
        lambda: torch.ones(8).untyped_storage(),
        lambda: torch.ones(1, 1, 1, 1, 1, 8),
        lambda: torch.conj(torch.ones(8, dtype=torch.complex64)),
        lambda: torch._neg_view(torch.ones(8)),
        lambda: torch.float32,
        lambda: torch.Size([8]),
        lambda: torch.device("cuda"),
        lambda: Counter({"a": 1}),
        lambda: OrderedDict(a=torch.ones(8)),
        lambda: defaultdict(list, a=[torch.ones(8)]),
        lambda: {1, 2},
        lambda: b"bytes",
        lambda: 1 + 2j,
        lambda: np.ones(8),
        lambda: {(1, 2): torch.ones(8)},
        lambda: {None: torch.ones(8), 1.5: torch.ones(8)},
        lambda: {"a/b": torch.ones(8), "a": {"b": torch.ones(8)}},
        lambda: {0: torch.ones(8), "0": torch.ones(8)},
        lambda: _itself(),
    ]  # fmt: skip
    return random.choice(makers)()


def _itself() -> list[Any]:
    value: list[Any] = [torch.ones(8)]
    value.append(value)
    return value


def mutate_torch(data: bytes, random: Random, words: Sequence[str]) -> bytes:
    """What ``torch.save`` makes of other contents; hostile pickles; broken archives."""
    action = random.randrange(10)
    if action < 6:
        try:
            value = torch.load(io.BytesIO(data), weights_only=True)
        except Exception:  # it was changed before
            return mutate_bytes(data, random)

        def odd() -> Any:
            value = odd_value(random, words) if random.random() < 0.4 else odd_tensor(random)
            return str(value) if isinstance(value, Raw) else value

        for _ in range(random.choice([1, 1, 2])):
            value = change(value, random, odd, [word for word in words if _sayable(word)])
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer, _use_new_zipfile_serialization=random.random() < 0.8)
        except Exception:  # not everything can be saved in every form
            return mutate_bytes(data, random)
        return buffer.getvalue()
    if action == 6:
        return random.choice(_payloads())
    if action < 9:
        return mutate_zip(data, random, words)
    return mutate_bytes(data, random)


def _sayable(word: str) -> bool:
    return not any("\ud800" <= mark <= "\udfff" for mark in word)


@cache
def _bomb(megabytes: int) -> bytes:
    return bytes(megabytes * 2**20)


def mutate_zip(data: bytes, random: Random, words: Sequence[str]) -> bytes:
    """An archive with other, missing, doubled, nested, swollen or lying members."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # it was changed before
        return mutate_bytes(data, random)
    if not members:
        return mutate_bytes(data, random)
    compression = random.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    which = random.randrange(len(members))
    name, content = members[which]
    action = random.randrange(9)
    if action == 0:
        del members[which]
    elif action == 1:
        members.append((name, content))
    elif action == 2:
        bad = (
            "../../x",
            "/tmp/signed_align_stray",
            "a/../../b",
            "",
            "x\x00y",
            "data.pkl",
            name + "x",
        )
        members[which] = (random.choice(bad), content)
    elif action == 3:
        members[which] = (name, _member(name, content, random, words))
    elif action == 4 and random.random() < 0.1:
        members[which] = (name, _bomb(random.choice([1, 20])))
        compression = zipfile.ZIP_DEFLATED
    elif action == 5:
        members[which] = (name, random.choice(_payloads()))
    elif action == 6:
        members[which] = (name, mutate_bytes(content, random))
    elif action == 7:
        members.reverse()
    buffer = io.BytesIO()
    try:
        with zipfile.ZipFile(buffer, "w", compression) as archive:
            for label, inside in members:
                archive.writestr(zipfile.ZipInfo(label), inside, compress_type=compression)
    except (ValueError, OSError):
        return mutate_bytes(data, random)
    made = buffer.getvalue()
    if action == 8:
        made = _lying_directory(made, random)
    return made


def _member(name: str, content: bytes, random: Random, words: Sequence[str]) -> bytes:
    if name.endswith(".json"):
        return mutate_json(content, random, words)
    if name.endswith(".npy"):
        return mutate_npy(content, random, words)
    return mutate_bytes(content, random)


def _lying_directory(data: bytes, random: Random) -> bytes:
    """Other sizes, flags, methods and offsets in an archive's directory."""
    changed = bytearray(data)
    place = data.find(b"PK\x01\x02")
    offset, size = random.choice([(8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (42, 4)])
    number = random.choice([0, 1, 8, 9, 99, 2**31 - 1, 2**32 - 1, len(data)]) % 2 ** (8 * size)
    changed[place + offset : place + offset + size] = number.to_bytes(size, "little")
    return bytes(changed)


def mutate_npy(data: bytes, random: Random, words: Sequence[str]) -> bytes:
    """An array of another type or shape, or with a header that lies."""
    action = random.randrange(4)
    if action == 0:
        makers: list[Callable[[], Any]] = [
            lambda: np.zeros(()), lambda: np.zeros(0), lambda: np.zeros((8, 8)),
            lambda: np.ones(8, ">f4"), lambda: np.ones(8, "S5"), lambda: np.array(["a", "b"]),
            lambda: np.ones(8, "c8"), lambda: np.array([1, None], object),
            lambda: np.ones(8, [("a", "f4"), ("b", "i4")]), lambda: np.ones(8, "M8[s]"),
            lambda: np.ones(8, "longdouble"), lambda: np.ones(8, "V7"), lambda: np.ones(8, "u8"),
            lambda: np.ones(8, bool), lambda: np.asfortranarray(np.ones((2, 8))),
            lambda: np.full(8, np.nan, "f2"), lambda: np.ones((1,) * 30),
        ]  # fmt: skip
        buffer = io.BytesIO()
        np.save(buffer, random.choice(makers)(), allow_pickle=True)
        return buffer.getvalue()
    if action == 1:
        descr = random.choice(
            ["'<f4'", "'|O'", "'<f8'", "'|S0'", "'<U999999999'", "[('a', '<f4')]", "'<f99'", "None",
             "'<m8[999]'", "'|V0'", "('<f4', (2**40,))", f"__import__('{CANARY}')"]
        )  # fmt: skip
        shape = random.choice(
            ["(8,)", "()", "(0,)", "(-1,)", f"({2**62}, 4)", f"({2**63},)", "(8, 1.5)", "8",
             "(" * 300, f"({'1,' * 100})", f"({'9' * 5000},)", "('8',)", "(True,)"],
        )  # fmt: skip
        header = f"{{'descr': {descr}, 'fortran_order': {random.choice(['False', 'True', '3'])}, "
        text = (header + f"'shape': {shape}, }}").encode() + b"\n"
        version = random.choice([1, 1, 1, 2, 3, 9])
        size = struct.pack("<H" if version == 1 else "<I", len(text))
        return b"\x93NUMPY" + bytes([version, 0]) + size + text + data[-32:]
    return mutate_bytes(data, random)


# ---- recipes -------------------------------------------------------------------------------------


def _laughs(depth: int) -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for number in range(1, depth):
        lines.append(f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]")
    return "\n".join(lines).encode() + b"\n"


SNIPPETS = (
    b"x: !!python/object/apply:os.system ['echo signed_align_fuzz_canary']\n",
    b"x: !!python/object/new:os.system ['echo signed_align_fuzz_canary']\n",
    b"x: !!python/name:os.system\n", b"x: !!python/module:signed_align_fuzz_canary\n",
    b"x: !!int ''\n", b"x: !!float ''\n", b"x: !!bool x\n", b"x: !!timestamp x\n",
    b"x: !!binary '*'\n", b"x: !!set {a, b}\n", b"x: !!omap [a: 1]\n", b"x: 2026-99-99\n",
    b"x: !unknown y\n", b"? [a, b]\n: c\n", b"? {a: b}\n: c\n", b"x: &a [*a]\n",
    b"x: &a {y: *a}\n", b"<<: {merge_method: linear}\n", b"<<: 3\n", b"x: *missing\n", b"--- \n",
    b"...\n", b"%YAML 9.9\n", b"\t- x\n", b"x: |\n", b"'\n", b"x: [" * 3000, b"- " * 3000,
    b"{" * 3000, b"merge_method: ties\n", b"x: 0b102\n", b"x: 1:99:99\n",
    b"x: " + b"9" * 5000 + b"\n", b"x: .nan\n", b"x: =\n", b"\x00", b"\xff\xfe", b"\xc2\x85",
    b"x: \"\\x\"\n", b"x: \"\\ud800\"\n",
)  # fmt: skip


def mutate_yaml(data: bytes, random: Random, words: Sequence[str]) -> bytes:
    """Another recipe, or text with what YAML allows and nobody expects."""
    action = random.randrange(10)
    if action == 0:
        return data + _laughs(random.choice([3, 12, 30]))
    if action == 1:
        lines = data.split(b"\n")
        lines.insert(random.randrange(len(lines)), random.choice(SNIPPETS).rstrip(b"\n"))
        return b"\n".join(lines)
    if action == 2:
        return random.choice([random.choice(SNIPPETS) + data, data + random.choice(SNIPPETS)])
    if action == 3:
        return mutate_text(data, random, words)
    if b"&a1" in data:  # written out it has no end
        return mutate_text(data, random, words)
    try:
        value = yaml.safe_load(data)
    except Exception:  # it was changed before
        return mutate_text(data, random, words)
    for _ in range(random.choice([1, 1, 2, 3])):
        value = change(value, random, lambda: odd_value(random, words), words)
    try:
        return json_text(value)  # which is YAML too
    except (TypeError, ValueError):
        return mutate_text(data, random, words)


MUTATIONS: dict[str, Mutation] = {
    ".json": mutate_json,
    ".safetensors": mutate_safetensors,
    ".pt": mutate_torch,
    ".pth": mutate_torch,
    ".bin": mutate_torch,
    ".npy": mutate_npy,
    ".npz": mutate_zip,
    ".skops": mutate_zip,
    ".yml": mutate_yaml,
    ".csv": mutate_text,
    ".tsv": mutate_text,
    ".txt": mutate_text,
    ".joblib": lambda data, random, words: random.choice(_payloads()),
    ".pkl": lambda data, random, words: random.choice(_payloads()),
}
"""By the suffix of a file's name; of any other the bytes are mutated."""
