"""Discovery: reading a model's chart off a miniature of it, by shapes, roles of names, and trial.

Every dimension of a miniature is distinct where its class allows, so most axes say by their size
which space they index. Where sizes tie, the role that a module's name has in the ecosystem
decides (:mod:`~signed_align.discovery.roles`). Each further hypothesis (which half of a fused
matrix is the gate, how rotary planes are paired, whether heads are interchangeable) is put to the
model (:class:`~signed_align.discovery.trial.Trial`): the candidate that leaves the logits where
they were is the answer, and none is assumed that was not tried.
"""

from __future__ import annotations

from signed_align.chart import Chart
from signed_align.discovery import assembly, attention, experts, hidden_units, residual
from signed_align.discovery.bench import TOLERANCE, Bench, quiet
from signed_align.discovery.trial import Trial, text_config

__all__ = ["TOLERANCE", "Bench", "Discovery", "quiet", "text_config"]


class Discovery:
    """The discovery of one chart on one miniature.

    Parameters
    ----------
    bench : Bench
        The miniature, and what it reads.
    """

    def __init__(self, bench: Bench) -> None:
        self.trial = Trial(bench)

    def chart(self) -> Chart:
        """The chart, every label of it tried; raises ChartError, with the reason, if none holds.

        The residual stream comes first: the axes that it leaves are those of attention heads, of
        experts, and of hidden units, in this order.
        """
        trial = self.trial
        residual.settle(trial)
        for path in attention.modules(trial):
            attention.settle(trial, path)
        for path in experts.modules(trial):
            experts.settle(trial, path)
        for path, units in hidden_units.modules(trial):
            hidden_units.settle(trial, path, units)
        trial.drop_sites_that_fail()
        return assembly.chart(trial)
