"""LMCache's transfers by kvloom: every format through every operator.

The oracle says what must happen. Calls get tensors or addresses as LMCache hands them over.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

import kvloom
import kvloom.lmcache as ops
import oracle
from declared import KNOWN

# No two sizes are equal, and one block is left over.
G = oracle.Geometry(layers=3, blocks=7, block_size=4, heads=5, head_size=6, element_bits=16)
DTYPE = torch.bfloat16
CPU = torch.device("cpu")
H2D, D2H = 0, 1

FORMATS = [
    one
    for one in kvloom.layouts()
    if one.id is not None and not one.unsupported and one.name in KNOWN
]
MLA = [one for one in FORMATS if one.attention == "mla"]
PER_LAYER = [one for one in FORMATS if "layer" in one.lists]
PACKED = [one for one in FORMATS if one.facts.chunk == "packed"]

SLOTS = [9, 22, -1, 4, 5, 0, 17, 27]
BLOCKS = [3, 1, 6, 0, 4]
SEEDS = itertools.count(100)


def formats(some: list[kvloom.Layout]) -> Any:
    return pytest.mark.parametrize("layout", some, ids=[one.name for one in some])


for_every_format = formats(FORMATS)
in_both_directions = pytest.mark.parametrize("direction", [H2D, D2H], ids=["H2D", "D2H"])


def random(shape: Any, dtype: torch.dtype = DTYPE, seed: int = 0) -> torch.Tensor:
    """Random bytes: payloads of NaNs are among them."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.empty(shape, dtype=dtype)
    found.view(torch.uint8).random_(generator=generator)
    return found


def engine(layout: kvloom.Layout, geometry: oracle.Geometry = G) -> Any:
    """The tensors of a cache with random bytes."""
    seeds = iter(range(1, 1000))
    return oracle.make(layout.name, geometry, DTYPE, lambda s, d: random(s, d, next(seeds)))


def addresses(tensors: Any) -> torch.Tensor:
    return torch.tensor([one.data_ptr() for one in oracle.flat(tensors)], dtype=torch.int64)


def tuples(tensors: Any) -> Any:
    return tensors if isinstance(tensors, torch.Tensor) else tuple(map(tuples, tensors))


# How LMCache may hand over an engine's tensors.
WAYS: dict[str, Callable[[Any], Any]] = {
    "nested": lambda tensors: tensors,
    "tuples": tuples,
    "flat": oracle.flat,
    "addresses": addresses,
    "unsigned addresses": lambda tensors: addresses(tensors).view(torch.uint64),
}
in_every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def heads(layout: kvloom.Layout) -> int:
    return G.heads if oracle.has_heads(layout.name) else 1


def width(layout: kvloom.Layout) -> int:
    """What LMCache calls head size: of packed formats the content width."""
    return G.head_size * (2 if layout in PACKED else 1)


def chunk_shape(layout: kvloom.Layout, tokens: int, chunk: str | None = None) -> tuple[int, ...]:
    return oracle.chunk_shape(layout.name, G, tokens, chunk)


@dataclass
class Sides:
    """An engine and a chunk, and what a transfer between them must leave in both."""

    layout: kvloom.Layout
    tensors: Any
    chunk: torch.Tensor
    slots: list[int]
    direction: int
    chunk_layout: str | None = None
    skip: int = 0

    def refill(self) -> None:
        """New contents: those of an earlier call would be right without a transfer."""
        self.chunk.copy_(random(self.chunk.shape, seed=next(SEEDS)))

    def check(self, transfer: Callable[[], None]) -> None:
        self.refill()
        call = (self.layout.name, self.tensors)
        how = {"chunk": self.chunk_layout, "skip_prefix": self.skip}
        engine_after = oracle.copy_with_storage(self.tensors)
        (chunk_after,) = oracle.copy_with_storage(self.chunk)
        if self.direction == D2H:
            chunk_after.copy_(oracle.expected_chunk(*call, self.slots, G, out=self.chunk, **how))
        else:
            source = self.chunk.contiguous()
            engine_after = oracle.expected_after_scatter(*call, source, self.slots, G, **how)
        transfer()
        assert oracle.same_storages(self.chunk, chunk_after)
        assert oracle.same_storages(self.tensors, engine_after)


