"""Moves cached keys to other positions: undoes one rotation and applies another, in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

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
# Elements that are converted at a time: they stay in a processor's own cache, and torch, which has
# threads of its own for larger tensors, converts them on the thread that asks.
_AT_ONCE = 1 << 15
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
    rotated = _rotated(cos_sin_cache, size)
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
    with torch.inference_mode():  # key may have been made in that mode too
        run = _turn_here if key.device.type == "cpu" else turn
        run(turned, table, old, new, bool(is_neox))


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
    count, heads, rotated = turned.shape
    width = min(heads, max(1, _AT_ONCE // rotated))
    step = max(1, _AT_ONCE // (width * rotated))
    kernel, rows = _kernel(), _rows_of(table)

    def work(part: range) -> None:
        with torch.inference_mode():  # which is a thread's own
            for first in range(part.start, part.stop, step):
                last = min(first + step, part.stop)
                undo, apply = rows(old[first:last]), rows(new[first:last])
                for head in range(0, heads, width):
                    some = turned[first:last, head : head + width]
                    wide = some.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
                    kernel(wide.numpy(), *undo, *apply, is_neox)
                    some.copy_(wide)

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


def _rows_of(table: torch.Tensor) -> Callable[[Int64Array], tuple[Any, Int64Array]]:
    """What gives, for positions, an array of float32 and the numbers of their rows in it.

    Of a table in another form only rows that are used are converted: it may have many more.
    """
    if table.dtype is torch.float32 and table.is_contiguous():
        whole = table.numpy()
        return lambda positions: (whole, positions)
    return lambda positions: (
        table.index_select(0, torch.from_numpy(positions)).float().numpy(),
        np.arange(len(positions)),
    )


@cache
def _kernel() -> Callable[..., None]:
    """Turn a contiguous float32 array [T, NH, R], given each token's rows in two tables."""
    from kvloom._kernel import kernel

    def rotate(
        key: Any, undo_rows: Any, old: Any, apply_rows: Any, new: Any, is_neox: bool
    ) -> None:
        half = key.shape[2] // 2
        for token in range(key.shape[0]):
            undo, apply = undo_rows[old[token]], apply_rows[new[token]]
            for head in range(key.shape[1]):
                row = key[token, head]
                if is_neox:  # a loop of its own, which is compiled to vectors
                    for i in range(half):
                        x, y = row[i], row[i + half]
                        x, y = x * undo[i] + y * undo[i + half], y * undo[i] - x * undo[i + half]
                        row[i] = x * apply[i] - y * apply[i + half]
                        row[i + half] = y * apply[i] + x * apply[i + half]
                else:
                    for i in range(half):
                        x, y = row[2 * i], row[2 * i + 1]
                        x, y = x * undo[i] + y * undo[i + half], y * undo[i] - x * undo[i + half]
                        row[2 * i] = x * apply[i] - y * apply[i + half]
                        row[2 * i + 1] = y * apply[i] + x * apply[i + half]

    found: Any = kernel(rotate)
    # Compiled before anything changes: keeping it on a full disk fails, and only the first time.
    table, none = np.zeros((1, 2), np.float32), np.zeros(0, np.int64)
    try:
        found(np.zeros((0, 1, 2), np.float32), table, none, table, none, True)
    except OSError:
        if not found.signatures:
            raise
    return cast("Callable[..., None]", found)


def _head_size(key: Any, head_size: Any, head_stride: Any) -> int:
    """The elements of a head, once key has the shape that is said."""
    if not isinstance(key, torch.Tensor):
        raise TypeError(f"key: got {type(key).__name__}, takes a tensor")
    if key.dtype not in _DTYPES:
        raise TypeError(f"key: got {key.dtype}, takes float32, float16 or bfloat16")
    size, stride = integer("head_size", head_size), integer("head_stride", head_stride)
    if size < 1:
        raise ValueError(f"head_size: got {size}, takes 1 or more")
    if stride < size:
        raise ValueError(f"head_stride: got {stride}, takes head_size ({size}) or more")
    if key.dim() != 3 or key.shape[2] != stride:
        raise ValueError(f"key: got shape {tuple(key.shape)}, takes [T, NH, {stride}]")
    return size


def _rotated(cos_sin_cache: Any, head_size: int) -> int:
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
