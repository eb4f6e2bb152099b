"""The rules of a layout's tree: every element is reached once, and by every axis once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from kvloom_codegen.problems import Problem
from kvloom_codegen.sources import PathInFile, Source
from kvloom_codegen.spec import (
    AtBind,
    Branch,
    Fuse,
    Item,
    LayoutSpec,
    branch_word,
    members,
    split_item,
)

NEEDED = ("layer", "block", "token", "elem")
OPTIONAL = ("kv", "head")


@dataclass(frozen=True)
class _Path:
    """One way from the root of the tree to an element: the axes on it, its plane and field."""

    place: PathInFile
    words: tuple[str, ...] = ()
    kv: str = ""
    field: str = ""

    def halves(self, axis: str) -> list[str]:
        """The halves of a split axis, such as ``elem/x``."""
        return [word for word in self.words if (split := split_item(word)) and split[0] == axis]


def check_tree(source: Source, spec: LayoutSpec) -> list[Problem]:
    """What is wrong with the tree; rules that rest on others are only tried where those hold."""
    problems: list[Problem] = []
    paths = list(_paths(source, spec, spec.memory, _Path(("memory",)), problems))
    return (
        problems
        or [problem for path in paths for problem in _path_problems(source, spec, path)]
        or [*_alike(source, spec, paths), *_leaves_once(source, spec, paths)]
    )


def repeated(words: Iterable[str]) -> list[str]:
    """The words that stand more than once."""
    return sorted(word for word, count in Counter(words).items() if count > 1)


def _paths(
    source: Source,
    spec: LayoutSpec,
    items: tuple[Item, ...],
    path: _Path,
    problems: list[Problem],
) -> Iterator[_Path]:
    for i, item in enumerate(items):
        here = (*path.place, i)
        if isinstance(item, (str, Fuse)):
            words = item.fuse if isinstance(item, Fuse) else (item,)
            path = replace(path, words=path.words + words)
        elif i + 1 < len(items):
            message = f"a branch on {branch_word(item)} before other items; allowed: last"
            problems.append(source.problem(here, message))
            return
        else:
            problems += _branch_problems(source, spec, item, here)
            for name, member in members(item).items():
                inside = _enter(path, item, name, here)
                yield from _paths(source, spec, member, inside, problems)
            return
    yield path


def _enter(path: _Path, branch: Branch, name: str | int, here: PathInFile) -> _Path:
    word = branch_word(branch)
    path = replace(path, place=(*here, word, name))
    if word == "region":
        return path
    path = replace(path, words=(*path.words, word))
    return replace(path, kv=str(name)) if word == "kv" else replace(path, field=str(name))


def _branch_problems(
    source: Source, spec: LayoutSpec, branch: Branch, here: PathInFile
) -> Iterator[Problem]:
    word = branch_word(branch)
    if word in spec.lists and here != ("memory", 0):
        message = f"a branch on {word}, which is a list level; allowed: first in memory"
        yield source.problem(here, message)
    if word == "field" and isinstance(spec.fields, AtBind):
        message = "a branch on field, whose members are known at bind; allowed: one order for all"
        yield source.problem(here, message)
    elif word == "field":
        allowed = ", ".join(spec.declared_fields) or "none, since there are no fields"
        for name in members(branch):
            if name not in spec.declared_fields:
                message = f"is no field; allowed: {allowed}"
                yield source.problem((*here, "field", name), message)


def _path_problems(source: Source, spec: LayoutSpec, path: _Path) -> Iterator[Problem]:
    listed = [axis for axis in dict.fromkeys(spec.lists) if not _stands_both(spec, path, axis)]
    whole_words = [word for word in path.words if not split_item(word)]
    for word in repeated((*whole_words, *listed)):
        yield source.problem(path.place, f"'{word}' is reached twice; allowed: once")
    for axis in NEEDED:
        halves = path.halves(axis)
        whole = axis in path.words or axis in spec.lists
        if not halves and not whole:
            yield source.problem(path.place, f"'{axis}' is missing; every element needs it")
        if halves and (whole or not _fit(halves)):
            found = ", ".join(([axis] if whole else []) + halves)
            message = f"{found}; allowed: {axis}, or {axis}/x and {axis}%x of one factor"
            yield source.problem(path.place, message)
    declared = spec.fields and not isinstance(spec.fields, AtBind)
    if declared and not path.field and "field" not in spec.lists:
        message = "no branch on field is reached; allowed: one, since there are fields"
        yield source.problem(path.place, message)
    if path.field and "elem" in path.words[: path.words.index("field")]:
        yield source.problem(path.place, "'elem' before the branch on field; allowed: inside it")
    if spec.fields and any(split_item(word) for word in path.words):
        yield source.problem(path.place, "a split axis with fields; allowed: one of the two")


def _fit(halves: list[str]) -> bool:
    """Whether these are the two halves of one split."""
    splits = [split for half in halves if (split := split_item(half))]
    parts = sorted(part for _, part, _ in splits)
    return parts == ["%", "/"] and len({name for _, _, name in splits}) == 1


def _stands_both(spec: LayoutSpec, path: _Path, axis: str) -> bool:
    """Whether a list level may also stand in memory: views of layers, and branches over lists."""
    if axis == "layer":
        return axis in spec.views
    return path.words[:1] == (axis,) and bool(path.kv if axis == "kv" else path.field)


def _alike(source: Source, spec: LayoutSpec, paths: list[_Path]) -> Iterator[Problem]:
    """A token has the same planes and heads wherever its parts lie."""
    for axis in OPTIONAL:
        lacking = [path for path in paths if axis not in (*path.words, *spec.lists)]
        if len(lacking) < len(paths):
            for path in lacking:
                message = f"'{axis}' is missing, but other parts have it; allowed: all or none"
                yield source.problem(path.place, message)


def _leaves_once(source: Source, spec: LayoutSpec, paths: list[_Path]) -> Iterator[Problem]:
    kinds = ("key", "value") if any(path.kv for path in paths) else ("",)
    branched = any(path.field for path in paths)
    names = tuple(spec.declared_fields) if branched else ("",)
    for kv, name in product(kinds, names):
        reached = [path for path in paths if path.kv in (kv, "") and path.field in (name, "")]
        what = " ".join(filter(None, (kv, name))) or "an element"
        if not reached:
            yield source.problem(("memory",), f"{what} has no place; allowed: exactly one")
        elif len(reached) > 1:
            yield source.problem(reached[1].place, f"{what} has a second place; allowed: one")
