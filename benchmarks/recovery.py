"""What recovery of SmolLM2's gauge needs and withstands: tokens, layers and noise.

Each twin is scrambled, and in addition differs from its source: its weights are rounded to 8, 4 or
3 bits, it was fine-tuned, lightly or hot, or both models run in bfloat16. The ceiling: true gauges
with a share of positive signs from 0 to 1. An assignment on raw correlations can be right only
where the sign is positive.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finetunes
import torch
from common import parser_of, record, results_of
from torch import Tensor

from signed_align import Checkpoint, Gauge, SignedPermutation, apply, scramble
from signed_align.demo.assets import newspaper_sentences
from signed_align.matching import Objective
from signed_align.recovery import Evidence, evidence_from_activations, evidence_from_weights

TOKENS = (18, 36, 72, 144, 288, 576, 1152, 2304)
WORDS = 12
"""Sentences are cut to so many words, so that small numbers of tokens can be had."""
LAYERS = (0, 1, 8, 15, 22, 29, 30)
FRACTIONS = tuple(tenth / 10 for tenth in range(11))
CEILING_TOKENS = 1152
GROUP = 32


def rounded(weight: Tensor, bits: int, group: int | None) -> Tensor:
    """A matrix rounded to integers of ``bits`` bits, scaled by the largest of a row or group."""
    rows = weight.float() if group is None else weight.float().unflatten(-1, (-1, group))
    limit = 2 ** (bits - 1) - 1
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12) / limit
    return ((rows / scale).round() * scale).reshape(weight.shape).to(weight.dtype)


def quantised(source: Path, out: Path, bits: int, group: int | None = None) -> Path:
    """A checkpoint whose matrices are rounded, each by itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(rounded(parameter, bits, group))
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    return out


def short_sentences() -> list[str]:
    """The beginnings of newspaper sentences."""
    return [" ".join(sentence.split()[:WORDS]) for sentence in newspaper_sentences()]


def scores(evidence: Evidence, truth: Gauge) -> list[dict[str, Any]]:
    """What each objective gets right."""
    rows = []
    for objective in Objective:
        gauge = evidence.gauge(objective)
        rows.append(
            {
                "objective": objective.value,
                **gauge.element("residual").agreement(truth.element("residual")),
                "median_margin": float(gauge.margins["residual"].median()),
                "verdict": gauge.provenance["verdict"]["finding"],
            }
        )
    return rows


def grid(
    noise: str, source: Path, twin: Path, truth: Gauge, tokens: tuple[int, ...], dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Every number of tokens by every layer by every objective, and from weights."""
    ends = Checkpoint.open(source), Checkpoint.open(twin)
    groups = {**{str(layer): [layer] for layer in LAYERS}, "all": None}
    rows = []
    for count in tokens:
        found = evidence_from_activations(
            *ends, short_sentences(), layer_groups=groups, max_tokens=count, dtype=dtype
        )
        for layers, evidence in found.items():
            shared = {"noise": noise, "layers": layers, "tokens": evidence.provenance["tokens"]}
            rows += [{**shared, **row} for row in scores(evidence, truth)]
    evidence = evidence_from_weights(*ends)
    shared = {"noise": noise, "layers": "weights", "tokens": None}
    return rows + [{**shared, **row} for row in scores(evidence, truth)]


def noisy(work: Path, root: Path, tokens: tuple[int, ...], quick: bool) -> list[dict[str, Any]]:
    """The grid for each noise; every noise has the same true gauge."""
    base = finetunes.base()
    tuned = finetunes.light(work, quick=quick)
    hot, _ = finetunes.hot_ends(work, quick=quick)
    makers: dict[str, tuple[Callable[[], Path], torch.dtype]] = {
        "none": (lambda: base, torch.float32),
        "bfloat16 arithmetic": (lambda: base, torch.bfloat16),
        "8-bit weights": (lambda: quantised(base, root / "int8", 8), torch.float32),
        "4-bit weights": (
            lambda: quantised(base, root / "int4", 4, GROUP),
            torch.float32,
        ),
        "3-bit weights": (lambda: quantised(base, root / "int3", 3, GROUP), torch.float32),
        "light fine-tune": (lambda: tuned, torch.float32),
        "hot fine-tune": (lambda: hot, torch.float32),
    }
    rows = []
    if quick:
        makers = {noise: makers[noise] for noise in ("none", "3-bit weights", "hot fine-tune")}
    for noise, (make, dtype) in makers.items():
        start = time.perf_counter()
        twin = root / "twin"
        made = make()
        truth = scramble(made, twin, seed=0, force=True)
        rows += grid(noise, base, twin, truth, tokens, dtype)
        print(f"{noise}: {time.perf_counter() - start:.0f} s", flush=True)
    return rows


def ceiling(root: Path, fractions: tuple[float, ...], tokens: int) -> list[dict[str, Any]]:
    """Accuracy of the three objectives on twins with a given share of positive signs."""
    source = Checkpoint.open(finetunes.base())
    size = source.chart.width
    rows = []
    for number, fraction in enumerate(fractions):
        generator = torch.Generator().manual_seed(number)
        perm = torch.randperm(size, generator=generator)
        sign = torch.ones(size, dtype=torch.int8)
        sign[torch.randperm(size, generator=generator)[round(fraction * size) :]] = -1
        truth = Gauge({"residual": SignedPermutation(perm, sign)}, source=source.identity)
        apply(truth, finetunes.base(), root / "twin", force=True)
        twin = Checkpoint.open(root / "twin")
        (evidence,) = evidence_from_activations(
            source,
            twin,
            newspaper_sentences(),
            layer_groups={"all": None},
            max_tokens=tokens,
        ).values()
        positive = float((sign > 0).double().mean())
        row: dict[str, Any] = {"positive_fraction": positive}
        for score in scores(evidence, truth):
            row[score["objective"]] = score["sign_accuracy"]
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    arguments = parser_of(__doc__, "less text, fewer fractions", "the models").parse_args()
    tokens, fractions, ceiling_tokens = TOKENS, FRACTIONS, CEILING_TOKENS
    if arguments.quick:
        tokens, fractions, ceiling_tokens = (144, 576), (0.0, 0.5, 1.0), 576
    work = finetunes.directory(arguments.work, arguments.quick)
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as directory:
        root = Path(directory)
        rows = ceiling(root, fractions, ceiling_tokens)
        result = {
            "model": "SmolLM2-135M-Instruct",
            "coordinates": Checkpoint.open(finetunes.base()).chart.width,
            "ceiling_tokens": ceiling_tokens,
            "ceiling": rows,
            "largest_distance_from_ceiling": max(
                abs(row["signed"] - row["positive_fraction"]) for row in rows
            ),
            "grid": noisy(work, root, tokens, arguments.quick),
        }
    record("recovery", result, results_of(arguments))


if __name__ == "__main__":
    main()
