"""Recovering the gauge between two checkpoints, from activations on text or from weights alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from signed_align.activations import (
    Batch,
    batches,
    load_model,
    load_tokenizer,
    paired_hidden_states,
    sentences_of,
    typical,
    warn_if_few,
)
from signed_align.chart import RESIDUAL, Chart
from signed_align.checkpoint import Checkpoint, require_kinds
from signed_align.errors import CheckpointError, GaugeError
from signed_align.gauge import Gauge, ModelIdentity
from signed_align.matching import Correlation, Objective, match
from signed_align.progress import track
from signed_align.provenance import stamp, text_hash
from signed_align.refusals import require_finite
from signed_align.reliability import CONTROL, judge, require_reliable
from signed_align.site_matching import match_site
from signed_align.sites import evidence_by_activations
from signed_align.weight_matching import WeightMatching, partners_of, with_matches

BLOCK_ROWS = 8192
TOKENS_PER_COORDINATE = 8
"""Calibration tokens used per residual coordinate, if the text has that many."""


@dataclass(frozen=True)
class Evidence:
    """The correlation between two checkpoints' coordinates, from which gauges are read off.

    ``correlation`` has shape (d, d), source coordinates by target coordinates.
    ``independent_samples`` is what its noise is judged by: a token counts once, however many of
    its hidden states were pooled.
    """

    correlation: Tensor
    chart: Chart
    source: ModelIdentity
    target: ModelIdentity
    provenance: Mapping[str, Any]
    independent_samples: int

    def gauge(self, objective: Objective = Objective.SIGN_MARGINALIZED) -> Gauge:
        """The gauge that ``objective`` finds, with its margins.

        Its provenance has a verdict, which is the same for every objective: whether there is a
        gauge depends on the models.
        """
        group = self.chart.native_group
        best = match(self.correlation, Objective.SIGN_MARGINALIZED, group)
        found = (
            best
            if objective is Objective.SIGN_MARGINALIZED
            else match(self.correlation, objective, group)
        )
        return Gauge(
            elements={RESIDUAL.space: found.element},
            margins={RESIDUAL.space: found.margin},
            source=self.source,
            target=self.target,
            provenance={
                **self.provenance,
                "objective": objective.value,
                "verdict": judge(best, self.independent_samples).to_dict(),
            },
        )


def recover(
    source: str | Path,
    target: str | Path,
    *,
    method: Literal["activations", "weights", "both"] | None = None,
    text: str | Path | Sequence[str] | None = None,
    objective: Objective | str = Objective.SIGN_MARGINALIZED,
    layers: Sequence[int] | None = None,
    spaces: Sequence[str] = (RESIDUAL.space,),
    max_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    shuffle_pairs: bool = False,
    accept_weak: bool = False,
) -> Gauge:
    """Recover the gauge that leads from ``source``'s to ``target``'s coordinates.

    The residual stream is matched first, then each site (MLP, experts, attention) in the aligned
    frame. From weights, residual stream and sites are matched in turn until nothing changes.

    Parameters
    ----------
    source, target : str or Path
        Checkpoints of one architecture: local directories or Hub ids.
    method : {"activations", "weights", "both"}, optional
        Run both models on text, or compare weights, which needs neither text nor a forward pass;
        or start from activations and go on with weights. By default activations if there is text,
        weights otherwise.
    text : path or sequence of str, optional
        Calibration text: a UTF-8 file with a sentence a line, or the sentences. Activations
        without text run on English prose that ships with Python.
    objective : Objective or str
        ``sign_marginalized`` (the method), or a baseline: ``signed``, ``permutation``.
    layers : sequence of int, optional
        Hidden states to use (0 is the embedding, negative counts from the end); all by default.
    spaces : sequence of str
        The kinds of spaces to recover, ``residual`` among them: ``mlp``, ``experts``, ``heads``
        (heads and the coordinates inside), ``ssm``, or ``all``.
    max_tokens : int, optional
        Calibration tokens to use at most; 8 per residual coordinate by default.
    dtype, device
        What the models run in and on, when there is text.
    seed : int
        Chooses the sentences, if there are more than are used.
    shuffle_pairs : bool
        A negative control: pair the samples of source and target at random. No gauge must be
        found.
    accept_weak : bool
        Return a gauge whose evidence does not speak for one.

    Returns
    -------
    Gauge
        With per-coordinate margins, the fingerprints of both checkpoints, and a verdict in its
        provenance (see :mod:`signed_align.reliability`).

    Raises
    ------
    UnreliableGaugeError
        If too few coordinates of the residual stream have a partner with a clear margin.
    SignedAlignError
        If the checkpoints do not belong to one architecture, or activations are not finite.
    """
    if method is None:
        method = "weights" if text is None else "activations"
    start, end = Checkpoint.open(source), Checkpoint.open(target)
    kinds = _kinds(start, spaces)
    if method == "weights":
        if text is not None or layers is not None:
            raise GaugeError("text and layers have no part in recovering a gauge from weights.")
        return recover_by_weights(
            start,
            end,
            Objective(objective),
            spaces,
            shuffle_pairs=shuffle_pairs,
            seed=seed,
            accept_weak=accept_weak,
        )
    if method == "both" and len(kinds) == 1:
        raise GaugeError(
            "activations and weights together are for spaces beside the residual stream; name more "
            "spaces, or choose one of the two."
        )
    _require_control_of_residual(kinds, shuffle_pairs)
    sentences = sentences_of(text)
    (evidence,) = evidence_from_activations(
        start,
        end,
        sentences,
        layer_groups={"all": layers},
        max_tokens=max_tokens,
        dtype=dtype,
        device=device,
        seed=seed,
        shuffle_pairs=shuffle_pairs,
    ).values()
    gauge = evidence.gauge(Objective(objective))
    if not accept_weak:
        require_reliable(gauge)
    if len(kinds) == 1:
        return gauge
    matching = WeightMatching(start, end, partners_of(start, end), kinds, Objective(objective))
    todo = batches(
        load_tokenizer(start),
        sentences,
        max_tokens=_token_limit(start.chart.width, max_tokens),
        seed=seed,
    )
    seen = evidence_by_activations(start, end, matching.sites, todo, dtype=dtype, device=device)
    for path, site in track(matching.sites.items(), "matching sites", unit="site"):
        matches = (
            match_site(site.groups, seen[path], Objective(objective))
            if path in seen
            else matching.match(site, gauge)
        )
        gauge = with_matches(gauge, matches)
    if method == "activations":
        return gauge
    return matching.run(replace(gauge, provenance={**gauge.provenance, "method": method}))


def recover_by_weights(
    source: Checkpoint,
    target: Checkpoint,
    objective: Objective,
    spaces: Sequence[str],
    *,
    shuffle_pairs: bool = False,
    seed: int = 0,
    accept_weak: bool = False,
) -> Gauge:
    """The gauge that weights speak for: the residual stream by embeddings, then all in turn.

    Parameters are as in :func:`recover`, of which this is the part that needs no text.
    """
    kinds = _kinds(source, spaces)
    _require_control_of_residual(kinds, shuffle_pairs)
    evidence = evidence_from_weights(source, target, shuffle_pairs=shuffle_pairs, seed=seed)
    gauge = evidence.gauge(objective)
    if not accept_weak:
        require_reliable(gauge)
    if len(kinds) == 1:
        return gauge
    return WeightMatching(source, target, partners_of(source, target), kinds, objective).run(gauge)


def _kinds(checkpoint: Checkpoint, spaces: Sequence[str]) -> tuple[str, ...]:
    kinds = require_kinds(checkpoint.chart, spaces)
    if RESIDUAL.space not in kinds:
        raise GaugeError("the residual stream is always recovered: name it among the spaces.")
    return kinds


def _require_control_of_residual(kinds: Sequence[str], shuffle_pairs: bool) -> None:
    if shuffle_pairs and len(kinds) > 1:
        raise GaugeError(
            "shuffled pairs are a control of the residual stream; name no other spaces with them."
        )


def _token_limit(width: int, asked: int | None) -> int:
    return TOKENS_PER_COORDINATE * width if asked is None else asked


def calibration(
    tokenizer: Any, sentences: Sequence[str], width: int, max_tokens: int | None, seed: int
) -> list[Batch]:
    """Batches of text to match ``width`` coordinates on; warns if their tokens are few."""
    limit = _token_limit(width, max_tokens)
    todo = batches(tokenizer, sentences, max_tokens=limit, seed=seed)
    warn_if_few(sum(batch.tokens for batch in todo), width, TOKENS_PER_COORDINATE)
    return todo


def evidence_from_weights(
    source: Checkpoint, target: Checkpoint, *, shuffle_pairs: bool = False, seed: int = 0
) -> Evidence:
    """Correlate coordinates over the rows of embedding and unembedding, streamed in blocks.

    Rows are tokens that both vocabularies have. Rows that are zero, or whose norm is massive, are
    left out: they are placeholders, not evidence. ``shuffle_pairs`` and ``seed`` are as in
    :func:`recover`.
    """
    chart = common_chart(source, target)
    correlation = Correlation(chart.width)
    pair = _Pairing(shuffle_pairs, seed)
    left_out, matrices = 0, {}
    for name, x, y in track(token_rows(source, target), "reading token matrices", unit="block"):
        kept = typical(x, y)
        matrices[name] = True
        left_out += len(kept) - int(kept.sum())
        correlation.add(x[kept], pair(y[kept]), stream=name)
    return evidence_of(
        correlation,
        chart,
        source,
        target,
        {"method": "weights", "matrices": list(matrices), "left_out": left_out} | pair.provenance,
        correlation.samples,
    )


def token_rows(source: Checkpoint, target: Checkpoint) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Rows of embedding and unembedding that belong to the same tokens, in blocks.

    Yields the name of the source's matrix and two blocks of shape (rows, d). Raises
    CheckpointError if the checkpoints are not of one architecture, or share no such matrix.
    """
    chart = common_chart(source, target)
    # the bare model class leaves out the prefix that the causal-LM class puts in front
    names = chart.partners(chart.token_matrices(source.files), chart.token_matrices(target.files))
    if not names:
        raise CheckpointError(
            f"{source.name} and {target.name} share no embedding or unembedding matrix."
        )
    moved = moved_tokens(source, target)
    for name, partner in names.items():
        for x, y in paired_rows(source, target, name, partner, moved):
            yield name, x, y


