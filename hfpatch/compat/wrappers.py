"""What wrappers around a module call the module they hold, and where the classes of wrappers are.

Known in torch 2.11 to 2.13 and PEFT 0.18 to 0.21. Where a name of a child is changed, a wrapper of its kind is not seen
through; where a class moves, it is no wrapper of a known kind any more.
"""

from __future__ import annotations

COMPILED = "_orig_mod"
"""Child of the wrapper that `torch.compile` returns."""

CHECKPOINTED = "_checkpoint_wrapped_module"
"""Child of the wrapper that torch's `checkpoint_wrapper` and `apply_activation_checkpointing` make."""

SHARDED = "_fsdp_wrapped_module"
"""Child of FSDP1's `FullyShardedDataParallel`."""

CLASSES = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "DDP",
    "torch.nn.parallel.data_parallel.DataParallel": "DataParallel",
    "torch._dynamo.eval_frame.OptimizedModule": "torch.compile",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FSDP",
    "torch.distributed.fsdp.FSDPModule": "FSDP2",
    "peft.peft_model.PeftModel": "PEFT",
}
"""Kinds of wrapper by the full names of their classes: naming one imports none of them."""
