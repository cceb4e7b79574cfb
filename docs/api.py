"""Writes docs/api.md, every public name from its docstring: `python -m docs.api`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hfpatch

PAGE = Path(__file__).parent / "api.md"
LISTS = ("Args", "Attributes", "Raises", "Yields", "Returns")
"""Sections of a docstring that hold `name: text`."""
SUBMODULES = ("nn", "testing", "errors")
TABLES = ("sheet", "sheets")
"""Methods of everything that prints as a table: said once."""


def page() -> str:
    """Return the page."""
    listed: list[str] = vars(hfpatch)["__all__"]  # made when hfpatch is imported, so no type checker knows it
    names = [name for name in listed if not name.startswith("_")]
    objects = {name: getattr(hfpatch, name) for name in names if name not in SUBMODULES}
    functions = {name: value for name, value in objects.items() if inspect.isfunction(value)}
    classes = {name: value for name, value in objects.items() if inspect.isclass(value)}
    lines = [
        "# API",
        "",
        "Every public name, from its docstring, by `python -m docs.api`. All of them are there after `import hfpatch`; "
        "importing it imports no torch. What prints as a table is a table in a notebook too, and has `.to_dict()` for "
        "JSON and `.sheet()` for its cells.",
        "",
        "## Functions",
        "",
        *(line for name in sorted(functions) for line in function(f"hfpatch.{name}", functions[name], "###")),
        "## Classes",
        "",
        *(line for name in sorted(classes) for line in cls(f"hfpatch.{name}", classes[name])),
    ]
    for name in SUBMODULES:
        lines += submodule(f"hfpatch.{name}", getattr(hfpatch, name))
    return "\n".join(lines).rstrip() + "\n"


def submodule(path: str, module: ModuleType) -> list[str]:
    """Return the section of a module: what it defines, or imports to offer."""
    lines = [f"## {path}", "", *markdown(module.__doc__ or ""), ""]
    for name, value in vars(module).items():
        if name.startswith("_") or not str(getattr(value, "__module__", "")).startswith("hfpatch."):
            continue
        if inspect.isclass(value):
            lines += cls(f"{path}.{name}", value)
        elif inspect.isfunction(value):
            lines += function(f"{path}.{name}", value, "###")
    return lines


def function(path: str, value: Any, heading: str) -> list[str]:
    """Return the section of a function or method."""
    name = path.rpartition(".")[2] if heading == "####" else path
    return [f"{heading} {name}", "", *signature(path, value), *markdown(inspect.getdoc(value) or ""), ""]


def signature(path: str, value: Any) -> list[str]:
    """Return the line to call, as a block."""
    return ["```text", f"{path.rpartition('.')[2]}{_shown(inspect.signature(value))}", "```", ""]


def _shown(signature: inspect.Signature) -> str:
    """Return a signature without `self`, quotes and what has no name outside this process."""
    kept = [p for name, p in signature.parameters.items() if name not in ("self", "cls")]
    return re.sub(r"<object object at \w+>|<factory>", "...", str(signature.replace(parameters=kept))).replace("'", "")


def cls(path: str, value: type) -> list[str]:
    """Return the section of a class: how it is made, if it is not only returned, and its public methods."""
    lines = [f"### {path}", "", *markdown(inspect.getdoc(value) or ""), ""]
    for name, member in members(value):
        if isinstance(member, property):
            lines += [f"#### {name}", "", *markdown(inspect.getdoc(member) or ""), ""]
        else:
            lines += function(f"{path}.{name}", member, "####")
    return lines


def members(value: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that hfpatch defines and documents, those of its bases too."""
    for name in dir(value):
        found = inspect.getattr_static(value, name)
        member = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
        if name.startswith("_") or name in TABLES or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        code = member.fget if isinstance(member, property) else member
        if str(getattr(code, "__module__", "")).startswith("hfpatch.") and inspect.getdoc(member):
            yield name, member


def markdown(doc: str) -> list[str]:
    """Return a docstring as Markdown: sections become lists."""
    lines: list[str] = []
    section = ""
    for line in inspect.cleandoc(doc).splitlines():
        if (word := line.removesuffix(":")) in LISTS and line.endswith(":"):
            section = word
            lines += [f"{word}:", ""]
        elif section and line.startswith("    "):
            text = line[4:]
            item = re.match(r"(\*{0,2}[\w., |]+): (.*)", text)
            if text.startswith(" ") or item is None:
                lines.append(f"  {text.strip()}")
            else:
                lines.append(f"- `{item[1]}`: {item[2]}")
        else:
            section = section if not line else ""
            lines.append(line)
    return lines


if __name__ == "__main__":
    PAGE.write_text(page())
