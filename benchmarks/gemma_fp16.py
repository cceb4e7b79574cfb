"""Gemma 3 in float16, stock and patched, beside the stock alternatives: quality, gradients, training, text, speed.

    python benchmarks/gemma_fp16.py --checkpoint DIR --tokens-file FILE --device cuda --json FILE
    python benchmarks/gemma_fp16.py --device cpu --rows 1 --tokens 32 --small          (smoke test)

Parts, chosen with --part a,b,...:
    a  quality of one batch against a float64 model: loss, KL, top-1
    b  error of the LoRA gradients against float32's
    c  LoRA training
    d  greedy text with dynamic and static cache
    e  speed and memory at the shape of a 4 B model, random weights, stock, patched, and with fp16-branch-overflow too,
       in turn on one model

DIR is an ordinary float32 checkpoint of Gemma 3 270M. FILE is JSON: lists of token ids, each with BOS first;
made beforehand (token_file.py), because tokenizers differ between releases. --small shortens everything, and
where they are not given makes a tiny random model whose residual stream passes 65,504, and random tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import math
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import Row, cpu_name, header, median, ratio, spread, table, write_json
from torch import nn
from torch.nn.functional import cosine_similarity, kl_div, nll_loss, pad
from transformers import AutoModelForCausalLM, Gemma3TextConfig
from transformers import logging as transformers_logging
from ways import BF16, FP16, FP32, FP64, Way, clocked, free

import hfpatch

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BOS = 2
TARGET_TIME, TARGET_MEMORY = 1.03, 1.05


FLOAT32 = Way("fp32 weights", FP32)
FLOAT32_AUTO = Way("fp32 + fp16 autocast", FP32, FP16)
BFLOAT16 = Way("bf16 weights", BF16)
BFLOAT16_BF16 = Way("bf16 + bf16 autocast", BF16, BF16)
BFLOAT16_FP16 = Way("bf16 + fp16 autocast", BF16, FP16)
STOCK = Way("fp16 stock", FP16)
STOCK_AUTO = Way("fp16 stock + fp16 autocast", FP16, FP16)
PATCHED = Way("fp16 patched", FP16, patched=True)
BRANCHES = Way("fp16 patched, branches too", FP16, patched=True, include=("fp16-branch-overflow",))
PATCHED_AUTO = Way("fp16 patched + fp16 autocast", FP16, FP16, patched=True)
WAYS = (FLOAT32, FLOAT32_AUTO, BFLOAT16, BFLOAT16_BF16, BFLOAT16_FP16, STOCK, STOCK_AUTO, PATCHED, PATCHED_AUTO)


@dataclass(frozen=True)
class Setting:
    """What all parts share. `ids [sequences, tokens]` on the device; a batch is `rows` of them."""

    checkpoint: str
    device: torch.device
    ids: torch.Tensor
    rows: int
    steps: int
    pairs: int
    small: bool

    def batch(self, step: int = 0) -> torch.Tensor:
        """Token ids `[rows, tokens]` of a step; the sequences come round again."""
        take = torch.arange(step * self.rows, (step + 1) * self.rows) % len(self.ids)
        return self.ids[take.to(self.device)]

    def load(self, dtype: torch.dtype, attention: str = "sdpa") -> Any:
        """The checkpoint in a dtype, as a user loads it (rotary tables stay float32)."""
        model: Any = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=dtype, attn_implementation=attention)
        return model.to(self.device).eval()


def main() -> None:
    """Run the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="directory of the float32 checkpoint; with --small, a tiny one is made")
    parser.add_argument("--tokens-file", help="JSON, lists of token ids; with --small, random ones are made")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--part", default="a,b,c,d,e", help="which parts, with commas")
    parser.add_argument("--rows", type=int, default=4, help="sequences in a batch")
    parser.add_argument("--tokens", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--steps", type=int, default=60, help="training steps of part c")
    parser.add_argument("--pairs", type=int, default=20, help="alternations of part e")
    parser.add_argument("--small", action="store_true", help="short, and on a tiny model unless one is given")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()

    parts = {"a": quality, "b": gradients, "c": training, "d": text, "e": speed}
    chosen = args.part.split(",")
    if unknown := [p for p in chosen if p not in parts]:
        parser.error(f"--part: no part {', '.join(unknown)}; there are {', '.join(parts)}")
    if needing := [p for p in chosen if p in "bce" and importlib.util.find_spec("peft") is None]:
        parser.error(f"parts {', '.join(needing)} need peft, which is not installed: pip install peft, or --part a,d")
    needs_model = any(p in "abcd" for p in chosen)
    if needs_model and not args.small and not (args.checkpoint and args.tokens_file):
        parser.error("parts a to d need --checkpoint and --tokens-file, or --small")

    warnings.simplefilter("ignore", FutureWarning)  # of names that transformers 5.17 has and 5.24 renames
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    facts = header("Gemma 3 in float16", name, "torch", "transformers", "peft", "hfpatch")
    print(f"- CUDA {torch.version.cuda}; float32 products: {torch.get_float32_matmul_precision()}")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.checkpoint or (tiny_checkpoint(folder) if needs_model else folder)
        ids = tokens(args.tokens_file, args.tokens, args.rows) if needs_model else torch.zeros(1, 1, dtype=torch.long)
        steps, pairs = (min(args.steps, 4), min(args.pairs, 3)) if args.small else (args.steps, args.pairs)
        setting = Setting(checkpoint, device, ids.to(device), args.rows, steps, pairs, args.small)
        if needs_model:
            model, kind = ("as given" if args.checkpoint else "tiny, random"), ("" if args.tokens_file else "random ")
            print(f"- model: {model}; {len(ids)} {kind}sequences of {ids.shape[1]} tokens")
        for part in chosen:
            start = time.perf_counter()
            facts[part] = parts[part](setting)
            free(device)
            print(f"\n(part {part}: {time.perf_counter() - start:.0f} s)", flush=True)
            write_json(args.json, facts)  # after each part, so that a run that is cut off keeps what it has


# --- a: quality -------------------------------------------------------------------------------------------


def quality(setting: Setting) -> list[Row]:
    """Every way on one batch, against the float64 model."""
    ids = setting.batch()
    model = setting.load(FP64)
    with torch.no_grad():
        reference = model(input_ids=ids, use_cache=False).logits
    del model
    rows: list[Row] = []
    for dtype in (FP32, BF16, FP16):
        model = setting.load(dtype)
        for attention in ("sdpa", "eager"):
            model.set_attn_implementation(attention)
            for way in (w for w in WAYS if w.weights == dtype):
                with patched(model, way), torch.no_grad(), way.region(setting.device):
                    logits = model(input_ids=ids, use_cache=False).logits
                rows.append({"attention": attention, "way": way.name, **score(logits, reference, ids)})
                del logits
        del model
        free(setting.device)
    rows.sort(key=lambda row: row["attention"] != "sdpa")
    for row in rows:
        base = next(r for r in rows if r["attention"] == row["attention"] and r["way"] == PATCHED.name)
        row["KL / patched's"] = row["KL"] / base["KL"] if base["KL"] else None
    table(
        f"a. Quality, {ids.shape[0]} x {ids.shape[1]} tokens",
        rows,
        "KL in nats a token from a float64 model (float64 weights and sdpa; its norms and rotary tables compute in "
        "float32, as in every row), computed in float64. Top-1: share of tokens whose likeliest next token is "
        "the reference's.",
    )
    return rows


def score(logits: torch.Tensor, reference: torch.Tensor, ids: torch.Tensor, chunk: int = 256) -> Row:
    """Loss, KL and top-1 of logits `[rows, tokens, vocabulary]`, in float64, `chunk` tokens at a time."""
    targets = pad(ids[:, 1:], (0, 1), value=-100).flatten()
    mine, exact = logits.flatten(0, 1), reference.flatten(0, 1)
    loss = kl = same = 0.0
    finite = True
    for part in range(0, len(mine), chunk):
        here = slice(part, part + chunk)
        got, want = mine[here].double().log_softmax(-1), exact[here].log_softmax(-1)
        whole = got.isfinite().all(-1)
        finite &= bool(whole.all())
        loss += float(nll_loss(got, targets[here], ignore_index=-100, reduction="sum"))
        kl += float(kl_div(got, want, log_target=True, reduction="sum"))
        same += int(((got.argmax(-1) == want.argmax(-1)) & whole).sum())
    return {"loss": loss / int((targets >= 0).sum()), "KL": kl / len(mine), "top-1": same / len(mine), "finite": finite}


@contextlib.contextmanager
def patched(model: nn.Module, way: Way) -> Generator[None]:
    """The model patched, if the way says so, and put back."""
    if not way.patched:
        yield
        return
    with patch(model, way.include):
        yield


def patch(model: nn.Module, include: tuple[str, ...] = ()) -> hfpatch.Applied:
    """Apply, and insist that the residual stream was patched, and what is named."""
    fix = hfpatch.apply(model, verbose=False, include=include)
    if not {"fp16-residual-overflow", *include} <= {d.patch for d in fix.plan.of("applied")}:
        raise SystemExit(f"fp16-residual-overflow was not applied:\n{fix}")
    return fix


# --- b: gradients -----------------------------------------------------------------------------------------


def gradients(setting: Setting) -> list[Row]:
    """Relative error of all LoRA gradients together, same adapters in every row."""
    exact, _ = lora_gradient(setting, FLOAT32)
    rows: list[Row] = []
    for way in (FLOAT32_AUTO, BFLOAT16, BFLOAT16_FP16, PATCHED, PATCHED_AUTO):
        got, scale = lora_gradient(setting, way)
        error = float((got - exact).norm() / exact.norm())
        cosine = float(cosine_similarity(got, exact, dim=0))
        rows.append({"way": way.name, "relative error": error, "1 - cosine": 1 - cosine, "loss scale": f"{scale:g}"})
    table(
        f"b. LoRA gradients against fp32's, {len(exact):,} values",
        rows,
        "Gradients of A and B of all projections, unscaled; r 8, B random (0.01). Loss scale: the largest power of "
        "two up to 65,536 that gives finite gradients.",
    )
    return rows


def lora_gradient(setting: Setting, way: Way) -> tuple[torch.Tensor, float]:
    """All LoRA gradients as one float64 vector, and the loss scale they were computed with."""
    model = setting.load(way.weights)
    if way.patched:
        patch(model)
    model = with_lora(model, rank=8, b_std=0.01)
    ids = setting.batch()
    scale = 2.0**16 if FP16 in (way.weights, way.autocast) else 1.0
    while True:
        with way.region(setting.device):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss * scale).backward()
        found = torch.cat([p.grad.double().flatten() for _, p in adapters(model) if p.grad is not None]) / scale
        if found.isfinite().all() or scale <= 1:
            return found, scale
        model.zero_grad()
        scale /= 2


