"""The life of a patch: what has to hold of any patch on any model, from its plan to its revert."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

from torch import nn

import hfpatch
from hfpatch.model.kept_state import state_as_before
from hfpatch.patching import registry
from tests.fingerprint import fingerprint


def shape_of(print_: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint without identities, to compare a copy with the original."""
    return {
        path: (m["class"], m["keys"], [k for k, _ in m["parameters"]], {h: len(v) for h, v in m["hooks"].items()})
        for path, m in print_.items()
    }


def copies(model: nn.Module, pickled: bool = True) -> list[nn.Module]:
    """A copy, and what a pickle of the model gives."""
    return [copy.deepcopy(model), *([pickle.loads(pickle.dumps(model))] if pickled else [])]  # noqa: S301


def live(
    entry: registry.Entry,
    model: nn.Module,
    patched_too: Callable[[nn.Module], None] = lambda _: None,
    *,
    pickled: bool = True,
    **words: Any,
) -> hfpatch.Plan:
    """Plan changes nothing; apply does exactly the plan; twice is once; revert restores all; copies revert alone.

    Args:
        entry: The patch.
        model: The model; it is as it was in the end.
        patched_too: Looks at each patched model: this one and its copies.
        pickled: False for a model that cannot be pickled, patched or not.
        words: Other arguments of the plan.
    """
    before, state = fingerprint(model), list(model.state_dict())
    made = hfpatch.plan(model, only=entry.id, **words)
    assert fingerprint(model) == before
    assert made.edits, made.decisions

    fix = hfpatch.apply(model, only=entry.id, verbose=False, **words)
    assert [(e.path, e.slot) for e in fix.edits] == [(e.path, e.slot) for e in made.edits]
    places = {(e.path, e.slot) for e in made.edits}  # patches may share an edit
    assert len(places) <= len(hfpatch.status(model).records) <= len(made.edits)
    if {d.effect for d in made.of("applied")} != {"adds-parameters"}:
        assert list(model.state_dict()) == state
    patched = fingerprint(model)
    assert patched != before

    again = hfpatch.apply(model, only=entry.id, verbose=False)
    assert again.edits == (), f"applied again to {', '.join(e.path for e in again.edits)}"
    beside = [d for d in again.plan.decisions if d.worst]  # a tower may be told that nothing serves it
    assert {d.decided for d in again.plan.decisions if d not in beside} == {"not needed"}
    assert fingerprint(model) == patched

    with state_as_before(model.modules()):  # a forward may keep what it computed
        patched_too(model)
    for other in copies(model, pickled):
        assert {*hfpatch.status(other).patches} == {entry.id, *entry.patch.needs}
        with state_as_before(other.modules()):
            patched_too(other)
        hfpatch.revert(other)
        assert not hfpatch.status(other)
        assert shape_of(fingerprint(other)) == shape_of(before)
    assert fingerprint(model) == patched

    fix.revert()
    assert fingerprint(model) == before
    return made
