"""The facts about a model that `hfpatch inspect` shows."""
