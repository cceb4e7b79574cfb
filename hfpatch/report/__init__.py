"""All rendering: a `Sheet` of rows becomes terminal text or HTML; lines go to stderr."""

from hfpatch.report.sheet import Sheet as Sheet
from hfpatch.report.sheet import Shown as Shown
from hfpatch.report.sheet import finite as finite
from hfpatch.report.sheet import say as say
