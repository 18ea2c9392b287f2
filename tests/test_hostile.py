"""Broken and hostile models and texts: the right result, or one sentence that says what is wrong.

Never a traceback, NaN in JSON, code that runs, or a wrong gauge without a word.
"""

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import signed_align
import signed_align.adapters
from signed_align import Checkpoint, Gauge, apply, port, recover, scramble
from signed_align.cli import main
from signed_align.errors import CheckpointError, SignedAlignError
from signed_align.skeleton import skeleton
from tests import tiny
from tests.test_lora import adapter_on
from tests.test_recovery import TEXT, add_tokenizer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
READERS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
WRITERS = ("o_proj.weight", "down_proj.weight")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A source with a tokenizer, its twin in all spaces, the gauge between them, and a text."""
    root = tmp_path_factory.mktemp("hostile")
    model = tiny.build("llama", attention_bias=False, mlp_bias=False)  # as mergekit knows it
    add_tokenizer(tiny.save(model, root / "source"))
    gauge = scramble(root / "source", root / "twin", seed=3, spaces=["all"])
    gauge.save(root / "gauge.safetensors")
    (root / "text.txt").write_text("\n".join(TEXT))
    return root


def run(*arguments):
    """The exit code and the JSON of a command, of which only right answers and ours are accepted.

    Its JSON has no NaN, and a refusal is one sentence on one line.
    """
    result = CliRunner().invoke(main, [*map(str, arguments), "--json"], input="")
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 2, 3, 4), result.stderr
    assert "Traceback" not in result.stderr

    def refuse(constant):
        raise AssertionError(f"{constant} in JSON")

    data = json.loads(result.stdout, parse_constant=refuse)
    if result.exit_code:
        lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert lines == [f"error: {data['error']}"]
        assert "\n" not in data["error"]
    return result.exit_code, data


def refusal(*arguments, code=2):
    """What a command that must refuse says."""
    found, data = run(*arguments)
    assert found == code, data
    return data["error"]


def variant(work, path, change, of="source"):
    """A copy of a model, changed."""
    shutil.copytree(work / of, path)
    change(path)
    return path


def weights(change):
    """A change of the tensors of a model in one file."""

    def rewrite(path):
        file = path / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return rewrite


def settings(**values):
    """A change of a model's config."""

    def rewrite(path):
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return rewrite


def config_text(text):
    """A change of a model's config to some text."""
    return lambda path: (path / "config.json").write_text(text)


def recipe(path, models, method="signed_align"):
    entries = [{"model": str(model), "parameters": {"weight": 0.5}} for model in models]
    path.write_text(yaml.safe_dump({"merge_method": method, "models": entries, "dtype": "float32"}))
    return path


def commands(work, model, out):
    """Every command that reads whole models, with ``model`` at its first or second place."""
    twin, text = work / "twin", ["--text", work / "text.txt"]
    return {
        "scramble": ["scramble", model, "-o", out],
        "apply": ["apply", work / "gauge.safetensors", model, "-o", out, "--any-source"],
        "weights": ["gauge", model, twin, "-o", out],
        "weights, all spaces": ["gauge", model, twin, "-o", out, "--spaces", "all"],
        "weights, as target": ["gauge", work / "source", model, "-o", out],
        "activations": ["gauge", model, twin, "-o", out, *text],
        "activations, as target": ["gauge", work / "source", model, "-o", out, *text],
        "barrier": ["barrier", model, twin, "--points", 3, "--tokens", 200, *text],
        "barrier, as target": ["barrier", work / "source", model, "--points", 3, *text],
        "inspect": ["inspect", model],
        "merge": ["merge", recipe(out.parent / "recipe.yml", [work / "source", model]), out],
    }


def score(gauge, truth):
    return tuple(gauge.element("residual").agreement(truth.element("residual")).values())


# ---- values --------------------------------------------------------------------------------------


