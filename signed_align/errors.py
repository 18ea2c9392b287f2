"""The errors a user can act on. Each message says what was found, what was expected, what to do."""


def one_line(error: Exception) -> str:
    """What another library's exception says, on a single line."""
    return " ".join(str(error).split())


class SignedAlignError(Exception):
    """Bad input. The command line prints it as one sentence and exits with code 2."""


class GaugeError(SignedAlignError):
    """A gauge that is malformed, of the wrong width, or not in the model's symmetry group."""


class ChartError(SignedAlignError):
    """A model or tensor whose axes are not known, so moving it would be a guess."""


class CheckpointError(SignedAlignError):
    """A checkpoint that cannot be read, or an output that cannot be written."""


class ArtifactError(SignedAlignError):
    """An adapter, SAE or recipe that cannot be moved, with the reason."""


class SignedAlignWarning(UserWarning):
    """Something a user should know that does not stop the work."""
