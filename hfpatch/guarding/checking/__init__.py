"""`hfpatch.check`: hazards of a model and the way it is to be trained, read from both and measured in one step."""
