"""The demo, part by part: each makes artifacts, measures them, and adds a table."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

from signed_align import __version__, progress
from signed_align.activations import batches, hook_activations, load_tokenizer
from signed_align.adapters import port
from signed_align.adapters.sae import reconstruction_error
from signed_align.barrier import Barrier, LossPath, plot_paths
from signed_align.checkpoint import Checkpoint
from signed_align.demo import assets
from signed_align.demo.lora import TASK, is_llama_like, make_task, train_lora
from signed_align.demo.sae import train_sae
from signed_align.errors import CheckpointError
from signed_align.evaluation import evaluate
from signed_align.files import require_free
from signed_align.gauge import Gauge
from signed_align.hooks import find_hook
from signed_align.matching import Objective
from signed_align.moving import scramble
from signed_align.recovery import evidence_from_activations, evidence_from_weights

MARKER = ".signed-align-demo"
RECIPE_ROOT = "demo-out"
RECIPES = ("linear", "permutation", "signed_align", "signed_align_ties")

# Headline figures of the paper's experiments of the same kind. Its models are other models.
PAPER = {
    "lora": {"signed permutation": 0.944, "permutation only": 0.523, "base model": 0.525},
    "sae": {"signed permutation": 0.004, "permutation only": 1.08},
    "barrier": {"signed permutation": 0.0},
}
CALIBRATION_TOKENS = 2304
SAE_TOKENS = 16_000
SAE_HELD_OUT_TOKENS = 2_000
LOSS_TOKENS = 1_024
PATH_POINTS = 5

Lines = list[str]


def run_demo(
    *, model: str | None = None, out: str | Path = RECIPE_ROOT, seed: int = 0
) -> tuple[dict[str, Any], Lines]:
    """Run the demonstration and write everything it makes to ``out``.

    Parameters
    ----------
    model : str, optional
        A checkpoint or Hub id of a llama-like model; SmolLM2-135M from the package index otherwise.
    out : str or Path
        The directory to make. An earlier demo's is replaced, anything else is refused.
    seed : int
        Seeds the twin, both trainings and every choice of text.

    Returns
    -------
    (dict, list of str)
        The results, as in ``demo.json``, and the tables.
    """
    return Demo(Path(out), seed).run(model)


class Demo:
    """State that the parts share: the source, its twin, text, and the recovered gauges."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.seed = out, seed
        self.seconds: dict[str, float] = {}
        self.results: dict[str, Any] = {}
        self.lines: Lines = []

    def run(self, model: str | None) -> tuple[dict[str, Any], Lines]:
        """All parts in order."""
        _require_replaceable(self.out)
        with self.part("preparing model and text"):
            self.sentences = assets.newspaper_sentences()
            self.reviews = assets.movie_reviews()
            original = Checkpoint.open(model if model is not None else assets.smollm2())
            if not is_llama_like(original.chart):
                raise CheckpointError(
                    f"the demo's LoRA targets the modules of llama-like models; {original.name} "
                    f"is a {original.model_type} model."
                )
            load_tokenizer(original)
            _require_replaceable(self.out, inputs=[original.path])
            _prepare(self.out)
            shutil.copytree(original.path, self.out / "source")
            self.source = Checkpoint.open(self.out / "source")
            self.results["model"] = original.path.name if model is None else model
        with self.part("scrambling a twin"):
            self.truth = scramble(self.out / "source", self.out / "twin", seed=self.seed)
            self.truth.save(self.out / "true-gauge.safetensors")
            self.twin = Checkpoint.open(self.out / "twin")
        for title, step in (
            ("recovering the gauge", self.recovery),
            ("porting a LoRA", self.lora),
            ("porting an SAE", self.sae),
            ("merging", self.merges),
        ):
            with self.part(title):
                step()
        self.results |= {
            "seed": self.seed,
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "signed_align": __version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "date": date.today().isoformat(),
        }
        (self.out / "demo.json").write_text(json.dumps(self.results, indent=2) + "\n")
        total = sum(self.seconds.values())
        self.lines += ["", f"{total:.0f} s in all; artifacts, JSON and the plot are in {self.out}."]
        return self.results, self.lines

    @contextlib.contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Time a part and say that it has begun."""
        progress.say(f"[{len(self.seconds) + 1}/6] {title}")
        start = time.monotonic()
        yield
        self.seconds[title] = time.monotonic() - start

    def recovery(self) -> None:
        """Three objectives, from activations at several depths and from weights."""
        depth = int(self.source.config.num_hidden_layers)
        layers = {"shallow": 1, "middle": depth // 2, "deep": depth - 1}
        evidence = evidence_from_activations(
            self.source,
            self.twin,
            self.sentences,
            layer_groups={**{name: [layer] for name, layer in layers.items()}, "all layers": None},
            max_tokens=CALIBRATION_TOKENS,
            seed=self.seed,
        )
        evidence["weights"] = evidence_from_weights(self.source, self.twin)
        truth = self.truth.elements["residual"]
        positive = self.truth.summary()["spaces"]["residual"]["positive_sign_fraction"]
        found: dict[str, Any] = {}
        rows = []
        self.gauges: dict[str, Gauge] = {}
        for name, correlation in evidence.items():
            where = f"{name} (hidden state {layers[name]})" if name in layers else name
            for objective in Objective:
                gauge = correlation.gauge(objective)
                accuracy = gauge.elements["residual"].agreement(truth)
                margin = gauge.summary()["spaces"]["residual"]["margin"]
                found.setdefault(name, {})[objective.value] = {**accuracy, "margin": margin}
                rows.append(
                    [
                        where,
                        objective.value,
                        f"{accuracy['permutation_accuracy']:.3f}",
                        f"{accuracy['sign_accuracy']:.3f}",
                        f"{margin['min']:.3f}",
                        f"{margin['median']:.3f}",
                    ]
                )
                if name == "all layers":
                    self.gauges[objective.value] = gauge
                    gauge.save(self.out / "gauges" / f"{objective.value}.safetensors")
        self.results["recovery"] = {"positive_sign_fraction": positive, "evidence": found}
        self.table(
            f"Recovering the gauge of a twin, {positive:.3f} of whose signs are +1",
            ["evidence", "objective", "permutation", "sign", "least margin", "median margin"],
            rows,
        )

    def lora(self) -> None:
        """Accuracy of one adapter at home and on the twin, moved three ways."""
        task = make_task(self.reviews, load_tokenizer(self.source), self.seed)
        task.write(self.out / "tasks")
        adapter = self.out / "lora"
        training = train_lora(self.source, task, adapter, self.seed)
        moved = self.moved(adapter)
        accuracy = {
            "base model": self.accuracy(self.source, None),
            "home": self.accuracy(self.source, adapter),
            **{name: self.accuracy(self.twin, path) for name, path in moved.items()},
        }
        self.results["lora"] = {
            "accuracy": accuracy,
            "examples": len(task.held_out),
            "label_words": list(task.words),
            **training,
        }
        self.table(
            f"A LoRA on reviews labelled {task.words[0]!r} / {task.words[1]!r}: accuracy on "
            f"{len(task.held_out)} held-out examples",
            ["adapter", "this model", "paper (another model)"],
            _beside_paper(accuracy, PAPER["lora"]),
        )

    def accuracy(self, model: Checkpoint, adapter: Path | None) -> float:
        """Accuracy of a model on the task through lm-eval."""
        measured = evaluate(model.path, TASK, adapter=adapter, tasks_dir=self.out / "tasks")
        return float(measured["accuracy"])

    def sae(self) -> None:
        """Reconstruction error of one SAE at home and on the twin, moved three ways."""
        from sae_lens import SAE

        blocks = 2 * int(self.source.config.num_hidden_layers) // 5
        tokenizer = load_tokenizer(self.source)
        todo = batches(
            tokenizer, self.sentences, max_tokens=SAE_TOKENS + SAE_HELD_OUT_TOKENS, seed=self.seed
        )
        held_out, count = [], 0
        while count < SAE_HELD_OUT_TOKENS:
            held_out.append(todo.pop())
            count += held_out[-1].tokens
        directory, hook = self.out / "sae", f"blocks.{blocks - 1}.hook_resid_post"
        place = find_hook(self.source.chart, hook)
        with progress.libraries_silent():
            trained = train_sae(
                hook_activations(self.source, [place], todo)[0],
                hook,
                self.source.name,
                directory,
                self.seed,
            )
        (home,) = hook_activations(self.source, [place], held_out)
        (away,) = hook_activations(self.twin, [place], held_out)
        error = {"home": reconstruction_error(trained, home)}
        for name, path in self.moved(directory).items():
            error[name] = reconstruction_error(SAE.load_from_disk(str(path)), away)
        self.results["sae"] = {
            "nmse": error,
            "hook_name": hook,
            "tokens": len(home),
        }
        self.table(
            f"A top-k SAE after block {blocks - 1}: normalised squared error on "
            f"{len(home)} held-out tokens",
            ["SAE", "this model", "paper (another model)"],
            _beside_paper(error, PAPER["sae"]),
        )

    def moved(self, artifact: Path) -> dict[str, Path]:
        """The artifact moved by B_d and by S_d, and the artifact as it is."""
        signed = self.out / f"{artifact.name}-signed"
        permuted = self.out / f"{artifact.name}-permutation"
        port(artifact, self.gauges[Objective.SIGN_MARGINALIZED.value], signed)
        port(artifact, self.gauges[Objective.PERMUTATION.value], permuted, verify=False)  # wrong
        return {"signed permutation": signed, "permutation only": permuted, "not moved": artifact}

    def merges(self) -> None:
        """mergekit recipes with and without alignment, and the paths they are points on."""
        from signed_align.merge_methods import merge

        recipes = self.out / "recipes"
        recipes.mkdir()
        for name in RECIPES:
            text = resources.files("signed_align.recipes").joinpath(f"{name}.yml").read_text()
            recipe = recipes / f"{name}.yml"
            recipe.write_text(text.replace(f"{RECIPE_ROOT}/", f"{self.out}/"))
            with progress.libraries_silent():
                merge(recipe, self.out / "merged" / name, _quiet_mergekit())
        barrier = Barrier(self.source, self.sentences, max_tokens=LOSS_TOKENS)
        paths = {
            "not aligned": barrier.path(self.twin, points=PATH_POINTS),
            **{
                name: barrier.path(self.twin, self.gauges[objective.value], points=PATH_POINTS)
                for name, objective in (
                    ("permutation only", Objective.PERMUTATION),
                    ("signed permutation", Objective.SIGN_MARGINALIZED),
                )
            },
        }
        plot_paths(paths, self.out / "barrier.png", f"{self.results['model']} and its twin")
        chord = paths["not aligned"].chord[PATH_POINTS // 2]
        merged = {
            name: max(0.0, barrier.loss(Checkpoint.open(self.out / "merged" / name)) - chord)
            for name in RECIPES
        }
        self.results["merge"] = {
            "barrier_nats": merged,
            "paths": {name: path.to_dict() for name, path in paths.items()},
            "tokens": LOSS_TOKENS,
            "sample": _generate(self.out / "merged" / "signed_align"),
        }
        self.merge_tables(paths, merged)

    def merge_tables(self, paths: dict[str, LossPath], merged: dict[str, float]) -> None:
        """The two tables of the merge part."""
        self.table(
            "The straight path from model to twin: peak above the chord, nats per token",
            ["alignment", "this model", "paper (another model)"],
            _beside_paper({name: path.barrier for name, path in paths.items()}, PAPER["barrier"]),
        )
        self.table(
            "mergekit recipes on model and twin: loss above the chord, nats per token",
            ["recipe", "this model"],
            [[name, f"{value:.4f}"] for name, value in merged.items()],
        )

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table, columns aligned."""
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        self.lines += ["", title, ""]
        for row in (header, ["-" * width for width in widths], *rows):
            cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)]
            self.lines.append("  " + "  ".join(cells).rstrip())


def _beside_paper(values: dict[str, float], paper: dict[str, float]) -> list[list[str]]:
    return [
        [name, f"{value:.3f}", f"{paper[name]:.3f}" if name in paper else ""]
        for name, value in values.items()
    ]


def _require_replaceable(out: Path, inputs: Sequence[Path] = ()) -> None:
    require_free(out, directory=True, force=(out / MARKER).is_file(), inputs=inputs)


def _prepare(out: Path) -> None:
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).write_text("Made by `signed-align demo`, which may replace this directory.\n")


def _quiet_mergekit() -> Any:
    from mergekit.options import MergeOptions

    return MergeOptions(quiet=True, random_seed=0)


def _generate(path: Path) -> str:
    """A few words from a merged checkpoint: it loads and generates."""
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint.open(path)
    tokenizer = load_tokenizer(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(path)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(output[0], skip_special_tokens=True)
