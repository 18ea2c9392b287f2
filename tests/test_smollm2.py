"""The main job on a real model: what the demo on SmolLM2-135M has to show."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from signed_align.demo import run_demo
from tests.test_cli import run_json

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    results, lines = run_demo(out=out)
    assert json.loads((out / "demo.json").read_text()) == results
    return out, results, lines


@pytest.mark.parametrize("evidence", ["shallow", "middle", "deep", "all layers", "weights"])
def test_recovery(demo, evidence):
    recovery = demo[1]["recovery"]
    found, positive = recovery["evidence"][evidence], recovery["positive_sign_fraction"]
    assert found["sign_marginalized"]["permutation_accuracy"] == 1.0
    assert found["sign_marginalized"]["sign_accuracy"] == 1.0
    assert found["sign_marginalized"]["margin"]["min"] > 0.05
    assert found["signed"]["permutation_accuracy"] == pytest.approx(positive, abs=0.02)
    assert found["permutation"]["permutation_accuracy"] == 1.0
    assert found["permutation"]["sign_accuracy"] == pytest.approx(positive)


def test_lora(demo):
    results = demo[1]["lora"]
    accuracy, one_example = results["accuracy"], 1 / results["examples"]
    assert 0.4 <= accuracy["base model"] <= 0.6
    assert accuracy["home"] >= 0.8
    assert accuracy["signed permutation"] == pytest.approx(accuracy["home"], abs=1.01 * one_example)
    for name in ("permutation only", "not moved"):
        assert accuracy[name] == pytest.approx(accuracy["base model"], abs=0.05), name


def test_sae(demo):
    error = demo[1]["sae"]["nmse"]
    assert error["home"] < 0.4
    assert error["signed permutation"] == pytest.approx(error["home"], rel=0.01)
    assert error["permutation only"] > 0.9
    assert error["not moved"] > 0.9


def test_merges(demo):
    merged, paths = demo[1]["merge"]["barrier_nats"], demo[1]["merge"]["paths"]
    assert merged["linear"] > 1
    assert merged["permutation"] > 1
    assert merged["signed_align"] < 0.005
    assert merged["signed_align_ties"] < 0.005
    assert paths["not aligned"]["barrier_nats"] > 1
    assert paths["signed permutation"]["barrier_nats"] < 0.005
    assert demo[1]["merge"]["sample"].startswith("The capital of France is Paris")


def test_what_is_left_behind(demo):
    out, _, lines = demo
    for name in (
        "source/model.safetensors", "twin/model.safetensors", "true-gauge.safetensors",
        "gauges/sign_marginalized.safetensors", "lora-signed/adapter_model.safetensors",
        "sae-signed/sae_weights.safetensors", "merged/signed_align/config.json",
        "barrier.png", "recipes/signed_align.yml",
    ):  # fmt: skip
        assert (out / name).is_file(), name
    assert sum("another model" in line for line in lines) == 3


def test_every_recipe_runs_on_it(demo, tmp_path, monkeypatch):
    from importlib import resources

    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo-out").symlink_to(demo[0])
    recipes = [
        file for file in resources.files("signed_align.recipes").iterdir()
        if file.name.endswith(".yml")
    ]  # fmt: skip
    assert len(recipes) >= 6
    for recipe in recipes:
        if recipe.name.removesuffix(".yml") not in demo[1]["merge"]["barrier_nats"]:
            report = run_json("merge", recipe, tmp_path / recipe.name.removesuffix(".yml"))
            assert report["reference"].endswith("out/source")


def test_a_second_demo_replaces_the_first_and_nothing_else(tmp_path):
    from signed_align.errors import OutputError

    (tmp_path / "precious").write_text("x")
    with pytest.raises(OutputError, match="exists already"):
        run_demo(out=tmp_path)
    assert (tmp_path / "precious").read_text() == "x"


def test_every_space_at_once(tmp_path):
    """Residual stream, MLPs and heads scrambled together, as the benchmark measures it."""
    script = Path(__file__).parents[1] / "benchmarks" / "spaces.py"
    subprocess.run(
        [sys.executable, script, "--results", tmp_path], check=True, stdout=subprocess.DEVNULL
    )
    result = json.loads((tmp_path / "spaces.json").read_text())
    for method in ("activations", "weights"):
        kinds = result["recovery"][method]
        assert set(kinds) == {"residual", "mlp", "heads", "values", "keys"}
        for kind, entry in kinds.items():
            assert entry["permutation_accuracy"] == 1.0, (method, kind)
            assert entry["sign_accuracy"] == 1.0, (method, kind)
            assert entry["least_margin"] > 0, (method, kind)
    assert result["barrier_nats"]["straight"] > 1
    assert result["barrier_nats"]["residual alone"] > 0.1
    assert result["barrier_nats"]["all spaces"] < 0.005
    assert abs(result["merge_above_chord_nats"]) < 0.005
    accuracy = result["lora"]["accuracy"]
    assert accuracy["home"] >= 0.8
    assert accuracy["ported in all spaces"] == pytest.approx(accuracy["home"], abs=1.01 / 200)


def test_directions_of_sentiment_and_refusal_keep_their_effect(tmp_path):
    """On a twin, moved by the recovered gauge; not without signs, nor as they are."""
    script = Path(__file__).parents[1] / "benchmarks" / "steering.py"
    subprocess.run(
        [sys.executable, script, "--quick", "--results", tmp_path],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    result = json.loads((tmp_path / "steering.json").read_text())
    for concept in ("sentiment", "refusal"):
        retention = result["concepts"][concept]["retention"]
        assert retention["home"]["effect"] > 0.2
        assert retention["B_d"]["retained"] >= 0.99
        for name in ("S_d", "not moved"):
            assert retention[name]["retained"] < 0.6, (concept, name)
