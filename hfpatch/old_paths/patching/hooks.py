"""Where models pickled with release 0.1 look for these names."""

from hfpatch.patching.kinds.casts import CastInput as CastInput
from hfpatch.patching.kinds.casts import CastOutput as CastOutput
from hfpatch.patching.kinds.casts import DtypeRule as DtypeRule
from hfpatch.patching.kinds.casts import InFloat32 as InFloat32
