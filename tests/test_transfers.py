"""Gather and scatter move what a layout's name says and touch nothing else, whatever is drawn.

The oracle says what must happen. Every buffer lies between pages without access, and all content is
random bytes, so payloads of NaNs are among it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import guard
import kvloom
import oracle
from declared import KNOWN
from draw import Case, Memory, cases
from trap import trapped

# Names, because an example that fails is printed with its layout.
NAMES = [one.name for one in kvloom.layouts() if not one.unsupported and one.name in KNOWN]


def for_every_layout(test: Callable[..., None]) -> Any:
    """Few examples of each layout, because what most of them try is the same for all."""
    drawn = settings(max_examples=50)(given(data=st.data())(test))
    return pytest.mark.parametrize("name", NAMES)(drawn)


class Scene:
    """What a case describes: a bound cache, its tensors, and the chunk and arguments of a call.

    Every buffer touches a page without access, at its ``end`` or else at its start.
    """

    def __init__(self, name: str, case: Case, end: bool) -> None:
        layout, tokens, self.geometry = kvloom.layout(name), case.tokens, case.geometry
        self.name, self.chunk_layout = name, case.chunk or layout.facts.chunk
        self.slots = tokens.slots(self.geometry.block_size)
        nested, self.tensors = engine(layout, case, end)
        shape = oracle.chunk_shape(name, self.geometry, tokens.count, self.chunk_layout)
        self.chunk = lay(shape, case.dtype, case.held, end)
        scribble([*self.tensors, self.chunk], seed=0)
        index = guard.guarded_like(torch.tensor(tokens.index), end)
        self.arguments: dict[str, Any] = {"skip_prefix": tokens.skip_prefix, "chunk": case.chunk}
        self.arguments[tokens.addressing] = index
        self.cache = layout.bind(
            nested,
            block_size=self.geometry.block_size,
            backend="torch" if case.way == "torch" else "cpu",
        )
        self._way = case.way
        self._guarded, self._end = [*self.tensors, self.chunk, index], end

    def gather(self) -> None:
        with trapped(self._guarded), forced(self._way):
            self.cache.gather(out=self.chunk, **self.arguments)

    def scatter(self) -> None:
        with trapped(self._guarded), forced(self._way):
            self.cache.scatter(self.chunk, **self.arguments)

    def gather_slots_into_a_new_chunk(self) -> torch.Tensor:
        """By slots, whatever the call has; the chunk lies between guard pages too."""

        def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
            self._guarded.append(guard.guarded_tensor(shape, dtype, end=self._end))
            return self._guarded[-1]

        allocating = mock.patch.multiple(torch, empty=allocate, zeros=allocate)
        with allocating, trapped(self._guarded), forced(self._way):
            chunk = self.cache.gather(slots=self.slots, chunk=self.arguments["chunk"])
        assert isinstance(chunk, torch.Tensor)
        return chunk

    def expected_chunk(self) -> torch.Tensor:
        """What a gather must leave in the chunk, in a copy of all that its memory holds."""
        (expected,) = oracle.copy_with_storage(self.chunk)
        return expected.copy_(self.read(self.tensors, out=self.chunk))

    def expected_engine(self) -> list[torch.Tensor]:
        """What a scatter must leave in the engine, in a copy of all that its memory holds."""
        return oracle.expected_after_scatter(
            self.name, self.tensors, self.chunk, self.slots, self.geometry, chunk=self.chunk_layout
        )

    def read(self, tensors: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """The call's tokens in these tensors, as the oracle finds them."""
        return oracle.expected_chunk(
            self.name, tensors, self.slots, self.geometry, chunk=self.chunk_layout, out=out
        )


@contextmanager
def forced(way: str) -> Iterator[None]:
    """Small calls done as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "streaming":
            patch.setattr("kvloom.cache.streamed_from", lambda _: 0)
        if way == "shared":
            patch.setattr("kvloom.moves.threads", lambda: 3)
            patch.setattr("kvloom.moves.SHARED_FROM", 0)
        yield


def scenes(name: str, case: Case) -> Iterator[Scene]:
    """A case before a page without access, and behind one."""
    return (Scene(name, case, end) for end in (True, False))


def engine(layout: kvloom.Layout, case: Case, end: bool) -> tuple[Any, list[torch.Tensor]]:
    """An engine's tensors, nested as the layout takes them and in pointer order."""
    (shape,) = set(oracle.shapes(layout.name, case.geometry))
    counts = [{"layer": case.geometry.layers, "kv": 2}[level] for level in layout.lists]
    if isinstance(case.engine, Memory):
        tensors = list(lay((prod(counts), *shape), case.dtype, case.engine, end).unbind())
    else:
        places = product(*(range(count) for count in counts))
        layers = [dict(zip(layout.lists, place, strict=True)).get("layer", 0) for place in places]
        tensors = [lay(shape, case.dtype, case.engine[layer], end) for layer in layers]
    nested: list[Any] = tensors
    for count in reversed(counts):
        nested = [nested[first : first + count] for first in range(0, len(nested), count)]
    return nested[0], tensors


def lay(shape: Sequence[int], dtype: torch.dtype, memory: Memory, end: bool) -> torch.Tensor:
    """A tensor between guard pages whose dimensions lie in memory as drawn."""
    strides = memory.strides(shape)
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    whole = guard.guarded_tensor((memory.offset + reach + 1,), dtype, end=end)
    return whole.as_strided(shape, strides, memory.offset)


def scribble(tensors: Sequence[torch.Tensor], seed: int) -> None:
    """Random bytes, the same for the same seed, in all that the tensors' memory holds."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        storage.random_(0, 256, generator=generator)


@for_every_layout
def test_a_gather_fills_the_chunk_as_the_oracle_does(name: str, data: st.DataObject) -> None:
    for here in scenes(name, data.draw(cases(kvloom.layout(name)))):
        chunk, engine = here.expected_chunk(), oracle.copy_with_storage(here.tensors)
        here.gather()
        assert oracle.same_storages(here.chunk, chunk)
        assert oracle.same_storages(here.tensors, engine)


@for_every_layout
def test_a_scatter_changes_the_engine_as_the_oracle_does(name: str, data: st.DataObject) -> None:
    for here in scenes(name, data.draw(cases(kvloom.layout(name), distinct=True))):
        chunk, engine = oracle.copy_with_storage(here.chunk), here.expected_engine()
        here.scatter()
        assert oracle.same_storages(here.tensors, engine)
        assert oracle.same_storages(here.chunk, chunk)


@for_every_layout
def test_a_scatter_restores_what_a_gather_took(name: str, data: st.DataObject) -> None:
    for here in scenes(name, data.draw(cases(kvloom.layout(name)))):
        engine = oracle.copy_with_storage(here.tensors)
        here.gather()
        here.scatter()
        assert oracle.same_storages(here.tensors, engine)
        scribble(here.tensors, seed=1)
        here.scatter()
        assert oracle.same_bytes(here.read(here.tensors), here.read(engine))


@for_every_layout
def test_a_gather_of_blocks_is_one_of_their_slots(name: str, data: st.DataObject) -> None:
    for here in scenes(name, data.draw(cases(kvloom.layout(name), addressings=["blocks"]))):
        here.chunk.zero_()
        here.gather()
        assert oracle.same_bytes(here.chunk, here.gather_slots_into_a_new_chunk())