def evidence_from_activations(
    source: Checkpoint,
    target: Checkpoint,
    sentences: Sequence[str],
    *,
    layer_groups: Mapping[str, Sequence[int] | None],
    max_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    shuffle_pairs: bool = False,
) -> dict[str, Evidence]:
    """Correlate coordinates over tokens, once per group of hidden states, in one pass over text.

    Parameters
    ----------
    source, target : Checkpoint
        Both run on the same tokens, as the source's tokenizer makes them.
    sentences : sequence of str
        Calibration text.
    layer_groups : mapping of str to sequence of int or None
        Which hidden states are pooled into which correlation; None means all of them.
    max_tokens, dtype, device, seed, shuffle_pairs
        As in :func:`recover`.

    Returns
    -------
    dict of str to Evidence
        One entry per group. Tokens whose norm exceeds 10 times the median norm of their hidden
        state (attention sinks, separators) are left out and counted.
    """
    chart = common_chart(source, target)
    size = chart.width
    tokenizer = load_tokenizer(source)
    theirs = vocabulary(target)
    if theirs is not None and theirs != tokenizer.get_vocab():
        raise CheckpointError(
            f"{source.name} and {target.name} have different tokenizers, so they cannot be run on "
            "the same tokens; recover the gauge from weights instead."
        )
    todo = calibration(tokenizer, sentences, size, max_tokens, seed)
    tokens = sum(batch.tokens for batch in todo)
    source_model = load_model(source, head=False, dtype=dtype, device=device)
    target_model = load_model(target, head=False, dtype=dtype, device=device)
    states = int(source.config.get_text_config().num_hidden_layers) + 1
    groups = {name: _resolve_layers(chosen, states) for name, chosen in layer_groups.items()}
    correlations = {name: Correlation(size) for name in groups}
    seen = dict.fromkeys(groups, 0)
    pair = _Pairing(shuffle_pairs, seed)
    for batch in track(todo, "running both models", unit="batch"):
        for state, x, y in paired_hidden_states(source_model, target_model, batch.to(device)):
            members = [name for name, chosen in groups.items() if state in chosen]
            if not members:
                continue
            kept = typical(x, y)
            for name in members:
                seen[name] += len(kept)
                correlations[name].add(x[kept], pair(y[kept]), stream=str(state))
    return {
        name: evidence_of(
            correlation,
            chart,
            source,
            target,
            {
                "method": "activations",
                "layers": groups[name],
                "tokens": tokens,
                "text_hash": text_hash(sentences),
                "left_out": seen[name] - correlation.samples,
            }
            | pair.provenance,
            min(tokens, correlation.samples),
        )
        for name, correlation in correlations.items()
    }


