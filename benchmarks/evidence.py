"""Real models in each way to run them: error, text, gradients, time, memory; and which way is best where.

    OMP_NUM_THREADS=1 python benchmarks/evidence.py --json FILE          (make evidence)
    python benchmarks/evidence.py --device cuda --json FILE
    python benchmarks/evidence.py --models smollm2-135m --tokens 16 --step-tokens 8 --turns 1      (smoke test)

Gemma 3 270M, SmolLM2 135M, Qwen2.5-Coder 0.5B, Whisper base and MiniLM-L6, as tests/real/weights.py converts them
(the first run takes minutes longer). `hfpatch.apply(model)` is called as a user calls it, and the page says what it
applied. The reference is the checkpoint in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
import warnings
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, get_args

import torch
from common import Row, alternate, cpu_name, header, median, ratio, show, spread, table, write_json
from evidence_models import FRAMES, LARGE, ROWS, Sentences, Speech, Subject
from transformers import logging as transformers_logging
from ways import BF16, FP16, FP32, Way, clocked, free, memory

import hfpatch
from hfpatch.doctoring.ways import EQUAL, LEAN
from hfpatch.doctoring.ways import best as least
from hfpatch.patching.verifying.answer import Batch
from tests.real.weights import Name

FLOAT32, STOCK, BFLOAT16 = Way("float32", FP32), Way("float16, stock", FP16), Way("bfloat16", BF16)
PATCHED = Way("float16, hfpatch.apply", FP16, patched=True)
WAYS = (
    *(FLOAT32, STOCK, PATCHED, BFLOAT16),
    Way("float32, bfloat16 autocast", FP32, BF16),
    Way("float32, float16 autocast", FP32, FP16),
)
SUBJECTS: dict[Name, tuple[type[Subject], str]] = {
    "gemma3-270m": (Subject, "Gemma 3 270M"),
    "smollm2-135m": (Subject, "SmolLM2 135M"),
    "qwen2.5-coder-0.5b": (Subject, "Qwen2.5-Coder 0.5B"),
    "whisper-base": (Speech, "Whisper base"),
    "minilm-l6": (Sentences, "MiniLM-L6"),
}
SCALES = (2**8, 2**4)
"""Loss scales where float16 is involved, falling; the first that gives finite gradients is taken."""
WORSE = 1.1
"""Errors above this many times stock's, on a model that is healthy in float16, are among the troubles."""
TIMED = ("forward", "step")
SMALL = (
    f"On this CPU a step has a short text, a vocabulary above {LARGE:,} is cut to {ROWS:,} rows for it, and Whisper's "
    f"encoder to {FRAMES} positions, because backward in float16 is slow here; its memory is less by that."
)
ABSENT = (
    "Cards without bfloat16 (T4, V100, RTX 20xx) were not measured: there was none here. There the rows with bfloat16 "
    "do not exist or are emulated."
)


