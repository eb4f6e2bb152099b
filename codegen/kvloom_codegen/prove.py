"""The proof: what would be emitted, interpreted on small geometries, moves exactly the payload.

Three readings of a spec must agree on every element: the walk of its tree, the components of its
IR with their runs, and the kernels' loop nests over a geometry array. A layout passes where the
engine's bits and the chunk's bits are in one-to-one relation, the chunk is covered exactly, and
nothing outside the payload (padding, other tensors) is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise

from kvloom_codegen.calls import Call, calls, kernel_moves
from kvloom_codegen.expr import symbol
from kvloom_codegen.ir import ADDRESSINGS, Component, Dim, Kernel, LayoutIR
from kvloom_codegen.lower import lower, moves
from kvloom_codegen.nest import kernels, unsupported
from kvloom_codegen.spec import ChunkSpec, LayoutSpec, axes_of
from kvloom_codegen.table import Located, Move, ProofError, Table, compare, merged, one_to_one
from kvloom_codegen.walk import (
    Element,
    Geometry,
    Place,
    chunk_bits,
    engine_places,
    tiny,
    units,
    view_starts,
)


@dataclass(frozen=True)
class Subject:
    """A layout against one chunk layout on one geometry, as the walk reads it.

    ``starts`` are where the tensors lie in one buffer, or nothing where they are allocations.
    """

    spec: LayoutSpec
    chunk: ChunkSpec
    geometry: Geometry
    places: Mapping[Element, Place] = field(repr=False)
    starts: Sequence[int] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.spec.layout} against chunk {self.chunk.chunk} on {self.geometry}"

    @cached_property
    def table(self) -> Table:
        """Every element of the cache."""
        fields = self.spec.declared_fields
        located = []
        for element, bit in chunk_bits(self.spec, self.chunk, self.geometry):
            tensor, engine = self.absolute(*self.places[element])
            bits = fields[element.field].element_bits if fields else self.geometry.itembits
            located.append(Located(element, Move(tensor, engine, bit, bits)))
        return Table(tuple(located), self.geometry, frozenset(axes_of(self.spec)))

    @cached_property
    def payload(self) -> list[Move]:
        """All that is to be moved."""
        payload = merged(move for _, move in self.table.located)
        one_to_one(f"{self}: the walk", payload, self.table)
        return payload

    def absolute(self, tensor: int, bit: int) -> tuple[int, int]:
        """A place as (allocation, bit): tensors that are views all lie in the first."""
        if 0 <= tensor < len(self.starts):
            return 0, self.starts[tensor] + bit
        return tensor, bit


def compatible(spec: LayoutSpec, chunk: ChunkSpec) -> bool:
    """Whether ``chunk`` has a place for every axis of ``spec``."""
    inside = {"block", "one"}
    needed = axes_of(spec) - inside | ({"field"} if spec.declared_fields else set())
    extra = set(chunk.order) - axes_of(spec) - {"head"}
    return needed <= set(chunk.order) and not extra - ({"field"} if spec.declared_fields else set())


def prove_layout(spec: LayoutSpec, chunks: Iterable[ChunkSpec]) -> None:
    """Prove a layout against every chunk layout that can hold it; ProofError where it fails."""
    fitting = [chunk for chunk in chunks if compatible(spec, chunk)]
    nests = emitted(spec, fitting)
    for subject in subjects(spec, fitting):
        ir = lower(spec, subject.chunk, pad=symbol("PAD"))
        prove_ir(subject, ir)
        for call in calls_of(subject, ir) if nests else ():
            for nest in nests:
                prove_kernel(subject, nest, call)


def emitted(spec: LayoutSpec, chunks: Iterable[ChunkSpec]) -> tuple[Kernel, ...]:
    """The kernels that are printed: those of the layout's own chunk layout.

    A runtime calls the same ones for every other chunk layout that fits.
    """
    for chunk in chunks:
        if chunk.chunk == spec.chunk and not unsupported(spec, ir := lower(spec, chunk)):
            return kernels(spec, chunk, ir)
    return ()


def subjects(spec: LayoutSpec, chunks: Iterable[ChunkSpec]) -> Iterator[Subject]:
    """The layout against each of ``chunks`` on each small geometry of the proof."""
    chunks = tuple(chunks)
    for geometry in geometries(spec):
        places, starts = engine_places(spec, geometry), view_starts(spec, geometry)
        for chunk in chunks:
            yield Subject(spec, chunk, geometry, places, starts)


def geometries(spec: LayoutSpec) -> tuple[Geometry, ...]:
    """The small geometries of the proof: one tight, one with padded blocks, one of other elements.

    No two products of sizes are equal on all of them: a stride that names a wrong size is seen.
    """
    base = tiny(spec)
    tokens, elements = units(spec, base.itembits)
    padded = replace(base, block_size=max(4, 2 * tokens), head_size=3 * elements, pad=64)
    itembits = 32 if spec.split else 8
    tokens, elements = units(spec, itembits)
    heads = 4 if base.heads > 1 else 1
    other = Geometry(3, 2, 2 * tokens, heads, 3 * elements, itembits)
    return base, padded, other


def prove_ir(subject: Subject, ir: LayoutIR) -> None:
    """The components, and the runs they are fused to, move the payload; ProofError if not."""
    payload, values = subject.payload, ir.values(subject.geometry.symbols)
    if sum(move.bits for move in payload) != max(move.chunk + move.bits for move in payload):
        raise ProofError(f"{subject}: the chunk has bits that belong to no element")
    step = [] if ir.view_step is None else [ir.view_step.evaluate(values)]
    apart = {two - one for one, two in pairwise(subject.starts)}
    if apart != set(step):
        raise ProofError(f"{subject}: the views lie {apart} bits apart, not {step}")
    found = _component_moves(subject, ir.components, values)
    compare(f"{subject}: components", found, payload, subject.table)
    for addressing in ADDRESSINGS:
        found = _component_moves(subject, moves(ir, addressing), values)
        compare(f"{subject}: runs by {addressing}", found, payload, subject.table)


def _component_moves(
    subject: Subject, components: Iterable[Component], values: Mapping[str, int]
) -> Iterator[Move]:
    for component in components:
        bases = (component.pointer, component.engine, component.chunk)
        start = tuple(base.evaluate(values) for base in bases)
        run = component.run.evaluate(values)
        for pointer, engine, chunk in _steps(component.dims, start, values):
            yield Move(*subject.absolute(pointer, engine), chunk, run)


def _steps(
    dims: Iterable[Dim], start: tuple[int, ...], values: Mapping[str, int]
) -> list[tuple[int, ...]]:
    found = [start]
    for dim in dims:
        steps = [step.evaluate(values) for step in (dim.pointer, dim.engine, dim.chunk)]
        extent = dim.extent.evaluate(values)
        found = [
            tuple(base + i * step for base, step in zip(at, steps, strict=True))
            for at in found
            for i in range(extent)
        ]
    return found


def calls_of(subject: Subject, ir: LayoutIR) -> Iterator[Call]:
    """The calls on which the kernels of ``subject``'s layout are proved."""
    (component,) = ir.components
    return calls(component, subject.table, subject.places, subject.spec.lists)


def prove_kernel(subject: Subject, kernel: Kernel, call: Call) -> None:
    """A kernel, called as ``call`` says, moves what it must; ProofError if not."""
    if kernel.addressing != call.addressing:
        return
    reading = f"{subject}: {kernel.name}, {call.name}"
    # More copies than elements can't be right: a loop that runs away is cut short.
    enough = len(call.table.located) + 1
    try:
        found = list(islice(kernel_moves(kernel, call), enough))
    except KeyError as error:
        raise ProofError(f"{reading}: reads {error.args[0]}, which it does not have") from None
    except ZeroDivisionError:
        raise ProofError(f"{reading}: divides by zero") from None
    if not call.unlike:
        found = [Move(*subject.absolute(*move[:2]), *move[2:]) for move in found]
    compare(reading, found, call.expected, call.table)
