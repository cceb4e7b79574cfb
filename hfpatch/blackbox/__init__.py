"""The black box of a training run: on a skip or a stop, the guard writes a bundle that can be replayed.

    box.py        BlackBox, the settings; Recording, which follows the calls of one guarded model
    kept.py       one call of the model, kept by reference, and the state of the model for that call
    rerun.py      runs such a call again under a trace; finds the micro-batch at fault in a window
    packing.py    arguments of a call <-> named tensors and JSON
    account.py    the contents of `bundle.json`
    folder.py     bundles in a directory: written atomically, limited in number and size
    bundle.py     reads and checks a bundle, for `hfpatch replay`

During training no tensor is copied: a hook keeps references to the arguments of the calls in a window of micro-batches,
and the random state; they are dropped if the window is good. A skipped batch leaves the weights unchanged, so running
it again at once is exact. In that run, leaves that share the parameters' memory take their place: the training's
gradients, an optimizer in a gradient hook and the reducer of DDP do not see its gradients.

Limits: if the loss is computed outside the model, only the forward pass is replayed; a model sharded over ranks, or one
whose layers communicate with other ranks, is not replayed; of a model compiled in place (`model.compile()`) no call is
seen. The bundle says so. Ordinary overflows of the loss scale are not recorded.

Each rank checks its own micro-batches and writes a bundle if one is bad; rank 0 always writes one.

A bundle is a directory, `step-00001234-rank0/`:

    bundle.json          plain values, with a digest of themselves and of the other file
    batch.safetensors    the tensors among the arguments; missing with `keep_batch=False`
"""

from hfpatch.blackbox.box import BlackBox as BlackBox
from hfpatch.blackbox.bundle import Bundle as Bundle
from hfpatch.blackbox.bundle import read_bundle as read_bundle
