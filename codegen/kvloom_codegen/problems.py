"""What is wrong with a spec, and where: collected over all files, then reported at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
        return where + (f"{self.field}: {self.message}" if self.field else self.message)


class SpecError(Exception):
    """The specs can't be generated from; ``problems`` holds every fault, sorted by place."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        super().__init__("\n".join(map(str, self.problems)))
