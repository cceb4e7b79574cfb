"""Private names that hfpatch relies on, each held against what the public way does."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hfpatch.compat import (
    accelerate,
    autograd,
    checkpointing,
    dynamo,
    foreach,
    frames,
    functions,
    hooks,
    implementation,
    initial,
    loading,
    modules,
    operators,
    optimizers,
    peft,
    ranks,
    rwkv,
    sharding,
    wrappers,
)
from hfpatch.testing import tiny_model
from tests import lifecycle


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("with_kwargs", [False, True])
def test_a_hook_is_called_as_torch_would_call_it(first: bool, with_kwargs: bool) -> None:
    def trail(public: bool) -> list[Any]:
        called: list[Any] = []
        layer = nn.Linear(2, 2)

        def note(name: str) -> Any:
            return lambda _module, *given: called.append((name, len(given)))

        layer.register_forward_pre_hook(note("there before"))
        layer.register_forward_hook(note("there after"))
        if public:
            layer.register_forward_pre_hook(note("before"), prepend=first, with_kwargs=with_kwargs)
            layer.register_forward_hook(note("after"), prepend=first, with_kwargs=with_kwargs)
        else:
            hooks.before(layer, note("before"), first=first, with_kwargs=with_kwargs)
            hooks.after(layer, note("after"), first=first, with_kwargs=with_kwargs)
        layer(torch.ones(1, 2))
        return called

    assert trail(public=False) == trail(public=True)


def test_a_hook_that_is_always_called_hears_of_an_exception() -> None:
    called: list[str] = []

    class Raises(nn.Module):
        def forward(self) -> None:
            raise ValueError("no")

    module = Raises()
    hooks.after(module, lambda *_: called.append("always"), always=True)
    hooks.after(module, lambda *_: called.append("usual"))
    with pytest.raises(ValueError, match="no"):
        module()
    assert called == ["always"]


def test_removal_leaves_the_tables_as_they_were() -> None:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    was = [dict(table) for table in hooks.tables(layer)]
    handles = [hooks.before(layer, print, with_kwargs=True), hooks.after(layer, print, always=True, with_kwargs=True)]
    assert [dict(table) for table in hooks.tables(layer)] != was
    for handle in handles:
        handle.remove()
        handle.remove()
    assert [dict(table) for table in hooks.tables(layer)] == was


def test_torch_never_hands_out_a_key_of_ours() -> None:
    """Also where a loaded model has the number that torch comes to next."""
    layer = nn.Linear(2, 2)
    ours = hooks.before(layer, lambda *_: None)
    assert ours.key < 0
    for _ in range(3):
        assert layer.register_forward_pre_hook(lambda *_: None).id >= 0
    assert ours.key in layer._forward_pre_hooks


def test_hooks_are_found_again_on_a_copy() -> None:
    class Hook:
        def __call__(self, *_: Any) -> None: ...

    layer, hook = nn.Linear(2, 2), Hook()
    hooks.after(layer, hook)
    copied = copy.deepcopy(layer)
    assert hooks.keys(copied, [hook]) == []
    assert hooks.keys(copied, copied._forward_hooks.values()) == hooks.keys(layer, [hook])
    hooks.drop(copied, hooks.keys(layer, [hook]))
    assert not copied._forward_hooks
    assert layer._forward_hooks


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "m2m_100", "falcon_h1"])
def test_a_model_on_meta_is_filled_as_transformers_fills_it(name: str) -> None:
    """Dtypes of a build on meta are those of a build on the CPU; what is filled has the values of that build."""
    model = tiny_model(name)
    for dtype in (torch.float32, torch.bfloat16):
        made = initial.built(type(model), copy.deepcopy(model.config), dtype)
        hollow = initial.without_weights(type(model), model.config, dtype)
        assert {n: b.dtype for n, b in hollow.named_buffers()} == {n: b.dtype for n, b in made.named_buffers()}
        assert all(p.is_meta for p in hollow.parameters())
    was = torch.get_rng_state()
    tables = {
        "llama": "model.rotary_emb",
        "gemma3_text": "model.embed_tokens",
        "m2m_100": "model.encoder.embed_positions",
    }
    if name in tables:
        module = hollow.get_submodule(tables[name])
        for buffer in dict(module.named_buffers()):
            there = module.get_buffer(buffer)
            setattr(module, buffer, torch.full(there.shape, torch.nan, dtype=there.dtype, device="cpu"))
        initial.fill(hollow, module)
        for buffer, value in module.named_buffers():
            assert torch.equal(value, made.get_submodule(tables[name]).get_buffer(buffer))
    assert torch.equal(torch.get_rng_state(), was)


def test_the_default_dtype_comes_back() -> None:
    with pytest.raises(KeyboardInterrupt), initial.default_dtype(torch.float64):
        assert torch.ones(1).dtype == torch.float64
        raise KeyboardInterrupt
    assert torch.ones(1).dtype == torch.float32


@pytest.mark.parametrize(
    ("words", "casts", "said"),
    [
        ({"param_dtype": torch.float16}, True, "cast_forward_inputs=False"),
        ({"param_dtype": torch.bfloat16}, True, "cast_forward_inputs=False"),
        ({"param_dtype": torch.float16, "cast_forward_inputs": False}, False, ""),
        ({"param_dtype": torch.float32}, False, ""),
        ({"output_dtype": torch.float16}, True, "output_dtype=None"),
        ({}, False, ""),
    ],
)
def test_a_policy_of_fsdp_is_read_as_fsdp_does_it(words: dict[str, Any], casts: bool, said: str) -> None:
    lifecycle.gloo()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    seen: list[torch.dtype] = []

    class Passes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.dtype)
            return x * 1

    layer = Passes(2, 2)
    assert sharding.narrows_stream(layer) == ""
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**words))
    out = layer(torch.ones(1, 2))
    assert ({*seen, out.dtype} != {torch.float32}) is casts
    found = sharding.narrows_stream(layer)
    assert said in found
    assert bool(found) is casts


def test_hooks_around_many_modules_are_called_as_torch_would_call_them_and_leave_no_trace() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_forward_pre_hook(lambda *_: None)
    was = [[dict(table) for table in hooks.tables(m)] for m in model.modules()]
    called: list[tuple[str, int]] = []
    around: list[hooks.Around] = [
        (
            layer,
            lambda *given: called.append(("before", len(given))),
            lambda *given: called.append(("after", len(given))),
        )
        for layer in model
    ]
    key = hooks.around(around)
    model(torch.ones(1, 2))
    assert called == 2 * [("before", 3), ("after", 3)]
    hooks.drop_around(around, key)
    hooks.drop_around(around, key)
    assert [[dict(table) for table in hooks.tables(m)] for m in model.modules()] == was


def test_a_hook_is_silenced_in_its_place_found_and_told_from_one_that_is_gone() -> None:
    layer, called = nn.Linear(2, 2), []

    def first(*_: Any) -> None:
        called.append("first")

    def second(*_: Any) -> None:
        called.append("second")

    key = hooks.new_key()
    handle = hooks.after(layer, first, key=key)
    assert isinstance(handle, hooks.Handle)
    layer.register_forward_hook(second)
    hooks.silence(layer, [first])
    layer(torch.ones(1, 2))
    assert called == ["second"]
    assert isinstance(hooks.hooks_of(layer)[1][key], hooks.Silenced)
    assert hooks.keys(layer, [first], silent=True) == [key]
    hooks.unsilence(layer, [first])
    layer(torch.ones(1, 2))
    assert called == ["second", "first", "second"]
    assert hooks.is_set(layer, first)
    other = nn.Linear(2, 2)
    hooks.before(other, first, with_kwargs=True, key=key)
    assert hooks.orphans(other) == []
    other.__dict__[hooks.BEFORE[-1]].pop(key)
    assert hooks.orphans(other) == [key]
    assert {*hooks.BEFORE, *hooks.AFTER, *hooks.EVERY} <= layer.__dict__.keys()


def test_all_tables_of_hooks_are_torch_s() -> None:
    layer, called = nn.Linear(2, 2), []
    layer.register_forward_hook(lambda *_: called.append("after"))
    layer.register_forward_pre_hook(lambda *_: called.append("before"))
    layer.register_full_backward_hook(lambda *_: called.append("backward"))
    layer.register_full_backward_pre_hook(lambda *_: called.append("before backward"))
    assert [len(layer.__dict__[name]) for name in hooks.EVERY] == [1, 1, 1, 1]
    for name in hooks.EVERY:
        layer.__dict__[name].clear()
    layer(torch.ones(1, 2)).sum().backward()
    assert called == []


class TestRescaling:
    @pytest.mark.parametrize("every", [1, 2, 3, 0])
    def test_the_maps_that_are_divided_and_by_what(self, every: int) -> None:
        """The weights of RWKV are divided in evaluation, and multiplied in training."""
        model = tiny_model("rwkv", attention_hidden_size=32, rescale_every=every)
        assert [n for n, m in model.named_modules() if rwkv.scales_weights(m)] == ["rwkv"]
        inner = model.rwkv.eval()
        before = {n: p.detach().clone() for n, p in inner.named_parameters()}
        want = rwkv.divided_in_evaluation(inner)
        assert want == rwkv.exponents(inner)
        assert bool(want) == bool(every)
        assert not rwkv.is_divided(inner)
        model(torch.arange(4)[None])
        assert rwkv.is_divided(inner)
        for name, parameter in inner.named_parameters():
            factor = 2.0 ** want.get(name.removesuffix(".weight"), 0)
            assert torch.equal(parameter, before[name] / factor), name
        model.train()(torch.arange(4)[None])
        assert all(torch.equal(p, before[n]) for n, p in inner.named_parameters())

    def test_a_function_on_the_instance_takes_the_place_of_the_method(self) -> None:
        model = tiny_model("rwkv", attention_hidden_size=32, rescale_every=1)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        setattr(model.rwkv, rwkv.RESCALE, rwkv.in_place_of_scaling)
        model.eval()(torch.arange(4)[None])
        assert not rwkv.is_divided(model.rwkv)
        assert vars(model.rwkv)[rwkv.RESCALED] is False
        assert not rwkv.divided_in_evaluation(model.rwkv)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


class TestModules:
    def test_what_is_written_into_a_table_is_what_the_module_holds(self) -> None:
        outer, inner = nn.Module(), nn.Linear(2, 2)
        modules.children(outer)["part"] = inner
        assert outer.get_submodule("part") is outer.part is inner
        weight = nn.Parameter(torch.ones(2, 2))
        modules.parameters(inner)["weight"] = weight
        assert inner.weight is weight
        modules.buffers(inner)["table"] = torch.ones(2)
        assert dict(inner.named_buffers()).keys() == {"table"}

    def test_a_table_keeps_what_is_none(self) -> None:
        layer = nn.Linear(2, 2, bias=False)
        assert modules.parameters(layer)["bias"] is None
        layer.register_module("norm", None)
        assert modules.children(layer) == {"norm": None}

    def test_a_copy_with_a_table_of_its_own_leaves_the_module_alone(self) -> None:
        layer = nn.Linear(2, 2)
        layer.register_buffer("table", torch.ones(2))
        shell = copy.copy(layer)
        for key in (modules.CHILDREN, modules.PARAMETERS, modules.BUFFERS):
            shell.__dict__[key] = {}
        assert not shell.state_dict()
        assert layer.state_dict().keys() == {"weight", "bias", "table"}

    def test_an_unsaved_buffer_is_in_no_state_dict(self) -> None:
        layer = nn.Linear(2, 2)
        layer.register_buffer("kept", torch.ones(2))
        layer.register_buffer("made", torch.ones(2), persistent=False)
        assert modules.unsaved(layer) == {"made"} == dict(layer.named_buffers()).keys() - layer.state_dict().keys()
        layer.__dict__[modules.UNSAVED].add("kept")
        assert "kept" not in layer.state_dict()

    def test_the_base_classes_hold_for_every_convolution_and_batch_norm(self) -> None:
        convolutions = [nn.Conv1d(1, 1, 1), nn.Conv2d(1, 1, 1), nn.Conv3d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1)]
        norms = [nn.BatchNorm1d(1), nn.BatchNorm2d(1), nn.BatchNorm3d(1), nn.SyncBatchNorm(1)]
        assert all(isinstance(m, modules.CONVOLUTIONS) for m in convolutions)
        assert all(isinstance(m, modules.BATCH_NORMS) for m in norms)
        others = (nn.Linear(1, 1), nn.LayerNorm(1), nn.GroupNorm(1, 1))
        assert not any(isinstance(m, (modules.CONVOLUTIONS, modules.BATCH_NORMS)) for m in others)


def test_a_frame_is_the_caller_s_and_tells_whose_call_it_is() -> None:
    assert frames.frame_at(0).f_code.co_name == "test_a_frame_is_the_caller_s_and_tells_whose_call_it_is"
    found: list[Any] = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frame: Any = frames.frame_at(0)
            while frame is not None:
                if (module := frames.module_of(frame)) is not None:
                    found.append(module)
                frame = frame.f_back
            return x

    looks = Looks(2, 2)
    outer = nn.Sequential(looks)
    looks.register_forward_hook(lambda *_: None)  # without any hook torch calls it by a shorter way, named alike
    outer(torch.ones(1, 2))
    assert found == [looks, outer]


def test_an_exception_tells_which_modules_it_went_through_and_at_which_line() -> None:
    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(7)

    fails = Fails(2, 2)
    outer = nn.Sequential(fails)
    seen: list[Any] = []
    outer.register_forward_hook(
        lambda *_: seen.extend(frames.raised_in(sys.exception() or KeyError(), outer)), always_call=True
    )
    with pytest.raises(RuntimeError) as caught:
        outer(torch.ones(1, 2))
    assert seen == [outer, fails]
    assert frames.raised_in(caught.value, outer) == []  # it is handled here, not in the call of a module
    assert frames.line_of(caught.value).startswith("test_compat.py:")
    assert frames.line_of(caught.value).endswith("(return x.view(7))")
    assert modules.RUNS in nn.Module.__call__.__code__.co_names or hasattr(nn.Module, modules.RUNS)


class TestWrappers:
    @pytest.mark.slow
    def test_compile_names_what_it_holds(self) -> None:
        layer = nn.Linear(2, 2)
        assert modules.children(torch.compile(layer, backend="eager")) == {wrappers.COMPILED: layer}

    def test_checkpointing_names_what_it_holds(self) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        layer = nn.Linear(2, 2)
        assert modules.children(checkpoint_wrapper(layer)) == {wrappers.CHECKPOINTED: layer}

    def test_fsdp1_names_what_it_holds(self) -> None:
        """It needs an accelerator to be made; its public `module` reads the name."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrapper, layer = FullyShardedDataParallel.__new__(FullyShardedDataParallel), nn.Linear(2, 2)
        nn.Module.__init__(wrapper)
        modules.children(wrapper)[wrappers.SHARDED] = layer
        assert wrapper.module is layer

    @pytest.mark.slow
    def test_the_names_of_classes_lead_to_them(self) -> None:
        from peft import PeftModel
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        want = {
            "DDP": nn.parallel.DistributedDataParallel,
            "DataParallel": nn.DataParallel,
            "torch.compile": type(torch.compile(nn.Linear(2, 2), backend="eager")),
            "FSDP": FullyShardedDataParallel,
            "FSDP2": FSDPModule,
            "PEFT": PeftModel,
        }
        found = {kind: f"{cls.__module__}.{cls.__qualname__}" for kind, cls in want.items()}
        assert {name: kind for kind, name in found.items()} == wrappers.CLASSES


