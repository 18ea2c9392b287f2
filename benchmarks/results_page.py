"""Writes docs/results.md from the committed results: ours, beside the paper's where it has one.

Every table says which command made its numbers, on which machine and day. Nothing is measured
here.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS

from signed_align.demo.run import PAPER

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
PLOTS = Path("results-plots")
ONE_LAYER, FEW_TOKENS = "15", 100
INTRODUCTION = """\
# Results

Made by `make docs/results.md` from [benchmarks/results](../benchmarks/results); do not edit. B_d
are signed permutations, S_d permutations alone. The paper's figures are of the same kinds of
experiment on other models: what can be compared is what arrives, not the level. `make
benchmarks-quick` runs all of these at reduced size.
"""


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown; floats with three decimals, None as a dash."""

    def cell(value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = [list(header), ["---"] * len(header), *([cell(v) for v in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def recovery(data: dict[str, Any]) -> str:
    """The ceiling; accuracy by tokens at one layer, and by layer with few tokens."""
    ceiling = table(
        ["share of + signs", "raw signed", "S_d", "B_d"],
        [
            [row["positive_fraction"], row["signed"], row["permutation"], row["sign_marginalized"]]
            for row in data["ceiling"]
        ],
    )
    grid = [row for row in data["grid"] if row["objective"] == "sign_marginalized"]
    noises = list(dict.fromkeys(row["noise"] for row in grid))
    counts = sorted({row["tokens"] for row in grid if row["tokens"] is not None})
    layers = list(dict.fromkeys(row["layers"] for row in grid if row["tokens"] is not None))
    few = next(count for count in counts if count >= FEW_TOKENS)

    def cell(noise: str, layer: str, tokens: int | None) -> str | None:
        found = [
            f"{row['sign_accuracy']:.3f} ({row['median_margin']:.2f})"
            for row in grid
            if (row["noise"], row["layers"], row["tokens"]) == (noise, layer, tokens)
        ]
        return found[0] if found else None

    tokens = table(
        ["tokens", *noises],
        [
            *([count, *(cell(noise, ONE_LAYER, count) for noise in noises)] for count in counts),
            ["weights", *(cell(noise, "weights", None) for noise in noises)],
        ],
    )
    by_layer = table(
        ["hidden state", *noises],
        [[layer, *(cell(noise, layer, few) for noise in noises)] for layer in layers],
    )
    return f"""\
Accuracy counts a coordinate if its partner and its sign are right. {data["model"]},
{data["coordinates"]} coordinates.

The ceiling: an assignment on raw correlations is right where the true sign is +, and nowhere else.
Largest distance between its accuracy and that share: {data["largest_distance_from_ceiling"]:.4f}.

{ceiling}

Accuracy of the sign-marginalised match and, in brackets, the median margin, by tokens of
calibration text, from hidden state {ONE_LAYER} alone; the last row from weights. Rounding is to
nearest, 8 bits a row at a time, 4 and 3 bits 32 entries at a time:

{tokens}

By hidden state (0 is the embedding), with {few} tokens:

{by_layer}

The lowest accuracy of the sign-marginalised match anywhere in the grid is
{min(row["sign_accuracy"] for row in grid):.3f}."""


def controls(data: dict[str, Any]) -> str:
    """Trials in which the command did as it must."""
    rows = []
    for name, by_method in data["controls"].items():
        for method, found in by_method.items():
            sure = found["sure_fraction"]
            rows.append(
                [
                    name,
                    method,
                    f"{found['as_expected']} of {found['trials']}",
                    f"{sure['least']:.3f} to {sure['most']:.3f}",
                ]
            )
    return f"""\
On unrelated models and on shuffled pairs `signed-align gauge` has to end with exit code 3 and write
nothing; for a model and itself it has to report the identity. A gauge needs half of the coordinates
to be sure. {data["model"]}: half of the unrelated pairs
are small Llamas trained from different seeds, half are SmolLM2 and a model of its shape with random
weights. The identity from weights has nothing random in it: its trials are one, repeated.

{table(["control", "evidence", "as it must", "share of sure coordinates"], rows)}"""


def trajectories(data: dict[str, Any]) -> str:
    """Accuracy by length at the main learning rate, then by rate and interval."""

    def shown(value: dict[str, Any]) -> str:
        if len(value["values"]) == 1:
            return f"{value['mean']:.3f}"
        return f"{value['mean']:.3f} ± {value['deviation']:.3f}"

    rows = [
        [
            f"{curve['learning_rate']:g}",
            curve["steps"],
            curve["interval"],
            len(curve["seeds"]),
            *(shown(curve[way]) for way in ("transport", "via_base", "endpoint")),
            f"{100 * (curve['transport']['mean'] - curve['endpoint']['mean']):+.1f}",
            shown(curve["not_lost"]),
            *(
                shown(curve[way]) if way in curve else None
                for way in ("right_of_not_lost", "right_of_lost")
            ),
        ]
        for curve in data["curves"]
    ]
    header = [
        "learning rate", "steps", "saved every", "seeds", "transport", "via base", "endpoint",
        "transport − endpoint, points", "not lost", "right of these", "right of the lost",
    ]  # fmt: skip
    return f"""\
{data["model"]}: two runs of one base, on movie reviews and on tweets, AdamW without
warm-up or clipping, at a constant learning rate, with weight decay
{data["run"]["weight_decay"]:g}. The true gauge between their ends is the identity; accuracy is the
share of coordinates matched with themselves, with sign +, from
{data["calibration_tokens"]} tokens of newspaper sentences that no run was trained on. Mean and, of
several seeds, standard deviation; the last two columns are over the seeds that have such
coordinates.

{table(header, rows)}"""


def steering(data: dict[str, Any]) -> str:
    """What each way of moving leaves of a direction's effect."""
    rows = [
        [
            name,
            way,
            one["effect"],
            one["retained"],
        ]
        for name, concept in data["concepts"].items()
        for way, one in concept["retention"].items()
    ]
    turned = data["reversed"]
    return f"""\
The shift of log odds, in nats, that a direction causes on a twin: of praise over criticism, and of
refusing harmless instructions over following them. Gauges are recovered from weights.

{table(["direction", "moved by", "effect", "retained"], rows)}

S_d images of random signs are about orthogonal to the direction. Of several layers and twins the
image that points away the most has a cosine of {turned["cosine"]:.3f}, and an effect of
{turned["effects"]["S_d"]:.3f} where the direction at home has {turned["effects"]["home"]:.3f}."""


def demo(data: dict[str, Any]) -> str:
    """LoRA, SAE and merges, beside the paper's figures."""
    accuracy, error = data["lora"]["accuracy"], data["sae"]["nmse"]
    lora = table(
        ["LoRA", "accuracy", "paper"],
        [[name, value, PAPER["lora"].get(name)] for name, value in accuracy.items()],
    )
    sae = table(
        ["SAE", "normalised squared error", "paper"],
        [[name, value, PAPER["sae"].get(name)] for name, value in error.items()],
    )
    return f"""\
A LoRA that was trained on reviews with two arbitrary label words, on {data["lora"]["examples"]}
held-out examples through lm-eval; the base model is at chance.

{lora}

A small top-k SAE at `{data["sae"]["hook_name"]}`, on {data["sae"]["tokens"]} held-out tokens. Its
error is as large at home; what counts is that moving adds none.

{sae}"""


def barriers(data: dict[str, Any]) -> str:
    """Peaks above the chord, in nats per token."""
    ways = list(data["pairs"][0]["paths"])
    rows = [
        [pair["pair"], *(pair["paths"][way]["barrier_nats"] for way in ways)]
        for pair in data["pairs"]
    ]
    return f"""\
Peak of the loss above the chord, in nats per token, on the path to a scrambled twin of the second
model; beside it the path to the second model itself, in the same coordinates. Gauges are recovered
from weights. In the paper the barrier under B_d is {PAPER["barrier"]["signed permutation"]:.3f}.

{table(["pair", *ways], rows)}"""


def resume(data: dict[str, Any]) -> str:
    """How far resumed training departs from training that was not moved."""
    rows = [
        [
            name,
            f"{arm['largest_relative_difference']:.1e}",
            f"{arm['parameters_from_home_by_way']:.1e}",
            arm["retained"],
        ]
        for name, arm in data["arms"].items()
    ]
    header = ["resumed with", "loss of a step", "final weights", "retained"]
    return f"""\
{data["model"]} itself, trained by transformers' Trainer with {data["optimizer"]} at
{data["learning_rate"]:g}, saved at step {data["half"]} of {data["whole"]}, moved to a twin that is
scrambled in every space, and resumed there on the same batches, with the weights moved right. Of
each run: the largest relative departure of a step's loss from home's; the distance of the final
weights, moved back, from home's, as a share of the way that home went since the checkpoint; and how
much of home's fall of the held-out loss it achieves. The last figure does not tell a correct resume
from a fresh start, which over six steps can even do better; the departures do.

{table(header, rows)}"""


def audit(data: dict[str, Any]) -> str:
    """How often claims about coordinates survive a change of coordinates."""
    claims = {name: found for name, found in data.items() if isinstance(found, dict)}
    rows = [
        [
            name,
            found["chance"]["overlap"],
            *(found[way]["overlap"] for way in ("as_stated", "true_gauge", "recovered_gauge")),
        ]
        for name, found in claims.items()
    ]
    header = ["claim", "chance, k/d", "as stated", "by the true gauge", "by the recovered gauge"]
    return f"""\
The {data["k"]} coordinates at `{data["hook"]}` that matter for sentiment, recomputed on
{data["twins"]} scrambled twins of {data["model"]}: the share of them that is found again.

{table(header, rows)}"""


def pairs(data: dict[str, Any]) -> str:
    """What the tool says of fine-tuned pairs, and what porting between them costs."""
    found = [
        [
            pair["pair"],
            method,
            said["finding"],
            said["right"],
            said["sure_fraction"],
            said["margin"]["median"],
        ]
        for pair in data["pairs"]
        for method, said in pair["recovery"].items()
    ]
    costs = [
        [
            pair["pair"],
            way,
            measured["direction_effect"],
            measured["lora_accuracy"],
        ]
        for pair in data["pairs"]
        if "as_it_is" in pair
        for way, measured in (
            ("as they are", pair["as_it_is"]),
            *((f"by {method}", measured) for method, measured in pair["ported"].items()),
        )
    ]
    header = ["pair", "evidence", "verdict", "right", "sure", "median margin"]
    return f"""\
Training moves no coordinate, so the truth is the identity, and nothing has to be moved.
{data["model"]}.

{table(header, found)}

What a sentiment direction and a LoRA, both made on the base, do on the second model: as they are,
and moved through the gauge that was recovered. Where that gauge is the identity porting changes
nothing, and the figures as they are are repeated.

{table(["pair", "moved", "direction, nats", "LoRA accuracy"], costs)}"""


Section = tuple[str, str, Callable[[dict[str, Any]], str]]
SECTIONS: tuple[Section, ...] = (
    ("recovery", "Recovery, and its ceiling", recovery),
    ("controls", "Negative controls", controls),
    ("trajectories", "Parallel transport", trajectories),
    ("trajectories-smollm2", "Parallel transport on SmolLM2", trajectories),
    ("demo", "Transfer: a LoRA and an SAE", demo),
    ("steering", "Transfer: steering", steering),
    ("resume", "Transfer: resuming training", resume),
    ("barriers", "Merges: barriers", barriers),
    ("audit", "Gauge sweeps of claims about coordinates", audit),
    ("pairs", "Fine-tuned pairs", pairs),
)


def origin(name: str, data: dict[str, Any], folder: str) -> str:
    """Which command made a result, where and when."""
    command = data.get("command", "make demo")
    file = f"[{name}.json]({folder}/{name}.json)"
    return f"*`{command}`, {data['machine']}, {data['date']}, {file}*"


def plots_of(name: str, folder: Path) -> list[str]:
    """The plots that ``signed-align report`` drew of a result: 07-NAME-what.png."""
    names = [section for section, *_ in SECTIONS]

    def owner(plot: Path) -> str | None:
        stem = plot.stem.partition("-")[2]
        return max((one for one in names if stem.startswith(f"{one}-")), key=len, default=None)

    found = sorted(folder.glob("*.png"))
    return [plot.name for plot in found if owner(plot) == name]


def page(results: Path, out: Path = PAGE) -> str:
    """The whole page, to stand at ``out``; raises FileNotFoundError if a result is missing."""
    parts = [INTRODUCTION]
    for name, title, section in SECTIONS:
        data = json.loads((results / f"{name}.json").read_text())
        plots = [f"![{title}]({PLOTS / plot})" for plot in plots_of(name, out.parent / PLOTS)]
        parts.append(
            "\n\n".join(
                [
                    f"## {title}",
                    section(data),
                    *plots,
                    origin(name, data, os.path.relpath(results, out.parent)),
                ]
            )
        )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=PAGE)
    arguments = parser.parse_args()
    arguments.out.write_text(page(arguments.results, arguments.out))


if __name__ == "__main__":
    main()
