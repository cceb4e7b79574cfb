"""Absurd values for each argument of the public face: an InputError that says what was wanted, never a traceback."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hfpatch
from hfpatch import testing
from hfpatch.errors import HfpatchError, InputError
from hfpatch.lab.tiny import tiny_model
from hfpatch.nn import BoundedModulation, ModulationAdapter
from hfpatch.patching import registry


class Silent:
    """Raises when it is shown, compared or asked for its truth."""

    def __repr__(self) -> str:
        raise RuntimeError("shown")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __bool__(self) -> bool:
        raise RuntimeError("asked")

    __hash__ = None  # type: ignore[assignment]


def itself(holder: Any) -> Any:
    """A container that holds itself."""
    if isinstance(holder, dict):
        holder["x"] = holder
    else:
        holder.append(holder)
    return holder


def deep(depth: int) -> list[Any]:
    out: list[Any] = []
    for _ in range(depth):
        out = [out]
    return out


ABSURD: dict[str, Any] = {
    "None": None,
    "3": 3,
    "-1": -1,
    "0.5": 0.5,
    "nan": math.nan,
    "inf": math.inf,
    "10**400": 10**400,
    "x": "x",
    "empty string": "",
    "null byte": "\0",
    "bytes": b"x",
    "object": object(),
    "list": [],
    "list of None": [None],
    "nested list": [[1], {}],
    "tuple": (1, "x"),
    "set": {1},
    "dict": {},
    "dict by number": {3: {4: 5}},
    "dict of None": {"eps-alignment": None},
    "class": nn.Linear,
    "function": lambda: None,
    "generator": (n for n in range(3)),
    "module": nn.Linear(2, 2),
    "tensor": torch.ones(2),
    "complex": 1j,
    "dtype": torch.int8,
    "device": torch.device("cpu"),
    "silent": Silent(),
}

ODDER: dict[str, Any] = {
    "numpy number": np.float64(0.5),
    "numpy integer": np.int64(-3),
    "numpy nan": np.float32("nan"),
    "numpy array": np.ones(2),
    "empty array": np.ones(0),
    "numpy bool": np.True_,
    "numpy text": np.str_("x"),
    "decimal": Decimal("NaN"),
    "fraction": Fraction(1, 3),
    "range": range(3),
    "frozenset": frozenset({"x"}),
    "iterator": iter(()),
    "empty tuple": (),
    "empty bytes": b"",
    "bytearray": bytearray(b"x"),
    "path": Path("nowhere"),
    "date": date(2001, 12, 14),
    "ellipsis": ...,
    "type": type,
    "instance of a class without anything": type("Nothing", (), {"__slots__": ()})(),
    "dict of itself": itself({}),
    "list of itself": itself([]),
    "deep list": deep(5000),
    "long text": "x" * 100_000,
    "text of no letters": "\ud800",
    "lines": "x\ny",
    "answers everything": MagicMock(),
    "exception": ValueError("x"),
    "error of a class": KeyboardInterrupt,
    "empty tensor": torch.ones(0),
    "meta tensor": torch.ones(2, device="meta"),
    "sparse tensor": torch.ones(2).to_sparse(),
    "integer tensor": torch.ones((), dtype=torch.int64),
    "nan tensor": torch.tensor(math.nan),
    "empty module": nn.Sequential(),
    "module without a forward": nn.Module(),
    "module list": nn.ModuleList([nn.Linear(2, 2)]),
    "scripted": torch.Generator(),
}


@cache
def model() -> nn.Module:
    return tiny_model("llama")


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(model().parameters(), lr=0.1)


def traced(**kwargs: Any) -> Any:
    with hfpatch.trace(**kwargs) as trace:
        pass
    return trace


def headroom(**kwargs: Any) -> Any:
    return traced(model=nn.Linear(2, 2)).headroom(**kwargs)


def stepped(**kwargs: Any) -> Any:
    return hfpatch.Guard(model(), optimizer(), verbose=False).step(**{"loss": some_loss(), **kwargs})


def saved(**kwargs: Any) -> Any:
    return hfpatch.apply(model(), verbose=False).save(**kwargs)


@cache
def expanded() -> hfpatch.Applied:
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    return hfpatch.apply(adapted, only="lora-target-expansion", verbose=False)


def some_loss() -> torch.Tensor:
    return next(model().parameters()).sum()


BATCH = {"input_ids": torch.arange(8)[None]}

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    # name: the function, what it is called with, and the arguments that are replaced by something absurd
    "inspect": (hfpatch.inspect, lambda: {"given": model()}, ("given", "trust_remote_code")),
    "compare": (hfpatch.compare, lambda: {"a": model(), "b": model(), "batch": BATCH}, ("a", "b", "batch")),
    "doctor": (hfpatch.doctor, lambda: {"model": model(), "batch": BATCH}, ("model", "args", "batch")),
    "plan": (
        hfpatch.plan,
        lambda: {"model": model()},
        ("model", "only", "include", "exclude", "added_modules", "compute_dtype", "options", "trust"),
    ),
    "apply": (
        hfpatch.apply,
        lambda: {"model": model(), "verbose": False},
        (
            "model", "verbose", "only", "include", "exclude", "added_modules", "compute_dtype", "options", "trust",
            "manifest",
        ),
    ),
    "load": (hfpatch.load, lambda: {"directory": "nowhere"}, ("directory", "device", "trust", "verbose")),
    "Applied.save": (saved, dict, ("directory",)),
    "register": (hfpatch.register, lambda: {"patch": registry.get("eps-alignment").patch}, ("patch", "id")),
    "unregister": (hfpatch.unregister, dict, ("id",)),
    "status": (hfpatch.status, lambda: {"model": model()}, ("model", "compare")),
    "verify": (
        hfpatch.verify,
        lambda: {"model": model(), "batch": {"input_ids": torch.arange(8)[None]}, "runs": ["as it is"]},
        ("model", "batch", "runs"),
    ),
    "Applied.add_to": (
        lambda **k: expanded().add_to(**k),
        lambda: {"optimizer": torch.optim.SGD(expanded().model.parameters(), lr=0.1)},
        ("optimizer",),
    ),
    "revert": (hfpatch.revert, lambda: {"model": model()}, ("model", "only", "exclude")),
    "trace": (
        traced, lambda: {"model": model()}, ("model", "steps", "epochs", "ranks", "backward", "level", "progress"),
    ),
    "headroom": (headroom, dict, ("dtype", "loss_scale")),
    "largest_gradients": (lambda **k: traced(model=nn.Linear(2, 2)).largest_gradients(**k), dict, ("count",)),
    "check": (hfpatch.check, lambda: {"model": model()}, ("model", "args", "optimizer", "batch", "device")),
    "lora_targets": (
        hfpatch.lora_targets, lambda: {"model": model()}, ("model", "scope", "experts", "router", "submodel"),
    ),
    "lora_config": (
        hfpatch.lora_config,
        lambda: {"model": model(), "verbose": False},
        ("model", "r", "scope", "experts", "router", "submodel", "scale", "base", "verbose", "lora_alpha", "nonsense"),
    ),
    "embed_tokens": (hfpatch.embed_tokens, lambda: {"model": model()}, ("model", "submodel")),
    "explain": (hfpatch.explain, dict, ("patch_id",)),
    "list_patches": (hfpatch.list_patches, dict, ("architecture",)),
    "scan": (hfpatch.scan, lambda: {"path": str(Path(__file__).parent)}, ("path", "processes", "progress")),
    "gradient_report": (hfpatch.gradient_report, lambda: {"model": model()}, ("model", "loss_scale")),
    "validate_loss": (hfpatch.validate_loss, lambda: {"loss": torch.ones(())}, ("loss", "low", "high")),
    "normalized_mse": (
        hfpatch.normalized_mse,
        lambda: {"student": torch.ones(2, 3), "teacher": torch.ones(2, 3)},
        ("student", "teacher", "mask"),
    ),
    "Guard": (
        hfpatch.Guard,
        lambda: {"model": model(), "optimizer": optimizer(), "verbose": False},
        (
            "model", "optimizer", "scheduler", "scaler", "accelerator", "max_grad_norm", "explode_at",
            "accumulation_steps", "spike_at", "divide_loss", "max_skips", "min_scale", "check_parameters", "on_device",
            "group", "black_box", "verbose",
        ),
    ),
    "Guard.step": (stepped, dict, ("loss", "tokens")),
    "GuardCallback": (
        hfpatch.GuardCallback,
        dict,
        ("explode_at", "spike_at", "max_skips", "min_scale", "check_parameters", "verbose", "black_box"),
    ),
    "BlackBox": (
        hfpatch.BlackBox, lambda: {"directory": "box"}, ("directory", "keep_batch", "max_bundles", "max_bytes"),
    ),
    "read_bundle": (hfpatch.read_bundle, dict, ("path",)),
    "BoundedModulation": (BoundedModulation, dict, ("low", "high")),
    "ModulationAdapter": (
        ModulationAdapter,
        lambda: {"width": 4},
        ("width", "rank", "low", "high", "safe_mode", "dtype", "device"),
    ),
    "ModulationAdapter.attach": (
        ModulationAdapter.attach,
        lambda: {"model": copy.deepcopy(model())},
        ("model", "rank", "low", "high", "safe_mode", "layers", "dtype"),
    ),
    "tiny_model": (
        testing.tiny_model, lambda: {"architecture": "llama"}, ("architecture", "task", "seed", "hidden_size"),
    ),
    "example_inputs": (testing.example_inputs, dict, ("model",)),
    "prove_patch": (testing.prove_patch, dict, ("entry",)),
    "SpeechLLM": (testing.SpeechLLM, lambda: {"llm": model()}, ("llm", "width", "eps")),
}  # fmt: skip

ANYTHING_WILL_DO = {("tiny_model", "hidden_size")}
"""Arguments that somebody else's code takes as they are."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_absurd_arguments_get_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gets_a_sentence(name, ABSURD, monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_odd_arguments_get_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gets_a_sentence(name, ODDER, monkeypatch, tmp_path)


