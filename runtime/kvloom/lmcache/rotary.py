"""Moves cached keys to other positions: undoes one rotation and applies another, in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kvloom.arguments import index_array, integer
from kvloom.moves import shared_from
from kvloom.pool import share
from kvloom.processors import threads
from kvloom.tensors import to_host, unaddressable

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
    heads = _heads(key, head_size, head_stride)
    table = _table(cos_sin_cache, heads)
    if not isinstance(is_neox, (bool, int)):
        raise TypeError(f"is_neox: got {is_neox!r}, takes a bool")
    count, limit = heads.shape[0], len(table)
    old = _positions("old_positions", old_positions, count, limit)
    new = _positions("new_positions", new_positions, count, limit)
    turned = heads[..., : table.shape[1]]
    if turned.numel() == 0:
        return
    if key.device.type == "cpu":
        _turn_here(turned, table, old, new, bool(is_neox))
    else:
        turn(turned, table, old, new, bool(is_neox))


def turn(
    turned: torch.Tensor, table: torch.Tensor, old: Int64Array, new: Int64Array, is_neox: bool
) -> None:
    """Turn [T, NH, R] by torch's own arithmetic, on whatever device it is."""
    half = table.shape[1] // 2
    wide = turned.float()
    x, y = (wide[..., :half], wide[..., half:]) if is_neox else (wide[..., ::2], wide[..., 1::2])
    (c, s), (c2, s2) = (
        table[torch.from_numpy(at).to(table.device)][:, None].split(half, -1) for at in (old, new)
    )
    x, y = x * c + y * s, y * c - x * s
    x, y = x * c2 - y * s2, y * c2 + x * s2
    turned.copy_(torch.cat([x, y], -1) if is_neox else torch.stack([x, y], -1).flatten(-2))


def _turn_here(
    turned: torch.Tensor, table: torch.Tensor, old: Int64Array, new: Int64Array, is_neox: bool
) -> None:
    """Turn [T, NH, R] on the CPU, on several threads where that pays."""
    step = max(1, _AT_ONCE // (turned.shape[1] * turned.shape[2]))
    kernel, cos_sin = _kernel(), table.numpy()
    step_x, step_y = (1, table.shape[1] // 2) if is_neox else (2, 1)

    def work(part: range) -> None:
        for first in range(part.start, part.stop, step):
            last = min(first + step, part.stop)
            some = turned[first:last]
            wide = some.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
            kernel(wide.numpy(), cos_sin, old[first:last], new[first:last], step_x, step_y)
            some.copy_(wide)

    count, enough = len(turned), shared_from()
    if enough is None or turned.numel() * 4 < enough // 4:
        work(range(count))
        return
    parts = min(count, threads() * _PARTS)
    share(
        work,
        [range(count * one // parts, count * (one + 1) // parts) for one in range(parts)],
        threads() - 1,
    )


@cache
def _kernel() -> Callable[..., None]:
    """Turn a contiguous float32 array; pair i is elements i·step_x and i·step_x + step_y."""
    from kvloom._kernel import kernel

    def rotate(key: Any, cos_sin: Any, old: Any, new: Any, step_x: int, step_y: int) -> None:
        half = cos_sin.shape[1] // 2
        for token in range(key.shape[0]):
            undo, apply = cos_sin[old[token]], cos_sin[new[token]]
            for head in range(key.shape[1]):
                row = key[token, head]
                if step_x == 1:  # a loop of its own, which is compiled to vectors
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

    return kernel(rotate)


def _heads(key: Any, head_size: Any, head_stride: Any) -> torch.Tensor:
    """The part of ``key`` that may be turned, [T, NH, head_size]."""
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
    reason = "is not strided" if key.layout is not torch.strided else unaddressable(key)
    if reason:
        raise ValueError(f"key: {reason}")
    if key.requires_grad:
        raise ValueError("key: requires grad, which a change in place would not track; detach it")
    return key[..., :size]


def _table(cos_sin_cache: Any, heads: torch.Tensor) -> torch.Tensor:
    """The cosines and sines in float32."""
    if not isinstance(cos_sin_cache, torch.Tensor) or not cos_sin_cache.is_floating_point():
        kind = getattr(cos_sin_cache, "dtype", type(cos_sin_cache).__name__)
        raise TypeError(f"cos_sin_cache: got {kind}, takes a tensor of floating point numbers")
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] % 2:
        raise ValueError(
            f"cos_sin_cache: got shape {tuple(cos_sin_cache.shape)}, takes [P, R] with an even R"
        )
    if cos_sin_cache.shape[1] > heads.shape[2]:
        raise ValueError(
            f"cos_sin_cache: got {cos_sin_cache.shape[1]} columns, takes {heads.shape[2]} at most, "
            "the elements of a head"
        )
    if cos_sin_cache.device != heads.device:
        raise ValueError(
            f"cos_sin_cache: is on {cos_sin_cache.device}, takes {heads.device}, where key is"
        )
    return cos_sin_cache.detach().to(torch.float32).contiguous()


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
