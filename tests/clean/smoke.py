"""Every verb once, on tiny models: run by the Python of an environment in which nothing but hfpatch was installed.

`python smoke.py FOLDER` writes into the folder, prints a line for each verb, and ends with an error at the first that
fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers

import hfpatch
from hfpatch.testing import example_inputs, tiny_model

UNKNOWN = "<unk>"
TEXT = "A short text, of which each character is a token."


def save(model: Any, folder: Path) -> Path:
    """A checkpoint with a tokenizer of 64 characters."""
    model.save_pretrained(folder)
    words = [UNKNOWN, *map(chr, range(ord(" "), ord(" ") + 63))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token=UNKNOWN).save_pretrained(folder)
    return folder


def overflowing() -> Any:
    model: Any = tiny_model("gemma3_text", pad_token_id=None)
    for name, parameter in model.named_parameters():
        if name.endswith("post_feedforward_layernorm.weight"):
            parameter.data.fill_(24000)
    return model.half()


def terminal(*words: str | Path, code: int = 0) -> str:
    """What a command prints, in a process of its own."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("hfpatch")), *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, (words, done.returncode, done.stdout[-2000:], done.stderr[-4000:])
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def repair(folder: Path) -> None:
    model = overflowing()
    batch = example_inputs(model)
    assert "residual stream" in str(hfpatch.inspect(model))
    assert "fp16-residual-overflow" in [d.patch for d in hfpatch.plan(model).decisions if d.decided == "applied"]
    assert " decision " in str(hfpatch.plan(model)), "columns of a table hold whole words"
    with hfpatch.trace(model) as traced, torch.no_grad():
        model(**batch)
    assert traced.first_bad is not None
    assert traced.first_bad.symptom == "residual-overflow"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fix = hfpatch.apply(model, verbose=False)
    assert hfpatch.status(model)
    proof = fix.verify(batch, runs=["before", "after"])
    assert not proof["before"].finite
    assert proof["after"].kl < 1e-4, str(proof)
    hfpatch.revert(model)
    assert not hfpatch.status(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def training(folder: Path) -> None:
    model: Any = tiny_model("llama").train()
    batch = example_inputs(model)
    assert hfpatch.embed_tokens(model) is model.model.embed_tokens
    assert "q_proj" in hfpatch.lora_targets(model).kwargs()["target_modules"]
    model = get_peft_model(model, hfpatch.lora_config(model, r=2))
    assert "no hazards" in str(hfpatch.check(model, batch=batch))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    guard = hfpatch.Guard(model, optimizer, verbose=False)
    outcomes = []
    for factor in (1.0, float("nan"), 1.0):
        loss = model(**batch).loss
        hfpatch.validate_loss(loss)
        outcomes.append(guard.step(loss * factor).stepped)
    assert outcomes == [True, False, True]
    model(**batch).loss.backward()
    assert "lora_" in str(hfpatch.gradient_report(model))
    arguments = transformers.TrainingArguments(str(folder / "trained"), max_steps=1, report_to=[], use_cpu=True)
    guarded = hfpatch.GuardCallback()
    rows = [{k: v[0] for k, v in batch.items()}] * 8
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[guarded]).train()
    student, teacher = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    assert torch.isfinite(hfpatch.normalized_mse(student, teacher))
    assert torch.equal(hfpatch.nn.BoundedModulation()(torch.zeros(4)), torch.ones(4))


def kept(folder: Path) -> None:
    """The patch beside the checkpoint, in another process."""
    model = overflowing()
    batch = example_inputs(model)
    fix = hfpatch.apply(model, verbose=False)
    with torch.no_grad():
        want = model(**batch).logits
    save(model, folder / "kept")
    fix.save(folder / "kept")
    torch.save(batch, folder / "batch.pt")
    script = "import hfpatch, torch; torch.set_num_threads(1); m = hfpatch.load('kept')\n"
    script += "with torch.no_grad(): torch.save(m(**torch.load('batch.pt')).logits, 'logits.pt')"
    subprocess.run([sys.executable, "-c", script], cwd=folder, check=True, timeout=600)
    assert torch.equal(torch.load(folder / "logits.pt"), want)
    assert want.isfinite().all()


def black_box(folder: Path) -> None:
    model = overflowing().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = hfpatch.Guard(model, optimizer, verbose=False, black_box=hfpatch.BlackBox(folder / "boxes"))
    assert not guard.step(model(**example_inputs(model)).loss).stepped


def reading(folder: Path) -> None:
    a, b = tiny_model("llama"), tiny_model("llama")
    assert hfpatch.compare(a, b, example_inputs(a)).equal
    adapter = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    adapter.save_pretrained(str(folder / "adapter"))
    assert "8 of 8" in str(hfpatch.scan(str(folder / "adapter"), model=a))
    assert "weights" in str(hfpatch.doctor(overflowing(), batch=example_inputs(a)))
    assert len(hfpatch.list_patches()) >= 16
    assert "What goes wrong" in str(hfpatch.explain("eps-alignment"))


def own_patch(folder: Path) -> None:
    entry = next(e for e in hfpatch.list_patches() if e.id == "wo-overflow")
    hfpatch.register(entry.patch, id="of-my-own")
    assert "of-my-own" in [e.id for e in hfpatch.list_patches()]
    hfpatch.unregister("of-my-own")
    (result, *_) = hfpatch.testing.prove_patch(entry.patch)
    assert result.word == "passed", str(result)


def commands(folder: Path) -> None:
    model = save(overflowing(), folder / "model")
    other = save(tiny_model("llama"), folder / "other")
    text = folder / "text.txt"
    text.write_text(TEXT)
    (folder / "args.json").write_text('{"fp16": true}')
    assert "fp16-residual-overflow" in terminal("plan", model)
    assert "gemma3_text" in terminal("inspect", model)
    assert "residual add" in terminal("trace", model, "--text", text, code=1)
    assert "in 1 file" in terminal("scan", model)
    assert "fp16-parameters" in terminal("check", model, "--args", folder / "args.json", code=1)
    assert "equal" in terminal("compare", other, other, "--text", text)
    assert "fp16-residual-overflow" in terminal("doctor", model, "--text", text, code=1)
    (bundle,) = (folder / "boxes").iterdir()
    assert "residual add" in terminal("replay", bundle, "--model", model, code=1)
    assert "eps-alignment" in terminal("list")
    assert "Numerics" in terminal("explain", "eps-alignment")
    assert "wrote" in terminal("new", "llama/of-my-own", "--package", "of-my-own")
    assert "proved" in terminal("prove", "wo-overflow", "--architecture", "t5")
    assert "passed" in terminal("verify", "wo-overflow")
    assert "residual" in terminal("demo")
    assert terminal("--version").strip().endswith(hfpatch.__version__)


PARTS: tuple[Callable[[Path], None], ...] = (repair, training, kept, black_box, reading, own_patch, commands)

if __name__ == "__main__":
    place = Path(sys.argv[1])
    os.chdir(place)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for part in PARTS:
        part(place)
        print(f"{part.__name__}: works", flush=True)
    print(hfpatch.__file__)
