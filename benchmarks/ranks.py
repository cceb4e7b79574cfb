"""The whole loop on a model that is spread over processes, held against the same model in one process.

    torchrun --nproc-per-node 2 benchmarks/ranks.py --device cuda --json FILE        (the shape of Gemma 3 4B, NCCL)
    torchrun --nproc-per-node 2 benchmarks/ranks.py --device cpu --small             (a tiny shape, gloo)

The model is a Gemma 3 with random weights in float16 whose residual stream passes 65,504. For each way to spread it:

    apply    hfpatch's edits are in force after the model was spread (or are made after that)
    run      KL of the logits to those of a float32 model in one process, beside that of the patched one there
    verify   `fix.verify(batch)`: its figures, or the reason why not
    check    `hfpatch.check(model, batch=)`: what it found, and what it did not look at
    revert   the local weights are those of before, and the stock model fails again
    trace    the stock model: the block in which the stream of the float32 model first passes 65,504
    guard    patched again: the norm of the gradients beside that of one process; a loss that is NaN on the last rank
             alone is skipped by all, and no weight moves; in a good step some do

Each cell is *right*, *refused* with the reason, or *WRONG*.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from common import Row, cpu_name, header, table, write_json
from torch import nn
from torch.nn.functional import kl_div
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Gemma3TextConfig
from transformers import logging as transformers_logging

import hfpatch
from hfpatch.errors import HfpatchError

SIZES = {
    "vocab_size": 262_144, "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip
SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
TRUE = {"fp16-parameters", "loss-like-a-guess", "zero-gradient"}
"""Hazards that are true here: float16 without a loss scale, and random weights."""
LOSS_SCALE = 4096.0
"""The gradients of the branches are float16: without it the smallest of them are 0."""


@dataclass
class Setting:
    """What all ways share. `ids [world, tokens]` on the device."""

    device: torch.device
    folder: str
    ids: torch.Tensor
    rank: int
    world: int
    one: dict[str, Any] = field(default_factory=dict)

    def load(self, dtype: torch.dtype, **spread: Any) -> Any:
        """The checkpoint, on this rank's device; on all ranks, if `spread` says how."""
        model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, **spread)
        return (model if spread else model.to(self.device)).eval()


@dataclass(frozen=True)
class Way:
    """A way to spread a model.

    Attributes:
        name: As people call it.
        spread: Returns the spread model; the function it gets is called on the model when it is to be patched.
        rows: True if each rank runs its own row of the batch; False if all run all rows.
    """

    name: str
    spread: Callable[[Setting, Callable[[nn.Module], None]], Any]
    rows: bool = True


def ddp(setting: Setting, patch: Callable[[nn.Module], None]) -> Any:
    model = setting.load(torch.float16)
    patch(model)
    return DistributedDataParallel(model)


def sharded(*, first: bool) -> Callable[[Setting, Callable[[nn.Module], None]], Any]:
    """FSDP2, sharded before or after it is patched."""

    def spread(setting: Setting, patch: Callable[[nn.Module], None]) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = setting.load(torch.float16)
        if not first:
            patch(model)
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        if first:
            patch(model)
        return model

    return spread


def accelerated(setting: Setting, patch: Callable[[nn.Module], None]) -> Any:
    """As accelerate's launcher sets it up: FSDP2 by its plugin on GPUs, DDP on CPUs."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = setting.load(torch.float16)
    patch(model)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=["Gemma3DecoderLayer"],
        mixed_precision_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
    )  # fmt: skip
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=setting.device.type == "cpu")
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))[0]


def tensor_parallel(setting: Setting, patch: Callable[[nn.Module], None]) -> Any:
    """transformers' own plan for tensor parallelism."""
    model = setting.load(torch.float16, tp_plan="auto")
    patch(model)
    return model


WAYS = (
    Way("DDP", ddp),
    Way("apply, FSDP2", sharded(first=False)),
    Way("FSDP2, apply", sharded(first=True)),
    Way("apply, accelerate", accelerated),
    Way("tensor parallel, apply", tensor_parallel, rows=False),
)