def evidence_of(
    correlation: Correlation,
    chart: Chart,
    source: Checkpoint,
    target: Checkpoint,
    provenance: dict[str, Any],
    independent_samples: int,
) -> Evidence:
    """What a correlation says of two checkpoints; raises GaugeError if no sample went into it."""
    if not correlation.samples:
        raise GaugeError(
            f"no usable sample is left to match {source.name} with {target.name}: all are zero."
        )
    return Evidence(
        correlation=correlation.matrix(),
        chart=chart,
        source=source.identity,
        target=target.identity,
        provenance={
            **provenance,
            "samples": correlation.samples,
            "group": chart.native_group.value,
            **stamp(),
        },
        independent_samples=independent_samples,
    )


class _Pairing:
    """Which samples of the target go with those of the source: the same, or in a control others."""

    def __init__(self, shuffled: bool, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed) if shuffled else None

    def __call__(self, samples: Tensor) -> Tensor:
        if self._generator is None:
            return samples
        return samples[torch.randperm(len(samples), generator=self._generator)]

    @property
    def provenance(self) -> dict[str, Any]:
        """What a gauge says of it."""
        return {} if self._generator is None else {CONTROL: "shuffled pairs"}


def common_chart(source: Checkpoint, target: Checkpoint) -> Chart:
    """The chart of both; raises CheckpointError unless they are of one architecture and size."""
    chart, other = source.chart, target.chart
    for one in (source, target):
        for name in one.chart.token_matrices(one.files):
            one.chart.axes(name, one.shape(name))  # raises where the config has another width
    depths = [int(one.config.get_text_config().num_hidden_layers) for one in (source, target)]
    if chart.model_type == other.model_type and depths[0] != depths[1]:
        raise CheckpointError(
            f"{source.name} has {depths[0]} layers and {target.name} {depths[1]}; a gauge leads "
            "between models of one architecture."
        )
    if chart.model_type == other.model_type and chart.width != other.width:
        raise CheckpointError(
            f"{source.name} has {chart.width} residual coordinates and "
            f"{target.name} {other.width}; no gauge leads between them."
        )
    if (chart.modules, chart.sites, chart.width, depths[0]) != (
        other.modules,
        other.sites,
        other.width,
        depths[1],
    ):
        raise CheckpointError(
            f"{source.name} is a {chart.model_type} model and {target.name} a "
            f"{other.model_type} model with other weights (layers, width, biases, heads or MLPs); "
            "a gauge leads between models of one architecture."
        )
    return chart


