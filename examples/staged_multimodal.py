"""Staged training of a multimodal model, which a kill does not change: projector first, then LoRA.

    python examples/staged_multimodal.py --run FOLDER                # downloads SmolLM2 135M and Whisper base
    python examples/staged_multimodal.py --run FOLDER --llm DIR --encoder DIR
    python examples/staged_multimodal.py --run FOLDER --llm tiny --encoder tiny
    python examples/staged_multimodal.py --run FOLDER --llm tiny --encoder tiny      # again: goes on where it was

A frozen speech encoder (Whisper's), a norm and a projector stand before a language model. Stage 1 trains norm and
projector, stage 2 also LoRA on the language model. What a careful trainer writes by hand:

- `hfpatch.apply` aligns the new norm's eps and initialises the projector; `hfpatch.lora_config` is for LoRA.
- `hfpatch.Guard`: backward, unscale, the decision on finite loss and gradients, clipping after unscaling, step or skip,
  `scaler.update()` in any case, warm-up and cosine, accumulation, gradient norms of each component. Two bad
  batches are planted in each stage: one without labels, one whose gradients are a million times too large.
- `hfpatch.BlackBox` keeps what was skipped; `hfpatch.compare` says what stage 1 changed in the model, and where.
- a checkpoint after each step holds weights, optimizer, schedule, scaler, guard, best loss and random state: a run that
  was killed goes on with the same losses to the last bit. The best checkpoint is kept beside it.

The loop is the same in float16 (with a GradScaler), bfloat16 and float32: `--dtype`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from loading import keep_rows, language_model, speech_encoder, table
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hfpatch

STAGES = ("projector", "lora")
STEPS = 10
"""Optimizer steps of a stage."""
ACCUMULATED = 2
"""Micro-batches of a step."""
WARM_UP = 3
STATES = 8
"""What the encoder gives for one utterance."""
NO_LABELS, EXPLODING = 5, 7
"""Steps of each stage whose batch is bad."""
COMPONENTS = {
    "projector": {"norm": "ln_speech.*", "projector": "speech_proj.*"},
    "lora": {"norm": "ln_speech.*", "projector": "speech_proj.*", "attention": "*self_attn*", "mlp": "*mlp*"},
}
"""What the norms of the gradients are told of, by stage."""


class Speech(nn.Module):
    """Features -> frozen encoder -> LayerNorm -> projector -> language model."""

    def __init__(self, encoder: Any, llm: Any) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(requires_grad=False).eval()
        self.ln_speech = nn.LayerNorm(encoder.config.d_model, eps=1e-4)
        self.speech_proj = nn.Linear(encoder.config.d_model, llm.config.hidden_size)
        self.llm = llm.requires_grad_(requires_grad=False)

    def forward(self, features: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """Run with the speech before the text `input_ids [batch, tokens]`; `labels` are those of the text."""
        speech = self.speech_proj(self.ln_speech(self.encoder(features).last_hidden_state))
        text = hfpatch.embed_tokens(self.llm)(input_ids)
        unspoken = labels.new_full(speech.shape[:2], -100)
        embeds = torch.cat([speech.to(text.dtype), text], dim=1)
        return self.llm(inputs_embeds=embeds, labels=torch.cat([unspoken, labels], dim=1))


def build(asked: str, encoder: str) -> tuple[Speech, torch.Tensor]:
    """Return the model with its patches, in float32, and a text `[1, tokens]` to learn."""
    llm = language_model(asked, "--llm", "llama")
    ids = keep_rows(llm.model, llm.ids(tokens=24), 512)
    heard = speech_encoder(encoder, STATES, mels=16)
    torch.manual_seed(0)
    model = Speech(heard, llm.model)
    hfpatch.apply(model, verbose=False)
    return model, ids


def batch(ids: torch.Tensor, number: int, mels: int) -> dict[str, torch.Tensor]:
    """Return micro-batch `number` of a stage: two rows of eight tokens of the text, each with features of its own."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(ids.shape[1] - 8, (2,), generator=generator).tolist()
    text = torch.stack([ids[0, s : s + 8] for s in starts])
    patterns = [torch.randn(mels, 2 * STATES, generator=torch.Generator().manual_seed(1000 + s)) for s in starts]
    labels = torch.full_like(text, -100) if number // ACCUMULATED == NO_LABELS else text
    return {"features": torch.stack(patterns), "input_ids": text, "labels": labels}


