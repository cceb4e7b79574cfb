"""Patches: the language they are written in, their registry, and the code that plans, applies and reverts them."""

from pathlib import Path

__path__.append(str(Path(__file__).parents[1] / "old_paths" / "patching"))  # names in models pickled with release 0.1
