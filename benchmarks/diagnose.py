"""What `diagnose` says of pairs of which it is known what relates them.

Ten easy and seven harder pairs of each of seven families of small models (`labelled_pairs.py`), and
SmolLM2 with itself, twins, a rotated copy and a model of random weights.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import finetunes
import torch
from common import parser_of, record, results_of
from controls import random_models_of_shape
from labelled_pairs import FAMILIES, TOKENS, WIDTH, Labelled, labelled_pairs, load, rotated, text
from transformers import AutoTokenizer

from signed_align import diagnose, scramble
from signed_align.diagnosis import Diagnosis, Relation

SMOLLM2 = "SmolLM2-135M-Instruct"


def real_pairs(root: Path) -> Iterator[Labelled]:
    """SmolLM2, and what was made of it; each is made when it is asked for."""
    base = finetunes.base()

    def pair(label: str, target: Path, verdict: str) -> Labelled:
        return Labelled(SMOLLM2, label, base, target, verdict)

    yield pair("identical", base, "identical")
    scramble(base, root / "b_d", seed=1)
    yield pair("B_d", root / "b_d", "signed_permutation")
    scramble(base, root / "all", seed=2, spaces=["all"])
    yield pair("all spaces", root / "all", "signed_permutation")
    rotated(load(base).float()).to(torch.bfloat16).save_pretrained(root / "rotated")
    AutoTokenizer.from_pretrained(base).save_pretrained(root / "rotated")
    yield pair("dense rotation", root / "rotated", "dense_rotation")
    for path in random_models_of_shape(root, 1):
        yield pair("random weights", path, "unrelated")


def row_of(pair: Labelled, found: Diagnosis, seconds: float) -> dict[str, Any]:
    """What is kept of a pair."""
    coordinates = pair.coordinates or pair.verdict
    distances = [entry.get("relative_distance") for entry in found.evidence]
    distance = next((value for value in distances if value is not None), None)
    return {
        "family": pair.family,
        "label": pair.label,
        "expected": pair.verdict,
        "verdict": found.verdict.value,
        "coordinates": found.coordinates.value if found.coordinates else None,
        "right": found.verdict == pair.verdict and found.coordinates == coordinates,
        "portable_by_mistake": bool(
            found.coordinates
            and found.coordinates.is_portable
            and not Relation(coordinates).is_portable
        ),
        "confidence": round(found.confidence, 4),
        "stage": found.stage,
        "relative_distance": None if distance is None else round(distance, 4),
        "seconds": round(seconds, 2),
    }


def judged(pairs: Iterator[Labelled], sentences: Sequence[str] | None) -> list[dict[str, Any]]:
    """What is said of all pairs."""
    rows = []
    for pair in pairs:
        start = time.perf_counter()
        found = diagnose(pair.source, pair.target, text=sentences)
        rows.append(row_of(pair, found, time.perf_counter() - start))
        mark = "" if rows[-1]["right"] else "   WRONG"
        print(f"{pair.name:36} {found.verdict.value} ({found.confidence:.2f}){mark}", flush=True)
    return rows


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often which label was called what, and what that cost."""
    labels = list(dict.fromkeys(row["label"] for row in rows))
    of = {label: [row for row in rows if row["label"] == label] for label in labels}
    return {
        "pairs": len(rows),
        "errors": sum(not row["right"] for row in rows),
        "portable_by_mistake": sum(row["portable_by_mistake"] for row in rows),
        "labels": {
            label: {
                "expected": some[0]["expected"],
                "pairs": len(some),
                "right": sum(row["right"] for row in some),
                "verdicts": dict(Counter(row["verdict"] for row in some)),
                "stages": dict(Counter(row["stage"] for row in some)),
                "least_confidence": min(row["confidence"] for row in some),
                "seconds": max(row["seconds"] for row in some),
            }
            for label, some in of.items()
        },
    }


def print_confusion(rows: list[dict[str, Any]]) -> None:
    """A table: what pairs are, by what they are called."""
    names = [relation.value for relation in Relation]
    counts = Counter((row["expected"], row["verdict"]) for row in rows)
    print(f"{'is':24}" + "".join(f"{name[:12]:>14}" for name in names))
    for expected in names:
        print(f"{expected:24}" + "".join(f"{counts[expected, name]:14}" for name in names))


def main() -> None:
    options = parser_of(__doc__, "one family, and no SmolLM2").parse_args()
    start = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other take most of a tiny model's time
    with tempfile.TemporaryDirectory() as directory:
        rows = judged(labelled_pairs(Path(directory), quick=options.quick), text())
    print_confusion(rows)
    torch.set_num_threads(threads)
    real: list[dict[str, Any]] = []
    if not options.quick:
        with tempfile.TemporaryDirectory() as directory:
            real = judged(real_pairs(Path(directory)), None)
    record(
        "diagnose",
        {
            "models": f"{', '.join(FAMILIES)}: 2 layers, {WIDTH} coordinates, {TOKENS} tokens",
            **summed(rows),
            "rows": rows,
            "real": real,
            "seconds": round(time.perf_counter() - start, 1),
        },
        results_of(options),
    )


if __name__ == "__main__":
    main()