def by_slots(layout: kvloom.Layout, chunk: torch.Tensor, given: Any, **more: Any) -> dict[str, Any]:
    """The arguments of ``multi_layer_kv_transfer``."""
    return {
        "key_value": chunk if chunk.dim() == 4 else chunk[None],
        "key_value_ptrs": given,
        "slot_mapping": torch.tensor(SLOTS),
        "paged_memory_device": CPU,
        "page_buffer_size": G.slots,
        "engine_kv_format": layout.id,
        "block_size": G.block_size,
        "head_size": width(layout),
        **more,
    }


def described(layout: kvloom.Layout, **more: int) -> Any:
    found = ops.PageBufferShapeDesc()
    found.nl, found.nb, found.bs = G.layers, G.blocks, G.block_size
    found.nh, found.hs, found.element_size = heads(layout), width(layout), DTYPE.itemsize
    found.kv_size = 2 if chunk_shape(layout, 1)[0] == 2 and len(chunk_shape(layout, 1)) == 4 else 1
    for name, value in more.items():
        setattr(found, name, value)
    return found


def by_blocks(layout: kvloom.Layout, objects: Any, given: Any, **more: Any) -> dict[str, Any]:
    """The arguments of ``multi_layer_block_kv_transfer``; an object has two blocks."""
    return {
        "paged_buffer_ptrs_tensor": given,
        "lmcache_objects_ptrs": objects,
        "block_ids": torch.tensor(BLOCKS),
        "device": CPU,
        "shape_desc": described(layout),
        "lmcache_chunk_size": 2 * G.block_size,
        "engine_kv_format": layout.id,
        "skip_prefix_n_blocks": 0,
        **more,
    }


# --- by slots -------------------------------------------------------------------------------------


@in_both_directions
@in_every_way
@for_every_format
def test_a_token_moves_from_or_to_its_slot(
    layout: kvloom.Layout, way: Callable[[Any], Any], direction: int
) -> None:
    tensors, chunk = engine(layout), random(chunk_shape(layout, len(SLOTS)))
    call = by_slots(layout, chunk, way(tensors), direction=direction)
    sides = Sides(layout, tensors, chunk, SLOTS, direction)
    sides.check(lambda: ops.multi_layer_kv_transfer(**call))


@in_both_directions
@in_every_way
@formats(PACKED)
def test_a_packed_format_splits_into_a_chunk_with_planes(
    layout: kvloom.Layout, way: Callable[[Any], Any], direction: int
) -> None:
    tensors, chunk = engine(layout), random(chunk_shape(layout, len(SLOTS), "two_plane"))
    call = by_slots(layout, chunk, way(tensors), direction=direction)
    sides = Sides(layout, tensors, chunk, SLOTS, direction, "two_plane")
    sides.check(lambda: ops.multi_layer_kv_transfer(**call))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@for_every_format
def test_skipped_tokens_are_not_looked_at(layout: kvloom.Layout, dtype: torch.dtype) -> None:
    tensors, chunk = engine(layout), random(chunk_shape(layout, len(SLOTS)))
    slots = torch.tensor([10**6, -5, *SLOTS[2:]], dtype=dtype)
    call = by_slots(layout, chunk, addresses(tensors), slot_mapping=slots, skip_prefix_n_tokens=3)
    for direction in (H2D, D2H):
        sides = Sides(layout, tensors, chunk, SLOTS, direction, skip=3)
        sides.check(lambda d=direction: ops.multi_layer_kv_transfer(**call, direction=d))
        nothing = Sides(layout, tensors, chunk, SLOTS, direction, skip=len(SLOTS))
        whole = {**call, "skip_prefix_n_tokens": len(SLOTS), "direction": direction}
        nothing.check(lambda w=whole: ops.multi_layer_kv_transfer(**w))


