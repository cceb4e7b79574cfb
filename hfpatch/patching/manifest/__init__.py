"""The manifest `hfpatch.json` beside a checkpoint: written from a patched model, read with bounds, replayed."""