def put(name, value):
    return weights(lambda tensors: tensors[name].view(-1).__setitem__(7, value))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [EMBEDDING, HEAD, "model.layers.1.mlp.down_proj.weight"])
def test_a_weight_that_is_not_finite_is_named_and_moves_bit_by_bit(work, tmp_path, name, value):
    model = variant(work, tmp_path / "model", put(name, value))
    twin = variant(work, tmp_path / "twin", put(name, value), of="twin")
    base = name.removeprefix("model.")
    for first, second, broken in ((model, work / "twin", model), (work / "source", twin, twin)):
        for extra in (["--spaces", "all"], ["--text", work / "text.txt"]):
            if name == HEAD and "--text" in extra:
                continue  # the model is run without its head
            message = refusal("gauge", first, second, "-o", tmp_path / "g", *extra)
            assert base in message
            assert str(broken) in message
            assert "NaN or infinite" in message
        message = refusal("barrier", first, second, "--points", 3, "--text", work / "text.txt")
        assert base in message
    gauge = Gauge.load(work / "gauge.safetensors")
    apply(gauge, model, tmp_path / "moved", any_source=True)
    apply(gauge, tmp_path / "moved", tmp_path / "back", inverse=True, any_source=True)
    original, moved, back = (
        (tmp_path / step / "model.safetensors").read_bytes() for step in ("model", "moved", "back")
    )
    assert back == original != moved


def test_a_gauge_rests_only_on_weights_that_it_reads(work, tmp_path):
    """The residual stream is matched by token matrices: what is broken elsewhere does no harm."""
    model = variant(work, tmp_path / "model", put("model.norm.weight", float("nan")))
    gauge = recover(model, work / "twin")
    assert score(gauge, Gauge.load(work / "gauge.safetensors")) == (1.0, 1.0)


