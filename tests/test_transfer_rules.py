"""The rules of gather and scatter: what moves, what stays, and what is refused before it moves.

They hold for generated kernels and for torch's indexing alike, so each test runs with both, but
for those that are about the kernels themselves.
"""

from __future__ import annotations

import copy
import mmap
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kvloom
import oracle
from declared import KNOWN
from kvloom import registry
from kvloom.select import ADDRESSINGS, BACKENDS, OPS, Addressing, Op

LAYOUTS = [one for one in kvloom.layouts() if not one.unsupported and one.name in KNOWN]
LAYERS, BLOCKS, BLOCK_SIZE, HEAD_SIZE = 3, 8, 4, 5

NHD, HND, MLA = "NL_X_TWO_NB_BS_NH_HS", "NL_X_TWO_NB_NH_BS_HS", "NL_X_NB_BS_HS"
FLAT, PAIRS, PACKED = "TWO_X_NL_X_NBBS_NH_HS", "NL_X_TWO_X_NB_BS_NH_HS", "NL_X_NB_NH_BS_CS"

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
only_kernels = pytest.mark.only_kernels
both_ops = pytest.mark.parametrize("op", OPS)
both_addressings = pytest.mark.parametrize("addressing", ADDRESSINGS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    about_kernels = metafunc.definition.get_closest_marker("only_kernels")
    backends = BACKENDS[:1] if about_kernels else BACKENDS
    metafunc.parametrize("backend", backends, indirect=True)


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves the bytes of every cache that a test binds."""
    monkeypatch.setattr("kvloom.cache.choose_backend", lambda *_: request.param)


class Bound(NamedTuple):
    """A small cache full of random bytes, and what the oracle needs to know of it."""

    layout: kvloom.Layout
    cache: kvloom.Cache
    tensors: Any
    geometry: oracle.Geometry

    def expected_chunk(self, slots: Sequence[int], **options: Any) -> torch.Tensor:
        options = {"chunk": self.layout.facts.chunk, **options}
        return oracle.expected_chunk(
            self.layout.name, self.tensors, slots, self.geometry, **options
        )

    def expected_engine(
        self, chunk: torch.Tensor, slots: Sequence[int], **options: Any
    ) -> list[torch.Tensor]:
        options = {"chunk": self.layout.facts.chunk, **options}
        return oracle.expected_after_scatter(
            self.layout.name, self.tensors, chunk, slots, self.geometry, **options
        )


def bound(
    layout: kvloom.Layout | str, dtype: torch.dtype = torch.int16, layers: int = LAYERS
) -> Bound:
    if isinstance(layout, str):
        layout = kvloom.layout(layout)
    heads = 3 if "head" in layout.facts.memory else 1
    tensors = layout.empty(
        layers=layers,
        blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        heads=heads,
        head_size=HEAD_SIZE,
        dtype=dtype,
    )
    for tensor in oracle.flat(tensors):
        noise(tensor)
    bits = 8 * oracle.flat(tensors)[0].element_size()
    sized = oracle.Geometry(layers, BLOCKS, BLOCK_SIZE, heads, HEAD_SIZE, bits)
    return Bound(layout, layout.bind(tensors, block_size=BLOCK_SIZE), tensors, sized)


def noise(tensor: torch.Tensor) -> torch.Tensor:
    """Random bytes in the whole storage of ``tensor``."""
    storage = tensor.untyped_storage()
    torch.empty(0, dtype=torch.uint8).set_(storage).random_(0, 256)
    return tensor


def new_chunk(cache: kvloom.Cache, tokens: int, chunk: str | None = None) -> torch.Tensor:
    """A chunk full of random bytes."""
    made = cache.empty_chunk(tokens, chunk)
    assert isinstance(made, torch.Tensor)
    return noise(made)


def gathered(cache: kvloom.Cache, **request: Any) -> torch.Tensor:
    chunk = cache.gather(**request)
    assert isinstance(chunk, torch.Tensor)
    return chunk


def call(op: Op, cache: kvloom.Cache, tensor: Any, /, **request: Any) -> None:
    if op == "gather":
        cache.gather(out=tensor, **request)
    else:
        cache.scatter(tensor, **request)


def named(addressing: Addressing, index: Any) -> dict[str, Any]:
    """The argument of a call that names its tokens."""
    return {addressing: index}


def token_slots(addressing: Addressing, index: Sequence[int], tokens: int) -> list[int]:
    """The slot of each of a chunk's tokens."""
    if addressing == "slots":
        return list(index)
    return oracle.slots_of_blocks(index, BLOCK_SIZE)[:tokens]


@contextmanager
def refused(error: type[Exception], says: str, *watched: Any) -> Iterator[None]:
    """An error with these words is raised, and not one byte of the watched tensors changes."""
    tensors = [tensor for one in watched for tensor in oracle.flat(one)]
    before = oracle.copy_with_storage(tensors)
    with pytest.raises(error, match=says):
        yield
    assert oracle.same_storages(tensors, before)


# --- what moves -------------------------------------------------------------------------------


@every_layout
@both_addressings
def test_exactly_the_named_tokens_move(layout: kvloom.Layout, addressing: Addressing) -> None:
    here = bound(layout)
    index = {"slots": [17, 0, 31, 5, 6, 12, 30], "blocks": [6, 0, 7, 3]}[addressing]
    slots = token_slots(addressing, index, 99)
    chunk = gathered(here.cache, **named(addressing, index))
    assert oracle.same_bytes(chunk, here.expected_chunk(slots))
    noise(chunk)
    kept = chunk.clone()
    expected = here.expected_engine(chunk, slots)
    here.cache.scatter(chunk, **named(addressing, index))
    assert oracle.same_storages(here.tensors, expected)
    assert oracle.same_bytes(chunk, kept)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float8_e5m2, torch.bfloat16, torch.float32, torch.int64], ids=str
)
@pytest.mark.parametrize("name", [NHD, HND, PACKED])
def test_elements_of_any_size_move_as_the_bytes_they_are(name: str, dtype: torch.dtype) -> None:
    here = bound(name, dtype)
    slots = [9, 31, 0]
    chunk = gathered(here.cache, slots=slots)
    assert oracle.same_bytes(chunk, here.expected_chunk(slots))
    noise(chunk)
    expected = here.expected_engine(chunk, slots)
    here.cache.scatter(chunk, slots=slots)
    assert oracle.same_storages(here.tensors, expected)


