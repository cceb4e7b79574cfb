"""Attention with float32 logits, and attention without the cuDNN kernel: for transformers' `AttentionInterface`.

Shapes as there: query `[batch, heads, tokens, width]`, key and value `[batch, kv heads, kv tokens, width]`, output
`[batch, tokens, heads, width]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hfpatch.model.evaluating.full_float32 import full_float32


def fp32_logits_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return a boolean mask, True where a query may attend; None for a plain causal mask, to save memory.

    In transformers' sdpa masks None may also mean that every query attends to every key; here it never does.
    """
    return sdpa_mask(*args, **{**kwargs, "allow_is_bidirectional_skip": False})


SMALL = 256
"""Up to SMALL x SMALL query-key pairs the CPU computes attention without a fused kernel, which costs little at this
size: if a softmax puts all its weight on one key, the gradients (almost 0) are 10 times closer to float64."""


def fp32_logits_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute softmax attention with query-key product and softmax in float32, also under autocast.

    The output of a query that may attend to no key is 0. torch's fused attention, which keeps its logits in float32, is
    used if it supports the call; soft-caps, sinks, position biases and returned weights are computed without it, with
    memory that grows with tokens squared, as in eager attention.

    Args:
        module: The attention module; `num_key_value_groups`, `is_causal` and `sinks` are read from it.
        query: `[batch, heads, tokens, width]`.
        key: `[batch, kv heads, kv tokens, width]`.
        value: `[batch, kv heads, kv tokens, value width]`.
        attention_mask: `[batch, 1 or heads, tokens, kv tokens]`, or None. Boolean, True where a query may attend; or
            added to the logits, where half of the dtype's lowest value and less masks the key.
        scaling: Factor on the logits; None for 1 / sqrt(width).
        dropout: Share of weights dropped in training.
        is_causal: Used if there is no mask; None for the module's `is_causal`, or False without one.
        softcap: `cap` in `cap * tanh(logits / cap)`; None for no soft-cap.
        position_bias: Added to the logits; None for no bias.
        kwargs: `s_aux` or `sinks`, a learned logit per head that attends to no key; `output_attentions`.

    Returns:
        The output `[batch, tokens, heads, value width]` in the dtype of `value`, and the weights (None if the fused
        attention ran).
    """
    sinks = next((s for n in ("s_aux", "sinks") if (s := kwargs.get(n)) is not None), getattr(module, "sinks", None))
    small = query.device.type == "cpu" and query.shape[2] * key.shape[2] <= SMALL**2
    written_out = (
        small
        or softcap is not None
        or sinks is not None
        or position_bias is not None
        or kwargs.get("output_attentions")
        or getattr(getattr(module, "config", None), "output_attentions", False)
    )
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    allowed, bias = split_mask(attention_mask)
    with torch.autocast(query.device.type, enabled=False):
        if not written_out:
            return _fused(module, query, key, value, allowed, bias, causal, scaling, dropout), None
        if allowed is None and causal and query.shape[2] > 1:
            allowed = _causal(query, key)
        if position_bias is not None:
            bias = position_bias if bias is None else bias + position_bias
        return _written_out(module, query, key, value, allowed, bias, scaling, dropout, softcap, sinks)


def fp32_logits_attention_masked(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `fp32_logits_attention`, with the masks of eager attention: without a mask, attention is not causal."""
    kwargs["is_causal"] = False
    return fp32_logits_attention(module, query, key, value, attention_mask, **kwargs)


