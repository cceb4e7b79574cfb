"""Where models pickled with release 0.1 look for these names."""

from hfpatch.patching.records import Missing as Missing
from hfpatch.patching.records import Record as Record
