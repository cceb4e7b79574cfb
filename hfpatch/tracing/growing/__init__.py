"""Where the signal of a step grows or dies while every value is still finite.

flow.py        factors between what goes into a module and what comes out
own_code.py    operations that a module runs between the calls of its parts
thresholds.py  which factors are suspicious
followed.py    a kept call run again, with the size of every tensor on the way
path.py        the way of the signal through it
words.py       the operation that made the factor, in words
growth.py      the finding
trend.py       the factors over several steps
"""