def split_mask(mask: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Split a mask into a boolean mask, True where a query may attend, and a bias to add; each may be None.

    The lowest values of an additive mask become False: added in float32, float16's -65,504 would not mask a key,
    because logits can be larger.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        return mask.bool(), None
    forbidden = mask <= torch.finfo(mask.dtype).min / 2
    return ~forbidden, mask.masked_fill(forbidden, 0.0)


def _causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a mask, True where key position <= query position, aligned to the upper left as torch's `is_causal`."""
    tokens, keys = query.shape[2], key.shape[2]
    return torch.ones(tokens, keys, dtype=torch.bool, device=query.device).tril()[None, None]


def _fused(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor | None,
    bias: torch.Tensor | None,
    causal: bool,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    # CUDA's fused kernels keep logits and sums in float32 for half-precision operands; the CPU's rounds the
    # weights to half in between, which costs its gradients a factor of 2 to 5 against float64
    compute = value.dtype if query.device.type == "cuda" else torch.promote_types(value.dtype, torch.float32)
    mask, alive = allowed, None
    if allowed is not None:
        alive = allowed.any(-1, keepdim=True)
        mask = allowed | ~alive  # a row without keys is NaN in some kernels, and NaN times 0 is NaN
        if bias is not None:
            mask = bias.to(compute).masked_fill(~mask, -torch.inf)
    out, _ = sdpa_without_cudnn(
        module,
        query.to(compute),
        key.to(compute),
        value.to(compute),
        mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=causal,
    )
    if alive is not None:
        out = out * alive.transpose(1, 2)
    return out.to(value.dtype)


def _written_out(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor | None,
    bias: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(value.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    keys = key.to(wide).repeat_interleave(groups, dim=1)
    values = value.to(wide).repeat_interleave(groups, dim=1)
    logits = query.to(wide) @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(wide)
    if allowed is not None:
        alive = allowed.any(-1, keepdim=True)
        logits = logits.masked_fill(~allowed & alive, -torch.inf)
    if sinks is not None:
        sink = sinks.to(wide) if sinks.dim() == 4 else sinks.to(wide).reshape(1, -1, 1, 1)
        logits = torch.cat([logits, sink.expand(*logits.shape[:-1], 1)], dim=-1)
    weights = logits.softmax(-1)
    weights = weights if sinks is None else weights[..., :-1]
    if allowed is not None:
        weights = weights * allowed  # rows in which every key is masked give 0
    weights = F.dropout(weights, p=dropout, training=module.training)
    out = (weights @ values).transpose(1, 2).contiguous()
    return out.to(value.dtype), weights.to(value.dtype)


def sdpa_without_cudnn(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the sdpa attention of transformers, without the cuDNN backend in the cases where its gradients fail.

    They fail with a mask if the number of keys is 64 modulo 128, for rows whose logits are below -88; other lengths
    keep cuDNN, the fastest. The backend of the forward pass also does the backward pass, so the choice is needed for
    this call only; torch's setting is restored before it returns.
    """
    if attention_mask is None or key.shape[2] % 128 != 64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


@full_float32()
def differs_from_eager(eager: Callable[..., Any], module: nn.Module, cap: float | None) -> str | None:
    """Return how a module's own eager attention differs from `fp32_logits_attention`; None if it does not.

    Both are run in float32 on a few random tokens, with and without a mask, with the module's own soft-cap, and with
    random sinks if it has sinks. It takes about 1 ms.
    """
    if (fifth := list(signature(eager).parameters)[4:5]) not in ([], ["attention_mask"]):
        return f"takes its mask as {fifth[0]!r}"
    plain = {k: v for k, v in module.__dict__.items() if v is None or isinstance(v, (int, float, str))}
    groups = int(plain.get("num_key_value_groups") or 1)
    heads, tokens, width = 2 * groups, 5, 8
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    stub = SimpleNamespace(**{**plain, "head_dim": width, "training": False, "is_causal": False})
    if getattr(module, "sinks", None) is not None:
        stub.sinks = draw(heads)
    q, k, v = draw(1, heads, tokens, width), draw(1, 2, tokens, width), draw(1, 2, tokens, width)
    extras: dict[str, Any] = {} if cap is None else {"softcap": cap}
    mask = torch.full((1, 1, tokens, tokens), -torch.inf, device="cpu", dtype=torch.float32).triu(1)
    for given, what in ((mask, "with a mask"), (torch.zeros_like(mask), "with an open mask"), (None, "without a mask")):
        try:
            theirs = eager(stub, q, k, v, given, scaling=0.5, dropout=0.0, **extras)[0]
        except (AttributeError, TypeError, RuntimeError, ValueError, KeyError) as error:
            if given is None:  # it is never called without a mask
                continue
            return f"does not run on its own ({type(error).__name__}: {error})"
        ours = fp32_logits_attention(cast("nn.Module", stub), q, k, v, given, scaling=0.5, **extras)[0]
        if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-4, atol=1e-5):
            return f"gives a different output {what}"
    return None


@cache
def cudnn_backward_fails(device: torch.device) -> bool:
    """True if sdpa's default backend gives non-finite gradients on a CUDA device where they should be finite.

    Runs a case that is known to fail, once per process and device: bfloat16, 192 tokens, a boolean causal mask, all
    logits near -120. It takes about 10 ms and 2 MB.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, 2, 192, 128)
    query, key, value = (torch.randn(shape, generator=generator, device=device, dtype=torch.float32) for _ in range(3))
    query[..., 0], key[..., 0] = 120.0 * 128**0.5, -1.0  # their product, scaled, is -120
    leaf = query.to(torch.bfloat16).requires_grad_()
    mask = torch.ones(192, 192, dtype=torch.bool, device=device).tril()[None, None]
    with torch.enable_grad(), torch.autocast("cuda", enabled=False):
        out = F.scaled_dot_product_attention(leaf, key.to(leaf), value.to(leaf), attn_mask=mask)
        (grad,) = torch.autograd.grad(out.float().sum(), leaf)
    return bool(out.isfinite().all()) and not bool(grad.isfinite().all())
