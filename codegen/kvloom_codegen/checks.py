"""The rules across fields and across files: what is well formed word by word may still not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from kvloom_codegen.problems import Problem, SpecError
from kvloom_codegen.prove import ProofError, compatible, prove_layout
from kvloom_codegen.sources import PathInFile, Source, read_specs
from kvloom_codegen.spec import (
    AtBind,
    Branch,
    ChunkSpec,
    FieldBranch,
    Fuse,
    Item,
    KvBranch,
    LayoutSpec,
    ModelSpec,
    RegionBranch,
    axes_of,
    axis_words,
    branch_word,
    members,
    parse,
    split_item,
)

if TYPE_CHECKING:
    from pathlib import Path

# The name grammar: what each axis, or fusion of axes, is called.
GRAMMAR = {
    ("layer",): "NL",
    ("kv",): "TWO",
    ("block",): "NB",
    ("token",): "BS",
    ("head",): "NH",
    ("elem",): "HS",
    ("one",): "ONE",
    ("block", "token"): "NBBS",
    ("kv", "elem"): "CS",
}
LIST_WORDS = {"layer": "NL", "kv": "TWO", "field": "NP"}


@dataclass(frozen=True)
class Specs:
    """Every spec of a folder, well formed and checked; layouts with wire ids first, by id."""

    layouts: tuple[LayoutSpec, ...]
    chunks: dict[str, ChunkSpec]
    models: tuple[ModelSpec, ...]


def load(folder: Path) -> Specs:
    """Read, check and prove all specs under ``folder``; SpecError with every problem found."""
    sources, problems = read_specs(folder)
    found: dict[str, list[tuple[Source, LayoutSpec | ChunkSpec | ModelSpec]]] = {}
    for kind, files in sources.items():
        found[kind] = []
        for source in files:
            spec = parse(kind, source)
            if isinstance(spec, list):
                problems += spec
            else:
                found[kind].append((source, spec))
    layouts = [(source, spec) for source, spec in found["layouts"] if isinstance(spec, LayoutSpec)]
    chunks = [(source, spec) for source, spec in found["chunks"] if isinstance(spec, ChunkSpec)]
    models = [(source, spec) for source, spec in found["models"] if isinstance(spec, ModelSpec)]
    by_name = {spec.chunk: spec for _, spec in chunks}
    known = {source.stem for source in sources["chunks"]}
    for source, chunk in chunks:
        problems += check_chunk(source, chunk)
    for source, model in models:
        problems += check_model(source, model)
    sound = []
    for source, layout in layouts:
        own = list(check_layout(source, layout, by_name, known))
        problems += own
        sound += [] if own else [(source, layout)]
    problems += check_together(layouts)
    if not any(problem.file.startswith("specs/chunks/") for problem in problems):
        for source, layout in sound:
            try:
                prove_layout(layout, by_name.values())
            except ProofError as error:
                problems.append(source.problem(("memory",), f"the proof fails: {error}"))
    if problems:
        raise SpecError(problems)
    ordered = sorted(
        (spec for _, spec in layouts),
        key=lambda spec: (spec.id is None, spec.id or 0, spec.layout),
    )
    return Specs(tuple(ordered), by_name, tuple(spec for _, spec in models))


# --- one file ------------------------------------------------------------------------------------


def check_layout(
    source: Source, spec: LayoutSpec, chunks: dict[str, ChunkSpec], known: set[str]
) -> Iterator[Problem]:
    """Everything that is wrong with one layout by itself."""
    yield from _name_is_stem(source, "layout", spec.layout)
    yield from _lists(source, spec)
    yield from _fields(source, spec)
    yield from _splits(source, spec)
    tree = list(_tree(source, spec))
    yield from tree
    if tree:
        return
    yield from _attention(source, spec)
    yield from _views(source, spec)
    yield from _padding(source, spec)
    yield from _name_says_the_tree(source, spec)
    if spec.chunk in chunks:
        if not compatible(spec, chunks[spec.chunk]):
            fitting = [name for name, chunk in chunks.items() if compatible(spec, chunk)]
            yield source.problem(
                ("chunk",),
                f"'{spec.chunk}' does not have exactly this layout's axes; "
                f"allowed: {', '.join(fitting) or 'none of the chunk layouts fits'}",
            )
    elif spec.chunk not in known:
        names = ", ".join(sorted(known))
        yield source.problem(("chunk",), f"'{spec.chunk}' is no chunk layout; allowed: {names}")


def _name_is_stem(source: Source, key: str, name: str) -> Iterator[Problem]:
    if name != source.stem:
        yield source.problem((key,), f"'{name}'; allowed: the file's own name, '{source.stem}'")


def _repeated(values: Iterable[str]) -> list[str]:
    seen = list(values)
    return sorted({value for value in seen if seen.count(value) > 1})


def _lists(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    for axis in _repeated(spec.lists):
        yield source.problem(("lists",), f"'{axis}' stands twice; allowed: each list level once")
    if "field" in spec.lists and not spec.fields:
        yield source.problem(("lists",), "a list over field; allowed: only where fields are given")


def _fields(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    if isinstance(spec.fields, AtBind):
        if "field" not in spec.lists:
            yield source.problem(
                ("fields", "at_bind"), "planes of unknown size; allowed: only with 'field' in lists"
            )
        return
    for name, one in spec.fields.items():
        path: PathInFile = ("fields", name)
        if (one.dtype is None) == (one.bits is None):
            yield source.problem(path, "allowed: exactly one of dtype and bits")
        if (one.bits is None) != (one.first is None):
            yield source.problem(path, "allowed: first (low or high) with bits, and only with bits")
    if "fields" in source.data and not spec.fields:
        yield source.problem(("fields",), "empty; allowed: one field or more, or no such key")


def _splits(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    used = {split[2] for word in axis_words(spec.memory) if (split := split_item(word))}
    for name in sorted(set(spec.split) - used):
        yield source.problem(
            ("split", name), f"is not used; allowed: a factor of elem/{name} or token/{name}"
        )
    for name in sorted(used - set(spec.split)):
        declared = ", ".join(spec.split) or "none is declared"
        yield source.problem(
            ("memory",), f"splits by '{name}'; allowed: a factor under split ({declared})"
        )


@dataclass(frozen=True)
class _Path:
    """One way from the root of the tree to an element."""

    words: tuple[str, ...]
    kv: str
    field: str
    place: PathInFile


def _tree(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    """The tree is a layout: every element is reached once, by every axis once."""
    problems: list[Problem] = []
    paths = list(_paths(spec, spec.memory, _Path((), "", "", ("memory",)), source, problems))
    yield from problems
    if problems:
        return
    for path in paths:
        problems += _path_problems(source, spec, path)
    yield from problems
    if not problems:
        yield from _leaves_once(source, spec, paths)


def _paths(
    spec: LayoutSpec,
    items: tuple[Item, ...],
    path: _Path,
    source: Source,
    problems: list[Problem],
) -> Iterator[_Path]:
    for i, item in enumerate(items):
        here = (*path.place, i)
        if isinstance(item, str):
            path = _Path((*path.words, item), path.kv, path.field, path.place)
        elif isinstance(item, Fuse):
            path = _Path((*path.words, *item.fuse), path.kv, path.field, path.place)
        elif i + 1 < len(items):
            problems.append(
                source.problem(
                    here, f"a branch on {branch_word(item)} before other items; allowed: last"
                )
            )
            return
        else:
            yield from _branch_paths(spec, item, path, here, source, problems)
            return
    yield path


def _branch_paths(
    spec: LayoutSpec,
    branch: Branch,
    path: _Path,
    here: PathInFile,
    source: Source,
    problems: list[Problem],
) -> Iterator[_Path]:
    word = branch_word(branch)
    if word in spec.lists and path.words:
        message = f"a branch on {word}, which is a list level; allowed: first in memory"
        problems.append(source.problem(here, message))
    if word == "field":
        unknown = [str(name) for name in members(branch) if name not in spec.declared_fields]
        allowed = ", ".join(spec.declared_fields) or "no field is declared"
        problems += [
            source.problem((*here, "field", name), f"is no field; allowed: {allowed}")
            for name in unknown
        ]
    for name, member in members(branch).items():
        place = (*here, word, name)
        kv = str(name) if word == "kv" else path.kv
        field = str(name) if word == "field" else path.field
        words = path.words if word == "region" else (*path.words, word)
        yield from _paths(spec, member, _Path(words, kv, field, place), source, problems)


def _path_problems(source: Source, spec: LayoutSpec, path: _Path) -> Iterator[Problem]:
    whole = [word for word in path.words if not split_item(word)]
    listed = [axis for axis in spec.lists if not _stands_both(spec, path, axis)]
    for axis in _repeated((*whole, *listed)):
        yield source.problem(path.place, f"'{axis}' is reached twice; allowed: each axis once")
    for axis in ("layer", "block", "token", "elem"):
        halves = sorted(word for word in path.words if word.startswith((f"{axis}/", f"{axis}%")))
        if not halves and axis not in (*whole, *spec.lists):
            yield source.problem(path.place, f"'{axis}' is missing; every element needs it")
        if halves and axis in whole:
            yield source.problem(
                path.place, f"'{axis}' and {halves[0]}; allowed: the axis or its halves"
            )
        names = {word[len(axis) + 1 :] for word in halves}
        for name in sorted(names):
            pair = [word for word in path.words if word in (f"{axis}/{name}", f"{axis}%{name}")]
            if len(pair) != 2 or len(set(pair)) != 2 or len(names) > 1:
                yield source.problem(
                    path.place,
                    f"{', '.join(halves)}; allowed: {axis}/{name} and {axis}%{name} once",
                )
                break
    if spec.fields and not path.field and "field" not in spec.lists:
        yield source.problem(
            path.place, "fields are declared, but no branch on field is reached; allowed: one"
        )
    if path.field and "elem" in path.words[: path.words.index("field")]:
        yield source.problem(path.place, "'elem' before the branch on field; allowed: inside it")
    if spec.fields and any(split_item(word) for word in path.words):
        yield source.problem(path.place, "splits with fields; allowed: one of the two")


def _stands_both(spec: LayoutSpec, path: _Path, axis: str) -> bool:
    """Whether a list level may also stand in memory: views of layers, and branches over lists."""
    if axis == "layer":
        return axis in spec.views
    return path.words[:1] == (axis,) and bool(path.kv if axis == "kv" else path.field)


def _leaves_once(source: Source, spec: LayoutSpec, paths: list[_Path]) -> Iterator[Problem]:
    has_kv = any(path.kv for path in paths)
    kinds = ("key", "value") if has_kv else ("",)
    branched = any(path.field for path in paths)
    names = tuple(spec.declared_fields) if branched else ("",)
    for kv, name in product(kinds, names):
        reached = [path for path in paths if path.kv in (kv, "") and path.field in (name, "")]
        what = " ".join(filter(None, (kv, name))) or "element"
        if not reached:
            yield source.problem(("memory",), f"{what} has no place; allowed: exactly one")
        elif len(reached) > 1:
            yield source.problem(reached[1].place, f"{what} has a second place; allowed: one")


def _attention(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    if spec.attention == "mla":
        for axis in sorted(axes_of(spec) & {"kv", "head"}):
            yield source.problem(
                ("attention",), f"mla with the axis {axis}; allowed: mha, or no {axis} axis"
            )


def _views(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    if not spec.views:
        return
    if spec.lists != ("layer",) or "layer" not in axis_words(spec.memory):
        yield source.problem(
            ("views",), "allowed: with lists: [layer] and layer in memory, whose views are listed"
        )
    elif any(not isinstance(item, (str, Fuse)) for item in spec.memory):
        yield source.problem(("views",), "views over a branch; allowed: over plain axes")


def _padding(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    if spec.pad is not None and "block" not in spec.memory:
        yield source.problem(
            ("pad", "block"), "allowed: where block is a dimension of its own in memory"
        )


def _name_says_the_tree(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    said = canonical_name(spec)
    if said is not None and said != spec.layout:
        yield source.problem(("layout",), f"'{spec.layout}', but lists and memory say '{said}'")
    elif said is None and "_X_" in spec.layout:
        yield source.problem(
            ("layout",),
            f"'{spec.layout}' reads as a name of the grammar, which cannot say this memory; "
            "allowed: a name without _X_",
        )


def canonical_name(spec: LayoutSpec) -> str | None:
    """The layout's name in the grammar, or None where the grammar cannot say its tree."""
    if spec.split or spec.views:
        return None
    words = [LIST_WORDS[axis] for axis in spec.lists]
    axes: list[str] = []
    for item in spec.memory:
        if isinstance(item, FieldBranch):
            if any(member != ("token", "elem") for member in item.field.values()):
                return None
            axes += [f"BS{name[0].upper()}" for name in item.field]
        elif isinstance(item, (KvBranch, RegionBranch)):
            return None
        else:
            word = GRAMMAR.get(item.fuse if isinstance(item, Fuse) else (item,))
            if word is None:
                return None
            axes.append(word)
    if spec.fields and not isinstance(spec.fields, AtBind) and "field" in spec.lists:
        return None
    return "_X_".join([*words, "_".join(axes)])


