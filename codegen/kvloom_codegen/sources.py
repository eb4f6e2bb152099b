"""YAML files with line numbers: where the specs are, and how one is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from kvloom_codegen.problems import Problem, quoted

PathInFile: TypeAlias = "tuple[str | int, ...]"
KINDS = ("layouts", "chunks", "models")
MANUAL = "README.md"

# Far more than any layout needs; reading deeper files would exhaust Python's stack.
DEEPEST = 40
INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
DIGITS = 18  # what 64 bits hold
NOTHING = ("", "~", "null", "Null", "NULL")


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
    """One YAML file as plain data, and the place of every value in it.

    Data are dicts with text keys, tuples, text and whole numbers. Values at ``faults`` could not
    be read (they are None) and have been reported.
    """

    file: str
    stem: str
    data: dict[str, Any]
    marks: Mapping[PathInFile, tuple[int, int]] = field(repr=False)
    faults: frozenset[PathInFile] = frozenset()

    def problem(self, path: PathInFile, message: str) -> Problem:
        """A problem at ``path``, or at its nearest enclosing value that the file does have."""
        place = path
        while place not in self.marks:
            place = place[:-1]
        return Problem(self.file, *self.marks[place], dotted(path), message)


def dotted(path: PathInFile) -> str:
    """``("memory", 1, "fuse")`` as ``memory[1].fuse``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            word = part if part.isidentifier() else quoted(part)
            text += f".{word}" if text else word
    return text


def read_specs(folder: Path) -> tuple[dict[str, list[Source]], list[Problem]]:
    """Every spec under ``folder`` by kind (layouts, chunks, models), and what can't be read."""
    sources: dict[str, list[Source]] = {kind: [] for kind in KINDS}
    problems: list[Problem] = []
    for path in _files(folder):
        relative = path.relative_to(folder)
        shown = f"specs/{relative.as_posix()}"
        kind, *below = relative.parts
        if kind in KINDS and len(below) == 1 and path.suffix == ".yaml":
            source, found = read_source(path, shown)
            problems += found
            sources[kind] += [] if source is None else [source]
        elif relative.as_posix() != MANUAL:
            allowed = ", ".join(f"{kind}/*.yaml" for kind in KINDS)
            problems.append(Problem(shown, 1, 1, "", f"is no spec; allowed: {allowed}"))
    return sources, problems


def _files(folder: Path) -> Iterator[Path]:
    """What there is, sorted: a misspelt ending or folder must not go unnoticed.

    Hidden files and backups are an editor's business.
    """
    for path in sorted(folder.rglob("*")):
        names = path.relative_to(folder).parts
        ignored = any(name.startswith(".") or name.endswith("~") for name in names)
        if not ignored and (not path.is_dir() or path.suffix == ".yaml"):
            yield path


def read_source(path: Path, shown: str) -> tuple[Source | None, list[Problem]]:
    """Read one file, whose name in messages is ``shown``: None where it is no mapping in YAML."""

    def stop(message: str, line: int = 1, column: int = 1) -> tuple[None, list[Problem]]:
        return None, [Problem(shown, line, column, "", message)]

    raw = b""
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
        problems = list(_refused(yaml.parse(text, Loader=yaml.SafeLoader), shown))
        if problems:
            return None, problems
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        return stop(f"can't be read ({error.strerror}); allowed: a file")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return stop(f"byte {raw[error.start]:#04x} is not UTF-8; allowed: UTF-8 text", line)
    except yaml.reader.ReaderError as error:
        before = text[: error.position].split("\n")
        message = f"character {error.character:#04x}; allowed: printable text"
        return stop(message, len(before), len(before[-1]) + 1)
    except yaml.MarkedYAMLError as error:
        said = ", ".join(filter(None, (error.context, error.problem)))
        mark = error.problem_mark or error.context_mark
        return stop(f"not YAML: {said}", *_place(mark))
    except (ValueError, OverflowError):  # an escape such as "\U99999999"
        return stop("not YAML: an escape beyond Unicode")
    reader = _Reader(shown)
    data = None if node is None else reader.value(node, ())
    if not isinstance(data, dict):
        found = "nothing" if data is None else quoted(data)
        return stop(f"{found}; allowed: a mapping of keys")
    source = Source(shown, path.stem, data, reader.marks, frozenset(reader.faults))
    return source, reader.problems