@every_layout
@both_ops
def test_a_partial_last_block_moves_only_its_tokens(layout: kvloom.Layout, op: Op) -> None:
    here = bound(layout)
    blocks = [5, 2, 7]
    for tokens in (9, 11):
        slots = token_slots("blocks", blocks, tokens)
        chunk = new_chunk(here.cache, tokens)
        out, engine = here.expected_chunk(slots), here.expected_engine(chunk, slots)
        call(op, here.cache, chunk, blocks=blocks)
        if op == "gather":
            assert oracle.same_bytes(chunk, out)
        else:
            assert oracle.same_storages(here.tensors, engine)


def test_a_gather_of_blocks_without_out_takes_whole_blocks() -> None:
    chunk = gathered(bound(NHD).cache, blocks=[1, 3])
    assert chunk.shape == (2, LAYERS, 2 * BLOCK_SIZE, 3 * HEAD_SIZE)


def test_all_bytes_have_moved_when_a_call_returns() -> None:
    here = bound(NHD)
    for slot in range(here.geometry.slots):
        chunk = gathered(here.cache, slots=[slot])
        for layer, tensor in enumerate(here.tensors):
            tensor.view(2, -1, 3 * HEAD_SIZE)[:, slot] = -1
            assert not (chunk[:, layer] == -1).all()


def test_one_of_several_tokens_with_the_same_slot_wins_whole() -> None:
    here = bound(NHD)
    chunk = torch.arange(4, dtype=torch.int16)[:, None].expand(2, LAYERS, 4, 15).contiguous()
    here.cache.scatter(chunk, slots=[9, 9, 9, 9])
    row = gathered(here.cache, slots=[9])
    for plane in row.flatten(0, 2):
        assert len(plane.unique()) == 1


# --- how tokens are named ---------------------------------------------------------------------


INDEX = [6, 0, 3]
INDICES: dict[str, Any] = {
    "list": INDEX,
    "tuple": tuple(INDEX),
    "list of numpy integers": [np.int64(6), np.int32(0), np.uint8(3)],
    "range": range(6, -1, -3),
    "int64 array": np.array(INDEX),
    "int32 array": np.array(INDEX, np.int32),
    "strided array": np.array([6, 9, 0, 9, 3, 9])[::2],
    "read-only array": np.frombuffer(np.array(INDEX).tobytes(), np.int64),
    "unaligned array": np.frombuffer(b"." + np.array(INDEX).tobytes(), np.int64, offset=1),
    "int64 tensor": torch.tensor(INDEX),
    "int32 tensor": torch.tensor(INDEX, dtype=torch.int32),
    "strided tensor": torch.tensor([[6, 9], [0, 9], [3, 9]])[:, 0],
}


@both_addressings
@pytest.mark.parametrize("kind", INDICES)
def test_indices_of_every_kind_name_the_same_tokens(kind: str, addressing: Addressing) -> None:
    here, given = bound(MLA), INDICES[kind]
    index = [6, 3, 0] if kind == "range" else INDEX
    expected = here.expected_chunk(token_slots(addressing, index, 99))
    assert oracle.same_bytes(gathered(here.cache, **named(addressing, given)), expected)


@only_kernels
def test_indices_of_every_kind_run_the_same_machine_code() -> None:
    here = bound(MLA)
    for given in INDICES.values():
        here.cache.gather(slots=given)
        here.cache.scatter(new_chunk(here.cache, 3), slots=given)
    kernels: Any = registry.kernels(here.layout)
    assert len(kernels.gather_slots.signatures) == 1
    assert len(kernels.scatter_slots.signatures) == 1


@both_addressings
def test_one_entry_may_have_any_stride(addressing: Addressing) -> None:
    here, given = bound(MLA), np.array([2])[::-1]  # contiguous, and its stride is negative
    expected = here.expected_chunk(token_slots(addressing, [2], 99))
    assert oracle.same_bytes(gathered(here.cache, **named(addressing, given)), expected)


@pytest.mark.parametrize("as_array", [False, True])
@both_ops
def test_slots_may_lie_where_the_call_writes(op: Op, as_array: bool) -> None:
    here = bound(MLA, torch.int64)
    chunk = new_chunk(here.cache, 3)
    # Whatever is read as a slot too late is one that exists.
    for tensor in (*here.tensors, chunk):
        tensor.remainder_(here.cache.capacity)
    written = chunk if op == "gather" else here.tensors[0]
    inside = written.flatten()[:3].copy_(torch.tensor(INDEX))
    expected, source = here.cache.gather(slots=INDEX), chunk.clone()
    call(op, here.cache, chunk, slots=inside.numpy() if as_array else inside)
    if op == "gather":
        assert oracle.same_bytes(chunk, expected)
    else:
        assert oracle.same_bytes(gathered(here.cache, slots=INDEX), source)


