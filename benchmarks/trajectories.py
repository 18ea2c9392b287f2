"""Parallel transport between two runs of one base, against matching the ends.

A byte-level Llama of 4 layers and 128 coordinates is trained on newspaper sentences, and from there
twice: on movie reviews and on tweets, hot, saved often. Training moves no coordinate to another
place, so the true gauge between any two checkpoints is the identity, and a share of coordinates
that is matched with itself, sign and all, is an accuracy. It is measured for transport along the
checkpoints, for the ends matched directly, and for both ends matched with the base: over the
length of the runs, the interval between checkpoints, the learning rate, and seeds.
"""

import argparse
import json
import os
import statistics
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import finetunes
import torch
from common import parser_of, record, results_of
from training import ARCHITECTURE, Training, trained
from transformers.utils import logging

from signed_align import transport_along
from signed_align.demo.assets import movie_reviews, newspaper_sentences, tweets
from signed_align.errors import SignedAlignWarning
from signed_align.trajectory import Trajectory, path_of_runs

HELD_OUT = 500
"""Newspaper sentences that no model is trained on: the text that checkpoints are matched on."""
CALIBRATION_TOKENS = 2048
SMOLLM2_TOKENS = 1152

SEEDS = (0, 1, 2, 3, 4)
LEARNING_RATES = (3e-3, 1e-2, 2e-2)
MAIN_RATE = 1e-2
SEEDS_OF_OTHER_RATES = 2
STEPS = 1500
SAVE_EVERY = 50
LENGTHS = (250, 500, 750, 1000, 1250, 1500)
INTERVALS = (50, 100, 250, 500, 1500)
WAYS = ("transport", "endpoint", "via_base")

BASE = Training(
    seed=0, steps=600, batch=16, context=64, architecture={**ARCHITECTURE, "num_hidden_layers": 4}
)
RUN = replace(
    BASE,
    steps=STEPS,
    weight_decay=0.01,
    betas=(0.9, 0.999),
    warmup=0.0,
    clip=None,
    schedule="constant",
    save_every=SAVE_EVERY,
)
"""torch's AdamW as it comes, without warm-up, clipping or decay of the learning rate."""


def measure(
    seed: int, rate: float, base: Training, run: Training, lengths: Sequence[int], work: Path
) -> list[dict[str, Any]]:
    """Train the small Llamas of a seed, if they are missing, and transport; kept when done."""
    chosen = variants(lengths, INTERVALS, run)
    asked = json.loads(json.dumps([asdict(base), asdict(run), chosen, CALIBRATION_TOKENS]))
    note = work / f"seed-{seed}" / f"rate-{rate:g}.json"
    if note.is_file():
        found = json.loads(note.read_text())
        if found["asked"] == asked:
            return found["rows"]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    sentences = newspaper_sentences()
    root = work / f"seed-{seed}"
    root.mkdir(parents=True, exist_ok=True)
    trained(root / "base", replace(base, seed=seed), sentences[:-HELD_OUT])
    runs = root / f"rate-{rate:g}"
    runs.mkdir(exist_ok=True)
    texts = {"reviews": movie_reviews(), "tweets": tweets()}
    for place, (name, rows) in enumerate(texts.items()):
        training = replace(run, seed=100 * (place + 1) + seed, learning_rate=rate)
        trained(runs / name, training, [row.text for row in rows], root / "base")
    ends = (runs / "reviews", runs / "tweets", root / "base")
    found = transported(ends, run, chosen, CALIBRATION_TOKENS)
    measured = [{"seed": seed, "learning_rate": rate, **row} for row in found]
    note.write_text(json.dumps({"asked": asked, "rows": measured}, indent=2) + "\n")
    return measured


