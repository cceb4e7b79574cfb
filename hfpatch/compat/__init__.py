"""Private names of other packages that hfpatch relies on: one module per topic, one test per name.

No other folder uses such a name; `tests/test_house.py` reads every file to check that.
"""
