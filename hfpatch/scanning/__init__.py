"""Scans weight files as a stream: safetensors, never pickle, with memory that does not grow with the files.

layout.py     the weight files under a path
header.py     the header of a file, checked against its size
shards.py     shards checked against their index
formats.py    number formats as bits
values.py     counts and magnitudes of the numbers in a part of a file
worker.py     processes that measure parts of files
verdicts.py   findings and notes about a tensor
scan.py       `hfpatch.scan`
result.py     the report
"""
