"""Records the tensors of one traced step, with hooks on modules (`module_hooks.py`) and on tensors.

Gradients are recorded by hooks on tensors: torch's backward hooks on modules do not work with dicts as outputs, with
frozen modules or with in-place operations. The hooks return None, so they replace nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hfpatch.compat.autograd import after_backward, on_gradient, steps_in_backward, version
from hfpatch.compat.modules import BUFFERS, PARAMETERS
from hfpatch.numerics.statistics import Rows, rows
from hfpatch.tracing.calls import Call, snapshot
from hfpatch.tracing.events import Event, Operation, Passage, Phase, Step
from hfpatch.tracing.failed_forward import Raised
from hfpatch.tracing.growing.own_code import Made, OwnCode
from hfpatch.tracing.tensors import ORDINARY, cached, floating, local, measurable
from hfpatch.tracing.watched import Places

Role = Literal["input", "output", "parameter", "buffer"]
SLOTS: tuple[tuple[Role, str], ...] = (("parameter", PARAMETERS), ("buffer", BUFFERS))


class Watch:
    """Records one step of a model.

    Args:
        places: The model's modules.
        step: The step that the events are added to.
        backward: Record the gradients too.
        measured: Versions of parameters and buffers when they were last measured, by id; read and updated.
        overwritten: Module, role and name of tensors that are known to be written to in place after they are seen.
        ended: Called when the backward pass is over.
        expected: Buffers, and the values they should hold (`hfpatch.tracing.computed_buffers.expected`).
        progress: Called with the path of each block when its forward or backward pass is done.
    """

    def __init__(
        self,
        places: Places,
        *,
        step: Step,
        backward: bool,
        measured: dict[int, tuple[weakref.ref[torch.Tensor], int]],
        overwritten: set[tuple[str, str, str]],
        ended: Callable[[], None],
        expected: Iterable[tuple[str, str, torch.Tensor, torch.Tensor]] = (),
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.places, self.step, self.backward, self.ended = places, step, backward, ended
        self.measured, self.expected, self.progress = measured, expected, progress
        self.overwritten = overwritten
        self.rows: dict[torch.device, Rows] = {}
        self.calls: dict[tuple[str, int], Call] = {}
        self.caches: dict[int, tuple[Any, Any]] = {}
        self.output: Any = None
        self.final: set[int] = set()
        self.raised: Raised | None = None
        self.beside: dict[str, nn.Module] = {}
        self._root = places.containers[""]
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        self._stack: list[tuple[str, int]] = []
        self._hooked: set[tuple[str, int, str]] = set()
        self._passages: dict[str, Passage] = {}  # of each module the last
        self._returned = 0
        self._handles: list[RemovableHandle] = []
        self._taken: set[int] = set()
        self._own_code = OwnCode(self._operation)
        self._running = False
        self._gradients = False
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        """True if the forward pass is under way."""
        return self._running

    def close(self) -> None:
        """Stop recording. Hooks on tensors that operations made stay until their graph is freed, and do nothing."""
        self.backward = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget(self) -> None:
        """Release every tensor of the step."""
        self.calls.clear()
        self.caches.clear()
        self.output = None
        self._seen.clear()
        self._own_code.forget()

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the start of a call of the model: its parameters and buffers, then its inputs."""
        self._running = True
        for path, module in self.places.owners:
            for role, slots in SLOTS:
                for name, tensor in module.__dict__[slots].items():
                    if tensor is None:
                        continue
                    if self._changed(tensor) and measurable(tensor):
                        self._event("weights", path, role, name, 0, tensor)
                    if self.backward and role == "parameter" and tensor.requires_grad and steps_in_backward(tensor):
                        self._take(tensor, path, name)
        for path, name, buffer, built in self.expected:
            difference = buffer.detach() - built.to(buffer.device, non_blocking=True)
            self._event("weights", path, "buffer", name, 0, difference, is_difference=True)
        for name, tensor in cached({**{str(i): a for i, a in enumerate(args)}, **kwargs}):
            self._input("", name, 0, tensor, None)
        self.called("", self._root, args, kwargs, True)

    def _take(self, parameter: torch.Tensor, path: str, name: str) -> None:
        """Record the gradient of a parameter when it comes: its `.grad` may be freed before the pass is over."""
        if id(parameter) in self._taken:  # tied
            return
        self._taken.add(id(parameter))

        def arrived(gradient: torch.Tensor) -> None:
            if self.backward and measurable(gradient):
                if not self._gradients:
                    self._begin_backward()
                self._event("gradients", path, "parameter", name, 0, gradient)

        self._handles.append(parameter.register_hook(arrived))

    def finish(self, output: Any) -> None:
        """Record the output of the model."""
        if output is not None:
            self.output = output
            self.returned("", output, True)
            self.end_at(output)
        if self._taken:  # an optimizer steps within the backward pass
            self.measure()
        self._running = False

    def measure(self) -> None:
        """Measure the tensors that wait to be."""
        with self._lock:
            for gathered in self.rows.values():
                gathered.flush()

    def end_at(self, output: Any) -> None:
        """Note that the backward pass may start at these tensors."""
        self.final |= {n for _, tensor in floating(output) if (n := self._known(tensor)) is not None}

    @contextmanager
    def recording(self, path: str, module: nn.Module) -> Generator[None]:
        """Record the calls of a module beside the model, under a path of its own, while the context is entered."""
        self.beside[path] = module
        running, stack = self._running, list(self._stack)
        self._running = True
        try:
            yield
        finally:
            self._running, self._stack = running, stack

    def called(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], keeps: bool) -> None:
        """Record the call of a watched module; with `keeps`, keep the call so that it can be run again."""
        if not self._running:
            return
        last = self._passages.get(path)
        number = 0 if last is None else last.number + 1
        passage = self._passages[path] = Passage(path, number, [], [])
        self.step.passages.append(passage)
        if not keeps and len(args) == 1 and not kwargs and (known := self._known(args[0])) is not None:
            passage.inputs.append(known)
            return  # the common case: the output of another module
        given = floating(args)
        if kwargs:
            given += floating(kwargs)
        if not keeps:
            for name, tensor in given:
                if self._known(tensor) is None and self._stack[-1][0] in self.places.written:
                    self._made(tensor)
                self._input(path, name, number, tensor, passage)
            return
        snapshot((*args, *kwargs.values()), self.caches)
        versions = [(tensor, version(tensor)) for _, tensor in given]
        call = self.calls[path, number] = Call(path, module, number, args, dict(kwargs), self.caches, versions)
        call.inputs = passage.inputs
        for name, tensor in given:
            self._made(tensor)
            self._input(path, name, number, tensor, passage)
        self._stack.append((path, number))

    def _input(self, path: str, name: str, number: int, tensor: torch.Tensor, passage: Passage | None) -> None:
        known = self._known(tensor)
        index = known if known is not None else self._new("forward", path, "input", name, number, tensor, None)
        if passage is not None:
            passage.inputs.append(index)

    def returned(self, path: str, output: Any, keeps: bool) -> None:
        """Record the output of a watched module; `keeps` as for `called`."""
        passage = self._passages.get(path)
        if passage is None or not self._running:
            self._recomputed(path, 0 if passage is None else passage.number, output, keeps)
            return
        number = passage.number
        call = self.calls.get((path, number)) if keeps else None
        for name, tensor in floating(output):
            known = self._known(tensor)
            if self.backward:
                if path in self.places.containers or path in self.places.written:
                    self._made(tensor)
                elif keeps or self._stack[-1][0] in self.places.written:
                    self._own_code.end(tensor)
            if known is None:
                known = self._new("forward", path, "output", name, number, tensor, call)
            elif call is not None and self.backward and tensor.requires_grad:
                self._hook(tensor, partial(self._keep, call, name))
            passage.outputs.append(known)
        passage.returned = self._returned
        self._returned += 1
        if keeps:
            self._stack.pop()
            if self.progress is not None:
                self.progress(path)

    def _recomputed(self, path: str, number: int, output: Any, keeps: bool) -> None:
        """Follow the gradients of an output that was computed again under checkpointing."""
        call = self.calls.get((path, number)) if keeps else None
        for name, tensor in floating(output) if self.backward else ():
            if not tensor.requires_grad:
                continue
            if (path, number, name) not in self._hooked:
                self._follow(tensor, path, "output", name, number, None, call)
            elif call is not None:
                self._hook(tensor, partial(self._keep, call, name))

    def _made(self, tensor: torch.Tensor) -> None:
        """Watch the operations by which the innermost container or block that runs made a tensor, if it did.

        Only the code of containers, and of blocks that the user wrote, is watched.
        """
        if self.backward and self._stack and tensor.requires_grad and self._known(tensor) is None:
            self._own_code.follow(tensor, *self._stack[-1])

    def _operation(
        self, path: str, number: int, node: str, region: int, made: list[Made], given: torch.Tensor
    ) -> None:  # fmt: skip
        """Record the gradients of an operation in a container's own code."""
        gradients = [gradient for gradient, _ in made]
        if self.backward and all(map(measurable, (given, *gradients))):
            first, *others = (
                self._event("backward", path, "output", node, number, g, into=[]) for g in (given, *gradients)
            )
            leaving = tuple(out for _, out in made)
            self.step.own_code.append(Operation(path, number, node, region, first, tuple(others), leaving))

    def _known(self, tensor: torch.Tensor) -> int | None:
        """Return the event of a tensor that was recorded before and not written to since; None for any other."""
        known = self._seen.get(id(tensor))
        return known[2] if known is not None and known[0]() is tensor and known[1] == version(tensor) else None

    def _new(
        self, phase: Phase, path: str, role: Role, name: str, number: int, tensor: torch.Tensor, call: Call | None
    ) -> int:
        index = self._event(phase, path, role, name, number, tensor).index
        self._seen[id(tensor)] = (weakref.ref(tensor), version(tensor), index)
        if self.backward and tensor.requires_grad:
            self._follow(tensor, path, role, name, number, index, call)
        return index

    def _event(
        self, phase: Phase, path: str, role: Role, name: str, number: int, tensor: torch.Tensor,
        forward: int | None = None, is_difference: bool = False, into: list[Event] | None = None,
    ) -> Event:  # fmt: skip
        held = tensor if type(tensor) in ORDINARY else local(tensor)
        device = held.device
        events = self.step.events if into is None else into
        at_once = bool(self.overwritten) and (path, role, name) in self.overwritten
        with self._lock:  # a model on several GPUs has a backward thread for each
            gathered = self.rows.get(device)
            if gathered is None:
                gathered = self.rows[device] = rows(device)
            event = Event(
                len(events), phase, path, role, name, number, tensor.dtype, held.shape, device,
                gathered.add(held, at_once=at_once), None, self._stack[-1] if self._stack else None, forward,
                is_difference,
            )  # fmt: skip
            events.append(event)
        return event

    def _changed(self, tensor: torch.Tensor) -> bool:
        """True if a parameter or buffer may have changed since it was last measured."""
        known, now = self.measured.get(id(tensor)), version(tensor)
        if known and known[0]() is tensor and known[1] == now:
            return False
        self.measured[id(tensor)] = (weakref.ref(tensor), now)
        return True

    def _follow(
        self, tensor: torch.Tensor, path: str, role: Role, name: str, number: int, of: int | None, call: Call | None
    ) -> None:
        """Record the gradient of a tensor, and keep it with the call that returned the tensor, if one is given."""
        if role == "output":
            self._hooked.add((path, number, name))
        self._hook(tensor, partial(self._gradient, path, role, name, number, of, call))

    def _hook(self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        """Have autograd call a hook with the gradient of a tensor; it goes with the graph, or when the step is over."""
        if tensor.grad_fn is None:
            self._handles.append(tensor.register_hook(hook))
        else:
            on_gradient(tensor, hook)

    def _gradient(
        self, path: str, role: Role, name: str, number: int, of: int | None, call: Call | None, grad: torch.Tensor
    ) -> None:
        if not self.backward:
            self.step.unseen = True
            return
        if call is not None:
            self._keep(call, name, grad)
        if not self._gradients:
            self._begin_backward()
        event = self._event("backward", path, role, name, number, grad, of)
        if of in self.final and not grad.dim():
            self.step.start = event

    def _keep(self, call: Call, name: str, grad: torch.Tensor) -> None:
        if not self.backward:
            return
        call.grads[name] = grad
        if self.progress is not None:
            self.progress(call.path)

    def _begin_backward(self) -> None:
        """Have autograd report the end of the backward pass, when its first gradient is seen.

        The step must be diagnosed then: an optimizer may change the weights before the model is called again.
        """
        self._gradients = True
        after_backward(lambda: after_backward(self._end_backward))  # after DDP's callback, which reduces gradients

    def _end_backward(self) -> None:
        self._gradients = False
        if not self.backward:
            return
        seen = set(self._taken)  # a tied parameter is recorded once
        for path, module in self.places.owners:
            for name, parameter in module.__dict__[PARAMETERS].items():
                gradient = None if parameter is None or id(parameter) in seen else parameter.grad
                seen.add(id(parameter))
                if gradient is not None and measurable(gradient):
                    self._event("gradients", path, "parameter", name, 0, gradient)
        self.ended()