def main() -> None:
    """Run each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="a tiny shape")
    parser.add_argument("--tokens", type=int, default=128, help="tokens in a row; one row a rank")
    parser.add_argument("--only", help="part of the name of the ways to run")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()

    warnings.simplefilter("ignore", FutureWarning)  # of names that transformers 5.17 has and 5.24 renames
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    cuda = args.device == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device) if cuda else cpu_name()
    sink = contextlib.nullcontext() if rank == 0 else contextlib.redirect_stdout(open(os.devnull, "w"))  # noqa: PTH123, SIM115
    with sink, tempfile.TemporaryDirectory() as scratch:
        title = "A model that is spread over processes"
        facts = header(title, f"{world} processes, {name}", "torch", "transformers", "accelerate", "hfpatch")
        folder = [scratch]
        dist.broadcast_object_list(folder)
        sizes = SMALL if args.small else SIZES
        if rank == 0:
            write_checkpoint(folder[0], sizes, device)
        dist.barrier()
        torch.manual_seed(1)
        ids = torch.randint(3, sizes["vocab_size"], (world, args.tokens)).to(device)
        setting = Setting(device, folder[0], ids, rank, world)
        setting.one = one_process(setting)
        print(
            f"- model: {sizes['num_hidden_layers']} layers of width {sizes['hidden_size']}, random weights, float16; "
        )
        print(f"  {world} rows of {args.tokens} tokens; in one process: {shown(setting.one)}")
        rows: list[Row] = []
        for way in WAYS:
            if args.only is None or args.only in way.name:
                rows.append({"way": way.name, **tried(way, setting)})
                table(way.name, [{"step": k, "outcome": v} for k, v in rows[-1].items() if k != "way"])
        cells = [str(v) for row in rows for k, v in row.items() if k != "way"]
        counts = {kind: sum(c.startswith(kind) for c in cells) for kind in ("right", "refused", "WRONG")}
        print(f"\n{counts['right']} right, {counts['refused']} refused, {counts['WRONG']} wrong")
        alone = {k: v for k, v in setting.one.items() if k != "logits"}
        write_json(args.json if rank == 0 else None, {**facts, "one process": alone, "rows": rows, **counts})
        dist.barrier()
    sys.stdout.flush()
    os._exit(1 if counts["WRONG"] else 0)  # threads of gloo outlive the group


def write_checkpoint(folder: str, sizes: dict[str, int], device: torch.device) -> None:
    """A float16 checkpoint whose stream passes 65,504 after some layers, though no branch does."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **sizes, sliding_window=1024, query_pre_attn_scalar=sizes["head_dim"], pad_token_id=0, bos_token_id=2,
    )  # fmt: skip
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    for name, weight in model.named_parameters():
        if name.endswith("post_feedforward_layernorm.weight"):
            weight.data.fill_(8000.0)
    model.save_pretrained(folder)


def one_process(setting: Setting) -> dict[str, Any]:
    """What this rank finds alone, on the whole batch: the reference, and the patched model's own figures."""
    ids, found = setting.ids, {}
    reference = setting.load(torch.float32)
    peaks: list[torch.Tensor] = []
    for layer in reference.model.layers:
        layer.register_forward_hook(lambda _m, _a, out: peaks.append(first(out).abs().amax((1, 2))))
    with torch.no_grad():
        logits = reference(input_ids=ids, use_cache=False).logits.float().cpu()
    found["blocks"] = [next(i for i, peak in enumerate(row) if peak > 65_504) for row in torch.stack(peaks, 1).tolist()]
    del reference
    model = setting.load(torch.float16)
    hfpatch.apply(model, verbose=False)
    with torch.no_grad():
        found["KL"] = divergence(model(input_ids=ids, use_cache=False).logits, logits)
    (model(input_ids=ids, labels=ids, use_cache=False).loss * LOSS_SCALE).backward()
    squares = [p.grad.double().square().sum() for p in model.parameters()]
    found["norm"] = float(torch.stack(squares).sum().sqrt())
    return {**found, "logits": logits}


