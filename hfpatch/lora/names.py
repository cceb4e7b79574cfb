"""From intended matrices to what PEFT is told: the shortest names that match them and nothing else."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hfpatch.compat.peft import all_linear
from hfpatch.lora.places import own_parameters

if TYPE_CHECKING:
    from torch import nn

    from hfpatch.lora.matrices import Reading


@dataclass(frozen=True)
class Spec:
    """Arguments of a `LoraConfig`.

    Attributes:
        target_modules: Names (ends of paths), or one regular expression for whole paths.
        target_parameters: Ends of parameter paths.
        exclude_modules: A regular expression for whole paths that the names would match too; None for none.
        through_parameters: Linear maps that could only be named by their weight parameter.
    """

    target_modules: tuple[str, ...] | str
    target_parameters: tuple[str, ...] = ()
    exclude_modules: str | None = None
    through_parameters: tuple[str, ...] = ()


class Namer:
    """What PEFT makes of target names in one model."""

    def __init__(self, reading: Reading) -> None:
        self.frame: nn.Module = reading.frame
        self.places = reading.places
        self.keys: tuple[str, ...] = tuple(path for path in reading.places if path)
        self._taken: dict[str, bool] = {}

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Whole paths of the parameters."""
        return tuple(f"{path}.{name}" for path, place in self.places.items() for name in own_parameters(place.module))

    def converted(self, config: Any) -> Any:
        """A copy of a config as PEFT rewrites it for this model before it matches; None where PEFT raises.

        For some mixtures of experts PEFT reads names of older releases (gate_proj, w1) as the stacked
        parameters of the routed experts.
        """
        convert = _converter()
        if convert is None:
            return config
        config = copy.deepcopy(config)
        try:
            convert(config, model=self.frame, conversions=None)
        except ValueError:
            return None
        return config

    def taken(self, name: str) -> bool:
        """Whether PEFT reads this name as something other than a module."""
        leaf = name.rpartition(".")[2]
        if leaf not in self._taken:
            from peft import LoraConfig

            got = self.converted(LoraConfig(target_modules=[leaf]))
            self._taken[leaf] = got is None or set(got.target_modules or ()) != {leaf}
        return self._taken[leaf]

    def _rewrites(self, leaves: set[str]) -> bool:
        """Whether PEFT changes a list of these names in any way."""
        from peft import LoraConfig

        got = self.converted(LoraConfig(target_modules=sorted(leaves)))
        return got is None or set(got.target_modules or ()) != leaves

    @cached_property
    def keeps_patterns(self) -> bool:
        """Whether a regular expression reaches PEFT's matching as it was written."""
        from peft import LoraConfig

        pattern = f"(?:{re.escape(self.keys[-1])})"
        got = self.converted(LoraConfig(target_modules=pattern))
        return got is not None and got.target_modules == pattern

    def matched(self, names: Iterable[str]) -> set[str]:
        """Modules that a list of names matches."""
        wanted = set(names)
        leaves = {name for name in wanted if "." not in name}
        ends = tuple(wanted - leaves)
        if ends:
            return {key for key in self.keys if _ends(key, wanted)}
        return {key for key in self.keys if key.rpartition(".")[2] in leaves}

    def matched_by(self, config: Any) -> set[str] | None:
        """Modules that a config matches, all of its fields and PEFT's rewriting counted in; None where PEFT raises."""
        from peft.tuners.tuners_utils import check_target_module_exists

        got = self.converted(config)
        if got is None:
            return None
        if isinstance(got.target_modules, str) and got.target_modules.lower() == "all-linear":
            got = all_linear(copy.deepcopy(got), self.frame)
        return {key for key in self.keys if check_target_module_exists(got, key)}

    def parameters_by(self, config: Any) -> set[str]:
        """Parameters, by whole paths, that a config's `target_parameters` match, PEFT's rewriting counted in."""
        got = self.converted(config)
        names: set[str] = set(getattr(got, "target_parameters", None) or ())
        return {path for path in self.parameters if _ends(path, names)} if names else set()

    def spec(self, modules: Sequence[str], parameters: Sequence[str]) -> Spec:
        """The spec for linear maps and parameters given by their whole paths."""
        leaves = {path.rpartition(".")[2] for path in modules}
        taken = {leaf for leaf in leaves if self.taken(leaf)} if leaves and self._rewrites(leaves) else set[str]()
        direct = [path for path in modules if path.rpartition(".")[2] not in taken]
        through = tuple(path for path in modules if path.rpartition(".")[2] in taken)
        named = self.parameter_names([*(f"{path}.weight" for path in through), *parameters])
        targets, exclude = self.names(direct)
        return Spec(targets, named, exclude, through)

    def names(self, wanted: Sequence[str]) -> tuple[tuple[str, ...] | str, str | None]:
        """Names, or an expression, for modules; and what is to be excluded."""
        if not wanted:
            return (), None
        leaves = tuple(dict.fromkeys(path.rpartition(".")[2] for path in wanted))
        extra = self.matched(leaves) - set(wanted)
        if not extra:
            return leaves, None
        qualified = self.suffixes(wanted)
        if not any(re.search(r"(^|\.)\d+(\.|$)", name) for name in qualified):
            return qualified, None
        if self.keeps_patterns:
            return pattern(wanted, self.keys), None
        return leaves, pattern(sorted(extra, key=self.keys.index), self.keys)

    def suffixes(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """For each module the shortest end of its path that ends no path but those wanted."""
        others = {end for key in set(self.keys) - set(wanted) for end in _ends_of(key)}
        found = dict.fromkeys(next((e for e in _ends_of(p) if e not in others), p) for p in wanted)
        return tuple(found)

    def parameter_names(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """For each parameter the shortest end of its path, from its module on, that ends none but those wanted."""
        if not wanted:
            return ()
        others = {end for key in set(self.parameters) - set(wanted) for end in _ends_of(key)}
        return tuple(dict.fromkeys(next((e for e in _ends_of(p)[1:] if e not in others), p) for p in wanted))


def _ends_of(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[i:]) for i in range(len(parts) - 1, -1, -1)]


def _ends(key: str, names: set[str]) -> bool:
    return any(end in names for end in _ends_of(key))


def pattern(wanted: Sequence[str], keys: Iterable[str]) -> str:
    r"""A regular expression that matches the wanted paths whole and no other key.

    Paths that differ in one index are one branch, with `\d+` where every such key is wanted.
    """
    rest = set(keys) - set(wanted)
    groups: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for path in wanted:
        parts = path.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is None:
            groups.setdefault((path,), {})
            continue
        head, tail = ".".join(parts[:at]), ".".join(parts[at + 1 :])
        groups.setdefault((head, "list"), {}).setdefault(tail, []).append(parts[at])
    branches: list[str] = []
    for key, tails in groups.items():
        if not tails:
            branches.append(re.escape(key[0]))
            continue
        by_index: dict[str, list[str]] = {}
        for tail, indices in tails.items():
            ending = rf"\.{re.escape(tail)}" if tail else ""
            free = rf"{re.escape(key[0])}\.\d+{ending}"
            clear = not any(re.fullmatch(free, other) for other in rest)
            by_index.setdefault(r"\d+" if clear else f"(?:{'|'.join(indices)})", []).append(tail)
        for index, ends in by_index.items():
            joined = "|".join(re.escape(end) for end in ends)
            ending = "" if ends == [""] else rf"\.(?:{joined})" if len(ends) > 1 else rf"\.{joined}"
            branches.append(rf"{re.escape(key[0])}\.{index}{ending}")
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _converter() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from peft.utils import transformers_weight_conversion as home
        except ImportError:
            try:
                from transformers.integrations import peft as home
            except ImportError:
                return None
    return getattr(home, "convert_peft_config_for_transformers", None)
