"""Names that models pickled with release 0.1 refer to."""

from hfpatch.lab.composites_modulation import Gate as Gate
from hfpatch.lab.composites_modulation import Modulation as Modulation
from hfpatch.lab.composites_modulation import RunPart as RunPart