@both_ops
@both_addressings
@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ([0, True], TypeError, "got a list with bool"),
        ([0, 1.0], TypeError, "got a list with float"),
        ([0, None], TypeError, "got a list with NoneType"),
        ([[0, 1]], TypeError, "got a list with list"),
        ([0, 1 << 70], ValueError, "beyond 64 bits"),
        (range(1 << 63, (1 << 63) + 2), ValueError, "beyond 64 bits"),
        (np.ma.masked_array([0, 1], [False, True]), TypeError, "masked array"),
        (torch.tensor([0, 1]).to_sparse(), TypeError, "can't be read as an array"),
        (np.array([0.0, 1.0]), TypeError, "float64"),
        (np.array([True, False]), TypeError, "bool"),
        (np.array([0, 1], np.uint64), TypeError, "uint64"),
        (np.array([0, 1], np.int16), TypeError, "int16"),
        (np.array([0, 1], ">i8"), TypeError, ">i8"),
        (np.array([[0, 1]]), ValueError, "2 dimensions"),
        (np.array(0), ValueError, "0 dimensions"),
        (torch.tensor([True, False]), TypeError, "torch.bool"),
        (torch.tensor([0.0, 1.0]), TypeError, "torch.float32"),
        (torch.tensor([0, 1], dtype=torch.uint8), TypeError, "torch.uint8"),
        (torch.tensor([[0, 1]]), ValueError, "2 dimensions"),
        (torch.tensor([0, 1], device="meta"), ValueError, "meta device"),
        ("01", TypeError, "got str"),
        (1, TypeError, "got int"),
        ({0, 1}, TypeError, "got set"),
    ],
    ids=str,
)
def test_anything_but_a_row_of_integers_is_refused(
    op: Op, addressing: Addressing, given: Any, error: type[Exception], says: str
) -> None:
    here = bound(MLA)
    chunk = new_chunk(here.cache, 2)
    with refused(error, f"^{addressing}: .*{re.escape(says)}", here.tensors, chunk):
        call(op, here.cache, chunk, **named(addressing, given))


@both_ops
def test_tokens_are_named_by_slots_or_by_blocks(op: Op) -> None:
    here = bound(NHD)
    chunk = new_chunk(here.cache, 4)
    with refused(TypeError, "got both, takes one", here.tensors, chunk):
        call(op, here.cache, chunk, slots=[0, 1, 2, 3], blocks=[0])
    with refused(TypeError, "got neither, takes one", here.tensors, chunk):
        call(op, here.cache, chunk)


@every_layout
@both_ops
@pytest.mark.parametrize(
    ("addressing", "index", "says"),
    [
        ("slots", [3, 32, -1, 7], "slots: got 32 at position 1, takes slots below 32"),
        ("slots", [3, -1, 7, 1 << 62], "slots: got 4611686018427387904 at position 3"),
        ("blocks", [0, 1, 2, 8], "blocks: got 8 at position 3, takes block ids from 0 to 7"),
        ("blocks", [0, -1, 2, 3], "blocks: got -1 at position 1, takes block ids from 0 to 7"),
    ],
)
def test_tokens_outside_the_cache_are_refused(
    layout: kvloom.Layout, op: Op, addressing: Addressing, index: list[int], says: str
) -> None:
    here = bound(layout)
    chunk = new_chunk(here.cache, 4 if addressing == "slots" else 16)
    with refused(ValueError, says, here.tensors, chunk):
        call(op, here.cache, chunk, **named(addressing, index))


@every_layout
@both_ops
def test_a_negative_slot_is_skipped_on_both_sides(layout: kvloom.Layout, op: Op) -> None:
    here = bound(layout)
    slots = [-1, 31, -7, 4, -(1 << 63)]
    chunk = new_chunk(here.cache, 5)
    out, engine = here.expected_chunk(slots, out=chunk), here.expected_engine(chunk, slots)
    call(op, here.cache, chunk, slots=slots)
    if op == "gather":
        assert oracle.same_bytes(chunk, out)
    else:
        assert oracle.same_storages(here.tensors, engine)


def test_skipped_tokens_of_a_new_chunk_are_zero() -> None:
    here = bound(NHD)
    for _ in range(20):  # memory that is not cleared would show what it held before
        noise(torch.empty(2, LAYERS, 6, 15, dtype=torch.int16))
        for slots, skip in (([-1, 3, -1, 5, 6, 7], 0), ([2, 3, 4, 5, 6, 7], 4), ([-1] * 6, 6)):
            chunk = gathered(here.cache, slots=slots, skip_prefix=skip)
            assert oracle.same_bytes(chunk, here.expected_chunk(slots, skip_prefix=skip))
    chunk = gathered(here.cache, blocks=[5, 6], skip_prefix=1)
    slots = token_slots("blocks", [5, 6], 8)
    assert oracle.same_bytes(chunk, here.expected_chunk(slots, skip_prefix=BLOCK_SIZE))


@pytest.mark.parametrize("name", [FLAT, "NL_X_NBBS_ONE_HS"])
def test_flat_slots_move_without_a_block_size_but_blocks_do_not(name: str) -> None:
    here = bound(name)
    cache = here.layout.bind(here.tensors)
    slots = [31, 0, 9]
    assert oracle.same_bytes(gathered(cache, slots=slots), here.expected_chunk(slots))
    says = "don't show how many tokens a block has; give bind their block_size"
    chunk = new_chunk(cache, 4)
    for op in OPS:
        with refused(ValueError, says, here.tensors, chunk):
            call(op, cache, chunk, blocks=[0])
        assert says in cache.select(op, "blocks").refused
        assert cache.select(op, "slots").refused == ""


# --- skipped prefixes -------------------------------------------------------------------------


@every_layout
@both_ops
@pytest.mark.parametrize(
    ("addressing", "index", "tokens", "skip"),
    [
        ("slots", [999, 999, 5, 31, -1, 7], 6, 2),
        ("slots", [999, 999], 2, 2),
        ("blocks", [-1, 999, 5, 2], 16, 2),
        ("blocks", [-1, 999, 5, 2], 14, 2),
        ("blocks", [-1, 999, -5, 2], 14, 3),
        ("blocks", [-1, 999, -5, 8], 14, 4),
    ],
)
def test_a_skipped_prefix_is_neither_moved_nor_looked_at(
    layout: kvloom.Layout,
    op: Op,
    addressing: Addressing,
    index: list[int],
    tokens: int,
    skip: int,
) -> None:
    here = bound(layout)
    chunk = new_chunk(here.cache, tokens)
    slots = token_slots(addressing, index, tokens)
    first = min(tokens, skip if addressing == "slots" else skip * BLOCK_SIZE)
    slots[:first] = [-1] * first
    out, engine = here.expected_chunk(slots, out=chunk), here.expected_engine(chunk, slots)
    call(op, here.cache, chunk, **named(addressing, index), skip_prefix=skip)
    if op == "gather":
        assert oracle.same_bytes(chunk, out)
    else:
        assert oracle.same_storages(here.tensors, engine)


