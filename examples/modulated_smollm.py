"""Modulation adapters on a frozen SmolLM2, as NPT-like code wraps its layers: a student learns what its teacher does.

    python examples/modulated_smollm.py                         # downloads SmolLM2 135M
    python examples/modulated_smollm.py --llm DIR
    python examples/modulated_smollm.py --llm tiny

The teacher is the frozen model; the student is the same without some of its layers, each other layer wrapped in a
module that modulates what the layer returns. The loss is `hfpatch.normalized_mse` between the last hidden states: 0 if
they are equal, 1 if the student's are 0. Four students:

- `published`: h * (1 + tanh(B_mult A h)) + B_add A h, A from `nn.Linear`, both B zeros. Thirty factors between 0 and 2
  are multiplied.
- `patched`: the same after `hfpatch.apply(model)`, which bounds each factor to (0.5, 1.5) while it is still 1, so the
  first loss is the same to the last bit. (The bounded factor is also four times less steep at 0.)
- `adapter`: `hfpatch.nn.ModulationAdapter`, for new code: bounded, A with std 0.02, B_add with std 0.001 and a tenth
  of its output, B_mult zeros.
- `safe`: the same with `safe_mode=True`, the additive path alone.
"""

from __future__ import annotations

import argparse
import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from loading import Language, language_model, progress, table
from torch import nn

import hfpatch

RANK = 16
RATE = 2e-3
EVERY = 6
"""The student lacks each sixth layer."""
KINDS = ("published", "patched", "adapter", "safe")


class NptModulation(nn.Module):
    """The modulation of one layer, as people write it."""

    def __init__(self, width: int, rank: int = RANK) -> None:
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


class Wrapped(nn.Module):
    """A decoder layer inside a module that modulates what it returns; other attributes are the layer's."""

    def __init__(self, base: nn.Module, modulation: nn.Module) -> None:
        super().__init__()
        self.base, self.modulation = base, modulation

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the layer, where the wrapper has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the layer and modulate its output, `[batch, tokens, width]`."""
        return self.modulation(self.base(*args, **kwargs))


def student(teacher: Any, kind: str, every: int = EVERY) -> Any:
    """Return a frozen copy of the teacher without some layers, the others modulated.

    Args:
        teacher: A model with `model.layers`.
        kind: One of `KINDS`.
        every: The student lacks each layer of so many; 0 for none.
    """
    torch.manual_seed(0)
    model = copy.deepcopy(teacher).requires_grad_(requires_grad=False)
    layers = model.model.layers
    if every:
        kept = [layer for i, layer in enumerate(layers) if (i + 1) % every or i + 1 == len(layers)]
        model.model.layers = layers = nn.ModuleList(kept)
        model.config.num_hidden_layers = len(kept)
    width = model.config.hidden_size
    for i, layer in enumerate(layers):
        if kind in ("published", "patched"):
            modulation: nn.Module = NptModulation(width)
        else:
            modulation = hfpatch.nn.ModulationAdapter(width, RANK, safe_mode=kind == "safe")
        layers[i] = Wrapped(layer, modulation)
    if kind == "patched":
        hfpatch.apply(model, only="sigmoid-modulation", verbose=False)
    return model.train()


@dataclass
class Run:
    """What a run shows.

    Attributes:
        losses: Loss of each step.
        factors: In each step the factors' smallest and largest value in each layer, `[steps, layers, 2]`; of a student
            without factors, ones.
        nll: The student's own loss after the last step, in nats a token.
    """

    losses: list[float]
    factors: torch.Tensor
    nll: float


def hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the last hidden state, `[batch, tokens, width]`."""
    return model.model(input_ids=ids, use_cache=False).last_hidden_state


def train(model: Any, teacher: Any, ids: torch.Tensor, steps: int) -> Run:
    """Train a student's modulation on one text `ids [1, tokens]` to give the teacher's last hidden state."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    with torch.no_grad():
        wanted = hidden(teacher, ids)
    losses: list[float] = []
    factors: list[list[tuple[float, float]]] = []
    for step in range(steps):
        if step % 5 == 0:
            progress(f"step {step}")
        with Factors(model) as seen:
            loss = hfpatch.normalized_mse(hidden(model, ids), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        factors.append(seen.found)
    with torch.no_grad():
        nll = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
    return Run(losses, torch.tensor(factors), nll)


class Factors:
    """Reads the factors of each layer in one pass, from what its modulation is given and returns."""

    def __init__(self, model: Any) -> None:
        self.model, self.found = model, list[tuple[float, float]]()

    def __enter__(self) -> Factors:
        self.hooks = [layer.modulation.register_forward_hook(self.read) for layer in self.model.model.layers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def read(self, module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Keep the range of (output - added) / h where h is not small."""
        h = args[0].detach()
        scale = getattr(module, "ADD_SCALE", 1.0)
        added = scale * module.b_add(module.a_proj(h)).detach()
        large = h.abs() > h.abs().mean()
        factor = ((output.detach() - added) / h)[large]
        self.found.append((factor.min().item(), factor.max().item()))


def compare(llm: Language, steps: int, tokens: int, every: int = EVERY) -> dict[str, Run]:
    """Train the four students."""
    ids = llm.ids(tokens=tokens)
    found: dict[str, Run] = {}
    for kind in KINDS:
        progress(f"{kind} student")
        found[kind] = train(student(llm.model, kind, every), llm.model, ids, steps)
    return found


def main() -> None:
    """Train the students and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="hub id, folder, or `tiny`")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    llm = language_model(args.llm, "--llm", "llama", num_hidden_layers=12)
    runs = compare(llm, args.steps, args.tokens)

    with torch.no_grad():
        ids = llm.ids(tokens=args.tokens)
        print(f"the teacher's loss is {llm.model(input_ids=ids, labels=ids).loss.item():.2f} nats a token")
    every = max(1, args.steps // 5)
    shown = [*range(0, args.steps - 1, every), args.steps - 1]
    columns = ("student", *(f"step {s}" for s in shown), "nats a token")
    rows = [(k, *(f"{run.losses[s]:.4f}" for s in shown), f"{run.nll:.2f}") for k, run in runs.items()]
    table(columns, rows, "\nDistance of the last hidden states from the teacher's")

    columns = ("student", *(f"step {s}" for s in shown))
    rows = [
        (name, *(f"{run.factors[s, :, 0].min():.2f} to {run.factors[s, :, 1].max():.2f}" for s in shown))
        for name, run in runs.items()
    ]
    table(columns, rows, "\nSmallest and largest factor of all layers")
    last = [runs[k].factors[-1] for k in ("published", "patched")]
    picked = range(0, len(last[0]), max(1, len(last[0]) // 8))
    rows = [(str(i), *(f"{f[i, 0]:.2f} to {f[i, 1]:.2f}" for f in last)) for i in picked]
    rows.append(("product", *(f"{_product(f[:, 0])} to {_product(f[:, 1])}" for f in last)))
    table(("layer", "published", "patched"), rows, "\nFactors of the last step, and what they make in a row at most")
    if not llm.real:
        print("\ntiny random weights: their students hardly part; those of real weights (--llm) do")


def _product(factors: torch.Tensor) -> str:
    return f"{math.prod(factors.clamp(min=0).tolist()):.1e}"


if __name__ == "__main__":
    main()
