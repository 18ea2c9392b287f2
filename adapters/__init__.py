"""Artifacts that live in a model's coordinates, one module per family.

A family only labels tensors; :func:`port` moves them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from signed_align.adapters.artifact import Artifact, Family, move
from signed_align.adapters.lora import LoraFamily
from signed_align.adapters.sae import SaeFamily
from signed_align.errors import ArtifactError
from signed_align.gauge import Gauge

__all__ = ["FAMILIES", "Artifact", "Family", "port", "recognise"]

FAMILIES: tuple[Family, ...] = (LoraFamily(), SaeFamily())


def recognise(path: Path) -> Family | None:
    """The family of the artifact in directory ``path``, or None."""
    return next((family for family in FAMILIES if family.recognises(path)), None)


def port(
    artifact: str | Path,
    gauge: Gauge,
    out: str | Path,
    *,
    inverse: bool = False,
    any_source: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Move a PEFT LoRA adapter or an SAELens SAE from the gauge's source to its target.

    Parameters
    ----------
    artifact : str or Path
        The artifact's directory.
    gauge : Gauge
        Leads from the model the artifact was made on to the model it is wanted on.
    out : str or Path
        The directory to make; the artifact's own library loads it from there.
    inverse : bool
        Use the inverse gauge.
    any_source : bool
        Accept an artifact that was made on another model than the gauge's source.
    force : bool
        Replace ``out`` if it exists.

    Returns
    -------
    dict
        ``kind`` (what was recognised), ``out``, ``tensors`` (how many were moved), ``made_on``,
        ``source_verified``, ``left_out`` (weight files that do not belong to the artifact).

    Raises
    ------
    ArtifactError
        If the artifact, or any tensor in it, is not understood.
    """
    path = Path(artifact)
    if not path.is_dir():
        raise ArtifactError(f"there is no artifact directory at {path}.")
    family = recognise(path)
    if family is None:
        hint = (
            "it looks like a whole checkpoint, which `signed-align apply` moves"
            if (path / "config.json").is_file()
            else "expected " + " or ".join(known.kind for known in FAMILIES)
        )
        raise ArtifactError(f"{path} is not an artifact that can be ported: {hint}.")
    return move(
        family,
        path,
        gauge.inverse() if inverse else gauge,
        Path(out),
        any_source=any_source,
        force=force,
    )