def with_lora(model: Any, rank: int, b_std: float) -> Any:
    """A PEFT model with LoRA on all projections, scale 2, float32 adapters; the same values in every dtype."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=PROJECTIONS, task_type="CAUSAL_LM"
    )
    out = get_peft_model(model, config)
    for name, weight in adapters(out):
        assert weight.dtype == FP32, f"{name} is {weight.dtype}"
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        std = weight.shape[1] ** -0.5 if "lora_A" in name else b_std
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * std)
    return out


def adapters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """LoRA parameters by name."""
    return [(n, p) for n, p in model.named_parameters() if "lora_" in n]


# --- c: training ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training run. `checkpointing`: None, or whether it is the reentrant kind."""

    name: str
    way: Way
    after_peft: bool = False
    checkpointing: bool | None = None


RUNS = (
    Run("fp32", FLOAT32),
    Run("bf16", BFLOAT16),
    Run("fp16 stock", STOCK),
    Run("fp16 patched, then PEFT", PATCHED),
    Run("PEFT, then fp16 patched", PATCHED, after_peft=True),
    Run("fp16 patched, fp16 autocast", PATCHED_AUTO),
    Run("fp16 patched, checkpointing reentrant", PATCHED, checkpointing=True),
    Run("fp16 patched, checkpointing non-reentrant", PATCHED, checkpointing=False),
)


