# Generated from specs/layouts/BLHNC.yaml by `make generate`; do not edit.
"""BLHNC: vLLM BLHNC.

One of vLLM's standard layouts since mid-2026: one buffer, of which each layer is a strided view. A
block holds all layers, so a layer's view steps over the other layers from block to block: its block
stride is NL pages; C is one head's K and V packed, heads outside tokens.

    layer  | 0 | 1 | … | NL-1 |  a list of views
    block  | 0 | 1 | … | NB-1 |  2·NL·BS·NH·HS·itemsize bytes each
    layer  | 0 | 1 | … | NL-1 |  2·BS·NH·HS·itemsize bytes each
    head   | 0 | 1 | … | NH-1 |  2·BS·HS·itemsize bytes each
    token  | 0 | 1 | … | BS-1 |  2·HS·itemsize bytes each
    kv     | key | value |       HS·itemsize bytes each (one dimension)
    elem   | 0 | 1 | … | HS-1 |  itemsize bytes each (one dimension)

Where an element lies, in bytes, in a tight cache (slot = block·BS + token):

    tensor[layer]
        + block · 2·NL·BS·NH·HS·itemsize
        + head · 2·BS·HS·itemsize
        + token · 2·HS·itemsize
        + kv · HS·itemsize
        + elem · itemsize
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvloom._abi import EngineFacts, Kernels, LayoutFacts
from kvloom._kernel import AHEAD, copy, finish, kernel, prefetch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvloom._abi import Int64Array, Tensor

LAYOUT = LayoutFacts(
    name="BLHNC",
    module="blhnc",
    id=None,
    attention="mha",
    engines=(EngineFacts(name="vLLM BLHNC", alias="vllm-blhnc"),),
    doc=(
        "One of vLLM's standard layouts since mid-2026: one buffer, of which each layer is a "
        "strided view. A block holds all layers, so a layer's view steps over the other layers "
        "from block to block: its block stride is NL pages; C is one head's K and V packed, heads"
        " outside tokens."
    ),
    lists=("layer",),
    axes=(("block",), ("head",), ("token",), ("kv", "elem")),
    memory=("block", "layer", "head", "token", "kv", "elem"),
    views=("layer",),
    chunk="packed",
    geometry=(
        "block_size",
        "count.kv",
        "count.token",
        "count.head",
        "engine.kv",
        "engine.block",
        "engine.token",
        "engine.head",
        "chunk.layer",
        "chunk.kv",
        "chunk.block",
        "chunk.token",
        "chunk.head",
        "run",
    ),
    unsupported="",
)

# Columns of the geometry array, one row per layer, in bytes and counts.
BLOCK_SIZE = 0
KV_COUNT = 1
TOKEN_COUNT = 2
HEAD_COUNT = 3
ENGINE_KV = 4
ENGINE_BLOCK = 5
ENGINE_TOKEN = 6
ENGINE_HEAD = 7
CHUNK_LAYER = 8
CHUNK_KV = 9
CHUNK_BLOCK = 10
CHUNK_TOKEN = 11
CHUNK_HEAD = 12
RUN = 13


def kernels(helpers: str, streaming: bool = False) -> Kernels:
    """The four kernels, each compiled at its first call; ``streaming`` ones store past the caches.

    ``helpers`` is the digest of the functions they call: closed over, it is part of the key of
    numba's disk cache.
    """

    @kernel
    def gather_slots(
        pointers: Int64Array,
        chunk: int,
        slots: Int64Array,
        order: Int64Array,
        geometry: Int64Array,
        layer_first: int,
        layer_last: int,
        first: int,
        last: int,
    ) -> None:
        """engine → chunk, one token per slot; a negative slot is skipped."""
        _ = helpers
        for layer in range(layer_first, layer_last):
            block_size = geometry[layer, BLOCK_SIZE]
            kv_count = geometry[layer, KV_COUNT]
            head_count = geometry[layer, HEAD_COUNT]
            engine_kv = geometry[layer, ENGINE_KV]
            engine_block = geometry[layer, ENGINE_BLOCK]
            engine_token = geometry[layer, ENGINE_TOKEN]
            engine_head = geometry[layer, ENGINE_HEAD]
            chunk_layer = geometry[layer, CHUNK_LAYER]
            chunk_kv = geometry[layer, CHUNK_KV]
            chunk_token = geometry[layer, CHUNK_TOKEN]
            chunk_head = geometry[layer, CHUNK_HEAD]
            run = geometry[layer, RUN]
            engine_at_layer = pointers[layer]
            chunk_at_layer = chunk + layer * chunk_layer
            for number in range(first, last):
                position = order[number]
                slot = slots[position]
                if slot < 0:
                    continue
                block = slot // block_size
                token = slot - block * block_size
                engine_at_position = engine_at_layer + block * engine_block + token * engine_token
                chunk_at_position = chunk_at_layer + position * chunk_token
                slot_ahead = slots[order[min(number + AHEAD, last - 1)]]
                if slot_ahead != slot + AHEAD:
                    block_ahead = slot_ahead // block_size
                    token_ahead = slot_ahead - block_ahead * block_size
                    engine_ahead = (
                        engine_at_layer + block_ahead * engine_block + token_ahead * engine_token
                    )
                    for head in range(head_count):
                        engine_ahead_head = engine_ahead + head * engine_head
                        for kv in range(kv_count):
                            engine_ahead_head_kv = engine_ahead_head + kv * engine_kv
                            prefetch(engine_ahead_head_kv, run)
                for head in range(head_count):
                    engine_at_head = engine_at_position + head * engine_head
                    chunk_at_head = chunk_at_position + head * chunk_head
                    for kv in range(kv_count):
                        engine_at_kv = engine_at_head + kv * engine_kv
                        chunk_at_kv = chunk_at_head + kv * chunk_kv
                        copy(chunk_at_kv, engine_at_kv, run, streaming)
        finish(streaming)

    @kernel
    def gather_blocks(
        pointers: Int64Array,
        chunk: int,
        blocks: Int64Array,
        order: Int64Array,
        geometry: Int64Array,
        layer_first: int,
        layer_last: int,
        first: int,
        last: int,
    ) -> None:
        """engine → chunk, one block of tokens per block id."""
        _ = helpers
        for layer in range(layer_first, layer_last):
            kv_count = geometry[layer, KV_COUNT]
            token_count = geometry[layer, TOKEN_COUNT]
            head_count = geometry[layer, HEAD_COUNT]
            engine_kv = geometry[layer, ENGINE_KV]
            engine_block = geometry[layer, ENGINE_BLOCK]
            engine_token = geometry[layer, ENGINE_TOKEN]
            engine_head = geometry[layer, ENGINE_HEAD]
            chunk_layer = geometry[layer, CHUNK_LAYER]
            chunk_kv = geometry[layer, CHUNK_KV]
            chunk_block = geometry[layer, CHUNK_BLOCK]
            chunk_token = geometry[layer, CHUNK_TOKEN]
            chunk_head = geometry[layer, CHUNK_HEAD]
            run = geometry[layer, RUN]
            engine_at_layer = pointers[layer]
            chunk_at_layer = chunk + layer * chunk_layer
            for number in range(first, last):
                position = order[number]
                block = blocks[position]
                engine_at_position = engine_at_layer + block * engine_block
                chunk_at_position = chunk_at_layer + position * chunk_block
                for token in range(token_count):
                    engine_at_token = engine_at_position + token * engine_token
                    chunk_at_token = chunk_at_position + token * chunk_token
                    for head in range(head_count):
                        engine_at_head = engine_at_token + head * engine_head
                        chunk_at_head = chunk_at_token + head * chunk_head
                        for kv in range(kv_count):
                            engine_at_kv = engine_at_head + kv * engine_kv
                            chunk_at_kv = chunk_at_head + kv * chunk_kv
                            copy(chunk_at_kv, engine_at_kv, run, streaming)
        finish(streaming)

    @kernel
    def scatter_slots(
        pointers: Int64Array,
        chunk: int,
        slots: Int64Array,
        order: Int64Array,
        geometry: Int64Array,
        layer_first: int,
        layer_last: int,
        first: int,
        last: int,
    ) -> None:
        """chunk → engine, one token per slot; a negative slot is skipped."""
        _ = helpers
        for layer in range(layer_first, layer_last):
            block_size = geometry[layer, BLOCK_SIZE]
            kv_count = geometry[layer, KV_COUNT]
            head_count = geometry[layer, HEAD_COUNT]
            engine_kv = geometry[layer, ENGINE_KV]
            engine_block = geometry[layer, ENGINE_BLOCK]
            engine_token = geometry[layer, ENGINE_TOKEN]
            engine_head = geometry[layer, ENGINE_HEAD]
            chunk_layer = geometry[layer, CHUNK_LAYER]
            chunk_kv = geometry[layer, CHUNK_KV]
            chunk_token = geometry[layer, CHUNK_TOKEN]
            chunk_head = geometry[layer, CHUNK_HEAD]
            run = geometry[layer, RUN]
            engine_at_layer = pointers[layer]
            chunk_at_layer = chunk + layer * chunk_layer
            for number in range(first, last):
                position = order[number]
                slot = slots[position]
                if slot < 0:
                    continue
                block = slot // block_size
                token = slot - block * block_size
                engine_at_position = engine_at_layer + block * engine_block + token * engine_token
                chunk_at_position = chunk_at_layer + position * chunk_token
                for head in range(head_count):
                    engine_at_head = engine_at_position + head * engine_head
                    chunk_at_head = chunk_at_position + head * chunk_head
                    for kv in range(kv_count):
                        engine_at_kv = engine_at_head + kv * engine_kv
                        chunk_at_kv = chunk_at_head + kv * chunk_kv
                        copy(engine_at_kv, chunk_at_kv, run, streaming)
        finish(streaming)

    @kernel
    def scatter_blocks(
        pointers: Int64Array,
        chunk: int,
        blocks: Int64Array,
        order: Int64Array,
        geometry: Int64Array,
        layer_first: int,
        layer_last: int,
        first: int,
        last: int,
    ) -> None:
        """chunk → engine, one block of tokens per block id."""
        _ = helpers
        for layer in range(layer_first, layer_last):
            kv_count = geometry[layer, KV_COUNT]
            token_count = geometry[layer, TOKEN_COUNT]
            head_count = geometry[layer, HEAD_COUNT]
            engine_kv = geometry[layer, ENGINE_KV]
            engine_block = geometry[layer, ENGINE_BLOCK]
            engine_token = geometry[layer, ENGINE_TOKEN]
            engine_head = geometry[layer, ENGINE_HEAD]
            chunk_layer = geometry[layer, CHUNK_LAYER]
            chunk_kv = geometry[layer, CHUNK_KV]
            chunk_block = geometry[layer, CHUNK_BLOCK]
            chunk_token = geometry[layer, CHUNK_TOKEN]
            chunk_head = geometry[layer, CHUNK_HEAD]
            run = geometry[layer, RUN]
            engine_at_layer = pointers[layer]
            chunk_at_layer = chunk + layer * chunk_layer
            for number in range(first, last):
                position = order[number]
                block = blocks[position]
                engine_at_position = engine_at_layer + block * engine_block
                chunk_at_position = chunk_at_layer + position * chunk_block
                for token in range(token_count):
                    engine_at_token = engine_at_position + token * engine_token
                    chunk_at_token = chunk_at_position + token * chunk_token
                    for head in range(head_count):
                        engine_at_head = engine_at_token + head * engine_head
                        chunk_at_head = chunk_at_token + head * chunk_head
                        for kv in range(kv_count):
                            engine_at_kv = engine_at_head + kv * engine_kv
                            chunk_at_kv = chunk_at_head + kv * chunk_kv
                            copy(engine_at_kv, chunk_at_kv, run, streaming)
        finish(streaming)

    return Kernels(gather_slots, scatter_slots, gather_blocks, scatter_blocks)


def views(tensors: Sequence[Tensor], chunk: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor as [block, token, …] beside its part of ``chunk``, as [token, …].

    ``chunk`` is seen as [token, kv, layer, head, elem]. With torch's indexing this moves tokens on
    any device.
    """
    for layer, tensor in enumerate(tensors):
        yield tensor.unflatten(3, (2, -1)).permute(0, 2, 3, 1, 4), chunk[:, :, layer]