@both_ops
@both_addressings
@pytest.mark.parametrize(
    ("skip", "error"), [(-1, ValueError), (3, ValueError), (True, TypeError), (1.0, TypeError)]
)
def test_a_prefix_that_is_not_there_is_refused(
    op: Op, addressing: Addressing, skip: Any, error: type[Exception]
) -> None:
    here = bound(NHD)
    chunk = new_chunk(here.cache, 2 if addressing == "slots" else 8)
    with refused(error, f"skip_prefix: got {skip}", here.tensors, chunk):
        call(op, here.cache, chunk, **named(addressing, [0, 1]), skip_prefix=skip)


@both_ops
@both_addressings
def test_no_tokens_are_nothing_to_do(op: Op, addressing: Addressing) -> None:
    here = bound(NHD)
    before = oracle.copy_with_storage(here.tensors)
    chunk = gathered(here.cache, **named(addressing, []))
    assert chunk.shape == (2, LAYERS, 0, 15)
    call(op, here.cache, chunk, **named(addressing, range(0)))
    assert oracle.same_storages(here.tensors, before)


# --- chunks -----------------------------------------------------------------------------------


@every_layout
@both_addressings
@pytest.mark.parametrize("layers", [1, LAYERS])
def test_every_chunk_layout_that_can_hold_the_tokens_is_moved_by_name(
    layout: kvloom.Layout, addressing: Addressing, layers: int
) -> None:
    here = bound(layout, layers=layers)
    index = {"slots": [17, 0, 31, 5], "blocks": [6, 0, 7]}[addressing]
    moved = []
    for chunk in kvloom.chunks():
        axes = {axis for dim in chunk.axes for axis in dim}
        needed = {
            "kv": oracle.has_kv(layout.name),
            "head": oracle.has_heads(layout.name),
            "layer": layers > 1,
        }
        if any(needs and axis not in axes for axis, needs in needed.items()):
            with refused(ValueError, f"chunk: {chunk.name} has no", here.tensors):
                here.cache.gather(**named(addressing, index), chunk=chunk.name)
            continue
        slots = token_slots(addressing, index, 99)
        got = gathered(here.cache, **named(addressing, index), chunk=chunk.name)
        if oracle.has_kv(layout.name) or "kv" not in axes:
            expected = here.expected_chunk(slots, chunk=chunk.name)
        else:  # one plane, in a layout with an axis for planes
            expected = here.expected_chunk(slots).view(got.shape)
        assert oracle.same_bytes(got, expected)
        before = oracle.copy_with_storage(here.tensors)
        for tensor in oracle.flat(here.tensors):
            noise(tensor)
        here.cache.scatter(got, **named(addressing, index), chunk=chunk.name)
        again = gathered(here.cache, **named(addressing, index), chunk=chunk.name)
        assert oracle.same_bytes(again, got)
        for tensor, kept in zip(oracle.flat(here.tensors), before, strict=True):
            tensor.copy_(kept)
        moved.append(chunk.name)
    assert layout.facts.chunk in moved


@every_layout
def test_a_chunks_layout_is_recognised_by_its_shape(layout: kvloom.Layout) -> None:
    for layers in (1, LAYERS):
        here = bound(layout, layers=layers)
        slots = [17, 0, 31, 5, 9, 2, 8]
        for chunk in kvloom.chunks():
            if here.cache.select("gather", "slots", chunk=chunk.name).refused:
                continue
            out = new_chunk(here.cache, len(slots), chunk.name)
            here.cache.gather(slots=slots, out=out)
            assert oracle.same_bytes(out, gathered(here.cache, slots=slots, chunk=chunk.name))


def test_packed_rows_and_split_planes_of_a_packed_layout_are_told_apart_by_shape() -> None:
    here = bound(PACKED)
    slots = [3, 8]
    packed = torch.zeros(LAYERS, 2, 3 * 2 * HEAD_SIZE, dtype=torch.int16)
    split = torch.zeros(2, LAYERS, 2, 3 * HEAD_SIZE, dtype=torch.int16)
    here.cache.gather(slots=slots, out=packed)
    here.cache.gather(slots=slots, out=split)
    assert oracle.same_bytes(packed, here.expected_chunk(slots, chunk="packed"))
    assert oracle.same_bytes(split, here.expected_chunk(slots, chunk="two_plane"))


@pytest.mark.parametrize("name", [MLA, PACKED, "NL_X_NB_BS_NH_HS"])
def test_one_plane_may_have_a_dimension_of_its_own(name: str) -> None:
    here = bound(name)
    chunk = gathered(here.cache, slots=[3, 8])
    out = torch.zeros_like(chunk)[None]
    here.cache.gather(slots=[3, 8], out=out)
    assert oracle.same_bytes(out[0], chunk)
    before = oracle.copy_with_storage(here.tensors)
    for tensor in oracle.flat(here.tensors):
        noise(tensor)
    here.cache.scatter(out, slots=[3, 8])
    assert oracle.same_bytes(gathered(here.cache, slots=[3, 8]), chunk)
    assert not oracle.same_storages(here.tensors, before)


@both_ops
def test_a_shape_of_two_chunk_layouts_is_refused_until_one_is_named(op: Op) -> None:
    here = bound(NHD, layers=1)
    square = noise(torch.empty(2, 2, 15, dtype=torch.int16))
    says = "that of plane_major and token_major; say which by chunk="
    with refused(ValueError, says, here.tensors, square):
        call(op, here.cache, square, slots=[3, 8])
    assert says in here.cache.select(op, "slots", square).refused
    call(op, here.cache, square, slots=[3, 8], chunk="token_major")
    expected = here.expected_chunk([3, 8], chunk="token_major")
    assert oracle.same_bytes(square, expected)
    call(op, here.cache, square, slots=[3, 8], chunk="plane_major")
    expected = here.expected_chunk([3, 8], chunk="plane_major")
    assert oracle.same_bytes(square, expected)