def smollm2_rows(work: Path, quick: bool) -> list[dict[str, Any]]:
    """The same of SmolLM2, once."""
    runs = finetunes.hot_runs(work, quick=quick)
    run = finetunes.hot(quick=quick)
    assert run.save_every is not None
    chosen = variants([run.steps // 2, run.steps], [run.steps // 2, run.steps], run)
    rows = transported((*runs, finetunes.base()), run, chosen, SMOLLM2_TOKENS)
    return [{"seed": run.seed, "learning_rate": run.learning_rate, **row} for row in rows]


def transported(
    ends: tuple[Path, Path, Path],
    run: Training,
    chosen: Sequence[tuple[int, int]],
    calibration_tokens: int,
) -> list[dict[str, Any]]:
    """Transport between two runs and their base; a row for each length and interval."""
    warnings.simplefilter("ignore", SignedAlignWarning)
    path, base_at = path_of_runs(*ends)
    every = run.save_every
    assert every is not None
    rows = []
    for length, interval in chosen:
        reach = length // every
        stride = interval // every
        found = transport_along(
            [path[base_at + offset] for offset in range(-reach, reach + 1, stride)],
            base=reach // stride,
            text=newspaper_sentences()[-HELD_OUT:],
            truth="identity",
            max_tokens=calibration_tokens,
            accept_weak=True,
        )
        size = found.size
        away = found.not_returned
        assert away is not None
        rows.append(
            {
                "steps": length,
                "interval": interval,
                **{way: found.accuracy[way]["sign_accuracy"] for way in WAYS},
                "not_lost": 1 - len(found.lost) / size,
                "right_of_not_lost": right_share(found, kept=True),
                "right_of_lost": right_share(found, kept=False),
                "returned": 1 - len(away) / size,
                "weakest_step": found.gauge.provenance["verdict"]["sure_fraction"],
            }
        )
        print(rows[-1], flush=True)
    return rows


def right_share(found: Trajectory, *, kept: bool) -> float | None:
    """The share of coordinates that are right among those that were kept, or lost."""
    lost = torch.zeros(found.size, dtype=torch.bool)
    lost[found.lost] = True
    chosen = ~lost if kept else lost
    right = ~found.gauge.element("residual").displaced
    return float(right[chosen].double().mean()) if bool(chosen.any()) else None


def variants(
    lengths: Sequence[int], intervals: Sequence[int], run: Training
) -> list[tuple[int, int]]:
    """Lengths at the closest interval, then the full length at wider ones."""
    every = run.save_every
    assert every is not None
    return [
        *((length, every) for length in lengths),
        *(
            (run.steps, interval)
            for interval in intervals
            if interval > every and not run.steps % interval
        ),
    ]


def curve(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the seeds of one learning rate, length and interval have in common, and their spread."""
    first = rows[0]
    shared = {key: first[key] for key in ("learning_rate", "steps", "interval")}
    summed = {}
    for key in (
        *WAYS,
        "not_lost",
        "right_of_not_lost",
        "right_of_lost",
        "returned",
        "weakest_step",
    ):
        values = [row[key] for row in rows if row[key] is not None]
        if values:
            summed[key] = {
                "mean": round(statistics.mean(values), 4),
                "deviation": round(statistics.stdev(values), 4) if len(values) > 1 else 0.0,
                "values": [round(value, 4) for value in values],
            }
    return {**shared, "seeds": [row["seed"] for row in rows], **summed}


def curves_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that differ in their seed only, put together."""
    groups: dict[tuple[float, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        key = row["learning_rate"], row["steps"], row["interval"]
        groups.setdefault(key, []).append(row)
    return [curve(group) for group in groups.values()]


def main() -> None:
    parser = parser_of(__doc__, "one seed, one rate, short runs", "the models")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2, once, instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--rates", type=float, nargs="+", default=LEARNING_RATES)
    parser.add_argument("--workers", type=int, default=1, help="seeds at a time, a thread each")
    arguments = parser.parse_args()
    if arguments.smollm2:
        rows = smollm2_rows(finetunes.directory(arguments.work, arguments.quick), arguments.quick)
        result = {
            "model": "SmolLM2-135M-Instruct",
            "run": asdict(finetunes.hot(quick=arguments.quick)),
            "calibration_tokens": SMOLLM2_TOKENS,
        }
    else:
        rows, result = small_models(arguments)
    record(
        "trajectories-smollm2" if arguments.smollm2 else "trajectories",
        {
            **result,
            "curves": curves_of(rows),
        },
        results_of(arguments),
    )


def small_models(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows for every seed, rate, length and interval, and what they were made with."""
    base, run, lengths = BASE, RUN, LENGTHS
    work = arguments.work / "trajectories"
    if arguments.quick:
        arguments.seeds, arguments.rates = [0], [MAIN_RATE]
        work = work.with_name("trajectories-quick")
        base, run, lengths = replace(base, steps=200), replace(run, steps=200), (100, 200)
    rows = []
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        # one rate after the other: the first one trains the bases, the others find them
        for rate in sorted(arguments.rates, key=lambda rate: rate != MAIN_RATE):
            seeds = arguments.seeds[: None if rate == MAIN_RATE else SEEDS_OF_OTHER_RATES]
            jobs = [pool.submit(measure, seed, rate, base, run, lengths, work) for seed in seeds]
            rows += [row for job in jobs for row in job.result()]
    return rows, {
        "model": "A byte-level Llama of 4 layers and 128 coordinates",
        "base": asdict(base),
        "run": asdict(run),
        "calibration_tokens": CALIBRATION_TOKENS,
    }


if __name__ == "__main__":
    main()
