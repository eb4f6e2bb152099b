"""LMCache's own CPU operators and kvloom's in their place, called alike."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

import kvloom
import kvloom.lmcache
from kvloom.lmcache.formats import packed, planes
from kvloom.verify import flat

CPU = torch.device("cpu")


def available() -> bool:
    """Whether LMCache can be imported; `make bench` sees to it where there is a wheel."""
    try:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # it would tell its makers
        from lmcache.v1.platform import torch_ops
    except ImportError:
        return False
    return hasattr(torch_ops, "multi_layer_block_kv_transfer")


def pair(
    cache: kvloom.Cache, tensors: Any, chunk: torch.Tensor, op: str, call: dict[str, torch.Tensor]
) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """kvloom's operator and LMCache's for one call; None where LMCache's can't do it right.

    Blocks are moved with tensors, slots by addresses, which is how LMCache calls the two.
    """
    (addressing,) = call
    if f"{addressing}-{cache.layout.id}" not in _able():
        return None
    return _pair(cache, tensors, chunk, op, call)


def _pair(
    cache: kvloom.Cache, tensors: Any, chunk: torch.Tensor, op: str, call: dict[str, torch.Tensor]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from lmcache.v1.platform import torch_ops

    layout, direction = cache.layout, {"gather": 1, "scatter": 0}
    assert layout.id is not None
    (group,) = cache.groups
    width = group.head_size * (2 if packed(layout) else 1)
    form = kvloom.lmcache.EngineKVFormat(layout.id)
    way = kvloom.lmcache.TransferDirection
    if "blocks" in call:
        desc = kvloom.lmcache.PageBufferShapeDesc()
        desc.nl, desc.nb, desc.bs = cache.layers, cache.blocks, cache.block_size
        desc.nh, desc.hs, desc.kv_size = group.heads, width, planes(layout)
        desc.element_size, desc.dtype = group.itemsize, chunk.dtype
        ids = call["blocks"].tolist()
        given = tensors if isinstance(tensors, torch.Tensor) else list(tensors)
        name, tokens = "multi_layer_block_kv_transfer", len(ids) * (cache.block_size or 1)
        given_to_both = (given, [chunk], ids, CPU, way(direction[op]), desc, tokens, form, 0)
    else:
        addresses = torch.tensor([one.data_ptr() for one in flat(tensors)])
        whole = chunk if chunk.dim() == 4 else chunk[None]
        name = "multi_layer_kv_transfer"
        given_to_both = (
            *(whole, addresses, call["slots"], CPU, cache.capacity, way(direction[op]), form),
            *(cache.block_size, width),
        )
    operators = getattr(kvloom.lmcache, name), getattr(torch_ops, name)
    ours, theirs = (partial(operator, *given_to_both) for operator in operators)
    return ours, theirs


@cache
def _able() -> frozenset[str]:
    """What LMCache's operators do right, found out in a process of its own.

    Some read or write where there is nothing, and die of it or not.
    """
    done = subprocess.run([sys.executable, __file__], check=True, capture_output=True, text=True)
    return frozenset(done.stdout.split())


def _tried() -> Iterator[str]:
    """The addressing and number of whatever LMCache's operators do as kvloom's on a tiny cache."""
    torch.set_num_threads(1)  # more would not live through a fork
    for layout in kvloom.layouts():
        if layout.id is None or layout.unsupported:
            continue
        tensors = layout.empty(
            layers=2,
            blocks=5,
            block_size=4,
            head_size=16,
            dtype="bf16",
            heads=3 if "head" in layout.facts.memory else 1,
        )
        for one in flat(tensors):
            one.view(torch.int16).random_()
        cache = layout.bind(tensors, block_size=4)
        index = {"blocks": torch.tensor([3, 0, 4]), "slots": torch.tensor([13, 2, 19, 0])}
        for addressing, given in index.items():
            tokens = len(given) * (4 if addressing == "blocks" else 1)
            chunk = cache.empty_chunk(tokens)
            assert isinstance(chunk, torch.Tensor)
            child = os.fork()
            if child == 0:
                ours, theirs = _pair(cache, tensors, chunk, "gather", {addressing: given})
                os._exit(not _same(chunk, ours, theirs))
            if os.waitpid(child, 0)[1] == 0:
                yield f"{addressing}-{layout.id}"


def _same(chunk: torch.Tensor, ours: Callable[[], Any], theirs: Callable[[], Any]) -> bool:
    """Whether both fill a chunk alike."""
    found = []
    for action in (ours, theirs):
        chunk.view(torch.uint8).fill_(0xA5)
        try:
            action()
        except Exception:
            return False
        found.append(chunk.view(torch.uint8).clone())
    return torch.equal(*found)


if __name__ == "__main__":
    available()
    print(*_tried())
