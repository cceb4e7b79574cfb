"""Proof: a patch's own cases, and one model on one batch, before and after, against float32."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfpatch.errors import HfpatchError, InputError
from hfpatch.given import shown
from hfpatch.model.survey import Survey
from hfpatch.patching.edits import lifted
from hfpatch.patching.language import Case
from hfpatch.patching.registry import Entry
from hfpatch.report import Sheet

if TYPE_CHECKING:
    from hfpatch.patching.apply import Applied

IGNORED = -100
"""Label of a position that does not count, as in transformers."""


@dataclass(frozen=True)
class CaseResult:
    """How a patch did on one of its cases."""

    patch: str
    kind: str
    case: str
    passed: bool
    text: str


def prove_patch(entry: Entry) -> list[CaseResult]:
    """Run every case of a patch."""
    if not isinstance(entry, Entry):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"prove_patch: want an entry of hfpatch.list_patches(), got {shown(entry)}")
    cases = [(c, "repro") for c in entry.patch.repros] + [(c, "left alone") for c in entry.patch.leaves_alone]
    return [try_case(entry, case, kind) for case, kind in cases]


def try_case(entry: Entry, case: Case, kind: str) -> CaseResult:
    """Run one case: a `repro` must show the symptom and lose it, a `left alone` case must not be patched."""
    try:
        return try_repro(entry, case) if kind == "repro" else _try_negative(entry, case)
    except (
        HfpatchError,
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        StopIteration,
    ) as error:
        return CaseResult(entry.id, kind, str(case), False, f"{type(error).__name__}: {error}")


def try_repro(entry: Entry, case: Case) -> CaseResult:
    """Show the symptom on the unpatched case and its absence on the patched one."""
    from hfpatch.patching.apply import carry_out
    from hfpatch.patching.plan import plan_alone
    from hfpatch.patching.trial import build

    trial = build(case)
    before = entry.patch.symptom(trial)
    made = plan_alone(entry, trial.model, asked=True)
    carry_out(trial.model, made)
    after = entry.patch.symptom(trial)
    reason = "" if made.edits else f" ({'; '.join(d.reason for d in made.decisions)})"
    passed = before is not None and after is None and bool(made.edits)
    text = f"before: {before or 'no symptom'}; after: {after or 'cured'}{reason}"
    return CaseResult(entry.id, "repro", str(case), passed, text)


def _try_negative(entry: Entry, case: Case) -> CaseResult:
    from hfpatch.patching.plan import plan_alone
    from hfpatch.patching.trial import build

    made = plan_alone(entry, build(case).model, asked=False)
    decided = "; ".join(f"{d.decided}: {d.reason}" for d in made.decisions)
    return CaseResult(entry.id, "left alone", str(case), not made.edits, decided)


@dataclass(frozen=True)
class Figures:
    """One way to run the model, on one batch.

    Attributes:
        name: `before`, `after`, or a stock alternative.
        loss: Mean cross-entropy of the next token, in nats; NaN where the logits are, or no token has a target.
        kl: Mean KL divergence from the reference to this, in nats a token.
        top1: Share of tokens whose most likely token is the reference's.
        finite: Whether every logit is finite.
    """

    name: str
    loss: float
    kl: float
    top1: float
    finite: bool


@dataclass(frozen=True)
class Proof:
    """A model on a batch: before, after, and the stock alternatives, against float32 with the same weights."""

    reference: Figures
    rows: tuple[Figures, ...]
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> Figures:
        """A row by name: `before`, `after`, `bfloat16 weights`, ..."""
        for row in (self.reference, *self.rows):
            if row.name == name:
                return row
        raise KeyError(f"no row {name!r}; there are: {', '.join(r.name for r in self.rows)}")

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "reference": asdict(self.reference),
            "rows": [asdict(r) for r in self.rows],
            "notes": list(self.notes),
        }

    def sheet(self) -> Sheet:
        """As a table."""
        rows = tuple((r.name, _number(r.loss), _number(r.kl), _percent(r.top1)) for r in (self.reference, *self.rows))
        return Sheet("Verified on this batch", ("run", "loss", "KL to float32", "top-1"), rows, self.notes)

    def __str__(self) -> str:
        return self.sheet().to_text()

    def _repr_html_(self) -> str:
        return self.sheet().to_html()


ALTERNATIVES: tuple[tuple[str, torch.dtype, torch.dtype | None], ...] = (
    ("bfloat16 weights", torch.bfloat16, None),
    ("bfloat16 weights, float16 autocast", torch.bfloat16, torch.float16),
    ("float32 weights, float16 autocast", torch.float32, torch.float16),
)
"""Stock ways to run a model on half-precision hardware: name, dtype of the weights, dtype of autocast."""


def prove(applied: Applied, batch: Mapping[str, Any]) -> Proof:
    """See `Applied.verify`. The model is left as it was: patched, in its mode, its weights untouched."""
    model = applied.model
    log = applied.log()
    if not log:
        raise InputError("nothing is applied to this model (any more), so there is no before and after to verify")
    inputs, device = _placed(model, batch)

    def run(weights: torch.dtype | None, autocast: torch.dtype | None) -> torch.Tensor:
        if weights is None:  # as the caller runs it, an active autocast region included
            return _logits(model, inputs)
        with weights_as(model, weights), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            return _logits(model, _cast_floats(inputs, weights))

    notes: list[str] = []
    with _evaluating(model), torch.no_grad():
        with lifted(model, log):
            exact = run(torch.float32, None)
            targets = _targets(inputs, exact)
            reference = _score("float32 (reference)", exact, exact, targets)
            before = _score("before", run(None, None), exact, targets)
            stock = [_stock(name, lambda w=w, a=a: run(w, a), exact, targets, notes) for name, w, a in ALTERNATIVES]
        after = _score("after", run(None, None), exact, targets)
    notes += [f"{int((targets != IGNORED).sum())} tokens scored; loss and KL in nats a token"]
    quantised = sum(not p.is_floating_point() for p in model.parameters())
    if quantised:
        notes.append(f"{quantised} quantised weights run as they are in every row")
    return Proof(reference, (before, after, *stock), tuple(notes))


def _stock(
    name: str, run: Callable[[], torch.Tensor], exact: torch.Tensor, targets: torch.Tensor, notes: list[str]
) -> Figures:
    try:
        return _score(name, run(), exact, targets)
    except RuntimeError as error:  # an alternative that this model's own code does not take
        notes.append(f"{name}: does not run here ({str(error).splitlines()[0]})")
        return Figures(name, math.nan, math.nan, 0.0, finite=False)


def _placed(model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Any], torch.device]:
    """The batch where the model is."""
    if not isinstance(batch, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"verify wants the model's keyword arguments, such as {{'input_ids': ids}}; got {type(batch).__name__}"
        )
    if used := sorted({"past_key_values", "cache"} & set(batch)):
        raise InputError(f"verify runs the whole sequence in every dtype: leave {used[0]} out of the batch")
    devices = {p.device for p in model.parameters()}
    if any(d.type == "meta" for d in devices):
        raise InputError(
            "some weights are on meta (not loaded, or offloaded): verify runs the model, so load them first"
        )
    device = next(model.parameters()).device
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}, device


@contextlib.contextmanager
def weights_as(model: nn.Module, dtype: torch.dtype) -> Generator[None]:
    """Run a model as if its floating-point weights were in another dtype, block by block. For inference only.

    The weights of a decoder layer are cast when its forward begins and put back when it ends; all others
    (embedding, head, projectors) for the whole run. So the extra memory is theirs and one layer's, not a copy
    of the model. The parameters stay the same objects; only their `.data` is lent.
    """
    survey = Survey(model)
    blocks = [layer for stacks in survey.stacks.values() for stack in stacks for _, layer in stack.layers]
    inside = {id(p) for block in blocks for p in block.parameters()}
    lent: dict[nn.Parameter, torch.Tensor] = {}

    def lend(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.is_floating_point() and parameter not in lent:
                lent[parameter] = parameter.data
                parameter.data = parameter.data.to(dtype)

    def give_back(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in lent:
                parameter.data = lent.pop(parameter)

    # before every other hook of the block, so that casts that follow the weights see the lent ones
    handles = [b.register_forward_pre_hook(lambda m, _a: lend(m.parameters()), prepend=True) for b in blocks]
    handles += [b.register_forward_hook(lambda m, _a, _o: give_back(m.parameters())) for b in blocks]
    try:
        lend(p for p in model.parameters() if id(p) not in inside)
        yield
    finally:
        for handle in handles:
            handle.remove()
        give_back(list(lent))


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    flags = [(m, m.training) for m in model.modules()]
    for module, _ in flags:
        module.training = False
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def _logits(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    try:
        output = model(**inputs)
    except (TypeError, ValueError, IndexError) as error:
        raise InputError(f"the batch does not fit {type(model).__name__}: {error}") from error
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if logits is None and isinstance(output, Mapping):
        logits = output.get("logits")
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        raise InputError(f"{type(model).__name__} gave no logits [batch, tokens, vocabulary]; verify compares those")
    return logits.detach()


def _targets(inputs: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
    """Next token for each position `[batch, tokens]`, `IGNORED` where there is none or it is padding."""
    labels = inputs.get("labels")
    if labels is None:
        labels = inputs.get("input_ids")
        mask = inputs.get("attention_mask")
        if isinstance(labels, torch.Tensor) and isinstance(mask, torch.Tensor) and mask.shape == labels.shape:
            labels = labels.masked_fill(mask == 0, IGNORED)
    out = torch.full(logits.shape[:2], IGNORED, device=logits.device)
    if isinstance(labels, torch.Tensor) and labels.dim() == 2:
        width = min(labels.shape[1], logits.shape[1])  # a composite may put frames before the text
        out[:, -width:-1] = labels[:, -width:][:, 1:].to(out.device)
    return out


def _score(name: str, logits: torch.Tensor, exact: torch.Tensor, targets: torch.Tensor) -> Figures:
    """Figures over the positions that have a target; over all of them where none has. In float64, by chunks."""
    keep = (targets != IGNORED) if bool((targets != IGNORED).any()) else torch.ones_like(targets, dtype=torch.bool)
    mine, theirs, wanted = logits[keep], exact[keep], targets[keep]
    loss = kl = top1 = 0.0
    for start in range(0, len(mine), 256):
        part = slice(start, start + 256)
        p, q = theirs[part].double().log_softmax(-1), mine[part].double().log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
        top1 += float((p.argmax(-1) == q.argmax(-1)).sum()) if bool(q.isfinite().all()) else 0.0
        valid = wanted[part] != IGNORED
        loss -= float(q[valid].gather(-1, wanted[part][valid].unsqueeze(-1)).sum())
    count, scored = len(mine), int((targets != IGNORED).sum())
    return Figures(name, loss / scored if scored else math.nan, kl / count, top1 / count, bool(logits.isfinite().all()))


def _cast_floats(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def _number(value: float) -> str:
    return "nan" if math.isnan(value) else f"{value:.3f}" if value >= 0.1 else f"{value:.1e}"


def _percent(value: float) -> str:
    return f"{value:.2%}"
