"""What `hfpatch.check` is about: a model, the way it is to be trained, and where."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hfpatch.errors import InputError
from hfpatch.given import shown
from hfpatch.guarding.checks import plain, trained
from hfpatch.guarding.settings import Settings, read_settings
from hfpatch.model.survey import Survey
from hfpatch.model.walk import peek
from hfpatch.model.wrapping import unwrap


class Subject:
    """Facts that several kinds of hazard are told from. The arguments are those of `check`.

    Attributes:
        survey: Of the model.
        model: As it is trained.
        inner: Inside all wrappers: whose forward a Trainer looks at.
        settings: What the arguments say; None without any.
        optimizer: Torch's own; None if there is none yet.
        scaled: A GradScaler multiplies the loss.
        loaded: There are weights; else the model was built on meta from a config.
        batch: As given.
        device: Where it is trained; None if that is not known.

    Raises:
        InputError: A value in `args` is none for its key; no such device.
        NotAModelError: `model` holds no torch module.
    """

    def __init__(self, model: Any, args: Any, optimizer: Any, batch: Mapping[str, Any] | None, device: Any) -> None:
        self.survey = Survey(model)
        self.model = self.survey.root
        self.inner = unwrap(self.model)
        self.settings: Settings | None = None if args is None else read_settings(args)
        self.optimizer: torch.optim.Optimizer | None = None
        if optimizer is not None:
            from hfpatch.guarding.guard import unwrapped

            self.optimizer = unwrapped(optimizer)
        scaler = getattr(optimizer, "scaler", None)
        self.scaled = scaler is not None or (self.settings is not None and self.settings.scaled)
        self.loaded = not any(p.is_meta for p in self.model.parameters())
        self.batch = batch
        self.device = self._device(device)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that are trained, by name."""
        if self.optimizer is not None:
            return trained(self.model, self.optimizer)
        return {plain(n): p for n, p in self.model.named_parameters() if p.requires_grad}

    @cached_property
    def quantization(self) -> dict[str, Any] | None:
        """The quantization its config asks for."""
        config: Any = peek(self.inner, "config")
        asked: Any = getattr(config, "quantization_config", None)
        return dict(asked) if isinstance(asked, Mapping) else None if asked is None else dict(vars(asked))

    @property
    def knows_dtypes(self) -> bool:
        """Whether what trains has the dtype it shows: adapters on a quantised base are in no config."""
        return self.loaded or self.quantization is None

    def share(self, dtype: torch.dtype) -> str | None:
        """How many of the trained parameters have a dtype, as the beginning of a sentence; None if none has."""
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
                raise InputError(f"check: device: torch sees {torch.cuda.device_count()} GPUs here, got {given!r}")
            return device
        if self.settings is not None and self.settings.cpu:
            return torch.device("cpu")
        placed = next((p.device for p in self.model.parameters() if p.device.type not in ("cpu", "meta")), None)
        if placed is None and torch.cuda.device_count():
            return torch.device("cuda", torch.cuda.current_device())
        return placed