@every_layout
@both_addressings
@both_ops
def test_a_strided_chunk_is_used_in_place(
    layout: kvloom.Layout, addressing: Addressing, op: Op
) -> None:
    here = bound(layout)
    index, tokens = {"slots": ([17, 0, 31], 3), "blocks": ([6, 0, 7], 11)}[addressing]
    slots = token_slots(addressing, index, tokens)
    shape = new_chunk(here.cache, tokens).shape
    for order in ([*range(len(shape))], [*range(len(shape) - 2, -1, -1), len(shape) - 1]):
        # Dimensions in another order, each longer than needed, and not from the start.
        wide = noise(torch.empty([shape[dim] + 3 for dim in order], dtype=torch.int16))
        view = wide.permute([order.index(dim) for dim in range(len(shape))])
        chunk = view[tuple(slice(2, 2 + size) for size in shape)]
        kept = wide.clone()
        if op == "gather":
            expected = here.expected_chunk(slots)
            here.cache.gather(out=chunk, **named(addressing, index))
            assert oracle.same_bytes(chunk.contiguous(), expected)
            chunk.copy_(
                kept.permute([order.index(d) for d in range(len(shape))])[
                    tuple(slice(2, 2 + size) for size in shape)
                ]
            )
        else:
            engine = here.expected_engine(chunk, slots)
            here.cache.scatter(chunk, **named(addressing, index))
            assert oracle.same_storages(here.tensors, engine)
        assert oracle.same_bytes(wide, kept)


def rows_apart() -> torch.Tensor:
    return torch.zeros(2, LAYERS, 4, 30, dtype=torch.int16)[..., ::2]


@both_ops
@pytest.mark.parametrize(
    ("chunk", "error", "says"),
    [
        (rows_apart(), ValueError, r"strides \(360, 120, 30, 2\), takes contiguous rows"),
        (torch.zeros(2, LAYERS, 4, 14, dtype=torch.int16), ValueError, r"\[2, 3, T, 15\]"),
        (torch.zeros(3, LAYERS, 4, 15, dtype=torch.int16), ValueError, "two_plane"),
        (torch.zeros(2, LAYERS + 1, 4, 15, dtype=torch.int16), ValueError, "two_plane"),
        (torch.zeros(2, LAYERS, 4, 3, 5, dtype=torch.int16), ValueError, "two_plane"),
        (torch.zeros(2, LAYERS, 4, 15), TypeError, "got torch.float32, takes torch.int16"),
        (torch.zeros(2, LAYERS, 4, 15, dtype=torch.float16), TypeError, "torch.int16"),
        (np.zeros((2, LAYERS, 4, 15), np.int16), TypeError, "got ndarray, takes a tensor"),
        ([torch.zeros(2, LAYERS, 4, 15)], TypeError, "got list, takes a tensor"),
        (
            torch.zeros(2, LAYERS, 4, 15, dtype=torch.int16, device="meta"),
            ValueError,
            "is on meta, takes cpu",
        ),
        (torch.zeros(4, 15, dtype=torch.int16).to_sparse(), TypeError, "sparse"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused(
    op: Op, chunk: Any, error: type[Exception], says: str
) -> None:
    here = bound(NHD)
    name = {"gather": "out", "scatter": "source"}[op]
    with refused(error, f"^{name}: .*{says}", here.tensors):
        call(op, here.cache, chunk, slots=[0, 1, 2, 3])


@both_ops
def test_a_chunk_that_requires_grad_is_refused(op: Op) -> None:
    here = bound(NHD, torch.float32)
    chunk = new_chunk(here.cache, 2).requires_grad_()
    with refused(ValueError, "requires grad", here.tensors, chunk.detach()):
        call(op, here.cache, chunk, slots=[0, 1])


@both_ops
@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"slots": [0, 1, 2]}, "slots: got 3, takes 8, one for each token of"),
        ({"slots": range(9)}, "slots: got 9, takes 8"),
        ({"blocks": [0]}, "blocks: got 1, which is 4 tokens; .* the 8 tokens of"),
        ({"blocks": [0, 1, 2]}, "blocks: got 3, which is 12 tokens; .* the 8 tokens of"),
        ({"blocks": []}, "blocks: got 0"),
    ],
)
def test_more_or_fewer_tokens_than_the_chunk_has_are_refused(
    op: Op, request_: dict[str, Any], says: str
) -> None:
    here = bound(NHD)
    chunk = new_chunk(here.cache, 8)
    with refused(ValueError, says, here.tensors, chunk):
        call(op, here.cache, chunk, **request_)


@both_ops
@pytest.mark.parametrize(
    ("chunk", "error", "says"),
    [
        ("two_planes", ValueError, "two_plane"),
        ("one_plane", ValueError, "one_plane has no kv axis, and there are 2 to hold"),
        ("token_major", ValueError, "token_major has no layer axis, and there are 3 to hold"),
        (1, TypeError, "chunk: got int, takes the name of a chunk layout"),
        (["two_plane"], TypeError, "chunk: got list"),
    ],
)
def test_a_chunk_layout_that_cannot_be_is_refused(
    op: Op, chunk: Any, error: type[Exception], says: str
) -> None:
    here = bound(NHD)
    tensor = new_chunk(here.cache, 2)
    with refused(error, says, here.tensors, tensor):
        call(op, here.cache, tensor, slots=[0, 1], chunk=chunk)
    with refused(error, says, here.tensors):
        here.cache.gather(slots=[0, 1], chunk=chunk)


@both_ops
@pytest.mark.parametrize("tokens", [-1, True, 2.0])
def test_an_empty_chunk_has_a_number_of_tokens(op: Op, tokens: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="tokens: got"):
        bound(NHD).cache.empty_chunk(tokens)


# --- shared bytes -----------------------------------------------------------------------------


def test_an_expanded_chunk_is_a_source_but_no_target() -> None:
    here = bound(NHD)
    row = noise(torch.empty(15, dtype=torch.int16))
    chunk = row.expand(2, LAYERS, 3, 15)
    says = r"out: .*\(0, 0, 0, 0\) and \(1, 0, 0, 0\) share bytes"
    with refused(ValueError, says, here.tensors, chunk):
        here.cache.gather(slots=[1, 2, 3], out=chunk)
    expected = here.expected_engine(chunk.contiguous(), [1, 2, 3])
    here.cache.scatter(chunk, slots=[1, 2, 3])
    assert oracle.same_storages(here.tensors, expected)