def training(setting: Setting) -> list[Row]:
    """LoRA training, the same batches and adapters in every run."""
    losses: dict[str, list[float]] = {}
    rows: list[Row] = []
    for run in RUNS:
        steps = setting.steps if run.checkpointing is None else min(setting.steps, 10)
        losses[run.name], skips, scale = train(setting, run, steps)
        mine, exact = losses[run.name], losses["fp32"]
        rows.append(
            {
                "run": run.name,
                "steps": steps,
                "first loss": mine[0],
                "last-10 loss": sum(mine[-10:]) / len(mine[-10:]),
                "non-finite losses": sum(not math.isfinite(x) for x in mine),
                "skipped steps": skips,
                "last scale": None if scale is None else f"{scale:g}",
                "largest distance from fp32's loss": _largest(a - b for a, b in zip(mine, exact, strict=False)),
            }
        )
        free(setting.device)
    table(
        f"c. LoRA training, {setting.rows} x {setting.ids.shape[1]} tokens a step, r 8, AdamW 2e-4",
        rows,
        f"{len(setting.ids)} sequences, in turn. Skipped: by the GradScaler (fp16 runs), which starts at 65,536.",
    )
    return [{**row, "losses": losses[row["run"]]} for row in rows]


def train(setting: Setting, run: Run, steps: int) -> tuple[list[float], int, float | None]:
    """Losses by step, number of skipped steps, and the loss scale at the end."""
    model = setting.load(run.way.weights)
    if run.way.patched and not run.after_peft:
        patch(model)
    if run.checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": run.checkpointing})
        model.enable_input_require_grads()
    model = with_lora(model, rank=8, b_std=0.0)
    if run.way.patched and run.after_peft:
        patch(model)
    model.train()
    optimizer = torch.optim.AdamW([p for _, p in adapters(model)], lr=2e-4)
    scaler = torch.amp.GradScaler(setting.device.type, enabled=FP16 in (run.way.weights, run.way.autocast))
    losses: list[float] = []
    skips = 0
    for step in range(steps):
        ids = setting.batch(step)
        with run.way.region(setting.device):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skips += scaler.get_scale() < before
        losses.append(float(loss.detach()))
    return losses, skips, scaler.get_scale() if scaler.is_enabled() else None


