"""Orders of events in a model's life, and what hfpatch does in each: the source of docs/life-cycle.md.

Each order gets a float16 Gemma 3 whose stream overflows, and token ids. It returns the logits that must be
finite and near float32's, or raises the refusal it expects. `python -m tests.lifecycle` writes the table.
"""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hfpatch
from hfpatch.patching.kinds.base import PLACES
from hfpatch.patching.kinds.in_float32.set_buffer import SetBuffer
from hfpatch.patching.kinds.map_output import MapOutput
from hfpatch.patching.kinds.set_tensor import SetTensor
from hfpatch.patching.manifest.changes import KINDS
from tests.processes import python

Order = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Row:
    name: str
    run: Order
    outcome: str
    """`works`, or part of the sentence it refuses with."""
    tolerance: float = 4e-3
    """Relative L2 distance from float32 that is right here."""


def apply(model: Any) -> hfpatch.Applied:
    return hfpatch.apply(model, verbose=False, only="fp16-residual-overflow")


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits.detach().float()


def with_manifest(model: Any, fix: hfpatch.Applied, ids: torch.Tensor) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        fix.save(directory)
        return logits(hfpatch.load(directory, verbose=False), ids)


def saved_with_manifest(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return with_manifest(model, apply(model), ids)


def adapter_with_manifest(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        loaded = type(model).from_pretrained(directory)
        fix = apply(loaded)
        return with_manifest(lora(loaded), fix, ids)


def merged_with_manifest(model: Any, ids: torch.Tensor) -> torch.Tensor:
    fix = apply(model)
    return with_manifest(lora(model).merge_and_unload(), fix, ids)


def manifest_of_other_weights(model: Any, ids: torch.Tensor) -> torch.Tensor:
    fix = apply(model)
    with tempfile.TemporaryDirectory() as directory:
        fix.save(directory)
        fix.revert()
        with torch.no_grad():
            model.lm_head.weight += 1
        hfpatch.apply(model, manifest=directory, verbose=False)
    return logits(model, ids)


def gloo() -> None:
    if not dist.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        store = dist.HashStore()
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]))


def peft_then_apply(model: Any, ids: torch.Tensor) -> torch.Tensor:
    wrapped = lora(model)
    apply(wrapped)
    return logits(wrapped, ids)


def apply_then_peft(model: Any, ids: torch.Tensor) -> torch.Tensor:
    apply(model)
    return logits(lora(model), ids)


def apply_peft_merge(model: Any, ids: torch.Tensor) -> torch.Tensor:
    apply(model)
    return logits(lora(model).merge_and_unload(), ids)


def apply_peft_train_revert_apply(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Training stays when the patch goes; LoRA's B starts at zero, so one step at lr 0 leaves the logits."""
    fix = apply(model)
    wrapped = lora(model)
    wrapped(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.0).step()
    fix.revert()
    assert not hfpatch.status(wrapped)
    assert not logits(wrapped, ids).isfinite().all()
    apply(wrapped)
    return logits(wrapped, ids)


def ddp_then_apply(model: Any, ids: torch.Tensor) -> torch.Tensor:
    gloo()
    wrapped = nn.parallel.DistributedDataParallel(model)
    apply(wrapped)
    return logits(wrapped, ids)


def apply_then_ddp(model: Any, ids: torch.Tensor) -> torch.Tensor:
    gloo()
    apply(model)
    return logits(nn.parallel.DistributedDataParallel(model), ids)


def data_parallel(model: Any, ids: torch.Tensor) -> torch.Tensor:
    wrapped = nn.DataParallel(model)
    apply(wrapped)
    return logits(wrapped, ids)


def fsdp(model: Any, cast: bool) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    gloo()
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, cast_forward_inputs=cast)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def fsdp_casting_then_apply(model: Any, ids: torch.Tensor) -> torch.Tensor:
    apply(fsdp(model, cast=True))
    return logits(model, ids)


def fsdp_then_apply(model: Any, ids: torch.Tensor) -> torch.Tensor:
    apply(fsdp(model, cast=False))
    return logits(model, ids)


