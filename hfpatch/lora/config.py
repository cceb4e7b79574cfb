"""A `peft.LoraConfig` for a model: the targets from its structure, alpha from a scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hfpatch.errors import InputError
from hfpatch.given import FLAG, NUMBER, SIZE, TEXT, optional, shown, want
from hfpatch.lora.expand import as_counted, expanded, homes_of
from hfpatch.lora.matrices import Reading, check_scope
from hfpatch.lora.names import TargetNames
from hfpatch.lora.saved import saved, unknown
from hfpatch.lora.targets import THROUGH, Coverage, LoraTargets, coverage_of, targets_of
from hfpatch.model.walk import starred
from hfpatch.report import say

if TYPE_CHECKING:
    from peft import LoraConfig

TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
"""End of a class's name -> PEFT's task type; for these tasks PEFT also trains the new head."""

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
    """Return a `LoraConfig` whose adapter covers the linear maps of the scope and nothing else.

    `lora_alpha` follows from the factor of the update, alpha/r (with `use_rslora` alpha/sqrt(r)), because only the
    factor matters: with a fixed factor of 1, another `r` needs no other learning rate, but a fixed alpha would shrink
    the update as `r` grows.

    Args:
        model: As in `hfpatch.lora_targets`, like `scope` to `submodel`. Not changed.
        r: Rank; 16 if not given.
        scope: language | vision | audio | projector | all.
        experts: Also adapt the routed experts.
        router: Also adapt the routers.
        submodel: Path or architecture of the language model, needed if there are several.
        scale: Factor of the update; 1 if neither it nor `lora_alpha` is given.
        base: Your own config, to expand it before injection: the result is a copy that also covers the linear maps
            it misses in the blocks it targets. Its other fields stay.
        verbose: Print the coverage and the scale to stderr (rank 0).
        kwargs: Further fields of `LoraConfig`. `layers_to_transform` also works with a regular expression as target.

    Returns:
        The config, for `peft.get_peft_model`.

    Raises:
        InputError: A field is unknown or is chosen here, PEFT cannot apply the combination, the scope has no target,
            or a name in `modules_to_save`, or in `base`, does not fit one kind of module of the model.
        NoEmbeddingError: The model has no language model, or several and none is named.
        NotAModelError: `model` holds no torch module.
    """
    want("lora_config", scope=(scope, TEXT), experts=(experts, FLAG), router=(router, FLAG), verbose=(verbose, FLAG))
    want("lora_config", submodel=(submodel, optional(TEXT)))
    check_scope(scope)
    reading = Reading(model, submodel)
    if base is not None:
        if r is not None or scale is not None or kwargs:
            raise InputError("base= is expanded as it is: set r, lora_alpha and other fields in it, not as arguments")
        beside = {"scope": scope if scope != "language" else None, "experts": experts, "router": router}
        if unread := [f"{name}={value!r}" for name, value in beside.items() if value]:
            raise InputError(
                f"{', '.join(unread)} cannot be combined with base=, which is expanded to the linear maps of the "
                "blocks that it targets: add other targets to its target_modules or target_parameters"
            )
        return _from_base(reading, base, verbose)
    _check_fields(kwargs)
    rank = 16 if r is None else r
    if not SIZE.fits(rank):
        raise InputError(f"r={shown(r)}: want a positive integer")
    alpha = _alpha(rank, scale, kwargs)
    targets = targets_of(reading, scope, experts=experts, router=router)
    _check_parameters(targets, kwargs)
    targets, kwargs = _in_layers(reading, targets, kwargs)
    words = {**targets.kwargs(), **alpha, **kwargs}
    if "task_type" not in words and (task := _task(reading)):
        words["task_type"] = task
    config = _made({"r": rank, **words})
    reached = _reached(reading, config) & {*targets.modules, *targets.parameters}
    if not reached:
        said = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
        raise InputError(
            f"{said}: PEFT would adapt none of the {len(targets.modules)} linear maps of the scope; change these fields"
        )
    full = saved(reading, config, _reached(reading, config))
    if verbose:
        covered = coverage_of(reading, reading.matrices(scope), reached)
        say([*_told(targets, config, len(reached), covered), *_full_line(full)])
    return config


def _made(words: dict[str, Any]) -> LoraConfig:
    from peft import LoraConfig

    try:
        return LoraConfig(**words)
    except (ValueError, TypeError, ImportError) as error:
        raise InputError(f"PEFT's LoraConfig rejects these fields: {str(error).strip()}") from error


def _check_fields(kwargs: dict[str, Any]) -> None:
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig) if field.init}
    for name in kwargs:
        if name in CHOSEN:
            raise InputError(
                f"{name}= is chosen from the model here; to start from your own, pass base=LoraConfig({name}=...)"
            )
        if name not in fields:
            raise InputError(f"{name}=: the LoraConfig of the installed PEFT has no such field; check its spelling")


def _check_parameters(targets: LoraTargets, kwargs: dict[str, Any]) -> None:
    """Raise for fields that PEFT cannot apply to `target_parameters`, such as dropout and variants of LoRA."""
    if not targets.target_parameters:
        return
    init = kwargs.get("init_lora_weights", True)
    if targets.parameters and not isinstance(init, bool) and init not in ("gaussian", "eva"):
        raise InputError(
            f"init_lora_weights={init!r} needs the weight of a linear map, which routed experts and routers do not "
            f"have (target_parameters={list(targets.target_parameters)}); use True or 'gaussian'"
        )
    if kwargs.get("layers_to_transform") is not None:
        raise InputError(
            f"layers_to_transform={kwargs['layers_to_transform']!r} cannot be combined with target_parameters="
            f"{list(targets.target_parameters)}: PEFT would adapt these in every layer; leave it out"
        )
    for name in ("lora_dropout", "use_dora", "lora_bias"):
        if kwargs.get(name):
            why = f": {THROUGH}" if targets.through_parameters else " (routed experts or router)"
            raise InputError(
                f"{name}={kwargs[name]} cannot be combined with "
                f"target_parameters={list(targets.target_parameters)}{why}; leave it out"
            )


def _in_layers(reading: Reading, targets: LoraTargets, kwargs: dict[str, Any]) -> tuple[LoraTargets, dict[str, Any]]:
    """Apply `layers_to_transform` to targets that are a regular expression: PEFT supports it for names only."""
    layers = kwargs.get("layers_to_transform")
    if layers is None:
        return targets, kwargs
    if not all(isinstance(i, int) for i in (layers if isinstance(layers, Sequence) else [layers])):
        raise InputError(f"layers_to_transform={layers!r}: want the index of a layer, or a list of indices")
    if not isinstance(targets.target_modules, str):
        return targets, kwargs
    from peft.tuners.tuners_utils import check_target_module_exists

    fields = {name: kwargs[name] for name in ("layers_to_transform", "layers_pattern") if name in kwargs}
    asked = _made({"target_modules": [path.rpartition(".")[2] for path in targets.modules], **fields})
    inside = tuple(path for path in targets.modules if check_target_module_exists(asked, path))
    if not inside:
        raise InputError(
            f"layers_to_transform={layers!r}: these layers have no linear map of the scope; choose other indices"
        )
    names, exclude = TargetNames(reading).names(inside)
    narrowed = dataclasses.replace(targets, target_modules=names, exclude_modules=exclude, modules=inside)
    return narrowed, {name: value for name, value in kwargs.items() if name not in fields}


def _reached(reading: Reading, config: LoraConfig) -> set[str]:
    """Return the full paths of the linear maps and parameters that the final config adapts, by all of its fields."""
    target_names = TargetNames(reading)
    return (target_names.matched_by(config) or set[str]()) | as_counted(
        reading, target_names.parameters_matched_by(config)
    )


def _alpha(rank: int, scale: float | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    if "lora_alpha" in kwargs:
        if scale is not None:
            alpha = shown(kwargs["lora_alpha"])
            raise InputError(f"scale={shown(scale)} and lora_alpha={alpha} set the same factor; give one")
        if not _is_number(kwargs["lora_alpha"]):
            got = shown(kwargs["lora_alpha"])
            raise InputError(f"lora_alpha={got}: want a number; scale= sets the factor itself")
        return {}
    factor = 1.0 if scale is None else scale
    if not _is_number(factor) or factor <= 0:
        raise InputError(f"scale={shown(scale)}: want a positive number")
    alpha = factor * (math.sqrt(rank) if kwargs.get("use_rslora") else rank)
    return {"lora_alpha": int(alpha) if alpha == int(alpha) else alpha}


def _is_number(value: Any) -> bool:
    return NUMBER.fits(value) and math.isfinite(value)


def _task(reading: Reading) -> str | None:
    """Return PEFT's task type for a model's class; None if it has none."""
    for cls in type(reading.frame).__mro__:
        for ending, task in TASKS.items():
            if cls.__name__.endswith(ending):
                return task
    return "CAUSAL_LM" if _is_causal(reading) else None


def _is_causal(reading: Reading) -> bool:
    config = getattr(reading.frame, "config", None)
    generates = hasattr(reading.frame, "prepare_inputs_for_generation")
    return generates and config is not None and not getattr(config, "is_encoder_decoder", False)


def _told(targets: LoraTargets, config: LoraConfig, reached: int, covered: Coverage) -> list[str]:
    lines = [f"hfpatch: LoRA on {reached} matrices of {targets.model}: {covered}", _scale_line(config)]
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
        f"{f'({config.r})' if root else config.r} = {scale:g}; scale= sets it, for any r"
    )


def _from_base(reading: Reading, base: LoraConfig, verbose: bool) -> LoraConfig:
    from peft import PeftConfig

    if not isinstance(base, PeftConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"base={shown(base)}: want a peft.LoraConfig; pass single fields by name")
    strange = unknown(reading, base)
    try:
        config, added = expanded(reading, base)
    except ValueError as error:
        raise InputError(f"base=: {error}") from error
    reached = _reached(reading, config)
    full = saved(reading, config, reached)
    if verbose:
        homes = homes_of(reading, reached)
        covered = coverage_of(reading, reading.matrices_of(homes), reached)
        say([f"hfpatch: LoRA config with {len(added)} more modules: {covered}", _scale_line(config)])
        say([*_full_line(full), *([f"hfpatch: no module is called {', '.join(strange)}"] if strange else [])])
    return config


def _full_line(full: Sequence[str]) -> list[str]:
    kinds = list(dict.fromkeys(starred(path) for path in full))
    return [f"hfpatch: trained in full: {', '.join(kinds)} ({len(full)})"] if full else []
