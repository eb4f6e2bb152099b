"""Moves cached keys to other positions: undoes one rotation and applies another, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvloom.arguments import index_array, integer
from kvloom.moves import shared_from
from kvloom.overlap import check_apart, check_self
from kvloom.pool import share
from kvloom.processors import threads
from kvloom.tensors import Home, to_host

if TYPE_CHECKING:
    from kvloom._abi import Int64Array

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Parts for each thread: one that starts late then does fewer of them.
_PARTS = 4


def rotary_embedding_k_fused(
    old_positions: torch.Tensor,
    new_positions: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Turn ``key``, [T, NH, HS], from its old positions to new ones, in place.

    ``cos_sin_cache`` is [P, R]: cosines in the first R/2 columns, sines in the others, R ≤
    ``head_size``; elements from R on are untouched. A rotation turns the pairs (i, i + R/2) if
    ``is_neox``, else (2i, 2i + 1). Positions are [T], int32 or int64, below P. Arithmetic is in
    float32, undoing first, without fused multiply-add, and rounded once at the end.

    ValueError or TypeError, naming the argument, before a byte changes.
    """
    rotary_embedding_k_fused_strided(
        old_positions, new_positions, key, head_size, head_size, cos_sin_cache, is_neox
    )


def rotary_embedding_k_fused_strided(
    old_positions: torch.Tensor,
    new_positions: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    head_stride: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """``rotary_embedding_k_fused`` on [T, NH, ``head_stride``], a head being its first elements."""
    size = _head_size(key, head_size, head_stride)
    rotated = _rotated(cos_sin_cache, size, key.device)
    home = Home(key.device)
    facts = home.facts("key", key)
    table = cos_sin_cache.detach()
    facts_of_table = home.facts("cos_sin_cache", table)
    if not isinstance(is_neox, (bool, int)):
        raise TypeError(f"is_neox: got {is_neox!r}, takes a bool")
    count, limit = key.shape[0], table.shape[0]
    old = _positions("old_positions", old_positions, count, limit)
    new = _positions("new_positions", new_positions, count, limit)
    turned = key[..., :rotated]
    if turned.numel() == 0:
        return
    check_self(facts)
    check_apart([facts, facts_of_table])
    run = _turn_here if key.device.type == "cpu" else turn
    run(turned, table, old, new, bool(is_neox))


@torch.inference_mode()  # key may have been made in that mode too
def turn(
    turned: torch.Tensor, table: torch.Tensor, old: Int64Array, new: Int64Array, is_neox: bool
) -> None:
    """Turn [T, NH, R] by torch's own arithmetic, on whatever device it is."""
    half = table.shape[1] // 2
    wide = turned.float()
    x, y = (wide[..., :half], wide[..., half:]) if is_neox else (wide[..., ::2], wide[..., 1::2])
    (c, s), (c2, s2) = (
        table[torch.from_numpy(at).to(table.device)].float()[:, None].split(half, -1)
        for at in (old, new)
    )
    x, y = x * c + y * s, y * c - x * s
    x, y = x * c2 - y * s2, y * c2 + x * s2
    turned.copy_(torch.cat([x, y], -1) if is_neox else torch.stack([x, y], -1).flatten(-2))


def _turn_here(
    turned: torch.Tensor, table: torch.Tensor, old: Int64Array, new: Int64Array, is_neox: bool
) -> None:
    """Turn [T, NH, R] on the CPU, on several threads where that pays."""
    from kvloom.lmcache import rotation

    count, heads, _ = turned.shape
    steps = turned.stride()
    reach = sum((size - 1) * step for size, step in zip(turned.shape, steps, strict=True))
    flat, held = _bits(turned.as_strided((reach + 1,), (1,)))
    if table.dtype is not torch.float64 and table.is_contiguous():
        rows, table_held = _bits(table)
    else:  # only rows that are used: there may be many more
        rows, table_held = _bits(_picked(table, np.concatenate([old, new])))
        old, new = np.arange(2 * count).reshape(2, count)
    rotation.compile_for(flat, rows)

    def work(part: range) -> None:
        rotation.rotate(
            *(flat, held, *steps, heads, rows, table_held, old, new),
            *(part.start, part.stop, is_neox),
        )

    enough = shared_from()
    if enough is None or turned.numel() * 4 < enough // 4:
        work(range(count))
        return
    parts = min(count, threads() * _PARTS)
    share(
        work,
        [range(count * one // parts, count * (one + 1) // parts) for one in range(parts)],
        threads() - 1,
    )


def _bits(tensor: torch.Tensor) -> tuple[Any, int]:
    """A tensor's numbers as an array of their bits, and what the kernel is told of them."""
    from kvloom.lmcache.rotation import BFLOAT16, FLOAT16, FLOAT32

    if tensor.dtype is torch.float32:
        return tensor.numpy().view(np.uint32), FLOAT32
    held = FLOAT16 if tensor.dtype is torch.float16 else BFLOAT16
    return tensor.view(torch.int16).numpy().view(np.uint16), held


def _picked(table: torch.Tensor, positions: Int64Array) -> torch.Tensor:
    """Rows of a table in memory of their own, by numpy: torch's threads hang in a forked child."""
    if table.dtype is torch.float64:
        return torch.from_numpy(table.numpy()[positions].astype(np.float32))
    bits = table.view(torch.int16 if table.itemsize == 2 else torch.int32)
    return torch.from_numpy(bits.numpy()[positions]).view(table.dtype)


def _head_size(key: Any, head_size: Any, head_stride: Any) -> int:
    """The elements of a head, once key has the shape that is said."""
    if not isinstance(key, torch.Tensor):
        raise TypeError(f"key: got {type(key).__name__}, takes a tensor")
    if key.dtype not in _DTYPES:
        raise TypeError(f"key: got {key.dtype}, takes float32, float16 or bfloat16")
    if key.device.type == "meta":
        raise ValueError("key: is on the meta device, where there are no values")
    size, stride = integer("head_size", head_size), integer("head_stride", head_stride)
    if size < 1:
        raise ValueError(f"head_size: got {size}, takes 1 or more")
    if stride < size:
        raise ValueError(f"head_stride: got {stride}, takes head_size ({size}) or more")
    if key.dim() != 3 or key.shape[2] != stride:
        raise ValueError(f"key: got shape {tuple(key.shape)}, takes [T, NH, {stride}]")
    return size


def _rotated(cos_sin_cache: Any, head_size: int, device: torch.device) -> int:
    """The elements of a head that are rotated: the columns of the table."""
    if not isinstance(cos_sin_cache, torch.Tensor):
        raise TypeError(f"cos_sin_cache: got {type(cos_sin_cache).__name__}, takes a tensor")
    if cos_sin_cache.dtype not in (*_DTYPES, torch.float64):
        takes = "float32, float16, bfloat16 or float64"
        raise TypeError(f"cos_sin_cache: got {cos_sin_cache.dtype}, takes {takes}")
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] % 2:
        raise ValueError(
            f"cos_sin_cache: got shape {tuple(cos_sin_cache.shape)}, takes [P, R] with an even R"
        )
    columns = int(cos_sin_cache.shape[1])
    if columns > head_size:
        raise ValueError(
            f"cos_sin_cache: got {columns} columns, takes {head_size} at most, the elements of a "
            "head"
        )
    if cos_sin_cache.device != device:
        raise ValueError(
            f"cos_sin_cache: is on {cos_sin_cache.device}, takes {device}, where key is"
        )
    return columns


def _positions(name: str, given: Any, count: int, limit: int) -> Int64Array:
    if isinstance(given, torch.Tensor):
        given = to_host(name, given)
    found = index_array(name, given)
    if len(found) != count:
        raise ValueError(f"{name}: got {len(found)}, takes {count}, one for each token of key")
    if count:
        for wrong in (found < 0, found >= limit):
            if wrong.any():
                at = int(wrong.argmax())
                raise ValueError(
                    f"{name}: got {found[at]} at position {at}, takes 0 to {limit - 1}, the rows "
                    "of cos_sin_cache"
                )
    return found
