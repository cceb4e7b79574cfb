"""Where a residual stream leaves its layers: the maps and norms outside all stacks that may read it.

A decoder's stream ends in a norm. A tower's may be read raw: by its pooling, by a projector of the model around it
(LLaVA takes CLIP's hidden states before any norm), by the keys and values of another part.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from hfpatch.model.embed import find_embedding
from hfpatch.model.norms import acts_as_norm
from hfpatch.model.roles import Place
from hfpatch.model.survey import Survey
from hfpatch.model.walk import Submodel, dims, inside

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def leaves(path: str, module: nn.Module) -> Iterator[Place]:
    """Yield the modules with weights and without children in a module, with their paths. Embeddings are left out."""
    for name, inner in module.named_modules():
        if isinstance(inner, nn.Embedding) or next(inner.children(), None) is not None:
            continue
        if any(dims(p) for p in inner.parameters(recurse=False)):
            yield (f"{path}.{name}" if path and name else path or name), inner


def edges(survey: Survey, submodel: Submodel) -> Iterator[Place]:
    """Yield the maps and norms that may read the stream of a submodel beyond its layers.

    Those are outside the layers of all stacks: in the submodel, in the models around it and in the caller's own
    modules. If a norm ends each stack of a submodel that reads tokens, only the maps beside its layers may read it.
    """
    stacks = survey.stacks.get(submodel.path, ())
    if not stacks:
        return
    if find_embedding(submodel.model) is not None and all(s.final_norm for s in stacks):
        yield from _beside(survey, submodel)
        return
    lists = [s.path for found in survey.stacks.values() for s in found]
    finals = {s.final_norm[0] for found in survey.stacks.values() for s in found if s.final_norm}
    around = [s for s in survey.submodels if not inside(submodel.path, s.path) and s is not submodel]
    others = [s.path for s in around if find_embedding(s.model) is not None]
    heads = {id(head) for s in survey.submodels if (head := _head(s)) is not None}
    for path, module in survey.modules.items():
        if any(inside(path, each) for each in (*lists, *others)) or path in finals or id(module) in heads:
            continue
        if next(module.children(), None) is None:
            yield from leaves(path, module)


def _beside(survey: Survey, submodel: Submodel) -> Iterator[Place]:
    """Yield the maps beside the lists of layers: OPT's and Gemma 3n's projections."""
    head = _head(submodel)
    for stack in survey.stacks[submodel.path]:
        parent = stack.path.rpartition(".")[0]
        for name, child in survey.modules[parent].named_children():
            path = f"{parent}.{name}" if parent else name
            if path != stack.path and child is not head and not acts_as_norm(child):
                yield from (
                    (p, m) for p, m in leaves(path, child) if is_map(m) and not isinstance(child, PreTrainedModel)
                )


def _head(submodel: Submodel) -> nn.Module | None:
    try:
        return submodel.model.get_output_embeddings()
    except (AttributeError, NotImplementedError, TypeError):
        return None


def is_map(module: nn.Module) -> bool:
    """True for a linear layer, a convolution or a norm."""
    return isinstance(module, (nn.Linear, *CONVOLUTIONS)) or acts_as_norm(module)
