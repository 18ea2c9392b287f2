"""Barriers between two small Llamas trained from different seeds on the same text.

Nothing made their coordinates agree, and nothing says that they agree up to a signed permutation.
What is measured is how much of the barrier an alignment of more and more spaces takes away, found
by each objective from activations or weights, next to Git Re-Basin's weight matching and mergekit's
`linear`.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from common import record
from mergekit.options import MergeOptions
from training import Training, trained
from transformers.utils import logging

from signed_align import Checkpoint, Gauge, Objective, merge, recover
from signed_align.barrier import Barrier, LossPath
from signed_align.demo.assets import newspaper_sentences
from signed_align.progress import libraries_silent
from signed_align.weight_matching import WeightMatching, partners_of

SPACES = (("residual",), ("residual", "mlp"), ("residual", "mlp", "heads"))
OBJECTIVES = ("permutation", "sign_marginalized")
HELD_OUT = 0.1
POINTS = 11


def git_re_basin(a: Path, b: Path, restarts: int = 3) -> Gauge:
    """Algorithm 1 of Ainsworth et al., "Git Re-Basin", ICLR 2023: permutations, raw weights.

    One assignment after the other, in random order of spaces, each given the others, from the
    identity until none changes; of several orders the one that ends highest.
    """
    source, target = Checkpoint.open(a), Checkpoint.open(b)
    kinds = ("residual", "mlp", "heads", "values", "keys")
    matching = WeightMatching(
        source, target, partners_of(source, target), kinds, Objective.SIGNED, cosines=False
    )
    found = [matching.run(matching.identity(), seed=seed) for seed in range(restarts)]
    best = max(found, key=matching.inner_product)
    return replace(best, source=source.identity, target=target.identity)


def linear_midpoint(a: Path, b: Path, out: Path) -> Path:
    """What mergekit's `linear` makes of two models in equal parts."""
    models = [{"model": str(path), "parameters": {"weight": 0.5}} for path in (a, b)]
    recipe = out.with_suffix(".yml")
    recipe.write_text(
        yaml.safe_dump({"merge_method": "linear", "models": models, "dtype": "float32"})
    )
    with libraries_silent():
        merge(recipe, out, MergeOptions(quiet=True, write_model_card=False), force=True)
    return out


def figures(path: LossPath) -> dict[str, float]:
    """A path's barrier, and its midpoint's loss above the chord, in nats per token."""
    middle = len(path.alphas) // 2
    return {
        "barrier_nats": round(path.barrier, 4),
        "midpoint_above_chord_nats": round(path.losses[middle] - path.chord[middle], 4),
        "midpoint_loss": round(path.losses[middle], 4),
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    header = ("spaces", "objective", "method", "barrier", "midpoint above chord", "share left")
    cells = [
        (
            " + ".join(row["spaces"]) or "none",
            row["objective"],
            row["method"],
            f"{row['barrier_nats']:.3f}",
            f"{row['midpoint_above_chord_nats']:.3f}",
            f"{row['barrier_nats'] / rows[0]['barrier_nats']:.3f}",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    for line in (header, tuple("-" * width for width in widths), *cells):
        print("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 2), metavar="SEED")
    parser.add_argument("--steps", type=int, default=900, help="training steps of each model")
    parser.add_argument("--calibration-tokens", type=int, default=16384)
    parser.add_argument("--loss-tokens", type=int, default=16384)
    parser.add_argument("--work", type=Path, default=Path("build/seeds"), help="keeps the models")
    parser.add_argument("--train-only", action="store_true", help="stop when the models are there")
    parser.add_argument(
        "--quick", action="store_true", help="few steps and tokens, nothing recorded: does it run?"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.calibration_tokens, arguments.loss_tokens = 40, 2048, 2048
    logging.disable_progress_bar()
    logging.set_verbosity_error()

    sentences = newspaper_sentences()
    split = round(len(sentences) * (1 - HELD_OUT))
    calibration, held_out = sentences[:split], sentences[split:]
    arguments.work.mkdir(parents=True, exist_ok=True)
    trainings = [Training(seed, arguments.steps) for seed in arguments.seeds]
    paths = [arguments.work / f"seed-{t.seed}-{t.steps}-steps" for t in trainings]
    train_losses = [
        trained(path, training, calibration)
        for path, training in zip(paths, trainings, strict=True)
    ]
    a, b = paths
    start, end = Checkpoint.open(a), Checkpoint.open(b)
    barrier = Barrier(start, held_out, max_tokens=arguments.loss_tokens)
    straight = barrier.path(end, points=POINTS)
    held_out_losses = [straight.losses[0], straight.losses[-1]]
    for train_loss, loss in zip(train_losses, held_out_losses, strict=True):
        print(f"training loss {train_loss:.3f}, held-out {loss:.3f} nats per byte")
    if arguments.train_only:
        print(f"barrier of the straight path: {straight.barrier:.3f} nats per byte")
        return

    rows = [{"spaces": [], "objective": "", "method": "straight path", **figures(straight)}]

    def measure(spaces: Sequence[str], objective: str, method: str, gauge: Gauge) -> None:
        path = barrier.path(end, gauge, points=POINTS)
        rows.append(
            {"spaces": list(spaces), "objective": objective, "method": method, **figures(path)}
        )

    evidence = {
        "activations": {"text": calibration, "max_tokens": arguments.calibration_tokens},
        "weights": {},
        "both": {"text": calibration, "max_tokens": arguments.calibration_tokens},
    }
    for spaces, objective, method in itertools.product(SPACES, OBJECTIVES, evidence):
        if method == "both" and len(spaces) == 1:
            continue
        gauge = recover(
            a,
            b,
            method=method,
            objective=objective,
            spaces=spaces,
            accept_weak=True,
            **evidence[method],
        )
        measure(spaces, objective, method, gauge)
    measure(SPACES[-1], "signed", "Git Re-Basin", git_re_basin(a, b))

    merged = Checkpoint.open(linear_midpoint(a, b, arguments.work / "linear"))
    middle = straight.chord[POINTS // 2]
    linear = barrier.loss(merged) - middle
    print_table(rows)
    print(
        f"mergekit's linear, half and half: {linear:.4f} above the chord; the straight path's "
        f"midpoint: {rows[0]['midpoint_above_chord_nats']:.4f}"
    )
    if not arguments.quick:
        record(
            "seeds",
            {
                "training": asdict(trainings[0]) | {"seed": list(arguments.seeds)},
                "train_loss": [round(loss, 4) for loss in train_losses],
                "held_out_loss": [round(loss, 4) for loss in held_out_losses],
                "calibration_tokens": arguments.calibration_tokens,
                "loss_tokens": arguments.loss_tokens,
                "points": POINTS,
                "paths": rows,
                "mergekit_linear_midpoint_above_chord_nats": round(linear, 4),
            },
        )


if __name__ == "__main__":
    main()
