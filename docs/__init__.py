"""What makes the pages: `make pages` writes those that are made, `make docs` builds the site."""
