# Generated from specs/layouts/TWO_X_NL_X_NBBS_NH_HS.yaml by `make generate`; do not edit.
"""TWO_X_NL_X_NBBS_NH_HS: SGLang MHA.

A list of K tensors and a list of V tensors, each over flat slots with no block axis. The page size
is not in the tensors and has to be given; pointers run through all K layers before the first V
layer.

    kv     | key | value |       a list
    layer  | 0 | 1 | … | NL-1 |  a list
    block  | 0 | 1 | … | NB-1 |  BS·NH·HS·itemsize bytes each (one dimension)
    token  | 0 | 1 | … | BS-1 |  NH·HS·itemsize bytes each (one dimension)
    head   | 0 | 1 | … | NH-1 |  HS·itemsize bytes each
    elem   | 0 | 1 | … | HS-1 |  itemsize bytes each

Where an element lies, in bytes, in a tight cache (slot = block·BS + token):

    tensor[kv·NL + layer]
        + block · BS·NH·HS·itemsize
        + token · NH·HS·itemsize
        + head · HS·itemsize
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
    name="TWO_X_NL_X_NBBS_NH_HS",
    module="two_x_nl_x_nbbs_nh_hs",
    id=4,
    attention="mha",
    engines=(EngineFacts(name="SGLang MHA", alias="sglang-mha"),),
    doc=(
        "A list of K tensors and a list of V tensors, each over flat slots with no block axis. "
        "The page size is not in the tensors and has to be given; pointers run through all K "
        "layers before the first V layer."
    ),
    lists=("kv", "layer"),
    axes=(("block", "token"), ("head",), ("elem",)),
    memory=("block", "token", "head", "elem"),
    views=(),
    chunk="two_plane",
    geometry=(
        "block_size",
        "count.kv",
        "count.token",
        "count.head",
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
ENGINE_BLOCK = 4
ENGINE_TOKEN = 5
ENGINE_HEAD = 6
CHUNK_LAYER = 7
CHUNK_KV = 8
CHUNK_BLOCK = 9
CHUNK_TOKEN = 10
CHUNK_HEAD = 11
RUN = 12


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
            layers = geometry.shape[0]
            block_size = geometry[layer, BLOCK_SIZE]
            kv_count = geometry[layer, KV_COUNT]
            head_count = geometry[layer, HEAD_COUNT]
            engine_block = geometry[layer, ENGINE_BLOCK]
            engine_token = geometry[layer, ENGINE_TOKEN]
            engine_head = geometry[layer, ENGINE_HEAD]
            chunk_layer = geometry[layer, CHUNK_LAYER]
            chunk_kv = geometry[layer, CHUNK_KV]
            chunk_token = geometry[layer, CHUNK_TOKEN]
            chunk_head = geometry[layer, CHUNK_HEAD]
            run = geometry[layer, RUN]
            chunk_at_layer = chunk + layer * chunk_layer
            for kv in range(kv_count):
                engine_at_kv = pointers[kv * layers + layer]
                chunk_at_kv = chunk_at_layer + kv * chunk_kv
                for number in range(first, last):
                    position = order[number]
                    slot = slots[position]
                    if slot < 0:
                        continue
                    block = slot // block_size
                    token = slot - block * block_size
                    engine_at_position = engine_at_kv + block * engine_block + token * engine_token
                    chunk_at_position = chunk_at_kv + position * chunk_token
                    slot_ahead = slots[order[min(number + AHEAD, last - 1)]]
                    if slot_ahead != slot + AHEAD:
                        block_ahead = slot_ahead // block_size
                        token_ahead = slot_ahead - block_ahead * block_size
                        engine_ahead = (
                            engine_at_kv + block_ahead * engine_block + token_ahead * engine_token
                        )
                        for head in range(head_count):
                            engine_ahead_head = engine_ahead + head * engine_head
                            prefetch(engine_ahead_head, run)
                    for head in range(head_count):
                        engine_at_head = engine_at_position + head * engine_head
                        chunk_at_head = chunk_at_position + head * chunk_head
                        copy(chunk_at_head, engine_at_head, run, streaming)
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
            layers = geometry.shape[0]
            kv_count = geometry[layer, KV_COUNT]
            token_count = geometry[layer, TOKEN_COUNT]
            head_count = geometry[layer, HEAD_COUNT]
            engine_block = geometry[layer, ENGINE_BLOCK]
            engine_token = geometry[layer, ENGINE_TOKEN]
            engine_head = geometry[layer, ENGINE_HEAD]
            chunk_layer = geometry[layer, CHUNK_LAYER]
            chunk_kv = geometry[layer, CHUNK_KV]
            chunk_block = geometry[layer, CHUNK_BLOCK]
            chunk_token = geometry[layer, CHUNK_TOKEN]
            chunk_head = geometry[layer, CHUNK_HEAD]
            run = geometry[layer, RUN]
            chunk_at_layer = chunk + layer * chunk_layer
            for kv in range(kv_count):
                engine_at_kv = pointers[kv * layers + layer]
                chunk_at_kv = chunk_at_layer + kv * chunk_kv
                for number in range(first, last):
                    position = order[number]
                    block = blocks[position]
                    engine_at_position = engine_at_kv + block * engine_block
                    chunk_at_position = chunk_at_kv + position * chunk_block
                    for token in range(token_count):
                        engine_at_token = engine_at_position + token * engine_token
                        chunk_at_token = chunk_at_position + token * chunk_token
                        for head in range(head_count):
                            engine_at_head = engine_at_token + head * engine_head
                            chunk_at_head = chunk_at_token + head * chunk_head
                            copy(chunk_at_head, engine_at_head, run, streaming)
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
            layers = geometry.shape[0]
            block_size = geometry[layer, BLOCK_SIZE]
            kv_count = geometry[layer, KV_COUNT]
            head_count = geometry[layer, HEAD_COUNT]
            engine_block = geometry[layer, ENGINE_BLOCK]
            engine_token = geometry[layer, ENGINE_TOKEN]
            engine_head = geometry[layer, ENGINE_HEAD]
            chunk_layer = geometry[layer, CHUNK_LAYER]
            chunk_kv = geometry[layer, CHUNK_KV]
            chunk_token = geometry[layer, CHUNK_TOKEN]
            chunk_head = geometry[layer, CHUNK_HEAD]
            run = geometry[layer, RUN]
            chunk_at_layer = chunk + layer * chunk_layer
            for kv in range(kv_count):
                engine_at_kv = pointers[kv * layers + layer]
                chunk_at_kv = chunk_at_layer + kv * chunk_kv
                for number in range(first, last):
                    position = order[number]
                    slot = slots[position]
                    if slot < 0:
                        continue
                    block = slot // block_size
                    token = slot - block * block_size
                    engine_at_position = engine_at_kv + block * engine_block + token * engine_token
                    chunk_at_position = chunk_at_kv + position * chunk_token
                    for head in range(head_count):
                        engine_at_head = engine_at_position + head * engine_head
                        chunk_at_head = chunk_at_position + head * chunk_head
                        copy(engine_at_head, chunk_at_head, run, streaming)
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
            layers = geometry.shape[0]
            kv_count = geometry[layer, KV_COUNT]
            token_count = geometry[layer, TOKEN_COUNT]
            head_count = geometry[layer, HEAD_COUNT]
            engine_block = geometry[layer, ENGINE_BLOCK]
            engine_token = geometry[layer, ENGINE_TOKEN]
            engine_head = geometry[layer, ENGINE_HEAD]
            chunk_layer = geometry[layer, CHUNK_LAYER]
            chunk_kv = geometry[layer, CHUNK_KV]
            chunk_block = geometry[layer, CHUNK_BLOCK]
            chunk_token = geometry[layer, CHUNK_TOKEN]
            chunk_head = geometry[layer, CHUNK_HEAD]
            run = geometry[layer, RUN]
            chunk_at_layer = chunk + layer * chunk_layer
            for kv in range(kv_count):
                engine_at_kv = pointers[kv * layers + layer]
                chunk_at_kv = chunk_at_layer + kv * chunk_kv
                for number in range(first, last):
                    position = order[number]
                    block = blocks[position]
                    engine_at_position = engine_at_kv + block * engine_block
                    chunk_at_position = chunk_at_kv + position * chunk_block
                    for token in range(token_count):
                        engine_at_token = engine_at_position + token * engine_token
                        chunk_at_token = chunk_at_position + token * chunk_token
                        for head in range(head_count):
                            engine_at_head = engine_at_token + head * engine_head
                            chunk_at_head = chunk_at_token + head * chunk_head
                            copy(engine_at_head, chunk_at_head, run, streaming)
        finish(streaming)

    return Kernels(gather_slots, scatter_slots, gather_blocks, scatter_blocks)


def views(tensors: Sequence[Tensor], chunk: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor as [block, token, …] beside its part of ``chunk``, as [token, …].

    ``chunk`` is seen as [token, kv, layer, head, elem]. With torch's indexing this moves tokens on
    any device.
    """
    for number, tensor in enumerate(tensors):
        kv, layer = divmod(number, len(tensors) // 2)
        yield tensor.unsqueeze(1), chunk[:, kv, layer]
