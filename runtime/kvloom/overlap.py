"""Whether strided tensors share bytes, with themselves or with each other, and at which indices.

Two elements share a byte where their addresses differ by less than an element. With strides s and
index differences v that is ``-size < distance + Σ s·v < size``. The search takes strides from the
largest down and keeps the values of v from which the smaller strides can still reach the target.
It is exact for any strides. Where strides nest, as in a cache, at most two values of each v are
kept, so it is quick too; all pairs of tensors with the same strides are searched at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from math import gcd
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from kvloom._abi import Int64Array
    from kvloom.geometry import TensorFacts

# Strides in bytes with their extents, the largest first, and the contiguous bytes inside.
_Steps: TypeAlias = tuple[tuple[tuple[int, int], ...], int]
Index: TypeAlias = tuple[int, ...]

# States of a search after which strides count as too entangled to be told apart.
_MOST_STATES = 1 << 20


class _Term(NamedTuple):
    """A stride in bytes and the range of an index difference along it, both ends included."""

    stride: int
    least: int
    greatest: int


def span(tensor: TensorFacts) -> int:
    """Bytes from a tensor's first element to behind its last; 0 for a tensor without elements."""
    if 0 in tensor.shape:
        return 0
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))
    return (reach + 1) * tensor.itemsize


def check_self(tensor: TensorFacts) -> None:
    """ValueError, with their indices, where two elements of ``tensor`` share bytes."""
    pair = _colliding(tensor)
    if pair is not None:
        raise ValueError(
            f"{tensor.what}: got shape {tensor.shape} with strides {tensor.strides}, in which "
            f"elements {pair[0]} and {pair[1]} share bytes"
        )


def check_apart(tensors: Sequence[TensorFacts]) -> None:
    """ValueError, with the indices, where two of ``tensors`` share bytes."""
    firsts = np.array([tensor.address for tensor in tensors], np.int64)
    lasts = firsts + np.array([span(tensor) for tensor in tensors], np.int64)
    meet = (firsts[:, None] < lasts) & (firsts < lasts[:, None])
    ones, others = np.nonzero(np.triu(meet, 1))
    if not len(ones):
        return
    merged = [_merge(*_steps(tensor)) for tensor in tensors]
    kinds = {steps: number for number, steps in enumerate(dict.fromkeys(merged))}
    kind = np.array([kinds[steps] for steps in merged], np.int64)
    pair_kind = kind[ones] * len(kinds) + kind[others]
    for number in np.unique(pair_kind):
        pairs = np.nonzero(pair_kind == number)[0]
        a, b = ones[pairs], others[pairs]
        what = _pair(tensors[a[0]], tensors[b[0]])
        met = _meeting(merged[a[0]], merged[b[0]], firsts[b] - firsts[a], what)
        if met is not None:
            _refuse(tensors[a[met[0]]], tensors[b[met[0]]])


class Ranges:
    """The address ranges of tensors, for a quick first answer to what a chunk shares bytes with."""

    def __init__(self, tensors: Sequence[TensorFacts]) -> None:
        self._tensors = tuple(tensors)
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in sorted((one.address, one.address + span(one)) for one in tensors):
            if self._lasts and first < self._lasts[-1]:
                self._lasts[-1] = max(last, self._lasts[-1])
            else:
                self._firsts.append(first)
                self._lasts.append(last)

    def meet(self, first: int, nbytes: int) -> bool:
        """Whether ``nbytes`` bytes from address ``first`` on reach into a range."""
        place = bisect_right(self._lasts, first)
        return nbytes > 0 and place < len(self._firsts) and self._firsts[place] < first + nbytes

    def check_apart(self, tensor: TensorFacts) -> None:
        """ValueError, with the indices, where ``tensor`` shares bytes with one of the tensors."""
        first, last = tensor.address, tensor.address + span(tensor)
        for other in self._tensors:
            if first < other.address + span(other) and other.address < last:
                check_apart([tensor, other])


def _pair(one: TensorFacts, other: TensorFacts) -> str:
    return f"{one.what} and {other.what}"


def _refuse(one: TensorFacts, other: TensorFacts) -> NoReturn:
    """Say which elements of two tensors that share bytes lie on each other."""
    distance = np.array([other.address - one.address], np.int64)
    met = _meeting(_steps(one), _steps(other), distance, _pair(one, other))
    assert met is not None
    steps = met[1]
    back = _index(one, {stride: -step for stride, step in steps.items() if step < 0})
    forth = _index(other, {stride: step for stride, step in steps.items() if step > 0})
    raise ValueError(
        f"{_pair(one, other)} share bytes: element {back} of one and {forth} of the other"
    )


