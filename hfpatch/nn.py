"""Modules for new code: what the patches put into existing models, to build with from the start."""

from __future__ import annotations

from hfpatch.numerics.modulation import BoundedModulation, ModulationAdapter

__all__ = ["BoundedModulation", "ModulationAdapter"]
