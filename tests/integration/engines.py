"""Paged caches as serving engines register them with LMCache, and which bytes a block has in them.

Shares no code with kvloom, nor with the suite's oracle: a block is found by torch's indexing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lmcache.utils import EngineType

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 3, 13, 4, 3, 8
BS, NH, HS, ROW = BLOCK_SIZE, HEADS, HEAD_SIZE, HEADS * HEAD_SIZE
DTYPE = torch.float16

VLLM, SGLANG, TRTLLM = EngineType.VLLM, EngineType.SGLANG, EngineType.TRTLLM
NHD, HND = {"kv_layout": "NHD"}, {"kv_layout": "HND"}

Tensors = list[torch.Tensor]
# Of a cache's tensors, a layer, a plane and a block: a view of [BLOCK_SIZE, heads, elements].
Block = Callable[[Tensors, int, int, int], torch.Tensor]


@dataclass(frozen=True)
class Engine:
    """How an engine allocates its cache, what it registers of it, and where a block is."""

    format: int
    shape: tuple[int, ...]
    block: Block
    engine: EngineType = VLLM
    hints: dict[str, Any] = field(default_factory=lambda: NHD)
    count: int = LAYERS
    planes: int = 2
    strides: tuple[int, ...] = ()
    registered: Callable[[Tensors], Sequence[Any]] = list

    def allocate(self, seed: int, dtype: torch.dtype = DTYPE) -> Tensors:
        """Tensors in which all bytes are random, those between padded blocks too."""
        size = sum((n - 1) * s for n, s in zip(self.shape, self._strides, strict=True)) + 1
        random = torch.Generator().manual_seed(seed)
        nbytes = (self.count, size * dtype.itemsize)
        memory = torch.randint(0, 256, nbytes, dtype=torch.uint8, generator=random)
        return [
            one.clone().view(dtype).as_strided(self.shape, self._strides) for one in memory.unbind()
        ]

    @property
    def _strides(self) -> tuple[int, ...]:
        return self.strides or torch.empty(self.shape, device="meta").stride()

    def rows(self, tensors: Tensors, blocks: Sequence[int]) -> torch.Tensor:
        """A chunk of [planes, LAYERS, tokens, elements] with what ``blocks`` have."""
        return torch.stack(
            [
                torch.stack(
                    [
                        torch.cat([self.block(tensors, layer, kv, b).flatten(1) for b in blocks])
                        for layer in range(LAYERS)
                    ]
                )
                for kv in range(self.planes)
            ]
        )

    def put(self, tensors: Tensors, blocks: Sequence[int], chunk: torch.Tensor) -> None:
        """Write a chunk of [planes, LAYERS, tokens, elements] to ``blocks``."""
        for kv in range(self.planes):
            for layer in range(LAYERS):
                parts = chunk[kv, layer].split(BLOCK_SIZE)
                for number, part in zip(blocks, parts, strict=True):
                    view = self.block(tensors, layer, kv, number)
                    view.copy_(part.view(view.shape))

    def tokens(self, tensors: Tensors, layer: int, slots: Sequence[int]) -> torch.Tensor:
        """What ``slots`` of a layer have, [tokens, planes, elements]."""
        views = [
            [self._token(tensors, layer, kv, slot).flatten() for kv in range(self.planes)]
            for slot in slots
        ]
        return torch.stack([torch.stack(token) for token in views])

    def put_tokens(
        self, tensors: Tensors, layer: int, slots: Sequence[int], rows: torch.Tensor
    ) -> None:
        """Write rows of [tokens, planes, elements] to ``slots`` of a layer."""
        for slot, token in zip(slots, rows, strict=True):
            for kv, row in enumerate(token):
                view = self._token(tensors, layer, kv, slot)
                view.copy_(row.view(view.shape))

    def _token(self, tensors: Tensors, layer: int, kv: int, slot: int) -> torch.Tensor:
        block, offset = divmod(slot, BLOCK_SIZE)
        return self.block(tensors, layer, kv, block)[offset]


def copies(tensors: Tensors) -> Tensors:
    """The same in other memory, the bytes between padded blocks too."""
    return [
        torch.empty(0, dtype=one.dtype)
        .set_(one.untyped_storage().clone())
        .as_strided(one.shape, one.stride())
        for one in tensors
    ]


def memory(tensors: Tensors) -> list[bytes]:
    """All bytes of the memory in which tensors lie."""
    storages = [one.untyped_storage() for one in tensors]
    return [torch.empty(0, dtype=torch.uint8).set_(one).numpy().tobytes() for one in storages]


def content(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements: random ones are not all numbers."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _pairs(tensors: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def engines(NB: int) -> dict[str, Engine]:
    """All formats that LMCache's client finds in what an engine of ``NB`` blocks registers.

    Those alone that kvloom has kernels for. "id1 permuted" is a view of [2, NB, BS, NH, HS] over
    memory where heads lie apart, by which LMCache names it.
    """
    return {
        "id1": Engine(1, (2, NB, BS, NH, HS), lambda t, layer, kv, b: t[layer][kv, b]),
        "id1 permuted": Engine(
            6,
            (2, NB, NH, BS, HS),
            lambda t, layer, kv, b: t[layer][kv, b].transpose(0, 1),
            hints=HND,
            registered=lambda t: [one.transpose(2, 3) for one in t],
        ),
        "id2": Engine(2, (NB, 2, BS, NH, HS), lambda t, layer, kv, b: t[layer][b, kv]),
        "id3": Engine(3, (NB, BS, ROW), lambda t, layer, _, b: t[layer][b, :, None], planes=1),
        "id6": Engine(
            6,
            (2, NB, NH, BS, HS),
            lambda t, layer, kv, b: t[layer][kv, b].transpose(0, 1),
            hints=HND,
        ),
        "id7": Engine(
            7,
            (NB, 2, NH, BS, HS),
            lambda t, layer, kv, b: t[layer][b, kv].transpose(0, 1),
            hints=HND,
        ),
        "id8": Engine(
            8,
            (NB, LAYERS, 2, NH * BS * HS),
            lambda t, layer, kv, b: t[0][b, layer, kv].view(NH, BS, HS).transpose(0, 1),
            engine=TRTLLM,
            hints={**HND, "num_kv_heads": NH, "tokens_per_block": BS, "head_dim": HS},
            count=1,
        ),
        "id9": Engine(
            9,
            (NB * BS, NH, HS),
            lambda t, layer, kv, b: t[LAYERS * kv + layer][b * BS : (b + 1) * BS],
            engine=SGLANG,
            hints={"kv_list_layout": "k_v", "tokens_per_block": BS},
            count=2 * LAYERS,
        ),
        "id12": Engine(
            12,
            (NB, NH, BS, 2 * HS),
            lambda t, layer, _, b: t[layer][b].transpose(0, 1),
            hints=HND,
            planes=1,
        ),
        "id13": Engine(13, (NB, BS, NH, 2 * HS), lambda t, layer, _, b: t[layer][b], planes=1),
        "id15": Engine(
            15,
            (2, NB, NH, 1, BS, HS),
            lambda t, layer, kv, b: t[layer][kv, b, :, 0].transpose(0, 1),
            hints=HND,
        ),
        "id16": Engine(
            16,
            (NB, BS, NH, HS),
            lambda t, layer, kv, b: t[2 * layer + kv][b],
            count=2 * LAYERS,
            registered=_pairs,
        ),
        "id18": Engine(
            18,
            (NB, BS, NH, HS),
            lambda t, layer, _, b: t[layer][b],
            engine=SGLANG,
            hints={"kv_list_layout": "unified"},
            planes=1,
        ),
    }


ENGINES = engines(BLOCKS)


def _padded(name: str, gap: int = 24) -> Engine:
    """The same, whose first dimension, which is blocks, has gaps."""
    one = ENGINES[name]
    strides = torch.empty(one.shape, device="meta").stride()
    return replace(one, strides=(strides[0] + gap, *strides[1:]))


PADDED = {name: _padded(name) for name in ("id2", "id3", "id7", "id12", "id13", "id16", "id18")}
