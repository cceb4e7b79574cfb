"""The private names of other packages that hfpatch relies on: one module per topic, one test per name."""
