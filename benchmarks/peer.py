"""LMCache's own CPU operators and kvloom's in their place, called alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
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
        logging.getLogger("lmcache").setLevel(logging.ERROR)
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
    from lmcache.v1.platform import torch_ops

    layout, direction = cache.layout, {"gather": 1, "scatter": 0}
    if layout.id is None:
        return None
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
        made = {
            one: (given, [chunk], ids, CPU, way(direction[one]), desc, tokens, form, 0)
            for one in direction
        }
    else:
        addresses = torch.tensor([one.data_ptr() for one in flat(tensors)])
        whole = chunk if chunk.dim() == 4 else chunk[None]
        name = "multi_layer_kv_transfer"
        made = {
            one: (
                *(whole, addresses, call["slots"], CPU, cache.capacity, way(direction[one]), form),
                *(cache.block_size, width),
            )
            for one in direction
        }
    ours, theirs = getattr(kvloom.lmcache, name), getattr(torch_ops, name)
    if not _same(chunk, partial(ours, *made["gather"]), partial(theirs, *made["gather"])):
        return None
    return partial(ours, *made[op]), partial(theirs, *made[op])


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
