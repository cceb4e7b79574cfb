"""Multiplicative modulation that cannot reach zero: the bounded factor, and a low-rank adapter that uses it.

The factor is `low + (high - low) * sigmoid(x + shift)`, with the shift for which it is 1 at x = 0. It is computed as
1 + delta(x) from tanh(x / 2), which is exactly 1 at 0 and avoids the rounding of `x + shift` in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat import hooks
from hfpatch.errors import InputError, NoEmbeddingError
from hfpatch.given import DEVICE, FLAG, FLOATING, SIZE, optional, shown, want
from hfpatch.model.embed import resolve
from hfpatch.model.survey import Survey

LOW, HIGH = 0.5, 1.5
FLOAT16_MAX = 65504.0
CHILD = "modulation"
"""Name under which an attached adapter is a child of its decoder layer."""


def check_bounds(low: Any, high: Any) -> tuple[float, float]:
    """Return the bounds as floats.

    Raises:
        InputError: A bound is not a finite number, low is not above 0, or 1 is not strictly between them in float32.
    """
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) < 1e38 for v in (low, high))
    if not numbers or not 1e-37 < low < 1 - 1e-7 < 1 + 2e-7 < high:
        raise InputError(
            f"modulation bounds low={shown(low)}, high={shown(high)}: want 0 < low < 1 < high, finite and distinct in "
            "float32; 1 must lie strictly between them, because a factor that cannot be 1 changes the model before "
            "training, and one that reaches 0 blocks the signal; "
            f"use for example low={LOW}, high={HIGH}"
        )
    return float(low), float(high)


def delta(x: torch.Tensor, low: float = LOW, high: float = HIGH) -> torch.Tensor:
    """Return `low + (high - low) * sigmoid(x + shift) - 1`, with the shift for which it is 0 at 0.

    Args:
        x: Any shape, floating-point.
        low: Lower limit of the factor, below 1.
        high: Upper limit, above 1.

    Returns:
        A tensor with shape and dtype of `x`; exactly 0 where `x` is 0. For (0.5, 1.5) it is `0.5 * tanh(x / 2)`; the
        slope at 0 is `(1 - low) * (high - 1) / (high - low)`.
    """
    part = (1 - low) / (high - low)  # sigmoid(shift)
    skew = 2 * part - 1
    t = torch.tanh(x * 0.5)
    top = t * (2 * (1 - low) * (1 - part))
    return top if abs(skew) < 1e-12 else top / (t * skew + 1)


def modulation(x: torch.Tensor, low: float = LOW, high: float = HIGH) -> torch.Tensor:
    """Return the factor `1 + delta(x)`, between `low` and `high` and exactly 1 at 0, with shape and dtype of `x`."""
    return delta(x, low, high) + 1


def product(low: float, high: float, layers: int) -> str:
    """Return a text with the smallest and largest product of the factors over a number of layers in a row."""
    least, most = (_power(bound, layers) for bound in (low, high))
    past = ", which passes float16's 65,504" if most > FLOAT16_MAX else ""
    text = f"{most:,.0f}" if 10 <= most < 1e9 else f"{most:.3g}"
    return (
        f"over {layers} in a row at least {low:g}^{layers} = {least:.2g} and at most {high:g}^{layers} = {text}{past}"
    )


def _power(base: float, exponent: int) -> float:
    try:
        return base**exponent
    except OverflowError:
        return math.inf


class BoundedModulation(nn.Module):
    """The factor of `modulation` as a module without parameters: `h * BoundedModulation()(x)`.

    Args:
        low: Lower limit, below 1.
        high: Upper limit, above 1.

    Raises:
        InputError: The bounds cannot be used; see `check_bounds`.
    """

    def __init__(self, low: float = LOW, high: float = HIGH) -> None:
        super().__init__()
        self.low, self.high = check_bounds(low, high)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the factor, with shape and dtype of `x`."""
        return modulation(x, self.low, self.high)

    def extra_repr(self) -> str:
        """Return the bounds as text."""
        return f"low={self.low:g}, high={self.high:g}"


