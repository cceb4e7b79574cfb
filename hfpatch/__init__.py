"""Declarative, reversible, proved patches for loaded Hugging Face models.

    fix = hfpatch.apply(model)      # in place; says what it did
    print(fix.verify(batch))        # this model, this batch, against float32
    fix.revert()

Importing this module imports neither torch nor transformers; each name does when it needs them. The names are those
of `__init__.pyi`, the one list of them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.1.0"
__all__ += ["__version__"]  # pyright: ignore