@in_both_directions
@for_every_format
def test_a_chunk_may_be_a_slice_of_a_larger_one(layout: kvloom.Layout, direction: int) -> None:
    tensors = engine(layout)
    *outer, tokens, row = chunk_shape(layout, len(SLOTS))
    chunk = random((*outer, tokens + 5, row + 3))[..., 2 : tokens + 2, 1 : row + 1]
    call = by_slots(layout, chunk, addresses(tensors), direction=direction)
    sides = Sides(layout, tensors, chunk, SLOTS, direction)
    sides.check(lambda: ops.multi_layer_kv_transfer(**call))


@formats([one for one in FORMATS if one.id in (1, 3, 4, 5, 9, 16, 18)])
def test_the_block_size_is_not_needed_where_slots_lie_in_order(layout: kvloom.Layout) -> None:
    tensors, chunk = engine(layout), random(chunk_shape(layout, len(SLOTS)))
    call = by_slots(layout, chunk, addresses(tensors), block_size=0, head_size=0, direction=D2H)
    Sides(layout, tensors, chunk, SLOTS, D2H).check(lambda: ops.multi_layer_kv_transfer(**call))


@in_both_directions
@pytest.mark.parametrize("layers", [1, 3])
def test_format_0_with_a_pointer_a_layer_means_planes_of_slots(layers: int, direction: int) -> None:
    per_layer = kvloom.layout(1)
    geometry = oracle.Geometry(layers, G.blocks, G.block_size, G.heads, G.head_size, 16)
    tensors = engine(per_layer, geometry)
    chunk = random(oracle.chunk_shape(per_layer.name, geometry, len(SLOTS)))
    before = chunk.clone()
    for given in (addresses(tensors), tensors, [one.flatten(1, 2).flatten(2) for one in tensors]):
        if direction == H2D:
            for one in tensors:
                one.zero_()
        call = by_slots(per_layer, chunk, given, engine_kv_format=0, block_size=0, head_size=0)
        ops.multi_layer_kv_transfer(**call, direction=direction)
        found = oracle.expected_chunk(per_layer.name, tensors, SLOTS, geometry, out=before)
        assert oracle.same_bytes(chunk, found)


def test_format_0_with_one_pointer_and_more_layers_is_the_tensor_of_all_layers() -> None:
    layout = kvloom.layout(0)
    tensor, chunk = engine(layout), random(chunk_shape(layout, len(SLOTS)))
    for given in (addresses(tensor), tensor, [tensor]):
        call = by_slots(layout, chunk, given, direction=D2H)
        sides = Sides(layout, tensor, chunk, SLOTS, D2H)
        sides.check(lambda c=call: ops.multi_layer_kv_transfer(**c))


def padded(layout: kvloom.Layout, stride: int) -> tuple[list[torch.Tensor], Any]:
    """Tensors whose blocks lie ``stride`` elements apart, in memory of random bytes."""
    tensors = []
    for number, tight in enumerate(oracle.flat(engine(layout))):
        axes = [dim[-1] for dim in layout.facts.axes]
        steps, size = {}, 1
        for axis, extent in reversed(list(zip(axes, tight.shape, strict=True))):
            steps[axis] = size = stride if axis == "block" else size
            size *= extent
        memory = random(size, seed=number + 50)
        tensors.append(memory.as_strided(tight.shape, [steps[axis] for axis in axes]))
    return tensors, addresses(tensors)