def _place(mark: Any) -> tuple[int, int]:
    """Line and column of a mark of YAML's, from 1."""
    return mark.line + 1, mark.column + 1


def _refused(events: Iterable[Any], shown: str) -> Iterator[Problem]:
    """What YAML can say and a spec may not: one document of plain values is enough."""
    depth = documents = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        documents += isinstance(event, yaml.DocumentStartEvent)
        if depth > DEEPEST:
            message = f"more than {DEEPEST} levels deep; allowed: fewer"
        elif isinstance(event, yaml.AliasEvent):
            message = f"alias *{event.anchor}; allowed: the value itself, written out"
        elif isinstance(event, yaml.DocumentStartEvent) and documents == 2:
            message = "a second document; allowed: one in a file"
        elif getattr(event, "anchor", None) is not None:
            message = f"anchor &{event.anchor}; allowed: the value alone"
        elif getattr(event, "tag", None) is not None:
            message = f"tag {event.tag}; allowed: the value alone"
        else:
            continue
        yield Problem(shown, *_place(event.start_mark), "", message)
        if depth > DEEPEST:
            return


class _Reader:
    """Turns YAML nodes into data, noting where each value stands.

    A plain scalar is a whole number in decimal, nothing, or text: no ``yes`` is true, no ``1:30``
    a number, no ``010`` eight.
    """

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.marks: dict[PathInFile, tuple[int, int]] = {}
        self.faults: set[PathInFile] = set()
        self.problems: list[Problem] = []

    def value(self, node: yaml.Node, path: PathInFile) -> Any:
        self.marks.setdefault(path, _place(node.start_mark))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return tuple(self.value(item, (*path, i)) for i, item in enumerate(node.value))
        text, plain = _scalar(node)
        if plain and text in NOTHING:
            return self._unreadable(node, path, "is empty; allowed: a value, or no such entry")
        if not _printable(text):
            return self._unreadable(node, path, f"{quoted(text)}; allowed: printable text")
        if not plain or not INTEGER.fullmatch(text):
            return text
        if len(text) > DIGITS:
            message = f"{quoted(text)}; allowed: a number of at most {DIGITS} digits"
            return self._unreadable(node, path, message)
        return int(text)

    def _unreadable(self, node: yaml.Node, path: PathInFile, message: str) -> None:
        self.faults.add(path)
        self._problem(node, path, message)

    def _mapping(self, node: yaml.MappingNode, path: PathInFile) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            if key is None:
                self._problem(key_node, path, "a key that is no text; allowed: words")
                continue
            inside = (*path, key)
            if key in data:
                message = f"stands on line {self.marks[inside][0]} too; allowed: each key once"
                self._problem(key_node, inside, message)
                continue
            # Faults of a value are shown at its key: that is the line a reader looks for.
            self.marks[inside] = _place(key_node.start_mark)
            data[key] = self.value(value_node, inside)
        return data

    @staticmethod
    def _key(node: yaml.Node) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            return None
        text, plain = _scalar(node)
        if plain and (text in NOTHING or INTEGER.fullmatch(text)):
            return None
        return text if _printable(text) else None

    def _problem(self, node: yaml.Node, path: PathInFile, message: str) -> None:
        place = _place(node.start_mark)
        self.problems.append(Problem(self.shown, *place, dotted(path), message))


def _scalar(node: yaml.Node) -> tuple[str, bool]:
    """The text of a scalar, and whether it stands there plain, without quotes."""
    return node.value, getattr(node, "style", None) is None


def _printable(text: str) -> bool:
    return "".join(text.split()).isprintable()