@both_ops
def test_a_chunk_that_shares_bytes_with_the_engine_is_refused(op: Op) -> None:
    layout = kvloom.layout(MLA)
    buffer = noise(torch.empty(2 * 160 + 30, dtype=torch.int16))
    tensors = [buffer[:160].view(8, 4, 5), buffer[160:320].view(8, 4, 5)]
    cache = layout.bind(tensors)
    name = {"gather": "out", "scatter": "source"}[op]
    says = rf"{name} and tensors\[1\] share bytes: element \(0, 0, 0\) of one and \(7, 3, 4\)"
    with refused(ValueError, says, buffer):
        call(op, cache, buffer[319:349].view(2, 3, 5), slots=[0, 1, 2])
    chunk = buffer[320:350].view(2, 3, 5)
    call(op, cache, chunk, slots=[0, 1, 2])
    for layer in range(2):
        assert torch.equal(chunk[layer], tensors[layer].view(32, 5)[:3])


@both_ops
def test_a_chunk_may_lie_between_the_engines_bytes(op: Op) -> None:
    layout = kvloom.layout(MLA)
    pages = noise(torch.empty(8, 6, 5, dtype=torch.int16))
    cache = layout.bind([pages[:, :4]])
    chunk = pages[:, 4][None]
    call(op, cache, chunk, slots=[4, 5, 6, 7, 0, 1, 2, 3])
    assert torch.equal(chunk[0], pages[[1, 0]][:, :4].reshape(8, 5))
    with refused(ValueError, "share bytes", pages):
        call(op, cache, pages[:, 3][None], slots=range(8))


# --- groups -----------------------------------------------------------------------------------


def mixed() -> tuple[kvloom.Cache, list[torch.Tensor], list[list[torch.Tensor]]]:
    """A cache of two groups, its tensors, and the tensors of each group."""
    widths = [5, 9, 9, 5, 5]
    tensors = [noise(torch.empty(2, BLOCKS, 4, 3, width, dtype=torch.int16)) for width in widths]
    groups = [[tensors[0], tensors[3], tensors[4]], [tensors[1], tensors[2]]]
    return kvloom.layout(NHD).bind(tensors), tensors, groups


def expected_chunks(groups: list[list[torch.Tensor]], slots: list[int]) -> list[torch.Tensor]:
    return [
        oracle.expected_chunk(
            NHD, group, slots, oracle.Geometry(len(group), BLOCKS, 4, 3, group[0].shape[-1], 16)
        )
        for group in groups
    ]


@both_addressings
def test_each_group_of_layers_has_a_chunk_of_its_own(addressing: Addressing) -> None:
    cache, tensors, groups = mixed()
    index = {"slots": [31, 0, 17], "blocks": [7, 0]}[addressing]
    slots = token_slots(addressing, index, 99)
    chunks = cache.gather(**named(addressing, index))
    assert isinstance(chunks, tuple)
    expected = expected_chunks(groups, slots)
    assert [oracle.same_bytes(a, b) for a, b in zip(chunks, expected, strict=True)] == [True, True]
    before = oracle.copy_with_storage(tensors)
    for chunk in chunks:
        noise(chunk)
    cache.scatter(chunks, **named(addressing, index))
    again = expected_chunks(groups, slots)
    assert [oracle.same_bytes(a, b) for a, b in zip(chunks, again, strict=True)] == [True, True]
    others = [slot for slot in range(32) if slot not in slots]
    groups_before = [[before[0], before[3], before[4]], [before[1], before[2]]]
    untouched = zip(
        expected_chunks(groups, others), expected_chunks(groups_before, others), strict=True
    )
    assert all(oracle.same_bytes(a, b) for a, b in untouched)
    out = list(cache.empty_chunk(len(slots)))
    returned = cache.gather(**named(addressing, index), out=out)
    assert [a is b for a, b in zip(returned, out, strict=True)] == [True, True]
    assert [oracle.same_bytes(a, b) for a, b in zip(out, again, strict=True)] == [True, True]


@both_ops
def test_chunks_that_are_not_one_for_each_group_are_refused(op: Op) -> None:
    cache, tensors, _ = mixed()
    good, other = cache.empty_chunk(3)
    name = {"gather": "out", "scatter": "source"}[op]
    cases: list[tuple[Any, type[Exception], str]] = [
        (good, TypeError, f"{name}: got Tensor, takes 2 tensors"),
        ((good,), ValueError, f"{name}: got 1 tensors, takes 2"),
        ((good, other, other), ValueError, f"{name}: got 3 tensors, takes 2"),
        ((other, good), ValueError, rf"{name}\[0\]: got shape"),
        ((good, other[:, :, :2]), ValueError, rf"slots: got 3, takes 2.*{name}\[1\]"),
        ((good, other.float()), TypeError, rf"{name}\[1\]: got torch.float32"),
    ]
    for chunks, error, says in cases:
        with refused(error, says, tensors, good, other):
            call(op, cache, chunks, slots=[0, 1, 2])


def test_chunks_of_a_gather_that_share_bytes_are_refused() -> None:
    cache, tensors, _ = mixed()
    buffer = noise(torch.empty(900, dtype=torch.int16))
    chunks = (buffer[:270].view(2, 3, 3, 15), buffer[269 : 269 + 324].view(2, 2, 3, 27))
    with refused(ValueError, r"out\[0\] and out\[1\] share bytes", tensors, buffer):
        cache.gather(slots=[0, 1, 2], out=chunks)
    cache.scatter(chunks, slots=[0, 1, 2])


def test_layers_with_blocks_of_unlike_size_move_by_slots_alone() -> None:
    tensors = [
        noise(torch.empty(2, n, size, 3, 5, dtype=torch.int16)) for n, size in ((8, 4), (3, 8))
    ]
    cache = kvloom.layout(NHD).bind(tensors)
    slots = [23, 0, 9]
    chunks = cache.gather(slots=slots)
    for chunk, tensor in zip(chunks, tensors, strict=True):
        assert torch.equal(chunk[:, 0], tensor.view(2, -1, 15)[:, slots])
    with refused(ValueError, "slots: got 24 at position 0, takes slots below 24", tensors):
        cache.gather(slots=[24])
    with refused(ValueError, "blocks of 4 and 8 tokens", tensors):
        cache.gather(blocks=[0])


