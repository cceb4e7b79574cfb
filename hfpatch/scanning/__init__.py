"""Weight files read as a stream: safetensors, never pickle, in memory that does not grow with them.

layout.py    which files a path means
header.py    what a file says it holds, checked against its size
shards.py    whether shards are what their index says
formats.py   number formats as bits
values.py    the numbers of one stretch of a file
worker.py    processes that look at stretches
judge.py     what a tensor holds, as findings and notes
scan.py      all of it
report.py    what was found
"""
