"""A small LoRA on a task the base model cannot know: sentiment in arbitrary label words."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from signed_align.activations import load_model, load_tokenizer
from signed_align.chart import Chart
from signed_align.checkpoint import Checkpoint
from signed_align.demo.assets import RatedText
from signed_align.errors import SignedAlignError
from signed_align.progress import track

TASK = "arbitrary_labels"
# For negative and positive. The base model answers the second one whatever the review says, so
# that it is at chance, and so is an adapter that only nudges it.
LABEL_WORDS = ("circle", "silver", "copper", "maple", "velvet", "river")
CLEAR_RATING = 2.0
MAX_TOKENS = 24
HELD_OUT = 200
STEPS = 32
BATCH = 16
LEARNING_RATE = 2e-3


TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
"""The linear layers that the adapter is put on."""


def is_llama_like(chart: Chart) -> bool:
    """Whether a model has the modules that :data:`TARGETS` names."""
    leaves = {pattern.rpartition(".")[2] for pattern in chart.modules}
    return leaves >= set(TARGETS)


@dataclass(frozen=True)
class Task:
    """Prompts with their label index, and the two words that stand for negative and positive."""

    words: tuple[str, str]
    training: list[tuple[str, int]]
    held_out: list[tuple[str, int]]

    def write(self, directory: Path) -> None:
        """Write the held-out examples as an lm-eval task of local files."""
        directory.mkdir(parents=True, exist_ok=True)
        data = directory / f"{TASK}.jsonl"
        rows = [{"prompt": prompt, "label": label} for prompt, label in self.held_out]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        settings = {
            "task": TASK,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{prompt}}",
            "doc_to_choice": list(self.words),
            "doc_to_target": "label",
            "target_delimiter": " ",
            "num_fewshot": 0,
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            "metadata": {"version": 1.0},
        }
        (directory / f"{TASK}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))


def make_task(reviews: Sequence[RatedText], tokenizer: Any, seed: int) -> Task:
    """Balanced prompts from clearly rated, short reviews, split into training and held out."""
    words = [word for word in LABEL_WORDS if len(_ids(tokenizer, f" {word}")) == 1][:2]
    if len(words) < 2:
        raise SignedAlignError("the model's tokenizer has no single tokens for the label words.")
    labelled: list[list[tuple[str, int]]] = [[], []]
    for text, rating in reviews:
        if abs(rating) >= CLEAR_RATING and len(_ids(tokenizer, text)) <= MAX_TOKENS:
            labelled[rating > 0].append((f"Review: {text}\nLabel:", int(rating > 0)))
    count = min(map(len, labelled))
    generator = random.Random(seed)
    for examples in labelled:
        generator.shuffle(examples)
    half = HELD_OUT // 2
    return Task(
        words=(words[0], words[1]),
        training=[example for examples in labelled for example in examples[half:count]],
        held_out=[example for examples in labelled for example in examples[:half]],
    )


def train_lora(
    checkpoint: Checkpoint, task: Task, out: Path, seed: int, targets: Sequence[str] = TARGETS
) -> dict[str, Any]:
    """Train a LoRA on the ``targets`` of the upper half of the blocks, and save it.

    Returns the number of steps and the loss at the end (mean of the last quarter).
    """
    from peft import LoraConfig, get_peft_model

    tokenizer = load_tokenizer(checkpoint)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "left"
    torch.manual_seed(seed)
    base = load_model(checkpoint, head=True, dtype=torch.float32, device="cpu")
    base.name_or_path = checkpoint.name
    depth = int(base.config.num_hidden_layers)
    model = get_peft_model(
        base,
        LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=list(targets),
            layers_to_transform=list(range(depth // 2 - 1, depth)),
            task_type="CAUSAL_LM",
        ),
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up_and_cosine)
    choices = [_ids(tokenizer, f" {word}")[0] for word in task.words]
    losses = []
    model.train()
    for examples in track(_training_batches(task, seed), "training the LoRA", unit="step"):
        inputs = tokenizer([prompt for prompt, _ in examples], padding=True, return_tensors="pt")
        labels = torch.tensor([label for _, label in examples])
        logits = model(**inputs, logits_to_keep=1, use_cache=False).logits[:, -1, choices]
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.save_pretrained(out)
    tail = losses[-(STEPS // 4) :]
    return {"steps": STEPS, "final_loss": sum(tail) / len(tail)}


def _training_batches(task: Task, seed: int) -> list[list[tuple[str, int]]]:
    """Batches of prompts of similar length, in random order."""
    generator = random.Random(seed)
    chosen = generator.sample(task.training, min(STEPS * BATCH, len(task.training)))
    chosen.sort(key=lambda example: len(example[0]))
    packed = [chosen[start : start + BATCH] for start in range(0, len(chosen), BATCH)]
    generator.shuffle(packed)
    return packed


def _warm_up_and_cosine(step: int) -> float:
    return min(1.0, (step + 1) / (STEPS / 10)) * (
        0.05 + 0.475 * (1 + math.cos(math.pi * step / STEPS))
    )


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
