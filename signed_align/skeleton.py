"""A model without its weights: names, shapes and order of its parameters, from a config alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

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
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with _quiet(), torch.device("meta"):
            config = AutoConfig.for_model(**_plain(settings))
            named = [
                getattr(transformers, str(n), None) for n in settings.get("architectures") or ()
            ]
            model = (
                named[0](config)
                if named and _is_model_class(named[0])
                else AutoModelForCausalLM.from_config(config)
            )
            model.tie_weights()
            return model
    except Exception as error:  # a bad config fails in many ways
        raise CheckpointError(
            f"transformers cannot make a {settings.get('model_type')} model from its config: "
            f"{one_line(error)}"
        ) from error


def _is_model_class(found: Any) -> TypeGuard[type]:
    """Whether a config names a model class of transformers, and none that does other things."""
    from transformers import PreTrainedModel

    return isinstance(found, type) and issubclass(found, PreTrainedModel)


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
