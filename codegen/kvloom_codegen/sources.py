"""YAML files with line numbers: where the specs are, and how one is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from kvloom_codegen.problems import Problem

PathInFile: TypeAlias = "tuple[str | int, ...]"
KINDS = ("layouts", "chunks", "models")


def specs_dir() -> Path:
    """The folder of all specs: the checkout's ``specs/``, or the copy inside an installed package.

    Raises FileNotFoundError, naming both places, where there is neither.
    """
    package = Path(__file__).resolve().parent
    places = (package / "specs", package.parent.parent / "specs")
    for place in places:
        if (place / KINDS[0]).is_dir():
            return place
    raise FileNotFoundError(f"no specs folder: looked for {places[0]} and {places[1]}")


@dataclass(frozen=True)
class Source:
    """One YAML file as plain data (sequences are tuples) and the place of every value in it."""

    file: str
    stem: str
    data: Any
    marks: Mapping[PathInFile, tuple[int, int]] = field(repr=False)

    def problem(self, path: PathInFile, message: str, *, name: str | None = None) -> Problem:
        """A problem at ``path``, or at its nearest enclosing value that the file does have."""
        place = path
        while place and place not in self.marks:
            place = place[:-1]
        line, column = self.marks.get(place, (1, 1))
        shown = dotted(path) if name is None else name
        return Problem(self.file, line, column, shown, message)


def dotted(path: PathInFile) -> str:
    """``("memory", 1, "fuse")`` as ``memory[1].fuse``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def read_specs(folder: Path) -> tuple[dict[str, list[Source]], list[Problem]]:
    """Every spec under ``folder`` by kind (layouts, chunks, models), and the faults of YAML."""
    sources: dict[str, list[Source]] = {kind: [] for kind in KINDS}
    problems: list[Problem] = []
    for path in _strangers(folder):
        shown = _shown(path, folder)
        problems.append(
            Problem(shown, 1, 1, "", f"not a spec; allowed here: {', '.join(KINDS)}/*.yaml")
        )
    for kind in KINDS:
        for path in sorted((folder / kind).glob("*.yaml")):
            try:
                sources[kind].append(read_source(path, _shown(path, folder)))
            except _YamlFault as fault:
                problems.extend(fault.problems)
    return sources, problems


def _shown(path: Path, folder: Path) -> str:
    return f"specs/{path.relative_to(folder).as_posix()}"


def _strangers(folder: Path) -> Iterator[Path]:
    """YAML that no rule would ever read: a misspelt ending or folder must not go unnoticed."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        in_place = len(relative.parts) == 2 and relative.parts[0] in KINDS
        if path.suffix in (".yml", ".yaml") and not (in_place and path.suffix == ".yaml"):
            yield path


class _YamlFault(Exception):
    def __init__(self, *problems: Problem) -> None:
        self.problems = problems


def read_source(path: Path, shown: str) -> Source:
    """Read one file; ``shown`` is the name it has in messages."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _YamlFault(
            Problem(shown, 1, 1, "", f"not UTF-8 text: {error.reason} at byte {error.start}")
        ) from None
    loader = yaml.SafeLoader(text)
    try:
        _refuse_aliases(text, shown)
        node = loader.get_single_node()
        reader = _Reader(shown, loader)
        data = reader.value(node, ()) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise _YamlFault(Problem(shown, line, column, "", f"not YAML: {error.problem}")) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _YamlFault(Problem(shown, line, 1, "", f"not YAML: {error.reason}")) from None
    if reader.problems:
        raise _YamlFault(*reader.problems)
    if not isinstance(data, dict):
        found = "an empty file" if data is None else type(data).__name__
        raise _YamlFault(Problem(shown, 1, 1, "", f"{found}; allowed: a mapping of keys"))
    return Source(shown, path.stem, data, reader.marks)


def _refuse_aliases(text: str, shown: str) -> None:
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            mark = event.start_mark
            line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            message = f"alias *{event.anchor}; write the value out, specs have no aliases"
            raise _YamlFault(Problem(shown, line, column, "", message))


class _Reader:
    """Turns YAML nodes into data, noting where each value stands."""

    def __init__(self, shown: str, loader: yaml.SafeLoader) -> None:
        self.shown = shown
        self.loader = loader
        self.marks: dict[PathInFile, tuple[int, int]] = {}
        self.problems: list[Problem] = []

    def value(self, node: yaml.Node, path: PathInFile) -> Any:
        self.marks.setdefault(path, self._place(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return tuple(self.value(item, (*path, i)) for i, item in enumerate(node.value))
        try:
            return self.loader.construct_object(node)
        except ValueError as error:  # e.g. a date that does not exist
            line, column = self._place(node)
            self.problems.append(Problem(self.shown, line, column, dotted(path), str(error)))
            return None

    def _mapping(self, node: yaml.MappingNode, path: PathInFile) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.loader.construct_object(key_node) if _scalar(key_node) else None
            if not isinstance(key, str):
                self._fault(key_node, path, "a key that is no text; allowed: words as keys")
                continue
            inside = (*path, key)
            if key in data:
                first = self.marks[inside][0]
                self._fault(key_node, inside, f"duplicate key, first on line {first}")
                continue
            # Faults of a value are shown at its key: that is the line a reader looks for.
            self.marks[inside] = self._place(key_node)
            data[key] = self.value(value_node, inside)
        return data

    def _fault(self, node: yaml.Node, path: PathInFile, message: str) -> None:
        line, column = self._place(node)
        self.problems.append(Problem(self.shown, line, column, dotted(path), message))

    @staticmethod
    def _place(node: yaml.Node) -> tuple[int, int]:
        return node.start_mark.line + 1, node.start_mark.column + 1


def _scalar(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode)
