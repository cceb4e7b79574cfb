"""Private names of other packages that hfpatch relies on: a module for each corner of a package, a test for each."""
