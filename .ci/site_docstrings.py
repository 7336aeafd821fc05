"""Docstrings for the reference: lines `name: what it is`, of an object's own names, become a list."""

from __future__ import annotations

import re
from typing import Any

import griffe


class NamedLines(griffe.Extension):
    """Turns the lines that begin with a parameter or a field into items; the rest stays as it is."""

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.docstring is not None:
            func.docstring.value = as_list(func.docstring.value, {one.name for one in func.parameters})

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.docstring is not None:
            cls.docstring.value = as_list(cls.docstring.value, set(cls.members))


def as_list(text: str, names: set[str]) -> str:
    """The docstring with an item for each line that explains names; indented lines below belong to it."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        found = re.match(r"((?:\w+, )*\w+): ", line)
        if found and set(found[1].split(", ")) <= names:
            if not inside:
                lines.append("")
            inside = True
            rest = line[found.end() :]
            lines.append(f"* `{found[1]}`: {rest}")
        elif inside and line and not line.startswith(("Returns", "Raises")):
            lines.append(f"    {line.strip()}")
        else:
            if inside and line:
                lines.append("")
            inside = False
            lines.append(line)
    return "\n".join(lines)