class ModulationAdapter(nn.Module):
    """Low-rank modulation of a hidden state: `h * factor(B_mult(A h)) + 0.1 * B_add(A h)`.

    At initialisation A has std 0.02, B_add std 0.001, and B_mult is 0: the factor is exactly 1, and the added part is
    about 1e-5 of h. The adapter computes in the dtype of its own weights (float32 in a half-precision model) and
    returns the dtype of `h`.

    Args:
        width: Size of the last dimension of `h`.
        rank: Size of `A h`.
        low: Lower limit of the factor, below 1.
        high: Upper limit, above 1.
        safe_mode: Additive path only: there is no B_mult.
        dtype: The dtype of the weights; None for torch's default.
        device: The device of the weights; None for torch's default.

    Raises:
        InputError: Width or rank is not a positive integer, the bounds cannot be used, or another argument is not of
            its kind.
    """

    ADD_SCALE = 0.1

    def __init__(
        self,
        width: int,
        rank: int = 16,
        low: float = LOW,
        high: float = HIGH,
        *,
        safe_mode: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not (SIZE.fits(width) and SIZE.fits(rank)):
            raise InputError(f"ModulationAdapter(width={shown(width)}, rank={shown(rank)}): want positive integers")
        want(
            "ModulationAdapter",
            safe_mode=(safe_mode, FLAG),
            dtype=(dtype, optional(FLOATING)),
            device=(device, optional(DEVICE)),
        )
        self.a_proj = nn.Linear(width, rank, bias=False, dtype=dtype, device=device)
        self.b_add = nn.Linear(rank, width, bias=False, dtype=dtype, device=device)
        self.b_mult = None if safe_mode else nn.Linear(rank, width, bias=False, dtype=dtype, device=device)
        self.bounded = BoundedModulation(low, high)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise: A std 0.02, B_add std 0.001, B_mult zeros."""
        nn.init.normal_(self.a_proj.weight, std=0.02)
        nn.init.normal_(self.b_add.weight, std=0.001)
        if self.b_mult is not None:
            nn.init.zeros_(self.b_mult.weight)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Return `h`, `[..., width]`, modulated, with the same shape and dtype."""
        wide = h.to(self.a_proj.weight.dtype)
        low_rank = self.a_proj(wide)
        added = self.ADD_SCALE * self.b_add(low_rank)
        factor = None if self.b_mult is None else self.bounded(self.b_mult(low_rank).to(wide.dtype))
        return (wide + added if factor is None else wide * factor + added).to(h.dtype)

    @classmethod
    def attach(
        cls,
        model: object,
        rank: int = 16,
        low: float = LOW,
        high: float = HIGH,
        *,
        safe_mode: bool = False,
        layers: Iterable[int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Attached:
        """Attach an adapter to the output of decoder layers.

        Each becomes the child `modulation` of its layer, so optimizers, `state_dict` and `.to()` find it. A forward
        hook of the layer runs it, also under gradient checkpointing, DDP and deepcopy. No parameter is frozen or
        unfrozen. Attach after `get_peft_model`, which freezes existing parameters, or name it in `modules_to_save`. To
        load a checkpoint with adapters, attach first.

        Args:
            model: A module that holds one language model, wrapped or not.
            rank: As for the class.
            low: As for the class.
            high: As for the class.
            safe_mode: As for the class.
            layers: Indices of the layers (negative ones from the end); None for all.
            dtype: The dtype of the adapters' weights.

        Returns:
            The adapters and the paths of their layers.

        Raises:
            InputError: No or several language models, no such layer, or a layer that already has such a child.
        """
        check_bounds(low, high)
        want("ModulationAdapter.attach", rank=(rank, SIZE), safe_mode=(safe_mode, FLAG), dtype=(dtype, FLOATING))
        width, places = _places(Survey(model), layers)
        made: list[ModulationAdapter] = []
        for _, layer in places:
            first = next((p for p in layer.parameters() if p.is_floating_point()), None)
            device = None if first is None else first.device
            made.append(cls(width, rank, low, high, safe_mode=safe_mode, dtype=dtype, device=device))
        for (_, layer), adapter in zip(places, made, strict=True):
            adapter.train(layer.training)
            layer.add_module(CHILD, adapter)
            hooks.after(layer, RunChild(CHILD))
        return Attached(tuple(path for path, _ in places), tuple(made))


@dataclass(frozen=True)
class Attached:
    """Adapters attached to a model. Prints the range of the factors' product over all layers.

    Attributes:
        paths: Paths of the decoder layers.
        adapters: The adapter of each layer.
    """

    paths: tuple[str, ...]
    adapters: tuple[ModulationAdapter, ...]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all adapters, for the optimizer."""
        return [p for adapter in self.adapters for p in adapter.parameters()]

    def __str__(self) -> str:
        first = self.adapters[0]
        if first.b_mult is None:
            return f"{len(self.adapters)} modulation adapters, additive path only"
        low, high = first.bounded.low, first.bounded.high
        return f"{len(self.adapters)} modulation adapters, each factor {low:g} to {high:g}; " + product(
            low, high, len(self.adapters)
        )


@dataclass(frozen=True)
class RunChild:
    """A forward hook that passes a module's output, or its first item, through one of its children."""

    child: str

    def __call__(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Return the output, passed through the child."""
        run = getattr(module, self.child)
        return (run(output[0]), *output[1:]) if isinstance(output, tuple) else run(output)


def _places(survey: Survey, wanted: Iterable[int] | None) -> tuple[int, list[tuple[str, nn.Module]]]:
    """Return the width of the language model's residual stream, and its decoder layers or those that are wanted."""
    try:
        submodel, _ = resolve(survey)
    except NoEmbeddingError as error:
        raise InputError(f"ModulationAdapter.attach: want one language model with decoder layers: {error}") from error
    stacks = survey.stacks.get(submodel.path)
    width = getattr(submodel.model.config.get_text_config(), "hidden_size", None)
    if not stacks or not isinstance(width, int):
        raise InputError(
            f"ModulationAdapter.attach: no list of decoder layers in {submodel.place}; add ModulationAdapter(width) to "
            "your own module"
        )
    layers = list(stacks[-1].items)
    try:
        numbers = range(len(layers)) if wanted is None else list(wanted)
        chosen = [layers[i] for i in numbers]
    except TypeError as error:
        raise InputError(f"ModulationAdapter.attach: want layers by their indices, got {shown(wanted)}") from error
    except IndexError as error:
        raise InputError(f"ModulationAdapter.attach: layers={wanted!r}: the model has {len(layers)} layers") from error
    taken = [path for path, layer in chosen if hasattr(layer, CHILD)]
    if taken or not chosen or len({path for path, _ in chosen}) != len(chosen):
        why = f"{taken[0]} already has a {CHILD!r}" if taken else f"layers={numbers!r}: want at least one, none twice"
        raise InputError(f"ModulationAdapter.attach: {why}")
    return width, chosen
