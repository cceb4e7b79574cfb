"""Reads a model and never writes to it: submodels, roles, embeddings, added modules, facts."""
