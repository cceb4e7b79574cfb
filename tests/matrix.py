"""Every kind of edit in every wrapper, in both orders: the source of the table in docs/state.md.

`python -m tests.matrix` runs every cell and writes the table. A cell is *works* if the patched outputs and gradients
are those of the patched model without a wrapper, status finds every edit in force before and after the backward pass,
the state dict has no other names than without the patch and gives a stock model the outputs that the plan says, and a
revert through the wrapper leaves neither a record nor a hook and the stock outputs; *refused* if hfpatch says why in a
sentence and nothing was changed; *untried* if the wrapper does not take that model without a patch either.

What a cell runs is in `tests/cells.py`; rows that need steps of their own, or other packages, are in `tests/wrapped`.
"""

from __future__ import annotations

import copy
import json
import pickle
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hfpatch
from hfpatch.errors import HfpatchError
from hfpatch.patching import registry
from hfpatch.patching.verifying.proving import repros
from hfpatch.patching.verifying.trial import model_of
from tests.cells import Outcome, call, through
from tests.fingerprint import fingerprint
from tests.interrupts import SUBJECTS, trials
from tests.lifecycle import gloo
from tests.quantised import HEADING
from tests.wrapped import ROWS


def peft(model: Any, **words: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    if hasattr(model, "peft_config"):
        model.add_adapter("third", LoraConfig(r=2, target_modules=["q_proj"]))
        return model
    gpt2 = "transformer" in dict(model.named_children())
    there = {path.rpartition(".")[2] for path, _ in model.named_modules()}
    target = next(name for name in ("c_attn", "q_proj", "q_b_proj", "Wq") if name in there)
    config = LoraConfig(r=2, target_modules=[target], fan_in_fan_out=gpt2, **words)
    return get_peft_model(model, config).eval()


def two_adapters(model: Any) -> Any:
    wrapped = peft(model)
    if wrapped is model:  # it had adapters
        return model
    wrapped.add_adapter("second", wrapped.peft_config["default"])
    wrapped.set_adapter("second")
    return wrapped


def saved_modules(model: Any) -> Any:
    names = [n for n in ("ln_speech", "speech_proj") if hasattr(model, n)]
    return peft(model, modules_to_save=names or ["lm_head"])


def ddp(model: nn.Module) -> nn.Module:
    gloo()
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    gloo()
    return fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))


def compiled(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compiled_and_called(model: nn.Module) -> nn.Module:
    wrapped = compiled(model)
    call(wrapped)
    return wrapped


def device_hooks(model: nn.Module) -> nn.Module:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    return model


def offloaded(model: nn.Module) -> nn.Module:
    from accelerate import cpu_offload

    cpu_offload(model, "cpu")
    return model


def on_disk(model: nn.Module) -> nn.Module:
    from accelerate import disk_offload

    disk_offload(model, tempfile.mkdtemp(dir=tempfile.gettempdir()), "cpu")
    return model


def checkpointed(*, reentrant: bool) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        inner = getattr(model, "llm", model)
        inner.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            inner.enable_input_require_grads()
        return model

    return wrap


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: model,
    "PEFT, LoRA": peft,
    "PEFT, DoRA": partial(peft, use_dora=True),
    "PEFT, trainable tokens": partial(peft, trainable_token_indices=[1, 5]),
    "PEFT, two adapters": two_adapters,
    "PEFT, merged": lambda model: peft(model).merge_and_unload(),
    "PEFT, modules_to_save": saved_modules,
    "DDP": ddp,
    "DataParallel": nn.DataParallel,
    "FSDP2": fsdp,
    "torch.compile": compiled,
    "torch.compile, called": compiled_and_called,
    "accelerate, device hooks": device_hooks,
    "accelerate, offloaded": offloaded,
    "accelerate, on disk": on_disk,
    "gradient checkpointing": checkpointed(reentrant=False),
    "gradient checkpointing, reentrant": checkpointed(reentrant=True),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),  # noqa: S301
}
ROUNDS = ("PEFT, DoRA",)
"""Wrappers that compute a product of their own in the model's dtype."""
ORDERS = ("before", "after")
"""The wrapper is there before the patch, or comes after it."""


