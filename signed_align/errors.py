"""The errors a user can act on. Each message says what was found, what was expected, what to do.

The command line ends with the exit code of the error: 2 for bad input, 3 where no reliable gauge is
found, 4 where a result does not keep its promise. An exception of any other class is a bug, code 1.
"""

from collections.abc import Mapping
from typing import Any


def one_line(error: Exception) -> str:
    """What another library's exception says, on a single line."""
    return " ".join(str(error).split())


def printable(text: str) -> str:
    """A line of text in which what no terminal should be given is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


MOST_CHARACTERS = 1500
"""A longer message, which quotes a file at length, is cut in its middle."""


def _sentence(message: str) -> str:
    """A message as one line that can be printed anywhere and ends with a full stop.

    Names and values of files stand in messages, and a file may call a tensor anything.
    """
    text = printable(" ".join(message.split()))
    if len(text) > MOST_CHARACTERS:
        text = f"{text[: MOST_CHARACTERS - 400]} … {text[-400:]}"
    return text if text.endswith(".") else f"{text}."


class SignedAlignError(Exception):
    """What a user can act on, in one sentence. The command line exits with ``exit_code``."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(_sentence(message))

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
    """A checkpoint that cannot be read, or that does not fit another one."""


class ArtifactError(SignedAlignError):
    """An adapter, SAE or recipe that cannot be moved, with the reason."""


class OutputError(SignedAlignError):
    """An output that may not be, or cannot be, written; nothing of it is left behind."""


class SourceError(SignedAlignError):
    """An input that changed or disappeared while it was being read."""


class VerificationError(SignedAlignError):
    """A result that does not agree as its claim implies; ``measured`` says what was found."""

    exit_code = 4

    def __init__(self, message: str, measured: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.measured = dict(measured)

    @property
    def details(self) -> dict[str, Any]:
        """What was measured."""
        return {"verification": self.measured}


class SignedAlignWarning(UserWarning):
    """Something a user should know that does not stop the work."""
