"""How patches come into the registry: files, entry points of installed packages, patches registered by hand."""
