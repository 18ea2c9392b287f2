"""The errors a user can act on. Each message says what was found, what was expected, what to do."""

from collections.abc import Mapping
from typing import Any


def one_line(error: Exception) -> str:
    """What another library's exception says, on a single line."""
    return " ".join(str(error).split())


class SignedAlignError(Exception):
    """Bad input. The command line prints it as one sentence and exits with ``exit_code``."""

    exit_code = 2

    @property
    def details(self) -> dict[str, Any]:
        """What ``--json`` prints beside the sentence."""
        return {}


class GaugeError(SignedAlignError):
    """A gauge that is malformed, of the wrong width, or not in the model's symmetry group."""


class UnreliableGaugeError(GaugeError):
    """No gauge that can be relied on leads between two models; ``verdict`` says what was found."""

    exit_code = 3

    def __init__(self, message: str, verdict: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.verdict = dict(verdict)

    @property
    def details(self) -> dict[str, Any]:
        """The verdict."""
        return {"verdict": self.verdict}


class ChartError(SignedAlignError):
    """A model or tensor whose axes are not known, so moving it would be a guess."""


class CheckpointError(SignedAlignError):
    """A checkpoint that cannot be read, or an output that cannot be written."""


class ArtifactError(SignedAlignError):
    """An adapter, SAE or recipe that cannot be moved, with the reason."""


class SignedAlignWarning(UserWarning):
    """Something a user should know that does not stop the work."""
