"""An image for each row of a batch, in the format that an architecture reads."""

from __future__ import annotations

from typing import Any

import torch

from hfpatch.lab.example_text import BATCH, wave

GRIDS: dict[str, int] = dict.fromkeys(("gemma4_unified", "inkling2", "inkling2_loop"), 2)
"""Architecture -> patches in height and in width, if not 4."""

SHAPES: dict[str, tuple[int, ...]] = {
    "fuyu": (BATCH, 16, 48),
    "gemma4_unified": (BATCH, 4, 432),
    "inkling_mm_model": (BATCH * 4, 2, 4, 4, 3),
    "molmo2": (BATCH, 16, 48),
    **dict.fromkeys(("inkling2", "inkling2_loop"), (BATCH * 4, 8, 8, 3)),
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), (1, 3, 4, BATCH * 64)),
}
"""Architecture -> shape of `pixel_values`, if it has a special one."""

FOLDED = frozenset({"kimi_k25", "paddleocr_vl"})
"""Architectures that read a list of patches as small images, not as flat rows."""

TILES: dict[str, int] = {
    **dict.fromkeys(("granite_docling", "idefics", "idefics2", "idefics3", "pi0", "smolvlm"), 1),
    **dict.fromkeys(("granite4_vision", "llava_next", "llava_next_video", "llava_onevision"), 2),
    "mllama": 4,
}
"""Architecture -> images per row, or tiles per image, if `pixel_values` has a dimension for them."""

WHOLE_TILES = frozenset({"granite_docling", "pi0"})
"""Architectures whose mask marks tiles, not pixels."""

NO_SIZES = frozenset({"llava"})
"""Architectures whose forward passes `image_sizes` on to a tower that does not use it here."""


def images(config: Any, reads: frozenset[str]) -> dict[str, Any]:
    """Return the image inputs, one image per row, among the arguments `reads` of a forward; empty if it has none."""
    if "pixel_values" not in reads:
        return {}
    vision = getattr(config, "vision_config", None) or config
    channels = _size(vision, "num_channels", "in_channels", default=3)
    patch, side = _size(vision, "patch_size", default=4), _size(vision, "image_size", default=16)
    grid = GRIDS.get(config.model_type, 4)
    made: dict[str, Any] = {"image_sizes": torch.tensor([[side, side]] * BATCH)}
    made |= dict.fromkeys(("image_grid_hw", "spatial_shapes", "target_sizes"), torch.tensor([[grid, grid]] * BATCH))
    if {"image_grid_thw", "image_grid_hw"} & reads:
        depth = _size(vision, "temporal_patch_size", "patch_temporal", default=1)
        shape = (channels, patch, patch) if config.model_type in FOLDED else (channels * depth * patch * patch,)
        made["pixel_values"] = wave(BATCH * grid * grid, *shape)
        made["image_grid_thw"] = torch.tensor([[1, grid, grid]] * BATCH)
        made["image_merge_sizes"] = torch.ones(BATCH, dtype=torch.long)
    elif {"spatial_shapes", "image_position_ids"} & reads:
        made["pixel_values"] = wave(BATCH, grid * grid, channels * patch * patch)
        made["pixel_attention_mask"] = torch.ones(BATCH, grid * grid, dtype=torch.long)
        made["image_position_ids"] = places(grid)
    elif tiles := TILES.get(config.model_type):
        made["pixel_values"] = wave(BATCH, tiles, channels, side, side)
        whole = config.model_type in WHOLE_TILES
        made["pixel_attention_mask"] = torch.ones(BATCH, tiles, *(() if whole else (side, side))).bool()
    else:
        made["pixel_values"] = made["high_res_pixel_values"] = wave(BATCH, channels, side, side)
        made["image_token_pooling"] = torch.arange(BATCH * 16).reshape(-1, 4)  # four patches to a token
        made["image_grids"] = torch.tensor([[2, 2, 0, 0]] * BATCH)
    if shape := SHAPES.get(config.model_type):
        made["pixel_values"] = wave(*shape)
    return {k: v for k, v in made.items() if k in reads and not (k == "image_sizes" and config.model_type in NO_SIZES)}


def places(grid: int) -> torch.Tensor:
    """Return the row and column of each patch of an image, [2, grid * grid, 2]."""
    return torch.cartesian_prod(torch.arange(grid), torch.arange(grid)).expand(BATCH, -1, -1)


def _size(config: Any, *names: str, default: int) -> int:
    size = next((value for name in names if (value := getattr(config, name, None)) is not None), default)
    return int(size[0]) if isinstance(size, list | tuple) else int(size)
