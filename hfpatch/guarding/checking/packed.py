"""Several documents in one row: whether one reads another, and whether positions begin where the model's own do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hfpatch.guarding.checking.forward_pass import Passed, apart
from hfpatch.guarding.checking.hazard import Hazard
from hfpatch.guarding.checking.measurement import CACHE, Measurement
from hfpatch.guarding.checking.rehearsal import FORWARD
from hfpatch.guarding.checking.tried import PATCH
from hfpatch.lab.leaking import keeping_documents
from hfpatch.lab.leaking import packed as documents_in

ENOUGH = 3
"""Tokens of the first document on which its positions are looked at."""


@dataclass(frozen=True)
class Packed:
    """A row of a batch that holds documents one after the other.

    Attributes:
        row: Its index.
        second: Where its second document begins; None if it holds one.
        real: [positions], True at tokens that are no padding.
    """

    row: int
    second: int | None
    real: torch.Tensor


def documents(found: Measurement) -> Iterator[Hazard]:
    """The first document of a packed row is changed; the logits of the others must stay."""
    if found.step.raised is not None or (packed := _packed(found)) is None:
        return
    if packed.second is not None:
        yield from _leak(found, packed, packed.second)
    yield from _offset(found, packed)


def _packed(found: Measurement) -> Packed | None:
    """Return the first row with several documents, or else the first row; None for a batch without `position_ids`."""
    ids, positions, mask = (found.batch.get(k) for k in ("input_ids", "position_ids", "attention_mask"))
    if not isinstance(ids, torch.Tensor) or not isinstance(positions, torch.Tensor):
        return None
    if ids.dim() != 2 or positions.shape != ids.shape or not ids.numel():
        return None
    real = torch.ones_like(ids, dtype=torch.bool)
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        real = mask.bool()
    begins = torch.zeros_like(real)
    begins[:, 1:] = (positions[:, 1:] <= positions[:, :-1]) & real[:, 1:] & real[:, :-1]
    several = begins.any(dim=1).nonzero().flatten().tolist()
    if not several:
        return Packed(0, None, real[0])
    row = several[0]
    return Packed(row, int(begins[row].nonzero()[0]), real[row])


def _leak(found: Measurement, packed: Packed, second: int) -> Iterator[Hazard]:
    if not found.affords(FORWARD + found.evaluation_cost):
        found.missed.append("whether packed documents read each other: a check may cost 3.5 steps")
        return
    moved = _moved(found, packed, second)
    if isinstance(moved, str):
        found.missed.append(f"whether packed documents read each other: {moved}")
        return
    limit = found.rounding
    if moved <= limit:
        found.said.append(
            f"that packed documents are kept apart: with another first document the logits of the others move by "
            f"{moved:.1g} of their size"
        )
        return
    yield Hazard(
        "documents-leak",
        certain=True,
        reason=f"this row holds several documents, and with another first document the logits of the others move by "
        f"{moved:.2g} of their size: they read each other (attention is {_attention(found)})",
        change=_kept_apart(found, packed, second, limit),
    )


def _kept_apart(found: Measurement, packed: Packed, second: int, limit: float) -> str:
    """Return advice under which the documents are kept apart, tried here; else to pad them."""
    if (pairs := _patched(found)) and found.affords(2 * FORWARD):
        moved = _moved(found, packed, second, patched=pairs)
        if not isinstance(moved, str) and moved <= limit:
            return f"{PATCH.format('packed-attention')} (tried on this batch: nothing moves)"
    asked = found.subject.settings is not None and found.subject.settings.cache is False
    if not asked and found.takes_cache and found.affords(2 * FORWARD):
        moved = _moved(found, packed, second, {CACHE: False})
        if not isinstance(moved, str) and moved <= limit:
            return "model.config.use_cache = False while training (tried on this batch: nothing moves)"
    return (
        "give each document a row of its own, padded (DataCollatorForLanguageModeling, or packing=False), or use an "
        "attention implementation that takes the documents' lengths (flash_attention_2); not tried"
    )


def _patched(found: Measurement) -> dict[nn.Module, bool]:
    """Return the models whose calls `packed-attention` would change, and whether by a mask."""
    survey = found.subject.survey
    tried = [packed for submodel in survey.submodels if (packed := documents_in(survey, submodel)) is not None]
    return {survey.modules[each.model]: each.masked for each in tried if each.masked is not None}


def _moved(
    found: Measurement,
    packed: Packed,
    second: int,
    changed: Mapping[str, Any] = MappingProxyType({}),
    patched: Mapping[nn.Module, bool] = MappingProxyType({}),
) -> float | str:
    """Return by how much the logits after the first document move if it is another one, or why that is not known."""
    ids: torch.Tensor = found.batch["input_ids"]
    other = ids.clone()
    rest = ids[packed.row, second:]
    times = -(-second // len(rest))
    tokens = rest.repeat(times)[:second]
    same = tokens == ids[packed.row, :second]
    other[packed.row, :second] = torch.where(same, rest.flip(0).repeat(times)[:second], tokens)
    if torch.equal(other, ids):
        return "the documents of this batch are equal"
    with keeping_documents(patched):
        before = found.forward(changed) if changed or patched else found.evaluated
        after = found.forward({**changed, "input_ids": other})
    one, two = (_row(run, packed.row, ids.shape[1]) for run in (before, after))
    if isinstance(one, str) or isinstance(two, str):
        return one if isinstance(one, str) else str(two)
    kept = packed.real[second:].to(one.device)
    return apart(one[second:][kept], two[second:][kept])


def _offset(found: Measurement, packed: Packed) -> Iterator[Hazard]:
    """The first document alone, with its positions and without: a model that counts from elsewhere differs."""
    what = "whether positions begin where the model's own do"
    ids, positions = (found.batch[k][packed.row : packed.row + 1] for k in ("input_ids", "position_ids"))
    length = min(ids.shape[1] if packed.second is None else packed.second, ENOUGH)
    cost = FORWARD * length / found.batch["input_ids"].numel()
    if not bool(packed.real[:length].all()):
        found.missed.append(f"{what}: the first document is padded")
        return
    if not found.affords(2 * cost):
        found.missed.append(f"{what}: a check may cost 3.5 steps")
        return
    alone = {**dict.fromkeys(found.batch), "input_ids": ids[:, :length]}
    given = {**alone, "position_ids": positions[:, :length]}
    one, two = (_row(found.forward(each, cost=cost), 0, length) for each in (alone, given))
    if isinstance(one, str) or isinstance(two, str):
        found.missed.append(f"{what}: {one if isinstance(one, str) else two}")
        return
    difference = apart(one, two)
    if difference <= found.rounding:
        found.said.append("that positions begin where the model's own do")
        return
    yield Hazard(
        "positions-offset",
        certain=True,
        reason=f"position_ids begin at {int(positions[0, 0])}, and without them the first document's logits are "
        f"{difference:.2g} of their size away: the model itself counts from elsewhere (RoBERTa's kind from "
        "padding_idx + 1)",
        change="add the model's own first position to position_ids, or leave position_ids out and pad the documents",
    )


def _row(run: Passed, row: int, length: int) -> torch.Tensor | str:
    """Return the logits [positions, vocabulary] of a row, or why there are none."""
    if run.failed:
        return run.failed
    if run.logits is None or run.logits.dim() != 3 or run.logits.shape[1] != length:
        return "the output holds no logits for each position"
    return run.logits[row]


def _attention(found: Measurement) -> str:
    from hfpatch.inspecting import facts

    names = dict.fromkeys(row.implementation for row in facts.attention(found.subject.survey))
    return ", ".join(names) or "its own"
