"""The kinds of edit, one file each."""
