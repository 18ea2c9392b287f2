"""In what two checkpoints differ before their numbers are compared: architecture and vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from signed_align.barrier import SILENT_SETTINGS
from signed_align.chart import VOCABULARY
from signed_align.checkpoint import Checkpoint
from signed_align.dimensions import Dimensions
from signed_align.recovery import vocabulary

EXAMPLES = 3
"""Names of a list that are shown."""

_COUNTED = {
    "kv": "key-value heads",
    "query": "query heads for each key-value head",
    "key": "head size",
    "value": "value size",
    "nope": "unrotated head size",
    "rope": "rotated head size",
    "expert": "experts",
    "expert_group": "groups of experts",
}
_NAMED = {
    "layers": ("num_hidden_layers",),
    "MLP size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "expert size": ("moe_intermediate_size",),
    VOCABULARY.space: ("vocab_size",),
}
# Settings that follow from the tokenizer, or say how weights are stored.
_OF_VOCABULARY = {
    "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings",
}  # fmt: skip


# ---- architecture --------------------------------------------------------------------------------


def differing_parts(source: Checkpoint, target: Checkpoint) -> dict[str, list[Any]]:
    """The parts in which two architectures differ, in words, with the values of both.

    Configs are compared first. If they name no difference, names and shapes of weights are; raises
    ChartError if one of the two then has no proved chart.
    """
    ours, theirs = _described(source), _described(target)
    parts = {
        part: [ours[part], theirs[part]]
        for part in ours
        if ours[part] is not None and theirs[part] is not None and ours[part] != theirs[part]
    }
    if set(parts) <= {VOCABULARY.space}:  # no difference of architecture by itself
        return dict(_differing_weights(source, target))
    return parts


def differing_settings(source: Checkpoint, target: Checkpoint) -> list[str]:
    """Settings of which configs say other things, but for vocabulary, storage and names."""
    settings = source.settings, target.settings
    return sorted(
        key
        for key in (settings[0].keys() | settings[1].keys()) - SILENT_SETTINGS - _OF_VOCABULARY
        if settings[0].get(key) != settings[1].get(key)
    )


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    """The parts of an architecture that a config names, in words."""
    config = checkpoint.config.get_text_config(decoder=True)
    dimensions = Dimensions.of(config)
    described: dict[str, Any] = {"model type": checkpoint.model_type, "width": dimensions.width}
    for name, word in _COUNTED.items():
        sizes = sorted(
            {candidate[name] for candidate in dimensions.candidates if name in candidate}
        )
        described[word] = sizes[0] if len(sizes) == 1 else sizes
    for word, names in _NAMED.items():
        values = (getattr(config, name, None) for name in names)
        described[word] = next((value for value in values if value is not None), None)
    return described


def _differing_weights(source: Checkpoint, target: Checkpoint) -> Iterator[tuple[str, list[Any]]]:
    """Weights that one has alone, or in another shape; token matrices may be tied or longer."""
    charts = source.chart, target.chart
    if charts[0].norm != charts[1].norm:
        yield "norm", [chart.norm for chart in charts]
    partners = charts[0].partners(source.files, target.files)
    for end, chart, known in (
        (source, charts[0], set(partners)),
        (target, charts[1], set(partners.values())),
    ):
        alone = [
            name
            for name in set(end.files) - known - set(chart.token_matrices(end.files))
            if not chart.is_buffer(name)
        ]
        if alone:
            sides = [alone if one is end else [] for one in (source, target)]
            yield "weights of one alone", [sorted(side)[:EXAMPLES] for side in sides]
    for name, partner in partners.items():
        shapes = source.shape(name), target.shape(partner)
        labels = charts[0].axes(name, shapes[0])
        same_axes = len(shapes[0]) == len(shapes[1]) and all(
            x == y or label in (None, VOCABULARY)
            for x, y, label in zip(*shapes, labels, strict=True)
        )
        if not same_axes:
            yield f"shape of {name}", [list(shape) for shape in shapes]
            return


# ---- vocabulary ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabularies:
    """How two vocabularies differ: ``parts`` names what does, nothing if they are the same.

    ``shared`` counts the tokens that have a row in both.
    """

    parts: tuple[str, ...]
    said: str
    numbers: Mapping[str, Any]
    shared: int
    by_token: bool


def compare_vocabularies(source: Checkpoint, target: Checkpoint) -> Vocabularies:
    """Compare rows of token matrices and, if both have one, tokenizers."""
    rows = [
        max((end.shape(name)[0] for name in end.chart.token_matrices(end.files)), default=0)
        for end in (source, target)
    ]
    ours, theirs = vocabulary(source), vocabulary(target)
    parts = ["rows"] if rows[0] != rows[1] else []
    numbers: dict[str, Any] = {"rows": rows}
    if ours is None or theirs is None:
        said = f"token matrices have {rows[0]} and {rows[1]} rows; without two tokenizers, rows "
        said += "are paired by their number"
        return Vocabularies(tuple(parts), said, numbers | {"parts": parts}, min(rows), False)
    shared = ours.keys() & theirs.keys()
    alone = [sorted(one.keys() - shared) for one in (ours, theirs)]
    moved = sum(ours[token] != theirs[token] for token in shared)
    parts += ["tokens"] if any(alone) else []
    parts += ["order"] if moved else []
    numbers |= {
        "tokens": [len(ours), len(theirs)],
        "shared": len(shared),
        "shared_at_other_rows": moved,
        "only_in_one": [len(one) for one in alone],
        "examples": [one[:EXAMPLES] for one in alone],
        "parts": parts,
    }
    said = (
        f"vocabularies differ in {' and '.join(parts)}: {len(shared)} tokens are shared, "
        f"{moved} of them at another row; {len(alone[0])} only in the first, {len(alone[1])} only "
        f"in the second; {rows[0]} and {rows[1]} rows"
    )
    with_rows = sum(ours[token] < rows[0] and theirs[token] < rows[1] for token in shared)
    return Vocabularies(tuple(parts), said, numbers, with_rows, True)
