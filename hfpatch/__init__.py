"""Declarative, reversible, proved patches for loaded Hugging Face models.

    fix = hfpatch.apply(model)      # in place; says what it did
    print(fix.verify(batch))        # this model, this batch, against float32
    fix.revert()

Importing this module imports neither torch nor transformers; each name below does when it needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfpatch import errors as errors
    from hfpatch.advice import trace as trace
    from hfpatch.blackbox import BlackBox as BlackBox
    from hfpatch.guarding.callback import GuardCallback as GuardCallback
    from hfpatch.guarding.guard import Guard as Guard
    from hfpatch.guarding.hazard import Hazards as Hazards
    from hfpatch.guarding.hazards import check as check
    from hfpatch.guarding.helpers import gradient_report as gradient_report
    from hfpatch.guarding.helpers import validate_loss as validate_loss
    from hfpatch.guarding.outcome import Outcome as Outcome
    from hfpatch.inspecting.info import ModelInfo as ModelInfo
    from hfpatch.inspecting.inspect import inspect as inspect
    from hfpatch.lora.config import lora_config as lora_config
    from hfpatch.lora.targets import LoraTargets as LoraTargets
    from hfpatch.lora.targets import lora_targets as lora_targets
    from hfpatch.model.embed import embed_tokens as embed_tokens
    from hfpatch.numerics.losses import normalized_mse as normalized_mse
    from hfpatch.patching.apply import Applied as Applied
    from hfpatch.patching.apply import apply as apply
    from hfpatch.patching.catalogue import explain as explain
    from hfpatch.patching.catalogue import list_patches as list_patches
    from hfpatch.patching.decision import Plan as Plan
    from hfpatch.patching.plan import plan as plan
    from hfpatch.patching.status import Status as Status
    from hfpatch.patching.status import status as status
    from hfpatch.patching.undo import revert as revert
    from hfpatch.patching.verifying.figures import Proof as Proof
    from hfpatch.patching.verifying.verify import verify as verify
    from hfpatch.scanning.result import ScanReport as ScanReport
    from hfpatch.scanning.scan import scan as scan

__version__ = "0.1.0"

_HOMES = {
    "errors": "hfpatch.errors",
    "trace": "hfpatch.advice",
    "BlackBox": "hfpatch.blackbox",
    "normalized_mse": "hfpatch.numerics.losses",
    "gradient_report": "hfpatch.guarding.helpers",
    "validate_loss": "hfpatch.guarding.helpers",
    "Hazards": "hfpatch.guarding.hazard",
    "check": "hfpatch.guarding.hazards",
    "scan": "hfpatch.scanning.scan",
    "ScanReport": "hfpatch.scanning.result",
    "Guard": "hfpatch.guarding.guard",
    "GuardCallback": "hfpatch.guarding.callback",
    "Outcome": "hfpatch.guarding.outcome",
    "embed_tokens": "hfpatch.model.embed",
    "ModelInfo": "hfpatch.inspecting.info",
    "inspect": "hfpatch.inspecting.inspect",
    "LoraTargets": "hfpatch.lora.targets",
    "lora_targets": "hfpatch.lora.targets",
    "lora_config": "hfpatch.lora.config",
    "Applied": "hfpatch.patching.apply",
    "Status": "hfpatch.patching.status",
    "apply": "hfpatch.patching.apply",
    "revert": "hfpatch.patching.undo",
    "status": "hfpatch.patching.status",
    "explain": "hfpatch.patching.catalogue",
    "list_patches": "hfpatch.patching.catalogue",
    "Plan": "hfpatch.patching.decision",
    "plan": "hfpatch.patching.plan",
    "Proof": "hfpatch.patching.verifying.figures",
    "verify": "hfpatch.patching.verifying.verify",
}

__all__ = [
    "Applied",
    "BlackBox",
    "Guard",
    "GuardCallback",
    "Hazards",
    "LoraTargets",
    "ModelInfo",
    "Outcome",
    "Plan",
    "Proof",
    "ScanReport",
    "Status",
    "__version__",
    "apply",
    "check",
    "embed_tokens",
    "errors",
    "explain",
    "gradient_report",
    "inspect",
    "list_patches",
    "lora_config",
    "lora_targets",
    "normalized_mse",
    "plan",
    "revert",
    "scan",
    "status",
    "trace",
    "validate_loss",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hfpatch' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(_HOMES[name])
    return module if name == "errors" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
