"""The long run: ``python -m tests.fuzz --inputs 100000 --seed 0``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.runner import run_target


def main() -> int:
    """Run all targets, or one; exit code 1 if anything failed."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="in all, or of the target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=list(TARGETS))
    parser.add_argument("--number", type=int, help="run this one input of the target")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="summary and failures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.number is not None and not options.target:
        parser.error("--number needs --target")
    shares = sum(target.share for target in TARGETS.values())
    counts = {name: -(-options.inputs * target.share // shares) for name, target in TARGETS.items()}
    if options.target:
        counts = {options.target: 1 if options.number is not None else options.inputs}
    found: dict[str, Any] = {}
    for name, count in counts.items():
        found[name] = run_target(name, count, options.seed, options.out, options.number or 0)
        line = {key: value for key, value in found[name].items() if key != "kept"}
        print(f"{name}: {json.dumps(line)}", flush=True)
    summary = {
        "seed": options.seed,
        "inputs": sum(one["inputs"] for one in found.values()),
        "returns": sum(one["returns"] for one in found.values()),
        "refusals": dict(sum((Counter(one["refusals"]) for one in found.values()), Counter())),
        "failures": sum(one["failures"] for one in found.values()),
        "seconds": round(sum(one["seconds"] for one in found.values()), 1),
        "targets": found,
    }
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps({key: value for key, value in summary.items() if key != "targets"}, indent=2))
    return 1 if summary["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