def test_layers_of_unlike_length_take_block_ids_of_the_shortest() -> None:
    tensors = [noise(torch.empty(2, n, 4, 3, 5, dtype=torch.int16)) for n in (8, 6)]
    cache = kvloom.layout(NHD).bind(tensors)
    chunk = gathered(cache, blocks=[5])
    assert torch.equal(chunk[:, 1], tensors[1][:, 5].flatten(2))
    with refused(ValueError, "blocks: got 6 at position 0, takes block ids from 0 to 5", tensors):
        cache.gather(blocks=[6])


# --- what is selected -------------------------------------------------------------------------


@only_kernels
@every_layout
@both_addressings
@both_ops
def test_what_is_selected_is_what_runs(
    layout: kvloom.Layout, addressing: Addressing, op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = bound(layout)
    index, tokens = {"slots": ([3, 9], 2), "blocks": ([3, 1], 8)}[addressing]
    chunk = new_chunk(here.cache, tokens)
    selection = here.cache.select(op, addressing, chunk)
    ran: list[tuple[str, list[int]]] = []
    run = layout.facts.geometry.index("run")

    monkeypatch.setattr(registry, "compile_kernel", lambda _: None)

    def spy(name: str) -> Any:
        return lambda *arguments: ran.append((name, arguments[4][:, run].tolist()))

    spies = {(o, a): spy(f"{o}_{a}") for o in OPS for a in ADDRESSINGS}
    monkeypatch.setattr(here.cache, "_kernels", {False: spies})
    call(op, here.cache, chunk, **named(addressing, index))
    assert ran == [(selection.kernel, list(selection.run_bytes))]
    assert (selection.op, selection.addressing, selection.refused) == (op, addressing, "")
    assert selection.chunk == layout.facts.chunk


@only_kernels
@pytest.mark.parametrize(
    ("name", "addressing", "fused", "why"),
    [
        (
            NHD,
            "slots",
            ("head",),
            (
                "head fuses: 2 runs of 30 bytes per token; "
                "kv steps 960 bytes in the engine and 720 in the chunk"
            ),
        ),
        (
            NHD,
            "blocks",
            ("head", "token"),
            (
                "head and token fuse: 2 runs of 120 bytes per block; "
                "kv steps 960 bytes in the engine and 720 in the chunk"
            ),
        ),
        (MLA, "blocks", ("token",), "token fuses: one run of 40 bytes per block"),
        (MLA, "slots", (), "no axes fuse: one run of 10 bytes per token"),
        (
            PAIRS,
            "slots",
            ("head",),
            "head fuses: 2 runs of 30 bytes per token; kv is a list of tensors",
        ),
        (
            "NL_X_NB_BS_NH_CS",
            "blocks",
            ("kv", "head", "token"),
            "kv, head and token fuse: one run of 240 bytes per block",
        ),
    ],
)
def test_a_selection_says_why(
    name: str, addressing: Addressing, fused: tuple[str, ...], why: str
) -> None:
    selection = bound(name).cache.select("gather", addressing)
    assert (selection.fused, selection.why) == (fused, why)


@only_kernels
def test_a_selection_tells_layers_apart_by_their_strides() -> None:
    tensors = [torch.zeros(8, 4 + pad, 3, 10, dtype=torch.int16)[:, :4] for pad in (0, 1, 0, 0)]
    tensors[1] = torch.zeros(8, 4, 4, 10, dtype=torch.int16)[:, :, :3]
    tensors[3] = torch.zeros(8, 4, 4, 10, dtype=torch.int16)[:, :, :3]
    selection = kvloom.layout("NL_X_NB_BS_NH_CS").bind(tensors).select("gather", "blocks")
    assert selection.run_bytes == (240, 60, 240, 60)
    assert selection.fused == ("kv", "head")
    assert "layers 0, 2: kv, head and token fuse" in selection.why
    assert "layers 1, 3: kv and head fuse: 4 runs of 60 bytes per block" in selection.why
    cache, _, _ = mixed()
    selection = cache.select("scatter", "slots")
    assert selection.run_bytes == (30, 54, 54, 30, 30)
    assert "layers 0, 3–4: head fuses: 2 runs of 30 bytes" in selection.why


def test_a_selection_is_refused_in_the_words_of_the_call() -> None:
    here = bound(NHD)
    for chunk in (torch.zeros(3, 3, dtype=torch.int16), rows_apart()):
        selection = here.cache.select("gather", "slots", chunk)
        with pytest.raises(ValueError, match=re.escape(selection.refused.replace("chunks:", ":"))):
            here.cache.gather(slots=[0, 1, 2, 3], out=chunk)
        assert (selection.kernel, selection.run_bytes) == ("", ())
    with pytest.raises(ValueError, match="op: got 'gahter', takes gather or scatter"):
        here.cache.select("gahter", "slots")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="addressing: got 'tokens', takes slots or blocks"):
        here.cache.select("gather", "tokens")  # type: ignore[arg-type]


def shrunk(nbytes: int) -> torch.Tensor:
    tensor = torch.zeros(2, LAYERS, 4, 15, dtype=torch.int16)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2, LAYERS, 4, 15, dtype=torch.int16)


@both_ops
@pytest.mark.parametrize("made", [lambda: shrunk(0), lambda: shrunk(64), fake])
def test_a_chunk_without_its_bytes_is_refused_also_where_its_like_was_seen(
    op: Op, made: Any
) -> None:
    here = bound(NHD)
    call(op, here.cache, torch.zeros(2, LAYERS, 4, 15, dtype=torch.int16), slots=[0, 1, 2, 3])
    with pytest.raises(ValueError, match="has no bytes of its own, or fewer"):
        call(op, here.cache, made(), slots=[0, 1, 2, 3])


