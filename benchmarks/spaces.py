"""SmolLM2 scrambled in every space at once: recovered from activations and from weights alone.

The twin differs from the model in its residual coordinates, in the hidden units of every MLP, and
in the heads of every attention module and the coordinates inside them. Measured is what of that is
recovered, the barrier of the aligned merge, and the accuracy of a LoRA on all linear layers before
and after it is moved.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from common import RESULTS, record
from mergekit.options import MergeOptions

from signed_align import Checkpoint, Gauge, merge, port, recover, scramble
from signed_align.activations import load_tokenizer
from signed_align.barrier import Barrier
from signed_align.demo import assets
from signed_align.demo.lora import TASK, make_task, train_lora
from signed_align.evaluation import evaluate
from signed_align.gauge import by_kind
from signed_align.progress import libraries_silent

SPACES = ("residual", "mlp", "heads")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LOSS_TOKENS = 4096


def accuracies(gauge: Gauge, truth: Gauge) -> dict[str, dict[str, float]]:
    """What share of each kind of space is right, and the least margin."""
    return {
        kind: {
            "coordinates": entry["coordinates"],
            "permutation_accuracy": entry["permutation_accuracy"],
            "sign_accuracy": entry["sign_accuracy"],
            "least_margin": round(entry["margin"]["min"], 4),
        }
        for kind, entry in by_kind(gauge, truth).items()
    }


def merged(source: Path, twin: Path, gauge: Path, out: Path) -> Checkpoint:
    """The aligned average of both, as an ordinary mergekit recipe makes it."""
    recipe = out.with_suffix(".yml")
    recipe.write_text(
        yaml.safe_dump(
            {
                "merge_method": "signed_align",
                "base_model": str(source),
                "models": [
                    {"model": str(source), "parameters": {"weight": 0.5}},
                    {"model": str(twin), "parameters": {"weight": 0.5, "gauge": str(gauge)}},
                ],
                "dtype": "float32",
            }
        )
    )
    with libraries_silent():
        merge(recipe, out, MergeOptions(quiet=True, write_model_card=False))
    return Checkpoint.open(out)


def measure(work: Path, seed: int) -> dict[str, Any]:
    sentences = assets.newspaper_sentences()
    source, twin = work / "source", work / "twin"
    shutil.copytree(assets.smollm2(), source)
    truth = scramble(source, twin, seed=seed, spaces=SPACES)
    result: dict[str, Any] = {"spaces": list(SPACES), "recovery": {}, "seconds": {}}
    gauges = {}
    for method in ("activations", "weights"):
        begin = time.monotonic()
        text = sentences if method == "activations" else None
        gauges[method] = recover(source, twin, method=method, spaces=SPACES, text=text)
        result["seconds"][method] = round(time.monotonic() - begin, 1)
        result["recovery"][method] = accuracies(gauges[method], truth)
    gauge = work / "gauge.safetensors"
    gauges["weights"].save(gauge)

    model, other = Checkpoint.open(source), Checkpoint.open(twin)
    barrier = Barrier(model, sentences, max_tokens=LOSS_TOKENS)
    paths = {
        "straight": barrier.path(other, points=5),
        "residual alone": barrier.path(other, gauges["weights"].restricted(["residual"]), points=5),
        "all spaces": barrier.path(other, gauges["weights"], points=5),
    }
    result["barrier_nats"] = {name: round(path.barrier, 6) for name, path in paths.items()}
    loss = barrier.loss(merged(source, twin, gauge, work / "merged"))
    result["merge_above_chord_nats"] = round(loss - paths["straight"].chord[2], 6)

    task = make_task(assets.movie_reviews(), load_tokenizer(model), seed)
    task.write(work / "tasks")
    train_lora(model, task, work / "lora", seed, targets=LINEAR)
    port(work / "lora", gauges["weights"], work / "ported")
    alone = gauges["weights"].restricted(["residual"])
    port(work / "lora", alone, work / "residual-alone", verify=False)  # wrong, to compare with
    accuracy = {
        name: float(evaluate(end, TASK, adapter=adapter, tasks_dir=work / "tasks")["accuracy"])
        for name, end, adapter in (
            ("base model", source, None),
            ("home", source, work / "lora"),
            ("ported in all spaces", twin, work / "ported"),
            ("ported in the residual stream alone", twin, work / "residual-alone"),
            ("not moved", twin, work / "lora"),
        )
    }
    return {**result, "lora": {"targets": list(LINEAR), "accuracy": accuracy}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--work", type=Path, help="keep what is made in this new directory")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = arguments.work or Path(folder) / "work"
        work.mkdir(parents=True)
        record("spaces", measure(work, arguments.seed), arguments.results)


if __name__ == "__main__":
    main()
