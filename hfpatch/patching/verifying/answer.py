"""Runs a model on a batch for its logits and loss, and compares these with the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpatch.errors import InputError
from hfpatch.model.source import REJECTIONS
from hfpatch.model.survey import Survey
from hfpatch.model.wrapping import PARALLEL, unwrap
from hfpatch.patching.verifying.figures import Figures

IGNORED = -100
"""Label of a position that the loss ignores, as in transformers."""


SHARDED = ("DTensor", "FlatParameter")
"""Classes of parameters that hold a part of a weight, or parts of several weights."""


@dataclass(frozen=True)
class Answer:
    """The output of one run.

    Attributes:
        logits: `[batch, tokens, vocabulary]`; `[batch, 1, classes]` of a model that classifies whole rows.
        loss: The model's own loss, a scalar; None if it returned none.
        auxiliary: The auxiliary loss of experts, before its coefficient; None if the model returned none.
    """

    logits: torch.Tensor
    loss: torch.Tensor | None
    auxiliary: torch.Tensor | None


@dataclass(frozen=True)
class Batch:
    """The input of a run.

    Attributes:
        inputs: Keyword arguments, on the model's device.
        real: Boolean `[batch, tokens]`, True for tokens whose logits are compared; None for all.
        note: A sentence about labels that were added or removed; empty if they are unchanged.
    """

    inputs: dict[str, Any]
    real: torch.Tensor | None
    note: str = ""


def prepared(model: nn.Module, batch: Any, asks: str = "verify") -> Batch:
    """Return the batch on the model's device; a causal model's batch without labels gets them.

    Args:
        model: The model.
        batch: Its keyword arguments.
        asks: The caller, for messages.

    Raises:
        InputError: The batch is not a mapping or holds a cache, or the model cannot be run.
    """
    if not isinstance(batch, Mapping):
        raise InputError(
            f"{asks}: batch must hold the model's keyword arguments, such as {{'input_ids': ids}}; got "
            f"{type(batch).__name__}"
        )
    given: dict[str, Any] = dict(batch)  # pyright: ignore[reportUnknownArgumentType]
    if used := sorted({"past_key_values", "cache"} & set(given)):
        raise InputError(f"{asks}: the whole sequence is run: leave {used[0]} out of the batch")
    parameters = list(model.parameters())
    if not parameters:
        raise InputError(f"{type(model).__name__} has no parameters: there is no dtype to compare")
    if any(p.device.type == "meta" for p in parameters):
        raise InputError(
            f"some weights are on meta (not loaded, or offloaded), and {asks} runs the model: load them first"
        )
    if any(type(p).__name__ in SHARDED for p in parameters):
        raise InputError(
            f"the weights are sharded over several ranks (FSDP, tensor parallel), so {asks} cannot cast them: call it "
            "before the model is sharded"
        )
    device = parameters[0].device
    inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    survey = Survey(unwrap(model, PARALLEL))
    note = ""
    if "labels" in inputs and not _takes(survey, "labels", by_name=False):
        note = "the model takes no labels, so it returns no loss"
        return Batch({k: v for k, v in inputs.items() if k != "labels"}, _compared(survey, inputs), note)
    if "labels" not in inputs:
        labels = _own_labels(survey, inputs)
        if labels is not None:
            inputs["labels"] = labels
            note = "the batch has no labels: input_ids were given as labels, without padding"
        else:
            note = "the batch has no labels, so there is no loss"
    return Batch(inputs, _compared(survey, inputs), note)


def _takes(survey: Survey, name: str, *, by_name: bool) -> bool:
    """True if the forward of the wrapped model takes an argument: by its name or, unless `by_name`, by `**kwargs`."""
    import inspect

    inner = unwrap(survey.root, ("torch.compile", "PEFT"))
    parameters = inspect.signature(inner.forward).parameters
    catches = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return name in parameters or (catches and not by_name)


def _decodes(survey: Survey) -> str:
    """Return `causal` or `encoder-decoder`, for the part that generates text; empty if there is none."""
    inner = unwrap(survey.root, ("torch.compile", "PEFT"))
    models = [inner] if isinstance(inner, PreTrainedModel) else [s.model for s in survey.submodels]
    if isinstance(inner, PreTrainedModel) and not inner.can_generate():  # a composite of the user's own
        models += [s.model for s in survey.submodels]
    writers = [m for m in models if m.can_generate()]
    if any(getattr(m.config, "is_encoder_decoder", False) for m in writers):
        return "encoder-decoder"
    return "causal" if writers else ""


def _own_labels(survey: Survey, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or _decodes(survey) != "causal" or not _takes(survey, "labels", by_name=True):
        return None
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        return ids.masked_fill(mask == 0, IGNORED)
    return ids.clone()


def _compared(survey: Survey, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the positions `[batch, tokens]` whose logits are compared: real tokens, with a label if there are labels.

    None stands for all positions. A causal model's logits are one position before their label.
    """
    kind = _decodes(survey)
    labels = inputs.get("labels")
    mask = inputs.get("decoder_attention_mask" if kind == "encoder-decoder" else "attention_mask")
    labels = labels if isinstance(labels, torch.Tensor) and labels.dim() == 2 else None
    real = mask.bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    if labels is None or not bool((labels != IGNORED).any()):
        return real
    wanted = labels != IGNORED
    if kind == "causal":
        wanted = torch.cat([wanted[:, 1:], torch.zeros_like(wanted[:, :1])], 1)
    if real is not None and real.shape == wanted.shape and bool((wanted & real.to(wanted.device)).any()):
        wanted = wanted & real.to(wanted.device)
    return wanted if bool(wanted.any()) else real


