"""A float32 reference is one, whatever precision of float32 products a script asked for; its settings stay."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Generator
from typing import Any

import torch
from peft import get_peft_model

import hfpatch
from hfpatch.lab.tiny import tiny_model
from hfpatch.lora.merging import merge_of

SET = {
    "nothing": "",
    "high": "torch.set_float32_matmul_precision('high')",
    "medium": "torch.set_float32_matmul_precision('medium')",
    "allow_tf32": "torch.backends.cuda.matmul.allow_tf32 = True",
    "no tf32 in cuDNN": "torch.backends.cudnn.allow_tf32 = False",
    "everywhere": "torch.backends.fp32_precision = 'tf32'",
    "one library": "torch.backends.mkldnn.fp32_precision = 'bf16'",
    "one operation": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "a part of cuDNN": "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "old and new": "torch.set_float32_matmul_precision('high'); torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
}
SCRIPT = """
    import torch
    from hfpatch.model.evaluating.full_float32 import full_float32

    backends = torch.backends
    PLACES = {
        "all": backends, "cudnn": backends.cudnn, "mkldnn": backends.mkldnn, "cuda matmul": backends.cuda.matmul,
        "cudnn conv": backends.cudnn.conv, "cudnn rnn": backends.cudnn.rnn, "matmul": backends.mkldnn.matmul,
        "conv": backends.mkldnn.conv, "rnn": backends.mkldnn.rnn,
    }

    def state():
        found = {at: place.fp32_precision for at, place in PLACES.items()}
        asked = {"old": torch.get_float32_matmul_precision, "old cudnn": lambda: backends.cudnn.allow_tf32}
        for name, ask in asked.items():
            try:
                found[name] = ask()
            except RuntimeError:
                found[name] = "mixed"
        return found

    def later():  # what a script may set afterwards, and what it is then
        found = []
        for place in (backends, backends.cudnn, backends.mkldnn):
            child = os.fork()
            if not child:
                place.fp32_precision = "ieee"
                os.write(pipe[1], json.dumps(state()).encode() + b"\\n")
                os._exit(0)
            os.waitpid(child, 0)
            found.append(os.read(pipe[0], 4096))
        return found

    import json, os, sys

    for name, setting in json.loads(sys.argv[1]).items():
        child = os.fork()
        if not child:
            break
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(name)
        print(name, flush=True)
    else:
        os._exit(0)
    exec(setting)
    torch.manual_seed(0)
    a, b = torch.randn(128, 256), torch.randn(256, 128)
    true = a.double() @ b.double()
    off = lambda: float(((a @ b).double() - true).norm() / true.norm())
    pipe = os.pipe()
    before, after = state(), later()
    for _ in range(2):
        with full_float32():
            assert off() < 1e-6, off()
            assert all(PLACES[at].fp32_precision in ("ieee", "none") for at in ("matmul", "conv", "rnn")), state()
            with full_float32():
                pass
        assert state() == before, (before, state())
        assert later() == after, (after, later())
    for _ in range(2):
        try:
            with full_float32():
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert state() == before
    lines = [0]
    for at in range(1, 60):  # an interruption at each line of the restoring
        def watch(frame, event, _):
            if frame.f_code.co_name in ("_restore", "_set_old"):
                if event == "line":
                    lines[0] += 1
                    if lines[0] == at:
                        raise KeyboardInterrupt
            return watch
        lines[0] = 0
        context = full_float32()
        context.__enter__()
        sys.settrace(watch)
        try:
            context.__exit__(None, None, None)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert state() == before, (at, before, state())
        if lines[0] < at:
            break
    import threading
    inside, done, seen = threading.Event(), threading.Event(), []

    def second():
        inside.wait()
        with full_float32():
            done.wait(0.2)
            seen.append(off())

    thread = threading.Thread(target=second)
    thread.start()
    with full_float32():
        inside.set()
        done.wait(0.05)
    done.set()
    thread.join()
    assert seen[0] < 1e-6 and state() == before
    if "mixed" not in before.values():
        with full_float32(), backends.cudnn.flags(enabled=False):  # CTC losses do so, and torch asks the older settings
            torch.get_float32_matmul_precision()
"""


def test_it_is_full_and_the_settings_stay() -> None:
    """Each setting in a process of its own: torch cannot forget one."""
    script = textwrap.dedent(SCRIPT)
    done = subprocess.run([sys.executable, "-c", script, json.dumps(SET)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [*SET], done.stdout


@contextlib.contextmanager
def medium() -> Generator[None]:
    """A script that asked for the shortest products of float32."""
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


def shortens_here() -> bool:
    """True if this CPU shortens products of float32 when it is asked to."""
    a = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
    with medium():
        short = a @ a
    return not torch.equal(short, a @ a)


BATCH = {"input_ids": (torch.arange(24).reshape(2, 12) * 7 + 3) % 64}


def test_a_reference_is_full_and_a_row_is_what_runs() -> None:
    model: Any = tiny_model("llama", hidden_size=64, intermediate_size=128)
    wanted = hfpatch.verify(model, BATCH)
    with medium():
        found = hfpatch.verify(model, BATCH)
    assert found.reference.loss == wanted.reference.loss
    assert (found.rows[0].kl > 1e-9) == shortens_here()
    assert any("shorten float32 to bf16 in products of matrices" in note for note in found.notes)
    assert not any("shorten" in note for note in wanted.notes)


def test_the_doctors_float32_is_what_runs_and_its_reference_is_full() -> None:
    model: Any = tiny_model("llama", hidden_size=64, intermediate_size=128)
    with medium():
        found = hfpatch.doctor(model, batch=BATCH)
    run = next(r for r in found.runs if r.way.name == "float32")
    said = " ".join(str(found).split())
    assert "torch is set to shorten float32 to bf16 in products of matrices: the runs do" in said
    assert (run.kl > 1e-9) == shortens_here()


def test_a_plan_is_the_same() -> None:
    model: Any = tiny_model("gemma3_text").half()
    wanted = hfpatch.plan(model, batch=BATCH).to_dict()
    with medium():
        assert hfpatch.plan(model, batch=BATCH).to_dict() == wanted


def test_what_a_merge_keeps_is_the_same() -> None:
    base: Any = tiny_model("llama").to(torch.bfloat16)
    model = get_peft_model(base, hfpatch.lora_config(base, r=8))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(1e-3)
    wanted = merge_of([*model.modules()], "default")
    with medium():
        assert merge_of([*model.modules()], "default") == wanted
