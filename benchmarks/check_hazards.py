"""`hfpatch.check(batch=)` on every architecture as a tiny model: hazards said and true, said and false, not said.

    OMP_NUM_THREADS=1 python benchmarks/check_hazards.py

Each architecture is checked as it is, with LoRA, with LoRA everywhere under reentrant checkpointing, with LoRA and
inputs that require gradients, with LoRA on two documents in a row, with and without a cache, and in bfloat16. What is
true is established without `check`: by real steps on a copy
(forward, `backward()`, a step of AdamW), by the same step under the advice, by a checkpoint that is loaded again.
About half an hour on two cores.

Target: nothing said and false.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common import Row, cpu_name, header, table, write_json

REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
RATE, SUMS = 1e-6, 64
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"gradient_accumulation_steps": 4},
    "lora": {},
    "lora, reentrant": REENTRANT,
    "lora, inputs": {},
    "lora, packed": {"use_cache": False},
    "lora, packed, cache": {"use_cache": True},
    "bfloat16": {"learning_rate": RATE, "optim": "adamw_torch", "gradient_accumulation_steps": SUMS},
}
READ = ("nan-hidden-from-log", "clipping-off", "fp16-parameters", "left-padding-fp16")
"""Hazards that follow from the arguments, for which nothing is run."""


@dataclass
class Step:
    """What a real step gave."""

    raised: str = ""
    loss: float = math.nan
    none: set[str] = field(default_factory=set)
    zero: set[str] = field(default_factory=set)
    bad: set[str] = field(default_factory=set)
    grads: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here as well")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="architectures; all by default")
    args = parser.parse_args()

    from hfpatch.lab.tiny import TASKS

    facts = header("Hazards that check says", cpu_name(), "torch", "transformers", "peft", "hfpatch")
    wanted = [(task, name) for task, known in TASKS.items() for name in sorted(known)]
    wanted = [(task, name) for task, name in wanted if not args.only or name in args.only]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        found = []
        for done, part in enumerate(pool.imap(look, wanted), 1):
            found += part
            print(f"{done} of {len(wanted)}", end="\r", file=sys.stderr, flush=True)
    run = [f for f in found if f["verdict"] == "checked"]
    said = [f for f in found if f["verdict"] in ("true", "false", "not established")]
    missed = [f for f in found if f["verdict"] == "not said"]
    facts["rows"] = [counts(name, [f for f in found if f["hazard"] == name]) for name in hazards(said + missed)]
    facts["settings"] = [{"setting": s, "models checked": sum(f["setting"] == s for f in run)} for s in SETTINGS]
    facts["false"] = [f for f in said if f["verdict"] == "false"]
    facts["not said"] = missed
    facts["left out"] = [f for f in found if f["verdict"] == "left out"]
    facts["not established"] = [f for f in said if f["verdict"] == "not established"]
    facts["failed"] = [f for f in found if f["verdict"] == "check failed"]
    table("Models", facts["settings"])
    false = len(facts["false"])
    verdict = "met" if not false else "MISSED"
    table(
        "Hazards",
        facts["rows"],
        f"Said and true: {sum(f['verdict'] == 'true' for f in said)}; said and false: {false} (target, 0: {verdict}); "
        f"said, and not established either way: {len(facts['not established'])}; true and not said: {len(missed)}; "
        f"checks that failed: {len(facts['failed'])}.",
    )
    columns = ("task", "architecture", "setting", "hazard", "why")
    for title in ("false", "not established", "not said", "failed", "left out"):
        if facts[title]:
            table(title.capitalize(), [{c: f[c] for c in columns} for f in facts[title]])
    write_json(args.json, facts)


def hazards(found: list[dict[str, Any]]) -> list[str]:
    """The hazards in rows, each once."""
    return sorted({f["hazard"] for f in found})


def counts(name: str, found: list[dict[str, Any]]) -> Row:
    """One line of the table."""
    by = Counter(f["verdict"] for f in found)
    return {
        "hazard": name, "said and true": by["true"], "said and false": by["false"],
        "said, not established": by["not established"], "true and not said": by["not said"],
    }  # fmt: skip


def look(wanted: tuple[str, str]) -> list[dict[str, Any]]:
    """All settings of one architecture, which is given with its task."""
    task, architecture = wanted
    warnings.simplefilter("ignore")
    import transformers

    from hfpatch.errors import HfpatchError
    from hfpatch.model.source import REJECTIONS

    transformers.logging.set_verbosity(50)
    rows: list[dict[str, Any]] = []
    for setting, args in SETTINGS.items():
        if "packed" in setting and task != "causal":
            continue
        where = {"task": task, "architecture": architecture, "setting": setting, "hazard": "", "why": ""}
        try:
            model, batch, plain = built(task, architecture, setting)
            truth = real(model, batch, args)
        except (HfpatchError, *REJECTIONS) as error:
            rows.append({**where, "verdict": "left out", "why": one_line(error)})
            continue
        rows += judged(where, model, batch, args, truth, plain)
    return rows


def judged(
    where: dict[str, Any], model: Any, batch: dict[str, Any], args: dict[str, Any], truth: Step, plain: Any
) -> list[dict[str, Any]]:
    """What check says of one model, hazard by hazard, and what it does not say."""
    import torch

    import hfpatch
    from hfpatch.errors import HfpatchError
    from hfpatch.model.source import REJECTIONS

    torch.manual_seed(0)
    try:
        found = hfpatch.check(model, args, batch=batch)
    except (HfpatchError, *REJECTIONS) as error:
        return [{**where, "verdict": "check failed", "why": one_line(error)}]
    rows = [{**where, "verdict": "checked"}]
    half = where["setting"] == "bfloat16"
    summed = args.get("gradient_accumulation_steps", 1) > 1
    facts: dict[str, bool | None] = {
        "steps-lost": half and established(lambda: lost(model, truth)),
        "accumulation-rounds": half and rounds(truth),
        "buffers-cast": half and established(lambda: cast(model, plain)),
        "loss-not-divided": summed and established(lambda: undivided(model, batch)),
    }
    if "packed" in where["setting"]:
        facts["documents-leak"] = established(lambda: leaks(model, batch, args))
        facts["positions-offset"] = established(lambda: begins_elsewhere(model, batch, args))
    elif where["setting"] == "lora":
        facts["adapter-differs-in-eval"] = established(lambda: differs(model, batch))
    for hazard in found:
        if hazard.id in READ:
            continue
        ask = partial(is_so, hazard, model, batch, args, truth)
        held = facts[hazard.id] if hazard.id in facts else established(ask)
        verdict = "not established" if held is None else "true" if held else "false"
        rows.append({**where, "hazard": hazard.id, "verdict": verdict, "why": str(hazard)[:400]})
    rows += [
        {**where, "hazard": name, "verdict": "not said", "why": why}
        for name, why in unsaid(found.ids, model, batch, args, truth, facts)
    ]
    return rows


def established(question: Callable[[], bool]) -> bool | None:
    """The answer; None if the attempt to establish it raises."""
    from hfpatch.model.source import REJECTIONS

    try:
        return question()
    except REJECTIONS:
        return None


def built(task: str, architecture: str, setting: str) -> tuple[Any, dict[str, Any], Any]:
    """A tiny model as a setting has it, a batch for it, and the float32 model that a bfloat16 one was cast from."""
    import torch
    from peft import inject_adapter_in_model

    import hfpatch
    from hfpatch.testing import example_inputs, tiny_model

    model: Any = tiny_model(architecture, task=task)
    batch = example_inputs(model)
    plain = copy.deepcopy(model) if setting == "bfloat16" else None
    if setting == "bfloat16":
        model.bfloat16()
        batch = {
            k: v.bfloat16() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()
        }
    elif setting.startswith("lora"):
        scope = {"scope": "all"} if "reentrant" in setting else {}
        torch.manual_seed(0)
        inject_adapter_in_model(hfpatch.lora_config(model, r=2, verbose=False, **scope), model)
        if "inputs" in setting:
            model.enable_input_require_grads()
        if "packed" in setting:
            batch = two_documents(model)
    return model, batch, plain


def real(model: Any, batch: dict[str, Any], args: dict[str, Any], change: Callable[[Any], Any] | None = None) -> Step:
    """A real step on a copy."""
    import torch

    from hfpatch.model.source import REJECTIONS

    twin = copy.deepcopy(model).train()
    torch.manual_seed(0)
    try:
        if args.get("gradient_checkpointing"):
            twin.gradient_checkpointing_enable(args["gradient_checkpointing_kwargs"])
        if change is not None:
            change(twin)
        loss = getattr(twin(**copy.deepcopy(batch)), "loss", None)
        if loss is None:
            return Step()
        loss.backward()
    except REJECTIONS as error:
        return Step(raised=one_line(error), none={n for n, p in twin.named_parameters() if p.requires_grad})
    grads = {n: p.grad for n, p in twin.named_parameters() if p.requires_grad}
    return Step(
        loss=float(loss.detach()),
        none={n for n, g in grads.items() if g is None},
        zero={n for n, g in grads.items() if g is not None and not bool(g.any())},
        bad={n for n, g in grads.items() if g is not None and not bool(g.isfinite().all())},
        grads=grads,
    )


def is_so(hazard: Any, model: Any, batch: dict[str, Any], args: dict[str, Any], truth: Step) -> bool:
    """Whether a hazard of the step is true, by real steps."""
    number = re.search(r"(\d+) of \d+ ", hazard.reason)
    count = int(number[1]) if number else 0
    if hazard.id in ("step-raises", "inplace-embedding"):
        better = advised(hazard.change, model, batch)
        return bool(truth.raised) and (better is None or not better.raised)
    if hazard.id == "checkpointing-cuts-off":
        better = advised(hazard.change, model, batch)
        return better is not None and not better.raised and len(truth.none) - len(better.none) >= count > 0
    if hazard.id == "no-gradient":
        return bool(truth.raised) if hazard.certain else len(truth.none) >= count > 0
    if hazard.id == "zero-gradient":
        return len([n for n in truth.zero if "lora_A" not in n]) >= count > 0
    if hazard.id == "adapter-cut-off":
        return len([n for n in silent(model, batch, args) if "lora_A" in n or "embedding_A" in n]) >= count > 0
    if hazard.id in ("adapter-not-in-eval", "adapter-differs-in-eval"):
        return differs(model, batch)
    if hazard.id == "loss-not-finite":
        return not math.isfinite(truth.loss)
    return bool(truth.bad) if hazard.id == "gradients-not-finite" else False


def advised(change: str, model: Any, batch: dict[str, Any]) -> Step | None:
    """A real step under the advice; None if the advice says of itself nothing about a trial."""
    if "tried on this batch" not in change:
        return None

    def both(twin: Any) -> None:
        if "'use_reentrant': False" in change:
            twin.gradient_checkpointing_enable({"use_reentrant": False})
        if "disable_input_require_grads" in change:
            twin.disable_input_require_grads()
        if "enable_input_require_grads" in change:
            twin.gradient_checkpointing_enable({"use_reentrant": True})
            twin.enable_input_require_grads()

    return real(model, batch, {}, both)


def silent(model: Any, batch: dict[str, Any], args: dict[str, Any]) -> set[str]:
    """The trained parameters that have no gradient but 0 in each of three real steps."""
    import torch

    twin = copy.deepcopy(model).train()
    if args.get("gradient_checkpointing"):
        twin.gradient_checkpointing_enable(args["gradient_checkpointing_kwargs"])
    left = {n for n, p in twin.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        twin(**copy.deepcopy(batch)).loss.backward()
        left -= {n for n, p in twin.named_parameters() if n in left and p.grad is not None and bool(p.grad.any())}
        optimizer.step()
    return left


def unsaid(
    ids: tuple[str, ...],
    model: Any,
    batch: dict[str, Any],
    args: dict[str, Any],
    truth: Step,
    facts: dict[str, bool | None],
) -> list[tuple[str, str]]:
    """What is true and was not said."""
    missed = [(name, "") for name, held in facts.items() if held and name not in ids]
    raising = {"step-raises", "inplace-embedding", "checkpointing-cuts-off", "no-gradient", "nothing-trains"}
    if truth.raised and not raising & set(ids):
        missed.append(("step-raises", truth.raised))
    if math.isfinite(truth.loss) and truth.zero and not {"zero-gradient", "adapter-cut-off"} & set(ids):
        left = established(lambda: bool(truth.zero & silent(model, batch, args)))  # others move with what is 0 now
        if left:
            missed.append(("zero-gradient", min(truth.zero)))
    if args.get("gradient_checkpointing") and "checkpointing-cuts-off" not in ids and not truth.raised:
        other = real(model, batch, {**args, "gradient_checkpointing_kwargs": {"use_reentrant": False}})
        if not other.raised and (cut := truth.none - other.none):
            missed.append(("checkpointing-cuts-off", f"{len(cut)}, {min(cut)} first"))
    return missed


def lost(model: Any, truth: Step) -> bool:
    """Whether a real step of AdamW moves less than half of the weights that have a gradient."""
    import torch

    if not truth.grads or truth.bad:
        return False
    twin = copy.deepcopy(model).train()
    named = {n: p for n, p in twin.named_parameters() if truth.grads.get(n) is not None and p.dtype == torch.bfloat16}
    before = {n: p.detach().clone() for n, p in named.items()}
    for name, parameter in named.items():
        parameter.grad = truth.grads[name].clone()
    torch.optim.AdamW(list(named.values()), lr=RATE, weight_decay=0.0).step()
    moved = sum(int(((p != before[n]) & (truth.grads[n] != 0)).sum()) for n, p in named.items())
    total = sum(int((truth.grads[n] != 0).sum()) for n in named)
    return total > 0 and moved / total < 0.5


def rounds(truth: Step) -> bool:
    """Whether the gradient added up in bfloat16 ends more than a twentieth away from its sum."""
    import torch

    gone = whole = 0.0
    for gradient in truth.grads.values():
        if gradient is None or gradient.dtype != torch.bfloat16 or not bool(gradient.isfinite().all()):
            continue
        part = gradient / SUMS
        total = torch.zeros_like(part)
        for _ in range(SUMS):
            total += part
        exact = part.double() * SUMS
        gone += float((total.double() - exact).square().sum())
        whole += float(exact.square().sum())
    return whole > 0 and math.sqrt(gone / whole) > 0.05


def cast(model: Any, plain: Any) -> bool:
    """Whether the cast left a buffer with other values than a checkpoint loaded in bfloat16 has."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        loaded = type(plain).from_pretrained(folder, dtype=torch.bfloat16)
    other = dict(loaded.named_buffers())
    return any(
        b.is_floating_point() and n in other and not torch.equal(b.float(), other[n].float())
        for n, b in model.named_buffers()
    )


