"""Watches the calls of a model, and names the first operation that goes wrong.

`trace.py` is the context; `watch.py` its hooks in one step; `diagnosis.py` looks through what they saw;
`rerun_block.py` runs one block again. `naming/` watches the operations of that run and puts what it found into words.
"""
