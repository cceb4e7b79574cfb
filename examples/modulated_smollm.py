"""NPT-like modulation of a frozen SmolLM2: one training run before hfpatch, one after.

    python examples/modulated_smollm.py                         # downloads SmolLM2 135M
    python examples/modulated_smollm.py --checkpoint DIR

Each decoder layer's output h becomes h * (1 + tanh(B_mult A h)) + B_add A h, as in the published code: A from
`nn.Linear`, both B zeros, so the first step computes what the stock model computes. A step later thirty factors
between 0 and 2 are multiplied: the loss goes to 20 and stays there. `hfpatch.apply(model)` bounds each factor to
(0.5, 1.5) while it is still 1: the first loss is the same to the last bit, and after a few steps it falls. (The
bounded factor is also four times less steep at 0.)
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfpatch

TEXT = (
    "The harbour was quiet when the first boats came back in the early morning. Two men carried the nets to the wall "
    "and spread them out to dry, while a boy counted the fish and wrote the numbers in a small book. By noon the "
    "market was full of people, and most of the catch had been sold. In the afternoon the wind turned to the north."
)


class NptModulation(nn.Module):
    """The modulation of one layer, as people write it."""

    def __init__(self, width: int, rank: int = 16) -> None:
        super().__init__()
        self.a_proj = nn.Linear(width, rank, bias=False)
        self.b_add = nn.Linear(rank, width, bias=False)
        self.b_mult = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.b_add.weight)
        nn.init.zeros_(self.b_mult.weight)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Modulate `h [batch, tokens, width]`."""
        low_rank = self.a_proj(h)
        return h * (1 + torch.tanh(self.b_mult(low_rank))) + self.b_add(low_rank)


def modulate(layer: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook: the layer's output goes through its modulation."""
    return layer.modulation(output)


def build(checkpoint: str) -> Any:
    """The frozen model with a trainable modulation in each decoder layer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).requires_grad_(False)
    for layer in model.model.layers:
        layer.modulation = NptModulation(model.config.hidden_size)
        layer.register_forward_hook(modulate)
    return model.train()


def train(model: Any, ids: torch.Tensor, steps: int, lr: float = 2e-3) -> list[float]:
    """Losses of AdamW steps on one text `ids [1, tokens]`, in nats a token."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses: list[float] = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train twice and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    ids = AutoTokenizer.from_pretrained(args.checkpoint)(TEXT, return_tensors="pt").input_ids

    print("before:", " ".join(f"{loss:.2f}" for loss in train(build(args.checkpoint), ids, args.steps)))
    model = build(args.checkpoint)
    hfpatch.apply(model)
    print("after: ", " ".join(f"{loss:.2f}" for loss in train(model, ids, args.steps)))


if __name__ == "__main__":
    main()
