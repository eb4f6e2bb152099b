"""A round trip that checks itself: offload a paged cache, wipe it, reload it, compare every byte.

The comparison does not trust the kernels: what a chunk must hold, and which bytes of the cache may
change, are worked out with torch's own indexing over the axes that the layout declares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import TYPE_CHECKING

import torch

from kvloom.engine_layout import torch_dtype
from kvloom.geometry import shape_of

if TYPE_CHECKING:
    from kvloom._abi import ModelFacts
    from kvloom.engine_layout import Layout

BLOCK_SIZE = 16
# What a wiped cache holds: a byte that random data rarely repeats in a whole row.
WIPED = 0xA5
REPEATS = 5

# What a cache holds of one token, in one order for every layout.
HELD = ("layer", "kv", "head", "one", "elem")

# Called with what is being done, for progress bars.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """One cache: layers, blocks of ``BLOCK_SIZE`` tokens, heads, head size in elements, dtype."""

    layers: int
    blocks: int
    heads: int
    head_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Rate:
    """Bytes per second of one operator, beside a torch copy of as many bytes in the same run."""

    operator: float
    copy: float

    @property
    def ratio(self) -> float:
        """How many times as fast as the copy."""
        return self.operator / self.copy


@dataclass(frozen=True)
class RoundTrip:
    """What a round trip found; ``faults`` is empty where every byte was right."""

    layout: str
    sizes: Sizes
    nbytes: int
    rates: dict[str, Rate]
    faults: tuple[str, ...]


def sizes_for(model: ModelFacts, blocks: int, cache_bytes: int) -> Sizes:
    """The model's geometry with as many of its layers as a cache of ``cache_bytes`` holds.

    ValueError for less than one layer, or for fewer than two blocks: one leaves as a whole, of
    another its tokens.
    """
    if blocks < 2:
        raise ValueError(f"blocks: got {blocks}, takes at least 2")
    dtype = torch_dtype(model.dtype)
    planes = 2 if model.attention == "mha" else 1
    layer_bytes = planes * model.heads * model.head_size * dtype.itemsize * blocks * BLOCK_SIZE
    layers = min(model.layers, cache_bytes // layer_bytes)
    if layers < 1:
        raise ValueError(
            f"cache_bytes: got {cache_bytes}, takes {layer_bytes} ({layer_bytes / 2**20:g} MiB) "
            f"or more: one layer of {model.name} with {blocks} blocks"
        )
    return Sizes(layers, blocks, model.heads, model.head_size, dtype)


def round_trip(
    layout: Layout, sizes: Sizes, *, seed: int = 0, progress: Progress = lambda _: None
) -> RoundTrip:
    """Offload random blocks and scattered tokens, wipe, reload, verify; then measure.

    Half of the blocks, chosen at random, leave as whole blocks; of the other half every second
    token, in random order, leaves by its slot. Verified are the chunks, the reloaded bytes, and
    that no other byte of the cache was touched.
    """
    generator = torch.Generator().manual_seed(seed % 2**63)
    tensors = layout.empty(
        layers=sizes.layers,
        blocks=sizes.blocks,
        block_size=BLOCK_SIZE,
        heads=sizes.heads,
        head_size=sizes.head_size,
        dtype=sizes.dtype,
    )
    progress("fill")
    storages = list(_storages(tensors))
    for storage in storages:
        _fill(storage, generator)
    cache = layout.bind(tensors, block_size=BLOCK_SIZE)
    order = torch.randperm(sizes.blocks, generator=generator)
    blocks, others = order[: sizes.blocks // 2], order[sizes.blocks // 2 :]
    slots = (others[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
    slots = slots[torch.randperm(len(slots), generator=generator)][: len(slots) // 2]
    by_block = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()

    progress("offload")
    before = [storage.clone() for storage in storages]
    block_chunk = cache.gather(blocks=blocks)
    slot_chunk = cache.gather(slots=slots)
    assert isinstance(block_chunk, torch.Tensor)
    assert isinstance(slot_chunk, torch.Tensor)
    faults = []
    progress("verify chunks")
    for name, chunk, moved in (("blocks", block_chunk, by_block), ("slots", slot_chunk, slots)):
        if not _same(chunk, _chunk_of(layout, _held(layout, sizes, tensors, moved))):
            faults.append(f"the chunk gathered by {name} differs from torch's own indexing")
    if not all(map(torch.equal, storages, before)):
        faults.append("offloading changed the cache")

    moved = torch.cat([by_block, slots])
    held = _held(layout, sizes, tensors, moved)
    del before

    progress("wipe and reload")
    for storage in storages:
        storage.fill_(WIPED)
    cache.scatter(block_chunk, blocks=blocks)
    cache.scatter(slot_chunk, slots=slots)
    progress("verify cache")
    faults += _reload_fault(layout, tensors, held, moved)
    del held
    progress("measure")
    rates = {
        "gather blocks": _rate(lambda: cache.gather(blocks=blocks, out=block_chunk), block_chunk),
        "scatter blocks": _rate(lambda: cache.scatter(block_chunk, blocks=blocks), block_chunk),
        "gather slots": _rate(lambda: cache.gather(slots=slots, out=slot_chunk), slot_chunk),
        "scatter slots": _rate(lambda: cache.scatter(slot_chunk, slots=slots), slot_chunk),
    }
    return RoundTrip(
        layout.name, sizes, block_chunk.nbytes + slot_chunk.nbytes, rates, tuple(faults)
    )


def flat(tensors: object) -> Iterator[torch.Tensor]:
    """The tensors of a nested list in pointer order."""
    if isinstance(tensors, torch.Tensor):
        yield tensors
    elif isinstance(tensors, (list, tuple)):
        for one in tensors:
            yield from flat(one)
    else:
        raise TypeError(f"tensors: {type(tensors).__name__}; takes tensors or lists of them")


def _storages(tensors: object) -> Iterator[torch.Tensor]:
    """Each allocation once, as bytes: layers may be views into one buffer."""
    seen: set[int] = set()
    for tensor in flat(tensors):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield torch.empty(0, dtype=torch.uint8).set_(storage)


def _fill(storage: torch.Tensor, generator: torch.Generator) -> None:
    whole = len(storage) // 8 * 8
    storage[:whole].view(torch.int64).random_(generator=generator)
    storage[whole:].random_(generator=generator)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes: NaN payloads and minus zero count."""
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def pages(
    layout: Layout, tensors: object, held: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views by which torch's indexing moves tokens, from the axes that a layout declares alone.

    ``held`` is [token, layer, kv, head, one, elem], where an axis that the layout lacks has extent
    1. Each tensor comes as [block, token, …], in blocks of ``BLOCK_SIZE``, beside its part of
    ``held`` as [token, …].
    """
    dims = layout.facts.axes
    extents = {"block": -1, "token": BLOCK_SIZE, **dict(zip(HELD, held.shape[1:], strict=True))}
    names = [axis for dim in dims for axis in dim]
    order = [names.index(axis) for axis in ("block", "token", *HELD) if axis in names]
    places = product(*(range(extents[axis]) for axis in layout.lists))
    for place, page in zip(places, flat(tensors), strict=True):
        for number in reversed(range(len(dims))):
            page = page.unflatten(number, [extents[axis] for axis in dims[number]])
        at: dict[str, int | slice] = dict.fromkeys(names, slice(None))
        at.update(zip(layout.lists, place, strict=True))
        part = (slice(None), *(at.get(axis, 0) for axis in HELD))
        yield page.permute(order), held[part]


def _held(layout: Layout, sizes: Sizes, tensors: object, slots: torch.Tensor) -> torch.Tensor:
    """The tokens at ``slots``, as ``pages`` takes them."""
    planes = 2 if "kv" in (*layout.lists, *layout.facts.memory) else 1
    shape = (len(slots), sizes.layers, planes, sizes.heads, 1, sizes.head_size)
    held = torch.empty(shape, dtype=sizes.dtype)
    for page, part in pages(layout, tensors, held):
        part[:] = page[slots // BLOCK_SIZE, slots % BLOCK_SIZE]
    return held


def _chunk_of(layout: Layout, held: torch.Tensor) -> torch.Tensor:
    """The chunk that holds these tokens, in the layout's own chunk layout."""
    dims = layout.chunk.axes
    names = ("token", *HELD)
    order = [axis for dim in dims for axis in dim]
    order += [axis for axis in names if axis not in order]  # of extent 1
    sizes = dict(zip(names, held.shape, strict=True))
    return held.permute([names.index(axis) for axis in order]).reshape(shape_of(dims, sizes))


def _reload_fault(
    layout: Layout, tensors: object, held: torch.Tensor, slots: torch.Tensor
) -> Iterator[str]:
    """Compare the reloaded cache with what it must hold: these tokens, and wiped bytes else."""
    expected: dict[int, torch.Tensor] = {}
    copies = []
    for tensor in flat(tensors):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in expected:
            expected[storage.data_ptr()] = torch.full((storage.nbytes(),), WIPED, dtype=torch.uint8)
        copies.append(
            torch.empty(0, dtype=tensor.dtype).set_(
                expected[storage.data_ptr()].untyped_storage(),
                tensor.storage_offset(),
                tensor.size(),
                tensor.stride(),
            )
        )
    for page, part in pages(layout, copies, held):
        page[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = part
    for found in _storages(tensors):
        right = expected[found.data_ptr()]
        if not torch.equal(found, right):
            wrong = (found != right).nonzero().flatten()
            yield f"{len(wrong)} bytes of the reloaded cache are wrong, first at {int(wrong[0])}"


def _rate(operator: Callable[[], object], chunk: torch.Tensor) -> Rate:
    """Medians over runs that alternate with a torch copy of the chunk's bytes."""
    source, target = torch.empty_like(chunk), torch.empty_like(chunk)
    source.view(torch.uint8).fill_(1)
    target.copy_(source)
    times: dict[str, list[float]] = {"operator": [], "copy": []}
    for _ in range(REPEATS):
        for name, run in (("operator", operator), ("copy", lambda: target.copy_(source))):
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return Rate(*(chunk.nbytes / median(times[name]) for name in ("operator", "copy")))
