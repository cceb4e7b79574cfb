"""A cascade of transformers whose gradient explodes while all is finite: the operation, the trend, the fix.

    python examples/cascade.py                                  # embeddings of SmolLM2 135M, which it downloads
    python examples/cascade.py --llm DIR
    python examples/cascade.py --llm tiny

Three transformer stages read the frozen token embeddings of a language model and learn to predict the next token of a
text. Each stage scales what it computes to an RMS of 1 and adds it to what it was given:

    x = x + y * target / (rms(y) + 1e-8),   y = output_proj(block(x))

Planted: the output projection of the second stage has a weight decay of 2,000 (0.002 was meant). Its RMS is scaled
away, so nothing in the loss holds the weights: they shrink by a fifth in each step, the variance of y goes to zero, and
the gradient of the division grows as 1 / rms. Nothing is NaN, and clipping hides it: it leaves all other weights a
small part of their gradients, so the loss falls more slowly. The tracer names the division while everything is finite,
and its trend the step since which it stands out. The fix is a weight decay of 0 for what an RMS scaling follows; the
function of the model does not change.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from loading import language_model, progress, table
from torch import nn

import hfpatch

WIDTH, HEADS = 64, 4
PLANTED = 2000.0
"""The weight decay of the second stage's output projection."""
RATE = 0.1
EVERY = 4
"""Steps from one traced step to the next."""


class RmsScale(nn.Module):
    """Scale each row to a root mean square of `target`."""

    def __init__(self, target: float = 1.0) -> None:
        super().__init__()
        self.target = target

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        """Scale `y [batch, tokens, width]`."""
        return y * (self.target / (y.square().mean(-1, keepdim=True).sqrt() + 1e-8))


class Stage(nn.Module):
    """A transformer block, a projection, the scaling, and the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.output_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = RmsScale()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run on `x [batch, tokens, width]` under a causal mask."""
        return x + self.scale(self.output_proj(self.block(x, src_mask=mask)))


class Cascade(nn.Module):
    """Three stages between a projection of frozen embeddings and a head over the tokens of the text."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.input_proj = nn.Linear(width, WIDTH)
        self.stages = nn.ModuleList(Stage() for _ in range(3))
        self.head = nn.Linear(WIDTH, tokens)

    def forward(self, embeds: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss, in nats a token, of `labels [batch, tokens]` after `embeds [batch, tokens, width]`."""
        x = self.input_proj(embeds)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for stage in self.stages:
            x = stage(x, mask)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@dataclass
class Run:
    """What a run shows.

    Attributes:
        losses: Loss of each step.
        norms: Norm of all gradients in each step, before clipping to 1.
        trace: Of every fourth step.
    """

    losses: list[float]
    norms: list[float]
    trace: hfpatch.Trace


def data(asked: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return frozen embeddings `[1, tokens, width]` of a text, and its next tokens, numbered from 0."""
    llm = language_model(asked, "--llm", "llama")
    ids = llm.ids()
    with torch.no_grad():
        embeds = hfpatch.embed_tokens(llm.model)(ids)
    return embeds[:, :-1] / embeds.std(), torch.unique(ids, return_inverse=True)[1][:, 1:]


def train(embeds: torch.Tensor, labels: torch.Tensor, steps: int, weight_decay: float) -> Run:
    """Train a new cascade, and trace every fourth step.

    Args:
        embeds: `[1, tokens, width]`.
        labels: `[1, tokens]`.
        steps: Steps of SGD.
        weight_decay: Of the second stage's output projection.
    """
    torch.manual_seed(0)
    model = Cascade(embeds.shape[-1], int(labels.max()) + 1)
    scaled = [model.stages[1].output_proj.weight]
    others = [p for p in model.parameters() if p is not scaled[0]]
    groups = [{"params": others}, {"params": scaled, "weight_decay": weight_decay, "lr": RATE / 1000}]
    optimizer = torch.optim.SGD(groups, lr=RATE)
    run = Run([], [], hfpatch.trace(model, steps=range(0, steps, EVERY), ranks=[0]))
    with run.trace:
        for step in range(steps):
            if step % 10 == 0:
                progress(f"step {step}")
            loss = model(embeds, labels)
            loss.backward()
            run.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            run.losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return run


def show(name: str, run: Run) -> None:
    """Print losses and norms of a run, what the tracer found, and how it developed."""
    steps = range(0, len(run.losses), EVERY)
    rows = [(str(s), f"{run.losses[s]:.3f}", f"{run.norms[s]:.3g}") for s in steps]
    table(("step", "loss", "gradient norm"), rows, f"\n{name}")
    print("found:", run.trace.first_bad.sentence if run.trace.first_bad else "nothing")
    print(run.trace.trend())
    print(run.trace.largest_gradients(1))


def main() -> None:
    """Train twice and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--llm",
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        help="hub id or folder of a language model, whose embeddings are read, or `tiny`",
    )
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    embeds, labels = data(args.llm)
    show(f"with a weight decay of {PLANTED:g} on stages.1.output_proj", train(embeds, labels, args.steps, PLANTED))
    show("without", train(embeds, labels, args.steps, 0.0))


if __name__ == "__main__":
    main()