def _colliding(tensor: TensorFacts) -> tuple[Index, Index] | None:
    """Two indices of ``tensor`` that share bytes, or None."""
    steps, size = _steps(tensor)
    rank = range(len(tensor.shape))
    moving = [dim for dim in rank if tensor.shape[dim] > 1]
    moving.sort(key=lambda dim: tensor.strides[dim], reverse=True)
    still = [dim for dim in moving if tensor.strides[dim] == 0]
    if still:
        return tuple(0 for _ in rank), tuple(int(dim == still[0]) for dim in rank)
    if _nested(steps, size):
        return None
    # Of a pair, one is ahead in the first stride that parts them: that difference is positive.
    for number, first in enumerate(moving):
        ahead = [_Term(tensor.strides[first] * size, 1, tensor.shape[first] - 1)]
        ahead += [
            _Term(tensor.strides[dim] * size, 1 - tensor.shape[dim], tensor.shape[dim] - 1)
            for dim in moving[number + 1 :]
        ]
        met = _search(np.zeros(1, np.int64), ahead, size, size, tensor.what)
        if met is not None:
            taken = dict(zip(moving[number:], met[1], strict=True))
            one = tuple(max(0, -taken.get(dim, 0)) for dim in rank)
            return one, tuple(max(0, taken.get(dim, 0)) for dim in rank)
    return None


def _meeting(
    one: _Steps, other: _Steps, distances: Int64Array, what: str
) -> tuple[int, dict[int, int]] | None:
    """Which of these ``distances`` from one tensor to another makes them share bytes, and where.

    The steps by stride are negative where they are taken in the one, positive in the other.
    """
    least: Counter[int] = Counter()
    greatest: Counter[int] = Counter()
    for stride, extent in one[0]:
        least[stride] += extent - 1
    for stride, extent in other[0]:
        greatest[stride] += extent - 1
    strides = sorted({*least, *greatest}, reverse=True)
    terms = [_Term(stride, -least[stride], greatest[stride]) for stride in strides]
    met = _search(distances, terms, other[1], one[1], what)
    return None if met is None else (met[0], dict(zip(strides, met[1], strict=True)))


def _search(
    distances: Int64Array, terms: Sequence[_Term], below: int, above: int, what: str
) -> tuple[int, list[int]] | None:
    """A position in ``distances`` from which steps lead to between ``-below`` and ``above``.

    With it the number of steps along each term: ``-below < distance + Σ stride·steps < above``.
    """
    which, at = np.arange(len(distances)), distances
    taken: list[Int64Array] = []
    for number, (stride, least, greatest) in enumerate(terms):
        # Steps only lead to what is congruent modulo all strides that are left.
        near = (at + below - 1) % gcd(*(term.stride for term in terms[number:])) < below + above - 1
        which, at, taken = which[near], at[near], [steps[near] for steps in taken]
        back = sum(term.stride * term.least for term in terms[number + 1 :])
        forth = sum(term.stride * term.greatest for term in terms[number + 1 :])
        lowest = np.maximum((-below - forth - at) // stride + 1, least)
        highest = np.minimum((above - back - at - 1) // stride, greatest)
        counts = np.maximum(highest - lowest + 1, 0)
        states = int(counts.sum())
        if states > _MOST_STATES:
            raise ValueError(f"{what}: strides too entangled to tell whether they share bytes")
        parent = np.repeat(np.arange(len(at)), counts)
        steps = lowest[parent] + np.arange(states) - (np.cumsum(counts) - counts)[parent]
        which, at = which[parent], at[parent] + stride * steps
        taken = [*(earlier[parent] for earlier in taken), steps]
    hits = np.nonzero((at > -below) & (at < above))[0]
    if not len(hits):
        return None
    return int(which[hits[0]]), [int(steps[hits[0]]) for steps in taken]


def _steps(tensor: TensorFacts) -> _Steps:
    steps = zip(tensor.strides, tensor.shape, strict=True)
    moving = [(step * tensor.itemsize, size) for step, size in steps if step > 0 and size > 1]
    return tuple(sorted(moving, reverse=True)), tensor.itemsize


def _merge(steps: Sequence[tuple[int, int]], run: int) -> _Steps:
    """The same bytes in fewer steps: what lies end to end is drawn together."""
    merged: list[tuple[int, int]] = []
    for stride, extent in reversed(steps):
        if not merged and stride == run:
            run *= extent
        elif merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * extent)
        else:
            merged.append((stride, extent))
    return tuple(reversed(merged)), run


def _nested(steps: Sequence[tuple[int, int]], reach: int) -> bool:
    """Whether every step passes all that is inside it, so that no two elements share a byte."""
    for stride, extent in reversed(steps):
        if stride < reach:
            return False
        reach += stride * (extent - 1)
    return True


def _index(tensor: TensorFacts, steps: Mapping[int, int]) -> Index:
    """The index in ``tensor`` that is this many steps along each stride in bytes."""
    left = Counter(steps)
    index = []
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        index.append(min(size - 1, left[stride * tensor.itemsize]))
        left[stride * tensor.itemsize] -= index[-1]
    return tuple(index)
