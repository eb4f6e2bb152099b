"""Moves tokens by torch's indexing: on any device, and as a second opinion on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvloom._abi import Int64Array, Views
    from kvloom.geometry import Axes
    from kvloom.select import Op

# Bits are moved, never numbers: not every device indexes every dtype.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The order in which generated views see a chunk.
_CHUNK = ("token", "kv", "layer", "head", "elem")


def move(
    op: Op,
    views: Views,
    tensors: Sequence[torch.Tensor],
    chunk: torch.Tensor,
    axes: Axes,
    slots: Int64Array,
    skipped: int,
) -> None:
    """Move the tokens of one group; those of ``chunk`` after the ``skipped`` ones are at ``slots``.

    ``axes`` are the chunk's, ``tensors`` the group's in pointer order. A negative slot is passed
    over.
    """
    given = torch.from_numpy(slots)
    rows: torch.Tensor | slice = slice(skipped, None)
    if (slots < 0).any():
        kept = torch.nonzero(given >= 0).squeeze(1)
        given, rows = given[kept], (kept + skipped).to(chunk.device)
    given = given.to(chunk.device)
    for engine, part in views([_bits(tensor) for tensor in tensors], _seen(chunk, axes)):
        size = engine.shape[1]
        block, token = given // size, given % size
        if op == "gather":
            part[rows] = engine[block, token]
        else:
            engine[block, token] = part[rows]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTEGERS.get(tensor.element_size(), tensor.dtype))


def _seen(chunk: torch.Tensor, axes: Axes) -> torch.Tensor:
    """A chunk as [token, kv, layer, head, elem], whatever its own order."""
    itemsize = chunk.element_size()
    sizes = [axes.extent(axis) for axis in _CHUNK]
    strides = [axes.strides.get(axis, 0) // itemsize for axis in _CHUNK]
    return _bits(chunk).as_strided(sizes, strides, chunk.storage_offset())
