"""LMCache's in-process connectors move layers and blocks through kvloom's operators, on the CPU.

Those are here that don't insist on CUDA. Of torch.cuda they want streams alone, which stand still.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="`make test` puts LMCache on the path")

from lmcache import device_ops
from lmcache.v1.gpu_connector import gpu_connectors
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.platform import torch_ops

import kvloom.lmcache
from engines import (
    BLOCK_SIZE,
    DTYPE,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    ROW,
    SGLANG,
    Engine,
    content,
    copies,
    engines,
    memory,
)

pytestmark = pytest.mark.lmcache

CPU = torch.device("cpu")
# Connectors allot their buffers, two at most and a page at least, from as much as a layer has.
BLOCKS = 220
ENGINES = engines(BLOCKS)
# Two chunks of a request, and where its tokens are.
SLOTS = [33, 5, 6, 7, 20, 21, 0, 1, 2, 35, 879, 16]
STARTS, ENDS = [0, 8], [8, 12]

# The names of operators that were called.
Calls = set[str]
Object = Any  # LMCache's MemoryObj


class StillStream:
    """A stream on which nothing ever has to be waited for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: StillStream) -> None:
        pass


@pytest.fixture
def calls(bound: pytest.MonkeyPatch) -> Calls:
    """Still streams, and kvloom's operators that are called meanwhile."""
    bound.setattr(torch.cuda, "Stream", StillStream)
    bound.setattr(torch.cuda, "stream", contextlib.nullcontext)
    bound.setattr(torch.cuda, "current_stream", StillStream)
    bound.setattr(torch.cuda, "synchronize", lambda: None)
    found: Calls = set()
    for name in kvloom.lmcache.__all__:
        if "kv_transfer" in name or "rotary" in name:
            bound.setattr(device_ops, name, _watched(name, getattr(kvloom.lmcache, name), found))
    return found


def _watched(name: str, operator: Callable[..., None], found: Calls) -> Callable[..., None]:
    @wraps(operator)
    def watched(*arguments: Any, **named: Any) -> None:
        found.add(name)
        operator(*arguments, **named)

    return watched


