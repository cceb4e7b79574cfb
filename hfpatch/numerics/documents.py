"""Documents packed into one row, told by positions that begin anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.masking_utils import create_masks_for_generate


def documents_of(positions: torch.Tensor) -> torch.Tensor:
    """Return the number of each token's document in its row, [batch, positions].

    A document begins where positions do not count on by 1, as transformers itself reads them.

    Args:
        positions: Position ids, [batch, positions].
    """
    begins = torch.zeros_like(positions)
    begins[:, 1:] = (positions[:, 1:] != positions[:, :-1] + 1).long()
    return begins.cumsum(-1)


def kept_apart(model: Any, kwargs: Mapping[str, Any], *, masked: bool) -> dict[str, Any] | None:
    """Return the arguments of a language model with which packed documents do not read each other.

    Args:
        model: The model that is called: one of transformers without its head.
        kwargs: `position_ids` [batch, positions], `attention_mask`, `past_key_values` and others.
        masked: True to pass the masks that transformers makes from the positions, one for each kind of layer; False if
            the model makes them itself where it has no cache.

    Returns:
        The arguments; None, which changes nothing, for rows of one document each, padded rows, and a call with a cache.
    """
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or kwargs.get("past_key_values") is not None:
        return None
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool(mask.all())):
        return None
    if not bool(documents_of(positions).any()):
        return None
    apart = {**kwargs, "use_cache": False, "attention_mask": None}
    if masked:
        given = kwargs.get("inputs_embeds")
        rows = given if given is not None else kwargs["input_ids"]
        like = torch.empty(*rows.shape[:2], 0, dtype=model.dtype, device=rows.device)
        apart["attention_mask"] = create_masks_for_generate(model.config, like, None, None, positions)
    return apart
