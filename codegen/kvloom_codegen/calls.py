"""The calls on which kernels are proved, and the interpreter that makes them.

A kernel reads counts and strides from an array, so it is proved for more than its layout's tight
strides: on all of a cache and on parts of it, with runs fused as a runtime fuses them, and with
strides that have nothing in common, where one column read for another shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias, TypeVar

from kvloom_codegen.expr import Expr, to_expr
from kvloom_codegen.ir import ADDRESSINGS, Addressing, Component, Dim, Kernel
from kvloom_codegen.lower import fuse
from kvloom_codegen.nest import columns
from kvloom_codegen.table import Located, Move, Table, merged
from kvloom_codegen.walk import Element, Geometry, Place

_T = TypeVar("_T")

# One row of the geometry array: values by column, in bytes and counts.
Row: TypeAlias = Mapping[str, int]

# The axes that a kernel loops over and steps by, from the innermost out.
AXES = ("head", "token", "block", "kv", "layer")


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a kernel, and the cache that it is called on.

    ``unlike`` says that the strides are not the layout's own: tensors are then allocations.
    """

    name: str
    addressing: Addressing
    rows: tuple[Row, ...] = field(repr=False)
    index: tuple[int, ...]
    order: tuple[int, ...]
    layers: range
    numbers: range
    table: Table = field(repr=False)
    unlike: bool = False

    @cached_property
    def expected(self) -> list[Move]:
        """What this call must move."""
        positions = self.order[self.numbers.start : self.numbers.stop]
        asked = [
            entry if position in positions else -1 for position, entry in enumerate(self.index)
        ]
        if self.addressing == "blocks":
            size = self.table.geometry.block_size
            asked = [
                block * size + token if block >= 0 else -1
                for block in asked
                for token in range(size)
            ]
        return merged(self.table.moves(asked, self.layers))


def calls(
    component: Component, table: Table, places: Mapping[Element, Place], lists: tuple[str, ...]
) -> Iterator[Call]:
    """The calls on a cache of one component: ``table`` has its elements, ``places`` its tensors.

    ``lists`` are the axes that step from tensor to tensor.
    """
    geometry = table.geometry
    layers = range(geometry.layers)
    for addressing in ADDRESSINGS:
        # Nothing in order, and one token skipped.
        if addressing == "slots":
            index = (geometry.tokens - 1, -1, *reversed(range(geometry.tokens - 2)))
        else:
            index = tuple(reversed(range(geometry.blocks)))
        numbers, half = range(len(index)), len(index) // 2
        order = (*numbers[1::2], *numbers[::2])
        rows: tuple[Row, ...] = (geometry_row(component, addressing, geometry),) * len(layers)
        whole = Call("all fused", addressing, rows, index, order, layers, numbers, table)
        yield whole
        yield replace(whole, name="the last part", layers=layers[1:], numbers=numbers[-half:])
        yield replace(whole, name="the first part", layers=layers[:-1], numbers=numbers[:-half])
        for name, counts in (
            ("strides unlike", {"kv": 2, "token": geometry.block_size, "head": geometry.heads}),
            ("strides unlike, every count 1", {"kv": 1, "token": 1, "head": 1}),
        ):
            rows = _unlike_rows(geometry, counts)
            if addressing == "slots":
                counts["token"] = geometry.block_size  # tokens are named, not counted
            unlike = _unlike_table(table, rows, places, lists, counts)
            yield replace(whole, name=name, rows=rows, table=unlike, unlike=True)


def geometry_row(
    component: Component, addressing: Addressing, geometry: Geometry
) -> dict[str, int]:
    """The columns of the geometry array as a runtime would fill them for tight tensors."""
    values = geometry.symbols
    exact = replace(
        component,
        run=to_expr(component.run.evaluate(values)),
        dims=tuple(_numbers(dim, values) for dim in component.dims),
    )
    fused = fuse(exact, addressing)
    row = {"block_size": geometry.block_size, "run": _bytes(fused.run)}
    for name in columns(component):
        side, _, axis = name.partition(".")
        dim = exact.dim(axis)
        if side == "count":
            kept = fused.dim(axis)
            row[name] = kept.extent.evaluate({}) if kept is not None else 1
        elif dim is not None:
            row[name] = _bytes(dim.engine if side == "engine" else dim.chunk)
    return row


def _numbers(dim: Dim, values: Mapping[str, int]) -> Dim:
    def number(value: Expr) -> Expr:
        return to_expr(value.evaluate(values))

    return Dim(dim.axis, *map(number, (dim.extent, dim.pointer, dim.engine, dim.chunk)))


