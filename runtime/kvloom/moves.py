"""Carries out what a call has to move, on one thread or on several, by or past the caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvloom.pool import share
from kvloom.processors import last_level_cache, threads

if TYPE_CHECKING:
    from kvloom._abi import Int64Array, Kernel

# Below this many bytes other threads fetch from each other's caches what one has in its own.
SHARED_FROM = 4 << 20
LINE = 64  # bytes of a cache line
# Several parts to a thread: one that starts late then does fewer of them.
PARTS_PER_THREAD = 4


class Move(NamedTuple):
    """What one group moves under one addressing: a kernel, and all its arguments but the layers."""

    kernel: Kernel
    pointers: Int64Array
    chunk: int
    slots_or_blocks: Int64Array
    geometry: Int64Array
    first: int
    last: int


class _Part(NamedTuple):
    move: Move
    layers: range
    positions: range


def streamed_from(run: int) -> int | None:
    """Bytes from which copies of ``run`` bytes are better stored past the caches; None for never.

    An eighth of the last-level cache is what one of several processors may count on; more would
    only flush what others keep there. Copies must be whole cache lines but for little: a line that
    is streamed in part is slower than one that is not.
    """
    whole = run % LINE == 0 and run >= 3 * LINE
    return last_level_cache() // 8 if whole or run >= 10 * LINE else None


def shared_from() -> int | None:
    """Bytes from which a call is shared out among threads; None where there is but one."""
    return SHARED_FROM if threads() > 1 else None


def carry_out(moves: Sequence[Move], nbytes: int) -> None:
    """Move everything, ``nbytes`` in all; no move depends on another."""
    enough = shared_from()
    if enough is None or nbytes < enough:
        for move in moves:
            _carry_out(_Part(move, range(len(move.geometry)), range(move.first, move.last)))
        return
    helpers = threads() - 1
    count = PARTS_PER_THREAD * (helpers + 1)
    parts = [part for move in moves for part in _parts(move, count)]
    share(_carry_out, parts, min(helpers, len(parts) - 1))


def _carry_out(part: _Part) -> None:
    move, layers, positions = part
    move.kernel(
        move.pointers,
        move.chunk,
        move.slots_or_blocks,
        move.geometry,
        layers.start,
        layers.stop,
        positions.start,
        positions.stop,
    )


def _parts(move: Move, count: int) -> Iterator[_Part]:
    """``move`` in about ``count`` equal parts: by layer, and where these are too few by token.

    Planes need no cut of their own: each part does both for its tokens.
    """
    layers, positions = range(len(move.geometry)), range(move.first, move.last)
    each = -(-count // len(layers))
    for some in _split(layers, count):
        for part in _split(positions, each):
            yield _Part(move, some, part)


def _split(whole: range, count: int) -> Iterator[range]:
    count = min(count, len(whole))
    for number in range(count):
        yield whole[len(whole) * number // count : len(whole) * (number + 1) // count]