def check_chunk(source: Source, chunk: ChunkSpec) -> Iterator[Problem]:
    """Everything that is wrong with one chunk layout by itself."""
    yield from _name_is_stem(source, "chunk", chunk.chunk)
    for axis in _repeated(chunk.order):
        yield source.problem(("memory",), f"'{axis}' stands twice; allowed: each axis once")
    for axis in ("token", "elem"):
        if axis not in chunk.order:
            yield source.problem(("memory",), f"'{axis}' is missing; every chunk needs it")
    if "elem" in chunk.order and chunk.order[-1] != "elem":
        yield source.problem(("memory",), "elem is not innermost; allowed: last")
    for i, dimension in enumerate(chunk.axes):
        if len(dimension) > 1 and i + 1 < len(chunk.axes):
            yield source.problem(("memory", i), "fuse before other axes; allowed: last, the row")
        if "token" in dimension and len(dimension) > 1:
            yield source.problem(("memory", i), "token inside a row; allowed: outside")


def check_model(source: Source, model: ModelSpec) -> Iterator[Problem]:
    """Everything that is wrong with one model geometry by itself."""
    yield from _name_is_stem(source, "model", model.model)
    if model.attention == "mla" and "heads" in source.data:
        yield source.problem(("heads",), "heads with mla; allowed: head_size alone, the latent")
    if model.attention == "mha" and "heads" not in source.data:
        yield source.problem(("heads",), "is missing; mha needs its number of KV heads")


