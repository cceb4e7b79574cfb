"""Names of hfpatch's attention functions in transformers' `AttentionInterface`."""

from __future__ import annotations

FP32_LOGITS = "hfpatch_fp32_logits"
FP32_LOGITS_MASKED = "hfpatch_fp32_logits_masked"
"""With eager attention's masks: for submodels that are not causal throughout, or whose code needs additive masks."""
WITHOUT_CUDNN = "hfpatch_sdpa_without_cudnn"
STOCK = ("eager", "sdpa", "flex_attention")
"""Those of transformers that need no other package, and for which it never asks the hub for a kernel."""
OURS = (FP32_LOGITS, FP32_LOGITS_MASKED, WITHOUT_CUDNN)
