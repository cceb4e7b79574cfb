"""Models that torch or transformers can hardly handle: each verb gives a result or one sentence, never a traceback."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.errors import HfpatchError, InputError, NotAModelError, RefusedError
from hfpatch.lab.tiny import tiny_model
from tests.sampling import slow


class Selfish(nn.Module):
    """Holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.child = self


class RaisingProperties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    @property
    def weight(self) -> Any:
        raise RuntimeError("no weight for you")

    @property
    def config(self) -> Any:
        raise ValueError("no config for you")


class RaisingGetattr(nn.Module):
    """Raises something else than AttributeError for what it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def __getattr__(self, name: str) -> Any:
        if name == "linear":
            return super().__getattr__(name)
        raise RuntimeError(f"asked for {name}")


class NotMade(nn.Module):
    """Its constructor forgets torch's own."""

    def __init__(self) -> None:
        pass


class BrokenTrainer:
    @property
    def model(self) -> Any:
        raise RuntimeError("not set up")


class Around(nn.Module):
    """A language model, and something odd beside it."""

    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.llm = tiny_model("llama")
        self.odd = odd


def nested(levels: int, inner: nn.Module) -> nn.Module:
    for _ in range(levels):
        inner = nn.Sequential(inner)
    return inner


def in_itself() -> nn.Module:
    model = tiny_model("llama")
    model.model.layers[0].back = model
    return model


def with_a_lazy_layer() -> nn.Module:
    model = tiny_model("llama")
    model.model.layers[0].mlp.extra = nn.LazyLinear(4)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3)),
    "lazy conv": lambda: nn.Sequential(nn.LazyConv1d(3, 3), nn.LazyBatchNorm1d()),
    "lazy in llama": with_a_lazy_layer,
    "lazy beside llama": lambda: Around(nn.LazyLinear(3)),
    "itself": Selfish,
    "itself beside llama": lambda: Around(Selfish()),
    "llama in llama": in_itself,
    "600 deep": lambda: nested(600, nn.Linear(2, 2)),
    "3,000 deep": lambda: nested(3_000, nn.Linear(2, 2)),
    "llama 600 deep": lambda: nested(600, tiny_model("llama")),
    "600 deep beside llama": lambda: Around(nested(600, nn.Linear(2, 2))),
    "3,000 deep beside llama": lambda: Around(nested(3_000, nn.Linear(2, 2))),
    "properties raise": RaisingProperties,
    "properties raise beside llama": lambda: Around(RaisingProperties()),
    "getattr raises": RaisingGetattr,
    "getattr raises beside llama": lambda: Around(RaisingGetattr()),
    "meta": lambda: nn.Linear(2, 2, device="meta"),
    "meta llama": lambda: tiny_model("llama").to("meta"),
    "meta beside llama": lambda: Around(nn.Linear(2, 2, device="meta")),
    "nothing in it": nn.Module,
    "no parameters": lambda: nn.Sequential(nn.ReLU()),
    "not made": NotMade,
    "broken trainer": BrokenTrainer,
}


def traced(model: Any) -> Any:
    with hfpatch.trace(model) as trace:
        pass
    return trace.report()


def guarded(model: Any) -> Any:
    return hfpatch.Guard(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]), verbose=False)


VERBS: dict[str, Callable[[Any], Any]] = {
    "inspect": hfpatch.inspect,
    "plan": hfpatch.plan,
    "apply": lambda model: hfpatch.apply(model, verbose=False),
    "status": hfpatch.status,
    "revert": hfpatch.revert,
    "trace": traced,
    "check": hfpatch.check,
    "lora_targets": hfpatch.lora_targets,
    "lora_config": lambda model: hfpatch.lora_config(model, verbose=False),
    "embed_tokens": hfpatch.embed_tokens,
    "gradient_report": hfpatch.gradient_report,
    "Guard": guarded,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if " deep" in n else []) for n in MODELS])
def test_each_verb_gives_a_result_or_a_sentence(name: str) -> None:
    for verb, run in VERBS.items():
        try:
            str(run(MODELS[name]()))
        except HfpatchError as error:
            assert len(str(error)) > 30, (verb, error)


@pytest.mark.parametrize(
    "name",
    ["lazy beside llama", slow("600 deep beside llama"), "properties raise beside llama", slow("llama 600 deep")],
)
def test_patches_reach_the_language_model_beside_odd_modules(name: str) -> None:
    """A result is a right one: beside something odd the model is served as it is by itself."""
    model = MODELS[name]().half()
    fix = hfpatch.apply(model, verbose=False)
    assert "fp16-residual-overflow" in hfpatch.status(model).patches
    fix.revert()
    assert not hfpatch.status(model)


def test_what_is_too_deep_is_said_with_a_way_out() -> None:
    with pytest.raises(InputError, match=r"3,001 deep \(0\.0\..*sys\.setrecursionlimit\(\d+\) first"):
        hfpatch.status(MODELS["3,000 deep"]())


def test_what_is_no_module_yet_and_a_broken_trainer_are_named() -> None:
    with pytest.raises(NotAModelError, match=r"NotMade is not initialised: call super"):
        hfpatch.plan(NotMade())
    with pytest.raises(NotAModelError, match=r"BrokenTrainer\.model raises RuntimeError: not set up"):
        hfpatch.apply(BrokenTrainer())
    with pytest.raises(NotAModelError, match=r"NotMade at 'odd'"):
        hfpatch.revert(Around(NotMade()))


def test_a_traced_program_takes_no_patch_and_tells_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    program = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    said = "this Sequential is a program that torch.export or torch.fx made of a model"
    for verb in (hfpatch.revert, hfpatch.status):
        with pytest.raises(NotAModelError, match=said):
            verb(program)
    with pytest.raises(RefusedError, match=said):
        hfpatch.apply(program, only="eps-alignment")
    assert all(d.reason.startswith(said) for d in hfpatch.apply(program).plan.decisions)
    assert re.search(rf"^hfpatch: refused: [\w-]+: {said}", capsys.readouterr().err, flags=re.MULTILINE)
    assert hfpatch.inspect(program).parameters == 6


def test_without_a_model_of_transformers_a_patch_says_so() -> None:
    (decision,) = hfpatch.plan(nn.Sequential(nn.Linear(2, 2)), only="fp16-residual-overflow").decisions
    assert decision.reason.startswith("there is no transformers model here; it supports ")


def test_a_lazy_layer_counts_for_nothing_until_it_is_made() -> None:
    assert hfpatch.inspect(nn.Sequential(nn.LazyLinear(3), nn.Linear(2, 5))).parameters == 15
