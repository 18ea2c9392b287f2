"""The demonstration: a LoRA, an SAE and a merge survive the move to a scrambled twin."""

from signed_align.demo.run import run_demo

__all__ = ["run_demo"]
