"""Names that models pickled with release 0.1 refer to."""

from hfpatch.patching.kinds.choose_attention import Configs as Configs