@in_both_directions
@formats([one for one in FORMATS if ("block",) in one.facts.axes and not one.facts.views])
def test_padded_blocks_by_address_are_stepped_over(layout: kvloom.Layout, direction: int) -> None:
    stride = 2 * G.layers * G.block_size * G.heads * G.head_size + 8
    tensors, given = padded(layout, stride)
    nested = oracle.make(layout.name, G, DTYPE)
    flat = iter(tensors)
    nested = next(flat) if not layout.lists else nest(nested, flat)
    chunk = random(chunk_shape(layout, len(SLOTS)))
    call = by_slots(layout, chunk, given, direction=direction, block_stride_elems=stride)
    sides = Sides(layout, nested, chunk, SLOTS, direction)
    sides.check(lambda: ops.multi_layer_kv_transfer(**call))
    objects = random((3, *chunk_shape(layout, 2 * G.block_size)))
    desc = described(layout, block_stride_elems=stride)
    call = by_blocks(layout, list(objects), given, shape_desc=desc, direction=direction)
    sides = block_sides(layout, nested, list(objects), direction)
    sides.check(lambda c=call: ops.multi_layer_block_kv_transfer(**c))


def nest(like: Any, flat: Iterator[torch.Tensor]) -> Any:
    if isinstance(like, torch.Tensor):
        return next(flat)
    return [nest(one, flat) for one in like]


@in_both_directions
@pytest.mark.parametrize("named", [1, 4, 6, 9, 12, 16])
def test_unilateral_calls_take_keys_and_values_apart_whatever_format_they_name(
    named: int, direction: int
) -> None:
    layout = kvloom.layout(4)
    tensors, chunk = engine(layout), random(chunk_shape(layout, len(SLOTS)))
    rows = [one.flatten(1) for one in oracle.flat(tensors)]
    for given in (addresses(tensors), oracle.flat(tensors), rows):
        sides = Sides(layout, tensors, chunk, SLOTS, direction)
        arguments = (chunk, given, torch.tensor(SLOTS), CPU, G.slots, direction, named)
        sides.check(lambda a=arguments: ops.multi_layer_kv_transfer_unilateral(*a))


@in_both_directions
@formats(MLA)
def test_unilateral_calls_move_mla_as_it_is(layout: kvloom.Layout, direction: int) -> None:
    tensors, chunk = engine(layout), random(chunk_shape(layout, len(SLOTS)))
    given = (chunk[None], addresses(tensors), torch.tensor(SLOTS), CPU, G.slots)
    sides = Sides(layout, tensors, chunk, SLOTS, direction)
    sides.check(lambda: ops.multi_layer_kv_transfer_unilateral(*given, direction, layout.id))


# --- by blocks ------------------------------------------------------------------------------------


def block_sides(
    layout: kvloom.Layout, tensors: Any, objects: list[torch.Tensor], direction: int, skip: int = 0
) -> _Objects:
    """The transfer of all objects as one: they lie behind each other in one tensor."""
    whole = torch.cat(objects, -2)
    slots = oracle.slots_of_blocks(BLOCKS, G.block_size)
    slots += [-1] * (whole.shape[-2] - len(slots))
    skipped = skip * G.block_size
    return _Objects(layout, tensors, whole, slots, direction, skip=skipped, objects=objects)


@dataclass
class _Objects(Sides):
    objects: list[torch.Tensor] | None = None

    def refill(self) -> None:
        assert self.objects is not None
        for one in self.objects:
            one.copy_(random(one.shape, seed=next(SEEDS)))
        self.chunk.copy_(torch.cat(self.objects, -2))

    def check(self, transfer: Callable[[], None]) -> None:
        assert self.objects is not None

        def transfer_then_join() -> None:
            transfer()
            self.chunk.copy_(torch.cat(self.objects, -2))

        super().check(transfer_then_join)


@in_both_directions
@in_every_way
@for_every_format
def test_blocks_move_from_or_to_objects(
    layout: kvloom.Layout, way: Callable[[Any], Any], direction: int
) -> None:
    """The ids end inside the last object, whose rest is not touched."""
    tensors = engine(layout)
    objects = list(random((3, *chunk_shape(layout, 2 * G.block_size))))
    for given in (
        objects,
        [one.data_ptr() for one in objects],
        [objects[0], *map(torch.Tensor.data_ptr, objects[1:])],
    ):
        for skip in (0, 1, 3, len(BLOCKS)):
            call = by_blocks(
                layout, given, way(tensors), direction=direction, skip_prefix_n_blocks=skip
            )
            sides = block_sides(layout, tensors, objects, direction, skip)
            sides.check(lambda c=call: ops.multi_layer_block_kv_transfer(**c))


