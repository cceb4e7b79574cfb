"""What a trace shows: a table, figures by path, and a picture.

table.py     one row for every block; plain values
by_path.py   the figures of one module by its path
picture.py   a curve over the blocks of one step; a heat map of several
"""
