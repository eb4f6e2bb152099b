"""Carries out what a call has to move, on one thread or on several, by or past the caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvloom.pool import share
from kvloom.processors import last_level_cache, threads

if TYPE_CHECKING:
    from kvloom._abi import Int64Array, Kernel
    from kvloom.select import Op

# Below this many bytes other threads fetch from each other's caches what one has in its own.
SHARED_FROM = 4 << 20
LINE = 64  # bytes of a cache line
# Several parts to a thread: one that starts late then does fewer of them.
PARTS_PER_THREAD = 4
# A call of fewer bytes than the first reads from caches anyway. The second are those of one slot or
# block, over all layers and planes: where it has fewer, sorting takes longer than it saves.
SORTED_FROM = 4 << 20
SORTED_EACH = 8 << 10
# The same for finding out whether a scatter writes a row twice. Where entries have fewer bytes,
# threads only share layers: one of them has all that may write a row.
COMPARED_EACH = 4 << 10

# All positions in order, of as many entries as any call has had.
_positions = np.arange(4096, dtype=np.int64)


class Move(NamedTuple):
    """What one group moves under one addressing: a kernel, and what it is given for all its work.

    ``order`` has the positions of ``slots_or_blocks`` that are moved; threads may share them where
    it is ``divisible``.
    """

    kernel: Kernel
    pointers: Int64Array
    chunk: int
    slots_or_blocks: Int64Array
    order: Int64Array
    geometry: Int64Array
    divisible: bool = True


class _Part(NamedTuple):
    move: Move
    layers: range
    numbers: range


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


def order_of(op: Op, index: Int64Array, first: int, last: int, nbytes: int) -> Int64Array:
    """The positions from ``first`` to ``last`` of slots or block ids, in the order to move them.

    A large gather reads the engine upwards: memory answers rows in ascending order faster than rows
    here and there, while for what is written, which waits in buffers, the order matters less. A
    scatter that is shared out leaves out what is written over: two threads must not write one row.
    """
    global _positions
    each = nbytes // max(1, last - first)
    if op == "gather" and nbytes >= SORTED_FROM and each >= SORTED_EACH:
        found = np.argsort(index[first:last])
        return found + first if first else found
    enough, moved = shared_from(), [index[first:last]]
    shared = op == "scatter" and enough is not None and nbytes >= enough
    if shared and divisible(op, last - first, nbytes) and repeats(moved):
        kept: Int64Array = np.flatnonzero(without_repeats(index[first:last]) >= 0)
        return kept + first
    positions = _positions
    if last > len(positions):
        _positions = positions = np.arange(max(last, 2 * len(positions)), dtype=np.int64)
    return positions[first:last]


def divisible(op: Op, entries: int, nbytes: int) -> bool:
    """Whether threads may share slots or block ids: not where a row could be two threads' own."""
    return op == "gather" or nbytes // max(1, entries) >= COMPARED_EACH


def repeats(indices: Sequence[Int64Array]) -> bool:
    """Whether a slot or block id is there twice; those that are passed over do not count."""
    entries = np.sort(np.concatenate(indices) if len(indices) > 1 else indices[0])
    return bool(((entries[1:] == entries[:-1]) & (entries[1:] >= 0)).any())


def without_repeats(index: Int64Array) -> Int64Array:
    """Slots or block ids, of each of which only the last is left, and −1 in the others' place."""
    found: Int64Array = np.full_like(index, -1)
    entries, from_behind = np.unique(index[::-1], return_index=True)
    found[len(index) - 1 - from_behind] = entries
    return found


def carry_out(moves: Sequence[Move], nbytes: int) -> None:
    """Move everything, ``nbytes`` in all; no move depends on another."""
    enough = shared_from()
    if enough is None or nbytes < enough:
        for move in moves:
            _carry_out(_Part(move, range(len(move.geometry)), range(len(move.order))))
        return
    helpers = threads() - 1
    count = PARTS_PER_THREAD * (helpers + 1)
    parts = [part for move in moves for part in _parts(move, count)]
    share(_carry_out, parts, min(helpers, len(parts) - 1))


def _carry_out(part: _Part) -> None:
    move, layers, numbers = part
    move.kernel(
        move.pointers,
        move.chunk,
        move.slots_or_blocks,
        move.order,
        move.geometry,
        layers.start,
        layers.stop,
        numbers.start,
        numbers.stop,
    )


def _parts(move: Move, count: int) -> Iterator[_Part]:
    """``move`` in about ``count`` equal parts: by layer, and where these are too few by token.

    Planes need no cut of their own: each part does both for its tokens.
    """
    layers, numbers = range(len(move.geometry)), range(len(move.order))
    each = -(-count // len(layers)) if move.divisible else 1
    for some in _split(layers, count):
        for part in _split(numbers, each):
            yield _Part(move, some, part)


def _split(whole: range, count: int) -> Iterator[range]:
    count = min(count, len(whole))
    for number in range(count):
        yield whole[len(whole) * number // count : len(whole) * (number + 1) // count]
