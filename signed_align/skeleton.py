"""A model without its weights: names, shapes and order of its parameters, from a config alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from signed_align.errors import CheckpointError, one_line


def skeleton(settings: Mapping[str, Any]) -> Any:
    """The model that a ``config.json`` describes, on torch's meta device, which holds no numbers.

    Parameters
    ----------
    settings : mapping
        The contents of ``config.json``.

    Raises
    ------
    CheckpointError
        If transformers cannot make the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with _quiet(), torch.device("meta"):
            config = AutoConfig.for_model(**_plain(settings))
            named = named_classes(settings.get("architectures"))
            model = named[0](config) if named else AutoModelForCausalLM.from_config(config)
            model.tie_weights()
            return model
    except Exception as error:  # a bad config fails in many ways
        raise CheckpointError(
            f"transformers cannot make a {settings.get('model_type')} model from its config: "
            f"{one_line(error)}"
        ) from error


def named_classes(architectures: Any) -> list[Any]:
    """The classes of models, and of nothing else, that a config names as its architectures."""
    import transformers

    names = architectures if isinstance(architectures, (list, tuple)) else ()
    found = [getattr(transformers, name, None) for name in names if isinstance(name, str)]
    return [
        cls
        for cls in found
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    ]


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "auto_map"}


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
