"""The symptoms that a trace can find and a patch can fix.

A finding carries one of these keys; `Patch.answers` lists the keys that a patch fixes.
"""

from __future__ import annotations

SYMPTOMS: dict[str, str] = {
    "residual-overflow": "the residual stream passes the largest value of its dtype",
    "attention-logits-overflow": "the product of queries and keys passes the largest value of its dtype",
    "masked-row": "a softmax over a row in which every key is masked",
    "attention-backward-nan": "a fused attention kernel gives NaN gradients from finite values",
    "overflow": "an operation's result passes the largest value of its dtype",
    "cast-overflow": "a value does not fit the narrower dtype it is cast to",
    "square-overflow": "a square passes the largest value of its dtype, often inside a hand-written norm",
    "eps-underflow": "an eps that is 0 in the dtype it is added in",
    "zero-norm": "a division by a norm, or a root, that is 0",
    "near-constant-row": "the gradient of a norm whose row hardly varies",
    "division-by-zero": "a division by 0",
    "out-of-domain": "a function outside its domain, such as log of 0",
    "indefinite": "0 x inf, inf - inf or inf / inf",
    "hidden-in-forward": "a bad value that where() or a mask drops in forward, and that backward multiplies by 0",
    "empty-mean": "a mean over nothing",
    "too-few-frames": "a CTC loss with fewer frames than labels",
    "outside-the-model": "a gradient that was NaN or Inf when the loss passed it to the model",
    "mixed-dtypes": "forward raised: an operation was given two dtypes",
    "shape-mismatch": "forward raised: shapes that do not fit",
    "index-out-of-range": "forward raised: an index outside of its table",
    "device-mismatch": "forward raised: tensors on different devices",
    "raised": "forward raised",
    "bad-input": "NaN or Inf in what the model was given",
    "bad-weight": "NaN or Inf in a parameter",
    "bad-buffer": "NaN or Inf in a buffer",
    "uninitialised-buffer": "a buffer that differs from what its module computes when it is built",
    "cast-buffer": "a buffer that a cast of the model rounded, and that from_pretrained leaves in float32",
    "no-labels": "a mean over no supervised token",
    "scale-too-high": "the gradient under this loss scale passes the largest value of its dtype; unscaled it fits",
    "silent-zero": "an overflow that ends in zeros, not in NaN",
    "growth": "every value is finite, and the signal or its gradient grows many times over in one place",
    "vanishing": "every value is finite, and the signal or its gradient all but dies in one place",
    "unknown": "the operation could not be named",
}
"""Key -> its meaning."""

FINITE = frozenset({"growth", "vanishing", "cast-buffer"})
"""Symptoms of values that are finite: findings of other symptoms come before them."""
