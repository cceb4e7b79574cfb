"""`generate` with a static cache, with beams, with an assistant model: the ids are those of a search without any cache.

The search is written out here: one forward pass of the patched model for each token, over the whole text.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import hfpatch
from hfpatch.lab.tiny import tiny_model
from tests.cells import IDS, Outcome, call, ends, in_force, inputs
from tests.interrupts import SUBJECTS, Subject

NEW = 5
BEAMS = 3
INSTEAD = {"buffer": Subject(lambda: tiny_model("llama", num_hidden_layers=1).half(), "fp32-buffers")}
"""In bfloat16 two beams are nearer than a rounding, so that a cache decides between them, with the patch or without."""


def static(kind: str, order: str) -> Outcome:
    return _row(kind, order, 1, {"cache_implementation": "static"})


def beams(kind: str, order: str) -> Outcome:
    return _row(kind, order, BEAMS, {"num_beams": BEAMS})


def assisted(kind: str, order: str) -> Outcome:
    """transformers takes no embeddings there, so a model that puts features before the text runs on the text alone."""
    return _row(kind, order, 1, {"assistant_model": tiny_model("llama", seed=1)})


def _row(kind: str, order: str, width: int, how: dict[str, Any]) -> Outcome:
    subject = INSTEAD.get(kind, SUBJECTS[kind])
    model = subject.make().eval()
    stock, plain = call(model), copy.deepcopy(model)
    text_alone = "assistant_model" in how
    hfpatch.apply(plain, only=subject.patch, verbose=False)
    if order == "before":
        generated(model, how, text_alone=text_alone)
    fix = hfpatch.apply(model, only=subject.patch, verbose=False)
    got = generated(model, how, text_alone=text_alone)
    wanted = torch.cat([searched(plain, row, width, text_alone=text_alone) for row in range(len(IDS))])
    assert torch.equal(got, wanted), f"generated {got.tolist()}, searched {wanted.tolist()}"
    in_force(fix, model)
    hfpatch.revert(model)
    past = text_alone and model is not language_model(model)
    return ends(model, stock, "on the text alone: transformers takes no embeddings there" if past else "")


def language_model(model: Any) -> Any:
    return getattr(model, "llm", model)


def prompt(model: Any, row: int, *, text_alone: bool) -> dict[str, torch.Tensor]:
    """One row of the inputs, as embeddings where features stand before the text."""
    if language_model(model) is model or text_alone:
        return {"input_ids": IDS[row : row + 1]}
    given = {name: value[row : row + 1] for name, value in inputs(model).items()}
    embeds = hfpatch.embed_tokens(model.llm)(given["input_ids"])
    speech = model.speech_proj(model.ln_speech(given["features"].to(model.ln_speech.weight.dtype)))
    return {"inputs_embeds": torch.cat([speech.to(embeds.dtype), embeds], dim=1)}


@torch.no_grad()
def generated(model: nn.Module, how: dict[str, Any], *, text_alone: bool) -> torch.Tensor:
    """What `generate` appends to each row."""
    words = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    llm = language_model(model)
    rows = [llm.generate(**prompt(model, i, text_alone=text_alone), **words, **how) for i in range(len(IDS))]
    return torch.cat(rows)[:, -NEW:]


@torch.no_grad()
def searched(model: nn.Module, row: int, width: int, *, text_alone: bool) -> torch.Tensor:
    """Return the best of the `width` most probable continuations that are kept at each token."""
    start, llm = prompt(model, row, text_alone=text_alone), language_model(model)
    kept, scores = torch.zeros(1, 0, dtype=torch.long), torch.zeros(1)
    for _ in range(NEW):
        if "inputs_embeds" in start:
            before = start["inputs_embeds"].expand(len(kept), -1, -1)
            given = {"inputs_embeds": torch.cat([before, hfpatch.embed_tokens(llm)(kept)], dim=1)}
        else:
            given = {"input_ids": torch.cat([start["input_ids"].expand(len(kept), -1), kept], dim=1)}
        following = llm(**given, use_cache=False).logits[:, -1].float().log_softmax(-1)
        scores, places = (scores[:, None] + following).flatten().topk(width)
        parents, ids = places // following.shape[-1], places % following.shape[-1]
        kept = torch.cat([kept[parents], ids[:, None]], dim=1)
    return kept[:1]
