"""A speech LLM built by hand from Whisper base and Gemma 3 270M, trained in float16 before and after `hfpatch.apply`.

    python examples/speech_gemma.py                                  # downloads both (Gemma is gated)
    python examples/speech_gemma.py --llm DIR --encoder DIR
    python examples/speech_gemma.py --llm tiny --encoder tiny

Synthetic speech (each of 16 words is two vowels of its own) -> Whisper's encoder, frozen -> LayerNorm -> a window of
five states in one -> projector -> Gemma, which learns to write the words. The projector and LoRA train, under a
GradScaler in float16. Three runs: float16 as built, which is NaN; float16 after one `apply`; bfloat16 after the same.

One `apply` aligns the norm's eps, initialises the projector, runs the residual stream in float32, and attention logits
too where attention is eager; `lora_config` finds all seven kinds of projection and sets the scale; `embed_tokens` is
the one helper that finds the embedding, with and without LoRA; `Guard` checks loss and gradients, clips and skips.
"""

from __future__ import annotations

import argparse
import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from loading import Language, keep_rows, language_model, progress, speech_encoder, table
from torch import nn
from transformers import WhisperFeatureExtractor

import hfpatch

WORDS = (
    *("boat", "sea", "fish", "net", "wind", "sail", "snow", "rain"),
    *("bread", "milk", "house", "stone", "tree", "bird", "dog", "road"),
)
SAID = 3
"""Words in one utterance."""
RATE, SECONDS = 16_000, 0.4
"""Samples in a second, and seconds of one word."""
STATES = int(SAID * SECONDS * 50)
"""States of the encoder for one utterance: 50 a second."""
WINDOW = 5
ROWS = 512
"""Rows of the vocabulary that are kept."""