def answer(model: nn.Module, inputs: Mapping[str, Any]) -> Answer:
    """Call a model.

    Raises:
        InputError: The model rejects the batch, or returns no logits.
    """
    found = _call(model, inputs)
    if found.logits is None and "labels" in inputs:  # a fused loss computes no logits
        bare = _call(model, {k: v for k, v in inputs.items() if k != "labels"})
        found = _Found(bare.logits, found.loss, found.auxiliary)
    logits = found.logits
    if logits is not None and logits.dim() == 2:
        logits = logits.unsqueeze(1)
    if logits is None or logits.dim() != 3:
        raise InputError(
            f"{type(model).__name__} returned no logits [batch, tokens, vocabulary], which verify compares"
        )
    return Answer(logits.detach(), found.loss, found.auxiliary)


@dataclass(frozen=True)
class _Found:
    logits: torch.Tensor | None
    loss: torch.Tensor | None
    auxiliary: torch.Tensor | None


def _call(model: nn.Module, inputs: Mapping[str, Any]) -> _Found:
    try:
        output: Any = unwrap(model, PARALLEL)(**inputs)
    except RuntimeError:
        raise
    except REJECTIONS as error:
        raise InputError(f"the batch does not fit {type(model).__name__}: {error}") from error
    if isinstance(output, torch.Tensor):
        return _Found(output, None, None)
    if isinstance(output, (tuple, list)):
        tensors = [v for v in output if isinstance(v, torch.Tensor)]  # pyright: ignore[reportUnknownVariableType]
        loss = next((t for t in tensors if t.numel() == 1), None) if "labels" in inputs else None
        return _Found(next((t for t in tensors if t.dim() >= 2), None), loss, None)

    def named(name: str) -> torch.Tensor | None:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return value if isinstance(value, torch.Tensor) else None

    loss, extra = named("loss"), named("aux_loss")
    loss = None if loss is None else loss.detach().mean()
    return _Found(named("logits"), loss, None if extra is None else extra.detach().mean())


def score(name: str, mine: Answer, exact: Answer, real: torch.Tensor | None) -> Figures:
    """Return the figures of a run compared with the reference, over real positions. Computed in float64, by chunks."""
    keep = _positions(mine.logits, real)
    ours, theirs = mine.logits[keep], exact.logits[keep]
    kl = top1 = 0.0
    for start in range(0, len(ours), 256):
        part = slice(start, start + 256)
        p, q = theirs[part].double().log_softmax(-1), ours[part].double().log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
        top1 += float((p.argmax(-1) == q.argmax(-1)).sum()) if bool(q.isfinite().all()) else 0.0
    return Figures(
        name,
        None if mine.loss is None else float(mine.loss),
        kl / len(ours),
        top1 / len(ours),
        bool(mine.logits.isfinite().all()),
        auxiliary=None if mine.auxiliary is None else float(mine.auxiliary),
    )


def compared(logits: torch.Tensor, real: torch.Tensor | None) -> int:
    """Return the number of positions that are compared."""
    return int(_positions(logits, real).sum())


def _positions(logits: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    keep = torch.zeros(logits.shape[:2], dtype=torch.bool, device=logits.device)
    if real is not None and real.shape[0] == keep.shape[0]:
        width = min(real.shape[1], keep.shape[1])  # a composite may put frames before the text
        keep[:, -width:] = real[:, -width:].to(keep.device)
    return keep if bool(keep.any()) else torch.ones_like(keep)