@dataclass(frozen=True)
class Cell:
    kind: str
    wrapper: str
    order: str
    outcome: str
    """`works`, `refused`, `untried` or `FAILS`."""
    text: str


def run(kind: str, wrapper: str, order: str) -> Cell:
    """Run one cell."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome, text = _run(kind, wrapper, order)
    except HfpatchError as error:
        outcome, text = "refused", str(error)
    except AssertionError as error:
        outcome, text = "FAILS", f"{error}"
    finally:
        torch._dynamo.reset()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return Cell(kind, wrapper, order, outcome, text)


def _run(kind: str, wrapper: str, order: str) -> Outcome:
    if wrapper in ROWS:
        return ROWS[wrapper](kind, order)
    rounding = 5e-3 if wrapper in ROUNDS else 1e-5
    return through(SUBJECTS[kind], WRAPPERS[wrapper], order, rounding=rounding, merged=wrapper == "PEFT, merged")


FILE = Path(__file__).parent.parent / "docs" / "state.md"
DATA = FILE.with_suffix(".json")
NAMES = (*WRAPPERS, *ROWS)
ALL = [(kind, wrapper, order) for kind in SUBJECTS for wrapper in NAMES for order in ORDERS]


def patch_row(patch_id: str) -> Cell:
    """A patch on the first of its repros that runs here: applied, found by status, reverted."""
    entry = registry.get(patch_id)
    case = next((c for c in repros(entry) if c.device == "cpu"), None)
    if case is None:
        return Cell(patch_id, "nothing", "before", "not run", f"{entry.patch.repros[0]}: needs a GPU")
    model = model_of(case)
    before = fingerprint(model)
    others = [name for name in registry.entries() if name not in {patch_id, *entry.patch.needs}]
    fix = hfpatch.apply(model, include=patch_id, exclude=others, verbose=False)
    words = {e.state.word for e in fix.status().edits}
    hfpatch.revert(model)
    fine = bool(fix.edits) and words == {"here"} and fingerprint(model) == before
    return Cell(
        patch_id,
        "nothing",
        "before",
        "works" if fine else "FAILS",
        f"{case}, {len(fix.edits)} edit{'s' * (len(fix.edits) > 1)}",
    )


def row_of(patch: Cell) -> str:
    """The line of a patch in the page."""
    return f"| `{patch.kind}` | {patch.outcome} | {patch.text} |"


def page(cells: list[Cell], patches: list[Cell], interruptions: dict[str, tuple[int, int]]) -> str:
    """docs/state.md: a row for each wrapper and order, a column for each kind of edit; patches; interruptions."""
    kinds = list(SUBJECTS)
    found = {(c.kind, c.wrapper, c.order): c for c in cells}
    notes: dict[str, int] = {}

    def shown(cell: Cell) -> str:
        text = "; ".join(cell.text.splitlines())
        if cell.outcome == "refused":
            text = re.sub(r"^.* and is refused: ", "", text)
        number = notes.setdefault(text, len(notes) + 1) if text else 0
        return cell.outcome + (f" [{number}]" if number else "")

    rows = [
        f"| {wrapper if order == 'before' else ''} | {'wrap, apply' if order == 'before' else 'apply, wrap'} | "
        + " | ".join(shown(found[kind, wrapper, order]) for kind in kinds)
        + " |"
        for wrapper in NAMES
        for order in ORDERS
    ]
    counts = {word: sum(c.outcome == word for c in cells) for word in ("works", "refused", "untried", "FAILS")}
    tried = sum(n for n, _ in interruptions.values())
    return "\n".join(
        [
            "# State",
            "",
            "Made by `python -m tests.matrix`, which runs every cell and every interruption. *works*: the outputs and",
            "the gradients of a step are those of the patched model without the wrapper, `status` finds every edit in",
            "force, the state dict has the names of the stock model's and gives a stock model the outputs that the",
            "plan says, and a revert leaves no record, no hook and the stock outputs. *refused*: an error with the",
            "reason, and nothing is changed. *untried*: the wrapper does not take this model, patched or not.",
            "",
            f"{counts['works']} cells work, {counts['refused']} are refused, {counts['untried']} are untried, "
            f"{counts['FAILS']} fail.",
            "",
            f"| wrapper | order | {' | '.join(kinds)} |",
            f"|---|---|{'---|' * len(kinds)}",
            *rows,
            "",
            "The columns are kinds of edit, each by a patch that makes it: "
            + ", ".join(f"{kind} (`{subject.patch}`)" for kind, subject in SUBJECTS.items())
            + ".",
            "",
            *(f"{number}. {text}" for text, number in notes.items()),
            "",
            "An output passed through a function (`edits.map_output`) and a copy of an output (`edits.copy_output`)",
            "are set by hooks: `tests/test_map_output.py` and `tests/test_clone_embeds.py` try each cell, and find it",
            "as in the column *hook*.",
            "",
            "What `verify` says of a model's KL stands beside the true KL of 15 models in",
            "[benchmarks/results/verify_kl-cpu.md](../benchmarks/results/verify_kl-cpu.md).",
            "",
            "## Patches",
            "",
            "Each on one of its own cases: applied, found in force by `status`, reverted to what was, byte for byte.",
            "",
            "| patch | outcome | case |",
            "|---|---|---|",
            *map(row_of, patches),
            "",
            "## Interruptions",
            "",
            "KeyboardInterrupt and SystemExit at every line of the engine that apply and revert run, each followed by",
            f"a revert without `only=`: {tried:,} tried, {sum(n for _, n in interruptions.values())} left something.",
            "",
            "| kind of edit | tried | left something |",
            "|---|---|---|",
            *(f"| {kind} | {tried:,} | {left} |" for kind, (tried, left) in interruptions.items()),
            "",
        ]
    )


def figures(cells: list[Cell], patches: list[Cell], interruptions: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """docs/state.json: the outcomes of the page, for other programs."""
    return {
        "cells": [[c.kind, c.wrapper, c.order, c.outcome] for c in cells],
        "patches": {c.kind: c.outcome for c in patches},
        "interruptions": {kind: {"tried": tried, "left": left} for kind, (tried, left) in interruptions.items()},
    }


def documented() -> dict[tuple[str, str, str], str]:
    """Outcomes in docs/state.md, by kind, wrapper and order."""
    lines = [line for line in FILE.read_text().splitlines() if line.startswith("|")]
    kinds = [cell.strip() for cell in lines[0].strip("|").split("|")][2:]
    out: dict[tuple[str, str, str], str] = {}
    for (wrapper, order), line in zip([(w, o) for w in NAMES for o in ORDERS], lines[2:], strict=False):
        cells = [cell.strip() for cell in line.strip("|").split("|")][2:]
        out |= {(kind, wrapper, order): cell.split(" ")[0] for kind, cell in zip(kinds, cells, strict=True)}
    return out


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    ran: list[Cell] = []
    for place in ALL:
        ran.append(run(*place))
        print(f"{' | '.join(place)}: {ran[-1].outcome} {ran[-1].text[:120]}", flush=True)
    left: dict[str, tuple[int, int]] = {}
    for kind in SUBJECTS:
        results = list(trials(kind))
        left[kind] = (len(results), sum(bool(what) for _, what in results))
        print(kind, left[kind], flush=True)
    rows = [patch_row(patch_id) for patch_id in registry.entries()]
    kept = "".join(FILE.read_text().partition(HEADING)[1:])  # `python -m tests.quantised` makes that section
    FILE.write_text(page(ran, rows, left) + kept)
    DATA.write_text(json.dumps(figures(ran, rows, left), indent=1) + "\n")
