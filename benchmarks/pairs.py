"""Fine-tuned pairs of SmolLM2: the everyday case, in which nothing has to be moved.

Training moves no coordinate to another place, so the true gauge is the identity. Measured are
whether the tool recognises it, how many coordinates it gets right, and what porting a sentiment
direction and a LoRA through the recovered gauge costs, compared with using them as they are.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import finetunes
import torch
from common import parser_of, record, results_of
from concepts import sentiment

from signed_align import Checkpoint, Gauge, port, recover
from signed_align.activations import load_tokenizer
from signed_align.adapters.steering import steering_effect
from signed_align.demo.assets import movie_reviews, newspaper_sentences
from signed_align.demo.lora import TASK, make_task, train_lora
from signed_align.evaluation import evaluate
from signed_align.steering import contrast_direction

TOKENS = 2304
REVIEWS = 200


def pairs(work: Path, quick: bool) -> dict[str, tuple[Path, Path]]:
    """From the least to the most that training did between a model and the other."""
    base = finetunes.base()
    reviews, tweets = finetunes.hot_ends(work, quick=quick)
    training = finetunes.hot(quick=quick)
    steps, first = training.steps, training.save_every
    return {
        "base and itself": (base, base),
        "base and a light fine-tune": (base, finetunes.light(work, quick=quick)),
        f"base and {first} hot steps": (base, reviews.with_name(f"checkpoint-{first}")),
        f"base and {steps} hot steps": (base, reviews),
        f"{steps} hot steps and {steps} others": (reviews, tweets),
    }


def recovered(source: Path, target: Path, text: list[str]) -> dict[str, Gauge]:
    """The gauge from weights and from activations, whatever they are worth."""
    return {
        "weights": recover(source, target, accept_weak=True),
        "activations": recover(source, target, text=text, max_tokens=TOKENS, accept_weak=True),
    }


def said_of(gauge: Gauge) -> dict[str, Any]:
    """The verdict, and how far the gauge is from the identity."""
    element = gauge.element("residual")
    margin = gauge.summary()["spaces"]["residual"]["margin"]
    return {
        **gauge.provenance["verdict"],
        "right": 1 - float(element.displaced.double().mean()),
        "margin": {name: round(value, 4) for name, value in margin.items()},
    }


class Costs:
    """A direction and a LoRA made on the base, and what they do on other models."""

    def __init__(self, root: Path, quick: bool) -> None:
        self.root = root
        base = Checkpoint.open(finetunes.base())
        self.concept = (
            sentiment(movie_reviews(), 20, 4) if quick else sentiment(movie_reviews(), REVIEWS)
        )
        self.direction = root / "direction.pt"
        concept = self.concept
        self.hook = f"blocks.{concept.layer}.hook_resid_post"
        direction = contrast_direction(base.path, concept.positive, concept.negative, self.hook)
        torch.save(direction, self.direction)
        self.adapter: Path | None = None
        if not quick:
            self.adapter = root / "lora"
            task = make_task(movie_reviews(), load_tokenizer(base), 0)
            task.write(root / "tasks")
            train_lora(base, task, self.adapter, 0)

    def measured(self, model: Path, gauge: Gauge | None) -> dict[str, float | None]:
        """The direction's effect and the LoRA's accuracy, moved through a gauge or as they are."""
        direction = self.moved(self.direction, gauge, hook=self.hook)
        concept = self.concept
        texts = (concept.prompts, concept.towards, concept.against)
        effect = steering_effect(model, direction, *texts, hook=self.hook)["effect"]
        accuracy = None
        if self.adapter is not None:
            adapter = self.moved(self.adapter, gauge)
            tasks = self.root / "tasks"
            accuracy = evaluate(model, TASK, adapter=adapter, tasks_dir=tasks)["accuracy"]
        return {"direction_effect": effect, "lora_accuracy": accuracy}

    def moved(self, artifact: Path, gauge: Gauge | None, hook: str | None = None) -> Path:
        """An artifact moved through a gauge, if there is one."""
        if gauge is None:
            return artifact
        out = artifact.with_name(f"moved-{artifact.name}")
        port(artifact, gauge, out, hook=hook, any_source=True, force=True)
        return out


def main() -> None:
    arguments = parser_of(__doc__, "short fine-tunes, no LoRA", "the fine-tunes").parse_args()
    start = time.perf_counter()
    work = finetunes.directory(arguments.work, arguments.quick)
    base = finetunes.base()
    text = newspaper_sentences()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        todo = pairs(work, arguments.quick)
        costs = Costs(Path(directory), arguments.quick)
        for name, (source, target) in todo.items():
            gauges = recovered(source, target, text)
            row: dict[str, Any] = {
                "pair": name,
                "recovery": {method: said_of(gauge) for method, gauge in gauges.items()},
            }
            if source == base:
                as_it_is = costs.measured(target, None)
                row["as_it_is"] = as_it_is
                row["ported"] = {
                    # through the identity nothing changes
                    method: as_it_is
                    if gauge.element("residual").is_identity
                    else costs.measured(target, gauge)
                    for method, gauge in gauges.items()
                }
            rows.append(row)
            print(row, flush=True)
    record(
        "pairs",
        {
            "model": "SmolLM2-135M-Instruct",
            "tokens": TOKENS,
            "hook": costs.hook,
            "pairs": rows,
            "seconds": round(time.perf_counter() - start, 1),
        },
        results_of(arguments),
    )


if __name__ == "__main__":
    main()
