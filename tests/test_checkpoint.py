"""Whole checkpoints: moved, moved back, carried along, and refused when damaged."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from signed_align import Checkpoint, Gauge, SignedPermutation, apply, scramble
from signed_align.errors import (
    ChartError,
    GaugeError,
    OutputError,
    SignedAlignError,
)
from signed_align.files import require_free
from tests import tiny


def tensors_of(path):
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def identical(a, b):
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))
        for name in a
    )


@pytest.mark.parametrize("model_type", tiny.ALL_TYPES)
def test_a_twin_computes_the_same_and_moves_back_byte_by_byte(tmp_path, model_type):
    model = tiny.build(model_type)
    source = tiny.save(model, tmp_path / "source")
    gauge = scramble(source, tmp_path / "twin", seed=4)
    twin = tiny.load(tmp_path / "twin")
    assert not gauge.elements["residual"].is_identity
    assert tiny.relative_change(tiny.logits(model), tiny.logits(twin)) <= 1e-5
    apply(gauge, tmp_path / "twin", tmp_path / "back", inverse=True)
    original = (source / "model.safetensors").read_bytes()
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == original
    assert (tmp_path / "twin" / "model.safetensors").read_bytes() != original


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shard", ["40KB", "5GB"])
def test_half_precision_and_shards(tmp_path, dtype, shard):
    source = tiny.save(tiny.build("qwen3"), tmp_path / "source", dtype, shard)
    gauge = scramble(source, tmp_path / "twin", seed=4)
    apply(gauge, tmp_path / "twin", tmp_path / "back", inverse=True)
    assert (len(list(source.glob("*.safetensors"))) > 1) == (shard != "5GB")
    assert identical(tensors_of(source), tensors_of(tmp_path / "back"))
    before, after = tiny.load(source), tiny.load(tmp_path / "twin")
    assert tiny.relative_change(tiny.logits(before), tiny.logits(after)) <= 1e-5


def test_fp8_weights_round_trip(tmp_path):
    source = tiny.save(tiny.build("llama"), tmp_path / "source")
    file = source / "model.safetensors"
    save_file(
        {
            name: tensor.to(torch.float8_e4m3fn) if tensor.ndim == 2 else tensor
            for name, tensor in load_file(file).items()
        },
        file,
        metadata={"format": "pt"},
    )
    gauge = scramble(source, tmp_path / "twin", seed=4)
    apply(gauge, tmp_path / "twin", tmp_path / "back", inverse=True)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == file.read_bytes()


def test_large_tensors_are_moved_in_blocks_of_rows(tmp_path, monkeypatch):
    source = tiny.save(tiny.build("llama"), tmp_path / "source")
    gauge = scramble(source, tmp_path / "whole", seed=4)
    monkeypatch.setattr("signed_align.checkpoint.BLOCK_BYTES", 1000)
    monkeypatch.setattr("signed_align.checkpoint.LARGE_BYTES", 2000)
    apply(gauge, source, tmp_path / "blocks")
    assert identical(tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "blocks"))


def test_other_files_come_along_and_other_weights_do_not(tmp_path):
    source = tiny.save(tiny.build("llama"), tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "sub").mkdir()
    (source / "sub" / "notes.md").write_text("notes")
    (source / "training_args.bin").write_bytes(b"settings")
    for stale in ("pytorch_model.bin", "consolidated.safetensors", "sub/model.gguf"):
        (source / stale).write_bytes(b"old coordinates")
    gauge = Gauge(
        {"residual": SignedPermutation.random(tiny.WIDTH)}, source=Checkpoint.open(source).identity
    )
    report = apply(gauge, source, tmp_path / "out")
    out = tmp_path / "out"
    for kept in ("tokenizer.json", "sub/notes.md", "training_args.bin", "generation_config.json"):
        assert (out / kept).read_bytes() == (source / kept).read_bytes()
    assert report["left_out"] == ["consolidated.safetensors", "pytorch_model.bin", "sub/model.gguf"]
    assert not any((out / stale).exists() for stale in report["left_out"])
    assert report["fingerprint"] == Checkpoint.open(out).identity.fingerprint


def test_the_fingerprint_tells_twins_apart_and_ignores_shards(tmp_path):
    model = tiny.build("llama")
    one = tiny.save(model, tmp_path / "one")
    many = tiny.save(model, tmp_path / "many", shard="40KB")
    scramble(one, tmp_path / "twin", seed=1)
    prints = [Checkpoint.open(path).identity.fingerprint for path in (one, many, tmp_path / "twin")]
    assert prints[0] == prints[1] != prints[2]


def test_a_gauge_of_another_source_is_refused_unless_accepted(tmp_path, twin):
    _, target, gauge = twin
    with pytest.raises(GaugeError, match="other end of the gauge"):
        apply(gauge, target, tmp_path / "out")
    unknown = Gauge(gauge.elements)
    with pytest.raises(GaugeError, match="does not say"):
        apply(unknown, target, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    apply(unknown, target, tmp_path / "out", any_source=True)


def broken(tmp_path, change):
    source = tiny.save(tiny.build("llama"), tmp_path / "source", shard="40KB")
    change(source)
    return source


def truncate(source):
    file = sorted(source.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])


def remove_shard(source):
    sorted(source.glob("*.safetensors"))[1].unlink()


def escape(source):
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))


def disagree(source):
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))


def change_config(**values):
    def change(source):
        file = source / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def no_safetensors(source):
    for file in [*source.glob("*.safetensors"), source / "model.safetensors.index.json"]:
        file.unlink()
    (source / "pytorch_model.bin").write_bytes(b"pickle")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (truncate, "truncated or damaged"),
        (remove_shard, "is missing"),
        (escape, "outside its folder"),
        (disagree, "disagree about 'model.norm.weight'"),
        (no_safetensors, "save the model as safetensors"),
        (change_config(quantization_config={"quant_method": "gptq", "bits": 4}), "gptq"),
        (change_config(model_type="mamba"), "mamba"),
        (change_config(model_type="nonsense"), "does not recognize"),
        (change_config(hidden_size=32), "shape"),
        (lambda source: (source / "config.json").write_text("{"), "config"),
        (lambda source: (source / "config.json").unlink(), "no config.json"),
        (shutil.rmtree, "Hub"),
    ],
)
def test_a_broken_checkpoint_is_one_sentence_and_leaves_nothing(tmp_path, change, message):
    source = broken(tmp_path, change)
    with pytest.raises(SignedAlignError, match=message) as caught:
        scramble(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [entry for entry in tmp_path.iterdir() if entry != source] == []


def test_a_weight_without_a_chart_entry_is_refused_before_anything_is_written(tmp_path):
    source = tiny.save(tiny.build("llama"), tmp_path / "source")
    file = source / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.extra.weight": torch.zeros(2)}, file)
    with pytest.raises(ChartError, match=r"model\.layers\.0\.extra\.weight"):
        scramble(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_directory_is_kept(tmp_path, twin):
    source, _, gauge = twin
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(OutputError, match="exists already"):
        apply(gauge, source, tmp_path / "out")
    assert (tmp_path / "out" / "precious").read_text() == "x"
    apply(gauge, source, tmp_path / "out", force=True)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_an_output_never_takes_the_place_of_an_input(tmp_path, twin, monkeypatch):
    _, _, gauge = twin
    source = shutil.copytree(twin[0], tmp_path / "models" / "source")
    before = tensors_of(source)
    for out in (source, tmp_path / "models", source / "inside"):
        with pytest.raises(OutputError, match="overlaps the input"):
            apply(gauge, source, out, force=True)
    monkeypatch.chdir(tmp_path)
    for out in ("", ".", "..", tmp_path):
        with pytest.raises(OutputError, match=r"no name|working directory"):
            apply(gauge, source, out, force=True)
    with pytest.raises(OutputError, match="is a directory; the output is a file"):
        gauge.save(source, force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is a file; the output is a directory"):
        apply(gauge, source, tmp_path / "file", force=True)
    assert identical(tensors_of(source), before)


def test_a_failed_replacement_keeps_what_was_there(tmp_path):
    from signed_align.files import atomic_path

    (tmp_path / "old").write_text("precious")
    with (
        pytest.raises(OutputError, match="failed"),
        atomic_path(tmp_path / "old", directory=False, force=True),
    ):
        pass  # nothing is written
    assert (tmp_path / "old").read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]


def test_of_two_sets_of_weights_the_one_that_transformers_loads_is_moved(tmp_path):
    source = tiny.save(tiny.build("llama"), tmp_path / "source")
    shutil.copytree(tiny.save(tiny.build("llama", seed=1), tmp_path / "other", shard="40KB"),
                    source, dirs_exist_ok=True)  # fmt: skip
    before = tiny.logits(tiny.load(source))
    scramble(source, tmp_path / "twin", seed=4)
    assert tiny.relative_change(before, tiny.logits(tiny.load(tmp_path / "twin"))) <= 1e-5


def test_an_index_of_a_single_shard_goes_with_it(tmp_path):
    source = tiny.save(tiny.build("llama"), tmp_path / "source")
    shard = "model-00001-of-00001.safetensors"
    (source / "model.safetensors").rename(source / shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(source / shard), shard)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    before = tiny.logits(tiny.load(source))
    scramble(source, tmp_path / "twin", seed=4)
    assert tiny.relative_change(before, tiny.logits(tiny.load(tmp_path / "twin"))) <= 1e-5


def test_a_hub_id_is_taken_from_the_cache(tmp_path, twin, monkeypatch):
    source, _, gauge = twin
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    repo = tmp_path / "cache" / "models--someone--tiny-llama"
    shutil.copytree(source, repo / "snapshots" / "0123456789012345678901234567890123456789")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123456789012345678901234567890123456789")
    apply(gauge, "someone/tiny-llama", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_pipe_or_device_is_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for directory in (True, False):
        with pytest.raises(OutputError, match="neither a file nor a directory"):
            require_free(tmp_path / "pipe", directory=directory, force=True)
