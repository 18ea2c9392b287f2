"""Negative controls, through the command line: unrelated models, shuffled pairs, a model itself.

Unrelated are small Llamas trained from other seeds, and SmolLM2 and models of its shape with random
weights. Pairs are shuffled between SmolLM2 and a twin of it, which do have a gauge. In each of
twenty trials the command has to end with exit code 3 and write nothing; for a model and itself it
has to report the identity.
"""

import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import finetunes
import torch
from click.testing import CliRunner
from common import parser_of, record, results_of
from training import trained
from trajectories import BASE, HELD_OUT
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from signed_align import scramble
from signed_align.cli import main as signed_align
from signed_align.demo.assets import newspaper_sentences

TRIALS = 20
TOKENS = 576
SMALL_SEEDS = 5
"""Every two of them are a pair: ten."""

Trial = tuple[Path, Path, tuple[str, ...]]
"""A source, a target, and options."""


def small_models(work: Path, quick: bool) -> list[Path]:
    """Small Llamas from several seeds; the bases of ``trajectories.py``, if they are there."""
    sentences = newspaper_sentences()[:-HELD_OUT]
    steps = 100 if quick else BASE.steps
    paths = []
    for seed in range(3 if quick else SMALL_SEEDS):
        paths.append(work / ("trajectories-quick" if quick else "trajectories") / f"seed-{seed}")
        paths[-1] = paths[-1] / ("control" if quick else "base")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        trained(paths[-1], replace(BASE, seed=seed, steps=steps), sentences)
    return paths


def random_models_of_shape(root: Path, count: int) -> Iterator[Path]:
    """Models of SmolLM2's shape, with its tokenizer and random weights, one at a time."""
    config = AutoConfig.from_pretrained(finetunes.base())
    tokenizer = AutoTokenizer.from_pretrained(finetunes.base())
    for seed in range(count):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(root / "random")
        tokenizer.save_pretrained(root / "random")
        yield root / "random"


def outcome(
    trial: Trial, options: Iterable[str], out: Path, *, gauge_expected: bool
) -> dict[str, Any]:
    """What `signed-align gauge` says: its exit code, its verdict, and whether that is right."""
    source, target, more = trial
    arguments = ["gauge", source, target, "-o", out, *options, *more, "--json"]
    done = CliRunner().invoke(signed_align, [str(argument) for argument in arguments])
    written = out.exists()
    out.unlink(missing_ok=True)
    said = json.loads(done.stdout)
    identity = said["spaces"]["residual"]["identity"] if "spaces" in said else False
    return {
        "exit_code": done.exit_code,
        "finding": said["verdict"]["finding"],
        "sure_fraction": said["verdict"]["sure_fraction"],
        "identity": identity,
        "as_expected": (done.exit_code == 0 and identity)
        if gauge_expected
        else (done.exit_code == 3 and not written),
    }


def summed(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Trials of one control and one kind of evidence."""
    sure = [one["sure_fraction"] for one in outcomes]
    return {
        "trials": len(outcomes),
        "as_expected": sum(one["as_expected"] for one in outcomes),
        "exit_codes": {str(c): n for c, n in Counter(o["exit_code"] for o in outcomes).items()},
        "findings": dict(Counter(one["finding"] for one in outcomes)),
        "identities": sum(one["identity"] for one in outcomes),
        "sure_fraction": {"least": round(min(sure), 4), "most": round(max(sure), 4)},
    }


def main() -> None:
    arguments = parser_of(__doc__, "three trials of each control", "the small models").parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    trials = 3 if arguments.quick else TRIALS
    start = time.perf_counter()
    base = finetunes.base()
    small = list(itertools.combinations(small_models(arguments.work, arguments.quick), 2))
    with tempfile.TemporaryDirectory(dir=arguments.work) as directory:
        root = Path(directory)
        text = root / "text.txt"
        text.write_text("\n".join(newspaper_sentences()))
        evidence = {
            "weights": ("--from", "weights"),
            "activations": ("--text", str(text), "--tokens", str(TOKENS)),
        }
        twin = root / "twin"
        scramble(base, twin, seed=0)

        def unrelated() -> Iterator[Trial]:
            half = small[: trials // 2]
            yield from ((a, b, ()) for a, b in half)
            random = random_models_of_shape(root, trials - len(half))
            yield from ((base, other, ()) for other in random)

        def shuffled() -> Iterator[Trial]:
            for seed in range(trials):
                yield base, twin, ("--shuffle-pairs", "--seed", str(seed))

        def itself() -> Iterator[Trial]:
            for seed in range(trials):
                yield base, base, ("--seed", str(seed))

        controls: dict[str, Any] = {}
        makers = {"unrelated models": unrelated, "shuffled pairs": shuffled, "identity": itself}
        for name, make in makers.items():
            found: dict[str, list[dict[str, Any]]] = {method: [] for method in evidence}
            for trial in make():
                for method, options in evidence.items():
                    found[method].append(
                        outcome(trial, options, root / "gauge", gauge_expected=name == "identity")
                    )
            controls[name] = {method: summed(outcomes) for method, outcomes in found.items()}
            print(name, json.dumps(controls[name]), flush=True)
    record(
        "controls",
        {
            "model": "SmolLM2-135M-Instruct, and byte-level Llamas of 4 layers, 128 coordinates",
            "tokens": TOKENS,
            "controls": controls,
            "seconds": round(time.perf_counter() - start, 1),
        },
        results_of(arguments),
    )


if __name__ == "__main__":
    main()