@pytest.mark.slow
class TestDynamo:
    @pytest.fixture(autouse=True)
    def fresh(self) -> Any:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def test_every_way_to_compile_is_seen(self) -> None:
        plain, whole, by_itself, forward = (nn.Linear(2, 2) for _ in range(4))
        assert not dynamo.is_compiled(plain)
        assert dynamo.is_compiled(torch.compile(whole, backend="eager"))  # type: ignore[arg-type]
        by_itself.compile(backend="eager")
        assert by_itself.__dict__[dynamo.COMPILED_CALL] is not None
        assert dynamo.is_compiled(by_itself)
        forward.forward = torch.compile(forward.forward, backend="eager")
        assert dynamo.is_compiled(forward)

    def test_what_generate_compiles_is_seen(self) -> None:
        from transformers import CompileConfig

        model = tiny_model("llama")
        assert not dynamo.is_compiled(model)
        model.get_compiled_call(CompileConfig(backend="eager"))
        assert dynamo.is_compiled(model)

    def test_code_that_was_compiled_is_told_from_code_that_was_not(self) -> None:
        def doubled(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        assert dynamo.holds_code(doubled.__code__) is False
        torch.compile(doubled, backend="eager")(torch.ones(2))
        assert dynamo.holds_code(doubled.__code__) is True
        assert dynamo.is_loaded()
        assert sys.modules[dynamo.PACKAGE] is torch._dynamo

    def test_a_call_inside_what_dynamo_gave_up_would_be_compiled(self) -> None:
        found: list[bool] = []

        def ask() -> None:
            found.append(dynamo.compiles_next())

        def breaks(x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            ask()
            return x + 1

        ask()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dynamo cannot trace the question
            torch.compile(breaks, backend="eager")(torch.ones(2))
        assert found == [False, True]


class TestAutograd:
    def test_a_gradient_is_seen_as_a_registered_hook_sees_it(self) -> None:
        """Also after an in-place write, and beside hooks of the user that are removed."""
        leaf = torch.randn(3, requires_grad=True)
        seen: dict[str, torch.Tensor] = {}
        made = leaf * 2
        first = made.register_hook(lambda g: seen.setdefault("removed", g))
        autograd.on_gradient(made, lambda g: seen.update(ours=g))
        autograd.on_gradient(made, lambda g: seen.update(again=g))
        later = made.register_hook(lambda g: seen.update(theirs=g))
        first.remove()
        made.mul_(5)
        made.sum().backward()
        assert sorted(seen) == ["again", "ours", "theirs"]
        assert all(torch.equal(g, torch.full((3,), 5.0)) for g in seen.values())
        later.remove()
        apart = (leaf * 2).split(2)
        autograd.on_gradient(apart[1], lambda g: seen.update(part=g))
        (apart[0].sum() + 7 * apart[1].sum()).backward()
        assert seen["part"].tolist() == [7.0]

    def test_what_steps_in_the_backward_pass_is_seen(self) -> None:
        plain, stepped = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        handle = stepped.register_post_accumulate_grad_hook(lambda p: None)
        assert [autograd.steps_in_backward(p) for p in (plain, stepped)] == [False, True]
        handle.remove()
        assert not autograd.steps_in_backward(stepped)

    def test_a_version_is_what_autograd_compares(self) -> None:
        x = torch.ones(2, requires_grad=True)
        held = x * 1
        out, was = held * held, autograd.version(held)
        held.add_(1)
        assert autograd.version(held) == was + 1
        with pytest.raises(RuntimeError, match=f"is at version {was + 1}; expected version {was} instead"):
            out.sum().backward()

    def test_tensors_of_inference_mode_have_none(self) -> None:
        with torch.inference_mode():
            x = torch.ones(2)
            x.add_(1)
        assert autograd.version(x) == 0

    def test_backward_functions_are_numbered_in_the_order_of_forward(self) -> None:
        x = torch.ones(2, requires_grad=True)
        before = autograd.next_number()
        first, second = x * 2, (x * 2).exp()
        numbers = [autograd.number_of(t.grad_fn) for t in (first, second)]
        assert before <= numbers[0] < numbers[1] < autograd.next_number()

    def test_the_function_that_runs_is_known_by_name(self) -> None:
        class Own(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
                seen.append((autograd.name_of(node := autograd.running_node()), autograd.number_of(node)))
                return gradient

        seen: list[tuple[str, int]] = []
        x = torch.ones(2, requires_grad=True)
        own = Own.apply(x)
        own.sum().backward()
        assert seen == [("Own.backward", autograd.number_of(own.grad_fn))]
        assert autograd.name_of((x * 2).grad_fn) == "MulBackward0"
        assert autograd.running_node() is None

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_a_reentrant_checkpoint_is_told_by_its_backward_function(self, reentrant: bool) -> None:
        x = torch.ones(2, requires_grad=True)
        out = torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=reentrant)
        assert autograd.is_reentrant_checkpoint(out.grad_fn) == reentrant

    def test_a_call_after_backward_comes_when_every_gradient_is_there(self) -> None:
        x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
        seen: list[bool] = []
        y.register_hook(lambda _: autograd.after_backward(lambda: seen.append(x.grad is not None)))
        (x.exp() * y).sum().backward()
        assert seen == [True]
        with pytest.raises(RuntimeError):
            autograd.after_backward(lambda: None)

    def test_a_transformation_is_seen_inside_alone(self) -> None:
        seen: list[bool] = []

        def f(x: torch.Tensor) -> torch.Tensor:
            seen.append(autograd.in_transform())
            return x.sum()

        torch.func.vmap(f)(torch.ones(2, 2))
        torch.func.grad(f)(torch.ones(2))
        f(torch.ones(2))
        assert seen == [True, True, False]


class TestFunctions:
    def test_a_mode_is_on_the_stack_between_push_and_pop(self) -> None:
        seen: list[str] = []

        class Notes(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(func.__name__)
                return func(*args, **(kwargs or {}))

        mode = Notes()
        assert functions.topmost() is None
        functions.push(mode)
        try:
            assert functions.topmost() is mode
            torch.ones(2).tanh()
        finally:
            assert functions.pop() is mode
        assert functions.topmost() is None
        torch.ones(2).exp()
        assert seen == ["ones", "tanh"]

    def test_a_subclass_is_plain_inside_while_modes_go_on(self) -> None:
        seen: list[str] = []

        class Loud(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append("subclass")
                return super().__torch_function__(func, types, args, kwargs or {})

        class Notes(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append("mode")
                return func(*args, **(kwargs or {}))

        loud = torch.ones(2).as_subclass(Loud)
        with functions.AsPlain(), Notes():
            torch.tanh(loud)
        assert seen == ["mode"]
        torch.tanh(loud)
        assert seen == ["mode", "subclass"]


def _operators_of(run: Any) -> list[Any]:
    found: list[Any] = []

    class Notes(operators.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(func)
            return func(*args, **(kwargs or {}))

    with Notes():
        run()
    return found


def _names_of(run: Any) -> set[str]:
    return {operator.overloadpacket.__name__ for operator in _operators_of(run)}


class TestOperators:
    def test_softmax_goes_by_these_names(self) -> None:
        x, q = torch.ones(2, 2), torch.ones(1, 1, 2, 4, requires_grad=True)

        def masked() -> None:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(2, 2, dtype=torch.bool))

        found = _names_of(lambda: x.softmax(-1)) | _names_of(lambda: x.log_softmax(-1)) | _names_of(masked)
        assert found >= operators.SOFTMAX

    def test_fused_attention_begins_with_one_of_these(self) -> None:
        q = torch.ones(1, 1, 2, 4, requires_grad=True)
        found = _names_of(lambda: F.scaled_dot_product_attention(q, q, q).sum().backward())
        fused = {name for name in found if name.startswith(operators.ATTENTION)}
        assert {name.endswith("_backward") for name in fused} == {True, False}
        for start in operators.ATTENTION:
            assert [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"aten::{start}")], start

    def test_products_of_groups_and_of_scaled_matrices(self) -> None:
        a, b = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(2, 16, 8, dtype=torch.bfloat16)
        offsets = torch.tensor([2, 4], dtype=torch.int32)
        found = _names_of(lambda: F.grouped_mm(a, b, offs=offsets))
        assert len(found & operators.MATMULS) == 1
        one, eighth = torch.tensor(1.0), torch.ones(16, 16).to(torch.float8_e4m3fn)
        (scaled,) = operators.MATMULS - found
        product = getattr(torch.ops.aten, scaled)(eighth, eighth.t(), one, one, out_dtype=torch.float32)
        assert torch.equal(product, torch.full((16, 16), 16.0))

    def test_the_fused_rms_norm_is_one(self) -> None:
        x, weight = torch.randn(2, 8), torch.ones(8)
        forward, backward = sorted(operators.RMS_NORMS, key=len)
        out, scale = getattr(torch.ops.aten, forward)(x, [8], weight, 1e-6)
        assert torch.allclose(out, F.rms_norm(x, (8,), weight, 1e-6))
        given = [t.to("meta") for t in (torch.ones(2, 8), x, scale, weight)]  # no CPU has the backward kernel
        grads = getattr(torch.ops.aten, backward)(given[0], given[1], [8], *given[2:], [True, True])
        assert [grad.shape for grad in grads] == [x.shape, weight.shape]

    def test_a_ctc_loss_begins_with_its_labels_and_lengths(self) -> None:
        given = (torch.randn(4, 1, 3).log_softmax(-1), torch.ones(1, 2, dtype=torch.int64), *torch.tensor([[4], [2]]))
        assert _names_of(lambda: F.ctc_loss(*given)) & operators.CTC
        for name in operators.CTC:
            first = getattr(torch.ops.aten, name).default._schema.arguments[:4]
            assert [a.name for a in first] == ["log_probs", "targets", "input_lengths", "target_lengths"]

    def test_a_product_of_batches_ends_in_a_view(self) -> None:
        assert operators.RESHAPE in _names_of(lambda: torch.ones(2, 2, 2) @ torch.ones(2, 2))

    def test_a_cast_is_a_copy(self) -> None:
        assert _operators_of(lambda: torch.ones(2).half())[-1] is operators.to_copy
        assert operators.to_copy.overloadpacket.__name__ == operators.COPY

    def test_what_overwrites_is_told_by_its_schema(self) -> None:
        x = torch.ones(2)
        (add,), (add_,) = _operators_of(lambda: x + 1), _operators_of(lambda: x.add_(1))
        assert operators.overwrites(add_)
        assert not operators.overwrites(add)

    def test_what_moves_values_computes_none(self) -> None:
        x, at = torch.ones(2, 2), torch.tensor([0])

        def move() -> None:
            torch.cat([x[0], x.t().half().float()[0], x.view(4)[:2], x[at][0], x.clone()[0], torch.zeros_like(x)[0]])
            x.masked_fill(x > 2, 0).histc(2)

        moved = _operators_of(move)
        assert {op.overloadpacket.__name__ for op in moved if not operators.moves_only(op)} == {"gt"}
        assert {op.overloadpacket.__name__ for op in moved} & operators.MOVES >= {"cat", "index", "clone", "_to_copy"}
        assert {op.overloadpacket.__name__ for op in moved if operators.views(op)} == {"select", "t", "view", "slice"}
        computed = _operators_of(lambda: (x @ x + x).mul_(2).index_add_(0, at, x[:1]))
        assert [op.overloadpacket.__name__ for op in computed if not operators.moves_only(op)] == [
            "mm", "add", "mul_", "index_add_",
        ]  # fmt: skip

    def test_what_waits_for_ranks_is_in_these_namespaces(self) -> None:
        from torch.distributed import _functional_collectives as functional

        lifecycle.gloo()
        x = torch.ones(2)
        found = _operators_of(lambda: torch.distributed.all_reduce(x))
        group = torch.distributed.group.WORLD
        found += _operators_of(lambda: functional.wait_tensor(functional.all_reduce(x, "sum", group)))
        assert {operator.namespace for operator in found} & set(operators.COLLECTIVES) == {"c10d", "_c10d_functional"}


def test_many_norms_are_summed_in_float32_and_many_tensors_scaled() -> None:
    tensors = [torch.full((4,), 300.0).half(), torch.full((2,), 60000.0).half()]
    wide = foreach.norms(tensors, 2, dtype=torch.float32)
    assert [n.item() for n in wide] == pytest.approx([t.float().norm().item() for t in tensors])
    assert not foreach.norms(tensors, 2)[1].isfinite()
    foreach.multiply_(tensors, torch.tensor(0.5).half())
    assert [t[0].item() for t in tensors] == [150.0, 30000.0]


def test_an_optimizer_that_skips_by_itself_is_told() -> None:
    def made(fused: bool) -> torch.optim.Optimizer:
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        return torch.optim.AdamW([weight], fused=fused)

    assert optimizers.skips_itself(made(True))
    assert not optimizers.skips_itself(made(False))
    skipping: Any = made(True)
    skipping.grad_scale, skipping.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    skipping.step()
    assert torch.equal(skipping.param_groups[0]["params"][0], torch.ones(2))


def test_the_optimizer_inside_accelerates() -> None:
    from accelerate import Accelerator

    weight = nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([weight])
    assert optimizers.inside(plain) is plain
    assert optimizers.inside(Accelerator(cpu=True).prepare(plain)) is plain
    assert optimizers.inside(weight) is None
    assert optimizers.parameters_by_id(plain) == {id(weight): weight}


class TestAccelerate:
    def test_its_hook_and_the_forward_that_was_there(self) -> None:
        from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

        layer, hook = nn.Linear(2, 2), ModelHook()
        forward = layer.forward
        add_hook_to_module(layer, hook)
        assert layer.__dict__[accelerate.HOOK] is hook
        assert layer.__dict__[accelerate.FORWARD] == forward
        remove_hook_from_module(layer)
        assert not {accelerate.HOOK, accelerate.FORWARD} & layer.__dict__.keys()

    def test_a_skipped_step_leaves_the_schedule_alone(self) -> None:
        from accelerate import Accelerator

        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        prepared, scheduler = Accelerator(cpu=True).prepare(optimizer, schedule)
        for skipped in (True, False):
            accelerate.says_skipped(prepared, skipped)
            assert prepared.step_was_skipped is skipped
            was = schedule.last_epoch
            scheduler.step()
            assert schedule.last_epoch == was + (not skipped)


def test_a_trainer_runs_its_epochs_and_saves_by_these_methods(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True
    )
    row = {"input_ids": [3, 4, 5], "labels": [3, 4, 5]}
    made = Trainer(model=tiny_model("llama"), args=args, train_dataset=[row] * 16)
    called: list[str] = []

    def noted(name: str) -> Any:
        original = getattr(made, name)

        def replaced(*given: Any, **words: Any) -> Any:
            called.append(name)
            return original(*given, **words)

        return replaced

    for name in (accelerate.EPOCH, accelerate.SAVE):
        made.__dict__[name] = noted(name)
    made.train()
    assert called == [accelerate.EPOCH, accelerate.SAVE, accelerate.SAVE]


class TestImplementation:
    def test_the_choice_is_what_the_public_setter_sets(self) -> None:
        model: Any = tiny_model("llama")
        was = dict(vars(model.config))
        model.set_attn_implementation("sdpa")
        assert implementation.chosen(model.config) == "sdpa"
        assert implementation.chosen(object()) is None
        written = {key for key, value in vars(model.config).items() if was.get(key) != value}
        assert implementation.KEYS[0] in written <= set(implementation.KEYS)

    def test_a_note_changes_one_config_and_is_what_runs(self) -> None:
        model: Any = tiny_model("llama")
        ran: list[str] = []
        transformers.AttentionInterface.register(
            "noted_for_a_test", lambda *a, **k: ran.append("it") or _eager(*a, **k)
        )
        implementation.note(model.config, "noted_for_a_test")
        assert implementation.chosen(model.config) == "noted_for_a_test"
        model(torch.ones(1, 3, dtype=torch.long))
        assert ran

    def test_a_build_takes_the_choice_of_its_config(self) -> None:
        config = copy.deepcopy(tiny_model("llama").config)
        for name in ("eager", "sdpa"):
            implementation.choose(config, name)
            built: Any = transformers.LlamaForCausalLM(copy.deepcopy(config))
            assert implementation.chosen(built.config) == name

    @pytest.mark.parametrize("name", ["llama", "gemma2"])
    def test_what_a_class_takes_is_what_the_setter_lets_through(self, name: str) -> None:
        model: Any = tiny_model(name)
        taken = implementation.taken(type(model))
        for wanted in ("eager", "sdpa", "flex_attention"):
            try:
                copy.deepcopy(model).set_attn_implementation(wanted)
            except ValueError:
                assert wanted not in taken
            else:
                assert wanted in taken


def _eager(module: Any, *args: Any, **words: Any) -> Any:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    return eager_attention_forward(module, *args, **words)


class TestLoading:
    def test_an_auto_class_s_mapping_is_what_it_builds_from(self) -> None:
        config = tiny_model("llama").config
        cls = loading.classes_of("AutoModelForCausalLM")[type(config)]
        assert cls is type(transformers.AutoModelForCausalLM.from_config(config)) is transformers.LlamaForCausalLM
        assert loading.names_of("AutoModelForCausalLM")["llama"] == "LlamaForCausalLM"
        assert not loading.classes_of("AutoNothing")
        assert not loading.names_of("AutoNothing")

    def test_what_is_kept_in_float32_is_what_the_loader_keeps(self, tmp_path: Path) -> None:
        model = tiny_model("t5")
        loose, strict = loading.kept_wide(model)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, dtype=torch.float16)
        wide = {name for name, p in loaded.named_parameters() if p.dtype == torch.float32}
        assert wide
        assert all(any(pattern in name for pattern in loose | strict) for name in wide)
        assert loading.kept_wide(tiny_model("llama")) == (set(), set())


def test_reentrant_checkpointing_is_told_by_the_layer() -> None:
    model: Any = tiny_model("llama")
    (layer, *_) = model.model.layers
    assert not checkpointing.is_reentrant(layer)
    for reentrant in (True, False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        assert checkpointing.is_reentrant(layer) is reentrant


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_turned_on_and_off_without_a_warning(reentrant: bool) -> None:
    model = tiny_model("llama")
    checkpointing.turn_on(model, reentrant=reentrant)
    layer = model.model.layers[0]
    assert layer.gradient_checkpointing
    assert checkpointing.is_reentrant(layer) is reentrant
    checkpointing.turn_off(model)
    assert not layer.gradient_checkpointing


def test_a_hook_of_other_code_that_follows_ours() -> None:
    module = nn.Linear(2, 2)
    first, second = (lambda *_: None), (lambda *_: None)
    module.register_forward_hook(lambda *_: None)
    hooks.after(module, first)
    hooks.after(module, second)
    assert not hooks.followed(module, first), "those before it, and our own"
    module.register_forward_hook(lambda *_: None)
    assert hooks.followed(module, first)
    assert hooks.followed(module, second)


class TestPEFT:
    def adapted(self, **words: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"], **words))

    def test_the_note_of_active_adapters_is_what_peft_reads(self) -> None:
        model = self.adapted()
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        assert layer.__dict__.get(peft.ACTIVE) == layer.active_adapters == ["default"]
        layer.__dict__[peft.ACTIVE] = []
        assert layer.active_adapters == []
        peft.switch(layer, ["default"], off=True)
        assert (layer.active_adapters, layer.disable_adapters) == (["default"], True)

    def test_switched_off_is_what_disable_adapter_does(self) -> None:
        model = self.adapted()
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        assert not peft.is_off(layer)
        with model.disable_adapter():
            assert peft.is_off(layer)

    def test_a_layer_is_added_where_it_is_wanted_and_nowhere_else(self) -> None:
        model = self.adapted()
        block = model.base_model.model.model.layers[0]
        parent, name, path = block.mlp, "up_proj", "model.layers.0.mlp.up_proj"
        config = model.peft_config["default"]
        peft.add_layer(model.base_model, config, "default", parent.up_proj, parent=parent, name=name, path=path)
        found = {n for n, m in model.base_model.model.named_modules() if hasattr(m, "lora_A")}
        assert path in found
        assert {p.rpartition(".")[2] for p in found - {path}} == {"q_proj"}

    def test_a_layer_for_a_module_or_none(self) -> None:
        linear = nn.Linear(2, 2)
        assert peft.layer_for(linear).get_base_layer() is linear
        conv = transformers.pytorch_utils.Conv1D(2, 3)
        assert peft.layer_for(conv).fan_in_fan_out
        with pytest.raises(ValueError, match="not supported"):
            peft.layer_for(nn.LayerNorm(2))

    def test_what_the_mamba_family_is_refused(self) -> None:
        from peft import LoraConfig, get_peft_model

        assert peft.refuses("out_proj", "mamba")
        assert not peft.refuses("out_proj", "llama")
        with pytest.raises(ValueError, match="out_proj"):
            get_peft_model(tiny_model("mamba"), LoraConfig(target_modules=["out_proj"]))

    def test_all_linear_stands_for_what_peft_adapts(self) -> None:
        from peft import LoraConfig, get_peft_model

        model, config = tiny_model("llama"), LoraConfig(target_modules="all-linear")
        named = peft.all_linear(copy.deepcopy(config), model).target_modules
        tuner: Any = get_peft_model(model, config).base_model
        assert set(named) == {name for name, m in tuner.model.named_modules() if hasattr(m, "lora_A")}

    def test_a_model_s_own_adapters_are_noted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from peft import LoraConfig
        from transformers.integrations import peft as integration

        monkeypatch.setattr(integration, "check_peft_version", lambda **_: None)  # it may ask for a newer one
        model: Any = tiny_model("llama")
        assert not peft.has_own_adapters(model)
        model.add_adapter(LoraConfig(target_modules=["q_proj"]))
        assert peft.has_own_adapters(model)


def test_fsdp2_gives_a_module_s_class_the_way_to_its_state() -> None:
    lifecycle.gloo()
    layer = nn.Linear(2, 2)
    assert not hasattr(layer, sharding.ACCESS)
    fully_shard(layer, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    assert hasattr(type(layer), sharding.ACCESS)


class TestRanks:
    def test_alone_communication_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            with operators.alone():
                distributed.all_reduce(torch.ones(2))  # no other rank
            monkeypatch.setattr(distributed, "get_world_size", lambda *_: 2)
            with operators.alone(), pytest.raises(RuntimeError, match="a layer communicates with other ranks"):
                distributed.all_reduce(torch.ones(2))
        finally:
            distributed.destroy_process_group()

    def test_no_process_group_has_no_store(self) -> None:
        assert ranks.store() is None

    def test_a_value_that_one_rank_sets_reaches_another(self) -> None:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            store = ranks.store()
            assert store is not None
            assert ranks.wait_for(store, "hfpatch/none", 0.1) is None
            store.set("hfpatch/word", "a value")
            assert ranks.wait_for(store, "hfpatch/word", 0.1) == "a value"
        finally:
            distributed.destroy_process_group()


def test_halves_of_adapters_are_told_by_their_names() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]))
    named = dict(model.named_parameters())
    found = peft.halves(named)
    assert len(found) == 5, "four layers and the embedding"
    assert {n for pair in found for n in pair} == {n for n, p in named.items() if p.requires_grad}
    assert all(named[low].shape[0] == named[high].shape[1] == 2 for low, high in found)
    assert peft.halves(["a.lora_Ax.weight", "lora_A.weight"]) == []


def test_codes_are_unpacked_by_the_function_of_bitsandbytes() -> None:
    """What it gives is held against the library in tests/test_quantised.py."""
    tools = SimpleNamespace(_convert_weight_packed_for_cpu_inverse=lambda data, state: (data + 1, state))
    data, state = functions.unpacked_codes(tools, torch.zeros(2), "state")
    assert data.tolist() == [1.0, 1.0] and state == "state"
