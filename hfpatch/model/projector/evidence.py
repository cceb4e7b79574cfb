"""Evidence that a linear layer is a projector: its name, or an encoder or a norm of its input width."""

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
NOT_PROJECTORS = frozenset(
    {
        "head", "pool", "pooler", "time", "timestep", "cls", "classifier", "contrast", "contrastive", "value", "score",
        "reward", "critic", "gate", "router", "aux", "pos", "position", "modulation", "film",
    }
)  # fmt: skip
"""Words in the names of layers that are not projectors, whatever else the name contains."""

BRANCHES = re.compile(r"(q|k|v|o|qkv|out|in|up|down|gate|c)_proj")
"""Names of layers in attention and MLPs, which are no evidence."""


def by_name(names: Iterable[str]) -> str:
    """Return the first name that suggests a projector; empty if none does, or if one suggests something else."""
    found = ""
    for name in names:
        words = [w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
        if not NOT_PROJECTORS.isdisjoint(words):
            return ""
        suggests = any(p in name.lower() for p in (*PARTS, *SOURCES)) or not WORDS.isdisjoint(words)
        if suggests and not found and not BRANCHES.fullmatch(name):
            found = name
    return found


def by_input(survey: Survey, backbone: Submodel, at: str, reads: int, width: int | None) -> str:
    """Return the encoder or the norm that may feed a module of input width `reads`; empty if none was found.

    The encoder is another submodel with this hidden size, or a divisor of it (stacked frames). The norm is an added
    one beside the module, of this width.
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
    """Return the submodels beside a language model, without those that contain it."""
    return [s for s in survey.submodels if not inside(backbone.path, s.path)]


def names_something_else(names: Iterable[str]) -> bool:
    """True if one of the names suggests a layer other than a projector."""
    return any(not NOT_PROJECTORS.isdisjoint(w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", n)) for n in names)


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class; empty if torch defines it."""
    return "" if type(module).__module__.startswith("torch.") else type(module).__name__
