"""The subject of `hfpatch.check`: a model, its training arguments, and the device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hfpatch.compat.optimizers import parameters_by_id
from hfpatch.errors import InputError
from hfpatch.given import shown, torch_optimizer
from hfpatch.guarding.checking.forwards import is_reentrant
from hfpatch.guarding.checking.settings import Settings, read_settings
from hfpatch.guarding.checks import clean_name, outside
from hfpatch.guarding.gradient_norms import is_distributed
from hfpatch.model.survey import Survey
from hfpatch.model.walk import peek
from hfpatch.model.wrapping import EVERY, kind_of, unwrap


class Subject:
    """Facts that the checks for hazards share. The arguments are those of `check`.

    Attributes:
        survey: The survey of the model.
        model: The model as it is trained, with its wrappers.
        called: What a training step calls, inside DDP and the like; PEFT's own model, if there is one.
        inner: The model inside all wrappers, whose forward a Trainer inspects.
        settings: The training arguments; None if none were passed.
        optimizer: The torch optimizer; None if none was passed.
        scaled: True if a GradScaler multiplies the loss.
        loaded: True if the model has weights; False if it was built on meta from a config.
        batch: The batch, as passed.
        device: The device it is trained on; None if it is not known.

    Raises:
        InputError: A value in `args` does not fit its key; no such device.
        NotAModelError: `model` holds no torch module.
    """

    def __init__(self, model: Any, args: Any, optimizer: Any, batch: Mapping[str, Any] | None, device: Any) -> None:
        self.survey = Survey(model)
        self.model = self.survey.root
        self.called = unwrap(self.model, tuple(kind for kind in EVERY if kind != "PEFT"))
        self.inner = unwrap(self.model)
        self.settings: Settings | None = None if args is None else read_settings(args)
        self.optimizer: torch.optim.Optimizer | None = None
        if optimizer is not None:
            self.optimizer = torch_optimizer("check", optimizer)
            if not self.parameters:
                raise InputError(
                    f"check: {type(self.optimizer).__name__} holds {len(parameters_by_id(self.optimizer))} parameters, "
                    f"none of them of this {type(self.model).__name__}, which would not be trained; create the "
                    "optimizer from the model that is called, after it was copied, loaded or sharded"
                )
        scaler = getattr(optimizer, "scaler", None)
        self.scaled = scaler is not None or (self.settings is not None and self.settings.scaled)
        self.loaded = not any(p.is_meta for p in self.model.parameters())
        self.batch = batch
        self.device = self._device(device)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters, by name."""
        if self.optimizer is not None:
            mine = parameters_by_id(self.optimizer)
            return {clean_name(n): p for n, p in self.model.named_parameters() if id(p) in mine}
        return {clean_name(n): p for n, p in self.model.named_parameters() if p.requires_grad}

    def of_the_optimizer(self) -> Iterator[str]:
        """Yield sentences on parameters that only one of the model and its optimizer has."""
        if self.optimizer is None:
            return
        if strays := len(parameters_by_id(self.optimizer)) - len(self.parameters):
            yield (
                f"{strays} parameter{'s' if strays > 1 else ''} of the optimizer {'are' if strays > 1 else 'is'} none "
                "of the model's"
            )
        if left := outside(self.model, self.optimizer):
            yield (
                f"{len(left)} parameters require gradients and are not in the optimizer ({next(iter(left))} first): "
                "they do not train"
            )

    @cached_property
    def quantization(self) -> dict[str, Any] | None:
        """The quantization config of the model; None without one."""
        config: Any = peek(self.inner, "config")
        asked: Any = getattr(config, "quantization_config", None)
        return dict(asked) if isinstance(asked, Mapping) else None if asked is None else dict(vars(asked))

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of the autocast region it is trained in; None without one."""
        precision = "no" if self.settings is None else self.settings.precision
        if precision == "fp16" and self.device is not None and self.device.type == "cpu":
            return None  # accelerate ignores it there
        return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)

    @cached_property
    def checkpoints_reentrant(self) -> bool:
        """True if a layer is checkpointed already, by torch's reentrant implementation."""
        layers = (m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer))
        return any(is_reentrant(m, None) for m in layers)

    @property
    def alone(self) -> str | None:
        """Why the model cannot be run here, on one rank alone; None if it can."""
        for module in self.survey.modules.values():
            if (kind := kind_of(type(module))) in ("FSDP", "FSDP2", "DeepSpeed"):
                return f"the model is sharded by {kind}, and one rank alone cannot run it"
        for name, parameter in self.model.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                return f"{clean_name(name)} is made by the first call (a lazy module): call the model once before"
            if is_distributed(parameter):
                return f"{clean_name(name)} is a DTensor, split over ranks, and one rank alone cannot run it"
        synced = [n for n, m in self.survey.modules.items() if isinstance(m, nn.SyncBatchNorm)]
        dist = torch.distributed
        if synced and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return (
                f"{clean_name(synced[0])} (SyncBatchNorm) waits for the other ranks, and one rank alone cannot run it"
            )
        return None

    @property
    def from_checkpoint(self) -> bool:
        """True if a checkpoint's name or folder is known for the model."""
        return self.loaded and bool(getattr(self.inner, "name_or_path", ""))

    def one_step(self, parameter: nn.Parameter, gradient: torch.Tensor) -> tuple[torch.Tensor, float] | None:
        """Return a parameter's values after one step of the optimizer on a copy, and the learning rate.

        Returns:
            None if the optimizer is not known, or is none of torch's own that can be tried on a copy.
        """
        copy = nn.Parameter(parameter.detach().clone())
        copy.grad = gradient.detach().clone().to(copy.dtype)
        made = self._twin(parameter, copy)
        if made is None:
            return None
        rate = float(made.param_groups[0]["lr"])
        made.step()
        return copy.detach(), rate

    def _twin(self, parameter: nn.Parameter, copy: nn.Parameter) -> torch.optim.Optimizer | None:
        """Return an optimizer over the copy with the options, at the highest rate, and the state of the parameter's."""
        if self.optimizer is not None:
            made: Any = type(self.optimizer)
            group = next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))
            if not made.__module__.startswith("torch.optim."):
                return None
            options = {k: v for k, v in group.items() if k not in ("params", "initial_lr")}
            known = inspect.signature(made).parameters
            twin = made([copy], **{k: v for k, v in options.items() if k in known})
            twin.param_groups[0]["lr"] = group.get("initial_lr", group["lr"])
            state = self.optimizer.state.get(parameter, {})
            twin.state[copy] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
            return twin
        if self.settings is None:
            return None
        rate, decay = self.settings.rate, self.settings.decay
        if self.settings.is_torch_adam:
            return torch.optim.AdamW([copy], lr=rate, eps=self.settings.eps, weight_decay=decay)
        return torch.optim.SGD([copy], lr=rate, weight_decay=decay) if self.settings.optim == "sgd" else None

    @property
    def knows_dtypes(self) -> bool:
        """True if the trained parameters are known by dtype: adapters on a quantised base are in no config."""
        return self.loaded or self.quantization is None

    def share(self, dtype: torch.dtype) -> str | None:
        """Return how many trained parameters have a dtype, as the beginning of a sentence; None if none has it."""
        names = [n for n, p in self.parameters.items() if p.requires_grad and p.dtype == dtype]
        if not names:
            return None
        verb = "is" if len(names) == 1 else "are"
        return f"{len(names)} of {len(self.parameters)} trained parameters ({names[0]} first) {verb}"

    def _device(self, given: Any) -> torch.device | None:
        if given is not None:
            try:
                device = torch.device(given)
            except (RuntimeError, TypeError, ValueError) as error:
                raise InputError(f"check: device: want one such as 'cuda:0' or 'cpu', got {shown(given)}") from error
            if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
                raise InputError(f"check: device: torch finds {torch.cuda.device_count()} GPUs here, got {given!r}")
            return device
        if self.settings is not None and self.settings.cpu:
            return torch.device("cpu")
        placed = next((p.device for p in self.model.parameters() if p.device.type not in ("cpu", "meta")), None)
        if placed is None and torch.cuda.device_count():
            return torch.device("cuda", torch.cuda.current_device())
        return placed
