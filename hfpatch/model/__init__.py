"""Reads a model and never writes to it: submodels, roles, embeddings, added modules, facts."""

from pathlib import Path

__path__.append(str(Path(__file__).parents[1] / "old_paths" / "model"))  # names in models pickled with release 0.1