@in_both_directions
def test_more_than_four_objects_move(direction: int) -> None:
    layout = kvloom.layout(1)
    tensors = engine(layout)
    objects = list(random((5, *chunk_shape(layout, G.block_size))))
    call = by_blocks(
        layout,
        objects,
        tensors,
        lmcache_chunk_size=G.block_size,
        direction=direction,
        block_ids=BLOCKS,
    )
    sides = block_sides(layout, tensors, objects, direction)
    sides.check(lambda: ops.multi_layer_block_kv_transfer(**call))


@in_both_directions
@formats(PACKED)
def test_blocks_of_a_packed_format_stay_packed_in_a_buffer_of_two_planes(
    layout: kvloom.Layout, direction: int
) -> None:
    tensors = engine(layout)
    packed = list(random((3, *chunk_shape(layout, 2 * G.block_size))))
    two = [one.view(2, G.layers, 2 * G.block_size, G.heads * G.head_size) for one in packed]
    for dtype in (DTYPE, torch.uint8, torch.float32):
        call = by_blocks(layout, [one.view(dtype) for one in two], tensors, direction=direction)
        sides = block_sides(layout, tensors, packed, direction)
        sides.check(lambda c=call: ops.multi_layer_block_kv_transfer(**c))


def test_with_tensors_their_strides_win() -> None:
    layout = kvloom.layout(3)
    stride = 2 * G.block_size * G.head_size
    tensors, _ = padded(layout, stride)
    objects = list(random((3, *chunk_shape(layout, 2 * G.block_size))))
    for said in (0, stride, 7):
        desc = described(layout, block_stride_elems=said)
        call = by_blocks(layout, objects, tensors, shape_desc=desc, direction=D2H)
        sides = block_sides(layout, tensors, objects, D2H)
        sides.check(lambda c=call: ops.multi_layer_block_kv_transfer(**c))


@formats([one for one in FORMATS if one.id not in (4, 5)])
def test_with_tensors_the_description_may_leave_sizes_open(layout: kvloom.Layout) -> None:
    tensors = engine(layout)
    objects = list(random((3, *chunk_shape(layout, 2 * G.block_size))))
    desc = ops.PageBufferShapeDesc()
    desc.bs, desc.nl = G.block_size, G.layers
    call = by_blocks(layout, objects, tensors, shape_desc=desc, direction=D2H)
    sides = block_sides(layout, tensors, objects, D2H)
    sides.check(lambda: ops.multi_layer_block_kv_transfer(**call))


def test_the_dtype_of_addresses_is_the_descriptions_or_any_of_its_size() -> None:
    layout = kvloom.layout(6)
    tensors = engine(layout)
    objects = list(random((3, *chunk_shape(layout, 2 * G.block_size))))
    for dtype in (None, torch.bfloat16, torch.float16):
        desc = described(layout)
        if dtype is not None:
            desc.dtype = dtype
        call = by_blocks(layout, objects, addresses(tensors), shape_desc=desc, direction=D2H)
        sides = block_sides(layout, tensors, objects, D2H)
        sides.check(lambda c=call: ops.multi_layer_block_kv_transfer(**c))


# --- one layer ------------------------------------------------------------------------------------


def one_layer(layout: kvloom.Layout) -> tuple[Any, Any, oracle.Geometry]:
    """The tensors of a cache with one layer, what a single-layer call takes, and its sizes."""
    geometry = oracle.Geometry(1, G.blocks, G.block_size, G.heads, G.head_size, 16)
    tensors = engine(layout, geometry)
    flat = oracle.flat(tensors)
    return tensors, flat[0] if len(flat) == 1 else tuple(flat), geometry


