"""Inputs that once broke a reader: each is refused in a sentence now, or read."""

import io
import json
import zipfile

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from signed_align.cli import main
from signed_align.errors import ArtifactError, CheckpointError, GaugeError, SignedAlignError
from tests.fuzz.mutations import SNIPPETS, _laughs
from tests.fuzz.samples import json_bytes, torch_bytes
from tests.fuzz.targets import Plain

MANY_DIGITS = "9" * 5000
HOOK = "blocks.1.hook_resid_post"


def changed_json(data, **changes):
    return json.dumps({**json.loads(data), **changes}).encode()


def deep(depth=100_000):
    return b'{"weight_map": ' + b"[" * depth


def shards(name):
    return lambda world: ("index", "sharded", {"model.safetensors.index.json": json_bytes(
        {"weight_map": {"a": name}}
    )})  # fmt: skip


def config(**changes):
    return lambda world: (
        "config", "single", {"config.json": changed_json(world.single["config.json"], **changes)}
    )  # fmt: skip


def recipe(text):
    return lambda world: (
        "recipe", "linear", {"recipe.yml": world.recipes["linear"]["recipe.yml"] + text}
    )  # fmt: skip


def optimizer(change):
    def entries(world):
        data = world.optimizers["named"]["optimizer.pt"]
        content = torch.load(io.BytesIO(data), weights_only=True)
        change(content)
        return "optimizer", "named", {"optimizer.pt": torch_bytes(content)}

    return entries


def number_of_tensor(content):
    content["param_groups"][0]["params"][1] = torch.ones(8)


def moment_of_8_bits(content):
    content["state"][0]["exp_avg_sq"] = content["state"][0]["exp_avg_sq"].to(torch.float8_e4m3fn)


def vector(value):
    return lambda world: ("vector", "hooks", {"vector.pt": torch_bytes(value)})


