"""Names that models pickled with release 0.1 refer to."""

from hfpatch.patching.kinds.add_targets import AddTargets as Expansions
from hfpatch.patching.kinds.expansion import Before as Before
from hfpatch.patching.kinds.expansion import Expansion as Expansion
from hfpatch.patching.kinds.expansion import Place as Place

__all__ = ["Before", "Expansion", "Expansions", "Place"]
