"""A real `peft.LoraConfig` for this model: the targets from its structure, alpha from a scale."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from hfpatch.errors import InputError
from hfpatch.model.lora import THROUGH, LoraTargets, coverage_of, targets_of
from hfpatch.model.lora_expand import expanded
from hfpatch.model.lora_maps import Reading, check_scope
from hfpatch.model.lora_spec import Namer
from hfpatch.report import say

if TYPE_CHECKING:
    from peft import LoraConfig

CHOSEN = ("target_modules", "target_parameters", "exclude_modules", "fan_in_fan_out")


def lora_config(
    model: object,
    r: int | None = None,
    *,
    scope: str = "language",
    experts: bool = False,
    router: bool = False,
    submodel: str | None = None,
    scale: float | None = None,
    base: LoraConfig | None = None,
    verbose: bool = True,
    **kwargs: Any,
) -> LoraConfig:
    """A `LoraConfig` that reaches every linear map of the scope and nothing else; says what it covers.

    `lora_alpha` is chosen through the scale the update is multiplied by, alpha/r (with `use_rslora` alpha/sqrt(r)),
    because only the scale matters: with a fixed scale of 1 another `r` needs no other learning rate, where a
    fixed alpha would shrink the update as `r` grows.

    Args:
        model: As for `hfpatch.lora_targets`, like the four after `r`. Not changed.
        r: Rank; 16 if not given.
        scope: language | vision | audio | projector | all.
        experts: Also the routed experts.
        router: Also what chooses the experts.
        submodel: Path or architecture of the language model meant, where there are several.
        scale: Factor of the update; 1 if neither it nor `lora_alpha` is given.
        base: A config of your own to expand instead, before injection: a copy of it comes back that also
            reaches the linear maps it misses in the blocks it targets. Nothing else in it changes.
        verbose: Say on stderr (rank 0) what is covered and what the scale is.
        kwargs: Further fields of `LoraConfig`.

    Raises:
        InputError: A field there is not, one that is chosen here, or a combination that PEFT cannot carry out.
    """
    check_scope(scope)
    reading = Reading(model, submodel)
    if base is not None:
        if r is not None or scale is not None or kwargs:
            raise InputError("base= is expanded as it is: set r, lora_alpha and other fields in it, not beside it")
        return _from_base(reading, base, verbose)
    _check_fields(kwargs)
    rank = 16 if r is None else r
    if rank < 1:
        raise InputError(f"r={r}: want at least 1")
    targets = targets_of(reading, scope, experts=experts, router=router)
    _check_parameters(targets, kwargs)
    words = {**targets.kwargs(), **_alpha(rank, scale, kwargs), **kwargs}
    if "task_type" not in words and _is_causal(reading):
        words["task_type"] = "CAUSAL_LM"
    from peft import LoraConfig

    config = LoraConfig(r=rank, **words)
    if verbose:
        say(_told(targets, config))
    return config


def _check_fields(kwargs: dict[str, Any]) -> None:
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig) if field.init}
    for name in kwargs:
        if name in CHOSEN:
            raise InputError(
                f"{name}= is chosen from the model here; to start from your own, pass base=LoraConfig({name}=...)"
            )
        if name not in fields:
            raise InputError(f"{name}=: this PEFT's LoraConfig has no such field")


def _check_parameters(targets: LoraTargets, kwargs: dict[str, Any]) -> None:
    """PEFT's wrapper of parameters takes neither dropout nor variants."""
    if not targets.target_parameters:
        return
    for name in ("lora_dropout", "use_dora", "lora_bias"):
        if kwargs.get(name):
            why = f": {THROUGH}" if targets.through_parameters else " (routed experts or router)"
            raise InputError(
                f"{name}={kwargs[name]} does not go with target_parameters={list(targets.target_parameters)}{why}; "
                "leave it out"
            )


def _alpha(rank: int, scale: float | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    if "lora_alpha" in kwargs:
        if scale is not None:
            raise InputError(f"scale={scale} and lora_alpha={kwargs['lora_alpha']} say the same thing twice; give one")
        return {}
    factor = 1.0 if scale is None else scale
    if not (math.isfinite(factor) and factor > 0):
        raise InputError(f"scale={scale}: want a positive number")
    alpha = factor * (math.sqrt(rank) if kwargs.get("use_rslora") else rank)
    return {"lora_alpha": int(alpha) if alpha == int(alpha) else alpha}


def _is_causal(reading: Reading) -> bool:
    config = getattr(reading.frame, "config", None)
    generates = hasattr(reading.frame, "prepare_inputs_for_generation")
    return generates and config is not None and not getattr(config, "is_encoder_decoder", False)


def _told(targets: LoraTargets, config: LoraConfig) -> list[str]:
    reached = len(targets.modules) + len(targets.parameters)
    lines = [f"hfpatch: LoRA on {reached} matrices of {targets.model}: {targets.coverage}", _scale_line(config)]
    if targets.through_parameters:
        lines.append(f"hfpatch: {THROUGH}")
    if targets.left_out:
        first = targets.left_out[0]
        more = f"; and {len(targets.left_out) - 1} more kinds" if len(targets.left_out) > 1 else ""
        lines.append(f"hfpatch: left out: {first.path} ({first.reason}){more}; print(hfpatch.lora_targets(model))")
    return lines


def _scale_line(config: LoraConfig) -> str:
    root = bool(config.use_rslora)
    scale = config.lora_alpha / (math.sqrt(config.r) if root else config.r)
    named = "lora_alpha/sqrt(r)" if root else "lora_alpha/r"
    return (
        f"hfpatch: the update is scaled by {named} = {config.lora_alpha:g}/{'sqrt' if root else ''}"
        f"{f'({config.r})' if root else config.r} = {scale:g}; scale= sets it, another r keeps it"
    )


def _from_base(reading: Reading, base: LoraConfig, verbose: bool) -> LoraConfig:
    try:
        config, added = expanded(reading, base)
    except ValueError as error:
        raise InputError(f"base=: {error}") from error
    if verbose:
        reached = Namer(reading).matched_by(config) or set[str]()
        homes = frozenset(reading.home(path) for path in reached if path in reading.block_of)
        covered = coverage_of(reading, reading.matrices_of(homes), reached)
        say([f"hfpatch: LoRA config with {len(added)} more modules: {covered}", _scale_line(config)])
    return config
