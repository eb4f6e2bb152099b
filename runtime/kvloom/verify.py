"""A round trip that checks itself: offload a paged cache, wipe it, reload it, compare every byte.

The comparison does not trust the kernels: what a chunk must hold, and which bytes of the cache may
change, are worked out with torch's own indexing over the axes that the layout declares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvloom._abi import ModelFacts
    from kvloom.engine_layout import Layout

BLOCK_SIZE = 16
# What a wiped cache holds: a byte that random data rarely repeats in a whole row.
WIPED = 0xA5
REPEATS = 5

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
    dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[model.dtype])
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
        if not _same(chunk, reference_chunk(layout, tensors, moved)):
            faults.append(f"the chunk gathered by {name} differs from torch's own indexing")
    if not all(map(torch.equal, storages, before)):
        faults.append("offloading changed the cache")

    progress("wipe and reload")
    for storage in storages:
        storage.fill_(WIPED)
    cache.scatter(block_chunk, blocks=blocks)
    cache.scatter(slot_chunk, slots=slots)
    progress("verify cache")
    moved = torch.cat([by_block, slots])
    for storage, old in zip(storages, before, strict=True):
        faults += _reload_faults(layout, tensors, storage, old, moved)
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


def reference_chunk(layout: Layout, tensors: object, slots: torch.Tensor) -> torch.Tensor:
    """What a gather of ``slots`` into the layout's default chunk must give, by torch's indexing.

    Slow and simple: every tensor's dimensions are put in the chunk's order, then tokens are picked.
    """
    axes = layout.facts.axes
    rows: list[torch.Tensor] = []
    for tensor in flat(tensors):
        split = _split_content(tensor, axes)
        names = [name for dimension in axes for name in _named(dimension)]
        rows.append(_pick(split, names, slots))
    names = ["token", *(n for d in axes for n in _named(d) if n not in ("block", "token", "slot"))]
    whole = torch.stack(rows)
    planes = 2 if "kv" in layout.facts.lists else 1
    counts = [2 if axis == "kv" else len(rows) // planes for axis in layout.facts.lists]
    whole = whole.view(*counts, *whole.shape[1:]) if counts else whole[0]
    names = [*layout.facts.lists, *names]
    if "one" in names:
        whole = whole.squeeze(names.index("one"))
        names.remove("one")
    order = [axis for dimension in layout.chunk.axes for axis in dimension]
    kept = [axis for axis in order if axis in names]
    whole = whole.permute([names.index(axis) for axis in kept])
    row = sum(axis in kept for axis in layout.chunk.axes[-1])
    return whole.flatten(len(kept) - row)


def _named(dimension: tuple[str, ...]) -> tuple[str, ...]:
    return ("slot",) if dimension == ("block", "token") else dimension


def _split_content(tensor: torch.Tensor, axes: Sequence[tuple[str, ...]]) -> torch.Tensor:
    """``tensor`` with a fused dimension of keys and values split in two."""
    for i, dimension in enumerate(axes):
        if dimension == ("kv", "elem"):
            return tensor.view(*tensor.shape[:i], 2, -1, *tensor.shape[i + 1 :])
    return tensor


def _pick(tensor: torch.Tensor, names: list[str], slots: torch.Tensor) -> torch.Tensor:
    """The tokens at ``slots``, first; the other dimensions follow in their order."""
    if "slot" in names:
        return tensor.movedim(names.index("slot"), 0)[slots]
    block, token = names.index("block"), names.index("token")
    moved = tensor.movedim((block, token), (0, 1))
    return moved[slots // BLOCK_SIZE, slots % BLOCK_SIZE]


def _reload_faults(
    layout: Layout,
    tensors: object,
    storage: torch.Tensor,
    old: torch.Tensor,
    slots: torch.Tensor,
) -> Iterator[str]:
    """Compare one allocation with what it must hold: old bytes at ``slots``, wiped bytes else."""
    expected = torch.full_like(storage, WIPED)
    names = [name for dimension in layout.facts.axes for name in _named(dimension)]
    for tensor in flat(tensors):
        if tensor.untyped_storage().data_ptr() != storage.data_ptr():
            continue
        views = [
            _split_content(
                torch.empty(0, dtype=tensor.dtype).set_(
                    one.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
                ),
                layout.facts.axes,
            )
            for one in (expected, old)
        ]
        if "slot" in names:
            new, kept = (view.movedim(names.index("slot"), 0) for view in views)
            new[slots] = kept[slots]
        else:
            where = (names.index("block"), names.index("token"))
            new, kept = (view.movedim(where, (0, 1)) for view in views)
            at = (slots // BLOCK_SIZE, slots % BLOCK_SIZE)
            new[at] = kept[at]
    if not torch.equal(storage, expected):
        wrong = (storage != expected).nonzero().flatten()
        yield f"{len(wrong)} bytes of the reloaded cache are wrong, first at offset {int(wrong[0])}"


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
