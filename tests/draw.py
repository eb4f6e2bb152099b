"""Draws what the property tests try: caches as engines may hold them, tokens of them, and chunks.

What is drawn is plain data: it prints as it could be written, and shrinks to a tight cache of one
element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

import kvloom
import oracle
from kvloom.select import ADDRESSINGS, Addressing

# What moves the bytes: kernels that store as usual, or past the caches, or that share the work out
# among threads; or torch's indexing.
WAYS = ["ordinary", "streaming", "shared", "torch"]
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32]
# One element, rows that are a multiple of nothing, and enough for every step of the copy loop.
HEAD_SIZES = st.integers(1, 17) | st.sampled_from([32, 64, 67, 129, 300])


@dataclass(frozen=True)
class Memory:
    """How a tensor lies in memory.

    ``order`` has its dimensions from outermost to innermost, ``padding`` the steps by which each is
    longer in memory than in the tensor; ``offset`` elements lie before the first.
    """

    order: tuple[int, ...]
    padding: tuple[int, ...]
    offset: int

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The strides, in elements, of a tensor of this shape."""
        found, step = [0] * len(shape), 1
        for dim in reversed(self.order):
            found[dim] = step
            step *= shape[dim] + self.padding[dim]
        return tuple(found)


@dataclass(frozen=True)
class Tokens:
    """The tokens that a call names, and how many of them a chunk holds."""

    addressing: Addressing
    index: tuple[int, ...]
    skip_prefix: int
    count: int

    def slots(self, block_size: int) -> list[int]:
        """The slot of each of the chunk's tokens, negative for those that do not move."""
        slots, skip = list(self.index), self.skip_prefix
        if self.addressing == "blocks":
            slots = oracle.slots_of_blocks(self.index, block_size)[: self.count]
            skip *= block_size
        return [-1 if row < skip else slot for row, slot in enumerate(slots)]


@dataclass(frozen=True)
class Case:
    """A cache in memory, and a call.

    ``engine`` is the memory of each layer's tensors, or of one buffer of which all tensors are
    views, side by side along its first dimension. ``chunk`` names a chunk layout or is None for the
    layout's own, and ``held`` is the chunk's memory. ``way`` is one of ``WAYS``.
    """

    geometry: oracle.Geometry
    dtype: torch.dtype
    engine: Memory | tuple[Memory, ...]
    tokens: Tokens
    chunk: str | None
    held: Memory
    way: str


@st.composite
def cases(
    draw: DrawFn,
    layout: kvloom.Layout,
    *,
    addressings: Sequence[Addressing] = ADDRESSINGS,
    distinct: bool = False,
) -> Case:
    """Calls on caches of a layout; ``distinct`` ones name no token twice."""
    dtype = draw(st.sampled_from(DTYPES))
    geometry = draw(geometries(layout, 8 * dtype.itemsize))
    engine = _engines(len(oracle.shapes(layout.name, geometry)[0]), geometry.layers)
    tokens = _tokens(geometry, draw(st.sampled_from(addressings)), distinct)
    chunk = draw(st.sampled_from([None, *chunks_that_fit(layout, geometry)]))
    shape = oracle.chunk_shape(layout.name, geometry, 1, chunk or layout.facts.chunk)
    held = draw(memories(len(shape)))
    way = draw(st.sampled_from(WAYS))
    return Case(geometry, dtype, draw(engine), draw(tokens), chunk, held, way)


@cache
def geometries(layout: kvloom.Layout, element_bits: int) -> SearchStrategy[oracle.Geometry]:
    """Small caches: one of everything and odd sizes included."""
    return st.builds(
        oracle.Geometry,
        layers=st.integers(1, 4),
        blocks=st.integers(1, 6),
        block_size=st.integers(1, 9),
        heads=st.integers(1, 4) if oracle.has_heads(layout.name) else st.just(1),
        head_size=HEAD_SIZES,
        element_bits=st.just(element_bits),
    )


@cache
def memories(dims: int) -> SearchStrategy[Memory]:
    """A tensor that is tight, or has its outer dimensions in any order, padded, at an offset."""
    *outer, last = range(dims)
    tight = Memory((*outer, last), (0,) * dims, 0)
    orders = st.just(outer) | st.permutations(outer)
    return st.just(tight) | st.builds(
        Memory,
        order=orders.map(lambda order: (*order, last)),
        padding=st.tuples(*[st.sampled_from([0, 0, 0, 1, 3])] * dims),
        offset=st.integers(0, 5),
    )


def chunks_that_fit(layout: kvloom.Layout, geometry: oracle.Geometry) -> list[str]:
    """The names of the chunk layouts that can hold the tokens of a cache."""
    needed = {"layer": geometry.layers > 1, "head": geometry.heads > 1}
    return [
        chunk.name
        for chunk in kvloom.chunks()
        if all(_has(chunk, axis) for axis, needs in needed.items() if needs)
        and _has(chunk, "kv") == oracle.has_kv(layout.name)
    ]


def _has(chunk: kvloom.ChunkFacts, axis: str) -> bool:
    return any(axis in dim for dim in chunk.axes)


@cache
def _engines(dims: int, layers: int) -> SearchStrategy[Memory | tuple[Memory, ...]]:
    alike = memories(dims).map(lambda memory: (memory,) * layers)
    return alike | st.tuples(*[memories(dims)] * layers) | memories(dims + 1)


@cache
def _indices(limit: int, distinct: bool) -> SearchStrategy[list[int]]:
    """Slots or block ids below a limit: scattered, all from one to another, or simply all."""
    places = st.integers(0, limit - 1)
    in_order = st.tuples(places, places).map(lambda ends: list(range(min(ends), max(ends) + 1)))
    scattered = st.lists(places, min_size=1, max_size=8, unique=distinct)
    return scattered | in_order | st.just(list(range(limit)))


@st.composite
def _tokens(
    draw: DrawFn, geometry: oracle.Geometry, addressing: Addressing, distinct: bool
) -> Tokens:
    """Slots of which few are negative, or blocks of which the last is perhaps partial."""
    by_slots = addressing == "slots"
    index = draw(_indices(geometry.slots if by_slots else geometry.blocks, distinct))
    skip_prefix = draw(st.just(0) | st.integers(0, len(index)))
    if by_slots:
        holes = draw(st.sets(st.sampled_from(range(len(index))), max_size=2))
        index = [-1 - slot if row in holes else slot for row, slot in enumerate(index)]
        return Tokens(addressing, tuple(index), skip_prefix, len(index))
    missing = draw(st.integers(0, geometry.block_size - 1))
    count = len(index) * geometry.block_size - missing
    return Tokens(addressing, tuple(index), skip_prefix, count)
