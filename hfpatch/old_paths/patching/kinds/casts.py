"""Names that models pickled with release 0.1 refer to."""

from hfpatch.patching.kinds.cast_input import CastInput as CastInput
from hfpatch.patching.kinds.cast_output import CastOutput as CastOutput
from hfpatch.patching.kinds.compute_in_float32 import ComputeInFloat32 as InFloat32
from hfpatch.patching.kinds.dtype_rule import DtypeRule as DtypeRule

__all__ = ["CastInput", "CastOutput", "DtypeRule", "InFloat32"]
