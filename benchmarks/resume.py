"""Training of SmolLM2 itself, saved half-way, moved to a twin and resumed there.

Trainer trains on movie reviews with AdamW, saves a checkpoint and goes on to the end: that is home.
The checkpoint is moved to a twin that is scrambled in every space, by the gauge recovered from
weights (B_d), and resumed there with the same batches. Controls are resumed from the same moved
weights with moments that were moved by permutations alone (S_d), with moments that were not moved,
and with none, as after a restart with a fresh optimizer.

Of each it is said by how much, at most, the loss of a step departs from home's, relative to it, and
how far the final parameters, moved back, are from home's, relative to the length of home's and to
the way that home went since the checkpoint. ``retained`` is the share of home's progress: of what
the loss on held-out text falls from the checkpoint to the end, how much the run achieves. Progress
does not tell that a run is the same, only the departures do: so early in a training a fresh
optimizer, whose first steps are long, may even get further.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import parser_of, record, results_of
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from signed_align import Checkpoint, Gauge, port, recover, scramble
from signed_align.activations import load_tokenizer
from signed_align.adapters.optimizer import parameter_labels
from signed_align.demo.assets import movie_reviews, smollm2
from signed_align.labels import transport_all

WORK = Path("build/resume")
STATE = "optimizer.pt"
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Size:
    """How long is trained: steps until the checkpoint and in all, windows a step, tokens a window.

    ``held_out`` is a number of windows, of text that is not trained on; ``spaces`` are scrambled.
    """

    half: int = 6
    whole: int = 12
    batch: int = 4
    window: int = 128
    held_out: int = 8
    spaces: tuple[str, ...] = ("all",)


QUICK = Size(half=2, whole=4, window=32, held_out=4, spaces=("residual",))


def main() -> None:
    arguments = parser_of(__doc__, "few steps, short windows").parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    shutil.rmtree(WORK, ignore_errors=True)
    try:
        result = measure(QUICK if arguments.quick else Size())
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    record("resume", result, results_of(arguments))


def permuted(checkpoint: Path, moved: Path, gauge: Gauge) -> None:
    port(
        checkpoint / STATE,
        gauge.without_signs(),
        moved / STATE,
        any_source=True,
        verify=False,
        force=True,
    )


def as_it_was(checkpoint: Path, moved: Path, gauge: Gauge) -> None:
    shutil.copyfile(checkpoint / STATE, moved / STATE)


def removed(checkpoint: Path, moved: Path, gauge: Gauge) -> None:
    (moved / STATE).unlink()


ARMS: Mapping[str, Callable[[Path, Path, Gauge], None]] = {
    "B_d": lambda *_: None,
    "S_d moments": permuted,
    "moments not moved": as_it_was,
    "fresh optimizer": removed,
}
"""What is done to the optimizer's state in the moved checkpoint before it is resumed."""


def measure(size: Size) -> dict[str, Any]:
    training, held_out = windows(size)
    home = load(smollm2())
    losses = train(home, training, size, WORK / "home")
    end = parameters(home)
    end_loss = loss_on(home, held_out, size)
    checkpoint = WORK / "home" / f"checkpoint-{size.half}"
    half = load(checkpoint)
    half_loss = loss_on(half, held_out, size)
    way = distance(parameters(half), end)
    del home, half

    scramble(checkpoint, WORK / "twin", spaces=size.spaces)
    gauge = recover(checkpoint, WORK / "twin", spaces=size.spaces)
    moved = WORK / "moved" / checkpoint.name
    port(checkpoint, gauge, moved)
    label = parameter_labels(Checkpoint.open(checkpoint).chart)
    arms = {}
    for name, prepare in ARMS.items():
        print(f"resumed on the twin: {name}", flush=True)
        prepare(checkpoint, moved, gauge)
        away = load(moved)
        arrived = train(away, training, size, WORK / "away", resume=moved)
        back = transport_all(parameters(away), label, gauge.inverse())
        loss = loss_on(away, held_out, size)
        pairs = zip(losses[size.half :], arrived, strict=True)
        arms[name] = {
            "losses": arrived,
            "largest_relative_difference": max(abs(b - a) / a for a, b in pairs),
            "held_out_loss": loss,
            "retained": (half_loss - loss) / (half_loss - end_loss),
            "parameters_from_home": distance(back, end) / length(end),
            "parameters_from_home_by_way": distance(back, end) / way,
        }
    return {
        "model": "SmolLM2-135M-Instruct",
        "optimizer": "AdamW",
        "learning_rate": LEARNING_RATE,
        **asdict(size),
        "spaces": sorted({space.partition(":")[0] for space in gauge.elements}),
        "home": {
            "losses": losses,
            "held_out_loss_at_half": half_loss,
            "held_out_loss": end_loss,
            "way_by_length": way / length(end),
        },
        "arms": arms,
    }


# ---- text ------------------------------------------------------------------------------------


def windows(size: Size) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Windows of movie reviews in their order: those of every step, and held-out ones."""
    tokenizer = load_tokenizer(Checkpoint.open(smollm2()))
    count = size.whole * size.batch + size.held_out
    stream: list[int] = []
    for review in movie_reviews():
        stream += [*tokenizer(review.text)["input_ids"], tokenizer.eos_token_id]
        if len(stream) >= count * size.window:
            break
    rows = torch.tensor(stream[: count * size.window]).view(count, size.window)
    examples = [{"input_ids": row, "labels": row} for row in rows]
    return examples[: -size.held_out], examples[-size.held_out :]


# ---- training --------------------------------------------------------------------------------


class SaveAt(TrainerCallback):
    """Saves a checkpoint after one step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step == self.step


def load(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def train(
    model: PreTrainedModel,
    examples: Sequence[dict[str, Tensor]],
    size: Size,
    out: Path,
    resume: Path | None = None,
) -> list[float]:
    """Train to the end, from the start or from a checkpoint; the losses of these steps."""
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=size.whole,
        per_device_train_batch_size=size.batch,
        train_sampling_strategy="sequential",
        optim="adamw_torch_fused",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        logging_steps=1,
        save_strategy="no",
        seed=0,
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=examples, callbacks=[SaveAt(size.half)])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    first = size.half if resume else 0
    return [
        entry["loss"]
        for entry in trainer.state.log_history
        if "loss" in entry and entry["step"] > first
    ]


@torch.inference_mode()
def loss_on(model: PreTrainedModel, examples: Sequence[dict[str, Tensor]], size: Size) -> float:
    """The mean loss of some windows, in nats per token."""
    model.eval()

    def losses() -> Iterator[float]:
        for first in range(0, len(examples), size.batch):
            rows = torch.stack([row["input_ids"] for row in examples[first : first + size.batch]])
            yield model(input_ids=rows, labels=rows, use_cache=False).loss.item() * len(rows)

    return sum(losses()) / len(examples)


# ---- parameters ------------------------------------------------------------------------------


def parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def length(tensors: Mapping[str, Tensor]) -> float:
    """The norm of all of them together."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors.values()]
    return float(torch.stack(norms).norm())


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return length({name: tensor - other[name] for name, tensor in one.items()})


if __name__ == "__main__":
    main()
