"""How Sphinx builds the site from the whole checkout: `make docs`. The pages are Markdown and read as they are."""

project = "hfpatch"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "benchmarks/README.md", "examples/README.md", "benchmarks/results/*.md"]
exclude_patterns = [".*", "build", "dist"]
html_theme = "furo"
html_title = "hfpatch"
html_copy_source = False
myst_heading_anchors = 4
