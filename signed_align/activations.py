"""Text in, paired hidden states out: both models run on the same tokens, one batch at a time."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signed_align.chart import Chart
from signed_align.checkpoint import Checkpoint
from signed_align.errors import (
    ArtifactError,
    ChartError,
    CheckpointError,
    SignedAlignError,
    SignedAlignWarning,
    one_line,
)
from signed_align.hooks import Hook, listening
from signed_align.progress import track
from signed_align.refusals import require_finite

MAX_LENGTH = 128
MAX_CHARACTERS = 2**15
"""Of a longer sentence only the beginning is tokenised, of which a few tokens are used."""

BATCH_TOKENS = 1024
RANDOM_SEQUENCES = 4
"""Tokens that are drawn at random make as many texts."""

MASSIVE_RATIO = 10.0
"""Samples whose norm exceeds this multiple of the median norm are left out."""


@dataclass(frozen=True)
class Batch:
    """Token ids and attention mask, both of shape (sequences, length), padded on the right."""

    input_ids: Tensor
    attention_mask: Tensor

    @property
    def tokens(self) -> int:
        """The number of real tokens."""
        return int(self.attention_mask.sum())

    def to(self, device: Any) -> Batch:
        """The same batch on another device."""
        return Batch(self.input_ids.to(device), self.attention_mask.to(device))


def sentences_of(text: str | Path | Sequence[str] | None) -> list[str]:
    """Calibration sentences: a file's lines, the sentences given, or Python's own prose.

    Parameters
    ----------
    text : path, sequence of str, or None
        A UTF-8 file with a sentence a line, or the sentences. None means the language reference
        that ships with Python, as paragraphs.

    Raises
    ------
    SignedAlignError
        If there is no sentence.
    """
    if text is None:
        lines = _python_prose()
    elif isinstance(text, str | Path):
        try:
            lines = Path(text).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise SignedAlignError(
                f"the text file {text} cannot be read: {error.strerror}."
            ) from error
        except UnicodeDecodeError as error:
            raise SignedAlignError(f"the text file {text} is not UTF-8.") from error
    else:
        lines = list(text)
    sentences = [line.strip() for line in lines if line.strip()]
    if not sentences:
        raise SignedAlignError(f"there is no text in {text}." if text else "the text is empty.")
    return sentences


def _python_prose() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise SignedAlignError(
            "this Python comes without its language reference, so there is no default text; "
            "give a text."
        ) from error
    paragraphs = [
        " ".join(paragraph.split())
        for topic in sorted(topics)
        for paragraph in topics[topic].split("\n\n")
    ]
    return [paragraph for paragraph in paragraphs if len(paragraph.split()) >= 12]


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's own tokenizer; raises CheckpointError if it has none.

    For a directory without its files transformers may make one up, of a few tokens.
    """
    from transformers import AutoTokenizer

    _ = checkpoint.config  # raises, with the reason, where that is what cannot be read
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False)
    except Exception as error:  # tokenizer files fail in many ways
        raise CheckpointError(f"{checkpoint.name} has no tokenizer that loads.") from error
    names = [*tokenizer.vocab_files_names.values()] or ["tokenizer_config.json"]
    if not any((checkpoint.path / name).is_file() for name in names):
        raise CheckpointError(f"{checkpoint.name} has no tokenizer: none of {', '.join(names)}.")
    positions = positions_of(checkpoint)
    if positions:  # tokenizers do not always say it
        tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    return tokenizer


def positions_of(checkpoint: Checkpoint) -> int | None:
    """How many tokens a checkpoint's model takes at most, if its config says so."""
    positions = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None)
    return int(positions) if positions else None


