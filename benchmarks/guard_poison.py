"""A long training in which one batch of ten is poisoned, guarded, beside a clean one on the same good batches.

    python benchmarks/guard_poison.py --checkpoint DIR --steps 1000 --device cuda     SmolLM2 135M with LoRA
    python benchmarks/guard_poison.py --random --steps 1000 --device cuda             its shape, random weights
    OMP_NUM_THREADS=1 python benchmarks/guard_poison.py --ranks 4 --steps 500         tiny model, gloo processes
    python benchmarks/guard_poison.py --ranks 2 --steps 500 --device cuda             with NCCL, a GPU each
    python benchmarks/guard_poison.py --ranks 2 --steps 500 --device cuda --sharded   by fully_shard instead of DDP

Targets: every weight finite; every poisoned step skipped and named rightly; no good step skipped; the last losses
within 2 % of the clean run's. Over ranks the poison is on one random rank, and the targets are that all ranks decide
alike in every step and hold the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import ROOT, Row, cpu_name, header, table, write_json

SHARE = 0.1
TOLERANCE = 0.02
LAST = 20
"""Good steps that the final loss is a mean of."""
EXPLODE_AT = 5000.0
QUIET = 20
"""Steps before the first poison: a spike is told from a running median."""

POISONS = {
    "NaN in the embeddings": "non-finite loss",
    "infinite loss, finite gradients": "non-finite loss",
    "NaN in the gradients only": "non-finite gradients",
    "Inf in the gradients only": "non-finite gradients",
    "loss x 1e6": "gradient norm over the limit",
    "loss x 200": "gradient norm far over its running median",
    "all labels -100": "no supervised token",
}
"""Kind -> the reason that the guard must give."""

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--checkpoint", help="directory of SmolLM2 135M")
    which.add_argument("--random", action="store_true", help="the shape of SmolLM2 135M with random weights")
    which.add_argument("--ranks", type=int, help="processes that train a tiny model together")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sharded", action="store_true", help="over ranks: FSDP2 instead of DDP")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    if args.steps < QUIET + LAST:
        parser.error(f"--steps: want at least {QUIET + LAST}")

    import torch

    name = cpu_name() if args.device == "cpu" else torch.cuda.get_device_name()
    packages = ("torch", "transformers", "peft", "hfpatch")
    what = f"{args.ranks} ranks" if args.ranks else "one process"
    facts = header(f"A guarded training with poisoned batches, {what}", name, *packages)
    facts.update(over_ranks(args) if args.ranks else beside_clean(args))
    write_json(args.json, facts)


def plan(steps: int) -> list[str | None]:
    """The kind of poison of each step; kinds in turn, places at random."""
    draw = random.Random(0)  # noqa: S311 - a seed, not a secret
    kinds: list[str | None] = [None] * steps
    places = sorted(draw.sample(range(QUIET, steps), max(len(POISONS), round(SHARE * steps))))
    for i, step in enumerate(places):
        kinds[step] = list(POISONS)[i % len(POISONS)]
    return kinds


def batches(ids: Any, args: Any, seed: int) -> Iterator[Any]:
    """Windows of a text, `[batch, tokens]`, without end."""
    import torch

    made = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(ids) - args.tokens, (args.batch,), generator=made)
        yield torch.stack([ids[s : s + args.tokens] for s in starts.tolist()])


@contextmanager
def poisoned(model: Any, kind: str | None) -> Iterator[None]:
    """Break what comes out of the embedding, or the gradient of a layer in the middle."""
    import torch

    core = next(m for m in model.modules() if hasattr(m, "layers") and hasattr(m, "embed_tokens"))

    def spoil(_module: Any, _args: Any, output: Any) -> Any:
        where = torch.zeros_like(output, dtype=torch.bool)
        where[0, 0, 0] = True
        return output.masked_fill(where, float("nan"))

    def spoil_gradient(_module: Any, _args: Any, output: Any) -> None:
        output.register_hook(lambda g: g * float("nan" if kind == "NaN in the gradients only" else "inf"))

    handle = None
    if kind == "NaN in the embeddings":
        handle = core.embed_tokens.register_forward_hook(spoil)
    elif kind in ("NaN in the gradients only", "Inf in the gradients only"):
        handle = core.layers[len(core.layers) // 2].register_forward_hook(spoil_gradient)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def loss_of(model: Any, ids: Any, kind: str | None, ranks: int = 1) -> Any:
    """A loss, poisoned or not; what is multiplied makes up for the mean over ranks. Call backward inside `poisoned`."""
    import torch

    labels = torch.full_like(ids, -100) if kind == "all labels -100" else ids
    loss = model(input_ids=ids, labels=labels).loss
    if kind == "infinite loss, finite gradients":
        return loss + float("inf")
    return loss * {"loss x 1e6": 1e6 * ranks, "loss x 200": 200.0 * ranks}.get(kind or "", 1.0)


def build(args: Any) -> tuple[Any, Any]:
    """SmolLM2 135M with LoRA, and the sources of this repository as tokens: too many to be learnt by heart, after which
    a batch like any other can have twenty times the usual norm."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    import hfpatch

    torch.manual_seed(0)
    text = "\n".join(p.read_text() for p in sorted((ROOT / "hfpatch").rglob("*.py")))
    if args.random:
        model: Any = LlamaForCausalLM(LlamaConfig(**SMOLLM2))
        ids = list(text.encode())
    else:
        model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32)
        ids = AutoTokenizer.from_pretrained(args.checkpoint)(text)["input_ids"]
    model = get_peft_model(model, hfpatch.lora_config(model, r=8)).to(args.device)
    model.train()
    return model, torch.tensor(ids)


