"""A gauge: which group element leads from one model's coordinates to another's, space by space."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from signed_align.errors import GaugeError
from signed_align.files import atomic_path
from signed_align.refusals import require_plausible
from signed_align.signed_permutation import SignedPermutation

FORMAT = "signed-align-gauge"
FORMAT_VERSION = "1"
WEAK_MARGIN = 0.05
"""Below this margin in |correlation| a coordinate's partner could as well be another one."""

BASELINES = ("signed", "permutation")
"""Objectives of :class:`~signed_align.matching.Objective` that give every coordinate the sign +."""

_KINDS = {"signed_permutation": SignedPermutation}


@dataclass(frozen=True)
class ModelIdentity:
    """Which checkpoint one end of a gauge is: the name it was opened by, and its fingerprint.

    ``config`` is its config.json, from which the chart is made again where the model is not at
    hand. ``revision`` is the commit of a model from the Hub, empty for any other.
    """

    name: str
    fingerprint: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    revision: str = field(default="", compare=False)

    @property
    def config_hash(self) -> str:
        """SHA-256 of the config, its keys sorted; empty if there is none."""
        if not self.config:
            return ""
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()

    def summary(self) -> dict[str, str]:
        """What reports and records say of it."""
        names = ("name", "fingerprint", "model_type", "config_hash", "revision")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return f"{self.name} ({self.fingerprint[:12]})"