def tried(way: Way, setting: Setting) -> dict[str, str]:
    """Each step of one way; the model is made once."""
    out: dict[str, str] = {}
    made: dict[str, Any] = {}
    ids = setting.ids[setting.rank : setting.rank + 1] if way.rows else setting.ids
    want = setting.one["logits"][setting.rank : setting.rank + 1] if way.rows else setting.one["logits"]

    def patch(model: nn.Module) -> None:
        made["fix"] = hfpatch.apply(model, verbose=False)

    def divergent() -> float:
        with torch.no_grad():
            logits = made["model"](input_ids=ids, use_cache=False).logits
        for module in made["model"].modules():
            if hasattr(module, "reshard"):  # FSDP2 leaves some weights whole after a forward pass alone
                module.reshard()
        return divergence(logits, want)

    def apply() -> str:
        made["model"] = way.spread(setting, patch)
        made["weights"] = digests(made["model"])
        status = hfpatch.status(made["model"])
        right = "fp16-residual-overflow" in status.patches and not status.lapsed
        return judged(right, f"{len(status.edits)} edits of {', '.join(status.patches)}, {len(status.lapsed)} lapsed")

    def run() -> str:
        kl, alone = divergent(), setting.one["KL"]
        return judged(kl <= 1.5 * alone, f"KL {kl:.1e} (one process {alone:.1e})")

    def verify() -> str:
        proof = made["fix"].verify({"input_ids": ids})
        kl, alone = proof["after"].kl, setting.one["KL"]
        return judged(kl <= 1.5 * alone, f"KL {kl:.1e}")

    def guard() -> str:
        hfpatch.apply(made["model"], verbose=False)
        return guarded(made["model"], ids, setting)

    def check() -> str:
        found = hfpatch.check(made["model"], batch={"input_ids": ids, "labels": ids})
        right = found.ids and set(found.ids) <= TRUE
        said = "" if found.measured else f"; {next(line for line in found.not_looked_at if 'rank' in line)}"
        return judged(bool(right), f"{', '.join(found.ids)}; {len(found.measured)} things measured{said}")

    def revert() -> str:
        hfpatch.revert(made["model"])
        kl = divergent()
        clean = not hfpatch.status(made["model"]) and digests(made["model"]) == made["weights"]
        return judged(clean and math.isnan(kl), f"stock KL {kl}")

    def trace() -> str:
        with hfpatch.trace(made["model"]) as t:
            divergent()
        found = t.first_bad
        name = None if found is None else found.module
        blocks = setting.one["blocks"]
        block = blocks[setting.rank] if way.rows else min(blocks)
        return judged(f"layers.{block}" in str(name), f"{name} ({block}), {found and found.operation}")

    steps = {f.__name__: f for f in (apply, run, verify, check, revert, trace, guard)}
    for name, step in steps.items():
        try:
            said = step()
        except (HfpatchError, RuntimeError, ValueError) as error:
            kind = "refused" if isinstance(error, HfpatchError) else "WRONG"
            said = f"{kind}: {type(error).__name__}: {error}"
        everywhere: list[Any] = [None] * setting.world
        dist.all_gather_object(everywhere, said)
        worst = next((s for s in everywhere if s.startswith("WRONG")), everywhere[0])
        out[name] = " ".join(worst.split())
        if name == "apply" and worst.startswith("WRONG"):
            break
    made.clear()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    return out


def guarded(model: Any, ids: torch.Tensor, setting: Setting) -> str:
    """A good step, one in which the last rank's loss is NaN, and a good one, under a guard."""
    model.train()
    size = sum(p.numel() for p in model.parameters())
    rate = 1e-3 * math.sqrt(size) / setting.one["norm"]  # 1e-3 an entry
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=False)  # a tensor-parallel model mixes DTensors
    guard = hfpatch.Guard(model, optimizer, verbose=False, max_grad_norm=None, spike_at=None)
    said, kinds, norms = [], [], []
    for step in range(3):
        was = digests(model)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss * LOSS_SCALE
        if step == 1 and setting.rank == setting.world - 1:
            loss = loss * math.nan
        outcome = guard.step(loss)
        kinds.append(outcome.facts.kind)
        norms.append(outcome.facts.norm)
        moved = sum(a != b for a, b in zip(was, digests(model), strict=True))
        if (moved > 0) == outcome.skipped:
            said.append(f"step {step}: {outcome.facts.kind}, {moved} of {len(was)} weights moved")
    guard.settle()
    model.eval()
    alone = setting.one["norm"]
    if not math.isclose(norms[0], alone, rel_tol=0.02):
        said.append("another norm")
    return judged(not said, f"{', '.join(kinds)}; norm {norms[0]:.5g} (one process {alone:.5g}) {'; '.join(said)}")


def digests(model: nn.Module) -> list[float]:
    """A sum for each parameter's local part that another value of an entry changes."""
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return [float(p.detach().view(torch.int16).double().abs().sum()) for p in parts]


def divergence(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """KL of logits to a reference's, per token, in float64 on the CPU; NaN if a logit is not finite."""
    whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    got = whole.detach().cpu().double().log_softmax(-1).flatten(0, 1)
    want = reference.double().log_softmax(-1).flatten(0, 1)
    return float(kl_div(got, want, log_target=True, reduction="batchmean"))


def first(out: Any) -> torch.Tensor:
    """The hidden states that a layer returns."""
    return out[0] if isinstance(out, tuple) else out


def judged(right: bool, said: str) -> str:
    """A cell."""
    return f"{'right' if right else 'WRONG'}: {said}"


def shown(one: dict[str, Any]) -> str:
    """The figures of one process, as text."""
    return f"KL {one['KL']:.1e}, norm {one['norm']:.5g}, the stream passes 65,504 in layers {one['blocks']}"


if __name__ == "__main__":
    main()
