"""Builds and rescales the tiny models on which cases are run."""
