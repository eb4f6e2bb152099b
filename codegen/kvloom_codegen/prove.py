"""The proof: what would be emitted, interpreted on small geometries, moves exactly the payload.

Three readings of a spec must agree on every element: the walk of its tree, the components of its
IR with their runs, and the kernels' loop nests over a geometry array. A layout passes where the
engine's bits and the chunk's bits are in one-to-one relation, the chunk is covered exactly, and
nothing outside the payload (padding, other tensors) is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from kvloom_codegen.expr import Expr, symbol, to_expr
from kvloom_codegen.ir import ADDRESSINGS, Addressing, Component, Dim, Kernel, LayoutIR
from kvloom_codegen.lower import fuse, lower, moves
from kvloom_codegen.nest import columns, kernels, unsupported
from kvloom_codegen.spec import ChunkSpec, LayoutSpec, axes_of
from kvloom_codegen.walk import Element, Geometry, chunk_bits, engine_places, tiny

# An engine bit is (tensor, bit): tensors are allocations of their own. Views into one buffer are
# all in tensor 0, at their distance from the buffer's first view.
EngineBit = tuple[int, int]


class ProofError(Exception):
    """An IR that would move wrong bytes; the message names the elements that show it."""


@dataclass(frozen=True)
class Subject:
    """A layout against one chunk on one geometry: where the proof is carried out."""

    spec: LayoutSpec
    chunk: ChunkSpec
    ir: LayoutIR
    geometry: Geometry

    @property
    def values(self) -> dict[str, int]:
        """The values of all symbols of the IR."""
        return self.ir.values(self.geometry.symbols)

    @property
    def grain(self) -> int:
        """The bits that are moved together whatever the layout: one element of each width."""
        fields = self.spec.declared_fields.values()
        return gcd(*(one.element_bits for one in fields)) if fields else self.geometry.itembits


def compatible(spec: LayoutSpec, chunk: ChunkSpec) -> bool:
    """Whether ``chunk`` has a place for every axis of ``spec``."""
    inside = {"block", "one"}
    needed = axes_of(spec) - inside | ({"field"} if spec.declared_fields else set())
    extra = set(chunk.order) - axes_of(spec) - {"head"}
    return needed <= set(chunk.order) and not extra - ({"field"} if spec.declared_fields else set())


def prove_layout(spec: LayoutSpec, chunks: Iterable[ChunkSpec]) -> None:
    """Prove a layout against every chunk layout that can hold it; ProofError where it fails."""
    for chunk in chunks:
        if not compatible(spec, chunk):
            continue
        ir = lower(spec, chunk, pad=symbol("PAD"))
        found = () if unsupported(spec, ir) else kernels(spec, chunk, ir)
        for geometry in geometries(spec):
            prove(Subject(spec, chunk, ir, geometry), found)


def geometries(spec: LayoutSpec) -> tuple[Geometry, ...]:
    """The small geometries of the proof: tight, padded where blocks can be, another item size."""
    base = tiny(spec)
    found = [base]
    if "block" in spec.memory or any(not isinstance(item, str) for item in spec.memory):
        found.append(replace(base, pad=64))
    if not spec.declared_fields and not spec.split:
        found.append(replace(base, itembits=8, block_size=3, layers=3))
    return tuple(found)


def prove(subject: Subject, kernels_of_layout: Sequence[Kernel]) -> None:
    """Compare all readings of one layout on one geometry; ProofError where two disagree."""
    places = _engine_grains(subject)
    rows = dict(_chunk_grains(subject))
    expected = _pairs(subject, places, rows, range(subject.geometry.tokens))
    total = max(rows.values()) + subject.grain
    if len(rows) * subject.grain != total or len(set(rows.values())) != len(rows):
        raise ProofError(f"{_name(subject)}: the chunk has {total} bits, not one for each element")
    _compare(subject, "components", _component_pairs(subject, subject.ir.components), expected)
    for addressing in ADDRESSINGS:
        found = _component_pairs(subject, moves(subject.ir, addressing))
        _compare(subject, f"runs by {addressing}", found, expected)
    for kernel in kernels_of_layout:
        entries = _entries(subject.geometry, kernel.addressing)
        expected = _pairs(
            subject, places, rows, _slots(subject.geometry, kernel.addressing, entries)
        )
        _compare(subject, kernel.name, _kernel_pairs(subject, kernel, entries), expected)


def _name(subject: Subject) -> str:
    return f"{subject.spec.layout} against chunk {subject.chunk.chunk} on {subject.geometry}"


def _compare(
    subject: Subject,
    reading: str,
    found: Iterable[tuple[EngineBit, int]],
    expected: Mapping[EngineBit, int],
) -> None:
    """The pairs of ``reading`` are those ``expected``, each once."""
    engine_to_chunk: dict[EngineBit, int] = {}
    chunk_to_engine: dict[int, EngineBit] = {}
    for engine, chunk in found:
        for seen, one, other in (
            (engine_to_chunk.get(engine), "engine", chunk),
            (chunk_to_engine.get(chunk), "chunk", engine),
        ):
            if seen is not None:
                place = engine if one == "engine" else chunk
                raise ProofError(
                    f"{_name(subject)}: {reading}: two elements collide at {one} bit {place}: "
                    f"the other sides are {seen} and {other}"
                )
        if engine not in expected:
            raise ProofError(
                f"{_name(subject)}: {reading}: touches engine bit {engine}, which is padding or "
                f"outside, for chunk bit {chunk}"
            )
        if expected[engine] != chunk:
            raise ProofError(
                f"{_name(subject)}: {reading}: engine bit {engine} goes to chunk bit {chunk}, "
                f"but belongs to chunk bit {expected[engine]}"
            )
        engine_to_chunk[engine] = chunk
        chunk_to_engine[chunk] = engine
    missed = expected.keys() - engine_to_chunk.keys()
    if missed:
        engine = min(missed)
        raise ProofError(
            f"{_name(subject)}: {reading}: {len(missed)} places are never moved, first engine bit "
            f"{engine} with chunk bit {expected[engine]}"
        )


# --- the walk's reading --------------------------------------------------------------------------

Grain = tuple[Element, int]


def _bits_of(subject: Subject, element: Element) -> int:
    fields = subject.spec.declared_fields
    return fields[element.field].element_bits if fields else subject.geometry.itembits


def _engine_grains(subject: Subject) -> dict[Grain, EngineBit]:
    found: dict[Grain, EngineBit] = {}
    for element, place in engine_places(subject.spec, subject.geometry).items():
        for offset in range(0, _bits_of(subject, element), subject.grain):
            found[element, offset] = _absolute(subject, place.tensor, place.bit + offset)
    return found


def _absolute(subject: Subject, tensor: int, bit: int) -> EngineBit:
    step = subject.ir.view_step
    if step is None:
        return tensor, bit
    return 0, tensor * step.evaluate(subject.values) + bit


def _chunk_grains(subject: Subject) -> Iterator[tuple[Grain, int]]:
    for element, bit in chunk_bits(subject.spec, subject.chunk, subject.geometry):
        for offset in range(0, _bits_of(subject, element), subject.grain):
            yield (element, offset), bit + offset


def _pairs(
    subject: Subject,
    places: Mapping[Grain, EngineBit],
    rows: Mapping[Grain, int],
    slots: Sequence[int],
) -> dict[EngineBit, int]:
    """Engine bit → chunk bit where chunk token t belongs to ``slots[t]``; negative is skipped."""
    size = subject.geometry.block_size
    found: dict[EngineBit, int] = {}
    for (element, offset), bit in rows.items():
        slot = slots[element.block * size + element.token]
        if slot >= 0:
            block, token = divmod(slot, size)
            found[places[element._replace(block=block, token=token), offset]] = bit
    return found


# --- the components' reading ---------------------------------------------------------------------


def _component_pairs(
    subject: Subject, components: Iterable[Component]
) -> Iterator[tuple[EngineBit, int]]:
    values = subject.values
    for component in components:
        start = tuple(
            base.evaluate(values) for base in (component.pointer, component.engine, component.chunk)
        )
        run = component.run.evaluate(values)
        for pointer, engine, chunk in _steps(component.dims, start, values):
            for bit in range(0, run, subject.grain):
                yield _absolute(subject, pointer, engine + bit), chunk + bit


def _steps(
    dims: tuple[Dim, ...], at: tuple[int, ...], values: Mapping[str, int]
) -> Iterator[tuple[int, ...]]:
    if not dims:
        yield at
        return
    steps = [step.evaluate(values) for step in (dims[0].pointer, dims[0].engine, dims[0].chunk)]
    for i in range(dims[0].extent.evaluate(values)):
        moved = tuple(base + i * step for base, step in zip(at, steps, strict=True))
        yield from _steps(dims[1:], moved, values)


# --- the kernels' reading ------------------------------------------------------------------------


def _entries(geometry: Geometry, addressing: Addressing) -> list[int]:
    """An index array that leaves nothing in order: reversed, and one token skipped."""
    if addressing == "blocks":
        return list(reversed(range(geometry.blocks)))
    slots = list(reversed(range(geometry.tokens)))
    slots[1] = -1
    return slots


def _slots(geometry: Geometry, addressing: Addressing, entries: Sequence[int]) -> list[int]:
    if addressing == "slots":
        return list(entries)
    size = geometry.block_size
    return [block * size + token for block in entries for token in range(size)]


def geometry_row(
    component: Component, addressing: Addressing, geometry: Geometry
) -> dict[str, int]:
    """The columns of the geometry array, in bytes and counts, as a runtime would fill them."""
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


def _kernel_pairs(
    subject: Subject, kernel: Kernel, entries: Sequence[int]
) -> Iterator[tuple[EngineBit, int]]:
    (component,) = subject.ir.components
    geometry = subject.geometry
    row = geometry_row(component, kernel.addressing, geometry)
    outer = {"layer_first": 0, "layer_last": geometry.layers, "first": 0, "last": len(entries)}
    values = {**row, **outer, "NL": geometry.layers}
    for pointer, engine, chunk in _run_loops(kernel, 0, values, entries, 0, 0):
        for byte in range(0, row["run"], subject.grain // 8):
            yield _absolute(subject, pointer, 8 * (engine + byte)), 8 * (chunk + byte)


def _run_loops(
    kernel: Kernel,
    depth: int,
    values: dict[str, int],
    entries: Sequence[int],
    engine: int,
    chunk: int,
) -> Iterator[tuple[int, int, int]]:
    """The addresses of every copy, in the nest's order, by the expressions that are printed."""
    if depth == len(kernel.loops):
        yield kernel.pointer.evaluate(values), engine, chunk
        return
    loop = kernel.loops[depth]
    for step in range(loop.first.evaluate(values), loop.last.evaluate(values)):
        inside = {**values, loop.variable: step}
        if loop.entry:
            inside[loop.entry] = entries[step]
            if loop.skips and entries[step] < 0:
                continue
        for name, value in loop.lets:
            inside[name] = value.evaluate(inside)
        moved_engine = engine + loop.engine.evaluate(inside)
        moved_chunk = chunk + loop.chunk.evaluate(inside)
        yield from _run_loops(kernel, depth + 1, inside, entries, moved_engine, moved_chunk)