def empty_direction(world):
    from gguf import GGUFWriter

    path = world.root / "empty.gguf"
    writer = GGUFWriter(path, "controlvector")
    writer.add_tensor("direction.0", np.zeros(0, "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return "vector", "gguf", {"vector.gguf": path.read_bytes()}


def archive_on_many_disks(world):
    data = world.vectors["hooks"]["vector.pt"]
    locator = b"PK\x06\x07" + bytes(12) + (9).to_bytes(4, "little")
    return "vector", "hooks", {"vector.pt": data.replace(data[-22:], locator + data[-22:])}


def damaged_hint(world):
    data = world.vectors["gguf"]["vector.gguf"]
    return "vector", "gguf", {"vector.gguf": data.replace(b"llama", b"l\x99ama")}


def provenance(world):
    """A gauge whose provenance holds what JSON has no number for."""
    data = world.gauges["all"]["gauge.safetensors"]
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["provenance"] = '{"seed": NaN, "method": "\\ud800"}'
    text = json.dumps(header).encode()
    return "gauge", "all", {
        "gauge.safetensors": len(text).to_bytes(8, "little") + text + data[8 + length :]
    }  # fmt: skip


def margins_of_integers(world):
    from safetensors.torch import load, save

    data = world.gauges["margins"]["gauge.safetensors"]
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    tensors = load(data)
    tensors["residual.margin"] = torch.ones(8, dtype=torch.uint64)
    return "gauge", "margins", {"gauge.safetensors": save(tensors, metadata)}


def nested(world):
    data = world.adapters["lora"]["adapter_config.json"]
    rest = b', "auto_mapping": ' + b'{"a": ' * 300 + b"1" + b"}" * 300 + b"}"
    return "adapter", "lora", {"adapter_config.json": data[:-1] + rest}


def record_without_target(world):
    step = {"action": "port", "source": None}
    content = {"format": "signed-align-provenance", "version": 1, "steps": [step], "files": {}}
    return "record", "file", {"moved.pt.signed_align.json": json_bytes(content)}


def model_of_an_adapter(value):
    def entries(world):
        data = world.adapters["lora"]["adapter_config.json"]
        changes = {"base_model_name_or_path": value}
        return "adapter", "lora", {"adapter_config.json": changed_json(data, **changes)}

    return entries


REFUSED = {
    "index that is too deep": (
        lambda world: ("index", "sharded", {"model.safetensors.index.json": deep()}),
        CheckpointError, "not a valid index",
    ),
    "shard of a long name": (shards("x" * 5000), CheckpointError, "is missing"),
    "shard of two lines": (shards("a\nb"), CheckpointError, "a b"),
    "shard that is no text": (shards("\ud800"), CheckpointError, r"\\ud800"),
    "architectures that are a number": (
        config(architectures=3, hidden_size=9), SignedAlignError, "9",
    ),
    "recipe that unfolds without end": (recipe(_laughs(30)), ArtifactError, "repeats itself"),
    "recipe that holds itself": (recipe(b"x: &a [*a]\n"), ArtifactError, "repeats itself"),
    "recipe with an empty integer": (recipe(b"x: !!int ''\n"), ArtifactError, "not valid"),
    "recipe with an empty number": (recipe(b"x: !!float ''\n"), ArtifactError, "not valid"),
    "recipe of a model with a long name": (
        lambda world: ("recipe", "linear", {
            "recipe.yml": world.recipes["linear"]["recipe.yml"].replace(
                str(world.target).encode(), b"x" * 5000
            )
        }),
        ArtifactError, "xxx",
    ),
    "recipe with no time": (recipe(b"x: !!timestamp x\n"), ArtifactError, "not valid"),
    "recipe that runs code": (recipe(SNIPPETS[0]), ArtifactError, "not valid"),
    "parameter whose number is a tensor": (
        optimizer(number_of_tensor), ArtifactError, "not numbered in the order",
    ),
    "layer of many digits": (
        vector({f"blocks.{MANY_DIGITS}.hook_resid_post": torch.ones(8)}), ArtifactError, "layers",
    ),
    "negated view": (vector({HOOK: torch._neg_view(torch.ones(8))}), ArtifactError, "negates"),
    "damaged text of a GGUF file": (damaged_hint, ArtifactError, "not readable"),
    "empty tensor of a GGUF file": (empty_direction, ArtifactError, "is empty"),
    "archive on many disks": (archive_on_many_disks, ArtifactError, "disks"),
    "margins that are integers": (margins_of_integers, GaugeError, "margins"),
    "config that is nested deeply": (nested, ArtifactError, "nested more than"),
    "tensor without values": (
        vector({HOOK: torch.empty(8, device="meta")}), ArtifactError, "without its values",
    ),
    "model that is a list": (model_of_an_adapter([{}]), ArtifactError, "not by a name"),
}  # fmt: skip
REFUSED["claim of a weight that is too large"] = (
    lambda world: ("claim", "weights", {"direction.json": b"[1, " + b"9" * 400 + b"]"}),
    ArtifactError, "a list of numbers",
)  # fmt: skip
REFUSED["claim of a device"] = (
    lambda world: ("claim", "difference", {
        "claim.json": changed_json(
            world.claims["difference"]["claim.json"], negative={"file": "/dev/zero"}
        )
    }),
    ArtifactError, "not a plain file",
)  # fmt: skip
READ = {
    "architectures that are no names": config(architectures=[None, 3, ["x"]]),
    "architecture that is no model": config(architectures=["TrainingArguments"]),
    "moments of 8 bits": optimizer(moment_of_8_bits),
    "provenance that JSON cannot say": provenance,
    "record without a target": record_without_target,
}


def judged(bench, entries):
    name, sample, changed = entries(bench.world)
    files = bench.samples(name)[sample]
    assert set(changed) <= set(files)
    steps = bench.steps(name, files, {**files, **changed}, Plain())
    return steps, bench.judge(steps)


@pytest.mark.parametrize("name", REFUSED)
def test_what_broke_a_reader_is_refused(bench, name):
    entries, error, match = REFUSED[name]
    steps, verdict = judged(bench, entries)
    assert not verdict.failures
    with pytest.raises(error, match=match):
        steps[-1]()


@pytest.mark.parametrize("name", READ)
def test_what_broke_a_reader_is_read(bench, name):
    verdict = judged(bench, READ[name])[1]
    assert (verdict.failures, verdict.outcome) == ([], "returns")


def test_lines_of_a_command_can_be_printed(bench):
    def entries(world):
        data = changed_json(world.dictionaries["old"]["cfg.json"], model_name="\ud800\x1b[31m")
        return "sae", "old", {"cfg.json": data}

    judged(bench, entries)
    result = CliRunner().invoke(main, ["inspect", str(bench.inside)])
    assert result.exit_code == 0
    assert r"\ud800\x1b[31m" in result.output


def test_a_bomb_is_not_unpacked(bench, monkeypatch):
    monkeypatch.setattr("signed_align.adapters.archives.MOST_UNPACKED", (2**20, 100))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("array.npy", bytes(20 * 2**20))
    steps, verdict = judged(
        bench, lambda world: ("vector", "npz", {"vector.npz": buffer.getvalue()})
    )
    assert not verdict.failures
    with pytest.raises(ArtifactError, match="unpacks to"):
        steps[-1]()
