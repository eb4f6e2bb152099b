"""The rules across fields and across files: what is well formed word by word may still not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from keyword import iskeyword
from math import prod
from typing import TYPE_CHECKING

from kvloom_codegen.expr import ONE, ZERO, Expr, symbol, to_expr
from kvloom_codegen.lower import Context, size_of
from kvloom_codegen.printers.text import bits_as_bytes
from kvloom_codegen.problems import Problem, SpecError
from kvloom_codegen.prove import compatible, geometries, prove_layout
from kvloom_codegen.sources import PathInFile, Source, read_specs
from kvloom_codegen.spec import (
    DTYPES,
    AtBind,
    ChunkSpec,
    FieldBranch,
    Fuse,
    Item,
    KvBranch,
    LayoutSpec,
    ModelSpec,
    RegionBranch,
    View,
    axes_of,
    axis_words,
    members,
    parse,
    split_item,
)
from kvloom_codegen.table import ProofError
from kvloom_codegen.tree import check_tree, repeated
from kvloom_codegen.walk import Geometry, width

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

# Modules and pages of the generated package that no layout's own may replace.
RESERVED = ("chunks", "models", "readme", "registry")

# Elements of the largest small cache of a proof: more would take minutes.
PROVABLE = 200_000


@dataclass(frozen=True)
class Specs:
    """Every spec of a folder, well formed and checked; layouts with wire ids first, by id."""

    layouts: tuple[LayoutSpec, ...]
    chunks: dict[str, ChunkSpec]
    models: tuple[ModelSpec, ...]


def load(folder: Path) -> Specs:
    """Read, check and prove all specs under ``folder``; SpecError with every problem found."""
    sources, problems = read_specs(folder)
    if not any((folder / "layouts").glob("*.yaml")):
        problems.append(Problem("specs/layouts", 1, 1, "", "no layouts; allowed: one or more"))
    layouts: list[tuple[Source, LayoutSpec]] = []
    chunks: dict[str, ChunkSpec] = {}
    models: list[ModelSpec] = []
    for kind, files in sources.items():
        for source in files:
            spec = parse(kind, source)
            if isinstance(spec, LayoutSpec):
                layouts.append((source, spec))
            elif isinstance(spec, ChunkSpec):
                found = list(check_chunk(source, spec))
                problems += found
                chunks |= {} if found else {spec.chunk: spec}
            elif isinstance(spec, ModelSpec):
                problems += check_model(source, spec)
                models.append(spec)
            else:
                problems += spec
    known = {path.stem for path in (folder / "chunks").glob("*.yaml")}
    for source, layout in layouts:
        found = list(check_layout(source, layout, chunks, known))
        problems += found or _proof(source, layout, chunks)
    problems += check_together(layouts)
    if problems:
        raise SpecError(problems)
    ordered = sorted(
        (spec for _, spec in layouts),
        key=lambda spec: (spec.id is None, spec.id or 0, spec.layout),
    )
    models.sort(key=lambda model: model.model)
    return Specs(tuple(ordered), chunks, tuple(models))


def _proof(source: Source, spec: LayoutSpec, chunks: dict[str, ChunkSpec]) -> Iterator[Problem]:
    try:
        prove_layout(spec, chunks.values())
    except ProofError as error:
        yield source.problem(("memory",), f"the proof fails: {error}")


# --- one file ------------------------------------------------------------------------------------


def check_layout(
    source: Source, spec: LayoutSpec, chunks: dict[str, ChunkSpec], known: set[str]
) -> Iterator[Problem]:
    """Everything that is wrong with one layout by itself."""
    yield from _name_is_stem(source, "layout", spec.layout)
    yield from _module(source, spec)
    words = [*_lists(source, spec), *_fields(source, spec), *_splits(source, spec)]
    words += check_tree(source, spec)
    yield from words
    if words:
        return
    yield from _attention(source, spec)
    yield from _views(source, spec)
    yield from _view(source, spec)
    yield from _padding(source, spec)
    yield from _provable(source, spec)
    yield from _name_says_the_tree(source, spec)
    yield from _chunk(source, spec, chunks, known)


def _name_is_stem(source: Source, key: str, name: str) -> Iterator[Problem]:
    if name != source.stem:
        yield source.problem((key,), f"'{name}'; allowed: the file's own name, '{source.stem}'")


def _module(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    if spec.module in RESERVED or iskeyword(spec.module):
        taken = f"{', '.join(name.upper() for name in RESERVED)}, keywords of Python"
        yield source.problem(("layout",), f"'{spec.layout}'; allowed: any name but {taken}")


def _lists(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    for axis in repeated(spec.lists):
        yield source.problem(("lists",), f"'{axis}' stands twice; allowed: each list level once")
    if "field" in spec.lists and not spec.fields:
        yield source.problem(("lists",), "a list over field; allowed: only where fields are given")


def _fields(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    if isinstance(spec.fields, AtBind):
        if "field" not in spec.lists:
            message = "planes of unknown size; allowed: only with 'field' in lists"
            yield source.problem(("fields", "at_bind"), message)
        return
    for name, one in spec.fields.items():
        path: PathInFile = ("fields", name)
        if (one.dtype is None) == (one.bits is None):
            both = "neither dtype nor bits" if one.dtype is None else "dtype and bits"
            yield source.problem(path, f"{both}; allowed: exactly one of them")
        if (one.bits is None) != (one.first is None):
            alone = "first without bits" if one.bits is None else "bits without first"
            yield source.problem(path, f"{alone}; allowed: both or none")
        if isinstance(one.width, int) and one.width * one.element_bits % 8:
            message = f"{one.width * one.element_bits} bits; allowed: whole bytes"
            yield source.problem((*path, "width"), message)


def _splits(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    used = {split[2] for word in axis_words(spec.memory) if (split := split_item(word))}
    for name in sorted(set(spec.split) - used):
        message = f"is not used; allowed: a factor of elem/{name} or token/{name} in memory"
        yield source.problem(("split", name), message)
    for name in sorted(used - set(spec.split)):
        declared = ", ".join(spec.split) or "none is declared"
        message = f"splits by '{name}'; allowed: a factor under split ({declared})"
        yield source.problem(("memory",), message)


def _attention(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    if spec.attention == "mla":
        for axis in sorted(axes_of(spec) & {"kv", "head"}):
            message = f"mla with the axis {axis}; allowed: mha, or no {axis} axis"
            yield source.problem(("attention",), message)


def _views(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    if not spec.views:
        return
    if spec.lists != ("layer",) or "layer" not in spec.memory:
        message = "nothing to view; allowed: with lists: [layer] and layer, not fused, in memory"
        yield source.problem(("views",), message)
    elif any(not isinstance(item, (str, Fuse)) for item in spec.memory):
        yield source.problem(("views",), "over a branch; allowed: over plain axes")


def _view(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    if spec.view is None:
        return
    apart = "field" in spec.lists or ("kv" in spec.lists and isinstance(spec.memory[0], KvBranch))
    if apart or not spec.fields:
        message = "one shape for tensors of unknown bytes; allowed: with fields inside one tensor"
        yield source.problem(("view",), message)
        return
    tight = spec.model_copy(update={"pad": None})
    memory, shown = size_of(spec.memory, Context(tight, ZERO)), _shown_bits(spec.view)
    if shown != memory:
        message = (
            f"a shape of {bits_as_bytes(shown)} bytes; "
            f"allowed: the {bits_as_bytes(memory)} bytes of the memory"
        )
        yield source.problem(("view", "shape"), message)


def _shown_bits(view: View) -> Expr:
    extents = (symbol(one) if isinstance(one, str) else to_expr(one) for one in view.shape)
    return prod(extents, start=ONE) * DTYPES[view.dtype]


def _padding(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    fused = any(isinstance(item, Fuse) and "block" in item.fuse for item in _items(spec.memory))
    if spec.pad is not None and fused:
        message = "padding inside a fused dimension; allowed: where block is one of its own"
        yield source.problem(("pad", "block"), message)


def _items(items: tuple[Item, ...]) -> Iterator[Item]:
    """All items of a tree."""
    for item in items:
        yield item
        if not isinstance(item, (str, Fuse)):
            for member in members(item).values():
                yield from _items(member)


def _provable(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    found = max(_elements(spec, geometry) for geometry in geometries(spec))
    if found > PROVABLE:
        message = f"the proof would visit {found} elements; allowed: {PROVABLE}; use smaller sizes"
        yield source.problem(("memory",), message)


def _elements(spec: LayoutSpec, geometry: Geometry) -> int:
    """The elements of a small cache."""
    fields = spec.declared_fields.values()
    row = sum(width(one, geometry) for one in fields) if fields else geometry.head_size
    planes = 2 if "kv" in axes_of(spec) else 1
    return geometry.layers * geometry.tokens * planes * geometry.heads * row


def _name_says_the_tree(source: Source, spec: LayoutSpec) -> Iterator[Problem]:
    said = canonical_name(spec)
    if said is None and _reads_as_canonical(spec.layout):
        message = (
            f"'{spec.layout}' reads as a name of the grammar, which cannot say this memory; "
            "allowed: any other name"
        )
        yield source.problem(("layout",), message)
    elif said is not None and said != spec.layout:
        yield source.problem(
            ("layout",), f"'{spec.layout}'; allowed: '{said}', as its tree is called"
        )


def _reads_as_canonical(name: str) -> bool:
    return "_X_" in name or set(name.split("_")) <= {*GRAMMAR.values(), *LIST_WORDS.values()}


def canonical_name(spec: LayoutSpec) -> str | None:
    """The layout's name in the grammar, or None where the grammar cannot say its tree."""
    if spec.split or spec.views:
        return None
    if "field" in spec.lists and not isinstance(spec.fields, AtBind):
        return None
    axes: list[str] = []
    for item in spec.memory:
        if isinstance(item, (KvBranch, RegionBranch)):
            return None
        words = _field_words(item) if isinstance(item, FieldBranch) else _axis_word(item)
        if not words:
            return None
        axes += words
    return "_X_".join([*(LIST_WORDS[axis] for axis in spec.lists), "_".join(axes)])


