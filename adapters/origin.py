"""Which model an artifact was made on, and whether that is the one it meets."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from signed_align.chart import RESIDUAL
from signed_align.checkpoint import Checkpoint
from signed_align.errors import (
    ArtifactError,
    CheckpointError,
    GaugeError,
    SignedAlignError,
    SignedAlignWarning,
)
from signed_align.gauge import Gauge
from signed_align.provenance import Record
from signed_align.signed_permutation import SignedPermutation
from signed_align.verification import rows_agreement

if TYPE_CHECKING:
    from signed_align.adapters.artifact import Artifact, Journey

SAME_COORDINATES = 0.5
"""Models whose token matrices correlate more than this, coordinate by coordinate, share them."""


def is_proved_source(artifact: Artifact, journey: Journey, record: Record) -> bool:
    """Whether the artifact is proved to be made on the gauge's source; raises if it is not.

    A model that is at hand, or that an earlier move recorded, is compared by fingerprint. One that
    is neither can only be compared by name, which is reported but not a proof.
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
    if record.target is not None:
        if record.target.get("fingerprint") != gauge.source.fingerprint:
            raise GaugeError(
                f"{what} was moved to the coordinates of {record.target['name']} "
                f"({str(record.target.get('fingerprint'))[:12]}), and the gauge leads from "
                f"{gauge.source}; pass --any-source if both share their coordinates."
            )
        return True
    made_on = artifact.made_on or journey.made_on
    if not made_on:
        raise ArtifactError(
            f"{what} does not say which model it was made on, so it cannot be checked that the "
            f"gauge from {gauge.source.name} fits it; name the model with --made-on, or pass "
            "--any-source."
        )
    if not isinstance(made_on, str):
        raise ArtifactError(f"{what} names its model by {made_on!r}, not by a name.")
    if os.path.isdir(made_on):
        try:
            identity = Checkpoint.open(made_on).identity
        except CheckpointError:
            identity = None
        if identity is not None:
            gauge.require_source(identity)
            return artifact.made_on is not None  # what its user says is no proof
    if Path(made_on).name.lower() != Path(gauge.source.name).name.lower():
        raise ArtifactError(
            f"{what} was made on {made_on!r}, but the gauge leads from {gauge.source.name!r}; pass "
            "--any-source if both are the same model or share its coordinates."
        )
    return False


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
    record = Record.of(path)
    if record.target is not None:
        if record.target.get("fingerprint") != model.identity.fingerprint:
            _warn(path, record.target["name"], model, "by the record of its last move")
        return
    named = next((says[key] for key in MODEL_KEYS if isinstance(says.get(key), str)), None)
    if not named or not os.path.isdir(named):
        return
    try:
        home = Checkpoint.open(named)
        if home.identity.fingerprint == model.identity.fingerprint:
            return
        identity = Gauge({RESIDUAL.space: SignedPermutation.identity(model.chart.width)})
        correlation = rows_agreement(identity, home, model).get("correlation", 1.0)
    except SignedAlignError as error:
        _warn(path, named, model, str(error).rstrip("."))
        return
    if correlation < SAME_COORDINATES:
        found = f"the coordinates of their token matrices have a correlation of {correlation:.2f}"
        _warn(path, named, model, found)


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
