"""The kinds of change that an edit can make, one file each."""

from pathlib import Path

__path__.append(str(Path(__file__).parents[2] / "old_paths" / "patching" / "kinds"))  # names in pickled models