@both_ops
def test_a_conjugate_view_is_refused(op: Op) -> None:
    here = bound(NHD, torch.complex64)
    chunk = torch.zeros(2, LAYERS, 1, 15, dtype=torch.complex64)
    call(op, here.cache, chunk, slots=[0])
    with pytest.raises(ValueError, match="conjugate or negative view"):
        call(op, here.cache, chunk.conj(), slots=[0])


@both_ops
def test_a_negative_view_is_refused(op: Op) -> None:
    here = bound(NHD, torch.float32)
    chunk = torch.zeros(2, LAYERS, 1, 15, 2)
    negative = torch.view_as_complex(chunk).conj().imag
    assert negative.shape == (2, LAYERS, 1, 15)
    with pytest.raises(ValueError, match="conjugate or negative view"):
        call(op, here.cache, negative, slots=[0])


def test_tensors_whose_bytes_are_not_their_values_are_not_bound() -> None:
    layout, shape = kvloom.layout(NHD), (2, 4, 4, 2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to drop such tensors
        quantized = torch.quantize_per_tensor(torch.zeros(shape), 0.1, 0, torch.quint8)
    for tensor in (quantized, torch.zeros(shape, dtype=torch.complex64).conj()):
        with pytest.raises(ValueError, match=r"tensors\[0\]: is (quantized|a conjugate)"):
            layout.bind([tensor])


def test_a_cache_is_not_copied_without_its_tensors() -> None:
    cache = bound(NHD).cache
    assert copy.copy(cache) is cache
    for action in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="holds addresses"):
            action(cache)


@only_kernels
def test_a_selection_reads_as_a_sentence() -> None:
    cache = bound(MLA).cache
    chosen = cache.select("gather", "blocks")
    assert str(chosen).startswith(
        f"gather by blocks on cpu, chunk layout one_plane: {chosen.why}; "
    )
    refused = cache.select("scatter", "slots", rows_apart())
    assert str(refused) == f"scatter by slots, refused: {refused.refused}"


# --- caches of real size ----------------------------------------------------------------------


def reserved(nbytes: int) -> torch.Tensor:
    """Zeroed bytes that take memory only where they are touched."""
    no_reserve = 0x4000  # MAP_NORESERVE, in mmap from Python 3.11 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


@both_addressings
def test_offsets_beyond_32_bits_are_right(addressing: Addressing) -> None:
    layout = kvloom.layout(NHD)
    shape = layout.shape(layers=1, blocks=64_000, block_size=16, heads=32, head_size=128)
    tensor = reserved(2 * prod(shape)).view(torch.bfloat16).view(shape)
    cache = layout.bind([tensor])
    index = {"slots": range(cache.capacity - 16, cache.capacity), "blocks": [63_999]}[addressing]
    chunk = noise(torch.empty(2, 1, 16, 32 * 128, dtype=torch.bfloat16))
    cache.scatter(chunk, **named(addressing, index))
    assert oracle.same_bytes(tensor[:, None, -1].reshape(chunk.shape), chunk)
    assert not tensor[:, -2].view(torch.int16).any()
    assert oracle.same_bytes(gathered(cache, **named(addressing, index)), chunk)


@both_addressings
def test_padding_of_a_megabyte_after_every_block_is_stepped_over(addressing: Addressing) -> None:
    blocks, page, stride, offset = 112_432, 64 * 132, 1_039_680, 8_640
    memory = reserved(offset + blocks * stride)
    tensor = memory.as_strided((blocks, 64, 132), (stride, 132, 1), offset)
    cache = kvloom.layout(MLA).bind([tensor])
    chosen = [2_066, blocks - 1]
    index = chosen if addressing == "blocks" else oracle.slots_of_blocks(chosen, 64)
    chunk = noise(torch.empty(1, 128, 132, dtype=torch.uint8))
    cache.scatter(chunk, **named(addressing, index))
    assert oracle.same_bytes(tensor[chosen].view(1, 128, 132), chunk)
    for block in chosen:
        start = offset + block * stride
        assert not memory[start - stride + page : start].any()
        assert not memory[start + page : start + stride].any()
    assert oracle.same_bytes(gathered(cache, **named(addressing, index)), chunk)


# --- cost -------------------------------------------------------------------------------------


PEAKS = """
from pathlib import Path
import torch, kvloom

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

layout = kvloom.layout(1)
sizes = {"blocks": 1 << 17, "block_size": 16, "heads": 2, "head_size": 8}
tensors = layout.empty(layers=2, dtype="bf16", **sizes)
cache = layout.bind(tensors)
chunk = cache.empty_chunk(cache.capacity)
for buffer in (*tensors, chunk):
    buffer.fill_(1)
index = {"slots": torch.randperm(cache.capacity), "blocks": torch.randperm(cache.blocks)}
index["slots"][9] = -1
for addressing in index:
    request = {addressing: index[addressing], "skip_prefix": 1}
    calls = lambda: cache.gather(out=chunk, **request), lambda: cache.scatter(chunk, **request)
    for call in calls:
        call()
        peaks = []
        for _ in range(3):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held
            held = status("VmRSS")
            call()
            peaks.append(status("VmHWM") - held)
        print(chunk.nbytes, min(peaks))
"""


@only_kernels
def test_a_warm_transfer_takes_no_memory_beside_its_buffers_and_indices() -> None:
    """Resident memory counts alike what Python, torch, numpy and the kernels allocate."""
    # With a fixed threshold, memory that was freed is gone, and not at hand for the next call.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    result = subprocess.run(
        [sys.executable, "-c", PEAKS], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    found = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert len(found) == len(OPS) * len(ADDRESSINGS)
    for moved, peak in found:
        assert moved >= 256 << 20
        assert peak <= 1 << 20


def test_a_cache_remembers_only_so_many_shapes_of_chunks() -> None:
    here = bound(MLA)
    for tokens in range(1, 300):
        gathered(here.cache, slots=[0] * tokens)
    assert len(here.cache._plans) <= 64
    assert oracle.same_bytes(gathered(here.cache, slots=[9]), here.expected_chunk([9]))