def apply_then_fsdp_casting(model: Any, ids: torch.Tensor) -> torch.Tensor:
    apply(model)
    return logits(fsdp(model, cast=True), ids)


def apply_then_fsdp(model: Any, ids: torch.Tensor) -> torch.Tensor:
    apply(model)
    return logits(fsdp(model, cast=False), ids)


def apply_then_compile(model: Any, ids: torch.Tensor) -> torch.Tensor:
    apply(model)
    return logits(torch.compile(model, backend="eager"), ids)


def compile_then_apply(model: Any, ids: torch.Tensor) -> torch.Tensor:
    torch._dynamo.reset()
    wrapped = torch.compile(model, backend="eager")
    apply(wrapped)
    return logits(wrapped, ids)


def compile_call_apply(model: Any, ids: torch.Tensor) -> torch.Tensor:
    wrapped = torch.compile(model, backend="eager")
    logits(wrapped, ids)
    apply(wrapped)
    return logits(wrapped, ids)


def module_compile_call_apply(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model.compile(backend="eager")
    logits(model, ids)
    apply(model)
    return logits(model, ids)


def compile_call_reset_apply(model: Any, ids: torch.Tensor) -> torch.Tensor:
    wrapped = torch.compile(model, backend="eager")
    logits(wrapped, ids)
    torch._dynamo.reset()
    apply(wrapped)
    return logits(wrapped, ids)


def apply_compile_call_revert(model: Any, ids: torch.Tensor) -> torch.Tensor:
    fix = apply(model)
    logits(torch.compile(model, backend="eager"), ids)
    model.compile(backend="eager")
    fix.revert()
    return logits(model, ids)


def deepcopied(model: Any, ids: torch.Tensor) -> torch.Tensor:
    apply(model)
    copied = copy.deepcopy(model)
    hfpatch.revert(model)
    return logits(copied, ids)


def pickled(model: Any, ids: torch.Tensor) -> torch.Tensor:
    apply(model)
    return logits(pickle.loads(pickle.dumps(model)), ids)  # noqa: S301


LOADS = """
import sys, torch
from torch.utils.hooks import RemovableHandle
import hfpatch
model, ids = torch.load(sys.argv[1], weights_only=False)
for module in model.modules():  # somebody's hooks come and go, under the numbers that this process begins with
    RemovableHandle.next_id = 0
    module.register_forward_pre_hook(print).remove()
    module.register_forward_hook(print).remove()
assert not hfpatch.status(model).lapsed and hfpatch.status(model)
with torch.no_grad():
    patched = model(input_ids=ids).logits.float()
hfpatch.revert(model)
assert not hfpatch.status(model).edits and not model(input_ids=ids).logits.isfinite().all()
assert hfpatch.apply(model, verbose=False, only="fp16-residual-overflow").edits
torch.save(patched, sys.argv[2])
"""


def in_a_new_process(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What torch.save wrote is loaded elsewhere, run, reverted, and patched again."""
    apply(model)
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("model.pt", "logits.pt")]
        torch.save((model, ids), files[0])
        done = python("-c", LOADS, *files)
        assert done.returncode == 0, done.stderr
        return torch.load(files[1])


def saved_and_loaded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """A checkpoint carries no patch: what is loaded from it is patched anew."""
    apply(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder, dtype=torch.float16, attn_implementation="eager")
    assert not hfpatch.status(loaded)
    assert not logits(loaded, ids).isfinite().all()
    apply(loaded)
    return logits(loaded, ids)


def twice(model: Any, ids: torch.Tensor) -> torch.Tensor:
    apply(model)
    assert apply(model).edits == ()
    return logits(model, ids)


def checkpointing(reentrant: bool) -> Order:
    def run(model: Any, ids: torch.Tensor) -> torch.Tensor:
        apply(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.train()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert grads
        assert all(g.isfinite().all() for g in grads)
        return out.logits.detach().float()

    return run


def accelerate_hooks(model: Any, ids: torch.Tensor) -> torch.Tensor:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    apply(model)
    return logits(model, ids)


def apply_then_accelerate_hooks(model: Any, ids: torch.Tensor) -> torch.Tensor:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    apply(model)
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    first = logits(model, ids)
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(logits(model, ids), first)
    return first


def planned_then_half(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model.float()
    hfpatch.apply(model, verbose=False, compute_dtype="float16")
    return logits(model.half(), ids)


def half_then_float(model: Any, ids: torch.Tensor) -> torch.Tensor:
    apply(model)
    return logits(model.float(), ids)


def under_autocast(model: Any, ids: torch.Tensor) -> torch.Tensor:
    apply(model)
    with torch.autocast("cpu", dtype=torch.float16):
        return logits(model, ids)


def trainer(model: Any, ids: torch.Tensor) -> torch.Tensor:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
        fix = apply(Trainer(model=model, args=arguments))
    assert fix.model is model
    return logits(model, ids)


class Int8Linear(nn.Module):
    """A quantised layer as bitsandbytes and others make them: an integer weight, output in the input's dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().float().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((linear.weight.detach().float() / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, (self.weight.float() * self.scale).to(x.dtype))


def quantised(model: Any, ids: torch.Tensor) -> torch.Tensor:
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, Int8Linear(child))
    exact = logits(copy.deepcopy(model).float(), ids)
    apply(model)
    got = logits(model, ids)
    assert ((got - exact).norm() / exact.norm()).item() < 4e-3
    return got


SAVING = """
## Saving

`save_pretrained` writes weights and a config. What a patch set besides is lost: hooks, attributes, the choice of an
attention implementation. A merged model needs the same patches as the model before.

    model.save_pretrained(dir)
    fix.save(dir)  # writes hfpatch.json, and hfpatch-tensors/ if a patch set tensors
    model = hfpatch.load(dir)  # elsewhere; or hfpatch.apply(model, manifest=dir) on a model loaded otherwise

- The manifest names every patch that the model carries, with its options, edits and origin. `print(fix)`, and
  `hfpatch inspect DIR` later, say which of them the checkpoint lacks.
- It is replayed on the model of the checkpoint, or on the model as it was before the patches. The outputs are the same
  bits in the same releases, if the buffers that no checkpoint holds are the same (`fp32-buffers` sees to it). A second
  replay changes nothing, and `hfpatch.revert(model)` undoes the first.
- Refused with the first difference, and nothing is changed: other weights, shapes or dtypes; a forward with another
  body; a module, attribute or tensor that is not as it was; a file that was edited; a later schema. A forward may
  change with a release of transformers: then `hfpatch.apply(model)` decides anew.
- Some values of every tensor are compared, and every byte of those that a patch set. A checksum finds damage; it is no
  signature. Of another attention implementation, or of a computed buffer with other values, it is said that outputs
  may differ by it.
- The file holds no code. Changes are data of a closed set of kinds; what is a function is made again by its patch,
  whose bytecode must be the same. The patch must be registered in the process; one of an installed package is imported
  only if `trust=` names its package.
- A tensor that was trained after a patch had set it is a weight like the others. PEFT saves the layers that an adapter
  gained. The manifest lies beside the adapter, and `hfpatch.load` finds the base model by the adapter's config.
- `hfpatch.load` needs a class of transformers. For an object of your own build it, load its weights, and replay.
- Of weights that a quantiser packed the codes and scales are compared. Sharded tensors cannot be compared: save and
  replay before the model is sharded.
"""


WORKS = "works"
ROWS = (
    Row("apply, apply again", twice, WORKS),
    Row("apply, get_peft_model", apply_then_peft, WORKS),
    Row("get_peft_model, apply", peft_then_apply, WORKS),
    Row("apply, get_peft_model, merge_and_unload", apply_peft_merge, WORKS),
    Row("apply, get_peft_model, train, revert, apply", apply_peft_train_revert_apply, WORKS),
    Row("apply, DDP", apply_then_ddp, WORKS),
    Row("DDP, apply", ddp_then_apply, WORKS),
    Row("DataParallel, apply", data_parallel, WORKS),
    Row("FSDP2 that casts forward inputs, apply", fsdp_casting_then_apply, "cast_forward_inputs=False"),
    Row("FSDP2 with cast_forward_inputs=False, apply", fsdp_then_apply, WORKS),
    Row("apply, FSDP2 that casts forward inputs, first call", apply_then_fsdp_casting, "cast_forward_inputs=False"),
    Row("apply, FSDP2 with cast_forward_inputs=False", apply_then_fsdp, WORKS),
    Row("apply, torch.compile", apply_then_compile, WORKS),
    Row("torch.compile, apply, first call", compile_then_apply, WORKS),
    Row("torch.compile, first call, apply", compile_call_apply, "torch._dynamo.reset()"),
    Row("model.compile(), first call, apply", module_compile_call_apply, "torch._dynamo.reset()"),
    Row("torch.compile, first call, torch._dynamo.reset(), apply", compile_call_reset_apply, WORKS),
    Row("apply, torch.compile, first call, revert", apply_compile_call_revert, "torch._dynamo.reset()"),
    Row("apply, deepcopy, revert the original", deepcopied, WORKS),
    Row("apply, pickle, unpickle", pickled, WORKS),
    Row("apply, torch.save, torch.load in a new process, revert, apply", in_a_new_process, WORKS),
    Row("apply, save_pretrained, from_pretrained, apply", saved_and_loaded, WORKS),
    Row("apply, save_pretrained, applied.save, hfpatch.load", saved_with_manifest, WORKS),
    Row("apply, get_peft_model, save_pretrained, applied.save, hfpatch.load", adapter_with_manifest, WORKS),
    Row("apply, get_peft_model, merge_and_unload, applied.save, hfpatch.load", merged_with_manifest, WORKS),
    Row("apply, applied.save, weights changed, apply(manifest=)", manifest_of_other_weights, "has other values"),
    Row("apply, gradient checkpointing (reentrant), train", checkpointing(reentrant=True), WORKS),
    Row("apply, gradient checkpointing (not reentrant), train", checkpointing(reentrant=False), WORKS),
    Row("accelerate device hooks, apply", accelerate_hooks, WORKS),
    Row("apply, accelerate device hooks, remove them", apply_then_accelerate_hooks, WORKS),
    Row("apply(compute_dtype='float16') on a float32 model, .half()", planned_then_half, WORKS),
    Row("apply, .float()", half_then_float, WORKS),
    Row("apply, run under float16 autocast", under_autocast, WORKS),
    Row("quantised linear layers, apply", quantised, WORKS, tolerance=0.05),
    Row("Trainer(model), apply(trainer)", trainer, WORKS),
)


def table() -> str:
    lines = [
        "# Life cycle",
        "",
        "What `fp16-residual-overflow` (casts by forward hooks) does in each order of events. *works*: the logits are",
        "finite and near float32's. *refuses*: a typed error with the reason, and nothing is changed.",
        "Made by `python -m tests.lifecycle` from the orders that `tests/test_lifecycle.py` runs.",
        "",
        "| order of events | outcome |",
        "|---|---|",
    ]
    lines += [f"| {r.name} | {'works' if r.outcome == WORKS else f'refuses: names `{r.outcome}`'} |" for r in ROWS]
    kinds = {**KINDS, "SetTensor": SetTensor, "SetBuffer": SetBuffer, "MapOutput": MapOutput}
    places = {place: [name for name, cls in kinds.items() if cls.in_checkpoint == place] for place in PLACES}
    lines += [SAVING, "| kind of edit | where a saved checkpoint has it |", "|---|---|"]
    lines += [f"| {', '.join(f'`{n}`' for n in sorted(places[place]))} | {text} |" for place, text in PLACES.items()]
    return "\n".join(lines) + "\n"


FILE = Path(__file__).parent.parent / "docs" / "life-cycle.md"

if __name__ == "__main__":
    FILE.write_text(table())
