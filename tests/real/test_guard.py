"""SmolLM2 135M with LoRA and poisoned batches, in a real Trainer: with the guard, and what becomes of it without."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import hfpatch
from hfpatch.errors import GuardStop
from hfpatch.guarding.callback import GuardCallback
from hfpatch.guarding.guard import Guard
from hfpatch.guarding.outcome import Reason
from tests.real.inputs import TEXT

pytestmark = pytest.mark.real

TOKENS = 40
STEPS = 8
NAN_AT, MASKED_AT = (2, 5), 4


def rows(directory: Path) -> list[dict[str, list[int]]]:
    """Windows of the text, two a step; those of step MASKED_AT have no label."""
    ids = AutoTokenizer.from_pretrained(directory)(TEXT)["input_ids"]
    made = []
    for i in range(2 * STEPS):
        piece = ids[(i * 7) % (len(ids) - TOKENS) :][:TOKENS]
        labels = [-100] * TOKENS if i // 2 == MASKED_AT else piece
        made.append({"input_ids": piece, "attention_mask": [1] * TOKENS, "labels": labels})
    return made


class Poisoned(Trainer):
    """Its loss is NaN in some steps; batches come in order."""

    nan_at: tuple[int, ...] = NAN_AT

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * math.nan if self.state.global_step in self.nan_at else loss


def lora(directory: Path) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return get_peft_model(model, hfpatch.lora_config(model, r=8))


def trainer(directory: Path, out: Path, guard: GuardCallback | None, **kwargs: Any) -> Poisoned:
    args = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=2, max_steps=STEPS, logging_steps=1, learning_rate=1e-3,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    callbacks: Any = [] if guard is None else [guard]
    return Poisoned(model=lora(directory), args=args, train_dataset=rows(directory), callbacks=callbacks, **kwargs)


def test_the_trainer_survives_and_says_what_was_what(smollm_dir: Path, tmp_path: Path) -> None:
    bare = trainer(smollm_dir, tmp_path, None)
    bare.train()
    assert any(p.isnan().any() for p in bare.model.parameters() if p.requires_grad)
    guarded = trainer(smollm_dir, tmp_path, GuardCallback(verbose=False))
    frozen = {n: p.detach().clone() for n, p in guarded.model.named_parameters() if not p.requires_grad}
    guarded.train()
    assert all(p.isfinite().all() for p in guarded.model.parameters())
    assert all(torch.equal(p, frozen[n]) for n, p in guarded.model.named_parameters() if n in frozen)
    shown = [h for h in guarded.state.log_history if "loss" in h]
    assert [math.isnan(h["guard/loss_raw"]) for h in shown] == [i in (*NAN_AT, MASKED_AT) for i in range(STEPS)], (
        "a window without a token is 0 / 0; the counts below tell the two apart"
    )
    assert not any(math.isnan(h["loss"]) for h in shown), "what the Trainer shows"
    assert shown[-1]["guard/skipped_loss"] == len(NAN_AT)
    assert shown[-1]["guard/skipped_no_labels"] == 1
    # the good steps are those of a run that never met the bad batches: same weights to the last bit
    good = [i for i in range(STEPS) if i not in NAN_AT and i != MASKED_AT]
    model = lora(smollm_dir)
    model.train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0, fused=True
    )
    data = rows(smollm_dir)
    for taken, i in enumerate(good):
        batch = {k: torch.tensor([data[2 * i][k], data[2 * i + 1][k]]) for k in data[0]}
        count = (batch["labels"][:, 1:] != -100).sum()
        model(**batch, num_items_in_batch=count).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - taken / STEPS)
        optimizer.step()
        optimizer.zero_grad()
    trained = dict(guarded.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-5, atol=1e-7)
    losses = [shown[i]["guard/loss"] for i in good]
    print("\nlosses of the steps taken:", [round(x, 3) for x in losses])
    assert losses[-1] < losses[0]


def test_a_run_of_nothing_but_nan_is_stopped(smollm_dir: Path, tmp_path: Path) -> None:
    made = trainer(smollm_dir, tmp_path, GuardCallback(max_skips=3, verbose=False))
    made.nan_at = tuple(range(STEPS))
    with pytest.raises(GuardStop, match="3 x non-finite loss"):
        made.train()


def test_a_plain_loop_names_the_layer_where_the_backward_broke(smollm_dir: Path) -> None:
    model = lora(smollm_dir)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    guard = Guard(model, optimizer, verbose=False)
    piece = rows(smollm_dir)[0]
    batch = {k: torch.tensor([v]) for k, v in piece.items()}
    layer = model.base_model.model.model.layers[10]
    handle = layer.register_full_backward_hook(lambda _m, grads, _o: (grads[0] * math.nan,))
    before = [p.detach().clone() for p in model.parameters()]
    outcome = guard.step(model(**batch).loss)
    assert outcome.reason == Reason.GRADIENTS
    assert "layers.9." in outcome.facts.blame[0]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    handle.remove()
    assert guard.step(model(**batch).loss).stepped
