"""Where a model's blocks are, which submodel each belongs to, and what that submodel is there for.

All paths are those of the model as it was before any adapter: what PEFT put in a module's place is looked
through, because PEFT matches its target names against these paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfpatch.compat.modules import children
from hfpatch.lora.linear import features
from hfpatch.lora.places import ancestors, frame_of, own_parameters, places
from hfpatch.model.embed import find_embedding, resolve
from hfpatch.model.norms import is_norm
from hfpatch.model.survey import Survey
from hfpatch.model.walk import Submodel, dims, inside

BRIDGE = re.compile(r"q_?former|resampler|perceiver|projector|connector|abstractor|merger")
AUDIO = re.compile(r"audio|speech|input_features|input_values")
VISION = re.compile(r"pixel|patches|image|video|vision|visual|vit|clip|vq")


class Layout:
    """The blocks of a model and whose they are. Changes nothing.

    A *home* is the path of what blocks belong to: a submodel, or a part of one with a config or a name of its own.

    Args:
        given: A module, however wrapped, with adapters or without.
        submodel: Path or architecture of the language model meant, where there are several.
    """

    def __init__(self, given: object, submodel: str | None = None) -> None:
        self.frame = frame_of(given)
        self.survey = Survey(self.frame)
        self.places = places(self.frame)
        self.wanted = submodel
        self.expert_counts: dict[str, frozenset[int]] = {}

    @cached_property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """`(in, out)` of every linear map, by path."""
        return {path: size for path, place in self.places.items() if (size := features(place.module)) is not None}

    @cached_property
    def models(self) -> dict[str, PreTrainedModel]:
        """The submodels, by path."""
        return {s.path: s.model for s in self.survey.submodels}

    @cached_property
    def language(self) -> Submodel:
        """The language model.

        Raises:
            NoEmbeddingError: There is none, or there are several and none is named.
        """
        readers = {id(find_embedding(s.model)): s for s in self.survey.submodels if _reads_tokens(s)}
        if self.wanted is None and len(readers) > 1 and (main := self._main(readers)) is not None:
            return main
        if self.wanted is None and len(readers) == 1:
            return next(iter(readers.values()))
        return resolve(self.survey, self.wanted)[0]

    def _main(self, readers: dict[int, Submodel]) -> Submodel | None:
        """Which of several token readers the model around them says is its text model."""
        root = self.survey.submodels[0]
        if not all(inside(s.path, root.path) for s in self.survey.submodels):
            return None
        embedding = find_embedding(root.model)
        if embedding is not None:
            return readers.get(id(embedding))
        try:
            text: Any = root.model.config.get_text_config()
        except ValueError:  # several, none of them the one
            return None
        return next((s for s in reversed(readers.values()) if s.model.config is text), None)

    @cached_property
    def language_homes(self) -> frozenset[str]:
        """Homes of the language model's blocks: of an encoder-decoder all that is no tower.

        So too where a text model is nothing but submodels (a byte model around a transformer). Blocks that the model
        around a language model has of its own, under no tower's name, work on its stream as well.
        """
        main = self.language
        around = [s for s in self.survey.submodels if inside(main.path, s.path)] if self.wanted is None else []
        root = around[0] if around else main
        within = [s for s in self.survey.submodels if inside(s.path, root.path)]
        plain = [s for s in within if self.sense(s.path) is None]
        if getattr(root.model.config, "is_encoder_decoder", False):
            return frozenset({main.path, *(s.path for s in plain)})
        if len(plain) == len(within) and root.path not in self.blocks:
            return frozenset({main.path, *(s.path for s in plain if find_embedding(s.model) is None)})
        own = {root.path} if root.path in self.blocks and self.sense(root.path) is None else set[str]()
        return frozenset({main.path, *own})

    @cached_property
    def blocks(self) -> dict[str, tuple[str, ...]]:
        """Paths of the blocks of each home: the items of its lists of layers."""
        with_map = _with_ancestors(self.sizes)
        with_norm = _with_ancestors(path for path, place in self.places.items() if is_norm(place.module))
        lists: dict[str, list[list[str]]] = {}
        bare: dict[str, list[list[str]]] = {}
        taken: set[str] = set()
        for path, place in self.places.items():
            if not isinstance(place.module, (nn.ModuleList, nn.Sequential)) or not taken.isdisjoint(ancestors(path)):
                continue
            items = [f"{path}.{name}" for name in children(place.module)]
            if not items or not all(item in with_map for item in items):
                continue
            if all(item in with_norm for item in items):
                taken.add(path)
                lists.setdefault(self._part(path), []).append(items)
            elif isinstance(place.module, nn.ModuleList) and not any(item in self.sizes for item in items):
                bare.setdefault(self._part(path), []).append(items)
        for home, found in bare.items():  # XLM: one list of attentions, one of MLPs, the norms in lists beside them
            if home not in lists and home in self.models:
                lists[home] = found
                self._split.add(home)
        return {home: self._layers(home, found) for home, found in lists.items()}

    @cached_property
    def _split(self) -> set[str]:
        """Homes with a list for each part of a layer."""
        return set()

    def layer(self, block: str) -> str:
        """What stands for the layer that a block is, or is a part of."""
        home = self.home(block)
        return f"{home}.{block.rpartition('.')[2]}" if home in self._split else block

    def _layers(self, home: str, found: list[list[str]]) -> tuple[str, ...]:
        if not self.is_language(home):  # beside the layers of a tower, lists of single-norm items are its projectors
            norms = [sum(is_norm(self.places[p].module) for p in self.below(items[0])) for items in found]
            full = [items for items, count in zip(found, norms, strict=True) if count > 1]
            found = full or [max(found, key=len)]
        return tuple(item for items in found for item in items)

    @cached_property
    def _holders(self) -> dict[str, str]:
        """Path of the innermost submodel that each module lies in; empty outside all of them."""
        found: dict[str, str] = {}
        for path in self.places:
            found[path] = path if path in self.models else found.get(path.rpartition(".")[0], "")
        return found

    def _part(self, path: str) -> str:
        """The home of a list of blocks: its submodel, or the part of that with another config or a tower's name."""
        holder = self._holders[path]
        model = self.models.get(holder)
        if model is None:
            return holder
        reads = getattr(model, "input_modalities", "text")
        many = reads != "text" and tuple(reads) != ("text",)
        own = {model.config.model_type, getattr(model.config.get_text_config(), "model_type", None)}
        for above in reversed(list(ancestors(path))):
            if above == holder or not inside(above, holder):
                continue
            config = getattr(self.places[above].module, "config", None)
            if isinstance(config, PreTrainedConfig) and config.model_type and config.model_type not in own:
                return above
            name = above.rpartition(".")[2]
            if BRIDGE.search(name) or (many and (AUDIO.search(name) or VISION.search(name))):
                return above
        return holder

    def home(self, path: str) -> str:
        """The home of a module: that of its block, or outside blocks its submodel's path."""
        block = self.block_of.get(path)
        return self._holders.get(path, "") if block is None else self.home_of_block[block]

    @cached_property
    def home_of_block(self) -> dict[str, str]:
        """The home of each block."""
        return {block: home for home, blocks in self.blocks.items() for block in blocks}

    def is_language(self, home: str) -> bool:
        """Whether a home reads tokens, or holds what does."""
        return any(inside(path, home) for path in self._readers)

    @cached_property
    def _readers(self) -> tuple[str, ...]:
        return tuple(s.path for s in self.survey.submodels if _reads_tokens(s))

    def sense(self, home: str) -> str | None:
        """What a home is beside a language model: vision, audio, projector; None where it cannot be told."""
        model, part = self.models.get(home), self.places[home].module
        kind = str(getattr(getattr(part, "config", None), "model_type", ""))
        if BRIDGE.search(f"{home.rpartition('.')[2]} {kind}".lower()):
            return "projector"
        if self.is_language(home):
            return None
        reads: Any = getattr(model, "input_modalities", "text") if model is not None else "text"
        said = f"{getattr(model, 'main_input_name', '')} {'' if 'text' in reads else reads}"
        for text in (said, f"{home} {kind}".lower()):
            if AUDIO.search(text):
                return "audio"
            if VISION.search(text):
                return "vision"
        return None

    @cached_property
    def block_of(self) -> dict[str, str]:
        """Path of the block that each module lies in, by the module's path."""
        heads = {block for blocks in self.blocks.values() for block in blocks}
        found: dict[str, str] = {}
        for path in self.places:
            if path in heads:
                found[path] = path
            elif (above := found.get(path.rpartition(".")[0])) is not None:
                found[path] = above
        return found

    @cached_property
    def order(self) -> dict[str, int]:
        """Where each path stands in the model's order."""
        return {path: i for i, path in enumerate(self.places)}

    @cached_property
    def _listed(self) -> list[str]:
        return list(self.places)

    def below(self, top: str) -> Iterator[str]:
        """A path and those below it, in order."""
        listed = self._listed
        for i in range(self.order[top], len(listed)):
            if not inside(listed[i], top):
                return
            yield listed[i]

    def matrices_below(self, top: str) -> Iterator[tuple[str, int]]:
        """Paths of linear maps and of holders of bare matrices at and below a path, each with its outputs."""
        for path in self.below(top):
            if path in self.sizes:
                yield path, self.sizes[path][1]
            else:
                own = own_parameters(self.places[path].module)
                yield from ((path, int(p.shape[0])) for p in own.values() if dims(p) == 2)


def _with_ancestors(paths: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        for above in ancestors(path):
            if above in found:
                break
            found.add(above)
    return found


def _reads_tokens(submodel: Submodel) -> bool:
    """Whether a submodel has a token embedding; some vision towers hand out their patch positions as one."""
    embedding: Any = find_embedding(submodel.model)
    if embedding is None:
        return False
    if not re.search(r"pixel|features|values", str(getattr(submodel.model, "main_input_name", ""))):
        return True
    vocabulary = vars(submodel.model.config).get("vocab_size")
    return vocabulary is not None and getattr(embedding, "num_embeddings", None) == vocabulary