def trained(model: Any, args: Any) -> tuple[Any, Any]:
    """An optimizer for what trains, and a schedule."""
    import torch

    fused = args.device != "cpu"
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4, fused=fused)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)


def beside_clean(args: Any) -> dict[str, Any]:
    """The guarded run on all batches, then one without a guard on the good ones."""
    import torch

    from hfpatch.guarding.guard import Guard

    print(f"- weights: {'random, in the shape of SmolLM2 135M' if args.random else Path(args.checkpoint).name}")
    kinds = plan(args.steps)
    model, ids = build(args)
    optimizer, schedule = trained(model, args)
    guard = Guard(model, optimizer, schedule, explode_at=EXPLODE_AT, verbose=False)
    said: list[str | None] = []
    losses: list[float] = []
    start = time.perf_counter()
    for kind, batch in zip(kinds, batches(ids, args, seed=1), strict=False):
        with poisoned(model, kind):
            outcome = guard.step(loss_of(model, batch.to(args.device), kind))
        said.append(None if outcome.reason is None else str(outcome.reason))
        if kind is None:
            losses.append(outcome.facts.loss)
            if outcome.reason is not None:
                print(f"- a good step was skipped: {outcome}")
    guard.settle()
    seconds = time.perf_counter() - start
    plain, _ = build(args)
    clean = without_a_guard(plain, ids, kinds, args)
    kept = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    apart = max((p.detach() - kept[n]).abs().max().item() for n, p in plain.named_parameters() if p.requires_grad)
    rows = by_kind(kinds, said, list(POISONS.values()))
    last, wanted = (sum(x[-LAST:]) / LAST for x in (losses, clean))
    found = {
        "weights": "random" if args.random else Path(args.checkpoint).name,
        "steps": args.steps,
        "poisoned": sum(k is not None for k in kinds),
        "named rightly": sum(r["named rightly"] for r in rows),
        "good steps skipped": sum(s is not None for k, s in zip(kinds, said, strict=True) if k is None),
        "weights finite": all(bool(p.isfinite().all()) for p in model.parameters()),
        "first loss": sum(losses[:LAST]) / LAST,
        "last loss": last,
        "last loss, clean run": wanted,
        "ratio": last / wanted,
        "largest difference of a weight": apart,
        "device": str(torch.device(args.device)),
        "decided on the device": guard.on_device,
        "seconds": seconds,
    }
    met = (
        found["named rightly"] == found["poisoned"]
        and not found["good steps skipped"]
        and found["weights finite"]
        and abs(found["ratio"] - 1) <= TOLERANCE
    )
    table("By kind of poison", rows)
    table("The run", [{"": k, "found": v} for k, v in found.items()], f"Targets: {'met' if met else 'NOT met'}.")
    return {"kinds": rows, "run": found, "met": met}


