"""The command line: every command once, its JSON, and bad input: a sentence and exit code 2."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from signed_align.cli import main
from tests import tiny
from tests.test_lora import adapter_on
from tests.test_recovery import TEXT, add_tokenizer
from tests.test_sae import build as build_sae

COMMANDS = [
    "demo", "scramble", "gauge", "apply", "port", "merge", "barrier", "evaluate", "inspect",
    "steer", "support", "transport", "audit", "report", "diagnose",
]  # fmt: skip


def run(*arguments, code=0):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def run_json(*arguments):
    """The command's JSON, which is all there is on stdout."""
    return json.loads(run(*arguments, "--json").stdout)


def fails(*arguments, match):
    """The command's one sentence of complaint."""
    result = run(*arguments, code=2)
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert match in line
    assert "Traceback" not in result.stderr
    return line


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A source with tokenizer, its twin, a gauge, calibration text, an adapter and an SAE."""
    root = tmp_path_factory.mktemp("work")
    model = tiny.build("qwen3", tie_word_embeddings=True, attention_bias=False)
    add_tokenizer(tiny.save(model, root / "source"))
    (root / "text.txt").write_text("\n".join(TEXT))
    run("scramble", root / "source", "-o", root / "twin", "--save-gauge", root / "true.safetensors")
    adapter_on(root / "source", root / "adapter", target_modules=["q_proj", "o_proj"])
    build_sae("topk", root / "sae")
    return root


def test_scramble(work, tmp_path):
    data = run_json(
        "scramble", work / "source", "-o", tmp_path / "twin", "--seed", 7, "--group", "permutation"
    )
    assert data["spaces"]["residual"]["positive_sign_fraction"] == 1.0
    assert data["provenance"]["seed"] == 7
    assert not data["spaces"]["residual"]["identity"]


@pytest.mark.parametrize("method", ["activations", "weights"])
def test_gauge_is_scored_against_the_truth(work, tmp_path, method):
    text = ["--text", work / "text.txt"] if method == "activations" else []
    data = run_json(
        "gauge", work / "source", work / "twin", "-o", tmp_path / "g", "--from", method, *text,
        "--truth", work / "true.safetensors",
    )  # fmt: skip
    assert data["permutation_accuracy"] == data["sign_accuracy"] == 1.0
    assert set(data["margin"]) == {"min", "q05", "median", "q95"}
    assert data["provenance"]["method"] == method


def test_raw_signed_gauge_falls_short(work, tmp_path):
    data = run_json(
        "gauge", work / "source", work / "twin", "-o", tmp_path / "g", "--objective", "signed",
        "--truth", work / "true.safetensors",
    )  # fmt: skip
    assert data["permutation_accuracy"] < 0.8


def test_apply_and_back(work, tmp_path):
    gauge = work / "true.safetensors"
    assert run_json("apply", gauge, work / "source", "-o", tmp_path / "there")["tensors"] > 20
    run("apply", gauge, work / "twin", "-o", tmp_path / "back", "--inverse")
    for moved, original in (("there", "twin"), ("back", "source")):
        weights = (tmp_path / moved / "model.safetensors").read_bytes()
        assert weights == (work / original / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("artifact", "kind"), [("adapter", "PEFT LoRA adapter"), ("sae", "SAELens SAE")]
)
def test_port_says_what_it_recognised(work, tmp_path, artifact, kind):
    gauge = ["--gauge", work / "true.safetensors", "--any-source"]
    result = run("port", work / artifact, *gauge, "-o", tmp_path / "ported")
    assert f"Recognised: {kind}; moved" in result.stdout
    assert run_json("inspect", tmp_path / "ported")["kind"] == kind
    data = run_json("port", tmp_path / "ported", *gauge, "-o", tmp_path / "back", "--inverse")
    assert data["kind"] == kind


def test_merge_takes_mergekit_options(work, tmp_path):
    recipe = tmp_path / "recipe.yml"
    models = [
        {"model": str(work / name), "parameters": {"weight": 1}} for name in ("source", "twin")
    ]
    recipe.write_text(
        yaml.safe_dump({"merge_method": "signed_align", "models": models, "dtype": "float32"})
    )
    data = run_json(
        "merge", recipe, tmp_path / "out", "--out-shard-size", "10k", "--no-write-model-card"
    )
    assert data["reference"] == str(work / "source")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert not (tmp_path / "out" / "README.md").exists()
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    before, after = tiny.load(work / "source"), tiny.load(tmp_path / "out")
    assert tiny.relative_change(tiny.logits(before), tiny.logits(after)) <= 1e-5


def test_barrier(work, tmp_path):
    data = run_json(
        "barrier", work / "source", work / "twin", "--gauge", work / "true.safetensors",
        "--text", work / "text.txt", "--points", 5, "--plot", tmp_path / "plot.png",
    )  # fmt: skip
    assert data["barrier_nats"] < 1e-5
    assert len(data["paths"]["straight"]["losses"]) == 5
    assert (tmp_path / "plot.png").stat().st_size > 1000
    straight = run_json("barrier", work / "source", work / "twin", "--text", work / "text.txt")
    assert straight["barrier_nats"] == straight["paths"]["straight"]["barrier_nats"]


def test_port_explains_how_it_labelled(work, tmp_path):
    torch.save(torch.arange(3.0 * tiny.WIDTH).reshape(3, -1), tmp_path / "vectors.pt")
    gauge = ["--gauge", work / "true.safetensors", "--any-source"]
    out = run("port", tmp_path / "vectors.pt", *gauge, "-o", tmp_path / "a.pt", "--explain").stdout
    assert "(·, residual)" in out
    assert "taken to be on the residual stream" in out
    data = run_json("port", tmp_path / "vectors.pt", *gauge, "-o", tmp_path / "b.pt")
    assert data["labels"][0]["axes"] == "(·, residual)"
    assert data["labels"][0]["moved"]
    torch.save(torch.ones(80), tmp_path / "units.pt")
    arguments = ["port", tmp_path / "units.pt", *gauge, "-o", tmp_path / "c.pt"]
    fails(*arguments, match="--hook")
    fails(*arguments, "--hook", "blocks.0.mlp.hook_post", match="says nothing")
    assert not (tmp_path / "c.pt").exists()


def test_steer(work, tmp_path):
    torch.manual_seed(0)
    torch.save({"blocks.0.hook_resid_post": torch.randn(tiny.WIDTH)}, tmp_path / "vector.pt")
    (tmp_path / "prompts.txt").write_text("ab\ncde\n")
    words = ["--prompts", tmp_path / "prompts.txt", "--positive", "x,yy", "--negative", "z"]
    home = run_json("steer", work / "source", tmp_path / "vector.pt", *words)
    assert len(home["prompts"]) == 2
    assert abs(home["effect"]) > 1e-3
    gauge = ["--gauge", work / "true.safetensors"]
    run("port", tmp_path / "vector.pt", *gauge, "-o", tmp_path / "moved.pt", "--any-source")
    away = run_json("steer", work / "twin", tmp_path / "moved.pt", *words)
    assert away["effect"] == pytest.approx(home["effect"], rel=1e-4)
    assert "effect" in run("steer", work / "source", tmp_path / "vector.pt", *words).stdout
    fails("steer", work / "source", tmp_path / "none.pt", *words, match="none.pt")


def test_inspect(work):
    model = run_json("inspect", work / "source")
    assert model["norm"] == "RMSNorm"
    assert model["native_group"] == "signed_permutation"
    assert model["spaces"]["residual"] == tiny.WIDTH
    assert {"mlp", "heads", "values", "keys"} <= set(model["spaces"])
    assert model["chart"]["model.norm.weight"] == [{"space": "residual", "signed": False}]
    gauge = run_json("inspect", work / "true.safetensors")
    assert gauge["kind"] == "gauge"
    assert gauge["source"]["fingerprint"] == model["fingerprint"]
    for thing in ("source", "true.safetensors", "adapter", "sae"):
        assert run("inspect", work / thing).stdout.count("\n") > 3


def test_evaluate_on_a_local_task(work, tmp_path):
    pytest.importorskip("lm_eval")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    rows = [{"text": text, "label": row % 2} for row, text in enumerate(TEXT[:10])]
    (tasks / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    task = {
        "task": "letters",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tasks / "data.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": ["a", "b"],
        "doc_to_target": "{{label}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tasks / "letters.yaml").write_text(yaml.safe_dump(task))
    arguments = ["--task", "letters", "--tasks-dir", tasks]
    data = run_json("evaluate", work / "source", *arguments)
    assert data["examples"] == 10
    assert 0 <= data["accuracy"] <= 1
    with_adapter = run_json("evaluate", work / "source", "--adapter", work / "adapter", *arguments)
    assert with_adapter["examples"] == 10
    fails("evaluate", work / "source", "--task", "nonsense", match="knows no task")
    fails("evaluate", work / "source", "--adapter", tmp_path, *arguments, match="no PEFT adapter")


def truncated(work, tmp_path):
    path = tmp_path / "damaged"
    run("scramble", work / "source", "-o", path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    return path


def not_finite(work, tmp_path):
    path = tmp_path / "nan"
    run("scramble", work / "source", "-o", path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_bad_input_is_one_sentence_exit_code_2_and_no_output(work, tmp_path):
    out, gauge = tmp_path / "out", work / "true.safetensors"
    damaged, nan = truncated(work, tmp_path), not_finite(work, tmp_path)
    layer_norm = tiny.save(tiny.build("gpt2"), tmp_path / "gpt2")
    wide = tiny.save(tiny.build("qwen3", hidden_size=64), tmp_path / "wide")
    text = ["--text", work / "text.txt"]
    shutil.copytree(work / "source", tmp_path / "quantised")
    config = json.loads((work / "source" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    shutil.copytree(work / "adapter", tmp_path / "odd")
    odd = tmp_path / "odd" / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_X.weight"
    save_file({**load_file(odd), name: torch.zeros(2)}, odd)
    before = sorted(tmp_path.iterdir())
    fails("scramble", tmp_path / "quantised", "-o", out, match="quantised (awq")
    fails("port", tmp_path / "odd", "--gauge", gauge, "-o", out, match=name)
    fails("gauge", work / "source", work / "twin", "-o", out, *text, "--device", "cuda:9",
          match="cannot be loaded on cuda:9")  # fmt: skip
    fails("barrier", work / "source", work / "twin", *text, "--plot", out, match="image format")
    fails("scramble", damaged, "-o", out, match="truncated or damaged")
    fails("apply", gauge, wide, "-o", out, "--any-source", match="48 residual coordinates")
    fails("apply", gauge, work / "twin", "-o", out, match="other end of the gauge")
    fails("apply", gauge, layer_norm, "-o", out, "--any-source", match="subtracts the mean")
    fails("apply", tmp_path / "none", work / "source", "-o", out, match="no gauge file")
    fails("apply", work / "text.txt", work / "source", "-o", out, match="safetensors")
    fails("gauge", work / "source", nan, "-o", out, *text, match="NaN or infinite")
    fails("gauge", work / "source", work / "twin", "-o", out, "--layers", "a", match="numbers")
    fails(
        "gauge",
        work / "source",
        tmp_path / "none",
        "-o",
        out,
        match="neither a directory nor a Hub id",
    )
    fails("port", work / "source", "--gauge", gauge, "-o", out, match="signed-align apply")
    fails("merge", tmp_path / "none.yml", out, match="cannot be read")
    (tmp_path / "empty").mkdir()
    fails("inspect", tmp_path / "empty", match="not a model")
    (tmp_path / "empty").rmdir()
    fails("barrier", work / "source", nan, "--text", tmp_path / "none", match="cannot be read")
    assert sorted(tmp_path.iterdir()) == before


def test_fewer_tokens_than_coordinates_is_a_warning(work, tmp_path):
    (tmp_path / "short.txt").write_text(TEXT[0])
    arguments = [
        "gauge", work / "source", work / "twin", "-o", tmp_path / "g",
        "--text", tmp_path / "short.txt",
    ]  # fmt: skip
    data = run_json(*arguments)
    assert "at least 48 are needed" in data["warnings"][0]
    assert "warning: " in run(*arguments, "--force").stderr
    assert run(*arguments, "--force", "--quiet").stderr == ""


def test_errors_are_json_too(work, tmp_path):
    result = run("inspect", tmp_path, "--json", code=2)
    assert "not a model" in json.loads(result.stdout)["error"]


def test_existing_output_is_kept(work, tmp_path):
    (tmp_path / "g").write_text("precious")
    fails("gauge", work / "source", work / "twin", "-o", tmp_path / "g", match="--force")
    assert (tmp_path / "g").read_text() == "precious"


def test_help_needs_neither_torch_nor_transformers():
    """The reason why `signed-align --help` is immediate."""
    code = (
        "import sys; from signed_align.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'scipy', 'mergekit'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert command in done.stdout


def test_an_exception_of_another_kind_is_called_a_bug(monkeypatch):
    def broken(thing):
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr("signed_align.inspection.inspect", broken)
    result = run("inspect", "thing", "--json", code=1)
    assert json.loads(result.stdout)["exit_code"] == 1
    (line,) = result.stderr.splitlines()
    assert "a bug in signed-align" in line
    assert "ZeroDivisionError: division by zero" in line
    monkeypatch.setenv("SIGNED_ALIGN_TRACEBACK", "1")
    assert "Traceback" in run("inspect", "thing", code=1).stderr


def test_an_interrupt_is_not_called_a_bug(monkeypatch):
    def interrupted(thing):
        raise KeyboardInterrupt

    monkeypatch.setattr("signed_align.inspection.inspect", interrupted)
    assert "interrupted" in run("inspect", "thing", code=130).stderr
