"""What the benchmarks share: where results go, and a note of the machine and the day."""

import json
import os
import platform
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SETTLE_SECONDS = 8


def alternate(
    first: Callable[[], float], second: Callable[[], float], rounds: int
) -> tuple[float, float]:
    """Median seconds of two actions that take turns.

    Before each one the machine settles, so that both find it in the same state: nothing is left to
    write back, and a virtual machine has given freed memory back to its host (which it does after a
    second or two, and pays for when it needs the memory again).
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for action, taken in zip((first, second), times, strict=True):
            os.sync()
            time.sleep(SETTLE_SECONDS)
            taken.append(action())
    return statistics.median(times[0]), statistics.median(times[1])


def parser_of(description: str | None, quick: str, work: str | None = None) -> ArgumentParser:
    """The options that experiments share; ``quick`` and ``work`` say what two of them do.

    A script that keeps nothing in a working directory gives no ``work``.
    """
    parser = ArgumentParser(description=description)
    if work is not None:
        parser.add_argument("--work", type=Path, default=Path("build"), help=f"keeps {work}")
    parser.add_argument("--results", type=Path, help="directory of the result")
    parser.add_argument(
        "--quick", action="store_true", help=f"{quick}; kept only where --results says"
    )
    return parser


def results_of(arguments: Namespace) -> Path | None:
    """Where a result is kept: a quick one only where ``--results`` says."""
    given: Path | None = arguments.results
    return given or (None if arguments.quick else RESULTS)


def record(name: str, result: dict[str, Any], results: Path | None = RESULTS) -> None:
    """Print a result with machine, date and command, and keep it in a directory if there is one."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    result = {
        **result,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        (results / f"{name}.json").write_text(text + "\n")