def without_a_guard(model: Any, ids: Any, kinds: list[str | None], args: Any) -> list[float]:
    """Clip and step on the good batches; their losses."""
    import torch

    optimizer, schedule = trained(model, args)
    losses = []
    for kind, batch in zip(kinds, batches(ids, args, seed=1), strict=False):
        if kind is not None:
            continue
        loss = loss_of(model, batch.to(args.device), None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_kind(kinds: list[str | None], said: list[str | None], wanted: list[str | None] | list[str]) -> list[Row]:
    """A row for each kind of poison: how many, named how, how many rightly."""
    rows: list[Row] = []
    for kind, reason in zip(POISONS, wanted, strict=True):
        given = [s for k, s in zip(kinds, said, strict=True) if k == kind]
        names = sorted({s or "stepped" for s in given})
        right = sum(s == reason for s in given)
        rows.append({"poison": kind, "steps": len(given), "said": ", ".join(names), "named rightly": right})
    return rows


def over_ranks(args: Any) -> dict[str, Any]:
    """Processes that train one tiny model; what each decided, side by side."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        torch.multiprocessing.spawn(rank_main, (args, folder), nprocs=args.ranks)
        seconds = time.perf_counter() - start
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(args.ranks)]
    kinds = plan(args.steps)
    # a rank without a label is no reason to skip the others' batches: the step is taken without it
    wanted: list[str | None] = [None if k == "all labels -100" else reason for k, reason in POISONS.items()]
    first = ranks[0]
    rows = by_kind(kinds, first["said"], wanted)
    alike = sum(len({json.dumps(r["facts"][i]) for r in ranks}) == 1 for i in range(args.steps))
    found = {
        "ranks": args.ranks,
        "backend": first["backend"],
        "parallel by": "fully_shard" if args.sharded else "DDP",
        "decided on the device": first["on device"],
        "steps": args.steps,
        "poisoned": sum(k is not None for k in kinds),
        "ranks poisoned": len(set(first["where"]) - {None}),
        "named rightly": sum(r["named rightly"] for r in rows),
        "empty micro-batches seen": first["empty"],
        "good steps skipped": sum(s is not None for k, s in zip(kinds, first["said"], strict=True) if k is None),
        "steps decided alike": alike,
        "weights alike": sum(len({r["digests"][i] for r in ranks}) == 1 for i in range(args.steps)),
        "weights finite": all(r["finite"] for r in ranks),
        "first loss": first["losses"][0],
        "last loss": first["losses"][1],
        "seconds": seconds,
    }
    met = (
        found["named rightly"] == found["poisoned"]
        and not found["good steps skipped"]
        and found["weights finite"]
        and found["steps decided alike"] == found["weights alike"] == args.steps
        and found["empty micro-batches seen"] == kinds.count("all labels -100")
    )
    table("By kind of poison, on one random rank", rows, "A rank without a label does not stop the others.")
    table("The run", [{"": k, "found": v} for k, v in found.items()], f"Targets: {'met' if met else 'NOT met'}.")
    return {"kinds": rows, "run": found, "met": met}


def rank_main(rank: int, args: Any, folder: str) -> None:
    """One process."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from hfpatch.guarding.guard import Guard
    from hfpatch.lab.tiny import tiny_model

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.FileStore(str(Path(folder, "store")), args.ranks)
    cuda = args.device != "cpu"
    if cuda:
        torch.cuda.set_device(rank)
    backend = "nccl" if cuda else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=args.ranks)
    model: Any = tiny_model("llama", vocab_size=256).train().to(args.device)
    if args.sharded:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer, schedule = trained(model, args)
    guard = Guard(model, optimizer, schedule, explode_at=EXPLODE_AT, verbose=False)
    ids = torch.tensor(list((ROOT / "LICENSE").read_bytes()))
    draw = random.Random(1)  # noqa: S311 - the same on every rank
    found: dict[str, list[Any]] = {"said": [], "facts": [], "digests": [], "where": []}
    losses: list[float] = []
    empty = 0
    for kind, batch in zip(plan(args.steps), batches(ids, args, seed=2 + rank), strict=False):
        where = draw.randrange(args.ranks) if kind is not None else None
        mine = kind if where == rank else None
        with poisoned(model, mine):
            loss = loss_of(model, batch.to(args.device), mine, args.ranks)
            outcome = guard.step(loss, tokens=0 if mine == "all labels -100" else batch.numel())
        facts = outcome.facts
        empty += facts.empty
        found["said"].append(None if facts.reason is None else str(facts.reason))
        found["facts"].append([facts.kind, str(facts.reason), facts.empty, repr(facts.norm), repr(facts.median)])
        found["digests"].append(digest(model))
        found["where"].append(where)
        if kind is None:
            losses.append(facts.loss)
    finite = all(bool(whole(p).isfinite().all()) for p in model.parameters())
    ends = [sum(x) / LAST for x in (losses[:LAST], losses[-LAST:])]
    how = {"backend": backend, "on device": guard.on_device, "empty": empty, "finite": finite, "losses": ends}
    Path(folder, f"{rank}.json").write_text(json.dumps({**found, **how}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def digest(model: Any) -> str:
    """Of all weights, bit for bit."""
    return hashlib.sha256(b"".join(whole(p).cpu().numpy().tobytes() for p in model.parameters())).hexdigest()


def whole(parameter: Any) -> Any:
    """A parameter, gathered from all ranks if it is sharded."""
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


if __name__ == "__main__":
    main()
