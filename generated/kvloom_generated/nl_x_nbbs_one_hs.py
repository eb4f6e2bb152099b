# Generated from specs/layouts/NL_X_NBBS_ONE_HS.yaml by `make generate`; do not edit.
"""NL_X_NBBS_ONE_HS: SGLang MLA.

One latent vector per slot over flat slots, with an axis of length 1 where MHA has its heads. The
page size is not in the tensors; by slots none is needed, by blocks it has to be given.

    layer  | 0 | 1 | … | NL-1 |  a list
    block  | 0 | 1 | … | NB-1 |  BS·HS·itemsize bytes each (one dimension)
    token  | 0 | 1 | … | BS-1 |  HS·itemsize bytes each (one dimension)
    one    | 0 |                 HS·itemsize bytes each
    elem   | 0 | 1 | … | HS-1 |  itemsize bytes each

Where an element lies, in bytes, in a tight cache (slot = block·BS + token):

    tensor[layer]
        + block · BS·HS·itemsize
        + token · HS·itemsize
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
    name="NL_X_NBBS_ONE_HS",
    module="nl_x_nbbs_one_hs",
    id=5,
    attention="mla",
    engines=(EngineFacts(name="SGLang MLA", alias="sglang-mla"),),
    doc=(
        "One latent vector per slot over flat slots, with an axis of length 1 where MHA has its "
        "heads. The page size is not in the tensors; by slots none is needed, by blocks it has to"
        " be given."
    ),
    lists=("layer",),
    axes=(("block", "token"), ("one",), ("elem",)),
    memory=("block", "token", "one", "elem"),
    views=(),
    chunk="one_plane",
    geometry=(
        "block_size",
        "count.token",
        "engine.block",
        "engine.token",
        "chunk.layer",
        "chunk.block",
        "chunk.token",
        "run",
    ),
    unsupported="",
)

# Columns of the geometry array, one row per layer, in bytes and counts.
BLOCK_SIZE = 0
TOKEN_COUNT = 1
ENGINE_BLOCK = 2
ENGINE_TOKEN = 3
CHUNK_LAYER = 4
CHUNK_BLOCK = 5
CHUNK_TOKEN = 6
RUN = 7


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
            engine_block = geometry[layer, ENGINE_BLOCK]
            engine_token = geometry[layer, ENGINE_TOKEN]
            chunk_layer = geometry[layer, CHUNK_LAYER]
            chunk_token = geometry[layer, CHUNK_TOKEN]
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
                    prefetch(engine_ahead, run)
                copy(chunk_at_position, engine_at_position, run, streaming)
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
            token_count = geometry[layer, TOKEN_COUNT]
            engine_block = geometry[layer, ENGINE_BLOCK]
            engine_token = geometry[layer, ENGINE_TOKEN]
            chunk_layer = geometry[layer, CHUNK_LAYER]
            chunk_block = geometry[layer, CHUNK_BLOCK]
            chunk_token = geometry[layer, CHUNK_TOKEN]
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
                    copy(chunk_at_token, engine_at_token, run, streaming)
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
            engine_block = geometry[layer, ENGINE_BLOCK]
            engine_token = geometry[layer, ENGINE_TOKEN]
            chunk_layer = geometry[layer, CHUNK_LAYER]
            chunk_token = geometry[layer, CHUNK_TOKEN]
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
                copy(engine_at_position, chunk_at_position, run, streaming)
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
            token_count = geometry[layer, TOKEN_COUNT]
            engine_block = geometry[layer, ENGINE_BLOCK]
            engine_token = geometry[layer, ENGINE_TOKEN]
            chunk_layer = geometry[layer, CHUNK_LAYER]
            chunk_block = geometry[layer, CHUNK_BLOCK]
            chunk_token = geometry[layer, CHUNK_TOKEN]
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
                    copy(engine_at_token, chunk_at_token, run, streaming)
        finish(streaming)

    return Kernels(gather_slots, scatter_slots, gather_blocks, scatter_blocks)


def views(tensors: Sequence[Tensor], chunk: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor as [block, token, …] beside its part of ``chunk``, as [token, …].

    ``chunk`` is seen as [token, kv, layer, head, elem]. With torch's indexing this moves tokens on
    any device.
    """
    for layer, tensor in enumerate(tensors):
        yield tensor.permute(0, 2, 1).unsqueeze(1)[..., 0], chunk[:, 0, layer, 0]
