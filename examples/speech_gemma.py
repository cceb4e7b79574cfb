"""A speech LLM built by hand around Gemma 3 270M, trained in float16 before and after `hfpatch.apply`.

    python examples/speech_gemma.py --gemma DIR                      trains the projector
    python examples/speech_gemma.py --gemma DIR --train lora         trains the projector and LoRA

DIR is a checkpoint of Gemma 3 270M. The encoder has the architecture of Whisper tiny and random weights; the
features are synthetic: every word has a pattern of its own, so that there is something to learn. Weights of the
language model are float16 and frozen, what trains is float32, and a GradScaler scales the loss.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import hfpatch

WORDS = (
    *("boat", "sea", "fish", "net", "wind", "sail", "snow", "rain"),
    *("bread", "milk", "house", "stone", "tree", "bird", "dog", "road"),
)
SAID = 4
"""Words in one utterance."""

FRAMES = 4
"""Frames of features that one word takes; the encoder halves them."""

MELS = 80


class SpeechLLM(nn.Module):
    """Features -> encoder -> LayerNorm -> projector -> language model, as such models are written by hand.

    Args:
        llm: The language model.
        encoder: Gives `last_hidden_state [batch, frames / 2, width]` for features `[batch, mels, frames]`.
    """

    def __init__(self, llm: Any, encoder: Any) -> None:
        super().__init__()
        width = encoder.config.d_model
        self.encoder = encoder.requires_grad_(requires_grad=False)
        self.ln_speech = nn.LayerNorm(width, eps=1e-4)
        self.speech_proj = nn.Linear(width, llm.config.hidden_size)
        self.llm = llm.requires_grad_(requires_grad=False)

    def forward(self, input_ids: torch.Tensor, features: torch.Tensor, labels: torch.Tensor) -> Any:
        """Run with the speech before the text `input_ids [batch, tokens]`; `labels` are those of the text."""
        speech = self.speech_proj(self.ln_speech(self.encoder(features).last_hidden_state))
        text = hfpatch.embed_tokens(self.llm)(input_ids)
        embeds = torch.cat([speech.to(text.dtype), text], dim=1)
        unspoken = labels.new_full(speech.shape[:2], -100)
        return self.llm(inputs_embeds=embeds, labels=torch.cat([unspoken, labels], dim=1))


def build(gemma: Path, dtype: torch.dtype = torch.float16, rows: int | None = None, seed: int = 0) -> Any:
    """The model and the ids of the words.

    Args:
        gemma: Directory of the checkpoint.
        dtype: Of the language model's weights.
        rows: Keep so many rows of the tied vocabulary: the backward of 262,144 takes a minute on a CPU in float16.
        seed: For the encoder's and the projector's weights.
    """
    llm: Any = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gemma)
    ids = torch.tensor([tokenizer(f" {word}", add_special_tokens=False)["input_ids"][0] for word in WORDS])
    bos = int(tokenizer.bos_token_id)
    if rows is not None:
        used = torch.cat([torch.tensor([bos]), ids])
        rest = torch.arange(1000, 1000 + 2 * rows)
        kept = torch.cat([used, rest[~torch.isin(rest, used)]])[:rows]
        table = llm.get_input_embeddings().weight[kept].detach().clone()
        llm.resize_token_embeddings(rows, mean_resizing=False)
        with torch.no_grad():
            llm.get_input_embeddings().weight.copy_(table)
        llm.tie_weights()
        bos, ids = 0, torch.arange(1, 1 + len(ids))
    torch.manual_seed(seed)
    frames = FRAMES * SAID
    encoder = WhisperEncoder(
        WhisperConfig(
            d_model=384,
            encoder_layers=4,
            encoder_attention_heads=6,
            encoder_ffn_dim=1536,
            num_mel_bins=MELS,
            max_source_positions=frames // 2,
        )
    )
    return SpeechLLM(llm.to(dtype), encoder), ids, bos


def batch(ids: torch.Tensor, bos: int, size: int, seed: int) -> dict[str, torch.Tensor]:
    """Utterances: features `[size, mels, frames]` that show words, and the words as text after a BOS."""
    patterns = torch.randn(len(ids), MELS, FRAMES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    said = torch.randint(len(ids), (size, SAID), generator=generator)
    features = patterns[said].permute(0, 2, 1, 3).reshape(size, MELS, SAID * FRAMES)
    features = features + 0.1 * torch.randn(features.shape, generator=generator)
    text = torch.cat([torch.full((size, 1), bos), ids[said]], dim=1)
    labels = text.clone()
    labels[:, 0] = -100
    return {"input_ids": text, "features": features, "labels": labels}


def with_lora(model: Any) -> Any:
    """LoRA on every projection of the language model; its weights are float32."""
    from peft import get_peft_model

    model.llm = get_peft_model(model.llm, hfpatch.lora_config(model.llm, r=8, scale=2))
    return model


def train(model: Any, ids: torch.Tensor, bos: int, steps: int, size: int, rate: float = 1e-3) -> list[float]:
    """Losses of training what may train, under a GradScaler, as mixed-precision loops do."""
    device = next(model.parameters()).device
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0)
    losses: list[float] = []
    for step in range(steps):
        inputs = {name: value.to(device) for name, value in batch(ids, bos, size, seed=step).items()}
        loss = model(**inputs).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def show(losses: list[float]) -> str:
    """Every few losses, and how many are NaN."""
    shown = " ".join(f"{loss:.3f}" for loss in losses[:: max(1, len(losses) // 10)])
    return f"{shown} ... {losses[-1]:.3f}; {sum(map(math.isnan, losses))} of {len(losses)} are NaN"


def main() -> None:
    """Train without the patches, then with them, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemma", type=Path, required=True, metavar="DIR", help="checkpoint of Gemma 3 270M")
    parser.add_argument("--train", choices=["projector", "lora"], default="projector")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", type=int, default=8, help="utterances a step")
    parser.add_argument("--rows", type=int, help="keep so many rows of the vocabulary; 2048 makes a CPU fast enough")
    parser.add_argument("--suggested", action="store_true", help="apply what is suggested as well")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    for patched in (False, True):
        model, ids, bos = build(args.gemma, rows=args.rows)
        if args.train == "lora":
            model = with_lora(model)
        model.to(args.device)
        if patched:
            hfpatch.apply(model, include="suggested" if args.suggested else None)
        steps = args.steps if patched else min(args.steps, 20)
        losses = train(model, ids, bos, steps, args.size)
        print(f"{'patched' if patched else 'stock'}: loss {show(losses)}", flush=True)


if __name__ == "__main__":
    main()