def _axis_word(item: str | Fuse) -> list[str]:
    word = GRAMMAR.get(item.fuse if isinstance(item, Fuse) else (item,))
    return [word] if word else []


def _field_words(branch: FieldBranch) -> list[str]:
    """BSV, BSS, ... where each field lies by token, and no two have the same initial."""
    words = [f"BS{name[0].upper()}" for name in branch.field]
    plain = all(member == ("token", "elem") for member in branch.field.values())
    return words if plain and not repeated(words) else []


def _chunk(
    source: Source, spec: LayoutSpec, chunks: dict[str, ChunkSpec], known: set[str]
) -> Iterator[Problem]:
    fitting = ", ".join(name for name, chunk in chunks.items() if compatible(spec, chunk))
    allowed = fitting or "none of the chunk layouts fits"
    if spec.chunk not in known:
        message = f"'{spec.chunk}' is no chunk layout; allowed: {allowed}"
        yield source.problem(("chunk",), message)
    elif spec.chunk in chunks and not compatible(spec, chunks[spec.chunk]):
        message = f"'{spec.chunk}' does not have exactly this layout's axes; allowed: {allowed}"
        yield source.problem(("chunk",), message)


def check_chunk(source: Source, chunk: ChunkSpec) -> Iterator[Problem]:
    """Everything that is wrong with one chunk layout by itself."""
    yield from _name_is_stem(source, "chunk", chunk.chunk)
    for axis in repeated(chunk.order):
        yield source.problem(("memory",), f"'{axis}' stands twice; allowed: each axis once")
    for axis in ("token", "elem"):
        if axis not in chunk.order:
            yield source.problem(("memory",), f"'{axis}' is missing; every chunk needs it")
    if "elem" in chunk.order and chunk.order[-1] != "elem":
        yield source.problem(("memory",), "elem is not innermost; allowed: last")
    if "field" in chunk.order and "field" not in chunk.axes[-1]:
        message = "field outside the row; allowed: fused in the last dimension"
        yield source.problem(("memory",), message)
    for i, dimension in enumerate(chunk.axes):
        if len(dimension) > 1 and i + 1 < len(chunk.axes):
            yield source.problem(("memory", i), "fuse before other axes; allowed: last, the row")
        if "token" in dimension and len(dimension) > 1:
            yield source.problem(("memory", i), "token inside a row; allowed: outside")