def load_model(checkpoint: Checkpoint, *, head: bool, dtype: torch.dtype, device: str) -> Any:
    """The checkpoint as a module in evaluation mode, with or without its language-model head."""
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # a load report says that the head is not used
    try:
        auto = AutoModelForCausalLM if head else AutoModel
        model, loading = auto.from_pretrained(
            checkpoint.path, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
        model = model.to(device).eval()
    except Exception as error:  # a bad config, weight or device fails in many ways
        reason = one_line(error)
        if "ignore_mismatched_sizes" in reason:  # transformers names them in its log alone
            reason = "its config asks for weights of other shapes than its files hold."
        raise CheckpointError(
            f"{checkpoint.name} cannot be loaded on {device}: {reason}"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    require_finite(model.named_parameters(), checkpoint.name)
    _refuse_unknown_tokens(model, checkpoint.name)
    missing = sorted(loading["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{checkpoint.name} lacks {len(missing)} weights that its config asks for, such as "
            f"{missing[0]!r}; transformers would make them up."
        )
    return model


def _refuse_unknown_tokens(model: Any, name: str) -> None:
    """Make a model refuse token ids that its embedding has no row for, in a sentence."""
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        return
    rows = getattr(embedding, "num_embeddings", None)
    if rows is None:
        return

    def require_rows(_: Any, inputs: tuple[Any, ...]) -> None:
        if inputs and inputs[0].numel() and int(inputs[0].max()) >= rows:
            raise CheckpointError(
                f"the tokenizer makes the token {int(inputs[0].max())}, and the embedding of "
                f"{name} has {rows} rows; is it the tokenizer of this model?"
            )

    embedding.register_forward_pre_hook(require_rows)


def batches(
    tokenizer: Any, sentences: Iterable[str], *, max_tokens: int, seed: int = 0
) -> list[Batch]:
    """Tokenise sentences and pack those of similar length together.

    They are cut at ``MAX_LENGTH``, or at the positions that the model has, and taken in a random
    order fixed by ``seed`` until ``max_tokens`` are reached. Raises SignedAlignError if there is
    not one token.
    """
    order = list(sentences)
    random.Random(seed).shuffle(order)
    chosen: list[list[int]] = []
    budget = max_tokens
    for sentence in order:
        cut = sentence[:MAX_CHARACTERS]
        length = min(MAX_LENGTH, tokenizer.model_max_length)
        ids = tokenizer(cut, truncation=True, max_length=length)["input_ids"]
        if budget <= 0:
            break
        if ids:
            chosen.append(ids)
        budget -= len(ids)
    if not chosen:
        raise SignedAlignError("the text has no tokens for the model's tokenizer.")
    chosen.sort(key=len)
    packed: list[Batch] = []
    while chosen:
        count = max(1, BATCH_TOKENS // max(1, len(chosen[-1])))
        packed.append(padded(chosen[-count:]))
        del chosen[-count:]
    random.Random(seed).shuffle(packed)
    return packed


def some_tokens(
    checkpoint: Checkpoint,
    sentences: Sequence[str] | None,
    rows: Tensor,
    *,
    max_tokens: int,
    seed: int = 0,
) -> tuple[list[Batch], bool]:
    """Batches of text or, without text or a tokenizer, of tokens drawn at random from ``rows``.

    Returns them, and whether they were drawn.
    """
    if sentences is not None:
        try:
            tokenizer = load_tokenizer(checkpoint)
        except CheckpointError:
            tokenizer = None
        if tokenizer is not None:
            return batches(tokenizer, sentences, max_tokens=max_tokens, seed=seed), False
    length = max_tokens // RANDOM_SEQUENCES
    shape = (RANDOM_SEQUENCES, min(length, positions_of(checkpoint) or length))
    generator = torch.Generator().manual_seed(seed)
    drawn = rows[torch.randint(len(rows), shape, generator=generator)]
    return [padded(drawn.tolist())], True


def padded(sequences: Sequence[Sequence[int]]) -> Batch:
    """Token ids of several texts as one batch."""
    length = max(len(ids) for ids in sequences)
    input_ids = torch.zeros(len(sequences), length, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(sequences):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        attention_mask[row, : len(ids)] = 1
    return Batch(input_ids, attention_mask)


def typical(*streams: Tensor) -> Tensor:
    """Which samples have a norm that is neither zero nor massive, in every stream.

    Parameters
    ----------
    *streams : Tensor, shape (n, d)
        The same samples, as different models see them.

    Returns
    -------
    Tensor, shape (n,), bool
        A norm is massive above 10 times the median norm. A sample that is not finite is kept, so
        that whoever uses it notices.
    """
    kept = torch.ones(len(streams[0]), dtype=torch.bool)
    for samples in streams:
        # squares of large or small numbers leave the range of float32
        norms = torch.linalg.vector_norm(samples.float(), dim=1, dtype=torch.float64)
        massive = (norms > MASSIVE_RATIO * norms.nanmedian()) & norms.isfinite()
        kept &= ~massive & (norms != 0)
    return kept


@torch.inference_mode()
def paired_hidden_states(
    source: Any, target: Any, batch: Batch
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Run both models on a batch and yield (state, source rows, target rows), padding removed.

    State k is what block k reads; the last one is taken after the final norm. Rows have shape
    (tokens, d), float32, on the CPU.
    """
    states = [hidden_states(model, batch) for model in (source, target)]
    for state, (x, y) in enumerate(zip(*states, strict=True)):
        yield state, x, y


@torch.inference_mode()
def hidden_states(model: Any, batch: Batch) -> list[Tensor]:
    """The hidden states of a model on a batch, padding removed.

    Each has shape (tokens, d), float32, on the CPU.
    """
    mask = batch.attention_mask.bool()
    found = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        output_hidden_states=True,
        use_cache=False,
    ).hidden_states
    return [state[mask].float().cpu() for state in found]


def warn_if_few(tokens: int, width: int, times: int) -> None:
    """Warn if there are fewer calibration tokens than coordinates; ``times`` as many are better."""
    if tokens < width:
        warnings.warn(
            f"the calibration text has {tokens} tokens for {width} coordinates; at least {width} "
            f"are needed for a trustworthy gauge, {times * width} are better.",
            SignedAlignWarning,
            stacklevel=3,
        )


@torch.inference_mode()
def hook_activations(
    checkpoint: Checkpoint, hooks: Sequence[Hook], todo: Sequence[Batch], *, device: str = "cpu"
) -> list[Tensor]:
    """What passes at each hook, of shape (tokens, coordinates), float32, the same tokens in each.

    Blocks behind the last hook are not run. Padding and tokens with massive activations are left
    out. Raises SignedAlignError if a hook cannot be read.
    """
    model = load_model(checkpoint, head=False, dtype=torch.float32, device=device)
    _drop_later_blocks(model, checkpoint.chart, hooks)
    rows: list[list[Tensor]] = [[] for _ in hooks]
    with ExitStack() as stack:
        caught = [stack.enter_context(listening(model, checkpoint.chart, hook)) for hook in hooks]
        for batch in track(todo, "collecting activations", unit="batch"):
            batch = batch.to(device)
            model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
            for collected, heard in zip(rows, caught, strict=True):
                collected.append(heard.pop()[batch.attention_mask.bool()].float().cpu())
    activations = [torch.cat(collected) for collected in rows]
    if not all(torch.isfinite(one).all() for one in activations):
        raise ArtifactError(f"the activations of {checkpoint.name} are not finite.")
    kept = typical(*activations)
    return [one[kept] for one in activations]


def _drop_later_blocks(model: Any, chart: Chart, hooks: Sequence[Hook]) -> None:
    """Cut off the blocks that no hook needs; raises ChartError for a block that is not there."""
    stack = model.get_submodule(chart.blocks)
    numbers = [re.match(rf"{re.escape(chart.blocks)}\.(\d+)", hook.module) for hook in hooks]
    if not all(numbers):
        return
    last = max(int(number[1]) for number in numbers if number)
    if last >= len(stack):
        raise ChartError(f"the model has {len(stack)} blocks, so none is number {last}.")
    del stack[last + 1 :]
