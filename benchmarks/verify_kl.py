"""The KL that `hfpatch.verify` prints, beside the true one, for models that were cast with `.half()` or `.bfloat16()`.

    OMP_NUM_THREADS=1 python benchmarks/verify_kl.py [--gemma DIR] [--smollm DIR] [--whisper DIR]

Target: within 1.5 times of the true one, or both below 1e-6. Tiny random models with sharp attention, so that positions
matter; DIR are checkpoints that `tests/real/weights.py` converts. Each model is patched by `hfpatch.apply` after it was
cast. The true KL is computed in float64 from the model that was kept before the cast, over the tokens that verify
compares: once with the weights as the cast rounded them, which is what verify speaks of, and once with the weights as
they were.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any

import torch
from common import cpu_name, header, table, write_json
from torch import nn

import hfpatch
from hfpatch.testing import tiny_model

TINY = (
    *("deepseek_v3", "qwen3", "gemma3_text", "m2m_100", "llama", "gptj", "whisper", "t5"),
    *("codegen", "falcon", "qwen2_vl", "bloom"),
)
CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16}
QUERIES = (
    *("q_proj.weight", "k_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight"),
    *("SelfAttention.q.weight", "query_key_value.weight", "qkv_proj.weight"),
)
TARGET, NOTHING = 1.5, 1e-6
TEXT = (
    "The harbour was quiet when the first boats came back in the early morning. Two men carried the nets to the wall "
    "and spread them out to dry, while a boy counted the fish and wrote the numbers in a small book."
)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=440)
    parser.add_argument("--gemma", metavar="DIR")
    parser.add_argument("--smollm", metavar="DIR")
    parser.add_argument("--whisper", metavar="DIR")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    facts = header("The KL that verify prints, and the true one", cpu_name(), "torch", "transformers", "hfpatch")
    facts["rows"] = [row(name, model, batch, how) for name, model, batch in models(args) for how in CASTS]
    table("KL to float32, nats a token", facts["rows"])
    held = sum(r["held"] for r in facts["rows"])
    facts["target"], facts["held"] = TARGET, held
    print(f"\n{held} of {len(facts['rows'])} printed figures within {TARGET} times of the true one, or both below 1e-6")
    write_json(args.json, facts)


def models(args: argparse.Namespace) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, float32 model and batch of each."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in TINY:
        model = sharp(name)
        yield f"{name}, tiny", model, batch_of(model, args.tokens)
    for name, where in (("Gemma 3 270M", args.gemma), ("SmolLM2 135M", args.smollm)):
        if where is not None:
            model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
            tokens = transformers.AutoTokenizer.from_pretrained(where)(TEXT, return_tensors="pt")
            yield name, model, {"input_ids": tokens["input_ids"]}
    if args.whisper is not None:
        model = transformers.WhisperForConditionalGeneration.from_pretrained(args.whisper, dtype=torch.float32).eval()
        sound = torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(0))
        ids = torch.tensor([[50258, 50259, 50359, 50363, 440, 17463, 361, 645, 1322]])
        yield "Whisper base", model, {"input_features": sound, "decoder_input_ids": ids}


def sharp(name: str) -> Any:
    """A tiny model whose attention looks at few tokens, with a head that tells them apart."""
    sizes: dict[str, Any] = {"qwen3": {"head_dim": 64}, "gemma3_text": {"head_dim": 64}, "llama": {"head_dim": 32}}
    full = {"layer_types": ["full_attention"] * 4} if name == "gemma3_text" else {}
    longer = {} if name in ("t5", "bloom", "whisper") else {"max_position_embeddings": 2048}
    model: Any = whisper() if name == "whisper" else tiny_model(name, **longer, **sizes.get(name, {}), **full)
    if name == "deepseek_v3":
        model.set_experts_implementation("eager")  # the grouped one takes no float64
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(3)
            elif path.endswith(QUERIES):
                parameter.mul_(40)
        model.get_output_embeddings().weight.mul_(8)
    return model


def whisper() -> Any:
    """A tiny Whisper with its encoder; `tiny_model` has its decoder alone."""
    from transformers import WhisperForConditionalGeneration

    from hfpatch.lab.tiny import tiny_config

    torch.manual_seed(0)
    config = tiny_config("whisper", num_mel_bins=8, max_source_positions=64, encoder_layers=2, decoder_layers=2)
    return WhisperForConditionalGeneration(config).eval()


def batch_of(model: Any, tokens: int) -> dict[str, Any]:
    """Random tokens, and sound where the model hears."""
    draw = torch.Generator().manual_seed(0)
    if model.main_input_name == "input_features":
        sound = torch.randn(2, model.config.num_mel_bins, 2 * model.config.max_source_positions, generator=draw)
        return {"input_features": sound, "decoder_input_ids": torch.randint(4, 60, (2, 12), generator=draw)}
    ids = torch.randint(4, 60, (1, tokens), generator=draw)
    return {"input_ids": ids, "decoder_input_ids": ids} if model.config.is_encoder_decoder else {"input_ids": ids}


def row(name: str, model: Any, batch: dict[str, Any], how: str) -> dict[str, Any]:
    """One model, one cast."""
    cast = getattr(copy.deepcopy(model), how)()
    given = {k: v.to(CASTS[how]) if v.is_floating_point() else v for k, v in batch.items()}
    fix = hfpatch.apply(cast, verbose=False)  # Gemma in float16 is NaN without
    now = "after" if fix.edits else "as it is"
    made = any(b.is_floating_point() for b in model.buffers())  # whose cast can be told
    proof = fix.verify(given, runs=[now, *(["as loaded with dtype="] if made else [])])
    with torch.no_grad():
        mine = cast(**given).logits
        wide = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
        rounded = as_rounded(model, CASTS[how])
        true = kl(rounded(**wide).logits, mine, causal=not model.config.is_encoder_decoder)
        del rounded
        original = copy.deepcopy(model).double()
        whole = kl(original(**wide).logits, mine, causal=not model.config.is_encoder_decoder)
    printed = proof[now].kl
    loaded = next((r.kl for r in proof.rows if r.name == "as loaded with dtype="), None)
    nothing = true < NOTHING and printed < NOTHING
    return {
        "model": name,
        "cast": how,
        "printed": printed,
        "true": true,
        "printed / true": printed / true,
        "held": nothing or 1 / TARGET <= printed / true <= TARGET,
        "as loaded with dtype=": loaded,
        "true, weights not rounded": whole,
    }


def as_rounded(model: Any, dtype: torch.dtype) -> nn.Module:
    """The model in float64, what a checkpoint holds rounded to a dtype, all other buffers as they were made."""
    twin = copy.deepcopy(model)
    kept = set(twin.state_dict())
    with torch.no_grad():
        for path, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
            if path in kept and tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))
    return twin.double()


def kl(exact: torch.Tensor, mine: torch.Tensor, *, causal: bool) -> float:
    """Mean over tokens, in float64; a causal model's last token has no label, and verify does not compare it."""
    if causal:
        exact, mine = exact[:, :-1], mine[:, :-1]
    p, q = exact.double().log_softmax(-1), mine.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


if __name__ == "__main__":
    main()