@in_both_directions
@pytest.mark.parametrize("token_major", [False, True])
@formats(PER_LAYER)
def test_one_layer_moves(layout: kvloom.Layout, token_major: bool, direction: int) -> None:
    for chunk_layout in {
        layout.facts.chunk,
        "two_plane" if layout in PACKED else layout.facts.chunk,
    }:
        tensors, given, geometry = one_layer(layout)
        shape = oracle.chunk_shape(layout.name, geometry, len(SLOTS), chunk_layout)
        planes = len(shape) == 4
        held = random(
            (shape[2], 2, shape[3]) if planes and token_major else (*shape[:-3], *shape[-2:])
        )
        seen = held.transpose(0, 1) if planes and token_major else held
        whole = seen[:, None] if planes else seen[None]
        slots = torch.tensor(SLOTS)
        how = {"chunk": chunk_layout}
        found = oracle.expected_chunk(layout.name, tensors, SLOTS, geometry, out=whole, **how)
        after = oracle.expected_after_scatter(
            layout.name, tensors, whole.contiguous(), SLOTS, geometry, **how
        )
        ops.single_layer_kv_transfer(
            held, given, slots, direction, layout.id, token_major=token_major
        )
        if direction == D2H:
            assert oracle.same_bytes(whole, found)
        else:
            assert oracle.same_storages(tensors, after)


@in_both_directions
@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("flat", [False, True], ids=["blocks", "slots"])
def test_keys_and_values_of_one_layer_move(flat: bool, token_major: bool, direction: int) -> None:
    layout = kvloom.layout(16)
    tensors, (keys, values), geometry = one_layer(layout)
    if flat:
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    held = random(
        (len(SLOTS), 2, G.heads * G.head_size)
        if token_major
        else (2, len(SLOTS), G.heads * G.head_size)
    )
    whole = (held.transpose(0, 1) if token_major else held)[:, None]
    found = oracle.expected_chunk(layout.name, tensors, SLOTS, geometry, out=whole)
    after = oracle.expected_after_scatter(layout.name, tensors, whole.contiguous(), SLOTS, geometry)
    slots = torch.tensor(SLOTS)
    ops.single_layer_kv_transfer_sgl(held, keys, values, slots, direction, token_major)
    if direction == D2H:
        assert oracle.same_bytes(whole, found)
    else:
        assert oracle.same_storages(tensors, after)


@pytest.mark.parametrize("layer", [0, 2])
def test_flash_loads_and_stores_one_layer_of_a_chunk(layer: int) -> None:
    layout = kvloom.layout(16)
    tensors, (keys, values), geometry = one_layer(layout)
    chunk = random((2, G.layers, len(SLOTS), G.heads * G.head_size))
    before, part = chunk.clone(), chunk[:, layer : layer + 1]
    found = oracle.expected_chunk(layout.name, tensors, SLOTS, geometry, out=part)
    ops.load_and_reshape_flash(chunk, keys, values, torch.tensor(SLOTS), layer)
    before[:, layer : layer + 1] = found
    assert oracle.same_bytes(chunk, before)
    chunk.copy_(random(chunk.shape, seed=9))
    after = oracle.expected_after_scatter(layout.name, tensors, part.contiguous(), SLOTS, geometry)
    ops.reshape_and_cache_back_flash(chunk, keys, values, torch.tensor(SLOTS), layer)
    assert oracle.same_storages(tensors, after)


# --- what is taken for what -----------------------------------------------------------------------


class Plain(enum.Enum):
    ZERO, ONE = 0, 1


@pytest.mark.parametrize("gather", [1, True, Plain.ONE, ops.TransferDirection.D2H])
@pytest.mark.parametrize("named", [1, ops.EngineKVFormat(1), enum.Enum("Other", {"A": 1})(1)])
def test_directions_and_formats_may_be_enums_of_any_kind_and_numbers(
    gather: Any, named: Any
) -> None:
    layout = kvloom.layout(1)
    tensors, chunk = engine(layout), random(chunk_shape(layout, len(SLOTS)))
    call = by_slots(layout, chunk, addresses(tensors), engine_kv_format=named)
    sides = Sides(layout, tensors, chunk, SLOTS, D2H)
    sides.check(lambda: ops.multi_layer_kv_transfer(**call, direction=gather))


