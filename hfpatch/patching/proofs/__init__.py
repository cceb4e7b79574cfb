"""What was proved of a patch: shipped beside it, proved on demand in a plan, and kept in a cache.

A proof is a run of the patch's repros on a tiny model of an architecture: the fault shows without the patch and not
with it. `<defect>.proofs.json` beside a patch holds the proofs that were run for a release; `hfpatch prove ID --write`
makes the file.
"""
