"""Attention logits in float32: eager, sdpa and fp32 logits against float64, before and after one optimizer step.

    python examples/fp32_logits.py                     # downloads Gemma 3 270M (gated: accept its terms first)
    python examples/fp32_logits.py --llm DIR
    python examples/fp32_logits.py --llm tiny

Tables:

1. The attention of each layer on its own queries, keys and values, rounded to bfloat16 and to float16, against float64
   on the same rounded ones: as they are, and with logits 256 times as large. Eager rounds logits, and in float16 they
   overflow; sdpa and `fp32-attention-logits` do neither.
2. The whole model before and after one step of SGD on its attention, under bfloat16 autocast, where all else is
   rounded too and no way stands out; and under float16 autocast with the large logits, where eager is NaN.
3. A tiny DeepSeek-V3.2, whose sparse indexer chooses positions by its scores: under bfloat16 autocast it chooses
   others than in float32, and with `fp32-indexer` the same, before and after the step.

The function stays the same; a soft-cap or a clamp would change it.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from loading import keep_rows, language_model, progress, table
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import hfpatch
from hfpatch.numerics.attention_functions import fp32_logits_attention
from hfpatch.patching.verifying.chosen import choices
from hfpatch.testing import tiny_model

LARGER = 256.0
"""Factor on the logits of the second setting, by the weights of the norm of the queries."""
GEMMA = "google/gemma-3-270m"
RATE = 1e-3
"""Of SGD."""
DTYPES = (torch.bfloat16, torch.float16)

Errors = dict[tuple[str, str], float]
"""The largest error over the layers, by way and dtype."""


def far(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the distance relative to the reference; NaN if there is one."""
    return float((found.double() - reference).norm() / reference.norm())


def grow(model: Any, factor: float) -> None:
    """Multiply the attention logits of a Gemma 3 by a factor, through the weights of the norm of its queries."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.add_(1).mul_(factor).sub_(1)


def attention_errors(model: Any, ids: torch.Tensor) -> Errors:
    """Run the model once, and each layer's attention in three ways in half precision.

    Args:
        model: In float32.
        ids: `[1, tokens]`.

    Returns:
        The largest relative error of the output, NaN if one is NaN.
    """
    errors: Errors = {}

    def measured(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **more: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        ways = {"eager": eager, "sdpa": AttentionInterface()["sdpa"], "fp32 logits": fp32_logits_attention}
        for dtype in DTYPES:
            low = [x.to(dtype) for x in (q, k, v)]
            exact = written_out(*(x.double() for x in low), mask, scaling)
            for name, way in ways.items():
                cut = torch.finfo(dtype).min
                here = mask.clamp(min=cut).to(dtype)
                out = way(module, *low, here, scaling=scaling, **more)[0]
                at = name, str(dtype).removeprefix("torch.")
                errors[at] = worst(errors.get(at, 0.0), far(out, exact))
        return eager(module, q, k, v, mask, scaling=scaling, **more)

    AttentionInterface.register("fp32_logits_example", measured)
    AttentionMaskInterface.register("fp32_logits_example", eager_mask)  # or the mask is lost
    before = model.config._attn_implementation
    model.set_attn_implementation("fp32_logits_example")
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    model.set_attn_implementation(before)
    return errors


def worst(a: float, b: float) -> float:
    """Return the larger, NaN if one is."""
    return a if math.isnan(a) or a > b else b


def written_out(q: Any, k: Any, v: Any, mask: Any, scaling: float) -> torch.Tensor:
    """Attention as it is defined, `[batch, tokens, heads, width]`, in the dtype of its inputs."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = q @ k.transpose(-1, -2) * scaling + mask.to(q.dtype)
    return (logits.softmax(-1) @ v).transpose(1, 2)


def one_step(model: Any, ids: torch.Tensor, autocast: torch.dtype | None) -> list[tuple[float, torch.Tensor]]:
    """Return loss and logits of the model before and after one SGD step on the projections of its attention."""
    trained = [p for n, p in model.requires_grad_(False).named_parameters() if ".self_attn." in n and "norm" not in n]
    for p in trained:
        p.requires_grad_(True)
    optimizer = torch.optim.SGD(trained, lr=RATE)
    found: list[tuple[float, torch.Tensor]] = []
    for last in (False, True):
        with torch.autocast("cpu", dtype=autocast) if autocast else nullcontext():
            out = model(input_ids=ids, labels=ids, use_cache=False)
        found.append((out.loss.item(), out.logits.detach().double()))
        if not last:
            out.loss.backward()
            optimizer.step()
    return found