def test_a_chunk_of_another_dtype_is_the_same_bytes() -> None:
    layout = kvloom.layout(2)
    tensors, chunk = engine(layout), random(chunk_shape(layout, len(SLOTS)))
    merged = [one.flatten(3) for one in tensors]
    for dtype, given in product((torch.float16, torch.uint8, torch.int16), (tensors, merged)):
        call = by_slots(layout, chunk.view(dtype), given, direction=D2H)
        sides = Sides(layout, tensors, chunk, SLOTS, D2H)
        sides.check(lambda c=call: ops.multi_layer_kv_transfer(**c))


@for_every_format
def test_nothing_is_moved_for_no_tokens(layout: kvloom.Layout) -> None:
    tensors, chunk = engine(layout), random(chunk_shape(layout, 0))
    none = torch.empty(0, dtype=torch.int64)
    for direction in (H2D, D2H):
        call = by_slots(layout, chunk, tensors, slot_mapping=none, direction=direction)
        sides = Sides(layout, tensors, chunk, [], direction)
        sides.check(lambda c=call: ops.multi_layer_kv_transfer(**c))
        call = by_blocks(layout, [], tensors, block_ids=[], direction=direction)
        sides.check(lambda c=call: ops.multi_layer_block_kv_transfer(**c))


def test_a_cache_is_recognised_by_what_it_is_and_not_by_its_address_alone() -> None:
    """Memory is used again: other strides, shapes or dtypes at the same place are another cache."""
    layout = kvloom.layout(1)
    memory = random((2, G.blocks, G.block_size, G.block_size, G.head_size))
    geometry = oracle.Geometry(1, G.blocks, G.block_size, G.block_size, G.head_size, 16)
    chunk = torch.empty(oracle.chunk_shape(layout.name, geometry, len(SLOTS)), dtype=DTYPE)
    for tensor in (memory, memory.transpose(2, 3), memory.view(torch.float16)):
        same = chunk.view(tensor.dtype)
        call = by_slots(layout, same, [tensor], direction=D2H)
        for _ in range(2):
            same.zero_()
            ops.multi_layer_kv_transfer(**call)
            expected = oracle.expected_chunk(layout.name, [tensor], SLOTS, geometry)
            assert oracle.same_bytes(same, expected)
    call = by_slots(layout, chunk, [torch._neg_view(memory)], direction=D2H)
    with pytest.raises(ValueError, match="conjugate or negative view"):
        ops.multi_layer_kv_transfer(**call)
    swapped = memory.clone()
    call = by_slots(layout, chunk, [swapped], direction=D2H)
    ops.multi_layer_kv_transfer(**call)
    swapped.data = torch._neg_view(swapped.data)
    with pytest.raises(ValueError, match="conjugate or negative view"):
        ops.multi_layer_kv_transfer(**call)
    needs_grad = memory.clone().requires_grad_()
    needs_grad.data = memory
    call = by_slots(layout, chunk, [needs_grad], direction=D2H)
    with pytest.raises(ValueError, match="requires grad"):
        ops.multi_layer_kv_transfer(**call)


def test_other_devices_are_reached_through_their_tensors() -> None:
    """The meta device stands in for one that is not here: what is selected is torch's indexing."""
    layout = kvloom.layout(1)
    tensors = [one.to("meta") for one in engine(layout)]
    chunk = random(chunk_shape(layout, len(SLOTS))).to("meta")
    call = by_slots(layout, chunk, tensors, direction=D2H, paged_memory_device=torch.device("meta"))
    ops.multi_layer_kv_transfer(**call)
    with pytest.raises(NotImplementedError, match="paged_memory_device: got cuda:1, takes cpu"):
        ops.multi_layer_kv_transfer(
            **{**call, "key_value_ptrs": torch.tensor([64] * 3), "paged_memory_device": "cuda:1"}
        )


