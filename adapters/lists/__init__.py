"""Lists of neurons and coordinates, in JSON, tables and torch files."""

from signed_align.adapters.lists.family import ListFamily

__all__ = ["ListFamily"]
