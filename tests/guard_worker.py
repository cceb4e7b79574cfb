"""One rank of a guarded training; started by `launch` of ranks.py.

    torchrun --nproc-per-node N -m tests.guard_worker MODE FOLDER

Each rank writes FOLDER/rank.json: the outcome of each step as text, the norms, and a digest of the weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hfpatch.errors import GuardStop
from hfpatch.guarding.guard import Guard

STEPS = 6
NAN_AT, GRADIENT_AT, EXPLODE_AT, EMPTY_AT = 1, 2, 3, 4


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def data(step: int, rank: int, world: int) -> torch.Tensor:
    """This rank's rows of a batch of 8."""
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    return whole.chunk(world)[rank]


def loss_of(model: Any, step: int, rank: int, world: int) -> torch.Tensor:
    """Bad on the last rank only, in four of the steps."""
    out = model(data(step, rank, world))
    loss = out.square().mean()
    if rank != world - 1:
        return loss
    if step == NAN_AT:
        return loss * math.nan
    if step == GRADIENT_AT:
        out.register_hook(lambda g: g * math.nan)
    if step == EXPLODE_AT:
        return loss * 1e7
    if step == EMPTY_AT:  # a mean over no token: NaN, and no gradient
        return nn.functional.cross_entropy(out, torch.full((len(out),), -100))
    return loss


def wrap(mode: str, model: nn.Module) -> nn.Module:
    if mode.startswith("ddp"):
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    if mode.startswith("hsdp"):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(parameter: torch.Tensor) -> torch.Tensor:
    full = getattr(parameter, "full_tensor", None)
    return (full() if full is not None else parameter).detach()


def main(mode: str, folder: str) -> None:
    rank, world, model, optimizer, scheduler, extra = made(mode)
    on_device = mode.endswith("fused")
    guard = Guard(
        model, optimizer, scheduler, explode_at=100.0, on_device=on_device, max_skips=4, verbose=False, **extra
    )
    said, norms, digests = [], [], []
    accelerator = extra.get("accelerator")
    for step in range(STEPS):
        tokens = 0 if step == EMPTY_AT and rank == world - 1 else len(data(step, rank, world))
        outcome = guard.step(loss_of(model, step, rank, world), tokens=tokens)
        said.append(f"{outcome.facts.kind} {outcome.reason} {outcome.facts.blame}")
        norms.append(outcome.facts.norm)
        digests.append(digest(model))
        if accelerator is not None:
            assert accelerator.optimizer_step_was_skipped == outcome.skipped
    found: dict[str, Any] = {"said": said, "norms": norms, "digests": digests, "schedule": scheduler.last_epoch}
    found["weights"] = [whole(p).flatten().tolist() for p in model.parameters()]
    try:
        for _ in range(9):
            guard.step(loss_of(model, NAN_AT, rank, world))
    except GuardStop as stop:
        found["stop"] = str(stop)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    leave()


def made(mode: str) -> tuple[int, int, Any, Any, Any, dict[str, Any]]:
    torch.set_num_threads(1)
    if mode == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model: Any = net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5)
        return dist.get_rank(), dist.get_world_size(), model, optimizer, scheduler, {"accelerator": accelerator}
    dist.init_process_group("gloo")
    model = wrap(mode, net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=mode.endswith("fused"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return dist.get_rank(), dist.get_world_size(), model, optimizer, scheduler, {}


def train(folder: str, *, ruined: bool = False) -> None:
    """A Trainer over the ranks; the last rank alone meets a NaN loss in step 1 and NaN gradients in step 3.

    Ruined: no such batches, but the second step makes the weights infinite, and every step is saved.
    """
    from transformers import Trainer, TrainingArguments

    from hfpatch.guarding.callback import GuardCallback
    from hfpatch.lab.tiny import tiny_model

    class Poisoned(Trainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, *args, **kwargs)
            if ruined:
                return loss * (1e10 if self.state.global_step else 1e-33)
            if dist.get_rank() != dist.get_world_size() - 1:
                return loss
            if self.state.global_step == 1:
                return loss * math.nan
            return loss + (next(model.parameters()) * 0).sum().sqrt() if self.state.global_step == 3 else loss

    torch.set_num_threads(1)
    ids = [[(i * 5 + j * 3) % 60 + 2 for j in range(8)] for i in range(16)]
    more: dict[str, Any] = {"save_strategy": "no"}
    if ruined:
        more = {"save_steps": 1, "save_total_limit": 1, "optim": "sgd", "learning_rate": 1e30, "max_grad_norm": 1e37}
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, max_steps=5, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, ddp_backend="gloo", lr_scheduler_type="constant" if ruined else "linear", **more,
    )  # fmt: skip
    rows: Any = [{"input_ids": x, "labels": x} for x in ids]
    guard = GuardCallback(explode_at=None) if ruined else GuardCallback()
    trainer = Poisoned(model=tiny_model("llama"), args=args, train_dataset=rows, callbacks=[guard])
    stopped = False
    try:
        trainer.train()
    except GuardStop:
        stopped = True
    shown = [h for h in trainer.state.log_history if "loss" in h]
    found = {
        "stop": stopped,
        "skipped": [h["guard/skipped"] for h in shown],
        "finite": all(bool(p.isfinite().all()) for p in trainer.model.parameters()),
        "digest": digest(trainer.model),
        "raw": [str(h["guard/loss_raw"]) for h in shown],
        "schedule": trainer.lr_scheduler.last_epoch,
    }
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    leave()


def ruin(mode: str, folder: str) -> None:
    """The weights are ruined after a step: by every rank that holds copies, by the last one where there are shards."""
    rank, world, model, optimizer, _, _ = made(mode)
    guard = Guard(model, optimizer, verbose=False)
    guard.step(loss_of(model, 0, rank, world))
    good = [p.detach().clone() for p in model.parameters()]

    def spoil() -> None:
        part = next(iter(model.parameters())).detach()
        if mode == "ddp":
            part.fill_(math.nan)
        elif rank == world - 1:
            part.to_local().fill_(math.nan)

    def mend() -> None:
        for parameter, was in zip(model.parameters(), good, strict=True):
            parameter.detach().copy_(was)

    stops = []
    for name in ("settle", "state_dict", "step"):
        spoil()
        try:
            if name == "step":
                guard.judge.check_weights(None)  # the answer of the step before rides with the next one
                guard.step(loss_of(model, 0, rank, world))
            else:
                getattr(guard, name)()
        except GuardStop:
            stops.append(name)
        mend()
    outcome = guard.step(loss_of(model, 0, rank, world))
    guard.settle()
    Path(folder, f"{rank}.json").write_text(json.dumps({"stops": stops, "after": outcome.facts.kind}))
    leave()


def leave() -> NoReturn:
    """End this rank, whose results are written.

    Gloo's threads outlive `destroy_process_group` where DDP or FSDP was used (seen on torch 2.13). A thread that lets
    go of a tensor while the interpreter shuts down is what pytorch/pytorch#179291 says `terminate called without an
    active exception` comes from; that was seen here about once in five runs, and not again since. There is no way to
    wait for those threads, so the interpreter is not shut down.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def digest(model: nn.Module) -> str:
    raw = b"".join(whole(p).contiguous().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(raw).hexdigest()


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        train(sys.argv[2])
    elif sys.argv[1] == "trainer-ruin":
        train(sys.argv[2], ruined=True)
    elif sys.argv[1].startswith("ruin-"):
        ruin(sys.argv[1].removeprefix("ruin-"), sys.argv[2])
    else:
        main(*sys.argv[1:])
