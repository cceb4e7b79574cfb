"""Where models pickled with release 0.1 look for these names."""

from hfpatch.patching.kinds.adapter_places import Before as Before
from hfpatch.patching.kinds.adapter_places import Expansion as Expansion
from hfpatch.patching.kinds.adapter_places import Expansions as Expansions
from hfpatch.patching.kinds.adapter_places import Place as Place
