"""The changes that edits make, a file each."""

from pathlib import Path

__path__.append(str(Path(__file__).parents[2] / "old_paths" / "patching" / "kinds"))  # names in pickled models
