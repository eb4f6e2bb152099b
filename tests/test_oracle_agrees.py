"""The generator and the oracle, written apart, put every bit of every layout at the same place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

import pytest

import oracle
from declared import CHUNKS, KNOWN, LAYOUTS
from golden import GOLDENS
from kvloom_codegen.ir import ADDRESSINGS, Component, LayoutIR
from kvloom_codegen.lower import lower, moves
from kvloom_codegen.prove import compatible
from kvloom_codegen.spec import AtBind, LayoutSpec
from oracle import Geometry

# Every layout can take these. In the first no size is like another, or like that of K/V, but HS/16
# is 1 and x is BS; in the second they are not; the last has one of all that there may be one of.
GEOMETRIES = (
    Geometry(layers=3, blocks=4, block_size=8, heads=5, head_size=16, element_bits=16),
    Geometry(layers=1, blocks=2, block_size=16, heads=3, head_size=48, element_bits=32),
    Geometry(layers=1, blocks=1, block_size=16, heads=1, head_size=16, element_bits=8),
)
PAIRS = [
    (name, chunk.chunk)
    for name in KNOWN
    for chunk in CHUNKS.values()
    if compatible(LAYOUTS[name], chunk)
]

with_every_layout = pytest.mark.parametrize("name", KNOWN)


class Move(NamedTuple):
    """Neighbouring bits that lie together in a tensor and in the chunk."""

    tensor: int
    engine: int
    chunk: int
    bits: int


def joined(moves: Iterable[Move]) -> list[Move]:
    """The same moves in as few as they can be, in order of the engine."""
    found: list[Move] = []
    for move in sorted(moves):
        last = found[-1] if found else None
        if last and move[:3] == (last.tensor, last.engine + last.bits, last.chunk + last.bits):
            found[-1] = last._replace(bits=last.bits + move.bits)
        else:
            found.append(move)
    return found


def planes(spec: LayoutSpec) -> oracle.Planes:
    """The planes that stand for those an engine brings, for a layout that leaves them open."""
    if not isinstance(spec.fields, AtBind):
        return oracle.SAMPLE_PLANES
    return tuple((int(one.width), one.element_bits) for one in spec.declared_fields.values())


def by_oracle(name: str, geometry: Geometry, chunk: str) -> list[Move]:
    """Every element of a tight cache, where the oracle sees it."""
    cells = oracle.cells(name, geometry, chunk, planes(LAYOUTS[name]))
    return sorted(Move(one.tensor, one.engine_bit, one.chunk_bit, one.bits) for one in cells)


def values(ir: LayoutIR, geometry: Geometry, spec: LayoutSpec) -> dict[str, int]:
    """What the symbols of the IR stand for; ``geometry`` has heads that the layout may lack."""
    sizes = {
        "NL": geometry.layers,
        "NB": geometry.blocks,
        "BS": geometry.block_size,
        "NH": geometry.heads if oracle.has_heads(spec.layout) else 1,
        "HS": geometry.head_size,
        "ITEMBITS": geometry.element_bits,
    }
    return ir.values(sizes)


def by_components(components: Iterable[Component], values: dict[str, int]) -> Iterator[Move]:
    """Every run that the generator's components step to."""
    for one in components:
        run = one.run.evaluate(values)
        start = [base.evaluate(values) for base in (one.pointer, one.engine, one.chunk)]
        steps = [
            [step.evaluate(values) for step in (dim.pointer, dim.engine, dim.chunk)]
            for dim in one.dims
        ]
        for at in product(*(range(dim.extent.evaluate(values)) for dim in one.dims)):
            tensor, engine, chunk = start
            for i, (by_tensor, by_engine, by_chunk) in zip(at, steps, strict=True):
                tensor += i * by_tensor
                engine += i * by_engine
                chunk += i * by_chunk
            yield Move(tensor, engine, chunk, run)


# --- what the oracle knows ------------------------------------------------------------------------


def test_the_oracle_knows_every_layout() -> None:
    lacking = [name for name in LAYOUTS if name not in KNOWN]
    assert lacking == [], "not in the name grammar: each needs an entry in HAND_WRITTEN, oracle.py"


def test_the_oracle_knows_every_chunk_layout() -> None:
    assert sorted(oracle.CHUNKS) == sorted(CHUNKS)


@with_every_layout
def test_a_name_says_what_its_spec_says(name: str) -> None:
    spec, ir = LAYOUTS[name], lower(LAYOUTS[name], CHUNKS[LAYOUTS[name].chunk])
    axes = {dim.axis for one in ir.components for dim in one.dims}
    parts = {one.name.partition(" ")[0] for one in ir.components}
    if spec.id is not None:  # others may be moved by any chunk layout that fits
        assert oracle.default_chunk(name) == spec.chunk
    assert oracle.has_kv(name) == ("kv" in axes or {"key", "value"} <= parts)
    assert oracle.has_heads(name) == ("head" in axes)


# --- where everything lies ------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "chunk"), PAIRS)
def test_components_and_their_runs_put_every_element_where_the_oracle_does(
    name: str, chunk: str
) -> None:
    spec = LAYOUTS[name]
    ir = lower(spec, CHUNKS[chunk])
    for geometry in GEOMETRIES:
        symbols = values(ir, geometry, spec)
        expected = by_oracle(name, geometry, chunk)
        assert sorted(by_components(ir.components, symbols)) == expected
        for addressing in ADDRESSINGS:
            found = by_components(moves(ir, addressing), symbols)
            assert joined(found) == joined(expected), addressing


@with_every_layout
def test_views_of_one_buffer_are_as_far_apart_as_the_oracle_says(name: str) -> None:
    spec = LAYOUTS[name]
    ir = lower(spec, CHUNKS[spec.chunk])
    for geometry in GEOMETRIES:
        step = ir.view_step and ir.view_step.evaluate(values(ir, geometry, spec))
        assert step == oracle.view_step_bits(name, geometry)


# --- what a golden shows --------------------------------------------------------------------------


def bits(text: str) -> int:
    """``12+4b``, a number of bytes and bits, in bits."""
    whole, _, rest = text.partition("+")
    return 8 * int(whole) + int(rest.removesuffix("b") or 0)


@with_every_layout
def test_the_addresses_in_a_golden_are_those_of_the_oracle(name: str) -> None:
    text = (GOLDENS / "layouts" / f"{name}.txt").read_text(encoding="utf-8")
    head, _, *rows = text[text.index("addresses of every run by slots") :].splitlines()
    sizes = [int(size) for size in re.findall(r"[A-Z]+=(\d+)", head)]
    geometry = Geometry(*sizes)
    assert min(geometry.layers, geometry.blocks, geometry.block_size, geometry.head_size) > 1
    shown = [row.split(" | ")[2:] for row in rows]
    found = [Move(int(tensor), *map(bits, places)) for tensor, *places in shown]
    assert joined(found) == joined(by_oracle(name, geometry, LAYOUTS[name].chunk))
