"""Whether a gauge fits the weights of its two models, without running them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signed_align.chart import RESIDUAL
from signed_align.checkpoint import Checkpoint
from signed_align.errors import SignedAlignError, VerificationError
from signed_align.gauge import WEAK_MARGIN, Gauge, ModelIdentity
from signed_align.labels import kind_of, spaces_of, transport
from signed_align.recovery import token_rows
from signed_align.reliability import Verdict, sure_margin
from signed_align.signed_permutation import SignedPermutation

ROWS = 2048
"""Rows of the token matrices that a gauge is checked on where its models are at hand."""

WEIGHTS = 4
"""Weights of each kind of space that are compared."""

LEAST_ALIKE = 0.3
"""The cosine of weights in spaces that two models share."""

LEAST_CORRELATION = 0.1
"""A gauge does not fit its models if the moved rows agree with the target's less than this."""

MOST_AGAINST = 0.02
"""A gauge does not fit its models if for more than this share of the coordinates another partner,
or the other sign, is clearly better."""


def find(name: str, revision: str = "") -> Checkpoint | None:
    """The checkpoint of a path or Hub id, if it lies on this machine; else None."""
    place: Any = name
    if not os.path.isdir(name):
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(name, "config.json", revision=revision or None)
        except (HFValidationError, ValueError):
            return None
        if not isinstance(found, str):
            return None
        place = Path(found).parent
    try:
        return replace(Checkpoint.open(place), name=name)
    except SignedAlignError:
        return None


def at_hand(model: ModelIdentity | None) -> Checkpoint | None:
    """The checkpoint that one end of a gauge names, if it lies on this machine; else None."""
    return find(model.name, model.revision) if model is not None else None


def check_gauge(gauge: Gauge, spaces: Collection[str] = ()) -> dict[str, Any]:
    """Check a gauge against its two models, where they are at hand, without running them.

    Both must still be what they were when it was made. And it must carry the rows of the source's
    token matrices into the target's, coordinate by coordinate, better than another would: all
    those that it is sure of, if most agree exactly, else nearly all. Where something lives in
    ``spaces`` that the gauge does not move, the models have to be alike there.

    Returns
    -------
    dict
        ``claim``, ``of``, ``rows``, ``correlation`` (mean over coordinates, of moved and wanted
        rows), ``against`` (of the coordinates that the gauge is sure of, the share for which
        another partner, or the other sign, is clearly better), ``disagree`` (the share that is not
        the same in every row); or ``skipped``, with the reason.

    Raises
    ------
    GaugeError
        If a model is another one than when the gauge was made.
    VerificationError
        If the gauge does not fit its models.
    """
    source, target = at_hand(gauge.source), at_hand(gauge.target)
    for model, require in ((source, gauge.require_source), (target, gauge.require_target)):
        if model is not None:
            require(model.identity)
    if RESIDUAL.space in spaces and RESIDUAL.space not in gauge.elements and source is not None:
        same = SignedPermutation.identity(source.chart.width)
        gauge = replace(gauge, elements={**gauge.elements, RESIDUAL.space: same})
    unmoved = set(spaces) - gauge.elements.keys()
    if unmoved and source is not None and target is not None:
        require_alike(gauge, source, target, unmoved)
    if source is None or target is None or RESIDUAL.space not in gauge.elements:
        ends = ((gauge.source, source), (gauge.target, target))
        missing = [end.name for end, found in ends if end and not found]
        return {
            "skipped": f"{' and '.join(missing)} not at hand"
            if missing
            else "the gauge does not name both its models, or does not move the residual stream"
        }
    return require_fit(gauge, source, target)


def require_fit(gauge: Gauge, source: Checkpoint, target: Checkpoint) -> dict[str, Any]:
    """What :func:`rows_agreement` finds; raises VerificationError if the gauge does not fit."""
    found = rows_agreement(gauge, source, target)
    if "skipped" in found:
        return found
    most = 0.0 if found["claim"] == "equal" else MOST_AGAINST
    said = (
        f"in their token matrices the correlation with its partners is {found['correlation']:.3f}"
    )
    if found["against"] > most:
        allowed = "none" if most == 0 else f"at most {most:.0%}"
        said += (
            f", and for {found['against']:.1%} of the coordinates that it is sure of another, or "
            f"the other sign, is clearly better ({allowed} was expected)"
        )
    else:
        said += f" (at least {LEAST_CORRELATION:g} was expected)"
    if found["against"] > most or found["correlation"] < LEAST_CORRELATION:
        raise VerificationError(
            f"the gauge does not fit {source.name} and {target.name}: {said}. Recover it again; "
            "--no-verify goes on all the same.",
            found,
        )
    return found


