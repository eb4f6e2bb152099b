"""Where every element of a cache lies, and the comparison of what a reading of a spec moves.

Moves are compared as the fewest that do the same, so a reading may take its steps in any order
and size. What differs is said in the names of elements.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from kvloom_codegen.walk import Element, Geometry


class ProofError(Exception):
    """An IR that would move wrong bytes; the message names the elements that show it."""


class Move(NamedTuple):
    """Neighbouring bits that go from one side to the other together.

    Tensors are allocations of their own; views of one buffer are all tensor 0.
    """

    tensor: int
    engine: int
    chunk: int
    bits: int


class Located(NamedTuple):
    """One element, and where it lies on both sides when a chunk holds every slot in order."""

    element: Element
    move: Move


@dataclass(frozen=True)
class Table:
    """Where every element of a cache lies; ``axes`` are those that its elements are named by."""

    located: tuple[Located, ...]
    geometry: Geometry
    axes: frozenset[str]

    @cached_property
    def _by_slot(self) -> dict[int, list[Located]]:
        found: dict[int, list[Located]] = {slot: [] for slot in range(self.geometry.tokens)}
        for one in sorted(self.located):
            found[self._slot(one.element)].append(one)
        return found

    def _slot(self, element: Element) -> int:
        return element.block * self.geometry.block_size + element.token

    def moves(self, slots: Sequence[int], layers: range) -> list[Move]:
        """The moves where chunk token t belongs to ``slots[t]``; a negative slot has none."""
        return [
            Move(there.move.tensor, there.move.engine, here.move.chunk, here.move.bits)
            for token, slot in enumerate(slots)
            if slot >= 0
            for there, here in zip(self._by_slot[slot], self._by_slot[token], strict=True)
            if here.element.layer in layers
        ]

    def at_engine(self, tensor: int, bit: int) -> str:
        """What lies at a place of the engine, in words."""
        inside = [one for one in self.located if one.move.tensor == tensor]
        for element, move in inside:
            if move.engine <= bit < move.engine + move.bits:
                return self._named(element, (f"block {element.block}", f"token {element.token}"))
        starts = [move.engine for _, move in inside]
        between = bool(starts) and min(starts) <= bit < max(starts)
        return "padding" if between else "padding or outside"

    def at_chunk(self, bit: int) -> str:
        """What lies at a bit of the chunk, in words."""
        for element, move in self.located:
            if move.chunk <= bit < move.chunk + move.bits:
                return self._named(element, (f"chunk token {self._slot(element)}",))
        return "outside the chunk"

    def _named(self, element: Element, token: tuple[str, ...]) -> str:
        words: list[str] = []
        for axis in ("layer", "kv", "token", "head"):
            if axis == "token":
                words += token
            elif axis in self.axes:
                words.append(f"{axis} {getattr(element, axis)}")
        words += [element.field] if element.field else []
        return " ".join([*words, f"elem {element.elem}"])


def merged(moves: Iterable[Move]) -> list[Move]:
    """The fewest moves that do the same, in order of the engine."""
    found: list[Move] = []
    for move in sorted(move for move in moves if move.bits > 0):
        last = found[-1] if found else None
        if last is not None and move[:3] == (last[0], last[1] + last[3], last[2] + last[3]):
            found[-1] = Move(last[0], last[1], last[2], last[3] + move[3])
        else:
            found.append(move)
    return found


def compare(reading: str, found: Iterable[Move], expected: list[Move], table: Table) -> None:
    """``found`` moves all that is ``expected``, each bit once, and nothing else.

    ``expected`` is merged and one-to-one. ProofError, led by ``reading``, names what differs.
    """
    moves = merged(found)
    if moves == expected:
        return
    one_to_one(reading, moves, table)
    for move in moves:
        _belongs(reading, move, expected, table)
    raise ProofError(f"{reading}: never moves {_place(_missed(moves, expected), table)}")


def one_to_one(reading: str, moves: list[Move], table: Table) -> None:
    """No bit of either side is in two of the merged ``moves``; ProofError where one is."""
    for one, two in pairwise(moves):
        if one.tensor == two.tensor and two.engine < one.engine + one.bits:
            first = _chunk_place(one.chunk + two.engine - one.engine, table)
            raise ProofError(
                f"{reading}: two elements collide at {_place(two, table)}: {first} "
                f"and {_chunk_place(two.chunk, table)}"
            )
    for one, two in pairwise(sorted(moves, key=lambda move: move.chunk)):
        if two.chunk < one.chunk + one.bits:
            first = _place(one._replace(engine=one.engine + two.chunk - one.chunk), table)
            raise ProofError(
                f"{reading}: two elements collide at {_chunk_place(two.chunk, table)}: {first} "
                f"and {_place(two, table)}"
            )


def _belongs(reading: str, move: Move, expected: list[Move], table: Table) -> None:
    """Every bit of ``move`` is expected to go where it goes."""
    at, end = move.engine, move.engine + move.bits
    while at < end:
        here = move._replace(engine=at, chunk=move.chunk + at - move.engine)
        i = bisect_right(expected, here[:2], key=lambda one: one[:2]) - 1
        owner = expected[i] if i >= 0 else None
        if owner is None or owner.tensor != here.tensor or owner.engine + owner.bits <= at:
            raise ProofError(
                f"{reading}: touches {_place(here, table)}, which it must leave alone, "
                f"for {_chunk_place(here.chunk, table)}"
            )
        right = owner.chunk + at - owner.engine
        if here.chunk != right:
            raise ProofError(
                f"{reading}: moves {_place(here, table)} with {_chunk_place(here.chunk, table)}, "
                f"but it belongs with {_chunk_place(right, table)}"
            )
        at = owner.engine + owner.bits


def _missed(moves: list[Move], expected: list[Move]) -> Move:
    """The first bit that is expected to move and does not."""
    for one in expected:
        at = one.engine
        for move in moves:
            if move.tensor == one.tensor and move.engine <= at < move.engine + move.bits:
                at = move.engine + move.bits
        if at < one.engine + one.bits:
            return one._replace(engine=at)
    raise AssertionError("nothing is missed")


def _place(move: Move, table: Table) -> str:
    what = table.at_engine(move.tensor, move.engine)
    return f"engine bit {move.engine} of tensor {move.tensor} ({what})"


def _chunk_place(bit: int, table: Table) -> str:
    return f"chunk bit {bit} ({table.at_chunk(bit)})"
