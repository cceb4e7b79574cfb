"""Where the signal of a step grows or dies while every value is still finite.

flow.py       the record of what went into and out of each module; factors between the two
own_code.py   operations that a model runs between the calls of its parts
limits.py     which factors are a fault
followed.py   a kept call run again, with the size of every tensor on the way
words.py      the operation that made the factor, in words
growth.py     the finding
trend.py      the factors over several steps
"""
