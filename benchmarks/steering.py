"""Directions for two concepts on SmolLM2 and on a twin: how much of their effect arrives.

A direction is the difference of mean activations at the last token: of positive and negative movie
reviews, or of harmful and harmless instructions where the assistant's turn is about to start. Its
effect is by how much it shifts the log odds of some continuations over others, on prompts that it
was not made from: of praise over criticism, or of refusing harmless instructions over following
them. It is moved to the twin by the gauge recovered from weights (B_d), by a gauge recovered
with permutations alone (S_d), and not at all. Retained is the effect's share of that at home. The
layer is fixed for each concept, and what other layers would give at home is said beside it.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import parser_of, record, results_of
from concepts import Concept, refusal, sentiment

from signed_align import Checkpoint, Gauge, port, recover, scramble
from signed_align.activations import load_model, load_tokenizer
from signed_align.adapters.steering import steering_effect
from signed_align.demo.assets import movie_reviews, smollm2
from signed_align.steering import contrast_direction, log_odds

LAYERS = (10, 14, 18)
HOOKS = {layer: f"blocks.{layer}.hook_resid_post" for layer in LAYERS}
OBJECTIVES = {"B_d": "sign_marginalized", "S_d": "permutation"}
STRENGTH = 1.0
REVIEWS, PROMPTS, TWINS = 200, None, 4
QUICK = (20, 4, 1)


def main() -> None:
    arguments = parser_of(__doc__, "few reviews and prompts, one layer, one twin").parse_args()
    reviews, prompts, twins = QUICK if arguments.quick else (REVIEWS, PROMPTS, TWINS)
    model = smollm2()
    concepts = {
        "sentiment": sentiment(movie_reviews(), reviews, prompts),
        "refusal": refusal(load_tokenizer(Checkpoint.open(model)), prompts),
    }
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        places = [root / f"twin-{seed}" for seed in range(twins)]
        truths = [scramble(model, place, seed=seed) for seed, place in enumerate(places)]
        gauges = {
            name: recover(model, places[0], objective=objective)
            for name, objective in OBJECTIVES.items()
        }
        studies = {
            name: Study(model, concept, root, [concept.layer] if arguments.quick else LAYERS)
            for name, concept in concepts.items()
        }
        result = {
            "model": "SmolLM2-135M-Instruct",
            "concepts": {
                name: study.retention(places[0], gauges) for name, study in studies.items()
            },
            "reversed": studies["sentiment"].reversal(places, truths),
        }
    record("steering", result, results_of(arguments))


class Study:
    """The directions of a concept behind a few layers, and what each does at home."""

    def __init__(self, model: Path, concept: Concept, root: Path, layers: Sequence[int]) -> None:
        self.model, self.concept, self.root = model, concept, root
        self.directions = {
            layer: contrast_direction(model, concept.positive, concept.negative, HOOKS[layer])
            for layer in layers
        }
        self.home = {layer: self.measured(model, self.saved(layer), layer) for layer in layers}

    def saved(self, layer: int) -> Path:
        """The file of a direction."""
        file = self.root / "direction.pt"
        torch.save(self.directions[layer], file)
        return file

    def measured(self, model: Path, file: Path, layer: int) -> dict[str, Any]:
        concept = self.concept
        texts = (concept.prompts, concept.towards, concept.against)
        return steering_effect(model, file, *texts, hook=HOOKS[layer], strength=STRENGTH)

    def effect_on_twin(self, twin: Path, gauge: Gauge | None, layer: int) -> float:
        """The effect of a direction that a gauge moved, or none."""
        file = self.saved(layer)
        if gauge is not None:
            moved = self.root / "moved.pt"
            port(file, gauge, moved, hook=HOOKS[layer], any_source=True, verify=False, force=True)
            file = moved
        return float(self.measured(twin, file, layer)["effect"])

    def unsteered(self, prompts: Sequence[str]) -> float:
        """The mean log odds at home with nothing added."""
        checkpoint = Checkpoint.open(self.model)
        network = load_model(checkpoint, head=True, dtype=torch.float32, device="cpu")
        concept = self.concept
        odds = log_odds(
            network, load_tokenizer(checkpoint), prompts, concept.towards, concept.against
        )
        return float(odds.mean())

    def retention(self, twin: Path, gauges: Mapping[str, Gauge]) -> dict[str, Any]:
        """The effect at home, and on the twin of the direction moved in three ways."""
        concept, layer = self.concept, self.concept.layer
        home = float(self.home[layer]["effect"])
        effects = {
            "home": home,
            **{
                name: self.effect_on_twin(twin, gauge, layer)
                for name, gauge in {**gauges, "not moved": None}.items()
            },
        }
        unsteered = {"prompts": float(self.home[layer]["unsteered"])}
        if concept.examples:
            unsteered["examples"] = self.unsteered(concept.examples)
        return {
            "texts": len(concept.positive) + len(concept.negative),
            "prompts": len(concept.prompts),
            "strength": STRENGTH,
            "layer": layer,
            "home_by_layer": {at: float(one["effect"]) for at, one in self.home.items()},
            "unsteered": unsteered,
            "retention": {
                name: {"effect": effect, "retained": effect / home}
                for name, effect in effects.items()
            },
        }

    def reversal(self, twins: Sequence[Path], truths: Sequence[Gauge]) -> dict[str, Any]:
        """The direction, of all layers and twins, whose S_d image points away from it the most.

        The S_d image has every coordinate in its place and no sign flipped, so its cosine with the
        direction as it should be is the mean of the twin's signs, weighted by squared components.
        """

        def cosine(layer: int, seed: int) -> float:
            element = truths[seed].element("residual")
            weights = element.apply(self.directions[layer].square(), 0, signed=False)
            return float((weights * element.sign).sum() / weights.sum())

        pairs = [(layer, seed) for layer in self.directions for seed in range(len(truths))]
        layer, seed = min(pairs, key=lambda pair: cosine(*pair))
        effects = {"home": float(self.home[layer]["effect"])}
        for name, gauge in (("B_d", truths[seed]), ("S_d", truths[seed].without_signs())):
            effects[name] = self.effect_on_twin(twins[seed], gauge, layer)
        return {"layer": layer, "twin": seed, "cosine": cosine(layer, seed), "effects": effects}


if __name__ == "__main__":
    main()
