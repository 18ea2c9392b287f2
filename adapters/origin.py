"""Which model an artifact was made on, and whether that is the one it meets."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from signed_align.chart import RESIDUAL
from signed_align.checkpoint import Checkpoint
from signed_align.errors import (
    ArtifactError,
    GaugeError,
    SignedAlignError,
    SignedAlignWarning,
)
from signed_align.fit import at_hand, find, rows_agreement
from signed_align.gauge import Gauge
from signed_align.provenance import Record
from signed_align.signed_permutation import SignedPermutation

if TYPE_CHECKING:
    from signed_align.adapters.artifact import Artifact, Journey

SAME_COORDINATES = 0.5
"""Models whose token matrices correlate more than this, coordinate by coordinate, share them."""


def is_proved_source(artifact: Artifact, journey: Journey, record: Record) -> bool:
    """Whether the artifact is proved to be made on the gauge's source; raises if it is not.

    A model that is at hand, or that the record of an earlier move names, is compared by
    fingerprint. One that is neither can only be compared by name, which is reported but not a
    proof. A record speaks only for files that are still what that move wrote.
    """
    gauge = journey.gauge
    assert gauge.source is not None
    what = f"{artifact.path.name} ({artifact.kind})"
    if artifact.identity is not None:
        try:
            gauge.require_source(artifact.identity)
        except GaugeError as error:
            raise GaugeError(
                f"{str(error).rstrip('.')}; pass --any-source if it was trained from the gauge's "
                "source and shares its coordinates."
            ) from error
        return True
    moved = record if record.steps else None
    said = [artifact.made_on, journey.made_on, _place(moved.target) if moved else None]
    names = list(dict.fromkeys(name for name in said if name))
    if moved is not None and moved.target is None:
        raise ArtifactError(
            f"{what} was moved through a gauge that does not say where it leads, so it is not "
            "known where it is now; pass --any-source if it is on the gauge's source."
        )
    if not names:
        raise ArtifactError(
            f"{what} does not say which model it was made on, so it cannot be checked that the "
            f"gauge from {gauge.source.name} fits it; name the model with --made-on, or pass "
            "--any-source."
        )
    proved = False
    for name in names:
        recorded = moved is not None and name == _place(moved.target)
        proved |= _require_source(what, name, gauge, moved if recorded else None) and (
            recorded or name == artifact.made_on  # what its user says is no proof
        )
    return proved


def _place(model: Mapping[str, Any] | None) -> str | None:
    return str(model["name"]) if model else None


def _require_source(what: str, name: str, gauge: Gauge, record: Record | None) -> bool:
    """Whether ``name`` is the gauge's source by fingerprint; raises if it is another model."""
    assert gauge.source is not None
    if record is not None and record.target is not None:
        if record.target.get("fingerprint") != gauge.source.fingerprint:
            raise GaugeError(
                f"{what} was moved to the coordinates of {name} "
                f"({str(record.target.get('fingerprint'))[:12]}), and the gauge leads from "
                f"{gauge.source}; pass --any-source if both share their coordinates."
            )
        return True
    home = find(name)
    if home is not None:
        gauge.require_source(home.identity)
        return True
    if Path(name).name.lower() != Path(gauge.source.name).name.lower():
        raise ArtifactError(
            f"{what} was made on {name!r}, but the gauge leads from {gauge.source.name!r}; pass "
            "--any-source if both are the same model or share its coordinates."
        )
    return False


def doubt_about(artifact: Artifact, journey: Journey, record: Record) -> str | None:
    """Why, where any source is accepted, the artifact does not seem to be on the gauge's.

    Only where its own model is at hand: one that was trained from the gauge's source shares its
    coordinates, a twin of it does not. Warns, too.
    """
    home = Checkpoint.open(artifact.path) if artifact.identity else None
    for name in (_place(record.target), artifact.made_on, journey.made_on):
        home = home or (find(name) if name else None)
    source = at_hand(journey.gauge.source)
    if home is None or source is None or home.identity.fingerprint == source.identity.fingerprint:
        return None
    reason = _difference(home, source)
    if reason:
        warnings.warn(
            f"{artifact.path.name} lives in the coordinates of {home.name}, and the gauge leads "
            f"from {source.name}, which seems to have others ({reason}): moved through it, it is "
            "probably wrong.",
            SignedAlignWarning,
            stacklevel=4,
        )
    return reason


def warn_if_foreign(path: Path, says: Mapping[str, Any], model: Checkpoint) -> None:
    """Warn if an artifact was made in other coordinates than those of the model that it meets.

    Parameters
    ----------
    path : Path
        The artifact.
    says : mapping of str to object
        What its family's ``inspect`` found.
    model : Checkpoint
        The model.
    """
    record, _ = Record.current(path)
    named = next((says[key] for key in MODEL_KEYS if isinstance(says.get(key), str)), None)
    if record.target is not None:
        if record.target.get("fingerprint") == model.identity.fingerprint:
            return
        named = record.target["name"]
    home = find(named) if named else None
    if home is None:
        if record.target is not None:
            _warn(path, str(named), model, "by the record of its last move")
        return
    if home.identity.fingerprint == model.identity.fingerprint:
        return
    reason = _difference(home, model)
    if reason:
        _warn(path, home.name, model, reason)


def _difference(one: Checkpoint, other: Checkpoint) -> str | None:
    """Why two models do not seem to share their coordinates; None if they seem to."""
    try:
        identity = Gauge({RESIDUAL.space: SignedPermutation.identity(other.chart.width)})
        correlation = rows_agreement(identity, one, other).get("correlation", 1.0)
    except SignedAlignError as error:
        return str(error).rstrip(".")
    if correlation >= SAME_COORDINATES:
        return None
    return f"the coordinates of their token matrices have a correlation of {correlation:.2f}"


MODEL_KEYS = ("base_model_name_or_path", "model_name", "model")
"""Where an artifact names its model, in what ``inspect`` says of it."""


def _warn(path: Path, home: str, model: Checkpoint, reason: str) -> None:
    warnings.warn(
        f"{path.name} lives in the coordinates of {home}, and {model.name} seems to have others "
        f"({reason}): what comes out may be plausible and wrong. `signed-align diagnose` says what "
        "relates the two, and `port` moves it.",
        SignedAlignWarning,
        stacklevel=3,
    )
