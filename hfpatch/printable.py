"""Text that is safe to print, whatever names from files it quotes."""

from __future__ import annotations


def printable(text: str, *, lines: bool = True) -> str:
    r"""Return a text that is safe to print: what controls a terminal, hides or turns other text, or is half of a
    character, is written as Python writes it, such as `\x1b`.

    Args:
        text: The text, which may quote names from files.
        lines: Leave line breaks as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c == "\n") else ascii(c)[1:-1] for c in text)
