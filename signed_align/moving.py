"""Whole checkpoints moved through a gauge: to a given model's coordinates, or to random ones."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from signed_align.activations import sentences_of
from signed_align.chart import RESIDUAL
from signed_align.checkpoint import (
    INDEX_NAME,
    SINGLE_NAME,
    Checkpoint,
    carry_along,
    other_files,
    require_kinds,
    rewrite_safetensors,
)
from signed_align.files import atomic_path
from signed_align.fit import check_gauge
from signed_align.gauge import Gauge
from signed_align.model_card import renew_section
from signed_align.progress import byte_meter
from signed_align.provenance import Record, end, gauge_summary, is_record, stamp
from signed_align.reliability import warn_of_verdict
from signed_align.sources import Sources
from signed_align.verification import verified, verify_same_function


def apply(
    gauge: Gauge,
    model: str | Path,
    out: str | Path,
    *,
    inverse: bool = False,
    any_source: bool = False,
    verify: bool | None = False,
    text: str | Path | Sequence[str] | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Move a whole checkpoint through a gauge and write it to ``out``.

    Parameters
    ----------
    gauge : Gauge
        Leads from ``model`` to the wanted coordinates (or back from them, with ``inverse``).
    model : str or Path
        A local directory or a Hub id.
    out : str or Path
        The directory to make. Config, tokenizer and all other files are carried along; weights in
        further formats are not, since they would stay in the old coordinates.
    inverse : bool
        Apply the inverse gauge: ``model`` is then the gauge's target.
    any_source : bool
        Accept a model whose fingerprint is not the gauge's source, such as a fine-tune of it.
    verify : bool, optional
        Check the gauge against the weights of its two models, where they are at hand; run
        ``model`` and the result on a few tokens, and keep the result only if their logits agree.
        None does so where they are small.
    text : path or sequence of str, optional
        What they are run on; random tokens by default.
    force : bool
        Replace ``out`` if it exists.

    Returns
    -------
    dict
        ``out``, ``tensors``, ``bytes``, ``left_out`` (names of files not carried along), the
        ``fingerprint`` of the result, and the ``verification``.

    Raises
    ------
    VerificationError
        If the result does not compute what ``model`` does.
    SignedAlignError
        If the gauge does not belong to the model, or a tensor is not understood.
    """
    warn_of_verdict(gauge)
    checkpoint = Checkpoint.open(model)
    others = list(other_files(checkpoint))
    sources = Sources.of([*checkpoint.files.values(), *others])
    gauge = gauge.inverse() if inverse else gauge
    if not any_source:
        gauge.require_source(checkpoint.identity)
    checkpoint.require_movable(gauge)
    if verify is not False:
        check_gauge(gauge)
    sentences = sentences_of(text) if text is not None else None
    record = Record.of(checkpoint.path)
    if record.target and record.target.get("fingerprint") != checkpoint.identity.fingerprint:
        record = Record()  # of what it was before it was trained on
    shards = sorted(set(checkpoint.files.values()))
    with atomic_path(Path(out), directory=True, force=force, inputs=[checkpoint.path]) as temporary:
        meter = byte_meter("moving weights", sum(shard.stat().st_size for shard in shards))
        for shard in shards:
            rewrite_safetensors(
                shard,
                temporary / shard.name,
                checkpoint.chart.axes,
                gauge,
                meter.update,
                origin=partial(checkpoint.instead, gauge),
            )
        meter.close()
        others = [file for file in others if not is_record(file)]
        if shards != [checkpoint.path / SINGLE_NAME]:  # the index in use goes with its shards
            shutil.copy2(checkpoint.path / INDEX_NAME, temporary)
            others.remove(checkpoint.path / INDEX_NAME)
        left_out = carry_along(others, checkpoint.path, temporary)
        result = Checkpoint.open(temporary)
        verification = verified(
            verify,
            [checkpoint, result],
            lambda: verify_same_function(checkpoint, result, sentences),
        )
        record = record.then(
            action="apply",
            source=end(checkpoint.identity),
            target=end(replace(result.identity, name=str(out))),
            gauge=gauge_summary(gauge),
            any_source=any_source,
            verification=verification,
        )
        record.save(temporary)
        renew_section(temporary, record)
        sources.require_unchanged()
        fingerprint = result.identity.fingerprint
    return {
        "out": str(out),
        "tensors": len(checkpoint.files),
        "bytes": sum(shard.stat().st_size for shard in shards),
        "left_out": left_out,
        "fingerprint": fingerprint,
        "verification": verification,
    }


def scramble(
    model: str | Path,
    out: str | Path,
    *,
    seed: int = 0,
    signed: bool = True,
    spaces: Sequence[str] = (RESIDUAL.space,),
    force: bool = False,
) -> Gauge:
    """Write a twin of ``model``: the same function in randomly changed coordinates.

    Parameters
    ----------
    model, out : str or Path
        The model, and the directory to make.
    seed : int
        Chooses the group element.
    signed : bool
        Draw from the native group: B_d for an RMSNorm model, a permutation with the global sign -1
        for a LayerNorm model. False draws a permutation only.
    spaces : sequence of str
        The kinds of spaces to scramble: ``residual``, ``mlp``, ``experts``, ``heads`` (whole heads
        and the coordinates inside them), or ``all``.
    force : bool
        Replace ``out`` if it exists.

    Returns
    -------
    Gauge
        The true gauge from ``model`` to its twin.
    """
    checkpoint = Checkpoint.open(model)
    gauge = Gauge(
        elements=checkpoint.chart.random_gauge(
            checkpoint.spaces,
            seed=seed,
            signed=signed,
            kinds=require_kinds(checkpoint.chart, spaces),
        ),
        source=checkpoint.identity,
        provenance={
            "method": "scramble",
            "seed": seed,
            "signed": signed,
            "spaces": list(spaces),
            "group": checkpoint.chart.native_group.value,
            **stamp(),
        },
    )
    twin = apply(gauge, model, out, force=force)
    return replace(
        gauge,
        target=replace(
            checkpoint.identity, name=str(out), fingerprint=twin["fingerprint"], revision=""
        ),
    )