class SpeechLLM(nn.Module):
    """Features -> encoder -> LayerNorm -> window -> projector -> language model, as such models are written by hand.

    Args:
        llm: The language model.
        encoder: Gives `last_hidden_state [batch, states, width]` for features `[batch, mels, 2 * states]`.
    """

    def __init__(self, llm: Any, encoder: Any) -> None:
        super().__init__()
        width = encoder.config.d_model
        self.encoder = encoder.requires_grad_(requires_grad=False)
        self.ln_speech = nn.LayerNorm(width, eps=1e-4)
        self.speech_proj = nn.Linear(WINDOW * width, llm.config.hidden_size)
        self.llm = llm.requires_grad_(requires_grad=False)

    def speech(self, features: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of `features [batch, mels, frames]`, one for each window."""
        states = self.ln_speech(self.encoder(features).last_hidden_state)
        return self.speech_proj(states.reshape(len(states), -1, WINDOW * states.shape[-1]))

    def forward(self, input_ids: torch.Tensor, features: torch.Tensor, labels: torch.Tensor) -> Any:
        """Run with the speech before the text `input_ids [batch, tokens]`; `labels` are those of the text."""
        speech = self.speech(features)
        text = hfpatch.embed_tokens(self.llm)(input_ids)
        embeds = torch.cat([speech.to(text.dtype), text], dim=1)
        unspoken = labels.new_full(speech.shape[:2], -100)
        return self.llm(inputs_embeds=embeds, labels=torch.cat([unspoken, labels], dim=1))


@dataclass
class Parts:
    """What the models are built from.

    Attributes:
        llm: The language model, its vocabulary cut to a few rows.
        encoder: Whisper's encoder, its positions cut to those of one utterance.
        bos: The token before a text.
        ids: The token of each word.
    """

    llm: Language
    encoder: Any
    bos: int
    ids: torch.Tensor


def parts(llm: str, encoder: str) -> Parts:
    """Read language model and encoder, each a hub id, a folder or `tiny`."""
    language = language_model(llm, "--llm", "gemma3_text")
    if language.tokenizer is None:
        ids = torch.arange(2, 3 + len(WORDS))
        with torch.no_grad():  # made to pass 65,504, as the real weights do
            for layer in language.model.model.layers:
                layer.post_feedforward_layernorm.weight.fill_(24000.0)
    else:
        told = [language.tokenizer(f" {word}", add_special_tokens=False).input_ids[0] for word in WORDS]
        ids = torch.tensor([language.tokenizer.bos_token_id, *told])
    bos, *words = keep_rows(language.model, ids, ROWS).tolist()
    return Parts(language, speech_encoder(encoder, STATES), bos, torch.tensor(words))


def sound(words: list[int]) -> Any:
    """Return the samples of some words, float32: each is two vowels, made of two formants over a voice of 120 Hz."""
    time = np.arange(int(RATE * SECONDS / 2)) / RATE
    out: list[Any] = []
    for word in words:
        rng = np.random.default_rng(word)
        for first, second in zip(rng.uniform(250, 800, 2), rng.uniform(900, 2600, 2), strict=True):
            harmonics = 120 * np.arange(1, 30)[:, None]
            loud = sum(np.exp(-(((harmonics - f) / 120) ** 2)) for f in (first, second))
            out.append((loud * np.sin(2 * np.pi * harmonics * time)).sum(0) * np.hanning(len(time)))
    voice = np.concatenate(out)
    return (voice / np.abs(voice).max()).astype(np.float32)


def batch(given: Parts, size: int, seed: int) -> dict[str, torch.Tensor]:
    """Return utterances: log-mel features `[size, mels, frames]`, and the words as text after a BOS."""
    said = torch.randint(len(WORDS), (size, SAID), generator=torch.Generator().manual_seed(seed))
    extract = WhisperFeatureExtractor(feature_size=given.encoder.config.num_mel_bins)
    sounds = [sound(words) for words in said.tolist()]
    features = extract(sounds, sampling_rate=RATE, return_tensors="pt").input_features[..., : 2 * STATES]
    text = torch.cat([torch.full((size, 1), given.bos), given.ids[said]], dim=1)
    labels = text.clone()
    labels[:, 0] = -100
    return {"input_ids": text, "features": features, "labels": labels}


def build(given: Parts, dtype: torch.dtype, *, patched: bool) -> SpeechLLM:
    """Return the model, the language model's weights in `dtype`, with LoRA in float32 on it."""
    from peft import get_peft_model

    torch.manual_seed(0)
    model = SpeechLLM(copy.deepcopy(given.llm.model).to(dtype), copy.deepcopy(given.encoder))
    if patched:
        hfpatch.apply(model, verbose=False)
    model.llm = get_peft_model(model.llm, hfpatch.lora_config(model.llm, r=8, scale=2, verbose=False))
    return model


def train(model: SpeechLLM, given: Parts, steps: int, size: int, rate: float = 3e-4) -> list[float]:
    """Return the loss of each guarded step, those that are skipped too; a GradScaler runs if the model is float16."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    half = next(model.llm.parameters()).dtype == torch.float16
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if half else None
    guard = hfpatch.Guard(model, optimizer, scaler=scaler, verbose=False)
    losses: list[float] = []
    for step in range(steps):
        progress(f"step {step}")
        losses.append(guard.step(model(**batch(given, size, seed=step % 2)).loss).facts.loss)
    return losses


def main() -> None:
    """Train three times and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", default="google/gemma-3-270m", help="hub id or folder of a Gemma 3, or `tiny`")
    parser.add_argument("--encoder", default="openai/whisper-base", help="hub id or folder of a Whisper, or `tiny`")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--size", type=int, default=2, help="utterances a step")
    args = parser.parse_args()
    given = parts(args.llm, args.encoder)
    rows: list[tuple[str, ...]] = []
    for name, dtype, patched in (
        ("float16, as built", torch.float16, False),
        ("float16, patched", torch.float16, True),
        ("bfloat16, patched", torch.bfloat16, True),
    ):
        progress(name)
        losses = train(build(given, dtype, patched=patched), given, args.steps if patched else 2, args.size)
        bad = sum(map(math.isnan, losses))
        rows.append((name, " ".join(f"{loss:.3f}" for loss in losses), f"{bad} of {len(losses)}"))
    table(("run", "losses", "NaN"), rows)
    print()
    model = SpeechLLM(given.llm.model.half(), given.encoder)
    print(hfpatch.apply(model, verbose=False))


if __name__ == "__main__":
    main()