def with_their_operators(bound: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """What ``run`` gives with LMCache's own operators instead of kvloom's."""
    with bound.context() as patch:
        for name in kvloom.lmcache.__all__:
            if "kv_transfer" in name or "rotary" in name:
                patch.setattr(device_ops, name, getattr(torch_ops, name, None))
        return run()


def memory_object(rows: torch.Tensor, kind: MemoryFormat) -> Object:
    """An object of LMCache's that holds ``rows``."""
    made = AdHocMemoryAllocator("cpu").allocate(rows.shape, rows.dtype, kind)
    made.tensor.copy_(rows)
    return made


def random_rows(engine: Engine, count: int, dtype: torch.dtype = DTYPE) -> list[torch.Tensor]:
    """For each layer rows of [tokens, planes, elements] that the engine's cache has not."""
    other = engine.allocate(seed=2, dtype=dtype)
    return [engine.tokens(other, layer, range(count)) for layer in range(LAYERS)]


def offload(
    connector: Any, cache: Sequence[Any], objects: list[list[Object]], slots: list[int]
) -> None:
    """Have a layerwise connector fill the objects of each layer and chunk."""
    given = {"kvcaches": cache, "slot_mapping": torch.tensor(slots), "sync": True}
    for _ in connector.batched_from_gpu(objects, STARTS, ENDS, **given):
        pass


def reload(
    connector: Any,
    cache: Sequence[Any],
    objects: list[list[Object]],
    slots: list[int],
    chunks: tuple[list[int], list[int]] = (STARTS, ENDS),
) -> None:
    """Have a layerwise connector write the objects of each layer and chunk to the cache."""
    given = {"kvcaches": cache, "slot_mapping": torch.tensor(slots), "sync": True}
    steps = connector.batched_to_gpu(*chunks, **given)
    next(steps)
    for layer in objects:
        steps.send(layer)
    for _ in steps:
        pass


def chunked(
    layers: Iterable[torch.Tensor], shaped: Callable[[torch.Tensor], torch.Tensor], kind: Any
) -> list[list[Object]]:
    """Objects of each layer and chunk with rows of [tokens, planes, elements]."""
    return [
        [memory_object(shaped(rows[s:e]), kind) for s, e in zip(STARTS, ENDS, strict=True)]
        for rows in layers
    ]


def contents(objects: list[list[Object]]) -> list[list[bytes]]:
    return [[content(one.tensor) for one in layer] for layer in objects]


def layerwise_round(
    make: Callable[[], Any],
    engine: Engine,
    shaped: Callable[[torch.Tensor], torch.Tensor],
    kind: MemoryFormat,
) -> tuple[list[list[bytes]], list[bytes]]:
    """What objects hold after an offload, and the cache after other rows were reloaded to it."""
    tensors = engine.allocate(seed=1)
    before, cache = memory(tensors), engine.registered(tensors)
    gathered = chunked(random_rows(engine, len(SLOTS)), shaped, kind)
    offload(make(), cache, gathered, SLOTS)
    assert memory(tensors) == before
    reload(make(), cache, chunked(random_rows(engine, len(SLOTS)), shaped, kind), SLOTS)
    return contents(gathered), memory(tensors)


def expected_round(
    engine: Engine, shaped: Callable[[torch.Tensor], torch.Tensor], kind: MemoryFormat
) -> tuple[list[list[bytes]], list[bytes]]:
    """What ``layerwise_round`` must give, by torch's indexing."""
    tensors = engine.allocate(seed=1)
    gathered = chunked([engine.tokens(tensors, n, SLOTS) for n in range(LAYERS)], shaped, kind)
    for layer, rows in enumerate(random_rows(engine, len(SLOTS))):
        engine.put_tokens(tensors, layer, SLOTS, rows)
    return contents(gathered), memory(tensors)


@pytest.mark.parametrize("name", ["id1", "id1 permuted", "id2", "id3", "id6", "id7"])
def test_the_paged_layerwise_connector_moves_each_layer(
    name: str, calls: Calls, bound: pytest.MonkeyPatch
) -> None:
    engine = ENGINES[name]
    mla = engine.planes == 1

    def make() -> Any:
        return gpu_connectors.VLLMPagedMemLayerwiseGPUConnector(
            *(ROW, LAYERS),
            use_gpu=True,
            chunk_size=8,
            dtype=DTYPE,
            device=CPU,
            use_mla=mla,
            layout_hints=engine.hints,
        )

    def shaped(rows: torch.Tensor) -> torch.Tensor:
        return rows[:, 0] if mla else rows

    kind = MemoryFormat.KV_MLA_FMT if mla else MemoryFormat.KV_T2D
    ours = layerwise_round(make, engine, shaped, kind)
    assert calls == {"single_layer_kv_transfer"}
    assert ours == expected_round(engine, shaped, kind)
    if engine.format in (1, 2, 3):  # their own operator fails where heads lie apart
        theirs = with_their_operators(bound, lambda: layerwise_round(make, engine, shaped, kind))
        assert ours == theirs


# Lists of K and of V, as SGLang has them; LMCache views slots as blocks of one token where it has a
# buffer between.
OF_SLOTS = Engine(
    4,
    (BLOCKS * BLOCK_SIZE, HEADS, HEAD_SIZE),
    lambda t, layer, kv, b: t[LAYERS * kv + layer][b * BLOCK_SIZE : (b + 1) * BLOCK_SIZE],
    engine=SGLANG,
    count=2 * LAYERS,
    registered=lambda t: [t[:LAYERS], t[LAYERS:]],
)
OF_BLOCKS = replace(
    OF_SLOTS,
    shape=(BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE),
    block=lambda t, layer, kv, b: t[LAYERS * kv + layer][b],
)


@pytest.mark.parametrize(
    ("engine", "buffered"),
    [
        pytest.param(OF_SLOTS, True, id="slots with a buffer"),
        pytest.param(OF_SLOTS, False, id="slots"),
        pytest.param(OF_BLOCKS, False, id="blocks"),
    ],
)
def test_the_layerwise_connector_of_sglang_moves_k_and_v(
    engine: Engine, buffered: bool, calls: Calls, bound: pytest.MonkeyPatch
) -> None:
    def make() -> Any:
        return gpu_connectors.SGLangLayerwiseGPUConnector(
            ROW, LAYERS, use_gpu=buffered, dtype=DTYPE, device=CPU
        )

    given = (engine, lambda rows: rows, MemoryFormat.KV_T2D)
    ours = layerwise_round(make, *given)
    assert calls == {"single_layer_kv_transfer_sgl"}
    assert ours == expected_round(*given)
    if buffered or engine is OF_BLOCKS:  # their own operator takes four dimensions
        assert ours == with_their_operators(bound, lambda: layerwise_round(make, *given))


# The positions of the chunks' tokens when they are reloaded, with a gap between the chunks, and the
# slot of each position.
MOVED_STARTS, MOVED_ENDS = [4, 14], [12, 18]
MOVED_SLOTS = [*range(100, 104), *SLOTS[:8], 50, 877, *SLOTS[8:]]
FLOAT = torch.float32  # in which their own rotation rounds as kvloom's does


@pytest.mark.parametrize("name", ["id1", "id6", "id7"])
def test_the_buffering_connector_turns_keys_to_their_new_positions(
    name: str, calls: Calls, bound: pytest.MonkeyPatch
) -> None:
    engine = ENGINES[name]
    angles = torch.outer(torch.arange(64.0), 10 ** -torch.arange(HEAD_SIZE / 2))
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    random = torch.Generator().manual_seed(3)
    numbers = [
        torch.randn(one.shape, generator=random) for one in engine.allocate(seed=1, dtype=FLOAT)
    ]

    def turn(old: torch.Tensor, new: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        # What the rotary embedding of LMCache's models does, which vLLM's would be asked for.
        heads = keys.view(len(keys), -1, HEAD_SIZE)
        device_ops.rotary_embedding_k_fused(old, new, heads, HEAD_SIZE, table, True)
        return heads.view(len(keys), -1)

    def connector() -> Any:
        made = gpu_connectors.VLLMBufferLayerwiseGPUConnector(
            ROW, LAYERS, use_gpu=True, dtype=FLOAT, device=CPU, layout_hints=engine.hints
        )
        made.fused_rotary_emb = turn
        return made

    def run() -> tuple[list[list[bytes]], list[bytes]]:
        tensors = copies(numbers)
        zeros = [torch.zeros(len(SLOTS), 2, ROW)] * LAYERS
        objects = chunked(zeros, lambda rows: rows.transpose(0, 1), MemoryFormat.KV_2TD)
        offload(connector(), engine.registered(tensors), objects, SLOTS)
        chunks = (MOVED_STARTS, MOVED_ENDS)
        reload(connector(), engine.registered(tensors), objects, MOVED_SLOTS, chunks)
        return contents(objects), memory(tensors)

    ours = run()
    assert calls == {"single_layer_kv_transfer", "rotary_embedding_k_fused"}
    expected = copies(numbers)
    rows = [engine.tokens(numbers, layer, SLOTS) for layer in range(LAYERS)]
    for layer, before in enumerate(rows):
        moved = before.clone()
        new = torch.tensor([*range(4, 12), *range(14, 18)])
        moved[:, 0] = turned(before[:, 0], table, torch.arange(len(SLOTS)), new)
        engine.put_tokens(expected, layer, SLOTS, moved)
        engine.put_tokens(expected, layer, [50, 877], torch.zeros(2, 2, ROW))  # the gap
    objects = chunked(rows, lambda rows: rows.transpose(0, 1), MemoryFormat.KV_2TD)
    assert ours == (contents(objects), memory(expected))
    if engine.format == 1:
        assert ours == with_their_operators(bound, run)


def turned(
    keys: torch.Tensor, table: torch.Tensor, old: torch.Tensor, new: torch.Tensor
) -> torch.Tensor:
    """Keys of [tokens, elements], turned head by head as complex numbers' parts."""
    x, y = keys.view(len(keys), HEADS, HEAD_SIZE).chunk(2, dim=-1)
    for cos, sin in (
        (table[old, None, : HEAD_SIZE // 2], -table[old, None, HEAD_SIZE // 2 :]),
        (table[new, None, : HEAD_SIZE // 2], table[new, None, HEAD_SIZE // 2 :]),
    ):
        x, y = x * cos - y * sin, y * cos + x * sin
    return torch.cat([x, y], dim=-1).flatten(1)


def test_the_connector_of_tensorrt_llm_moves_blocks_by_their_addresses(
    calls: Calls, bound: pytest.MonkeyPatch
) -> None:
    engine = ENGINES["id8"]
    tokens, ids = 2 * BLOCK_SIZE, [3, 1, 6, 0, 219, 5]
    starts, ends = [0, 8, 16], [8, 16, 24]

    def objects_of(rows: torch.Tensor) -> list[Object]:
        return [memory_object(part, MemoryFormat.KV_2LTD) for part in rows.split(tokens, dim=2)]

    def run() -> Iterator[Any]:
        tensors = engine.allocate(seed=1)
        made = gpu_connectors.TRTLLMGPUConnector(HEADS, HEAD_SIZE, ROW, LAYERS, tokens, DTYPE, CPU)
        made.register_kv_caches(tensors[0])
        batch = objects_of(other)
        made.batched_from_gpu(batch, starts, ends, block_ids=ids)
        yield [content(one.tensor) for one in batch]
        (single, *_) = objects_of(other)
        made.from_gpu(single, 16, 24, block_ids=ids)
        yield content(single.tensor)
        made.batched_to_gpu(objects_of(other), starts, ends, block_ids=ids)
        yield memory(tensors)
        made.to_gpu(objects_of(other)[0], 8, 16, block_ids=[9, 8, 7, 2])
        yield memory(tensors)

    other = engine.rows(engine.allocate(seed=2), ids)
    expected = engine.allocate(seed=1)
    wanted: list[Any] = [[content(one.tensor) for one in objects_of(engine.rows(expected, ids))]]
    wanted.append(wanted[0][2])
    engine.put(expected, ids, other)
    wanted.append(memory(expected))
    engine.put(expected, [7, 2], other[:, :, :tokens])
    wanted.append(memory(expected))
    assert list(run()) == wanted
    assert calls == {"multi_layer_block_kv_transfer"}
    assert with_their_operators(bound, lambda: list(run())) == wanted
