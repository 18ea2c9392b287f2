"""The command line. Commands import what they need when they run, so `--help` is immediate."""

from signed_align.cli import artifacts, checkpoints, gauges, reference
from signed_align.cli.framework import main

__all__ = ["artifacts", "checkpoints", "gauges", "main", "reference"]
