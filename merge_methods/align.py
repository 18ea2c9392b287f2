"""Align, then merge as any mergekit method does: a wrapper around each registered method."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Optional

import torch
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods.base import (
    BatchOptions,
    MergeMethod,
    MergeMethodSpec,
    OptionalTensorPolicy,
    ParameterScope,
    ParameterSpec,
    TensorEntry,
    TensorGroup,
)

from signed_align.checkpoint import Checkpoint
from signed_align.errors import ArtifactError, GaugeError
from signed_align.fit import require_fit
from signed_align.gauge import Gauge
from signed_align.labels import transport
from signed_align.matching import Objective
from signed_align.recovery import recover_by_weights
from signed_align.reliability import warn_of_verdict

NO_ALIGNMENT = "none"
GAUGE = "gauge"
ObjectiveName = Literal["sign_marginalized", "signed", "permutation", "none"]

ALIGNMENT_PARAMETERS = (
    ParameterSpec(
        GAUGE,
        Optional[str],  # noqa: UP045 (pydantic resolves it on Python 3.10 too)
        ParameterScope.INPUT,
        default=None,
        description="Gauge file between this model and the one whose coordinates the output has",
    ),
    ParameterSpec(
        "objective",
        ObjectiveName,
        ParameterScope.SHARED,
        default="sign_marginalized",
        description="How a gauge is recovered from weights where no file is given",
    ),
    ParameterSpec(
        "spaces",
        str,
        ParameterScope.SHARED,
        default="residual",
        description="Kinds of spaces to align where no gauge file is given: residual,mlp,heads, "
        "or all",
    ),
    ParameterSpec(
        "reference",
        Optional[str],  # noqa: UP045
        ParameterScope.SHARED,
        default=None,
        description="Model whose coordinates the output has; by default the base or first model",
    ),
    ParameterSpec(
        "accept_weak",
        bool,
        ParameterScope.SHARED,
        default=False,
        description="Merge even where no reliable gauge is found",
    ),
)


class GaugeBook:
    """Gauges between models, each computed or loaded once per process, whatever thread asks."""

    def __init__(self) -> None:
        self.check = True
        """Whether gauge files have to fit the weights of their models."""
        self._lock = threading.Lock()
        self._checkpoints: dict[tuple[Any, ...], Checkpoint] = {}
        self._gauges: dict[tuple[Any, ...], Gauge] = {}

    def checkpoint(self, model: Hashable) -> Checkpoint:
        """The checkpoint of a mergekit model reference."""
        if not isinstance(model, ModelReference):
            raise ArtifactError(
                f"the merge input {model!r} is not a model on disk, so its coordinates are not "
                "known."
            )
        path = str(LoaderCache().get(model).index.base_path)
        with self._lock:
            return self._opened(path)

    def gauge(
        self,
        source: Checkpoint,
        target: Checkpoint,
        file: str | None,
        objective: str,
        spaces: str,
        accept_weak: bool = False,
    ) -> Gauge:
        """The gauge from ``source``'s to ``target``'s coordinates.

        A gauge file may lead either way: the fingerprints say which. Raises GaugeError if it
        belongs to other checkpoints, UnreliableGaugeError if none is found. Warns where the verdict
        on it says that nothing should be moved.
        """
        ends = source.identity.fingerprint, target.identity.fingerprint
        key = (*ends, file and (file, _stamp(Path(file))), objective, spaces, accept_weak)
        with self._lock:
            if key not in self._gauges:
                if file is None:
                    kinds = [kind.strip() for kind in spaces.split(",")]
                    found = recover_by_weights(
                        source, target, Objective(objective), kinds, accept_weak=accept_weak
                    )
                else:
                    found = _oriented(Gauge.load(file), source, target)
                    if self.check:
                        require_fit(found, source, target)
                source.chart.require_native(found)
                warn_of_verdict(found)
                self._gauges[key] = found
            return self._gauges[key]

    def in_use(self) -> list[Gauge]:
        """The gauges that were computed or loaded."""
        with self._lock:
            return list(self._gauges.values())

    def summaries(self) -> list[dict[str, Any]]:
        """What is known of each gauge in use."""
        return [gauge.summary() for gauge in self.in_use()]

    def forget(self) -> None:
        """Let go of everything, so that a report speaks of one merge only."""
        with self._lock:
            self._checkpoints.clear()
            self._gauges.clear()

    def _opened(self, path: str) -> Checkpoint:
        key = path, tuple(_stamp(file) for file in sorted(Path(path).glob("*.safetensors")))
        if key not in self._checkpoints:
            self._checkpoints[key] = Checkpoint.open(path)
        return self._checkpoints[key]


def _stamp(file: Path) -> tuple[int, int] | None:
    """Changes when a file does, so that nothing stale is used."""
    if not os.path.isfile(file):
        return None
    status = file.stat()
    return status.st_mtime_ns, status.st_size


GAUGES = GaugeBook()


class AlignedMergeMethod(MergeMethod):
    """Moves every input into the reference model's coordinates, then calls another method.

    Parameters
    ----------
    inner : MergeMethod
        The method that merges the aligned tensors; its own parameters are untouched.
    name : str
        The name recipes use.
    """

    def __init__(self, inner: MergeMethod, name: str) -> None:
        self.inner = inner
        # mergekit hands an optional weight that only one input has straight to the output. That
        # is right only if the input is the base, whose coordinates the output has.
        policy = inner.spec.optional_tensor_policy
        if policy == OptionalTensorPolicy.PASSTHROUGH_SINGLETON:
            policy = OptionalTensorPolicy.PASSTHROUGH_BASE_SINGLETON
        self.spec: MergeMethodSpec = replace(
            inner.spec,
            name=name,
            pretty_name=f"Signed-Align, then {inner.spec.pretty_name or inner.spec.name}",
            parameters=(*inner.spec.parameters, *ALIGNMENT_PARAMETERS),
            optional_tensor_policy=policy,
        )

    def _execute(
        self,
        groups: Sequence[TensorGroup],
        parameters: list[dict[str, Any]],
        options: BatchOptions,
        *,
        input_dtypes: Sequence[torch.dtype | None],
        out_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, ...]:
        added = {parameter.name for parameter in ALIGNMENT_PARAMETERS}
        return self.inner._execute(
            [_aligned(group, values) for group, values in zip(groups, parameters, strict=True)],
            [
                {name: value for name, value in values.items() if name not in added}
                for values in parameters
            ],
            options,
            input_dtypes=input_dtypes,
            out_dtype=out_dtype,
        )


def _aligned(group: TensorGroup, parameters: dict[str, Any]) -> TensorGroup:
    objective = parameters["objective"]
    if objective == NO_ALIGNMENT or not group.entries:
        return group
    reference = _reference(group, parameters["reference"])
    target = GAUGES.checkpoint(reference)

    def aligned(entry: TensorEntry) -> TensorEntry:
        if str(entry.id) == str(reference):
            return entry
        source = GAUGES.checkpoint(entry.id)
        gauge = GAUGES.gauge(
            source,
            target,
            parameters[GAUGE][entry.id],
            objective,
            parameters["spaces"],
            parameters["accept_weak"],
        )
        name, tensor = group.metadata.name or "", entry.tensor
        axes = source.chart.axes(name, tensor.shape)
        origin = source.chart.origin(name, gauge)
        if origin != name:  # experts that change places
            tensor = source.tensor(origin).to(tensor.dtype).to(tensor.device)
        return replace(entry, tensor=transport(tensor, axes, gauge))

    return replace(group, entries=tuple(aligned(entry) for entry in group.entries))


def _reference(group: TensorGroup, named: str | None) -> Hashable:
    if named is not None:
        return ModelReference.parse(named)
    if group.base is not None:
        return group.base.id
    if len(group.entries) == 1:
        raise ArtifactError(
            f"{group.metadata.name} has a single input, so it does not show whose coordinates the "
            "output has: set the recipe's parameter `reference` to that model (`signed-align "
            "merge` does so by itself)."
        )
    return group.entries[0].id


def _oriented(gauge: Gauge, source: Checkpoint, target: Checkpoint) -> Gauge:
    ends = [end.fingerprint if end else None for end in (gauge.source, gauge.target)]
    models = [source.identity.fingerprint, target.identity.fingerprint]
    if ends == models:
        return gauge
    if ends == models[::-1]:
        return gauge.inverse()
    raise GaugeError(
        f"the gauge file leads from {gauge.source} to {gauge.target}, not between "
        f"{source.identity} and {target.identity}."
    )
