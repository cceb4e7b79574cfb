"""Where models pickled with release 0.1 look for these names."""

from hfpatch.patching.kinds.attention_choice import Configs as Configs
