"""Names that models pickled with release 0.1 refer to."""

from hfpatch.old_paths.patching.records import Missing as Missing
from hfpatch.old_paths.patching.records import Record as Record
