"""Two models on one batch: the first operation where they part by more than rounding explains, and why.

B is run on the values of A: each of its blocks gets the input that A's block got, and what it returns is replaced by
what A's block returned. So one block's rounding is the bound, and code between the blocks is compared as well.
"""
