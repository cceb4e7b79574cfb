"""A page as an element of a notebook, with its styles and its scripts kept to itself."""

from __future__ import annotations

from html import escape


def frame(page: str) -> str:
    """Return an iframe that holds a page."""
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" width="100%" height="620" '
        'style="border:0" title="trace"></iframe>'
    )
