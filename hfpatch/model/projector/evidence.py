"""What speaks for a linear layer being a projector: its name, or what stands before it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from hfpatch.model.norms import is_norm
from hfpatch.model.survey import Survey
from hfpatch.model.walk import Submodel, inside

PARTS = ("proj", "connector", "adapter", "adaptor", "merger", "bridge", "align", "resampler", "perceiver", "qformer")
SOURCES = ("speech", "audio", "vision", "visual", "image", "video", "multimodal", "modality")
WORDS = frozenset({"mm", "img"})
OTHERWISE = frozenset(
    {
        "head", "pool", "pooler", "time", "timestep", "cls", "classifier", "contrast", "contrastive", "value", "score",
        "reward", "critic", "gate", "router", "aux", "pos", "position", "modulation", "film",
    }
)  # fmt: skip
"""Words for layers that are something else, whatever else their name says."""

BRANCHES = re.compile(r"(q|k|v|o|qkv|out|in|up|down|gate|c)_proj")
"""Names of layers of attention and MLPs: no evidence."""


def by_name(names: Iterable[str]) -> str:
    """The first of some names that is one for a projector; empty if there is none, or one is for something else."""
    found = ""
    for name in names:
        words = [w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
        if not OTHERWISE.isdisjoint(words):
            return ""
        telling = any(p in name.lower() for p in (*PARTS, *SOURCES)) or not WORDS.isdisjoint(words)
        if telling and not found and not BRANCHES.fullmatch(name):
            found = name
    return found


def by_place(survey: Survey, backbone: Submodel, at: str, reads: int, width: int | None) -> str:
    """What stands before a module that reads `reads` features: an encoder, or a norm beside it; empty if nothing.

    An encoder is another submodel whose states, or some frames of them stacked, have this width.
    """
    for other in encoders(survey, backbone):
        size = getattr(other.model.config, "hidden_size", None)
        if isinstance(size, int) and size > 0 and reads % size == 0:
            return other.place
    home = at.rpartition(".")[0]
    for path, module in survey.added.items():
        sizes = {p.numel() for p in module.parameters(recurse=False)}
        if path.rpartition(".")[0] == home and is_norm(module) and sizes == {reads} and reads != width:
            return path
    return ""


def encoders(survey: Survey, backbone: Submodel) -> list[Submodel]:
    """Submodels beside a language model: not itself, and none that holds it."""
    return [s for s in survey.submodels if not inside(backbone.path, s.path)]


def is_otherwise(names: Iterable[str]) -> bool:
    """Whether one of some names is for something else than a projector."""
    return any(not OTHERWISE.isdisjoint(w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", n)) for n in names)


def own_name(module: nn.Module) -> str:
    """Name of a module's class, where it is not torch's."""
    return "" if type(module).__module__.startswith("torch.") else type(module).__name__
