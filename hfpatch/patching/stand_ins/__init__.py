"""Runs, in the plan, of copies of a module: what it does with a float32 stream, what it feeds."""
