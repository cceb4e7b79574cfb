"""Finite faults: where the signal grows or vanishes. What the tracer names, and that it is silent on healthy models.

    OMP_NUM_THREADS=1 python benchmarks/trace_growth.py                  planted faults, and the real models
    OMP_NUM_THREADS=1 python benchmarks/trace_growth.py --all            every tiny architecture too, fresh and trained

A planted fault stands in the third block of a tiny model, in the code of a module around it. It is named rightly if the
finding has its symptom, its module and its operation. The real models need the packages of requirements-evidence.txt.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import Row, cpu_name, header, table, write_json
from torch import Tensor, nn
from torch.nn import functional

ARCHITECTURES = (
    "llama", "gemma3_text", "gpt2", "mixtral", "bloom", "falcon", "qwen3", "phi3", "olmo2", "t5",
)  # fmt: skip
AT = 2
TOKENS = 64
"""Of the text that real models read."""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every architecture, fresh and after 20 steps of AdamW")
    parser.add_argument("--part", default="1/1", help="of the architectures: 2/6 is the second sixth")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity(50)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    facts = header("Where the signal grows or vanishes", cpu_name(), "torch", "transformers", "hfpatch")
    facts["planted"] = planted()
    facts["real"] = real()
    if args.all:
        part, of = map(int, args.part.split("/"))
        facts["tiny"] = [tiny(steps, part - 1, of) for steps in (0, 20)]
        table("False alarms on tiny models of every architecture", facts["tiny"])
    write_json(args.json, facts)


def faint(x: Tensor, size: float) -> Tensor:
    """A tensor of this size whose gradient is that of `x`."""
    return x - x.detach() + size


def near_zero_rms(h: Tensor) -> Tensor:
    """Divide by an RMS near 0, as source S5's stages do."""
    small = h * 1e-9
    return small / (small.pow(2).mean(-1, keepdim=True).sqrt() + 1e-8)


def tiny_norm(x: Tensor) -> Tensor:
    """Divide by the norm."""
    return x / x.norm(dim=-1, keepdim=True)


def steep(x: Tensor) -> Tensor:
    """A custom autograd Function whose backward multiplies."""
    return Steep.apply(x)  # pyright: ignore[reportReturnType]


class Steep(torch.autograd.Function):
    """Does nothing forward; backward multiplies by 1e5."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a copy."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Multiply."""
        return gradient * 1e5


@dataclass(frozen=True)
class Fault:
    """A fault: a function of the input and the output of a block.

    Attributes:
        symptom: `growth` or `vanishing`.
        words: What the operation must be called; any of them.
        plant: Returns the block's new output.
    """

    symptom: str
    words: tuple[str, ...]
    plant: Callable[[Tensor, Tensor], Tensor]


FAULTS: dict[str, Fault] = {
    "a residual scaled up": Fault("growth", ("multiplication by 1000",), lambda x, y: x + 1000 * (y - x)),
    "division by a tiny RMS": Fault("growth", ("division by rms",), lambda _, y: near_zero_rms(y)),
    "division by a tiny norm": Fault(
        "growth", ("division by norm", "normalisation"),
        lambda _, y: tiny_norm(faint(y, 1e-7)),
    ),
    "F.normalize of a tiny row": Fault(
        "growth", ("normalisation",), lambda _, y: functional.normalize(faint(y, 1e-7), dim=-1)
    ),
    "LayerNorm over a near-constant row": Fault(
        "growth", ("layer norm of rows that hardly vary",),
        lambda _, y: functional.layer_norm(3 + (y - y.detach()) + 1e-6 * y.detach(), y.shape[-1:], eps=1e-12),
    ),
    "softmax at a large temperature": Fault(
        "growth", ("multiplication by 1e+05, before a softmax",),
        lambda _, y: y * torch.softmax((y - y.detach()) * 1e5, dim=-1),
    ),
    "log near 0": Fault("growth", ("log of 1e-06",), lambda _, y: y + faint(y, 1e-6).log()),
    "square root near 0": Fault("growth", ("sqrt of 1e-12",), lambda _, y: y + faint(y, 1e-12).sqrt()),
    "reciprocal near 0": Fault(
        "growth", ("division by values down to", "reciprocal of 0.001"), lambda _, y: y + 1e-3 / faint(y, 1e-3)
    ),
    "a power near its pole": Fault(
        "growth", ("power of 1e-06 to the power -0.5",), lambda _, y: y + 1e-3 * faint(y, 1e-6).pow(-0.5)
    ),
    "exp": Fault("growth", ("exp of values",), lambda _, y: y + 1e-3 * (15 + y - y.detach()).exp()),
    "a custom Function": Fault("growth", ("Steep, a custom autograd Function",), lambda _, y: steep(y)),
    "a tiny gain": Fault("vanishing", ("multiplication by 1e-06",), lambda _, y: y * 1e-6),
    "a saturated tanh": Fault(
        "vanishing", ("tanh of values",), lambda _, y: torch.tanh(5 + y - y.detach()) + y.detach()
    ),
}  # fmt: skip


class Around(nn.Module):
    """A block and, in this module's own code, a fault."""

    def __init__(self, block: nn.Module, fault: Fault) -> None:
        super().__init__()
        self.block, self.fault = block, fault

    def __getattr__(self, name: str) -> Any:
        """The model may read attributes of its blocks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, then the fault."""
        x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point())
        out = self.block(*args, **kwargs)
        first = out if isinstance(out, Tensor) else out[0]
        bad = self.fault.plant(x, first)
        return bad if isinstance(out, Tensor) else (bad, *out[1:])


