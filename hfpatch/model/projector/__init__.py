"""Projectors, which write into a language model's embedding space: found, measured, and proved untrained."""