@pytest.mark.parametrize("factor", [1e37, 1e25, 1e-25, 1e-37])
@pytest.mark.parametrize("text", [None, TEXT], ids=["weights", "activations"])
def test_weights_whose_squares_leave_the_range_are_matched(work, tmp_path, factor, text):
    def scale(tensors):
        for name in (EMBEDDING, HEAD):
            tensors[name] *= factor

    model = variant(work, tmp_path / "model", weights(scale))
    truth = scramble(model, tmp_path / "twin", seed=3)
    assert score(recover(model, tmp_path / "twin", text=text), truth) == (1.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_activations_that_overflow_are_refused(work, tmp_path, dtype):
    """Both halves of a gated MLP are huge: their product is not in the range of the dtype."""
    huge = 3e4 if dtype == torch.float16 else 1e30

    def scale(tensors):
        for name in tensors:
            if name.endswith(("gate_proj.weight", "up_proj.weight")):
                tensors[name].fill_(huge)

    model = variant(work, tmp_path / "model", weights(scale))
    scramble(model, tmp_path / "twin", seed=3)
    with pytest.raises(SignedAlignError, match="NaN or infinite"):
        recover(model, tmp_path / "twin", text=TEXT, dtype=dtype)


def test_weights_that_overflow_in_the_dtype_of_the_run_are_named(work, tmp_path):
    model = variant(work, tmp_path / "model", put(EMBEDDING, 1e6))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight.* in float16.*wider dtype"):
        recover(model, work / "twin", text=TEXT, dtype=torch.float16)


# ---- coordinates ---------------------------------------------------------------------------------


def silence(count):
    """Kill the first coordinates: nothing is written to them or read from them."""

    def change(tensors):
        for name, tensor in tensors.items():
            if name in (EMBEDDING, HEAD) or name.endswith(READERS):
                tensor[:, :count] = 0
            elif name.endswith(WRITERS):
                tensor[:count] = 0

    return weights(change)


def double(tensors):
    """Make the second coordinate an exact copy of the first."""
    for name, tensor in tensors.items():
        if name in (EMBEDDING, HEAD) or name.endswith(READERS):
            tensor[:, 1] = tensor[:, 0]
        elif name.endswith(WRITERS) or "norm" in name:
            tensor[1] = tensor[0]


@pytest.mark.parametrize(
    "source", [[], ["--spaces", "all"], ["--text"]], ids=["weights", "all", "text"]
)
@pytest.mark.parametrize(
    ("change", "weak"), [(silence(1), [0]), (weights(double), [0, 1])], ids=["dead", "doubled"]
)
def test_ties_are_weak_and_not_counted_as_sure(work, tmp_path, change, weak, source):
    model = variant(work, tmp_path / "model", change)
    truth = scramble(model, tmp_path / "twin", seed=3, spaces=["all"])
    extra = ["--text", work / "text.txt"] if source == ["--text"] else source
    code, data = run("gauge", model, tmp_path / "twin", "-o", tmp_path / "g", *extra)
    assert code == 0
    gauge = Gauge.load(tmp_path / "g")
    places = truth.element("residual").inverse().perm[weak]
    margin = gauge.margins["residual"]
    assert margin[places].abs().max() <= 1e-5
    others = torch.ones(tiny.WIDTH, dtype=torch.bool)
    others[places] = False
    assert margin[others].min() > 0.05
    found, true = gauge.element("residual"), truth.element("residual")
    assert torch.equal(found.perm[others], true.perm[others])
    assert torch.equal(found.sign[others], true.sign[others])
    assert data["verdict"]["sure_fraction"] == pytest.approx(1 - len(weak) / tiny.WIDTH)
    assert data["kinds"]["residual"]["weak_fraction"] == pytest.approx(len(weak) / tiny.WIDTH)
    # Whatever was made of the ties, the model moves to a twin of itself.
    before = tiny.logits(tiny.load(model))
    apply(gauge, model, tmp_path / "moved")
    assert tiny.relative_change(before, tiny.logits(tiny.load(tmp_path / "moved"))) <= 1e-5


@pytest.mark.parametrize("extra", [[], ["--text"]], ids=["weights", "activations"])
def test_a_model_that_is_mostly_dead_has_no_gauge(work, tmp_path, extra):
    extra = ["--text", work / "text.txt"] if extra else []
    model = variant(work, tmp_path / "model", silence(40))
    scramble(model, tmp_path / "twin", seed=3)
    message = refusal("gauge", model, tmp_path / "twin", "-o", tmp_path / "g", *extra, code=3)
    assert "16.7%" in message
    dead = variant(work, tmp_path / "dead", silence(48))
    message = refusal("gauge", dead, dead, "-o", tmp_path / "g", *extra)
    assert "all are zero" in message
    assert not (tmp_path / "g").exists()


# ---- sizes ---------------------------------------------------------------------------------------

ONE = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
SMALL = {
    "one layer": {"num_hidden_layers": 1},
    "one coordinate": {"hidden_size": 1, **ONE},
    "one of all": {"hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, **ONE},
    "two coordinates": {"hidden_size": 2, **ONE},
    "one hidden unit": {"intermediate_size": 1},
}


@pytest.mark.parametrize("name", SMALL)
def test_models_of_one_of_everything(work, tmp_path, name):
    model = tiny.build("llama", **SMALL[name])
    source = add_tokenizer(tiny.save(model, tmp_path / "source"))
    truth = scramble(source, tmp_path / "twin", seed=1, spaces=["all"])
    truth.save(tmp_path / "true")
    before, after = tiny.logits(model), tiny.logits(tiny.load(tmp_path / "twin"))
    # a norm over one number is its sign, which near zero is a matter of rounding
    assert tiny.relative_change(before, after) <= (1e-5 if model.config.hidden_size > 2 else 1e-3)
    apply(truth, tmp_path / "twin", tmp_path / "back", inverse=True)
    file = "model.safetensors"
    assert (tmp_path / "back" / file).read_bytes() == (source / file).read_bytes()
    for extra in ([], ["--spaces", "all"], ["--text", work / "text.txt"]):
        code, _ = run("gauge", source, tmp_path / "twin", "-o", tmp_path / "g", "--force", *extra)
        # Of one or two coordinates nothing but signs may speak, and that is said.
        assert code == 0 or (code in (3, 4) and model.config.hidden_size <= 2)
        if code == 0:
            assert score(Gauge.load(tmp_path / "g"), truth) == (1.0, 1.0)
    code, data = run(
        "barrier", source, tmp_path / "twin", "--gauge", tmp_path / "true", "--points", 3,
        "--text", work / "text.txt", "--tokens", 200,
    )  # fmt: skip
    assert code == 0
    assert data["barrier_nats"] >= 0


@pytest.mark.parametrize("depth", [200, 900])
def test_a_config_that_is_nested_deeply_is_read_or_refused(work, tmp_path, depth):
    text = (work / "source" / "config.json").read_text().rstrip()
    change = config_text(f'{text[:-1]}, "text_config": {nested(depth)}}}')
    model = variant(work, tmp_path / "model", change)
    for name, arguments in commands(work, model, tmp_path / "out").items():
        code, data = run(*arguments)
        assert code in (0, 2), (name, data)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "out").unlink(missing_ok=True)


def test_a_vocabulary_of_one_token_says_nothing_of_coordinates(work, tmp_path):
    model = tiny.build("llama", vocab_size=1, pad_token_id=None, bos_token_id=0, eos_token_id=0)
    source = add_tokenizer(tiny.save(model, tmp_path / "source"))
    scramble(source, tmp_path / "twin", seed=1)
    arguments = ["gauge", source, tmp_path / "twin", "-o", tmp_path / "g"]
    assert "no reliable gauge" in refusal(*arguments, code=3)
    message = refusal(*arguments, "--text", work / "text.txt")
    assert "has 1 rows" in message
    text = ["--text", work / "text.txt"]
    assert "has 1 rows" in refusal("barrier", source, tmp_path / "twin", "--points", 3, *text)


def nested(depth):
    """A config with an object in an object in an object."""
    return '{"text_config":' * depth + "{}" + "}" * depth


# Values of config.json, or its text, each with words of the sentence it is answered with.
ABSURD = [
    ({"hidden_size": 10**12}, "hidden_size = 1000000000000"),
    ({"hidden_size": 10**400}, "more than 30 digits"),
    ({"hidden_size": -48}, "hidden_size = -48"),
    ({"hidden_size": 0}, "hidden_size = 0"),
    ({"hidden_size": "48"}, "hidden_size"),
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": [48]}, "hidden_size"),
    ({"hidden_size": float("nan")}, "hidden_size"),
    ({"hidden_size": 96}, "96"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_hidden_layers": -1}, "num_hidden_layers"),
    ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    ({"vocab_size": 10**15}, "vocab_size"),
    ({"intermediate_size": 10**15}, "intermediate_size"),
    ({"num_attention_heads": 10**9}, "num_attention_heads"),
    ({"num_attention_heads": 0}, "zero"),
    ({"head_dim": 10**9}, "head_dim"),
    ({"max_position_embeddings": 10**15}, "max_position_embeddings"),
    ({"hidden_act": "nonsense"}, "nonsense"),
    ({"rms_norm_eps": "a"}, "rms_norm_eps"),
    ({"rope_parameters": {"rope_type": "nonsense"}}, "nonsense"),
    ({"text_config": {"hidden_size": 10**12}}, "text_config"),
    (nested(90_000), "config"),
    ({"model_type": 5}, "model_type"),
    ({"model_type": "nonsense"}, "nonsense"),
]


@pytest.mark.parametrize(("values", "words"), ABSURD, ids=lambda value: str(value)[:40])
def test_absurd_configs_are_answered_at_once(work, tmp_path, values, words):
    change = config_text(values) if isinstance(values, str) else settings(**values)
    model = variant(work, tmp_path / "model", change)
    began = time.monotonic()
    for name, arguments in commands(work, model, tmp_path / "out").items():
        message = refusal(*arguments)
        assert words in message or "shapes" in message, (name, message)
        assert len(message) < 1000
    assert time.monotonic() - began < 30
    assert not (tmp_path / "out").exists()


# ---- texts ---------------------------------------------------------------------------------------

TEXTS = {
    "empty": (b"", "no text"),
    "spaces": (b"  \n \t \n", "no text"),
    "no UTF-8": (bytes(range(256)), "not UTF-8"),
    "UTF-16": ("text".encode("utf-16"), "not UTF-8"),
    "one token": (b"a", None),
    "unknown characters": ("жжжжж\n".encode() * 9, None),
    "Chinese": ("机器学习模型的坐标\n".encode() * 9, None),
    "Arabic": ("مرحبا بالعالم\n".encode() * 9, None),
    "emoji": ("😀👩‍👩‍👧🏳️‍🌈\n".encode() * 9, None),
    "control characters": (bytes(range(1, 32)) * 9, None),
    "NUL": (b"\0" * 999, None),
    "one long line": (b"ab" * 2_000_000, None),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_every_kind(work, tmp_path, name):
    """Too little evidence is refused; text in another script is text."""
    content, words = TEXTS[name]
    (tmp_path / "text.txt").write_bytes(content)
    text = ["--text", tmp_path / "text.txt"]
    began = time.monotonic()
    code, data = run("gauge", work / "source", work / "twin", "-o", tmp_path / "g", *text)
    if words:
        assert words in refusal(
            "gauge", work / "source", work / "twin", "-o", tmp_path / "h", *text
        )
    else:
        assert code == 3, data
    assert not (tmp_path / "g").exists()
    code, data = run("barrier", work / "source", work / "twin", "--points", 3, *text)
    assert code == (2 if words or name == "one token" else 0), data
    assert time.monotonic() - began < 5


def test_text_in_another_script_finds_the_gauge(work, tmp_path):
    """Characters that the tokenizer knows byte by byte are as good as any."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work / "source")
    letters = [chr(code) for code in range(0x400, 0x4FF)]
    assert len(tokenizer("".join(letters))["input_ids"]) > 200
    mixed = [
        "".join(pair) for pair in zip(TEXT, [letters[i % 255] * 3 for i in range(60)], strict=True)
    ]
    gauge = recover(work / "source", work / "twin", text=mixed)
    assert score(gauge, Gauge.load(work / "gauge.safetensors")) == (1.0, 1.0)


# ---- two sides that are stored unlike ------------------------------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A model with tied embeddings, and the same one with its unembedding written out."""
    root = tmp_path_factory.mktemp("tied")
    add_tokenizer(tiny.save(tiny.build("qwen2", tie_word_embeddings=True), root / "tied"))
    shutil.copytree(root / "tied", root / "untied")
    settings(tie_word_embeddings=False)(root / "untied")
    weights(lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))(root / "untied")
    assert HEAD not in load_file(root / "tied" / "model.safetensors")
    return root


@pytest.mark.parametrize("sides", [("tied", "untied"), ("untied", "tied")], ids="-".join)
@pytest.mark.parametrize("text", [None, TEXT], ids=["weights", "activations"])
def test_tied_and_untied_embeddings_on_the_two_sides(tied, tmp_path, sides, text):
    source, other = tied / sides[0], tied / sides[1]
    truth = scramble(other, tmp_path / "twin", seed=2, spaces=["all"])
    gauge = recover(source, tmp_path / "twin", text=text, spaces=["all"])
    assert score(gauge, truth) == (1.0, 1.0)
    apply(gauge, source, tmp_path / "moved")
    moved, twin = tiny.logits(tiny.load(tmp_path / "moved")), tiny.load(tmp_path / "twin")
    assert tiny.relative_change(tiny.logits(twin), moved) <= 1e-5
    (tmp_path / "text.txt").write_text("\n".join(TEXT))
    message = refusal(
        "barrier", source, tmp_path / "twin", "--points", 3, "--text", tmp_path / "text.txt"
    )
    assert "does not have the same weights" in message
    scramble(other, tmp_path / "other", seed=2)
    file = recipe(tmp_path / "recipe.yml", [source, tmp_path / "other"])
    code, data = run("merge", file, tmp_path / "merged")
    assert code == 0, data
    merged = tiny.logits(tiny.load(tmp_path / "merged"))
    assert tiny.relative_change(tiny.logits(tiny.load(source)), merged) <= 1e-5


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def cast(dtype):
    return weights(
        lambda tensors: tensors.update(
            {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
        )
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", [None, TEXT], ids=["weights", "activations"])
def test_one_side_in_another_dtype(work, tmp_path, dtype, text):
    truth = Gauge.load(work / "gauge.safetensors")
    model = variant(work, tmp_path / "model", cast(dtype))
    twin = variant(work, tmp_path / "twin", cast(dtype), of="twin")
    assert score(recover(model, work / "twin", text=text), truth) == (1.0, 1.0)
    assert score(recover(work / "source", twin, text=text), truth) == (1.0, 1.0)


def test_one_file_against_shards(work, tmp_path):
    truth = Gauge.load(work / "gauge.safetensors")
    model = tiny.load(work / "twin")
    shards = add_tokenizer(tiny.save(model, tmp_path / "shards", shard="50KB"))
    assert len(list(shards.glob("*.safetensors"))) >= 5
    for text in (None, TEXT):
        found = recover(work / "source", shards, text=text, spaces=["all"])
        assert score(found, truth) == (1.0, 1.0)
        assert found.target.fingerprint == truth.target.fingerprint
    apply(truth, shards, tmp_path / "back", inverse=True)
    before = tiny.logits(tiny.load(work / "source"))
    assert tiny.relative_change(before, tiny.logits(tiny.load(tmp_path / "back"))) <= 1e-5


def test_weights_as_pickles_are_never_read(work, tmp_path):
    model = variant(work, tmp_path / "model", lambda path: None)
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    gauge = Gauge.load(work / "gauge.safetensors")
    report = apply(gauge, model, tmp_path / "both")
    assert report["left_out"] == ["pytorch_model.bin"]
    assert not (tmp_path / "both" / "pytorch_model.bin").exists()
    (model / "model.safetensors").unlink()
    for arguments in commands(work, model, tmp_path / "out").values():
        message = refusal(*arguments)
        assert "pytorch_model.bin" in message
        assert "save the model as safetensors" in message


# ---- quantised -----------------------------------------------------------------------------------

SCHEMES = {
    "bitsandbytes 4 bit": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bitsandbytes 8 bit": {"quant_method": "bitsandbytes", "_load_in_8bit": True},
    "gptq 4 bit": {"quant_method": "gptq", "bits": 4},
    "awq 4 bit": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "aqlm": {"quant_method": "aqlm"},
    "hqq": {"quant_method": "hqq", "quant_config": {}},
    "quanto": {"quant_method": "quanto", "weights": "int8"},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {}}},
    "eetq": {"quant_method": "eetq", "weights": "int8"},
    "bitnet": {"quant_method": "bitnet"},
    "mxfp4": {"quant_method": "mxfp4"},
    "zippy": {"quant_method": "zippy"},
    "scheme unknown 3 bit": {"bits": 3},
    "scheme unknown": {"anything": True},
}


def beside(name, content):
    return lambda path: (path / name).write_text(json.dumps(content))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_quantisation_scheme_is_named_wherever_it_stands(work, tmp_path, scheme):
    config = SCHEMES[scheme]
    places = {
        "quantization_config": settings(quantization_config=config),
        "text_config": settings(text_config={"quantization_config": config}),
        "quant_config.json": beside("quant_config.json", config),
    }
    for number, (place, change) in enumerate(places.items()):
        model = variant(work, tmp_path / str(number), change)
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(model)
        message = str(caught.value)
        assert f"quantised ({scheme}, by " in message
        assert place in message
        assert "save that" in message or "take the unquantised checkpoint" in message


@pytest.mark.parametrize(
    ("name", "content", "scheme"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq 4 bit"),
        ("quant_config.json", {"zero_point": True, "w_bit": 4, "version": "GEMM"}, "GEMM 4 bit"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ("quantize_config.json", "not an object", "not an object"),
        ("quantize_config.json", [], "scheme unknown"),
    ],
)
def test_schemes_that_stand_beside_the_config(work, tmp_path, name, content, scheme):
    model = variant(work, tmp_path / "model", beside(name, content))
    with pytest.raises(CheckpointError, match=rf"quantised \({scheme}, by the file {name}\)"):
        Checkpoint.open(model)


PROJECTION = "model.layers.0.mlp.up_proj."
PACKED = {
    "gptq or awq": {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16},
    "compressed-tensors": {"weight_packed": torch.int32, "weight_scale": torch.bfloat16},
    "bitsandbytes": {"weight": torch.uint8, "weight.absmax": torch.float32},
    "fp8": {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32},
    "fp8 or bitnet": {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32},
    "aqlm": {"codes": torch.int16, "codebooks": torch.float16},
    "hqq": {"W_q": torch.uint8},
    "quanto": {"weight._data": torch.int8, "weight._scale": torch.float32},
    "eetq": {"weight": torch.int8, "weight_scales": torch.float16},
    "scheme unknown": {"weight": torch.uint8},
}


@pytest.mark.parametrize("scheme", PACKED)
def test_packed_tensors_betray_a_scheme_that_the_config_does_not_name(work, tmp_path, scheme):
    def pack(tensors):
        del tensors[PROJECTION + "weight"]
        for ending, dtype in PACKED[scheme].items():
            tensors[PROJECTION + ending] = torch.ones(80, 48).to(dtype)

    model = variant(work, tmp_path / "model", weights(pack))
    for arguments in commands(work, model, tmp_path / "out").values():
        message = refusal(*arguments)
        assert f"quantised ({scheme}, by " in message
        assert PROJECTION in message
    assert not (tmp_path / "out").exists()


def test_blocks_with_scales_are_mxfp4(work, tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    change = weights(
        lambda tensors: tensors.update(
            {f"{name}_{part}": torch.ones(2, 3, dtype=torch.uint8) for part in ("blocks", "scales")}
        )
    )
    with pytest.raises(CheckpointError, match=r"quantised \(mxfp4, by its tensor"):
        Checkpoint.open(variant(work, tmp_path / "model", change))


# ---- code ----------------------------------------------------------------------------------------


@pytest.fixture
def trap(tmp_path):
    """Code that leaves a mark if it runs, and the place of the mark."""
    mark = tmp_path / "it-ran"
    return f"open({str(mark)!r}, 'w').close()\nclass Trap: pass\n", mark


@pytest.mark.parametrize("model_type", ["llama", "trap"])
def test_code_beside_a_model_never_runs(work, tmp_path, trap, model_type):
    code, mark = trap
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")

    def plant(path):
        for name in ("modeling_trap.py", "tokenization_trap.py"):
            (path / name).write_text(code)
        auto_map = dict.fromkeys(classes, "modeling_trap.Trap")
        settings(model_type=model_type, auto_map=auto_map, trust_remote_code=True)(path)
        file = path / "tokenizer_config.json"
        tokenizer = {
            "auto_map": {"AutoTokenizer": ["tokenization_trap.Trap", "tokenization_trap.Trap"]},
            "trust_remote_code": True,
        }
        file.write_text(json.dumps(json.loads(file.read_text()) | tokenizer))

    model = variant(work, tmp_path / "model", plant)
    outcomes = {}
    for name, arguments in commands(work, model, tmp_path / "out").items():
        outcomes[name], _ = run(*arguments)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "out").unlink(missing_ok=True)
        assert not mark.exists(), name
    if model_type == "llama":  # transformers' own class is what runs
        assert outcomes == dict.fromkeys(outcomes, 0)
    else:
        assert outcomes == dict.fromkeys(outcomes, 2)


def test_code_beside_an_adapter_never_runs(work, tmp_path, trap, monkeypatch):
    code, mark = trap
    adapter_on(work / "source", tmp_path / "adapter", target_modules=["q_proj", "o_proj"])
    (tmp_path / "adapter" / "modeling_trap.py").write_text(code)
    file = tmp_path / "adapter" / "adapter_config.json"
    mapping = {"base_model_class": "Trap", "parent_library": "modeling_trap"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_mapping": mapping}))
    monkeypatch.chdir(tmp_path / "adapter")
    monkeypatch.syspath_prepend(str(tmp_path / "adapter"))
    for arguments in (
        [
            "port",
            tmp_path / "adapter",
            "--gauge",
            work / "gauge.safetensors",
            "-o",
            tmp_path / "out",
        ],
        ["inspect", tmp_path / "adapter"],
    ):
        run(*arguments)
        assert not mark.exists()


def test_nothing_in_the_package_turns_remote_code_on():
    package = Path(signed_align.__file__).parent
    sources = [*package.rglob("*.py"), *Path(signed_align.adapters.__file__).parent.rglob("*.py")]
    assert len(sources) > 50
    switched_on = re.compile(r"trust_remote_code\W{1,4}True")
    assert [str(file) for file in sources if switched_on.search(file.read_text())] == []


def test_a_class_that_is_no_model_is_not_made():
    """A config names its class; of transformers' names only models are taken."""
    assert hasattr(transformers, "Trainer")
    settings_of = tiny.build("llama").config.to_dict() | {"architectures": ["Trainer"]}
    assert type(skeleton(settings_of)).__name__ == "LlamaForCausalLM"


# ---- what moves through a gauge ------------------------------------------------------------------


def test_an_adapter_that_is_not_finite_moves_bit_by_bit(work, tmp_path):
    adapter_on(work / "source", tmp_path / "adapter", target_modules=["q_proj", "o_proj"])
    file = "adapter_model.safetensors"
    tensors = load_file(tmp_path / "adapter" / file)
    for tensor in tensors.values():
        tensor.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    save_file(tensors, tmp_path / "adapter" / file, metadata={"format": "pt"})
    gauge = Gauge.load(work / "gauge.safetensors")
    port(tmp_path / "adapter", gauge, tmp_path / "moved")
    port(tmp_path / "moved", gauge, tmp_path / "back", inverse=True)
    original, moved, back = (
        (tmp_path / step / file).read_bytes() for step in ("adapter", "moved", "back")
    )
    assert back == original != moved


@pytest.mark.parametrize(
    "values",
    [{"num_hidden_layers": 10**9}, {"hidden_size": 10**12}, {"vocab_size": -1}],
    ids=str,
)
def test_a_gauge_whose_config_is_absurd_is_refused_at_once(work, tmp_path, values):
    gauge = Gauge.load(work / "gauge.safetensors")
    ends = {
        end: replace(model, name="away", config={**model.config, **values})
        for end, model in (("source", gauge.source), ("target", gauge.target))
    }
    replace(gauge, **ends).save(tmp_path / "gauge.safetensors")
    began = time.monotonic()
    message = refusal("inspect", tmp_path / "gauge.safetensors")
    assert next(iter(values)) in message
    assert time.monotonic() - began < 5
