"""LoRA in a speech LLM of real parts and in Gemma 3 270M: trained in several ways that must give the same losses.

By a Trainer and by TRL's SFTTrainer, padded and packed, checkpointed, in float16 with the patches. Then they are saved,
loaded in a new process and merged.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

import hfpatch
from tests.conftest import ROOT
from tests.real.weights import checkpoint
from tests.real.whisper_gemma import batch, documents, language_model, padded, rows, speech_llm, text_batch, with_lora

pytestmark = pytest.mark.real

STEPS = 2
SAME = 1e-5
"""Relative difference of float32 losses of one function: sums in another order, seen as 3e-7."""
MERGED = 1e-4
"""Distance of merged logits over their size: W x + B A x and (W + B A) x are rounded differently, seen as 1.4e-5."""
ROUNDED = 5e-3
"""That of float16 branches: its values are rounded by up to 5e-4, seen as 1.3e-3 after a step."""


def settings(out: Path, **kwargs: Any) -> dict[str, Any]:
    return {
        "output_dir": str(out), "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 1, "max_steps": STEPS, "learning_rate": 1e-3, "seed": 0, "per_device_train_batch_size": 4,
        **kwargs,
    }  # fmt: skip


def healthy(model: Any, args: Any, inputs: dict[str, Any]) -> hfpatch.Hazards:
    """The report of a check before a run that is known to be healthy: whatever it says would be false."""
    report = hfpatch.check(model, args, batch=inputs)
    assert not report, str(report)
    return report


def losses(trainer: Any) -> list[float]:
    """Train with the guard on, which must skip nothing, and return the losses."""
    trainer.add_callback(hfpatch.GuardCallback(verbose=False))
    trainer.train()
    shown = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["guard/skipped"] for entry in shown] == [0] * STEPS
    assert [entry["guard/loss_raw"] for entry in shown] == pytest.approx([entry["loss"] for entry in shown], rel=SAME)
    return [entry["loss"] for entry in shown]


def spoken(model: Any, out: Path, *, checked: bool = True) -> tuple[Any, list[float]]:
    """The speech LLM with LoRA in both parts and its projector trained whole; the losses of its run."""
    peft = with_lora(model, modules_to_save=["speech_proj", "ln_speech"])
    assert {"encoder", "llm"} <= {n.split(".")[2] for n, p in peft.named_parameters() if "lora_B" in n}
    args = TrainingArguments(**settings(out))
    if checked:
        healthy(peft, args, batch())
    return peft, losses(Trainer(peft, args, train_dataset=rows()))


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[float]]:
    return spoken(speech_llm(), tmp_path_factory.mktemp("speech"))


def loads_and_merges(name: str, model: Any, inputs: dict[str, torch.Tensor], folder: Path) -> None:
    """A process that builds the model anew loads the adapter with the same logits, bit for bit, and merges it."""
    model.save_pretrained(folder / name)
    with torch.no_grad():
        want = model.eval()(**inputs).logits
    out = folder / "logits.safetensors"
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums are split by their number
    subprocess.run(
        [sys.executable, "-m", "tests.real.adapter_worker", str(out), f"{name}={folder / name}"],
        check=True, cwd=ROOT, timeout=900, env={**os.environ, **threads},
    )  # fmt: skip
    found = load_file(out)
    assert torch.equal(found[f"loaded {name}"], want)
    error = float((found[f"merged {name}"] - want).norm() / want.norm())
    print(f"\n{name}: merged logits are {error:.1e} of their size away")
    assert error < MERGED


def test_a_speech_llm_learns(speech: tuple[Any, list[float]]) -> None:
    model, found = speech
    assert found[-1] < 0.9 * found[0], found
    unmoved = [n for n, p in model.named_parameters() if "lora_B" in n and not p.any()]
    assert not unmoved, unmoved


def test_checkpointed_it_has_the_same_losses(speech: tuple[Any, list[float]], tmp_path: Path) -> None:
    model = speech_llm()
    for part in (model.encoder, model.llm):
        (getattr(part, "activation_checkpointing_enable", None) or part.gradient_checkpointing_enable)(
            {"use_reentrant": False}
        )
    _, found = spoken(model, tmp_path, checked=False)
    assert found == pytest.approx(speech[1], rel=SAME)


def test_in_float16_with_the_patches_it_has_nearly_the_same_losses(
    speech: tuple[Any, list[float]], tmp_path: Path
) -> None:
    model = speech_llm(torch.float16)
    with torch.no_grad():
        assert model(**batch()).loss.isnan()
    # the two that are left out change a new projector, on purpose
    fix = hfpatch.apply(model, exclude=["eps-alignment", "projection-init"], verbose=False)
    assert "fp16-residual-overflow" in {d.patch for d in fix.plan.of("applied")}
    peft, found = spoken(model, tmp_path)
    print(f"\nfloat32 {speech[1]}, float16 {found}")
    assert found == pytest.approx(speech[1], rel=ROUNDED)
    assert {p.dtype for p in peft.parameters() if p.requires_grad} == {torch.float32}


def test_a_speech_llm_in_a_new_process(speech: tuple[Any, list[float]], tmp_path: Path) -> None:
    loads_and_merges("speech", speech[0], batch(), tmp_path)


def by_trainer(model: Any, out: Path, collate: Callable[..., Any], **kwargs: Any) -> Trainer:
    data = [{"input_ids": document} for document in documents()]
    return Trainer(model, TrainingArguments(**settings(out, **kwargs)), train_dataset=data, data_collator=collate)


def by_trl(model: Any, out: Path, *, packing: bool) -> Any:
    """TRL's trainer, which checkpoints by default; packed, all documents are one row."""
    from datasets import Dataset  # from requirements-real.txt
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint("gemma3-270m"))
    tokenizer.pad_token_id = 0
    data = Dataset.from_list([{"input_ids": document} for document in documents()])
    length = sum(map(len, documents()))
    args = settings(out, per_device_train_batch_size=1 if packing else 4, packing=packing, max_length=length)
    return SFTTrainer(model, SFTConfig(**args, bf16=False), train_dataset=data, processing_class=tokenizer)


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "flattened": partial(by_trainer, collate=DataCollatorWithFlattening(return_tensors="pt")),
    "checkpointed": partial(by_trainer, collate=padded, gradient_checkpointing=True),
    "SFT": partial(by_trl, packing=False),
    "SFT packed": partial(by_trl, packing=True),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[float]]:
    """Gemma trained on padded rows, and the losses."""
    trainer = by_trainer(with_lora(language_model()), tmp_path_factory.mktemp("text"), padded)
    healthy(trainer.model, trainer.args, text_batch())
    return trainer.model, losses(trainer)


@pytest.mark.parametrize("way", WAYS)
def test_however_it_is_trained_it_has_the_same_losses(way: str, text: tuple[Any, list[float]], tmp_path: Path) -> None:
    trainer = WAYS[way](with_lora(language_model()), tmp_path)
    inputs = next(iter(trainer.get_train_dataloader()))
    one_row = way in ("flattened", "SFT packed")
    assert (len(inputs["input_ids"]) == 1) is one_row
    report = healthy(trainer.model, trainer.args, inputs)
    assert any("packed documents are kept apart" in line for line in report.measured) is one_row, report.measured
    found = losses(trainer)
    print(f"\npadded {text[1]}, {way} {found}")
    assert found == pytest.approx(text[1], rel=SAME)


def test_gemma_in_a_new_process(text: tuple[Any, list[float]], tmp_path: Path) -> None:
    loads_and_merges("text", text[0], text_batch(), tmp_path)