FIRST = 7
"""Tokens of the first of two documents."""


def two_documents(model: Any) -> dict[str, Any]:
    """Two documents in one row, as transformers' collator packs them."""
    import torch
    from transformers import DataCollatorWithFlattening

    torch.manual_seed(0)
    most = min(50, model.config.get_text_config().vocab_size - 1)
    rows = [{"input_ids": torch.randint(5, most, (n,)).tolist()} for n in (FIRST, 6)]
    packed = DataCollatorWithFlattening(return_tensors="pt")(rows)
    return {k: v for k, v in packed.items() if isinstance(v, torch.Tensor)}


def logits(model: Any, batch: dict[str, Any], *, training: bool = False) -> Any:
    """What a model gives in one of its modes, without gradients."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        return model.train(training)(**copy.deepcopy(batch)).logits.float()


def leaks(model: Any, batch: dict[str, Any], args: dict[str, Any]) -> bool:
    """Whether the logits of the second document depend on the first."""
    twin = copy.deepcopy(model)
    for config in (twin.config, twin.config.get_text_config()):
        config.use_cache = args["use_cache"]
    ids = batch["input_ids"].clone()
    ids[0, :FIRST] = ids[0, -FIRST:].clone()
    one, two = (logits(twin, {**batch, "input_ids": i})[0, FIRST:] for i in (batch["input_ids"], ids))
    return float((one - two).norm() / one.norm()) > 1e-5


def begins_elsewhere(model: Any, batch: dict[str, Any], args: dict[str, Any]) -> bool:
    """Whether a document gets other logits with the collator's positions than without."""
    twin = copy.deepcopy(model)
    twin.config.use_cache = args["use_cache"]
    alone = {k: v[:, :FIRST] for k, v in batch.items() if k in ("input_ids", "position_ids")}
    one, two = logits(twin, alone), logits(twin, {"input_ids": alone["input_ids"]})
    return float((one - two).norm() / two.norm()) > 1e-4


