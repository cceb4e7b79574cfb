"""Private names of other packages that hfpatch relies on: a module for each corner of a package, a test for each.

Nothing outside this folder says such a name (`tests/test_house.py` reads every file for them). Where several places
need the same one, or a hot path does, it is bound here once.
"""
