"""The public face, written once: what type checkers read here, `hfpatch/__init__.py` imports when it is asked for."""

from . import errors as errors
from . import nn as nn
from . import testing as testing
from .advice import trace as trace
from .blackbox.box import BlackBox as BlackBox
from .blackbox.bundle import Bundle as Bundle
from .blackbox.rerun import Rerun as Rerun
from .foretold import inspect as inspect
from .guarding.callback import GuardCallback as GuardCallback
from .guarding.checking.hazard import Hazards as Hazards
from .guarding.checking.hazards import check as check
from .guarding.guard import Guard as Guard
from .guarding.helpers import GradientReport as GradientReport
from .guarding.helpers import gradient_report as gradient_report
from .guarding.helpers import validate_loss as validate_loss
from .guarding.outcome import Outcome as Outcome
from .inspecting.info import ModelInfo as ModelInfo
from .lora.config import lora_config as lora_config
from .lora.targets import LoraTargets as LoraTargets
from .lora.targets import lora_targets as lora_targets
from .model.embed import embed_tokens as embed_tokens
from .numerics.losses import normalized_mse as normalized_mse
from .patching.applied import Applied as Applied
from .patching.apply import Plan as Plan
from .patching.apply import apply as apply
from .patching.apply import plan as plan
from .patching.catalogue import Catalogue as Catalogue
from .patching.catalogue import Explanation as Explanation
from .patching.catalogue import explain as explain
from .patching.catalogue import list_patches as list_patches
from .patching.registering.register import register as register
from .patching.registering.register import unregister as unregister
from .patching.status import Status as Status
from .patching.status import status as status
from .patching.undo import revert as revert
from .patching.verifying.figures import Proof as Proof
from .patching.verifying.verify import verify as verify
from .report.sheet import Sheet as Sheet
from .scanning.result import ScanReport as ScanReport
from .scanning.scan import scan as scan
from .tracing.finding import Finding as Finding
from .tracing.gradients import LargestGradients as LargestGradients
from .tracing.headroom import Headroom as Headroom
from .tracing.trace import Trace as Trace

__version__: str