def main() -> None:
    """Measure each model, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default=",".join(get_args(Name)), help="which, with commas")
    parser.add_argument("--tokens", type=int, help="length of the text of the forward pass; 40 on a CPU, else 128")
    parser.add_argument("--step-tokens", type=int, default=8, help="length of the text of a step on a CPU")
    parser.add_argument("--turns", type=int, default=3, help="timed calls of each way, in turn")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    names: list[Any] = args.models.split(",")
    if unknown := [name for name in names if name not in SUBJECTS]:
        parser.error(f"--models: no model {', '.join(unknown)}; there are {', '.join(SUBJECTS)}")

    warnings.simplefilter("ignore", FutureWarning)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    device, start = torch.device(args.device), time.perf_counter()
    cpu = device.type == "cpu"
    tokens = args.tokens or (40 if cpu else 128)
    machine = cpu_name() if cpu else torch.cuda.get_device_name(device)
    facts = header("Real models, in each way to run them", machine, "torch", "transformers", "hfpatch")
    facts["load average"] = [round(os.getloadavg()[0], 1)]
    facts["models"] = []
    for name in names:
        kind, title = SUBJECTS[name]
        begun = time.perf_counter()
        facts["models"].append(measured(kind(title, name, device, tokens, args.step_tokens), args.turns))
        print(f"{title}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        write_json(args.json, facts)  # after each model, so that a run that is cut off keeps what it has
    facts["load average"].append(round(os.getloadavg()[0], 1))
    facts["seconds"] = round(time.perf_counter() - start)
    write_json(args.json, facts)
    print("- load average before and after: {}, {}; the run took {} s".format(*facts["load average"], facts["seconds"]))
    absent = cpu or torch.cuda.get_device_capability(device) >= (8, 0)
    page(facts["models"], *([SMALL] if cpu else []), *([ABSENT] if absent else []))


# --- measuring ------------------------------------------------------------------------------------------------


def measured(subject: Subject, turns: int) -> dict[str, Any]:
    """A model in every way, and what its figures say."""
    rows: dict[str, Row] = {way.name: {"way": way.name} for way in WAYS}
    facts: dict[str, Any] = {"model": subject.title, "error": subject.error, "applied": [], "inputs": {}}
    reference: dict[str, Any] = {}
    for dtype in (FP32, FP16, BF16):  # float32 first: its first way is the reference
        model = subject.load(dtype)
        if dtype == PATCHED.weights:
            facts["applied"] = [f"{d.patch}: {d.reason}" for d in hfpatch.plan(model).of("applied")]
        ways = [way for way in WAYS if way.weights == dtype and (facts["applied"] or not way.patched)]
        batch = subject.batch(model)
        facts["inputs"].setdefault("forward", shapes(batch))
        for way in ways:
            with as_way(subject, model, way), torch.no_grad():
                peak, mine = memory(subject.device, partial(subject.answer, model, batch))
                said, held = subject.say(model), bytes_of(model)
            exact, text = reference.setdefault("answer", (mine, said))
            rows[way.name] |= subject.judged(mine, exact, batch)
            rows[way.name] |= {subject.equal: torch.equal(said, text), "forward MiB": (held + peak) / 2**20}
        passes = alternate(turns, {way.name: partial(timed_pass, subject, model, batch, way) for way in ways})
        batch = subject.small(model)
        facts["inputs"].setdefault("step", shapes(batch))
        if FLOAT32 in ways:
            backward(subject, model, batch)
            reference["gradients"] = gradients(model)
        for way in ways:
            scale = SCALES[0] if FP16 in (way.weights, way.autocast) else 1
            rows[way.name] |= step(subject, model, batch, way, reference["gradients"], scale)
        steps = alternate(
            turns, {w.name: partial(timed_step, subject, model, batch, w, rows[w.name]["loss scale"]) for w in ways}
        )
        for way in ways:
            rows[way.name] |= {"forward s": median(passes[way.name]), "step s": median(steps[way.name])}
        for what, times in (("forward", passes), ("step", steps)) if PATCHED in ways else ():
            mine, stock = times[PATCHED.name], times[STOCK.name]
            facts[f"{what} time, patched / stock"] = ratio(mine, stock)
            facts[f"{what} quartiles"] = spread(mine, stock)
        del model, batch
        free(subject.device)
    if not facts["applied"]:
        rows.pop(PATCHED.name)
    return facts | verdict(list(rows.values()), subject.error, subject.equal)


@contextlib.contextmanager
def as_way(subject: Subject, model: Any, way: Way) -> Generator[None]:
    """The model as it is in a way: patched, if the way says so, and in its autocast region."""
    with hfpatch.apply(model, verbose=False) if way.patched else contextlib.nullcontext(), way.region(subject.device):
        yield


def timed_pass(subject: Subject, model: Any, batch: Batch, way: Way) -> float:
    """Seconds of a forward pass."""
    with as_way(subject, model, way), torch.no_grad():
        return clocked(subject.device, partial(subject.answer, model, batch))[0] / 1e3


def timed_step(subject: Subject, model: Any, batch: Batch, way: Way, scale: int) -> float:
    """Seconds of forward and backward."""
    with as_way(subject, model, way):
        milliseconds = clocked(subject.device, partial(backward, subject, model, batch, scale))[0]
    model.zero_grad()
    return milliseconds / 1e3


def backward(subject: Subject, model: Any, batch: Batch, scale: int = 1) -> torch.Tensor:
    """Write the gradients of the scaled loss; the loss."""
    loss = subject.loss(model, batch)
    (loss * scale).backward()
    return loss.detach()


def step(subject: Subject, model: Any, batch: Batch, way: Way, exact: dict[str, torch.Tensor], scale: int) -> Row:
    """Error of all gradients together from the exact ones, and memory, at this loss scale or a lower one."""
    with as_way(subject, model, way):
        peak, loss = memory(subject.device, partial(backward, subject, model, batch, scale))
        size = bytes_of(model) + peak
    found = gradients(model, scale)
    lower = [s for s in SCALES if s < scale]
    if lower and loss.isfinite() and not math.isfinite(norm(found.values())):
        return step(subject, model, batch, way, exact, lower[0])
    error = norm(found[n] - g for n, g in exact.items()) / norm(exact.values())
    return {"gradient error": error, "loss scale": scale, "step MiB": size / 2**20}


def gradients(model: Any, scale: int = 1) -> dict[str, torch.Tensor]:
    """Take the gradients from a model, unscaled: float32, on the CPU, by name."""
    found = {n: p.grad.float().cpu() / scale for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def norm(tensors: Iterable[torch.Tensor]) -> float:
    """L2 norm of tensors together, in float64."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors))


def bytes_of(model: Any) -> int:
    """Bytes of its parameters and buffers; tied ones count once."""
    return sum(t.nbytes for t in chain(model.parameters(), model.buffers()))


def shapes(batch: Batch) -> str:
    """The tensors of a batch, in words."""
    return ", ".join(f"{n} {list(v.shape)}" for n, v in batch.inputs.items() if isinstance(v, torch.Tensor))


