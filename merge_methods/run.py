"""Running a mergekit recipe: errors in one sentence, output only when it is complete."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from pydantic import ValidationError

from signed_align.activations import sentences_of
from signed_align.checkpoint import Checkpoint
from signed_align.errors import ArtifactError, SignedAlignError, one_line
from signed_align.files import atomic_path
from signed_align.gauge import BASELINES
from signed_align.merge_methods.align import GAUGES, NO_ALIGNMENT, AlignedMergeMethod
from signed_align.merge_methods.recipe import (
    gauge_files,
    parsed,
    read_text,
    reference_of,
    require_known_parameters,
    require_one_vocabulary,
    with_absolute_paths,
)
from signed_align.model_card import add_section
from signed_align.provenance import Record, end, gauge_summary, text_hash
from signed_align.sources import Sources
from signed_align.verification import verified, verify_merge


def merge(
    recipe: str | Path,
    out: str | Path,
    options: MergeOptions | None = None,
    *,
    verify: bool | None = None,
    text: str | Path | Sequence[str] | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Run a mergekit recipe, aligned or not, and write the merged checkpoint to ``out``.

    Parameters
    ----------
    recipe : str or Path
        A YAML recipe as ``mergekit-yaml`` takes it. Relative model and gauge paths are looked up
        from the working directory, as mergekit does.
    out : str or Path
        The directory to make.
    options : MergeOptions, optional
        mergekit's options; its defaults otherwise.
    verify : bool, optional
        Run the merged model and its inputs on a few tokens: its loss must be finite and, where all
        inputs compute the same function, its logits must be theirs. None does so where they are
        small, or skips it with the reason. False does neither, and takes gauge files as they are.
    text : path or sequence of str, optional
        What they are run on; prose that ships with Python by default.
    force : bool
        Replace ``out`` if it exists.

    Returns
    -------
    dict
        ``out``, ``merge_method``, ``reference`` (whose coordinates the output has; None where the
        method does not align), ``gauges`` (one summary per aligned model) and ``verification``.

    Raises
    ------
    VerificationError
        If the merged model is not what it should be.
    SignedAlignError
        If the recipe is not valid, or the models cannot be aligned.
    """
    from mergekit import merge_methods

    options = options or MergeOptions()
    GAUGES.forget()
    given = sentences_of(text) if text is not None else None
    source = read_text(recipe)
    content = parsed(source, recipe)
    try:
        config = MergeConfiguration.model_validate(with_absolute_paths(content))
        method = merge_methods.get(config.merge_method)
    except (ValidationError, RuntimeError, ValueError, yaml.YAMLError, TypeError) as error:
        raise ArtifactError(f"the recipe {recipe} is not valid: {one_line(error)}") from error
    whole_models = bool(config.models)  # run_merge rewrites the recipe into slices
    if not any(_has_tokenizer(model) for model in config.referenced_models()):
        options = options.model_copy(update={"copy_tokenizer": False})
    reference = None
    if isinstance(method, AlignedMergeMethod):
        config.parameters = dict(config.parameters or {})
        reference = str(config.parameters.setdefault("reference", reference_of(config)))
        require_known_parameters(content)
        require_one_vocabulary(config)
    named = [Path(model.model.path) for model in config.referenced_models()]
    local = [path for path in named if os.path.isdir(path)]  # a name may be too long for a path
    read = [file for path in local for file in path.iterdir() if file.is_file()]
    sources = Sources.of(read)
    if verify and not (reference and options.safe_serialization):
        raise ArtifactError(
            "only merges that align and write safetensors are verified; leave --verify out, or "
            "merge with signed_align or signed_align_<method>."
        )
    if reference:
        for path in local:
            Checkpoint.open(path)  # what is wrong with a model is said before mergekit sees it
    inputs = [*local, *gauge_files(content)]
    with atomic_path(Path(out), directory=True, force=force, inputs=inputs) as temporary:
        GAUGES.check = verify is not False
        try:
            run_merge(config, str(temporary), options, config_source=source)
        except SignedAlignError:
            raise
        except Exception as error:  # mergekit and the Hub client raise errors of many kinds
            raise ArtifactError(f"mergekit could not merge: {one_line(error)}") from error
        finally:
            GAUGES.check = True
        found = {"skipped": "the recipe does not align, or does not write safetensors"}
        if reference and options.safe_serialization:
            result = Checkpoint.open(temporary)
            _require_complete(result, ModelReference.parse(reference), whole_models)
            models = _inputs(config, reference)
            unless = None if whole_models else "a recipe of slices makes a model unlike its inputs"
            if config.parameters.get("objective") in (*BASELINES, NO_ALIGNMENT):
                unless = "a baseline, or nothing is aligned"
            found = verified(
                verify,
                [*models.values(), result],
                lambda: verify_merge(
                    result,
                    list(models.values()),
                    sentences_of(None) if given is None else given,
                    same_shape=whole_models,
                ),
                unless=unless,
            )
            _record(result, out, models, reference, config.merge_method, source, found)
        sources.require_unchanged()
    return {
        "out": str(out),
        "merge_method": config.merge_method,
        "reference": reference,
        "gauges": GAUGES.summaries() if reference else [],
        "verification": found,
    }


def _inputs(config: MergeConfiguration, reference: str) -> dict[str, Checkpoint]:
    """The models of a recipe by name, each once, the reference first."""
    models = {str(model): model for model in config.referenced_models()}
    names = sorted(models, key=lambda name: (name != reference, name))
    return {name: GAUGES.checkpoint(models[name]) for name in names}


def _record(
    merged: Checkpoint,
    out: str | Path,
    inputs: Mapping[str, Checkpoint],
    reference: str,
    method: str,
    recipe: str,
    verification: Mapping[str, Any],
) -> None:
    """Leave the record of a merge, and its section in the model card."""
    ends = {name: end(replace(model.identity, name=name)) for name, model in inputs.items()}
    record = Record().then(
        action="merge",
        merge_method=method,
        recipe_hash=text_hash([recipe]),
        models=list(ends.values()),
        source=None,
        target=end(replace(merged.identity, name=str(out))),
        reference=ends.get(reference)
        or end(GAUGES.checkpoint(ModelReference.parse(reference)).identity),
        gauges=[gauge_summary(gauge) for gauge in GAUGES.in_use()],
        verification=dict(verification),
    )
    record.save(merged.path)
    add_section(merged.path, record)


def _require_complete(merged: Checkpoint, model: ModelReference, whole_models: bool) -> None:
    """Raise if mergekit left out weights: it writes only those its architecture file lists.

    A recipe of slices may renumber layers, so there only the kinds of weights are compared.
    """
    checkpoint = GAUGES.checkpoint(model)

    def kinds(names: Iterable[str]) -> set[str]:
        return {name if whole_models else re.sub(r"\.\d+\.", ".*.", name) for name in names}

    weights = [name for name in checkpoint.files if not checkpoint.chart.is_buffer(name)]
    missing = sorted(kinds(weights) - kinds(merged.files))
    if missing:
        raise ArtifactError(
            f"mergekit left out {len(missing)} weights that it does not know of, such as "
            f"{missing[0]!r}, so the merged model would be incomplete."
        )


def _has_tokenizer(model: ModelReference) -> bool:
    """Whether a local model has one for mergekit to copy; a model on the Hub is taken to."""
    path = Path(model.model.path)
    return not os.path.isdir(path) or any(
        any(path.glob(pattern)) for pattern in ("tokenizer*", "vocab.*", "*.model", "merges.txt")
    )
