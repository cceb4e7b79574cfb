"""`hfpatch.verify` and the cases of patches: comparisons with float32."""
