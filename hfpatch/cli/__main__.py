"""`python -m hfpatch.cli`."""

from hfpatch.cli import main

main()