def _bytes(bits: Expr) -> int:
    return bits.evaluate({}) // 8


def _unlike_rows(geometry: Geometry, counts: Mapping[str, int]) -> tuple[Row, ...]:
    """Rows whose columns have nothing in common, with engine strides that differ by layer."""
    run = geometry.head_size * geometry.itembits // 8
    heads, tokens = geometry.heads, geometry.block_size
    row = {"block_size": tokens, "run": run}
    row |= {f"count.{axis}": count for axis, count in counts.items()}
    in_chunk = _gapped({"head": heads, "token": geometry.tokens, "kv": 2, "layer": 1}, run, gap=41)
    row |= {f"chunk.{axis}": step for axis, step in in_chunk.items()}
    row["chunk.block"] = tokens * in_chunk["token"]
    inside = {"head": heads, "token": tokens, "block": geometry.blocks, "kv": 2, "layer": 1}
    by_layer = [_gapped(inside, run, gap=61 + 2 * layer) for layer in range(geometry.layers)]
    widest = max(steps["layer"] for steps in by_layer)
    return tuple(
        {**row, **{f"engine.{axis}": step for axis, step in {**steps, "layer": widest}.items()}}
        for steps in by_layer
    )


def _gapped(extents: Mapping[str, int], run: int, gap: int) -> dict[str, int]:
    """A stride for each axis, from the innermost out, ``gap`` bytes more than tight."""
    strides, size = {}, run
    for axis, extent in extents.items():
        strides[axis] = size + gap
        size = strides[axis] * extent
    return strides


def _unlike_table(
    table: Table,
    rows: Sequence[Row],
    places: Mapping[Element, Place],
    lists: tuple[str, ...],
    counts: Mapping[str, int],
) -> Table:
    """The elements within ``counts`` where the strides of ``rows`` put them."""
    inside = [axis for axis in AXES if axis not in lists]
    located = []
    for element, move in table.located:
        at = element._asdict()
        if any(at[axis] >= count for axis, count in counts.items()):
            continue
        row, bit = rows[element.layer], element.elem * move.bits
        engine = 8 * sum(at[axis] * row[f"engine.{axis}"] for axis in inside) + bit
        chunk = 8 * sum(at[axis] * row[f"chunk.{axis}"] for axis in AXES) + bit
        located.append(Located(element, Move(places[element].tensor, engine, chunk, move.bits)))
    return replace(table, located=tuple(located))


# --- the interpreter -----------------------------------------------------------------------------


def kernel_moves(kernel: Kernel, call: Call) -> Iterator[Move]:
    """What a kernel moves, by the expressions that are printed; KeyError names what it lacks."""
    values = {
        "NL": len(call.rows),
        "layer_first": call.layers.start,
        "layer_last": call.layers.stop,
        "first": call.numbers.start,
        "last": call.numbers.stop,
    }
    for pointer, engine, chunk, run in _copies(kernel, call, 0, values, (0, 0, 0)):
        yield Move(pointer, 8 * engine, 8 * chunk, 8 * run)


def _copies(
    kernel: Kernel,
    call: Call,
    depth: int,
    values: Mapping[str, int],
    at: tuple[int, int, int],
) -> Iterator[tuple[int, int, int, int]]:
    """The tensor, the two addresses and the bytes of every copy."""
    if depth == len(kernel.loops):
        if kernel.pointer_level not in range(depth):
            raise KeyError("a tensor")
        yield *at, kernel.run.evaluate(values)
        return
    loop = kernel.loops[depth]
    for step in range(loop.first.evaluate(values), loop.last.evaluate(values)):
        inside = {**values, loop.variable: step}
        if depth == 0:
            row = _entry(call.rows, inside["layer"], "geometry")
            inside |= {name: row[name] for name in kernel.columns}
        if loop.position:
            inside[loop.position] = _entry(call.order, step, "order")
        if loop.entry:
            at_position = inside[loop.position or loop.variable]
            inside[loop.entry] = entry = _entry(call.index, at_position, "index")
            if loop.skips and entry < 0:
                continue
        for name, value in loop.lets:
            inside[name] = value.evaluate(inside)
        pointer, engine, chunk = at
        if depth == kernel.pointer_level:
            pointer = kernel.pointer.evaluate(inside)
        engine += loop.engine.evaluate(inside)
        chunk += loop.chunk.evaluate(inside)
        yield from _copies(kernel, call, depth + 1, inside, (pointer, engine, chunk))


def _entry(array: Sequence[_T], at: int, name: str) -> _T:
    if not 0 <= at < len(array):
        raise KeyError(f"entry {at} of the {name} array")
    return array[at]