def warm_up_and_cosine(step: int) -> float:
    """Return the factor on the learning rate."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


class Stage:
    """One stage: what trains in it, and all state that a step changes.

    Args:
        model: The model; a LoRA stage must have its adapters already.
        run: Folder of the run.
        name: One of `STAGES`.
        dtype: Of autocast; float16 scales the loss.
    """

    def __init__(self, model: Speech, run: Path, name: str, dtype: torch.dtype) -> None:
        self.model, self.name, self.dtype = model, name, dtype
        self.folder = run / name
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=5e-3)
        self.schedule = LambdaLR(self.optimizer, warm_up_and_cosine)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)
        self.guard = hfpatch.Guard(
            model,
            self.optimizer,
            self.schedule,
            scaler=self.scaler if self.scaler.is_enabled() else None,
            accumulation_steps=ACCUMULATED,
            explode_at=1e4,
            components=COMPONENTS[name],
            black_box=hfpatch.BlackBox(run / "black_box"),
            verbose=False,
        )
        self.step, self.best = 0, math.inf

    def state(self) -> dict[str, Any]:
        """Return all that the next step reads."""
        return {
            "step": self.step,
            "best": self.best,
            "weights": {n: p.detach() for n, p in self.trained.items()},
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "guard": self.guard.state_dict(),
            "random": torch.get_rng_state(),
        }

    def save(self, name: str) -> None:
        """Write the state to a file of the stage, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / f"{name}.new"
        torch.save(self.state(), new)
        new.replace(self.folder / name)

    def resume(self) -> None:
        """Go on where a killed run was, if there is a checkpoint."""
        path = self.folder / "last.pt"
        if not path.is_file():
            return
        saved = torch.load(path, weights_only=True)
        self.step, self.best = saved["step"], saved["best"]
        with torch.no_grad():
            for name, p in self.trained.items():
                p.copy_(saved["weights"][name])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        self.scaler.load_state_dict(saved["scaler"])
        self.guard.load_state_dict(saved["guard"])
        torch.set_rng_state(saved["random"])

    def loss(self, ids: torch.Tensor, number: int) -> torch.Tensor:
        """Return the loss of a micro-batch, under autocast unless the dtype is float32."""
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype != torch.float32):
            loss = self.model(**batch(ids, number, self.model.encoder.config.num_mel_bins)).loss
        return loss * (1e6 if number // ACCUMULATED == EXPLODING else 1.0)

    def take(self, ids: torch.Tensor) -> dict[str, Any]:
        """Take one step; return what came of it."""
        for micro in range(ACCUMULATED):
            outcome = self.guard.step(self.loss(ids, self.step * ACCUMULATED + micro))
        facts = outcome.facts
        self.step += 1
        return {
            "stage": self.name,
            "step": self.step,
            "loss": facts.loss,
            "skipped": outcome.code,
            "rate": self.schedule.get_last_lr()[0],
            "scale": self.scaler.get_scale() if self.scaler.is_enabled() else None,
            "norms": outcome.norms,
        }

    def keep(self, row: dict[str, Any]) -> None:
        """Save the step, and beside it the best one."""
        if not row["skipped"] and row["loss"] < self.best:
            self.best = row["loss"]
            self.save("best.pt")
        self.save("last.pt")


def log(run: Path, row: dict[str, Any]) -> None:
    """Append a row to the log of the run, and print it."""
    with (run / "log.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    norms = ", ".join(f"{name} {norm:.2g}" for name, norm in row["norms"].items())
    became = f"skipped: {row['skipped']}" if row["skipped"] else f"loss {row['loss']:.4f}"
    print(f"{row['stage']} step {row['step']}: {became}; rate {row['rate']:.1e}; gradients {norms}", flush=True)


def train(asked: str, encoder: str, run: Path, dtype: torch.dtype, steps: int = STEPS) -> Any:
    """Run both stages, or what is left of them, and return what stage 1 changed (a `hfpatch.Comparison`)."""
    run.mkdir(parents=True, exist_ok=True)
    model, ids = build(asked, encoder)
    stock = copy.deepcopy(model)
    for name in STAGES:
        if name == "lora":
            from peft import get_peft_model

            between = hfpatch.compare(stock, model, batch(ids, 0, model.encoder.config.num_mel_bins))
            torch.manual_seed(1)
            config = hfpatch.lora_config(model.llm, r=8, scale=2, verbose=False)
            model.llm = get_peft_model(model.llm, config)
        stage = Stage(model, run, name, dtype)
        stage.resume()
        while stage.step < steps:
            row = stage.take(ids)
            log(run, row)
            stage.keep(row)  # after the log: a kill between them repeats a step, and loses no line
    return between


def losses(run: Path) -> dict[tuple[str, int], tuple[float | None, str | None]]:
    """Return loss and reason of a skip of each stage and step; the later line counts, where a kill made two."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {(r["stage"], r["step"]): (r["loss"], r["skipped"]) for r in rows}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="hub id, folder, or `tiny`")
    parser.add_argument("--encoder", default="openai/whisper-base", help="hub id or folder of a Whisper, or `tiny`")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run; one that was killed goes on")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--fresh", action="store_true", help="delete what is in the folder of the run")
    args = parser.parse_args()
    if args.fresh and (args.run / "log.jsonl").is_file():
        shutil.rmtree(args.run)
    elif args.run.is_file():
        sys.exit(f"--run {args.run} is a file: give a folder")
    between = train(args.llm, args.encoder, args.run, getattr(torch, args.dtype))
    print(f"\nWhat stage 1 changed:\n{between}")
    columns = ("stage", "best loss", "bundles of skipped batches")
    count = len([p for p in (args.run / "black_box").iterdir() if p.is_dir()])
    rows = [(name, f"{_best(args.run, name):.4f}", str(count) if name == STAGES[-1] else "") for name in STAGES]
    table(columns, rows, "\nThe run")


def _best(run: Path, stage: str) -> float:
    return torch.load(run / stage / "best.pt", weights_only=True)["best"]


if __name__ == "__main__":
    main()
