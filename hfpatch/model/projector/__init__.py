"""Layers that write into a language model's embedding space: found, measured, proved untouched."""