def matrices(source: Checkpoint, target: Checkpoint) -> Iterator[tuple[str, str, set[str]]]:
    """The weights of two axes or more that both models have in one shape.

    Yields the source's and the target's name, and the spaces that the weight indexes beside the
    residual stream.
    """
    for name, partner in source.chart.partners(source.files, target.files).items():
        shape = source.shape(name)
        if len(shape) >= 2 and target.shape(partner) == shape:
            yield name, partner, spaces_of(source.chart.axes(name, shape)) - {RESIDUAL.space}


def require_alike(
    gauge: Gauge, source: Checkpoint, target: Checkpoint, spaces: Collection[str]
) -> None:
    """Raise unless weights agree in spaces in which something lives and the gauge moves nothing.

    Compares the cosine of moved and wanted weights, a few for each kind of space. Raises
    VerificationError.
    """
    seen: dict[str, list[float]] = {}
    for name, partner, here in matrices(source, target):
        kinds = {kind_of(space) for space in here & set(spaces)}
        if here & gauge.elements.keys() or all(
            len(seen.get(kind, ())) >= WEIGHTS for kind in kinds
        ):
            continue
        moved, wanted = source.moved(gauge, name), target.tensor(partner)
        x, y = (side.double().flatten() for side in (moved, wanted))
        cosine = float(x @ y / (x.norm() * y.norm()).clamp_min(1e-300))
        for kind in kinds:
            seen.setdefault(kind, []).append(cosine)
    apart = {kind: sum(cosines) / len(cosines) for kind, cosines in sorted(seen.items())}
    apart = {kind: cosine for kind, cosine in apart.items() if not cosine >= LEAST_ALIKE}
    if apart:
        kind, cosine = next(iter(apart.items()))
        raise VerificationError(
            f"what is to be moved lives in {' and '.join(apart)} too, of which the gauge says "
            f"nothing, and there the weights of {source.name} and {target.name} are not alike "
            f"(cosine {cosine:.3f} in {kind}, at least {LEAST_ALIKE:g} was expected): recover a "
            "gauge with --spaces all; --no-verify moves it all the same.",
            {"weights": apart},
        )


def sure_coordinates(gauge: Gauge, size: int) -> Tensor:
    """Which of ``size`` residual coordinates a gauge is sure of: all, if it was constructed."""
    margin = gauge.margins.get(RESIDUAL.space)
    if margin is None:
        return torch.ones(size, dtype=torch.bool)
    verdict = Verdict.of(gauge)
    return margin >= (verdict.needed_margin if verdict is not None else WEAK_MARGIN)


def rows_agreement(gauge: Gauge, source: Checkpoint, target: Checkpoint) -> dict[str, Any]:
    """How far a gauge carries the token matrices of one model into the other's.

    Returns what :func:`check_gauge` does, and raises SignedAlignError if they have none in common.
    """
    blocks, rows = [], 0
    for _, x, y in token_rows(source, target):
        kept = slice(0, ROWS - rows)
        ours, theirs = x[kept].float().double(), y[kept].float().double()
        blocks.append((transport(ours, (None, RESIDUAL), gauge), theirs))
        rows += len(ours)
        if rows >= ROWS:
            break
    moved, wanted = (torch.cat(side) for side in zip(*blocks, strict=True))
    found: dict[str, Any] = {"of": "rows of the token matrices", "rows": rows}
    x, y = (side - side.mean(dim=0) for side in (moved, wanted))
    norms = x.norm(dim=0), y.norm(dim=0)
    alive = (norms[0] > 0) & (norms[1] > 0)
    if not alive.any():
        return {**found, "claim": "none", "skipped": "the token matrices do not vary"}
    x, y = (
        (side / norm.clamp_min(1e-300)).float() for side, norm in zip((x, y), norms, strict=True)
    )
    correlation = x.T @ y
    own = correlation.diagonal()
    against = correlation.abs().amax(dim=0) - own > sure_margin(rows)
    sure = sure_coordinates(gauge, len(alive)) & alive
    differs = (moved != wanted).any(dim=0)
    return {
        **found,
        "claim": "equal" if share_of(~differs[alive]) >= 0.5 else "similar",
        "correlation": float(own[alive].double().mean()),
        "against": share_of(against[sure]),
        "disagree": share_of(differs),
    }


def share_of(mask: Tensor) -> float:
    """The share of a mask that is true."""
    return float(mask.double().mean()) if mask.numel() else 0.0
