"""Edits as values."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from itertools import combinations

import pytest
import torch

from hfpatch.numerics.init import Zeros
from hfpatch.patching.kinds.add_targets import AddTargets
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.bound_modulation import BoundModulation
from hfpatch.patching.kinds.cast_input import CastInput
from hfpatch.patching.kinds.cast_output import CastOutput
from hfpatch.patching.kinds.choose_attention import ChooseAttention
from hfpatch.patching.kinds.compute_in_float32 import ComputeInFloat32
from hfpatch.patching.kinds.compute_inside import ComputeInside
from hfpatch.patching.kinds.dtype_rule import DtypeRule
from hfpatch.patching.kinds.expansion import Expansion
from hfpatch.patching.kinds.in_arguments.keep_documents import KeepDocuments
from hfpatch.patching.kinds.in_float32.scale_map import ScaleMap
from hfpatch.patching.kinds.in_gradients.copy_output import CopyOutput
from hfpatch.patching.kinds.map_output import MapOutput
from hfpatch.patching.kinds.one_plus_tanh import Bounded
from hfpatch.patching.kinds.scale_branch import ScaleBranch
from hfpatch.patching.kinds.set_attribute import SetAttribute
from hfpatch.patching.kinds.set_tensor import SetTensor
from hfpatch.patching.kinds.states import show


@dataclass(frozen=True)
class Scale:
    by: float

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return output * self.by


CHANGES: dict[str, Change] = {
    "eps -> 1e-06": SetAttribute("eps", 1e-6),
    "tensor bias -> zeros": SetTensor("bias", Zeros()),
    "input dtype -> float32": CastInput(DtypeRule(torch.float32)),
    "output dtype -> that of its weights": CastOutput(DtypeRule(torch.float16, ())),
    "output -> Scale(by=0.5)": MapOutput(Scale(0.5)),
    "input compute dtype -> float32": ComputeInFloat32(),
    "compute dtype inside -> float32": ComputeInside(),
    "branch scale -> 2^-8, float32 at its end": ScaleBranch("act_fn", "down_proj", 8),
    "map scale -> 2^-8, float32 at its end": ScaleMap(8),
    "copy of the output -> copied": CopyOutput(begins=False),
    "gradients of the output -> copied, with gradients": CopyOutput(begins=True),
    "packed documents -> apart, by a mask": KeepDocuments(masked=True),
    "attention -> eager": ChooseAttention("eager"),
    "adapter a, b -> a: 1 more modules (q); b: 2 more modules (q, k)": AddTargets(
        (Expansion("a", ("0.q",), ("q",)), Expansion("b", ("0.q", "0.k"), ("q", "k")))
    ),
    "1 + tanh -> 0.5 to 1.5, 1 at 0": BoundModulation(Bounded(0.5, 1.5)),
}


@pytest.mark.parametrize("text", CHANGES)
def test_a_change_is_a_value(text: str) -> None:
    change = CHANGES[text]
    copied = pickle.loads(pickle.dumps(change))  # noqa: S301 - our own
    assert (copied, hash(copied), copied.place) == (change, hash(change), change.place)
    assert f"{change.slot} -> {show(change.after)}" == text


def test_no_two_kinds_of_change_share_a_place() -> None:
    assert all(a.place != b.place for a, b in combinations(CHANGES.values(), 2))
    assert SetAttribute("bias", 0).place != SetTensor("bias", Zeros()).place
    assert SetAttribute("eps", 0).place == CHANGES["eps -> 1e-06"].place != SetAttribute("variance_epsilon", 0).place
