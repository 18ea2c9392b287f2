"""Many inputs of a target, in a process of its own.

One that dies or stops answering is noticed, with its last input, and another goes on behind it. The
inputs of a seed are always the same.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

SILENCE = 120.0
"""Seconds without an answer after which a process hangs where no alarm reaches it."""

MOST_KEPT = 5
"""Failures alike of one target that are kept; the others are counted."""


def source_of(seed: int, target: str, number: int) -> Random:
    """The chance that one input is drawn from."""
    return Random(f"{seed} {target} {number}")


def _quiet() -> None:
    import logging
    import warnings

    import torch
    from transformers.utils import logging as transformers_logging

    from signed_align import progress

    torch.set_num_threads(1)
    progress.quiet.set(True)
    warnings.simplefilter("ignore")
    transformers_logging.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    os.fsync = lambda _: None  # what survives a power cut is not what is tried here
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # progress bars of mergekit, and what C code prints


def _remember(world: Any) -> None:
    """Read the config of the sample model once, and make its chart once: they do not change."""
    from signed_align import Checkpoint
    from signed_align.adapters import artifact

    chart_of, skeleton = artifact._chart_of, artifact.skeleton
    gauges = [world.gauge, world.residual]
    charts = {id(gauge): chart_of(gauge.source, gauge) for gauge in gauges}
    skeletons = {id(gauge.source.config): skeleton(gauge.source.config) for gauge in gauges}
    artifact._chart_of = lambda model, gauge: charts.get(id(gauge)) or chart_of(model, gauge)
    artifact.skeleton = lambda config: skeletons.get(id(config)) or skeleton(config)

    own, sample = world.single["config.json"], Checkpoint.open(world.source)
    for name in ("config", "chart"):
        known, made = getattr(sample, name), Checkpoint.__dict__[name].func

        def remembered(checkpoint: Any, known: Any = known, made: Any = made) -> Any:
            text = (checkpoint.path / "config.json").read_bytes()
            return known if text == own else made(checkpoint)

        setattr(Checkpoint, name, property(remembered))


def _work(
    answers: Connection, root: Path, seed: int, name: str, first: int, last: int, keep: Path
) -> None:
    """Run some inputs of one target in this process, and tell of each."""
    _quiet()
    from tests.fuzz.guard import Guard, limit_memory
    from tests.fuzz.targets import Bench

    bench = Bench(root, Guard())
    bench.warm(name)
    _remember(bench.world)
    limit_memory()
    answers.send({"ready": True})
    for number in range(first, last):
        steps = bench.prepare(name, source_of(seed, name, number))
        started = time.perf_counter()
        verdict = bench.judge(steps)
        seconds = time.perf_counter() - started
        place = ""
        if verdict.failures:
            copied = keep / f"{name}-{seed}-{number}"
            shutil.rmtree(copied, ignore_errors=True)
            shutil.copytree(bench.inside, copied, symlinks=True)
            place = str(copied)
        answers.send(
            {
                "number": number,
                "seconds": seconds,
                "outcome": verdict.outcome,
                "failures": verdict.failures,
                "place": place,
            }
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    answers.send({"peak": peak})


def run_target(name: str, inputs: int, seed: int, keep: Path, start: int = 0) -> dict[str, Any]:
    """Run a target; returns its line of the summary."""
    outcomes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    slowest = {"seconds": 0.0, "number": -1}
    peak, began, done, stop = 0, time.perf_counter(), start, start + inputs

    def fail(number: int, what: list[str], place: str) -> None:
        kind = what[0].strip().splitlines()[-1][:80]
        kinds[kind] += 1
        if kinds[kind] <= MOST_KEPT:
            failures.append({"number": number, "what": what, "input": place})
            print(f"  {name} {number}: {kind}", flush=True)
        elif place:
            shutil.rmtree(place)

    while done < stop:
        with tempfile.TemporaryDirectory(prefix="signed-align-fuzz-") as directory:
            root = Path(directory)
            ours, theirs = multiprocessing.Pipe(duplex=False)
            worker = multiprocessing.get_context("spawn").Process(
                target=_work, args=(theirs, root, seed, name, done, stop, keep)
            )
            worker.start()
            theirs.close()
            ready = False
            try:
                while ours.poll(SILENCE):
                    answer = ours.recv()
                    ready = True
                    if "peak" in answer:
                        peak = max(peak, answer["peak"])
                        break
                    if "ready" in answer:
                        continue
                    done = answer["number"] + 1
                    outcomes[answer["outcome"]] += 1
                    if answer["seconds"] > slowest["seconds"]:
                        slowest = {"seconds": answer["seconds"], "number": answer["number"]}
                    if answer["failures"]:
                        fail(answer["number"], answer["failures"], answer["place"])
                    if done % 1000 == 0:
                        rate = (done - start) / (time.perf_counter() - began)
                        print(f"  {name}: {done - start} of {inputs}, {rate:.0f}/s", flush=True)
            except EOFError:
                pass
            if worker.is_alive():
                worker.join(5)
            died = "it stopped answering" if worker.is_alive() else f"exit code {worker.exitcode}"
            if worker.is_alive():
                worker.kill()
            worker.join()
            if done < stop:
                if not ready:
                    raise SystemExit(f"the process of {name} does not start ({died})")
                last = keep / f"{name}-{seed}-{done}"
                place = root / "inputs" / "deep" / "in"
                if place.is_dir():
                    shutil.copytree(place, last, symlinks=True, dirs_exist_ok=True)
                outcomes["dead process"] += 1
                fail(done, [f"the process died: {died}"], str(last))
                done += 1
    return {
        "inputs": inputs,
        "returns": outcomes.pop("returns", 0),
        "refusals": dict(outcomes.most_common()),
        "failures": sum(kinds.values()),
        "kept": failures,
        "seconds": round(time.perf_counter() - began, 1),
        "slowest": {**slowest, "seconds": round(slowest["seconds"], 3)},
        "peak_bytes": peak,
    }
