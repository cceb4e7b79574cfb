"""The edit that passes an output through a function: in every wrapper, at every interruption, pickled with and without
a name for its function.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.errors import ConflictError, InputError, RefusedError
from hfpatch.lab.tiny import tiny_model
from hfpatch.patching import edits, registry, select
from hfpatch.patching.kinds.map_output import Lost, MapOutput
from hfpatch.patching.language import Case, Needed, Patch
from tests import interrupts, matrix
from tests.fingerprint import fingerprint
from tests.processes import python
from tests.sampling import some_quick
from tests.wrapped import WITH_PACKAGES

KIND, ID = "output", "my-output"


def halved(output: torch.Tensor) -> torch.Tensor:
    return output / 2


@dataclass(frozen=True)
class Cap:
    """A function with a constant."""

    at: float

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return output.clamp(-self.at, self.at)


def patch(function: Any, where: select.Selection | None = None) -> Patch:
    return Patch(
        title="An output through a function",
        architectures=("*",),
        condition=lambda _context: Needed("always"),
        edits=(edits.map_output(where or select.branches(), function, "pass it through"),),
        effect="changes-function",
        symptom=lambda _trial: None,
        repros=(Case("llama"),),
        leaves_alone=(Case("llama"),),
    )


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    hfpatch.register(patch(halved), id=ID)
    subject = interrupts.Subject(lambda: tiny_model("gpt2", num_hidden_layers=1), ID)
    monkeypatch.setitem(interrupts.SUBJECTS, KIND, subject)
    yield
    for patch_id in registry.by_hand():
        hfpatch.unregister(patch_id)


def apply(model: Any, function: Any = None, where: select.Selection | None = None) -> Any:
    if function is not None:
        hfpatch.unregister(ID)
        hfpatch.register(patch(function, where), id=ID)
    return hfpatch.apply(model, only=ID, verbose=False)


def test_a_change_is_a_value() -> None:
    for function, text in ((halved, "halved"), (Cap(30.0), "Cap(at=30.0)")):
        change = MapOutput(function)
        copied = pickle.loads(pickle.dumps(change))  # noqa: S301 - our own
        assert (copied, hash(copied), copied.place) == (change, hash(change), change.place)
        assert str(change) == text
    assert MapOutput(Cap(30.0)) == MapOutput(Cap(30.0)) != MapOutput(Cap(20.0)) != MapOutput(halved)


def outputs(model: Any, ids: torch.Tensor, *paths: str) -> list[Any]:
    """What these modules return, after every hook."""
    seen: dict[str, Any] = {}
    handles = [
        model.get_submodule(path).register_forward_hook(lambda _m, _a, out, path=path: seen.__setitem__(path, out))
        for path in paths
    ]
    model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return [seen[path] for path in paths]


def test_outputs_that_are_tensors_and_tuples(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("llama")
    before, stock = fingerprint(model), model(input_ids=ids).logits
    parts = "model.layers.0.self_attn", "model.layers.0.mlp"
    attention, mlp = outputs(model, ids, *parts)
    apply(model, halved, select.branches().where(lambda _c, t: t.path == parts[0], "of the first layer"))
    (halved_attention,) = outputs(model, ids, parts[0])
    assert type(halved_attention) is type(attention) is tuple
    assert torch.equal(halved_attention[0], attention[0] / 2)
    assert all(torch.equal(now, was) for now, was in zip(halved_attention[1:], attention[1:], strict=True))
    hfpatch.revert(model)
    apply(model, halved, select.branches().where(lambda _c, t: t.path == parts[1], "of the first layer"))
    assert torch.equal(outputs(model, ids, parts[1])[0], mlp / 2)
    assert not torch.equal(model(input_ids=ids).logits, stock)
    hfpatch.revert(model)
    assert fingerprint(model) == before
    assert torch.equal(model(input_ids=ids).logits, stock)


def test_it_trains_through_it(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("llama")
    model(input_ids=ids, labels=ids).loss.backward()
    stock = model.lm_head.weight.grad.clone()
    model.zero_grad()
    apply(model)
    model(input_ids=ids, labels=ids).loss.backward()
    grad = model.lm_head.weight.grad
    assert grad.isfinite().all()
    assert not torch.equal(grad, stock)


NOT_HERE = (*WITH_PACKAGES, "spawn")
"""Wrappers of packages that are not always there, and a new process, which has no patch of this file."""
WRAPPED = [("output", *place[1:]) for place in matrix.ALL if place[0] == "hook" and place[1] not in NOT_HERE]


@pytest.mark.parametrize("place", some_quick(WRAPPED, every=4), ids=" - ".join)
def test_in_every_wrapper_as_the_other_hooks(place: tuple[str, str, str]) -> None:
    """docs/state.md has a column for hooks: this edit is one."""
    cell = matrix.run(*place)
    assert cell.outcome == matrix.documented()["hook", *place[1:]] != "FAILS", cell


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 8))
def test_interrupted_at_every_seventh_line(first: int) -> None:
    ran = list(interrupts.trials(KIND, every=7, first=first))
    assert len(ran) > 10
    assert not [trial for trial in ran if trial[1]]


def test_life(tiny: Any, ids: torch.Tensor) -> None:
    """Plan changes nothing, twice is once, copies are reverted alone, hooks that are gone are set again."""
    model = tiny("llama")
    before = fingerprint(model)
    assert hfpatch.plan(model, only=ID).edits
    assert fingerprint(model) == before
    fix = apply(model)
    patched, wanted = fingerprint(model), model(input_ids=ids).logits
    assert apply(model).edits == ()
    assert fingerprint(model) == patched
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own
        assert torch.equal(other(input_ids=ids).logits, wanted)
        assert hfpatch.status(other).patches == (ID,)
        hfpatch.revert(other)
        assert not hfpatch.status(other).edits
    assert fingerprint(model) == patched
    model.model.layers[0].mlp._forward_hooks.clear()
    assert [e.state.word for e in hfpatch.status(model).lapsed] == ["gone"]
    assert [e.path for e in apply(model).edits] == ["model.layers.0.mlp"]
    assert torch.equal(model(input_ids=ids).logits, wanted)
    fix.verify({"input_ids": ids}, runs=["after"])
    hfpatch.revert(model)
    assert fingerprint(model) == before


def test_two_functions_for_one_output_are_a_conflict(tiny: Any) -> None:
    model = tiny("llama")
    apply(model)
    hfpatch.register(patch(Cap(30.0)), id="rival")
    with pytest.raises(ConflictError, match=r"rival wants output of '.*' to be Cap\(at=30.0\), my-output wants halved"):
        hfpatch.apply(model, only="rival")
    hfpatch.register(patch(halved), id="same")
    assert hfpatch.apply(model, only="same", verbose=False).edits == ()


class TestFunctions:
    @pytest.mark.parametrize("function", [None, 3, "x", nn.Linear(2, 2), lambda: None, lambda a, b: a])
    def test_what_is_no_function_of_one_argument(self, function: Any) -> None:
        with pytest.raises(InputError, match="map_output: want a function of one argument as function="):
            edits.map_output(select.branches(), function, "x")

    def test_one_that_returns_no_tensor(self, tiny: Any, ids: torch.Tensor) -> None:
        model = tiny("llama")
        fix = apply(model, lambda output: None)
        with pytest.raises(
            RefusedError, match=r"<lambda> returns a NoneType at Llama\w+: want a function from a tensor"
        ):
            model(input_ids=ids)
        fix.revert()
        assert model(input_ids=ids).logits.isfinite().all()

    def test_an_output_that_holds_no_tensor(self, tiny: Any, ids: torch.Tensor) -> None:
        model = tiny("llama")
        apply(model, halved, select.submodel())
        with pytest.raises(
            RefusedError, match="halved cannot be applied to a CausalLMOutputWithPast at LlamaForCausalLM"
        ):
            model(input_ids=ids)


class TestPickles:
    def test_a_lambda_works_is_copied_and_says_so_when_it_is_pickled(self, tiny: Any, ids: torch.Tensor) -> None:
        model = tiny("llama")
        before, stock = fingerprint(model), model(input_ids=ids).logits
        apply(model, lambda output: output * 3)
        patched = model(input_ids=ids).logits
        assert not torch.equal(patched, stock)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            copied = copy.deepcopy(model)
        assert torch.equal(copied(input_ids=ids).logits, patched)
        hfpatch.revert(copied)
        assert torch.equal(copied(input_ids=ids).logits, stock)
        with pytest.warns(UserWarning, match="<lambda> is not in a module that another process can import"):
            data = pickle.dumps(model)
        with pytest.warns(UserWarning, match="<lambda>, which is not found here: the edit has no effect"):
            loaded = pickle.loads(data)  # noqa: S301 - our own
        assert torch.equal(loaded(input_ids=ids).logits, stock)
        status = hfpatch.status(loaded)
        assert {e.state.word for e in status.edits} == {"gone"}
        assert "is without its function" in " ".join(str(status).split())
        assert apply(loaded).edits  # it is made again where the function is
        assert torch.equal(loaded(input_ids=ids).logits, patched)
        hfpatch.revert(loaded)
        assert not hfpatch.status(loaded).edits
        hfpatch.revert(model)
        assert fingerprint(model) == before

    @pytest.mark.thorough
    def test_a_new_process_with_and_without_the_module(self, tiny: Any, ids: torch.Tensor, tmp_path: Path) -> None:
        (tmp_path / "with").mkdir()
        module = tmp_path / "with" / "my_functions.py"
        module.write_text("def doubled(output):\n    return output * 2\n")
        sys.path.insert(0, str(module.parent))
        try:
            import my_functions  # type: ignore[import-not-found]
        finally:
            sys.path.remove(str(module.parent))
        model = tiny("llama")
        stock = model(input_ids=ids).logits
        apply(model, my_functions.doubled)
        torch.save((model, ids, stock, model(input_ids=ids).logits), tmp_path / "model.pt")
        script = """
            import sys, warnings, torch, hfpatch
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                model, ids, stock, patched = torch.load("model.pt", weights_only=False)
            said = [str(w.message) for w in said if "which is not found here" in str(w.message)]
            words = {e.state.word for e in hfpatch.status(model).edits}
            if sys.argv[1] == "with":
                assert not said and words == {"here"} and torch.equal(model(input_ids=ids).logits, patched)
            else:
                assert said and words == {"gone"} and torch.equal(model(input_ids=ids).logits, stock)
                assert "an output through doubled, " in said[0], said
                torch.save((model, ids, stock, patched), "model.pt")  # a process that has the module gets it back
            hfpatch.revert(model)
            assert not hfpatch.status(model).edits and torch.equal(model(input_ids=ids).logits, stock)
        """
        root = str(Path(__file__).parent.parent)
        for name in ("with", "without", "with"):
            path = os.pathsep.join([root, str(tmp_path / name)])
            done = python("-c", textwrap.dedent(script), name, env={"PYTHONPATH": path}, cwd=tmp_path)
            assert done.returncode == 0, (name, done.stderr)

    def test_a_function_of_a_notebook(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def capped(output: torch.Tensor) -> torch.Tensor:
            return output.clamp(-1, 1)

        capped.__module__, capped.__qualname__ = "__main__", "capped"
        main = sys.modules["__main__"]
        monkeypatch.setattr(main, "capped", capped, raising=False)
        with pytest.warns(UserWarning, match="capped is not in a module that another process can import"):
            data = pickle.dumps(MapOutput(capped))
        assert pickle.loads(data) == MapOutput(capped)  # noqa: S301 - this process has it
        monkeypatch.delattr(main, "capped")
        with pytest.warns(UserWarning, match="capped, which is not found here"):
            assert str(pickle.loads(data)) == "capped"  # noqa: S301 - our own

    def test_a_lost_function_keeps_its_pickle(self) -> None:
        lost = MapOutput(Lost("gone.f", b"cnot_there_at_all\nf\n."))
        with pytest.warns(UserWarning, match=r"gone\.f, which is not found here"):
            again = pickle.loads(pickle.dumps(lost))  # noqa: S301 - our own
        assert again == lost


@pytest.mark.slow
def test_compiled_after_it(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("llama")
    apply(model, Cap(0.001))
    wanted = model(input_ids=ids).logits
    torch._dynamo.reset()
    got = torch.compile(model, backend="eager", fullgraph=True)(input_ids=ids).logits
    assert torch.allclose(got, wanted)
    torch._dynamo.reset()
