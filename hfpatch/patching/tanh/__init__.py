"""Finds modules that compute 1 + tanh, by their code and by a probe run."""
