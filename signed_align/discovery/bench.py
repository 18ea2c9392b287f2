"""The bench: a miniature on which a move of its weights is tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from signed_align.chart import star
from signed_align.errors import ChartError

TOLERANCE = 1e-5
"""Largest relative change of logits that counts as none."""


class Bench:
    """A miniature on which hypotheses are tried: is the function moved by this gauge or not?

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Small, on the CPU, in eval mode.
    inputs : mapping of str to Tensor
        What its ``forward`` takes.

    Raises
    ------
    ChartError
        If the logits are not finite, or all zero.
    """

    def __init__(self, model: Any, inputs: Mapping[str, Tensor]) -> None:
        self.model = model
        self.inputs = dict(inputs)
        self.state = _distinct(model.state_dict())
        self.before = self.output()
        if not bool(torch.isfinite(self.before).all()) or float(self.before.abs().max()) == 0:
            raise ChartError("the miniature's logits are not finite, so nothing can be proved")

    @torch.no_grad()
    def output(self) -> Tensor:
        """The model's output on the fixed inputs."""
        return self.model(**self.inputs).logits.detach().clone()

    def change(self, moved: Mapping[str, Tensor]) -> float:
        """The largest change of the output, relative to its largest value, with tensors replaced.

        ``moved`` maps state-dict names to new values. The model is left as it was. The change is
        infinite if the output is. Raises ChartError if names that share a tensor disagree.
        """
        self._require_ties(moved)
        kept = {name: self.state[name].clone() for name in moved}
        try:
            with torch.no_grad():
                for name, tensor in moved.items():
                    self.state[name].copy_(tensor)
            after = self.output()
        finally:
            with torch.no_grad():
                for name, tensor in kept.items():
                    self.state[name].copy_(tensor)
        if not bool(torch.isfinite(after).all()):
            return float("inf")
        return float((after - self.before).abs().max() / self.before.abs().max())

    def _require_ties(self, moved: Mapping[str, Tensor]) -> None:
        """Raise if one tensor would get two values, under the names that share it."""
        first: dict[int, str] = {}
        for name, tensor in moved.items():
            other = first.setdefault(self.state[name].data_ptr(), name)
            if not torch.equal(moved[other], tensor):
                raise ChartError(f"{other} and {name} are one tensor with two different labels")

    def to(self, dtype: torch.dtype) -> None:
        """Go on in another floating-point dtype."""
        self.model = self.model.to(dtype)
        self.inputs = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self.inputs.items()
        }
        self.state = _distinct(self.model.state_dict())
        self.before = self.output()


def _distinct(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A state dict's tensors, without those that a later layer shares with an earlier one."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, str]] = set()
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and (tensor.data_ptr(), star(name)) not in seen:
            seen.add((tensor.data_ptr(), star(name)))
            found[name] = tensor
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what classes say of themselves when they are built at odd sizes."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
