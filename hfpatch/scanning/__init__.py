"""Weight files read as a stream: safetensors, never pickle, in memory that does not grow with them.

header.py    what a file says it holds, checked against its size
layout.py    which files a path means, and what their index says of them
values.py    the numbers of one piece of a file
scan.py      all of it, over several processes
report.py    what was found
"""