# --- all files -----------------------------------------------------------------------------------


def check_together(layouts: list[tuple[Source, LayoutSpec]]) -> Iterator[Problem]:
    """Ids, names and aliases are unique over all layouts."""

    def ids(spec: LayoutSpec) -> Iterator[tuple[PathInFile, str]]:
        if spec.id is not None:
            yield ("id",), str(spec.id)

    def names(spec: LayoutSpec) -> Iterator[tuple[PathInFile, str]]:
        yield ("layout",), spec.layout.casefold()
        for i, engine in enumerate(spec.engines):
            yield ("engines", i, "alias"), engine.alias.casefold()

    def trees(spec: LayoutSpec) -> Iterator[tuple[PathInFile, str]]:
        parts = (spec.lists, spec.memory, spec.fields, spec.split, spec.views, spec.pad)
        yield ("memory",), repr(parts)

    readers: tuple[tuple[str, Callable[[LayoutSpec], Iterator[tuple[PathInFile, str]]]], ...]
    readers = (("id", ids), ("name", names), ("memory", trees))
    for what, read in readers:
        first: dict[str, str] = {}
        for source, spec in layouts:
            for path, value in read(spec):
                if value in first:
                    shown = "the same lists and memory" if what == "memory" else f"'{value}'"
                    yield source.problem(
                        path, f"{shown}, as in {first[value]}; allowed: a {what} of its own"
                    )
                first.setdefault(value, source.file)
