"""The set of files that the specs ask for, and the three ways to deal with it.

``desired`` says what every generated file should hold. ``compare`` finds what is missing, stale
or orphaned; ``write`` mends it, touching no file that is already right.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from kvloom_codegen.checks import Specs
from kvloom_codegen.goldens import golden
from kvloom_codegen.problems import Problem, SpecError
from kvloom_codegen.render import (
    chunk_text,
    layout_module,
    layout_page,
    layout_table,
    model_text,
    render,
)

PACKAGE = "generated/kvloom_generated"
PAGES = "docs/layouts"
GOLDENS = "tests/goldens/layouts"
README = "README.md"
BEGIN = "<!-- layouts: generated from specs/ by `make generate`; do not edit -->"
END = "<!-- end of layouts -->"
BESIDE = ".new"  # the ending of a file that is being written

# Everything under these folders is the generator's: a file that no spec asks for is an orphan.
OWNED = (PACKAGE, PAGES, GOLDENS)

GENERATE = "make generate"
UPDATE = "make goldens"

State: TypeAlias = Literal["missing", "stale", "orphan"]


@dataclass(frozen=True)
class Difference:
    """One file that is not as the specs ask, and the command that mends it."""

    path: str
    state: State
    command: str
    old: str
    new: str

    def report(self) -> str:
        """What is wrong with the file, how to mend it, and a unified diff."""
        diff = difflib.unified_diff(
            self.old.splitlines(keepends=True),
            self.new.splitlines(keepends=True),
            f"{self.path} (as it is)",
            f"{self.path} (as the specs ask)",
        )
        return f"{self.state}: {self.path}; mend it with: {self.command}\n{''.join(diff)}"


def desired(specs: Specs, root: Path) -> dict[str, str]:
    """Path relative to the project's root → content, for every generated file."""
    modules = [spec.module for spec in specs.layouts]
    chunks = [chunk_text(chunk) for chunk in specs.chunks.values()]
    models = [model_text(model) for model in specs.models]
    files = {
        f"{PACKAGE}/__init__.py": render("package.py"),
        f"{PACKAGE}/py.typed": "",
        f"{PACKAGE}/registry.py": render(
            "registry.py", modules=modules, names=_names(specs), ids=_ids(specs)
        ),
        f"{PACKAGE}/chunks.py": render("chunks.py", chunks=chunks),
        f"{PACKAGE}/models.py": render("models.py", models=models),
        f"{PAGES}/README.md": render(
            "index.md",
            table=layout_table(specs.layouts, specs.chunks, "").splitlines(),
            chunks=chunks,
            models=models,
        ),
    }
    for spec in specs.layouts:
        chunk = specs.chunks[spec.chunk]
        files[f"{PACKAGE}/{spec.module}.py"] = layout_module(spec, chunk)
        files[f"{PAGES}/{spec.module}.md"] = layout_page(spec, chunk)
        files[f"{GOLDENS}/{spec.layout}.txt"] = golden(spec, chunk)
    files[README] = _readme(root, layout_table(specs.layouts, specs.chunks, f"{PAGES}/"))
    return dict(sorted(files.items()))


@dataclass(frozen=True)
class _Entry:
    key: str | int
    module: str


def _names(specs: Specs) -> list[_Entry]:
    return [
        _Entry(name.casefold(), spec.module)
        for spec in specs.layouts
        for name in (spec.layout, *(engine.alias for engine in spec.engines))
    ]


def _ids(specs: Specs) -> list[_Entry]:
    return [_Entry(spec.id, spec.module) for spec in specs.layouts if spec.id is not None]


def _readme(root: Path, table: str) -> str:
    """The project's README with the table between its two marks renewed."""
    path = root / README
    text = _read(path) if path.exists() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        message = f"needs one line {BEGIN!r} and after it one line {END!r} around the layout table"
        raise SpecError([Problem(README, 1, 1, "", message)])
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}\n\n{table}\n\n{END}{tail}"


def compare(files: dict[str, str], root: Path) -> list[Difference]:
    """Every generated file that is missing, stale or an orphan.

    SpecError where a folder stands in its place.
    """
    folders = [path for path in files if (root / path).is_dir()]
    if folders:
        message = "is a folder; allowed: nothing, or the generated file"
        raise SpecError(Problem(path, 1, 1, "", message) for path in folders)
    found = []
    for path, content in files.items():
        command = UPDATE if path.startswith(GOLDENS) else GENERATE
        if not (root / path).is_file():
            found.append(Difference(path, "missing", GENERATE, "", content))
        elif (old := _read(root / path)) != content:
            found.append(Difference(path, "stale", command, old, content))
    found += [
        Difference(path, "orphan", GENERATE, _read(root / path), "")
        for path in _orphans(files, root)
    ]
    return found


def _read(path: Path) -> str:
    # Undecodable bytes in a damaged file must show up as a difference, not as a crash; newlines
    # are compared as they are.
    return path.read_bytes().decode("utf-8", errors="replace")


def _orphans(files: dict[str, str], root: Path) -> Iterator[str]:
    for folder in OWNED:
        for path in sorted((root / folder).rglob("*")):
            relative = path.relative_to(root).as_posix()
            ours = "__pycache__" in path.parts or path.is_dir() or relative in files
            if not ours and not _of_an_editor(path.name):
                yield relative


def _of_an_editor(name: str) -> bool:
    """Whether a file is hidden or a backup, and not what an interrupted run of ours left behind."""
    return (name.startswith(".") or name.endswith("~")) and not name.endswith(BESIDE)


def write(
    differences: Iterable[Difference],
    root: Path,
    *,
    update_goldens: bool,
    log: Callable[[str], None],
) -> list[Difference]:
    """Mend the tree; returns what it left alone: goldens that differ, unless they are updated."""
    left = []
    for one in differences:
        path = root / one.path
        if one.state == "stale" and one.path.startswith(GOLDENS) and not update_goldens:
            left.append(one)
        elif one.state == "orphan":
            path.unlink()
            log(f"removed {one.path}")
        else:
            _write_whole(path, one.new)
            log(f"wrote {one.path}")
    _remove_empty_folders(root)
    return left


def _write_whole(path: Path, content: str) -> None:
    """Write beside the target and rename, so that no reader ever sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}{BESIDE}")
    beside.write_bytes(content.encode("utf-8"))
    beside.replace(path)


def _remove_empty_folders(root: Path) -> None:
    for folder in OWNED:
        for path in sorted((root / folder).rglob("*"), reverse=True):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
