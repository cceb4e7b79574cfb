"""What a script set changes nothing of what is said: a default device or dtype, no_grad, inference mode, autocast.

The device is `meta`, which needs no GPU: a tensor that hfpatch makes without saying where has no values there.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hfpatch
from hfpatch.lab.tiny import tiny_model
from tests.interrupts import speech

BATCH = {"input_ids": (torch.arange(24).reshape(2, 12) * 7 + 3) % 64}
LABELLED = {**BATCH, "labels": BATCH["input_ids"]}


def llama(dtype: torch.dtype = torch.float16) -> Any:
    model: Any = tiny_model("llama")
    return model.to(dtype)


def adapted() -> Any:
    base = llama(torch.float32)
    return get_peft_model(base, hfpatch.lora_config(base, r=4))


def guarded(model: Any) -> Any:
    guard = hfpatch.Guard(model, torch.optim.AdamW(model.parameters(), 1e-3), verbose=False)
    return [guard.step(model(**LABELLED).loss).to_dict() for _ in range(3)]


def traced(model: Any) -> Any:
    with hfpatch.trace(model) as found:
        model(inputs_embeds=model.get_input_embeddings()(BATCH["input_ids"]) * 1e5, labels=BATCH["input_ids"])
    return found.to_dict()


def pair() -> Any:
    return llama(), llama(torch.bfloat16)


def verified(model: Any) -> Any:
    with hfpatch.apply(model, include=["fp16-residual-overflow"], verbose=False) as fix:
        return [(row.name, row.loss, row.kl) for row in fix.verify(BATCH).rows]


VERBS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "inspect": (llama, lambda m: hfpatch.inspect(m).to_dict()),
    "plan": (llama, lambda m: hfpatch.plan(m, batch=BATCH).to_dict()),
    "plan of an object of one's own": (speech, lambda m: hfpatch.plan(m).to_dict()),
    "apply": (speech, lambda m: [e.to_dict() for e in hfpatch.apply(m, include="*", verbose=False).edits]),
    "verify": (llama, verified),
    "check": (llama, lambda m: hfpatch.check(m, batch=LABELLED).to_dict()),
    "check of adapters": (adapted, lambda m: hfpatch.check(m, batch=LABELLED).to_dict()),
    "trace": (llama, traced),
    "doctor": (llama, lambda m: [(w.way, w.loss, w.kl) for w in hfpatch.doctor(m, batch=BATCH).runs]),
    "compare": (pair, lambda both: hfpatch.compare(*both, BATCH).to_dict()),
    "lora_targets": (llama, lambda m: hfpatch.lora_targets(m).to_dict()),
    "Guard": (lambda: llama(torch.float32), guarded),
}


@contextlib.contextmanager
def narrow() -> Generator[None]:
    """A script that set bfloat16 as what tensors are made in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Generator[None]:
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


SET: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "default device": lambda: torch.device("meta"),
    "default dtype": narrow,
    "deterministic algorithms": deterministic,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
RUNS_AS_THE_CALLER_DOES = {
    "no_grad": {"Guard"}, "inference mode": {"Guard"}, "autocast": {"verify", "compare", "trace", "Guard"},
}  # fmt: skip
"""Verbs that run the model in the region that the caller is in, and say what comes of that."""


@pytest.mark.parametrize(
    ("verb", "default"),
    [(verb, each) for verb in VERBS for each in SET if verb not in RUNS_AS_THE_CALLER_DOES.get(each, ())],
)
def test_what_a_script_set_changes_nothing(verb: str, default: str) -> None:
    made, run = VERBS[verb]
    model = made()
    twin = copy.deepcopy(model)
    wanted = run(twin)
    with SET[default]():
        assert run(model) == wanted


def test_a_trace_inside_autocast_of_another_dtype_reads_its_samples() -> None:
    model = llama(torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.half()
    with torch.autocast("cpu", torch.bfloat16), hfpatch.trace(model) as found:
        model(**LABELLED)
    assert found.first_bad is None


def test_what_inference_mode_patched_trains() -> None:
    base: Any = tiny_model("llama")
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.inference_mode():
        fix = hfpatch.apply(model, include="lora-target-expansion", verbose=False)
    assert fix.edits
    model(**LABELLED).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