def _resolve_layers(chosen: Sequence[int] | None, states: int) -> list[int]:
    if chosen is None:
        return list(range(states))
    for layer in chosen:
        if not -states <= layer < states:
            raise GaugeError(
                f"there is no hidden state {layer}; the model has {states} of them, 0 to "
                f"{states - 1}."
            )
    return sorted({layer % states for layer in chosen})


def vocabulary(checkpoint: Checkpoint) -> dict[str, int] | None:
    """The row of each token, or None if the checkpoint has no tokenizer."""
    try:
        return load_tokenizer(checkpoint).get_vocab()
    except CheckpointError:
        return None


def moved_tokens(source: Checkpoint, target: Checkpoint) -> Tensor | None:
    """Pairs of rows of the same token, shape (2, tokens); None if every token has one row."""
    mine, theirs = vocabulary(source), vocabulary(target)
    if mine is None or theirs is None or mine == theirs:
        return None
    shared = sorted((row, theirs[token]) for token, row in mine.items() if token in theirs)
    if not shared:
        raise CheckpointError(f"{source.name} and {target.name} share no token.")
    return torch.tensor(shared).T


def paired_rows(
    source: Checkpoint, target: Checkpoint, name: str, partner: str, moved: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of rows of a token matrix that belong to the same tokens in both checkpoints."""
    if moved is not None:
        x, y = source.tensor(name), target.tensor(partner)
        _require_finite_pair(source, target, name, partner, x, y)
        present = (moved[0] < len(x)) & (moved[1] < len(y))
        for rows, partners in moved[:, present].split(BLOCK_ROWS, dim=1):
            yield x[rows], y[partners]
        return
    count = min(source.shape(name)[0], target.shape(partner)[0])
    for start in range(0, count, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, count)
        x, y = source.rows(name, start, stop), target.rows(partner, start, stop)
        _require_finite_pair(source, target, name, partner, x, y)
        yield x, y


def _require_finite_pair(
    source: Checkpoint, target: Checkpoint, name: str, partner: str, x: Tensor, y: Tensor
) -> None:
    require_finite([(name, x)], source.name)
    require_finite([(partner, y)], target.name)
