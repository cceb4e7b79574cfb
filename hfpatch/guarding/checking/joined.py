"""Hazards of what a hand-written model hands to its language model: embeddings scaled twice, vectors too large."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from hfpatch.guarding.checking.hazard import Hazard
from hfpatch.guarding.checking.measurement import Measurement
from hfpatch.guarding.checking.rehearsal import stream_into
from hfpatch.inspecting import facts
from hfpatch.model.walk import stock_class

PARALLEL = 0.999
"""Cosine above which a vector counts as a multiple of a token's embedding."""
OTHER_SCALE = 1.5
LOUD = 30.0
"""Times the size of token embeddings at which what is joined to them drowns them."""


def joins(found: Measurement) -> Iterator[Hazard]:
    """Token embeddings that a hand-written model hands to its language model in another size than that gives them."""
    survey, ids = found.subject.survey, found.batch.get("input_ids")
    if isinstance(found.subject.inner, PreTrainedModel) and stock_class(found.subject.inner) is type(
        found.subject.inner
    ):
        return
    for path, stream in found.step.came_in.items():
        model = survey.modules[path]
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or bool((ids[0] < 0).any()):
            continue
        own = stream_into(model, found.first_layers[path], ids[:1])
        if own is None or own.shape[-1] != stream.shape[-1]:
            continue
        factor, others = _factor(stream, own)
        if factor is None:
            continue
        place = path or type(model).__name__
        found.said.append(f"the size of the token embeddings where they enter {place}, {factor:.3g} times its own")
        if not 1 / OTHER_SCALE < factor < OTHER_SCALE:
            scale = next((e.scale for e in facts.embeddings(survey) if e.submodel == path), None)
            twice = " (its own scale, applied twice)" if scale and math.isclose(factor, scale, rel_tol=0.02) else ""
            yield Hazard(
                "embedding-scale",
                certain=True,
                reason=f"token embeddings enter the first layer of {place} {factor:.3g} times as large as {place} "
                f"itself makes them from the same ids{twice}",
                change="pass the output of hfpatch.embed_tokens(model)(input_ids) unscaled: a model that scales its "
                "embeddings scales inputs_embeds too",
            )
        elif others is not None and others > LOUD:
            yield Hazard(
                "joined-too-large",
                certain=False,
                reason=f"the vectors beside them in the first row are {others:.3g} times as large (RMS) as the token "
                f"embeddings where they enter {place}",
                change="hfpatch.plan(model, only=['projection-init']) says what drawing the projector anew would do",
            )


def _factor(stream: torch.Tensor, table: torch.Tensor) -> tuple[float | None, float | None]:
    """Return by how much rows of a stream are multiples of rows of a table, and how large the other rows are.

    Args:
        stream: [positions, width].
        table: [tokens, width].

    Returns:
        The median factor over the rows that are such multiples, None if no row is; the RMS of the other rows over that
        of these, None without other rows.
    """
    cosine = functional.normalize(stream, dim=-1) @ functional.normalize(table, dim=-1).T
    best, which = cosine.max(dim=-1)
    same = best > PARALLEL
    if not bool(same.any()):
        return None, None
    factors = stream[same].norm(dim=-1) / table[which[same]].norm(dim=-1)
    rms = stream.square().mean(dim=-1).sqrt()
    others = float(rms[~same].median() / rms[same].median()) if not bool(same.all()) else None
    return float(factors.median()), others
