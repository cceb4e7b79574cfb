"""Error of half-precision attention against float64, outputs and gradients, at growing logits.

    OMP_NUM_THREADS=1 python benchmarks/attention_error.py [--device cuda]

Target: `fp32-attention-logits` at most 1.3 times the error of sdpa's math backend, plain and under autocast.
Queries and keys are random, 4 heads, causal; float64 sees the same rounded inputs.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from common import cpu_name, header, table, write_json

from hfpatch.numerics.attention_functions import fp32_logits_attention

HEADS = 4
SCALES = (1, 4, 16, 64, 256, 1024)
OFFSETS = (-120, 500, 3000)
TARGET = 1.3

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="write the figures here as well")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    facts = header("Attention: error against float64", where, "torch", "transformers", "hfpatch")
    facts["rows"] = [
        row(dtype, scale, offset, autocast, args)
        for dtype in ("bfloat16", "float16")
        for autocast in (False, True)
        for scale, offset in [*((s, 0) for s in SCALES), *((4, o) for o in OFFSETS)]
    ]
    table("relative error of the output / worst of dq, dk, dv", [shown(r) for r in facts["rows"]])
    worst = max(r["worst / math"] for r in facts["rows"])
    facts["worst / math"], facts["target"] = worst, TARGET
    print(
        f"\nfp32 logits, fused and written out, at most {worst:.2f} times the error of the math backend; asked {TARGET}"
    )
    write_json(args.json, facts)


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table: without the errors one by one."""
    return {
        k: f"{v[0]:.1e} / {v[1]:.1e}" if isinstance(v, list) else v for k, v in row.items() if not k.endswith(", each")
    }


def draw(dtype: torch.dtype, scale: float, offset: float, args: argparse.Namespace) -> Inputs:
    """Queries, keys and values whose scaled logits have this standard deviation and mean."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, args.tokens, args.width, generator=generator) for _ in range(3))
    q *= scale
    if offset:
        q[..., 0], k[..., 0] = (
            abs(offset * args.width**0.5) ** 0.5,
            abs(offset * args.width**0.5) ** 0.5 * (1 if offset > 0 else -1),
        )
    return q.to(args.device, dtype), k.to(args.device, dtype), v.to(args.device, dtype)


def module() -> Any:
    """What an attention function reads of its module."""
    return SimpleNamespace(num_key_value_groups=1, is_causal=True, training=False)


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """transformers' own."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    mask = torch.full((q.shape[2], q.shape[2]), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device).triu(1)[
        None, None
    ]
    return eager_attention_forward(module(), q, k, v, mask, scaling=q.shape[3] ** -0.5)[0]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's, on the backend it picks."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's math backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v)


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Ours, as it runs without caps and sinks."""
    return fp32_logits_attention(module(), q, k, v, None)[0]


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Ours, as it runs with them."""
    return fp32_logits_attention(module(), q, k, v, None, output_attentions=True)[0]


WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "eager": eager, "sdpa": sdpa, "sdpa math": math, "fp32 logits": fused, "fp32 logits, written out": written_out,
}  # fmt: skip


def run(way: Callable[..., torch.Tensor], inputs: Inputs, autocast: torch.dtype | None) -> list[torch.Tensor]:
    """The output and the three gradients, in float64."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    region = torch.autocast(inputs[0].device.type, dtype=autocast) if autocast else contextlib.nullcontext()
    with region:
        out = way(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad((out.double() * weight.double()).sum(), leaves)
    return [t.detach().double() for t in (out, *grads)]


def row(dtype: str, scale: float, offset: float, autocast: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Errors of every way at one size of logits."""
    kind = getattr(torch, dtype)
    inputs = draw(kind, scale, offset, args)
    exact = run(sdpa, tuple(t.double() for t in inputs), None)  # pyright: ignore[reportArgumentType]
    out: dict[str, Any] = {"dtype": dtype, "autocast": str(autocast), "logit std": scale, "offset": offset}
    ratios: list[float] = []
    for name, way in WAYS.items():
        errors = [
            float((a - b).norm() / b.norm())
            for a, b in zip(run(way, inputs, kind if autocast else None), exact, strict=True)
        ]
        out[name] = [errors[0], max(errors[1:])]
        out[f"{name}, each"] = errors
        if name.startswith("fp32"):
            ratios += [e / m for e, m in zip(errors, out["sdpa math, each"], strict=True)]
    out["worst / math"] = max(ratios)
    return out


if __name__ == "__main__":
    main()