def check_model(source: Source, model: ModelSpec) -> Iterator[Problem]:
    """Everything that is wrong with one model geometry by itself."""
    yield from _name_is_stem(source, "model", model.model)
    if model.attention == "mla" and "heads" in source.data:
        yield source.problem(("heads",), "stands with mla; allowed: head_size alone, the latent")
    if model.attention == "mha" and "heads" not in source.data:
        yield source.problem(("heads",), "is missing; mha needs its number of KV heads")


# --- all files -----------------------------------------------------------------------------------


def check_together(layouts: list[tuple[Source, LayoutSpec]]) -> Iterator[Problem]:
    """Ids, names, aliases and trees are unique over all layouts, whatever the case of a name."""
    first: dict[tuple[str, str], str] = {}
    for source, spec in layouts:
        for path, shown, value in _of_its_own(spec):
            key = (shown, value)
            if key in first:
                yield source.problem(path, f"{shown}, as in {first[key]}; allowed: one of its own")
            else:
                first[key] = source.file


def _of_its_own(spec: LayoutSpec) -> Iterator[tuple[PathInFile, str, str]]:
    """(place, what messages call it, value) of all that no two layouts may share."""
    if spec.id is not None:
        yield ("id",), f"id {spec.id}", ""
    yield ("layout",), f"the name '{spec.layout.casefold()}'", ""
    for i, engine in enumerate(spec.engines):
        yield ("engines", i, "alias"), f"the name '{engine.alias}'", ""
    tree = (spec.lists, spec.memory, spec.fields, spec.split, spec.views, spec.pad)
    yield ("memory",), "the same lists and memory", repr(tree)