# --- cases from the field -------------------------------------------------------------------------


def test_a_permuted_view_is_moved_by_its_strides() -> None:
    """LMCache 2374: the shape of format 1 over memory of format 6."""
    memory = random((2, 3, 8, 64, 128))
    view = memory.transpose(2, 3)
    assert view.stride()[2:4] == (128, 8192)
    slots = torch.tensor([70, 3, 191])
    chunk = torch.zeros(2, 3, 1024, dtype=DTYPE)
    ops.single_layer_kv_transfer(chunk, view, slots, D2H, 1)
    expected = view.reshape(2, 192, 1024)[:, slots]
    assert oracle.same_bytes(chunk, expected)
    before = memory.clone()
    memory[:, 1, :, 6].zero_()
    ops.single_layer_kv_transfer(chunk, view, slots, H2D, 1)
    assert oracle.same_bytes(memory, before)


def test_the_number_of_blocks_is_read_from_its_own_axis() -> None:
    """LMCache 2308, 2494: [NB, 2, …] with two blocks, and eight-bit elements."""
    tensor = random((2, 2, 16, 4, 8), torch.float8_e4m3fn)
    chunk = torch.zeros(2, 1, 2, 32, dtype=torch.float8_e4m3fn)
    slots = torch.tensor([17, 30])
    ops.multi_layer_kv_transfer(chunk, [tensor], slots, CPU, 32, D2H, 2, 16, 8)
    for token, slot in enumerate((17, 30)):
        expected = tensor[slot // 16, :, slot % 16].flatten(1)
        assert oracle.same_bytes(chunk[:, 0, token].contiguous(), expected)
    with pytest.raises(ValueError, match="slot_mapping: got 32"):
        ops.multi_layer_kv_transfer(chunk, [tensor], torch.tensor([0, 32]), CPU, 32, D2H, 2, 16, 8)


def test_layers_of_other_sizes_share_no_chunk() -> None:
    """LMCache 4358, 2926, 4850: refused, and right in a call of their own."""
    narrow, wide = random((2, 4, 8, 2, 64)), random((2, 4, 8, 2, 128))
    chunk = torch.zeros(2, 2, 1, 128, dtype=DTYPE)
    with pytest.raises(ValueError, match="key_value_ptrs: layers differ"):
        ops.multi_layer_kv_transfer(
            chunk, [narrow, wide], torch.tensor([9]), CPU, 32, D2H, 1, 8, 64
        )
    assert not chunk.view(torch.int16).any()
    for tensor in (narrow, wide):
        one = torch.zeros(2, 1, 1, tensor[0, 0, 0].numel(), dtype=DTYPE)
        ops.multi_layer_kv_transfer(one, [tensor], torch.tensor([9]), CPU, 32, D2H, 1, 8)
        assert oracle.same_bytes(one[:, 0, 0].contiguous(), tensor[:, 1, 1].flatten(1))


def test_offsets_beyond_32_bits_reach_the_right_bytes() -> None:
    """LMCache 2762, vLLM 1486: block 63,999 of 16 × 32 × 128; memory is reserved lazily."""
    blocks = 64_000
    shape = (blocks, 16, 1, 32 * 128)
    memory = torch.empty(shape, dtype=DTYPE)  # 8 GiB of address space, of which two rows are used
    row = random((32 * 128,))
    memory[blocks - 1, 15, 0] = row
    chunk = torch.zeros(1, 1, 32 * 128, dtype=DTYPE)
    given = torch.tensor([memory.data_ptr()])
    slots = torch.tensor([blocks * 16 - 1])
    ops.multi_layer_kv_transfer(chunk[None], given, slots, CPU, blocks * 16, D2H, 18, 16)
    assert oracle.same_bytes(chunk[0, 0], row)
