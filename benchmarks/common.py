"""What the benchmarks share: where results go, and a note of the machine and the day."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def alternate(
    first: Callable[[], float], second: Callable[[], float], rounds: int
) -> tuple[float, float]:
    """Median seconds of two actions that take turns, so that both see the same machine."""
    times = [(first(), second()) for _ in range(rounds)]
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times)


def record(name: str, result: dict[str, Any]) -> None:
    """Print a result and keep it in ``benchmarks/results`` with machine, date and command."""
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
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")
