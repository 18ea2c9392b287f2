"""Models trained here: what benchmarks about training, not scrambling, run on.

Small Llamas on bytes, from random weights or on from an earlier one; and fine-tunes of any model.
"""

import copy
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

# A token a byte: the vocabulary is the byte alphabet, and nothing is merged.
ARCHITECTURE = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Training:
    """What a model is trained with.

    The weights depend on ``threads``, not on how many cores there are. Gradients are clipped to a
    norm of ``clip``. ``schedule`` is what the learning rate does after the warm-up: ``cosine``
    takes it to 0, ``constant`` leaves it. ``save_every`` is a number of steps; without it only the
    end is saved. ``architecture`` is that of a model that starts from random weights.
    """

    seed: int
    steps: int
    batch: int = 32
    context: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: float = 0.05
    clip: float | None = 1.0
    schedule: str = "cosine"
    save_every: int | None = None
    save_dtype: str = "float32"
    threads: int = 1
    architecture: dict[str, Any] = field(default_factory=lambda: ARCHITECTURE)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: row for row, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def trained(
    directory: Path, training: Training, sentences: Sequence[str], start: Path | None = None
) -> float:
    """Train a model and save it with its tokenizer, unless that was done; its last loss.

    It starts from random weights, on bytes, or from the checkpoint ``start``. With ``save_every``
    the directory is laid out as transformers' Trainer does, in directories ``checkpoint-N``;
    otherwise it is the model.
    """
    note = directory.with_suffix(".json")
    asked = json.loads(json.dumps({"training": asdict(training), "start": str(start)}))
    if note.is_file():
        found = json.loads(note.read_text())
        if {key: found[key] for key in asked} == asked:
            return found["train_loss"]
    note.unlink(missing_ok=True)
    tokenizer = byte_tokenizer() if start is None else AutoTokenizer.from_pretrained(start)
    dtype = getattr(torch, training.save_dtype)

    def save(model: PreTrainedModel, step: int) -> None:
        place = directory / f"checkpoint-{step}" if training.save_every else directory
        kept = model if model.dtype == dtype else copy.deepcopy(model).to(dtype)
        kept.save_pretrained(place)
        tokenizer.save_pretrained(place)

    stream = torch.tensor(tokenizer("\n".join(sentences))["input_ids"])
    losses = []
    for step, model, loss in train(training, stream, start):
        losses.append(loss)
        if step == training.steps or (training.save_every and step % training.save_every == 0):
            save(model, step)
        if step % max(1, training.steps // 15) == 0:
            print(f"{directory}, step {step}: {loss:.3f}", flush=True)
    last = losses[-max(1, training.steps // 20) :]
    train_loss = sum(last) / len(last)
    note.write_text(json.dumps({**asked, "train_loss": train_loss}, indent=2) + "\n")
    return train_loss


def train(
    training: Training, stream: Tensor, start: Path | None = None
) -> Iterator[tuple[int, PreTrainedModel, float]]:
    """Train on random windows of ``stream``; per step its number, the model and its loss."""
    threads = torch.get_num_threads()
    torch.set_num_threads(training.threads)
    torch.manual_seed(training.seed)
    model = (
        LlamaForCausalLM(LlamaConfig(**training.architecture))
        if start is None
        else AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    ).train()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=training.learning_rate,
        betas=training.betas,
        weight_decay=training.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_at((step + 1) / training.steps, training)
    )
    for step, batch in enumerate(itertools.islice(windows(stream, training), training.steps), 1):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        if training.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        schedule.step()
        yield step, model, loss.item()
    torch.set_num_threads(threads)


def windows(stream: Tensor, training: Training) -> Iterator[Tensor]:
    """Endless batches of windows that start anywhere, of shape (batch, context)."""
    generator = torch.Generator().manual_seed(training.seed)
    offsets = torch.arange(training.context)
    while True:
        starts = torch.randint(
            len(stream) - training.context, (training.batch, 1), generator=generator
        )
        yield stream[starts + offsets]


def rate_at(progress: float, training: Training) -> float:
    """The share of the learning rate when ``progress`` of the steps are done."""
    if progress < training.warmup:
        return progress / training.warmup
    if training.schedule == "constant":
        return 1.0
    return 0.5 * (
        1 + math.cos(math.pi * min(1.0, (progress - training.warmup) / (1 - training.warmup)))
    )
