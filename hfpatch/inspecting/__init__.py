"""What `hfpatch inspect` tells of a model."""