def _largest(differences: Iterable[float]) -> float:
    sizes = [abs(d) for d in differences]
    return math.nan if any(math.isnan(s) for s in sizes) else max(sizes)


# --- d: text ----------------------------------------------------------------------------------------------


def text(setting: Setting) -> list[Row]:
    """Greedy continuations, float32 and patched float16, with both kinds of cache."""
    new, prompt = (8, 8) if setting.small else (32, 64)
    ids = setting.batch()[:, :prompt]
    exact = {kind: greedy(setting, FLOAT32, ids, new, kind) for kind in ("dynamic", "static")}
    got = {kind: greedy(setting, PATCHED, ids, new, kind) for kind in ("dynamic", "static")}
    rows = [
        {"compared": f"{kind}: fp32, patched", "prompt": i, **compare(exact[kind], got[kind], i)}
        for kind in exact
        for i in range(len(ids))
    ]
    rows += [
        {"compared": "patched: dynamic, static", "prompt": i, **compare(got["dynamic"], got["static"], i)}
        for i in range(len(ids))
    ]
    table(
        f"d. Greedy, {new} tokens after prompts of {ids.shape[1]}",
        rows,
        "First difference: the step, from 0. Gap: between the two likeliest logits of the first named, there; a small "
        "one is a near-tie. Logit distance: the largest up to there. The static cache runs uncompiled.",
    )
    return rows