# --- judging --------------------------------------------------------------------------------------------------


def verdict(rows: list[Row], error: str, equal: str) -> dict[str, Any]:
    """The rows, which way is best to run and to train, and patched float16 beside stock float16 and bfloat16.

    Args:
        rows: A row for each way; none for `float16, hfpatch.apply` if nothing was applied.
        error: Column of the distance from float32.
        equal: Column that says whether the greedy answer is float32's.
    """
    named = {row["way"]: row for row in rows}
    stock, bfloat16 = named[STOCK.name], named[BFLOAT16.name]
    patched = named.get(PATCHED.name, stock)
    return {
        "rows": [{k: row[k] for k in order(error, equal) if k in row} for row in rows],
        "best to run": best(rows, error, "forward MiB", "forward s"),
        "best to train": best(rows, "gradient error", "step MiB", "step s"),
        "not finite": [row["way"] for row in rows if not row["finite"]],
        "gradients not finite": [row["way"] for row in rows if not math.isfinite(row["gradient error"])],
        "other answer": [row["way"] for row in rows if row["finite"] and not row[equal]],
        "error, patched / stock": compared(patched[error], stock[error]),
        "gradient error, patched / stock": compared(patched["gradient error"], stock["gradient error"]),
        "error, bfloat16 / patched": compared(bfloat16[error], patched[error]),
    }


def order(error: str, equal: str) -> list[str]:
    """Columns of a model's table."""
    quality = ["way", "loss", error, "top-1", "1 - cosine", equal, "gradient error", "loss scale"]
    return [*quality, "forward s", "step s", "forward MiB", "step MiB", "finite"]


def best(rows: Sequence[Row], error: str, size: str, duration: str) -> str | None:
    """The way with the least error; of those as good, the leanest; of those as lean, the fastest. Float32 is none.

    Those that are equal in all three are ordered by error again.
    """
    found = least([row for row in rows if row["way"] != FLOAT32.name], error, size, duration)
    return None if found is None else found["way"]


def compared(mine: float, base: float) -> float | None:
    """Their ratio; None if one is not finite."""
    return mine / base if math.isfinite(mine) and math.isfinite(base) and base else None


# --- the page -------------------------------------------------------------------------------------------------


def page(models: Sequence[dict[str, Any]], *notes: str) -> None:
    """What went wrong, which way is best where, notes on the run, and a table of each model."""
    print("\n## What went wrong\n")
    print("\n".join(f"- {line}" for line in troubles(models)) or "Nothing.")
    ratios = (
        *("error, patched / stock", "gradient error, patched / stock", "error, bfloat16 / patched"),
        *("forward time, patched / stock", "step time, patched / stock"),
    )
    table(
        "Which way is best where",
        [
            {
                "model": m["model"],
                "to run": m["best to run"],
                "to train": m["best to train"],
                "applied in float16": ", ".join(line.partition(":")[0] for line in m["applied"]) or "nothing",
                **{what: m.get(what) for what in ratios},
            }
            for m in models
        ],
        "The least error first (KL, or the relative error of embeddings, to run; all gradients to train). Errors up to "
        f"{EQUAL} times the least count as equal; then memory decides, then time, each up to {LEAN} times the least.",
        "Patched / stock is float16. `-`: stock is not finite, or nothing was applied, so there is no second time. "
        "Times are medians of pairs, in turn on one model.",
        "KL in nats a token, over real tokens, and relative L2 error of all gradients together, both from the float32 "
        "checkpoint. Step: forward and backward of all parameters. MiB: weights and what the call holds at its peak.",
        *notes,
    )
    for m in models:
        pairs = [
            f"{what} {m[f'{what} time, patched / stock']:.3f} ({m[f'{what} quartiles']})"
            for what in TIMED
            if m["applied"]
        ]
        table(
            m["model"],
            m["rows"],
            f"Forward: {m['inputs']['forward']}. Step: {m['inputs']['step']}.",
            *(f"Applied in float16: {line}." for line in m["applied"]),
            *([f"Time in float16, patched / stock, with quartiles: {', '.join(pairs)}."] if pairs else []),
        )


def troubles(models: Sequence[dict[str, Any]]) -> list[str]:
    """What is not finite, worse than stock, or answers otherwise than float32; the worst first."""
    lines = [f"{m['model']}, {way}: not finite" for m in models for way in m["not finite"]]
    for m in models:
        lost = [way for way in m["gradients not finite"] if way not in m["not finite"]]
        lines += [f"{m['model']}, {way}: gradients not finite at any loss scale" for way in lost]
        for what in ("error", "gradient error"):
            times = m[f"{what}, patched / stock"]
            if times is not None and times > WORSE:
                lines.append(f"{m['model']}: healthy in float16, and patched the {what} is {show(times)} times stock's")
    lines += [f"{m['model']}, {way}: the greedy answer is not float32's" for m in models for way in m["other answer"]]
    return lines


if __name__ == "__main__":
    main()