def differs(model: Any, batch: dict[str, Any]) -> bool:
    """Whether evaluation and training differ with an adapter that counts, and do not without, where nothing drops."""
    import torch

    twin = copy.deepcopy(model)
    for module in twin.modules():
        for holder in (module, getattr(module, "config", module)):
            for name, value in list(vars(holder).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    base = [logits(copy.deepcopy(twin), batch, training=mode) for mode in (True, False)]
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if "lora_" in name and not bool(parameter.any()):
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    noisy = [logits(copy.deepcopy(twin), batch, training=mode) for mode in (True, False)]
    without, with_it = (float((one - two).norm() / one.norm()) for one, two in (base, noisy))
    return with_it > 1e-3 and with_it > 10 * without


def undivided(model: Any, batch: dict[str, Any]) -> bool:
    """Whether the gradient is the same for twice the number of items, in a forward that a Trainer would tell of it."""
    import inspect

    import torch

    from hfpatch.model.source import REJECTIONS

    takes = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(type(model).forward).parameters.values())
    labels = batch.get("labels")
    if not takes or not getattr(model, "accepts_loss_kwargs", True) or not isinstance(labels, torch.Tensor):
        return False
    count = int((labels != -100).sum())
    sizes = []
    for times in (1, 2):
        twin = copy.deepcopy(model).eval()
        try:
            loss = twin(**copy.deepcopy(batch), num_items_in_batch=torch.tensor(times * count)).loss
            if loss is None:
                return False
            loss.backward()
        except REJECTIONS:
            return False
        sizes.append(math.sqrt(sum(float(p.grad.square().sum()) for p in twin.parameters() if p.grad is not None)))
    return sizes[0] > 0 and math.isclose(sizes[0], sizes[1], rel_tol=1e-3)


def one_line(error: BaseException) -> str:
    """An error in one line."""
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:200]


if __name__ == "__main__":
    main()
