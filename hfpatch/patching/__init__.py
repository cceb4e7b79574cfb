"""Patches: the language they are written in, their registry, and the engine that plans, applies and undoes them."""
