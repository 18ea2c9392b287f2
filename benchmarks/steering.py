"""A sentiment direction on SmolLM2 and on a twin: how much of its effect arrives.

The direction is the difference of mean activations at the last token of positive and negative
movie reviews. Its effect is by how much it shifts the log odds of positive over negative
continuations of prompts that it was not made from. It is moved to the twin by the gauge that is
recovered from weights (B_d), by a gauge recovered with permutations alone (S_d), and not at all.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from common import RESULTS, record

from signed_align import Gauge, port, recover, scramble
from signed_align.adapters.steering import steering_effect
from signed_align.demo.assets import movie_reviews, smollm2
from signed_align.steering import contrast_direction

LAYERS = (10, 14, 18)
SHOWN = 14
REVIEWS = 200
STRENGTH = 1.0
TWINS = range(4)
PROMPTS = (
    "I saw this film last night and it was",
    "The acting in this movie is",
    "My friends asked me about the movie. I told them it was",
    "If I had to describe the plot in one word, it would be",
    "The restaurant we went to yesterday was",
    "The service at this hotel is",
    "Honestly, the book she wrote is",
    "The concert was",
    "After using this phone for a month, I think it is",
    "The weather during our trip was",
    "His new album sounds",
    "The lecture this morning was",
    "Our neighbours are",
    "The ending of the series felt",
    "My experience with their support team was",
    "The food here tastes",
)
POSITIVE = (" great", " wonderful", " excellent", " amazing", " good", " beautiful")
NEGATIVE = (" terrible", " awful", " horrible", " bad", " boring", " disappointing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the result")
    results = parser.parse_args().results
    reviews = movie_reviews()
    positive = [row.text for row in sorted(reviews, key=lambda row: -row.rating)[:REVIEWS]]
    negative = [row.text for row in sorted(reviews, key=lambda row: row.rating)[:REVIEWS]]
    model = smollm2()
    hooks = {layer: f"blocks.{layer}.hook_resid_post" for layer in LAYERS}
    directions = {
        layer: contrast_direction(model, positive, negative, hook) for layer, hook in hooks.items()
    }
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        truths, twins = {}, {}
        for seed in TWINS:
            twins[seed] = root / f"twin-{seed}"
            truths[seed] = scramble(model, twins[seed], seed=seed)
        result = {
            "model": "SmolLM2-135M-Instruct",
            "reviews": 2 * REVIEWS,
            "prompts": len(PROMPTS),
            "strength": STRENGTH,
            "layer": SHOWN,
            "retention": retention(model, twins[0], directions[SHOWN], hooks[SHOWN], root),
            "reversed": reversal(model, twins, truths, directions, hooks, root),
        }
    record("steering", result, results)


def effect(model: Path, file: Path, hook: str) -> float:
    measured = steering_effect(
        model, file, PROMPTS, POSITIVE, NEGATIVE, hook=hook, strength=STRENGTH
    )
    return float(measured["effect"])


def retention(
    model: Path, twin: Path, direction: torch.Tensor, hook: str, root: Path
) -> dict[str, dict[str, float]]:
    """The effect at home, and on the twin of the direction moved in three ways."""
    file = root / "direction.pt"
    torch.save(direction, file)
    moved = {"not moved": file}
    for name, objective in (("B_d", "sign_marginalized"), ("S_d", "permutation")):
        moved[name] = root / f"{name}.pt"
        gauge = recover(model, twin, objective=objective)
        port(file, gauge, moved[name], hook=hook, any_source=True)
    home = effect(model, file, hook)
    effects = {name: effect(twin, path, hook) for name, path in moved.items()}
    return {
        "home": {"effect": home, "retained": 1.0},
        **{
            name: {"effect": effects[name], "retained": effects[name] / home}
            for name in ("B_d", "S_d", "not moved")
        },
    }


def reversal(
    model: Path,
    twins: dict[int, Path],
    truths: dict[int, Gauge],
    directions: dict[int, torch.Tensor],
    hooks: dict[int, str],
    root: Path,
) -> dict[str, object]:
    """The direction, of all layers and twins, whose S_d image points away from it the most.

    The S_d image has every coordinate in its place and no sign flipped, so its cosine with the
    direction as it should be is the mean of the twin's signs, weighted by squared components.
    """

    def cosine(layer: int, seed: int) -> float:
        element = truths[seed].element("residual")
        weights = element.apply(directions[layer].square(), 0, signed=False)
        return float((weights * element.sign).sum() / weights.sum())

    layer, seed = min(
        ((layer, seed) for layer in LAYERS for seed in TWINS), key=lambda pair: cosine(*pair)
    )
    truth = truths[seed]
    file = root / "reversed.pt"
    torch.save(directions[layer], file)
    effects = {"home": effect(model, file, hooks[layer])}
    for name, gauge in (("B_d", truth), ("S_d", truth.without_signs())):
        port(file, gauge, root / f"reversed-{name}.pt", hook=hooks[layer], any_source=True)
        effects[name] = effect(twins[seed], root / f"reversed-{name}.pt", hooks[layer])
    return {"layer": layer, "twin": seed, "cosine": cosine(layer, seed), "effects": effects}


if __name__ == "__main__":
    main()
