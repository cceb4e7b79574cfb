"""Where the patch files are: beside this package in a checkout, inside it in a wheel.

Makes `hfpatch.patches.<family>.<defect>` importable from both; `hfpatch.patching.registry` lists them.
"""

from pathlib import Path

_here = Path(__file__).resolve().parent
__path__ = [str(next((p for p in (_here / "patches", _here.parent / "patches") if p.is_dir()), _here / "patches"))]
