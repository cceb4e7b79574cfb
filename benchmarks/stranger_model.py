"""A model of one's own, as somebody has it who has just installed hfpatch: `stranger.py` runs it there.

Features, a norm and a projector, written by hand, before a float16 Gemma 3 whose residual stream grows past 65,504.
Prints a line of JSON for each step: seconds, what hfpatch said, and whether that is so.
"""

from __future__ import annotations

import hashlib
import json
import time

START = time.perf_counter()

import torch  # noqa: E402 - what a person waits for
import transformers  # noqa: E402
from torch import nn  # noqa: E402

import hfpatch  # noqa: E402

LIMIT = torch.finfo(torch.float16).max


class Speech(nn.Module):
    """Features -> norm -> projector -> language model."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.Gemma3TextConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, sliding_window=64,
        )  # fmt: skip
        self.norm, self.project = nn.LayerNorm(24, eps=1e-4), nn.Linear(24, 64)
        self.llm = transformers.Gemma3ForCausalLM(config)

    def forward(self, features: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> object:
        """The logits and the loss of the language model."""
        speech = self.project(self.norm(features))
        embeds = torch.cat([speech, self.llm.get_input_embeddings()(input_ids)], 1)
        if labels is not None:
            labels = nn.functional.pad(labels, (speech.shape[1], 0), value=-100)
        return self.llm(inputs_embeds=embeds, labels=labels)


def told(step: str, said: str, *, true: bool) -> None:
    """Print a line."""
    print(json.dumps({"step": step, "s": time.perf_counter() - START, "said": said, "true": true}), flush=True)


def first_over(model: nn.Module, batch: dict[str, torch.Tensor]) -> str:
    """Where the stream passes float16's largest value first: hooks on the layers, in float64, without hfpatch."""
    found: list[str] = []

    def look(name: str):
        def hook(_: nn.Module, __: object, output: object) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if value.abs().max() > LIMIT:
                found.append(name)

        return hook

    wide = Speech().double()
    wide.load_state_dict(model.state_dict())
    for name, part in wide.named_modules():
        if name.rpartition(".")[2].isdigit():
            part.register_forward_hook(look(name))
    with torch.no_grad():
        wide.eval()(**{k: v.double() if v.is_floating_point() else v for k, v in batch.items()})
    return found[0]


def files(model: nn.Module, folder: str) -> dict[str, str]:
    """Save, and return a digest of each file."""
    from pathlib import Path

    model.llm.save_pretrained(folder)
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(folder).iterdir())}


def main() -> None:
    """Run the steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model = Speech().eval()
    with torch.no_grad():
        for layer in model.llm.model.layers:
            layer.post_feedforward_layernorm.weight.fill_(14000.0)
    model = model.half()
    ids = torch.arange(24).reshape(2, 12) * 7 % 250 + 3
    batch = {"features": torch.randn(2, 5, 24).half(), "input_ids": ids}
    where = first_over(model, batch)
    told("the model is built", f"float64: the stream passes {LIMIT:,.0f} first in {where}", true=True)

    with hfpatch.trace(model) as traced, torch.no_grad():
        stock = model(**batch).logits
    sentence = str(traced.first_bad).splitlines()[0]
    told("the first sentence about it", sentence, true=f"residual add in {where}:" in sentence)

    before = files(model, "before")
    fix = hfpatch.apply(model, verbose=False)
    names = ", ".join(decision.patch for decision in fix.plan.of("applied"))
    with torch.no_grad():
        now = model(**batch).logits
    told("apply", names, true=bool(now.isfinite().all()) and not bool(stock.isfinite().all()))

    proof = fix.verify(batch, runs=["before", "after"])
    wide = Speech().float()
    wide.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    with torch.no_grad():
        exact = wide.eval()(features=batch["features"].float(), input_ids=ids).logits
    error = ((now.float() - exact).norm() / exact.norm()).item()
    after = proof["after"]
    told(
        "verify",
        f"KL to float32 {after.kl:.1e}, top-1 {after.top1:.1%}; by hand: logits {error:.1e} apart",
        true=error < 5e-3,
    )

    same = files(model, "after") == before
    told(
        "the checkpoint",
        f"{len(before)} files saved before and after: {'equal byte for byte' if same else 'differ'}",
        true=same,
    )

    fix.revert()
    with torch.no_grad():
        back = model(**batch).logits
    equal = torch.equal(torch.nan_to_num(back), torch.nan_to_num(stock)) and torch.equal(back.isnan(), stock.isnan())
    told("revert", str(hfpatch.status(model)).splitlines()[-1], true=equal and not hfpatch.status(model))


if __name__ == "__main__":
    main()
