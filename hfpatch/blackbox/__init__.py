"""The black box of a training: on an event of the guard, a bundle on disk that says what went wrong, to be replayed.

    box.py        BlackBox, the settings; Recording, which follows the calls of one guarded model
    kept.py       one call of the model, kept by reference, and the model as it was for it
    rerun.py      such a call made again under a trace; which micro-batch of a window is to blame
    packing.py    arguments of a call <-> named tensors and JSON
    folder.py     bundles in a directory: written whole or not at all, bounded in number and size
    bundle.py     a bundle read and checked; `hfpatch replay`

On the way nothing is copied: a hook keeps references to the arguments of the calls of a window of micro-batches, and
the state of the random numbers; they are dropped when the window was good. A skipped batch left the weights as they
were, so that running it again at the spot is exact. Gradients of that run go to leaves that take the parameters' place
while it lasts: no gradient of the training, no optimizer in a gradient hook and no reducer of DDP sees it.

What does not hold: a loop that computes its loss outside the model is replayed forward only; a model sharded over
ranks, or one whose layers talk to other ranks, is not replayed; one compiled in place (`model.compile()`) shows no
batch. The bundle says so. An ordinary overflow of the loss scale is no event.

Each rank judges its own micro-batches and writes a bundle if something is wrong in them; rank 0 always does.

A bundle is a directory, `step-00001234-rank0/`:

    bundle.json          everything plain, with a digest of itself and of the other file
    batch.safetensors    the tensors among the arguments; missing with `keep_batch=False`
"""

from hfpatch.blackbox.box import BlackBox as BlackBox
from hfpatch.blackbox.bundle import Bundle as Bundle
from hfpatch.blackbox.bundle import read as read
