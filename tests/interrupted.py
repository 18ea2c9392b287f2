"""Runs that are killed at random instants: ``python -m tests.interrupted --kills 200``.

One process loads the libraries and does every task once; each run that is killed is a fork of it.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch


@dataclass
class Task:
    """Something that reads ``inputs`` and writes ``out``."""

    inputs: Path
    out: Path
    write: Callable[[Path, bool], object]


def digest(place):
    """What a file or a directory holds, record included; None if there is nothing."""
    files = [place, place.with_name(f"{place.name}.signed_align.json")]
    if place.is_dir():
        files = sorted(place.rglob("*"))
    found = hashlib.blake2b()
    for file in files:
        if file.is_file():
            found.update(f"{file.relative_to(place.parent)}\n".encode() + file.read_bytes())
    return found.hexdigest() if place.exists() else None


def workplaces(out):
    return list(out.parent.glob(f".{out.name}.partial-*"))


def tasks(root):
    """Apply, port of a directory and of a file, and merge: each takes some tenths of a second."""
    import yaml
    from mergekit.options import MergeOptions

    from signed_align import apply, merge, port, scramble
    from tests import tiny

    size = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}
    model = tiny.build("llama", **size, vocab_size=4000)
    source = tiny.save(model, root / "apply" / "source", shard="4MB")
    gauge = scramble(source, root / "twins" / "large", seed=3, spaces=["all"])

    small = tiny.save(
        tiny.build("qwen2", tie_word_embeddings=False), root / "merge" / "source", shard="40KB"
    )
    second = scramble(small, root / "merge" / "twin", seed=4)
    second.save(root / "merge" / "gauge.safetensors")
    weight = {"weight": 0.5}
    models = [
        {"model": str(small), "parameters": weight},
        {
            "model": str(root / "merge" / "twin"),
            "parameters": {**weight, "gauge": str(root / "merge" / "gauge.safetensors")},
        },
    ]
    recipe = root / "merge" / "recipe.yml"
    recipe.write_text(
        yaml.safe_dump({"merge_method": "signed_align", "models": models, "dtype": "float32"})
    )

    vectors = root / "port" / "vectors"
    vectors.mkdir(parents=True)
    for number in range(12):
        torch.manual_seed(number)
        hook = f"blocks.{number % 2}.hook_resid_post"
        torch.save({hook: torch.randn(6000, tiny.WIDTH)}, vectors / f"{number}.pt")
    file = root / "port-file" / "vectors.pt"
    file.parent.mkdir()
    torch.save({"blocks.0.hook_resid_post": torch.randn(60_000, tiny.WIDTH)}, file)

    def ported(artifact):
        made_on = second.source.name
        return lambda out, force: port(artifact, second, out, made_on=made_on, force=force)

    outs = root / "outs"
    outs.mkdir()
    return {
        "apply": Task(
            source, outs / "moved", lambda out, force: apply(gauge, source, out, force=force)
        ),
        "port": Task(vectors, outs / "ported", ported(vectors)),
        "port of a file": Task(file.parent, outs / "ported.pt", ported(file)),
        "merge": Task(
            root / "merge",
            outs / "merged",
            lambda out, force: merge(recipe, out, MergeOptions(quiet=True), force=force),
        ),
    }


def fork(work):
    """Do something in a copy of this process; it ends with code 0 if the work did."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        torch.set_num_threads(1)
        work()
        code = 0
    finally:
        os._exit(code)


def finish(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def remove(out):
    for file in (out, out.with_name(f"{out.name}.signed_align.json")):
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink(missing_ok=True)


class Experiment:
    """One task, what it writes, how long that takes, and what kills have done to it."""

    def __init__(self, task):
        self.task, self.counts = task, Counter()
        task.write(task.out, False)  # charts are proved now
        self.inputs, self.new = digest(task.inputs), digest(task.out)
        self.durations = []
        remove(task.out)
        self.rerun(force=False)
        self.leave_earlier_output()
        self.earlier = digest(task.out)
        assert self.earlier != self.new

    @property
    def seconds(self):
        """What a run takes, as the machine is busy now."""
        return median(self.durations[-5:])

    def leave_earlier_output(self):
        """Make the output differ from the new one, and from every part of it."""
        out = self.task.out
        for file in [out] if out.is_file() else sorted(out.rglob("*")):
            if file.is_file():
                file.write_bytes(b"earlier" + file.read_bytes()[::-1])

    def rerun(self, *, force):
        out = self.task.out
        start = time.monotonic()
        assert finish(fork(lambda: self.task.write(out, force))) == 0, "the run failed"
        self.durations.append(time.monotonic() - start)
        assert digest(out) == self.new, "the run's result is another one"
        assert not workplaces(out), "the run left a workplace"

    def kill(self, seconds, *, force):
        """Kill one run after so many seconds; assert that what stands is complete."""
        out = self.task.out
        if not force:
            remove(out)
        else:
            if digest(out) != self.new:
                remove(out)
                self.rerun(force=False)
            self.leave_earlier_output()
        before = self.earlier if force else None
        child = fork(lambda: self.task.write(out, force))
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        code = finish(child)
        assert code in (0, -signal.SIGKILL), "the run failed by itself"
        left = bool(workplaces(out))
        found = digest(out)
        assert found in (before, self.new), "what stands is neither the earlier output nor the new"
        assert digest(self.task.inputs) == self.inputs, "an input is not as it was"
        self.counts["kills"] += 1
        self.counts["while running"] += code != 0
        self.counts["while writing"] += left
        self.counts["new output stood"] += found == self.new
        if left or self.counts["kills"] % 5 == 0:
            self.rerun(force=force or found is not None)
            self.counts["reruns"] += 1
        elif found is not None:
            self.rerun(force=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        experiments = {name: Experiment(task) for name, task in tasks(Path(folder)).items()}
        for number in range(options.kills):
            experiment = list(experiments.values())[number % len(experiments)]
            seconds = chance.uniform(0, 1.2) * experiment.seconds
            experiment.kill(seconds, force=bool(number // len(experiments) % 2))
        left = [str(file) for file in (Path(folder) / "outs").glob(".*")]
    found = {
        name: {"seconds": round(one.seconds, 3), **one.counts} for name, one in experiments.items()
    }
    print(json.dumps({"left behind": left, **found}))


if __name__ == "__main__":
    main()
