"""Barriers between SmolLM2, a twin, and hot fine-tunes: straight, by permutations, by the gauge.

Of a pair in the same coordinates the straight path is the right one. Of a pair whose second model
was scrambled, the straight path crosses a barrier, and what an alignment takes away of it is
measured: by permutations alone (S_d) and by signed permutations (B_d), both recovered from
weights.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import finetunes
from common import parser_of, record, results_of

from signed_align import Checkpoint, recover, scramble
from signed_align.barrier import Barrier, LossPath
from signed_align.demo.assets import newspaper_sentences

TOKENS = 1024
POINTS = 7


def summary(path: LossPath) -> dict[str, Any]:
    """A path's barrier and losses, in nats per token."""
    return {
        "barrier_nats": round(path.barrier, 5),
        "alphas": path.alphas,
        "losses": [round(loss, 5) for loss in path.losses],
        "chord": [round(loss, 5) for loss in path.chord],
    }


def main() -> None:
    arguments = parser_of(__doc__, "short fine-tunes, few points", "the fine-tunes").parse_args()
    tokens, points = (256, 3) if arguments.quick else (TOKENS, POINTS)
    start = time.perf_counter()
    work = finetunes.directory(arguments.work, arguments.quick)
    ends = finetunes.hot_ends(work, quick=arguments.quick)
    base = finetunes.base()
    rows = []
    with tempfile.TemporaryDirectory(dir=work) as directory:
        for name, source, target in (
            ("the base", base, base),
            ("fine-tunes on reviews and tweets", *ends),
        ):
            barrier = Barrier(Checkpoint.open(source), newspaper_sentences(), max_tokens=tokens)
            twin = Path(directory) / "twin"
            scramble(target, twin, seed=0, force=True)
            end = Checkpoint.open(twin)
            paths = {
                "same coordinates": barrier.path(Checkpoint.open(target), points=points),
                "straight": barrier.path(end, points=points),
            }
            for group, objective in (("S_d", "permutation"), ("B_d", "sign_marginalized")):
                gauge = recover(source, twin, objective=objective, accept_weak=True)
                paths[group] = barrier.path(end, gauge, points=points)
            rows.append(
                {"pair": name, "paths": {way: summary(path) for way, path in paths.items()}}
            )
            print(rows[-1], flush=True)
    record(
        "barriers",
        {
            "model": "SmolLM2-135M-Instruct",
            "loss_tokens": tokens,
            "pairs": rows,
            "seconds": round(time.perf_counter() - start, 1),
        },
        results_of(arguments),
    )


if __name__ == "__main__":
    main()
