"""Where models pickled with release 0.1 look for these names."""

from hfpatch.patching.kinds.choose_attention import Configs as Configs
