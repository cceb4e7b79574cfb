"""Where models pickled with release 0.1 look for these names."""

from hfpatch.old_paths.patching.records import Missing as Missing
from hfpatch.old_paths.patching.records import Record as Record