def gets_a_sentence(name: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    _, wrong = tried(name, values)
    assert not wrong, "\n".join(wrong)


def tried(name: str, values: dict[str, Any]) -> tuple[int, list[str]]:
    """Call a function with each value for each argument. Returns the number of calls, and what was wrong."""
    function, usual, arguments = FUNCTIONS[name]
    wrong: list[str] = []
    for argument in arguments:
        for label, value in values.items():
            try:
                function(**{**usual(), argument: value})
            except InputError as error:
                if len(str(error)) < 15:
                    wrong.append(f"{argument}={label}: says only {error}")
            except HfpatchError:
                pass
            except Exception as error:  # noqa: BLE001 - that there is none is what is tested
                wrong.append(f"{argument}={label}: {type(error).__name__}: {str(error)[:100]}")
            else:
                if label in ("object", "silent") and (name, argument) not in ANYTHING_WILL_DO:
                    wrong.append(f"{argument}={label} was taken")
    hfpatch.revert(model())
    for patch_id in registry.by_hand():
        hfpatch.unregister(patch_id)
    return len(arguments) * len(values), wrong


def test_every_public_function_is_in_the_table() -> None:
    results = {n for n in hfpatch.__all__ if n[0].isupper() and n not in ("BlackBox", "Guard", "GuardCallback")}
    public = set(hfpatch.__all__) - results - {"errors", "nn", "testing", "__version__"}
    assert public <= FUNCTIONS.keys()
    assert {"BoundedModulation", "ModulationAdapter"} <= FUNCTIONS.keys()


def test_a_sentence_says_what_was_wanted_and_what_was_got() -> None:
    with pytest.raises(InputError, match=r"^lora_targets: want True or False as experts=, got 'yes'$"):
        hfpatch.lora_targets(model(), experts="yes")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^embed_tokens: want a string or None as submodel=, got the class Linear$"):
        hfpatch.embed_tokens(model(), nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^explain: want a string as patch_id=, got a value of type Entry$"):
        hfpatch.explain(registry.get("eps-alignment"))  # type: ignore[arg-type]