def greedy(setting: Setting, way: Way, ids: torch.Tensor, new: int, cache: str) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens `[rows, new]` and their logits `[rows, new, vocabulary]` in float32."""
    model = setting.load(way.weights)
    extra = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    with patched(model, way):
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new,
            pad_token_id=0, return_dict_in_generate=True, output_logits=True, **extra,
        )  # fmt: skip
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, dim=1).float()


def compare(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor], row: int) -> Row:
    """Where two continuations part."""
    differs = (a[0][row] != b[0][row]).nonzero().flatten()
    first = int(differs[0]) if len(differs) else None
    upto = len(a[0][row]) if first is None else first + 1
    distance = float((a[1][row, :upto] - b[1][row, :upto]).abs().max())
    gap = None
    if first is not None:
        top = a[1][row, first].topk(2).values
        gap = float(top[0] - top[1])
    return {"equal": first is None, "first difference": first, "gap there": gap, "logit distance": distance}


# --- e: speed ---------------------------------------------------------------------------------------------


def speed(setting: Setting) -> list[Row]:
    """Inference and a LoRA step at the shape of a 4 B model; the ways of one dtype in turn on one model."""
    shape = (1, 32) if setting.small else (2, 1024)
    ids = torch.randint(10, 1000, shape, generator=torch.Generator().manual_seed(0)).to(setting.device)
    groups = ((STOCK, PATCHED, BRANCHES, STOCK_AUTO, PATCHED_AUTO), (BFLOAT16, BFLOAT16_FP16), (FLOAT32_AUTO,))
    found: dict[str, list[Row]] = {"inference": [], "LoRA step (r 16)": []}
    parameters = 0
    for ways in groups:
        model = four_billion(setting, ways[0].weights)
        parameters = sum(p.numel() for p in model.parameters())
        found["inference"] += measure(setting, model, ways, partial(forward, setting, ids))
        model = with_lora(model, rank=16, b_std=0.01).train()
        found["LoRA step (r 16)"] += measure(setting, model, ways, LoraStep(setting, model, ids))
        del model
        free(setting.device)
    for what, rows in found.items():
        table(f"e. {what}, {shape[0]} x {shape[1]} tokens, {parameters:,} parameters", rows)
    print(
        f"\nMedian of {setting.pairs} alternations after a warm-up. Ratios: patched to stock with the same autocast, "
        f"paired, in one process on one model; targets: time at most {TARGET_TIME}, peak at most {TARGET_MEMORY}. Rows "
        "without a ratio ran on a model of their own. Peak: of one call, weights and optimizer state included. "
        "Branches too: fp16-branch-overflow by name, so all feed-forward parts and attention outputs are scaled; with "
        "a batch, only those that come near 65,504 are."
    )
    return [{"what": what, **row} for what, rows in found.items() for row in rows]


def four_billion(setting: Setting, dtype: torch.dtype) -> Any:
    """Random weights in the shape of Gemma 3 4B's text model, made on the device; its norms keep the stream small."""
    sizes: dict[str, Any] = {
        "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    }  # fmt: skip
    if setting.small:
        sizes |= {
            "vocab_size": 1024,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "head_dim": 16,
        }
    config = Gemma3TextConfig(**sizes, sliding_window=1024, query_pre_attn_scalar=sizes["head_dim"])
    with setting.device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def forward(setting: Setting, ids: torch.Tensor, model: Any, way: Way) -> torch.Tensor:
    """One forward pass without gradients; the last logits, copied so that they do not keep all of them alive."""
    with torch.no_grad(), way.region(setting.device):
        return model(input_ids=ids, use_cache=False).logits[:, -1].clone()


class LoraStep:
    """Forward, backward and AdamW on the adapters, with a GradScaler of a fixed scale where float16 is involved."""

    def __init__(self, setting: Setting, model: nn.Module, ids: torch.Tensor) -> None:
        self.setting, self.ids = setting, ids
        self.optimizer = torch.optim.AdamW([p for _, p in adapters(model)], lr=1e-5)
        self.scaler = torch.amp.GradScaler(setting.device.type, init_scale=2.0**8, growth_interval=10**9)

    def __call__(self, model: Any, way: Way) -> torch.Tensor:
        """One step; the loss."""
        with way.region(self.setting.device):
            loss = model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        if FP16 in (way.weights, way.autocast):
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def measure(setting: Setting, model: Any, ways: tuple[Way, ...], body: Callable[[Any, Way], torch.Tensor]) -> list[Row]:
    """Time and peak memory of each way, A B A B on one model; patching happens outside the clock."""
    times: dict[str, list[float]] = {w.name: [] for w in ways}
    peaks: dict[str, list[float]] = {w.name: [] for w in ways}
    finite = dict.fromkeys(times, True)
    for turn in range(-3, setting.pairs):
        if turn == 0:
            gc.collect()
            gc.freeze()
        for way in ways:
            with patched(model, way):
                milliseconds, gibibytes, out = clocked(setting.device, partial(body, model, way))
            finite[way.name] &= bool(out.isfinite().all())
            if turn >= 0:
                times[way.name].append(milliseconds)
                peaks[way.name].append(gibibytes)
    gc.unfreeze()
    rows: list[Row] = []
    for way in ways:
        mine, stock = times[way.name], times.get((STOCK if way.autocast is None else STOCK_AUTO).name, [])
        row: Row = {"way": way.name, "ms": median(mine), "peak GiB": max(peaks[way.name])}
        row |= {"time / stock": None, "quartiles": None, "peak / stock": None}
        if way.patched:
            base = max(peaks[(STOCK if way.autocast is None else STOCK_AUTO).name])
            row |= {"time / stock": ratio(mine, stock), "quartiles": spread(mine, stock)}
            row["peak / stock"] = max(peaks[way.name]) / base if base else None
        rows.append({**row, "finite": finite[way.name]})
    return rows


# --- what it runs on --------------------------------------------------------------------------------------


def tokens(file: str | None, length: int, rows: int) -> torch.Tensor:
    """Token ids `[sequences, length]` from a file, or random ones with BOS first."""
    if file is None:
        ids = torch.randint(10, 200, (2 * rows, length), generator=torch.Generator().manual_seed(0))
        ids[:, 0] = BOS
        return ids
    with open(file) as handle:  # noqa: PTH123
        lists: list[list[int]] = json.load(handle)
    long_enough = [ids[:length] for ids in lists if len(ids) >= length]
    if len(long_enough) < rows:
        raise SystemExit(
            f"--tokens-file: {len(long_enough)} of {len(lists)} sequences have {length} tokens; want {rows} or more"
        )
    if without := sum(ids[0] != BOS for ids in long_enough):
        raise SystemExit(f"--tokens-file: {without} sequences do not begin with BOS ({BOS})")
    return torch.tensor(long_enough)


def tiny_checkpoint(folder: str) -> str:
    """A float32 checkpoint of a tiny Gemma 3 whose residual stream passes 65,504 though no branch does."""
    config = Gemma3TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32, sliding_window=16, max_position_embeddings=1024,
        pad_token_id=0, eos_token_id=1, bos_token_id=BOS,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=FP32)
    for name, weight in model.named_parameters():
        if name.endswith("post_feedforward_layernorm.weight"):
            weight.data.fill_(12000.0)
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
