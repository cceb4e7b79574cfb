"""Builds and rescales the toy models that cases are tried on."""