def with_fault(architecture: str, fault: Fault) -> tuple[nn.Module, str]:
    """Return a tiny model with a fault in a block, and the path of the module that holds it."""
    from hfpatch.testing import tiny_model

    model = tiny_model(architecture).train()
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > AT]
    path, blocks = lists[0]
    blocks[AT] = Around(blocks[AT], fault)
    return model, f"{path}.{AT}"


def traced(model: nn.Module) -> Any:
    """Trace a training step."""
    import hfpatch
    from hfpatch.testing import example_inputs

    batch = example_inputs(model)
    model.zero_grad()
    with hfpatch.trace(model) as t:
        model(**batch).loss.backward()
    return t


def exploding_init(architecture: str) -> tuple[nn.Module, str]:
    """Return a tiny model in which the last matrix of a block's MLP starts 1e5 times too large, and its path."""
    from hfpatch.testing import tiny_model

    model = tiny_model(architecture).train()
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > AT]
    path, blocks = lists[0]
    matrices = [(n, p) for n, p in blocks[AT].named_parameters() if p.dim() >= 2]
    name, matrix = matrices[-1]
    with torch.no_grad():
        matrix.mul_(1e5)
    return model, f"{path}.{AT}.{name.rpartition('.')[0]}"


def planted() -> list[Row]:
    """Every fault in every architecture."""
    rows: list[Row] = []
    for kind, fault in FAULTS.items():
        said = [judged(*with_fault(a, fault), fault.symptom, fault.words) for a in ARCHITECTURES]
        rows.append(counted(kind, said))
    unheld = ("gemma3_text", "olmo2")  # they normalise what the matrix gives, so nothing grows
    held = [a for a in ARCHITECTURES if a not in unheld]
    said = [judged(*exploding_init(a), "growth", ("'", "with")) for a in held]
    rows.append(counted("one matrix 1e5 times too large", said))
    rows.append({"fault": "all", **{k: sum(r[k] for r in rows) for k in ("planted", "rightly", "wrongly", "missed")}})
    table("Planted", rows, f"In tiny models of {', '.join(ARCHITECTURES)}.")
    return rows


def judged(model: nn.Module, path: str, symptom: str, words: tuple[str, ...]) -> str:
    """`rightly`, `missed`, or what was said wrongly."""
    torch.manual_seed(0)
    first = traced(model).first_bad
    if first is None:
        return "missed"
    right = first.symptom == symptom and first.module == path and any(w in (first.operation or "") for w in words)
    return "rightly" if right else f"{type(model).__name__}: {first.symptom}: {first.sentence}"


def counted(kind: str, said: list[str]) -> Row:
    """A row of the table."""
    wrong = [s for s in said if s not in ("rightly", "missed")]
    for words in wrong:
        print(f"wrongly: {kind}: {words}")
    return {
        "fault": kind, "planted": len(said), "rightly": said.count("rightly"), "wrongly": len(wrong),
        "missed": said.count("missed"),
    }  # fmt: skip


def tiny(steps: int, part: int, of: int) -> Row:
    """False alarms on a tiny model of every architecture, after some steps of AdamW."""
    from hfpatch.lab.tiny import TASKS
    from hfpatch.testing import example_inputs, tiny_model

    every = [(task, name) for task, known in TASKS.items() for name in sorted(known)][part::of]
    alarms: list[str] = []
    count = 0
    for task, name in every:
        torch.manual_seed(0)
        try:
            model = tiny_model(name, task=task).train()
            batch = example_inputs(model)
            if getattr(model(**batch), "loss", None) is None:
                continue
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for _ in range(steps):
                optimizer.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()
            found = traced(model).findings
        except Exception as error:  # noqa: BLE001  a tiny model that cannot be trained is no subject here
            print(f"left out: {task} {name}: {str(error).splitlines()[:1]}")
            continue
        count += 1
        alarms += [f"{task} {name}: {f.sentence}" for f in found]
    for words in alarms:
        print(f"alarm: {words}")
    return {"models": count, "steps of AdamW before": steps, "alarms": len(alarms)}


def real() -> list[Row]:
    """Real weights, float32: alarms, and the largest factors in one block."""
    from evidence_models import LARGE, ROWS
    from transformers import AutoModelForCausalLM, AutoTokenizer, WhisperForConditionalGeneration

    import hfpatch
    from hfpatch.tracing.growing.flow import changes
    from tests.real.inputs import TEXT, keep_rows
    from tests.real.weights import checkpoint

    rows: list[Row] = []
    for name in ("gemma3-270m", "smollm2-135m", "whisper-base", "qwen2.5-coder-0.5b"):
        folder = checkpoint(name)
        if name == "whisper-base":
            model: Any = WhisperForConditionalGeneration.from_pretrained(folder)
            batch = {"input_features": torch.randn(1, 80, 3000), "labels": torch.arange(100, 108)[None]}
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            ids: Any = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"][:, :TOKENS]
            if model.config.vocab_size > LARGE:  # a head that a CPU would spend most of the step on
                ids = keep_rows(model, ids, ROWS)
            batch = {"input_ids": ids, "labels": ids}
        start = time.process_time()
        with hfpatch.trace(model) as t:
            model(**batch).loss.backward()
        seconds = time.process_time() - start
        blocks = [c for c in changes(t.steps[0]) if c.kind == "block" and c.path.rpartition(".")[2].isdecimal()]
        rows.append(
            {
                "model": name,
                "tokens": batch["labels"].numel(),
                "alarms": len(t.findings),
                **{d: max(c.factor for c in blocks if c.direction == d) for d in ("forward", "backward")},
                "seconds": seconds,
            }
        )
    table("Real weights", rows, "Largest factor of the RMS in one layer.")
    return rows


if __name__ == "__main__":
    main()