@dataclass(frozen=True)
class Gauge:
    """Group elements that lead from the source's coordinates to the target's.

    Parameters
    ----------
    elements : mapping of str to SignedPermutation
        One element per space; a space that is absent is not moved.
    margins : mapping of str to Tensor, shape (d,), float32
        Per target coordinate: the matched score minus the best score of any other candidate in
        its row or column. Absent when the gauge was constructed, not recovered.
    source, target : ModelIdentity, optional
        The checkpoints the gauge leads between.
    provenance : mapping
        How the gauge came about: method, objective, number of tokens, seed.
    """

    elements: Mapping[str, SignedPermutation]
    margins: Mapping[str, Tensor] = field(default_factory=dict)
    source: ModelIdentity | None = None
    target: ModelIdentity | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for space, margin in self.margins.items():
            fits = space in self.elements and margin.shape == (self.elements[space].size,)
            if not fits or not torch.isfinite(margin).all():
                raise GaugeError(
                    f"the margins of space {space!r} are not one finite number a coordinate."
                )
        object.__setattr__(self, "elements", MappingProxyType(dict(self.elements)))
        object.__setattr__(self, "margins", MappingProxyType(dict(self.margins)))

    @property
    def content_hash(self) -> str:
        """SHA-256 of what the gauge does: its spaces and their elements."""
        digest = hashlib.sha256()
        for space in sorted(self.elements):
            digest.update(f"{space}\n".encode())
            for name, tensor in sorted(self.elements[space].to_tensors().items()):
                digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def element(self, space: str) -> SignedPermutation:
        """The element of a space; raises GaugeError if the gauge does not move it."""
        if space not in self.elements:
            raise GaugeError(f"the gauge does not move the {space} space.")
        return self.elements[space]

    def restricted(self, kinds: Sequence[str]) -> Gauge:
        """The gauge with only the spaces of some kinds: ``residual``, ``mlp``, …"""

        def kept(space: str) -> bool:
            return space.partition(":")[0] in kinds

        return replace(
            self,
            elements={s: element for s, element in self.elements.items() if kept(s)},
            margins={s: margin for s, margin in self.margins.items() if kept(s)},
        )

    def without_signs(self) -> Gauge:
        """Its permutations with every sign +1: the best that matching permutations alone finds."""
        elements = {space: element.unsigned for space, element in self.elements.items()}
        return replace(self, elements=elements)

    def inverse(self) -> Gauge:
        """The gauge that leads back from target to source."""
        inverses = {space: element.inverse() for space, element in self.elements.items()}
        return Gauge(
            elements=inverses,
            margins={
                space: inverses[space].apply(margin, 0, signed=False)
                for space, margin in self.margins.items()
            },
            source=self.target,
            target=self.source,
            provenance={**self.provenance, "inverted": not self.provenance.get("inverted", False)},
        )

    def then(self, other: Gauge) -> Gauge:
        """The composition along a path: first this gauge, then ``other``.

        A composed margin is the weaker of the two along the coordinate's path. Raises GaugeError
        if ``other`` does not start where this gauge ends.
        """
        if self.target and other.source:
            other.require_source(self.target)
        elements = {**other.elements, **self.elements}
        margins = {**other.margins, **self.margins}
        for space in self.elements.keys() & other.elements.keys():
            elements[space] = self.elements[space].then(other.elements[space])
            carried = [
                other.elements[space].apply(self.margins[space], 0, signed=False)
                if space in self.margins
                else None,
                other.margins.get(space),
            ]
            known = [margin for margin in carried if margin is not None]
            if known:
                margins[space] = torch.stack(known).amin(dim=0)
        return Gauge(
            elements=elements,
            margins=margins,
            source=self.source,
            target=other.target,
            provenance={"path": [dict(self.provenance), dict(other.provenance)]},
        )

    def require_source(self, model: ModelIdentity) -> None:
        """Raise GaugeError unless the gauge starts at ``model``, by fingerprint."""
        _require("source", self.source, model, self.target)

    def require_target(self, model: ModelIdentity) -> None:
        """Raise GaugeError unless the gauge ends at ``model``, by fingerprint."""
        _require("target", self.target, model, self.source)

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the gauge as one safetensors file; raises OutputError if ``path`` exists."""
        tensors: dict[str, Tensor] = {}
        spaces = {}
        for space, element in self.elements.items():
            kind = next(name for name, cls in _KINDS.items() if isinstance(element, cls))
            spaces[space] = {"kind": kind}
            for name, tensor in element.to_tensors().items():
                tensors[f"{space}.{name}"] = tensor.contiguous()
        for space, margin in self.margins.items():
            tensors[f"{space}.margin"] = margin.to(torch.float32).contiguous()
        metadata = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "spaces": json.dumps(spaces),
            "source": json.dumps(asdict(self.source) if self.source else None),
            "target": json.dumps(asdict(self.target) if self.target else None),
            "provenance": json.dumps(dict(self.provenance)),
        }
        with atomic_path(Path(path), directory=False, force=force) as temporary:
            temporary.write_bytes(save(tensors, metadata=metadata))

    @staticmethod
    def recognises(path: Path) -> bool:
        """Whether the file at ``path`` says that it is a gauge."""
        try:
            with safe_open(path, framework="pt") as file:
                return (file.metadata() or {}).get("format") == FORMAT
        except (SafetensorError, OSError):
            return False

    @classmethod
    def load(cls, path: str | Path) -> Gauge:
        """Read a gauge file; raises GaugeError if it is missing, damaged or of another format."""
        path = Path(path)
        if not os.path.isfile(path):
            raise GaugeError(f"there is no gauge file at {path}.")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise GaugeError(f"{path} is not a readable safetensors file: {error}.") from error
        if metadata.get("format") != FORMAT:
            raise GaugeError(f"{path} is not a gauge file (its format is not {FORMAT!r}).")
        if metadata.get("version") != FORMAT_VERSION:
            raise GaugeError(
                f"{path} has gauge format version {metadata.get('version')}; "
                f"this release reads version {FORMAT_VERSION}."
            )
        try:
            elements = {
                space: _KINDS[entry["kind"]].from_tensors(
                    {
                        name.removeprefix(f"{space}."): tensor
                        for name, tensor in tensors.items()
                        if name.startswith(f"{space}.")
                    }
                )
                for space, entry in json.loads(metadata["spaces"]).items()
            }
            source, target = (
                ModelIdentity(**end) if end else None
                for end in (json.loads(metadata["source"]), json.loads(metadata["target"]))
            )
            provenance = json.loads(metadata["provenance"])
            _require_valid(elements, source, target, provenance)
            if any(t.dtype != torch.float32 for n, t in tensors.items() if n.endswith(".margin")):
                raise TypeError("its margins are not float32")
            return cls(
                elements=elements,
                margins={
                    space: tensors[f"{space}.margin"]
                    for space in elements
                    if f"{space}.margin" in tensors
                },
                source=source,
                target=target,
                provenance=provenance,
            )
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise GaugeError(f"{path} is not a valid gauge file: {error!r}.") from error

    def summary(self) -> dict[str, Any]:
        """What ``inspect`` and ``--json`` say of the gauge: sizes, signs, margins, both ends."""
        spaces: dict[str, dict[str, Any]] = {}
        for space, element in self.elements.items():
            spaces[space] = element.describe()
            if space in self.margins:
                spaces[space]["margin"] = margin_quantiles(self.margins[space])
                spaces[space]["weak_fraction"] = float(
                    (self.margins[space] < WEAK_MARGIN).double().mean()
                )
        return {
            "hash": self.content_hash,
            "spaces": spaces,
            "source": self.source.summary() if self.source else None,
            "target": self.target.summary() if self.target else None,
            "provenance": dict(self.provenance),
        }


def by_kind(gauge: Gauge, truth: Gauge | None = None) -> dict[str, dict[str, Any]]:
    """A gauge's spaces summed up by kind: residual, mlp, heads, …

    Parameters
    ----------
    gauge : Gauge
        The gauge.
    truth : Gauge, optional
        A gauge to score against, over the spaces that both have.

    Returns
    -------
    dict
        Per kind: ``spaces``, ``coordinates``, ``positive_sign_fraction``,
        ``fixed_point_fraction``; where there are margins ``margin`` and ``weak_fraction``; where
        there is a truth ``permutation_accuracy`` and ``sign_accuracy``.
    """
    kinds: dict[str, list[str]] = {}
    for space in gauge.elements:
        kinds.setdefault(space.partition(":")[0], []).append(space)
    return {kind: _pooled(gauge, truth, spaces) for kind, spaces in kinds.items()}


def _pooled(gauge: Gauge, truth: Gauge | None, spaces: list[str]) -> dict[str, Any]:
    sizes = {space: gauge.elements[space].size for space in spaces}
    total = sum(sizes.values())

    def mean(values: Mapping[str, float]) -> float:
        return sum(values[space] * sizes[space] for space in values) / sum(
            sizes[space] for space in values
        )

    described = {space: gauge.elements[space].describe() for space in spaces}
    entry: dict[str, Any] = {"spaces": len(spaces), "coordinates": total}
    for name in ("positive_sign_fraction", "fixed_point_fraction"):
        entry[name] = mean({space: described[space][name] for space in spaces})
    margins = [gauge.margins[space] for space in spaces if space in gauge.margins]
    if margins:
        pooled = torch.cat(margins)
        entry["margin"] = margin_quantiles(pooled)
        entry["weak_fraction"] = float((pooled < WEAK_MARGIN).double().mean())
    shared = [space for space in spaces if truth is not None and space in truth.elements]
    if truth is not None and shared:
        scores = {space: gauge.elements[space].agreement(truth.elements[space]) for space in shared}
        for name in ("permutation_accuracy", "sign_accuracy"):
            entry[name] = mean({space: scores[space][name] for space in shared})
    return entry


def margin_quantiles(margin: Tensor) -> dict[str, float]:
    """Minimum, 5 %, median and 95 % quantile of per-coordinate margins of shape (d,)."""
    ordered = margin.double().sort().values  # torch.quantile refuses more than 16 million
    places = [round(share * (len(ordered) - 1)) for share in (0.0, 0.05, 0.5, 0.95)]
    values = ordered[places]
    return dict(zip(("min", "q05", "median", "q95"), values.tolist(), strict=True))


def _require_valid(
    elements: Mapping[str, SignedPermutation],
    source: ModelIdentity | None,
    target: ModelIdentity | None,
    provenance: Any,
) -> None:
    if not elements or not all(element.size for element in elements.values()):
        raise ValueError("it moves no coordinates")
    if not isinstance(provenance, dict):
        raise TypeError("its provenance is not an object")
    for end in (source, target):
        if end and not isinstance(end.config, dict):
            raise TypeError("an end's config must be an object")
        if end:
            require_plausible(end.name, end.config)
        if end and not all(isinstance(value, str) for value in end.summary().values()):
            raise TypeError("an end's name, fingerprint, model_type and revision must be strings")


def _require(
    end: str, recorded: ModelIdentity | None, model: ModelIdentity, other: ModelIdentity | None
) -> None:
    if recorded is None:
        raise GaugeError(
            f"the gauge does not say which model is its {end}, so it cannot be checked "
            f"against {model}."
        )
    if recorded.fingerprint == model.fingerprint:
        return
    if other is not None and other.fingerprint == model.fingerprint:
        raise GaugeError(
            f"{model} is the other end of the gauge, whose {end}, this way round, is {recorded}: "
            "turn it round (--inverse, or leave that out)."
        )
    if recorded.fingerprint != model.fingerprint:
        raise GaugeError(
            f"the gauge's {end} is {recorded}, not {model}: it was made for another checkpoint."
        )
