"""What is wrong with a spec, and where: collected over all files, then reported at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LONGEST_SHOWN = 60


@dataclass(frozen=True, order=True)
class Problem:
    """One fault of one file; prints as ``file:line:col: field: what is wrong, what is allowed``."""

    file: str
    line: int
    column: int
    field: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}: "
        return _one_line(where + (f"{self.field}: {self.message}" if self.field else self.message))


class SpecError(Exception):
    """The specs can't be generated from; ``problems`` holds every fault, sorted by place."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        super().__init__("\n".join(map(str, self.problems)))


def quoted(value: object) -> str:
    """A value of a file as messages show it."""
    if isinstance(value, (tuple, dict)):
        return "a list" if isinstance(value, tuple) else "a mapping"
    text = str(value)
    if len(text) > LONGEST_SHOWN:
        text = f"{text[:LONGEST_SHOWN]}…"
    return f"'{text}'"


def _one_line(text: str) -> str:
    """``text`` with everything that could break or hide a line written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
