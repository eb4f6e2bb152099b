"""Prints plain data as Python source, laid out as the project's formatter would."""

from __future__ import annotations

import json
import textwrap

WIDTH = 100


def field_lines(name: str, value: object, indent: int) -> list[str]:
    """``name=value,`` in as many lines as it needs below ``indent`` columns."""
    text = literal(value)
    if indent + len(name) + len(text) + 2 <= WIDTH:
        return [f"{name}={text},"]
    if isinstance(value, str):
        pieces = textwrap.wrap(value, WIDTH - indent - 8, drop_whitespace=False)
        return [f"{name}=(", *(f"    {literal(piece)}" for piece in pieces), "),"]
    if not isinstance(value, tuple):
        raise TypeError(f"{name}: nothing to break in {text}")
    lines = [line for item in value for line in _item_lines(item, indent + 4)]
    return [f"{name}=(", *(f"    {line}" for line in lines), "),"]


def _item_lines(item: object, indent: int) -> list[str]:
    text = literal(item)
    if indent + len(text) + 1 <= WIDTH or not isinstance(item, Call):
        return [f"{text},"]
    arguments = [f"    {name}={literal(one)}," for name, one in item.arguments]
    return [f"{item.name}(", *arguments, "),"]


def literal(value: object) -> str:
    """A Python literal in one line, strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        inside = ", ".join(literal(item) for item in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if value is None or isinstance(value, int):
        return repr(value)
    if isinstance(value, Call):
        arguments = ", ".join(f"{name}={literal(one)}" for name, one in value.arguments)
        return f"{value.name}({arguments})"
    raise TypeError(f"no literal for {type(value).__name__}")


class Call:
    """A constructor call with keyword arguments."""

    def __init__(self, name: str, /, **arguments: object) -> None:
        self.name = name
        self.arguments = tuple(arguments.items())
