"""Broken and hostile files through every reader: mutated samples, and what must hold for each."""
