"""Watches the calls of a model, and names the first operation that goes wrong.

`trace.py` is the context; `watch.py` its hooks in one step; `diagnosis.py` looks through what they saw; `replay.py`
runs one block again under `operations.py`, and `cause.py` puts what that found into words.
"""