def ways(base: Any, patches: str | list[str]) -> dict[str, Callable[[], Any]]:
    """Return a model for each way: eager, sdpa, and eager with patches."""

    def made(implementation: str, *, patched: bool = False) -> Any:
        model = copy.deepcopy(base)
        model.set_attn_implementation(implementation)
        if patched:
            hfpatch.apply(model, only=patches, verbose=False)
        return model

    return {
        "eager": lambda: made("eager"),
        "sdpa": lambda: made("sdpa"),
        "fp32 logits": lambda: made("eager", patched=True),
    }


def stepped(base: Any, ids: torch.Tensor, dtype: torch.dtype) -> list[tuple[str, ...]]:
    """Return a row for each way under autocast: loss, and error of the logits, before and after the step."""
    exact = one_step(copy.deepcopy(base).double(), ids, None)
    rows = [("float64", *(cell for loss, _ in exact for cell in (f"{loss:.4f}", "-")))]
    runs = {"float32": (lambda: copy.deepcopy(base), None)}
    runs |= {name: (make, dtype) for name, make in ways(base, "fp32-attention-logits").items()}
    for name, (make, autocast) in runs.items():
        progress(f"one step, {name}")
        cells = zip(one_step(make(), ids, autocast), exact, strict=True)
        rows.append((name, *(cell for a, b in cells for cell in (f"{a[0]:.4f}", f"{far(a[1], b[1]):.1e}"))))
    return rows


def indexer(ids: torch.Tensor, base: Any, dtype: torch.dtype) -> list[tuple[str, ...]]:
    """Return a row for each way: the rows in which the indexers choose as in float32, before and after the step."""
    rows: list[tuple[str, ...]] = []
    for name, make in ways(base, ["fp32-attention-logits", "fp32-indexer"]).items():
        model, cells = make(), list[str]()
        for last in (False, True):
            with torch.autocast("cpu", dtype=dtype):
                found = choices(model, partial(model, input_ids=ids))
            same, rows_of = sum(c.equal for c in found), sum(c.rows for c in found)
            cells += [f"{same} of {rows_of}", f"{max(c.error for c in found):.1e}"]
            if not last:
                one_step(model, ids, dtype)
        rows.append((name, str(found[0].product), *cells))
    return rows


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", default=GEMMA, help="hub id or folder of a Gemma 3, or `tiny`")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rows", type=int, default=256, help="keep so many rows of the vocabulary")
    args = parser.parse_args()
    llm = language_model(args.llm, "--llm", "gemma3_text")
    ids = keep_rows(llm.model, llm.ids(tokens=args.tokens), args.rows)

    progress("attention of each layer")
    first = attention_errors(llm.model, ids)
    larger = copy.deepcopy(llm.model)
    grow(larger, LARGER)
    second = attention_errors(larger, ids)
    names = list(dict.fromkeys(name for name, _ in first))
    columns = ("attention", *(f"{d}{much}" for d in ("bfloat16", "float16") for much in ("", f", {LARGER:g} x")))
    rows = [(n, *(f"{e[n, d]:.1e}" for d in ("bfloat16", "float16") for e in (first, second))) for n in names]
    table(columns, rows, "Error of the worst layer's attention against float64")
    if math.isfinite(second["eager", "float16"]):
        print("no logit of this model passes 65,504 in float16; those of Gemma 3 270M do (--llm)")

    columns = ("attention", "loss", "logits", "loss after", "logits after")
    rows = stepped(llm.model, ids, torch.bfloat16)
    table(columns, rows, "\nOne step under bfloat16 autocast; errors of the logits against float64")
    rows = stepped(larger, ids, torch.float16)
    table(columns, rows, f"\nThe same under float16 autocast, attention logits {LARGER:g} x")

    deep = tiny_model("deepseek_v32", index_topk=4)
    words = torch.randint(0, 64, (2, 48), generator=torch.Generator().manual_seed(0))
    columns = ("attention", "product", "rows as in float32", "scores", "rows after", "scores after")
    table(columns, indexer(words, deep, torch.bfloat16), "\nThe indexers of a tiny DeepSeek-V3.2, bfloat16 autocast")


if __name__ == "__main__":
    main()
