"""Draws a layout in text: each level of its memory, what lies there side by side, and how large."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvloom_codegen.expr import ONE, ZERO, Expr, symbol
from kvloom_codegen.lower import PLANES, Context, branches, item_axes, size_of
from kvloom_codegen.printers.text import bits_as_bytes, plain
from kvloom_codegen.spec import (
    FieldBranch,
    Fuse,
    Item,
    KvBranch,
    LayoutSpec,
    RegionBranch,
    branch_word,
)


@dataclass(frozen=True)
class _Row:
    depth: int
    axis: str
    parts: str
    size: str

    @property
    def left(self) -> str:
        return f"{'  ' * self.depth}{self.axis}"


def draw(spec: LayoutSpec) -> tuple[str, ...]:
    """The drawing's lines: list levels first, then memory from the outside in."""
    rows = [
        _Row(0, axis, _list_cells(axis), "a list of views" if spec.views else "a list")
        for axis in spec.lists
    ]
    root = Context(spec, ZERO)
    if "field" in spec.lists:
        for name, one in spec.declared_fields.items():
            rows.append(_Row(0, name, f"a tensor of {one.dtype or f'{one.bits}-bit'}", ""))
            rows += _rows(spec.memory, root.enter("field", name), 1)
    else:
        rows += _rows(spec.memory, root, 0)
    left = max(len(row.left) for row in rows) + 2
    middle = max(len(row.parts) for row in rows) + 2
    return tuple(f"{row.left:<{left}}{row.parts:<{middle}}{row.size}".rstrip() for row in rows)


def _rows(items: tuple[Item, ...], context: Context, depth: int) -> Iterator[_Row]:
    for i, item in enumerate(items):
        if isinstance(item, (KvBranch, FieldBranch, RegionBranch)):
            yield from _branch_rows(item, context, depth)
            return
        inner = size_of(items[i + 1 :], context)
        sizes: dict[str, Expr] = {}
        for axis in reversed(item_axes(item)):
            inner = context.stride(item, axis, inner)
            sizes[axis] = inner
            inner = inner * context.extent(axis)
        for axis in item_axes(item):
            fused = " (one dimension)" if isinstance(item, Fuse) else ""
            size = f"{bits_as_bytes(sizes[axis])} bytes each{fused}"
            yield _Row(depth, axis, _cells(axis, context.extent(axis)), size)


def _branch_rows(
    branch: KvBranch | FieldBranch | RegionBranch, context: Context, depth: int
) -> Iterator[_Row]:
    word = branch_word(branch)
    apart = word in context.spec.lists
    for name, member, inside in branches(branch, context):
        label = f"{word} {name}" if word == "region" else str(name)
        size = f"{bits_as_bytes(size_of(member, inside))} bytes"
        yield _Row(depth, label, "a tensor" if apart else "end to end", size)
        yield from _rows(member, inside, depth + 1)


def _list_cells(axis: str) -> str:
    if axis == "kv":
        return f"| {' | '.join(PLANES)} |"
    return f"| 0 | 1 | … | {'NL' if axis == 'layer' else 'NP'}-1 |"


def _cells(axis: str, extent: Expr) -> str:
    if axis == "kv":
        return f"| {' | '.join(PLANES)} |"
    count = extent.constant
    if count is None:
        return f"| 0 | 1 | … | {plain(extent)}-1 |"
    if count > 3:
        return f"| 0 | 1 | … | {count - 1} |"
    return "| " + " | ".join(map(str, range(count))) + " |"


def shape(spec: LayoutSpec) -> str:
    """The shape of one tensor as an engine registers it: ``[2, NB, BS, NH, HS]``."""
    if spec.view is not None:
        return "[" + ", ".join(map(str, spec.view.shape)) + "]"
    context = Context(spec, ZERO)
    if spec.memory and not isinstance(spec.memory[0], (str, Fuse)):
        return "K and V differ" if branch_word(spec.memory[0]) == "kv" else "parts differ"
    words = []
    for item in spec.memory:
        if isinstance(item, (KvBranch, FieldBranch, RegionBranch)):
            words.append("…")
            continue
        extent = symbol("width") if item == "elem" and "field" in spec.lists else None
        size = extent or _extents(item, context)
        if not (item == "layer" and spec.views):
            words.append(plain(size))
    return "[" + ", ".join(words) + "]"


def _extents(item: Item, context: Context) -> Expr:
    total = ONE
    for axis in item_axes(item):
        total = total * context.extent(axis)
    return total
