"""Transfers on several threads, past the caches, from many callers and in forked children."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvloom
from fork import in_a_child
from kvloom import moves
from kvloom.moves import Move, carry_out, order_of, streamed_from
from kvloom.select import Op

NHD = "NL_X_TWO_NB_BS_NH_HS"


def recorder(done: list[tuple[int, int, int, int]]) -> Any:
    def kernel(_: Any, __: int, ___: Any, order: Any, ____: Any, *part: int) -> None:
        done.append((*part[:2], *(int(order[0]) + number for number in part[2:])))

    return kernel


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "threads", lambda: 3)


@given(
    layers=st.integers(1, 40),
    first=st.integers(0, 5),
    count=st.integers(1, 60),
    threads=st.integers(1, 5),
)
def test_every_layer_of_every_position_is_moved_once(
    layers: int, first: int, count: int, threads: int
) -> None:
    done: list[tuple[int, int, int, int]] = []
    nothing = np.zeros(0, np.int64)
    order = np.arange(first, first + count)
    move = Move(recorder(done), nothing, 0, nothing, order, np.zeros((layers, 1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves, "threads", lambda: threads)
        carry_out([move, move], moves.SHARED_FROM)
    cells = Counter(
        (layer, position)
        for a, b, c, d in done
        for layer in range(a, b)
        for position in range(c, d)
    )
    assert set(cells) == {(a, b) for a in range(layers) for b in range(first, first + count)}
    assert set(cells.values()) == {2}
    if threads > 1 and layers * count >= moves.PARTS_PER_THREAD * threads:
        assert len(done) >= 2 * threads


@given(index=st.lists(st.integers(-1, 50), max_size=60), large=st.booleans(), data=st.data())
def test_a_large_gather_reads_the_engine_upwards_and_all_else_is_moved_in_order(
    index: list[int], large: bool, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(index)))
    last = data.draw(st.integers(first, len(index)))
    nbytes = moves.SORTED_FROM - (not large)
    ops: tuple[Op, ...] = ("gather", "scatter")
    for op in ops:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moves, "threads", lambda: 1)
            order = order_of(op, np.array(index, np.int64), first, last, nbytes)
        assert order.dtype == np.int64
        assert order.flags.carray
        if op == "gather" and large:
            assert [index[at] for at in order] == sorted(index[first:last])
            assert sorted(order) == list(range(first, last))
        else:
            assert list(order) == list(range(first, last))


def test_entries_of_few_bytes_are_not_sorted() -> None:
    index = np.arange(2 * moves.SORTED_FROM // moves.SORTED_EACH)[::-1].copy()
    assert order_of("gather", index, 0, len(index), 2 * moves.SORTED_FROM)[0] == len(index) - 1
    assert order_of("gather", index, 0, len(index), 2 * moves.SORTED_FROM - 1)[0] == 0


@given(index=st.lists(st.integers(-2, 9), max_size=12), data=st.data())
def test_a_scatter_that_is_shared_out_writes_no_row_twice(
    index: list[int], data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(index)))
    last = data.draw(st.integers(first, len(index)))
    moved = index[first:last]
    named = [entry for entry in moved if entry >= 0]
    assert moves.repeats([np.array(moved, np.int64)]) == (len(named) > len(set(named)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves, "threads", lambda: 3)
        order = order_of("scatter", np.array(index, np.int64), first, last, moves.SHARED_FROM)
        alone = order_of("scatter", np.array(index, np.int64), first, last, moves.SHARED_FROM - 1)
    assert list(alone) == list(range(first, last))
    assert order.dtype == np.int64
    assert list(order) == sorted(order)
    written = [index[at] for at in order if index[at] >= 0]
    assert sorted(written) == sorted(set(named))
    for at in order:  # the last of each is left
        assert index[at] < 0 or index[at] not in index[at + 1 : last]


def test_entries_of_few_bytes_are_shared_by_layer_alone(three_threads: None) -> None:
    """Comparing them would cost more than it gains; each thread writes layers of its own."""
    few = moves.SHARED_FROM // moves.COMPARED_EACH + 1
    index = np.zeros(few, np.int64)
    assert not moves.divisible("scatter", few, moves.SHARED_FROM)
    assert moves.divisible("scatter", few - 1, moves.SHARED_FROM)
    assert moves.divisible("gather", few, moves.SHARED_FROM)
    assert len(order_of("scatter", index, 0, few, moves.SHARED_FROM)) == few
    done: list[tuple[int, int, int, int]] = []
    order, table = np.arange(few), np.zeros((5, 1))
    move = Move(recorder(done), index, 0, index, order, table, divisible=False)
    carry_out([move], moves.SHARED_FROM)
    assert sorted(part[:2] for part in done) == [(layer, layer + 1) for layer in range(5)]
    assert {part[2:] for part in done} == {(0, few)}


def test_repeats_are_found_across_chunks_and_in_the_part_of_a_block() -> None:
    """Chunks with a block in common are written one after the other; so are a block's parts."""
    cache = kvloom.layout(3).bind([torch.zeros(8, 4, 6)])
    chunk = torch.zeros(1, 8, 6)
    for ids, stages in (([1, 2, 3, 4], 1), ([1, 2, 3, 1], 2)):
        request = cache.request("blocks", ids, 0)
        parts = [(request.part(a, a + 2, 4), "chunk", chunk.clone()) for a in (0, 2)]
        assert len(cache.prepare_all("scatter", parts, None).stages) == stages
        assert len(cache.prepare_all("gather", parts, None).stages) == 1
    for ids, stages in (([1, 2], 1), ([1, 1], 2)):
        request = cache.request("blocks", ids, 0)
        for op, expected in (("scatter", stages), ("gather", 1)):
            found = cache.prepare(op, request, "chunk", (chunk[:, :6],))  # type: ignore[arg-type]
            assert len(found.stages) == expected


def test_an_order_may_be_longer_than_any_before() -> None:
    count = 3 * len(moves._positions)
    order = order_of("scatter", np.zeros(count, np.int64), count - 2, count, 0)
    assert list(order) == [count - 2, count - 1]


def test_a_small_call_stays_on_its_thread(
    monkeypatch: pytest.MonkeyPatch, three_threads: None
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("shared")

    monkeypatch.setattr(moves, "share", refuse)
    done: list[tuple[int, int, int, int]] = []
    nothing = np.zeros(0, np.int64)
    move = Move(recorder(done), nothing, 0, nothing, np.arange(2, 9), np.zeros((7, 1)))
    carry_out([move], moves.SHARED_FROM - 1)
    assert done == [(0, 7, 2, 9)]
    with pytest.raises(AssertionError, match="shared"):
        carry_out([move], moves.SHARED_FROM)


@pytest.mark.parametrize(
    ("run", "streamed"),
    [(192, True), (256, True), (2048, True), (1000, True), (264, False), (128, False), (64, False)],
)
def test_only_whole_cache_lines_are_worth_streaming(run: int, streamed: bool) -> None:
    assert (streamed_from(run) is not None) is streamed


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_a_selection_says_from_which_size_on_it_shares_and_streams(
    op: Any, monkeypatch: pytest.MonkeyPatch, three_threads: None
) -> None:
    monkeypatch.setattr(moves, "last_level_cache", lambda: 8 * 4096)
    monkeypatch.setattr(moves, "SHARED_FROM", 3000)
    shared: list[int] = []
    monkeypatch.setattr(moves, "share", lambda _, parts, __: shared.append(len(parts)))
    loaded: list[bool] = []
    load = kvloom.Cache._load_kernels

    def spy(cache: kvloom.Cache, streaming: bool) -> Any:
        loaded.append(streaming)
        return load(cache, streaming)

    monkeypatch.setattr(kvloom.Cache, "_load_kernels", spy)
    tensors = [torch.zeros(2, 8, 4, 2, 64, dtype=torch.float16) for _ in range(2)]
    cache = kvloom.layout(NHD).bind(tensors)  # 1024 bytes a token
    chosen = cache.select(op, "slots")
    assert (chosen.shared_from, chosen.streamed_from) == (3, 4)
    assert str(chosen).endswith("on several threads from 3 tokens; past the caches from 4 tokens")
    for tokens in (2, 3, 4):
        chunk = cache.empty_chunk(tokens)
        cache._kernels.clear()
        move = (
            cache.scatter
            if op == "scatter"
            else lambda out, slots: cache.gather(out=out, slots=slots)
        )
        move(chunk, slots=range(tokens))
    assert len(shared) == 2
    assert loaded == [False, False, True]


# --- real transfers ------------------------------------------------------------------------------


class Trip:
    """Every token of a cache moves to another one by way of a chunk, in random order.

    Made before a fork and checked with numpy: torch's own threads hang in a forked child.
    """

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        layout, shape = kvloom.layout(NHD), (4, 2, 64, 16, 4, 128)
        self.given = random.integers(0, 256, shape, np.uint8)
        self.found = np.zeros_like(self.given)
        self.source = layout.bind([torch.from_numpy(one) for one in self.given])
        self.target = layout.bind([torch.from_numpy(one) for one in self.found])
        self.slots = random.permutation(self.source.capacity)

    def arrives(self) -> bool:
        self.found[:] = 0
        self.target.scatter(self.source.gather(slots=self.slots), slots=self.slots)
        return bool((self.found == self.given).all())


@pytest.fixture
def always_shared(monkeypatch: pytest.MonkeyPatch, three_threads: None) -> None:
    monkeypatch.setattr(moves, "SHARED_FROM", 0)


def test_eight_callers_at_once_move_the_right_bytes(always_shared: None) -> None:
    trips, right = [Trip(seed) for seed in range(8)], []

    def call(trip: Trip) -> None:
        right.append(all(trip.arrives() for _ in range(5)))

    callers = [threading.Thread(target=call, args=(trip,)) for trip in trips]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert right == [True] * 8


def test_a_forked_child_moves_the_right_bytes_after_its_parent_did(always_shared: None) -> None:
    trip = Trip(0)
    assert trip.arrives()
    assert in_a_child(trip.arrives)
    assert trip.arrives()


def test_a_child_forked_while_others_move_moves_the_right_bytes(always_shared: None) -> None:
    mine, stop = Trip(0), threading.Event()

    def keep_moving(trip: Trip) -> None:
        while not stop.is_set():
            trip.arrives()

    others = [threading.Thread(target=keep_moving, args=(Trip(seed),)) for seed in (1, 2)]
    for other in others:
        other.start()
    try:
        assert all(in_a_child(mine.arrives) for _ in range(5))
    finally:
        stop.set()
        for other in others:
            other.join()


FORKED_WHILE_COMPILING = """
import os, signal, sys, threading, time
import numba, torch, kvloom
from numba.core import event

tensors = [torch.zeros(2, 8, 16, 2, 8, dtype=torch.int16)]
cache = kvloom.layout("NL_X_TWO_NB_BS_NH_HS").bind(tensors)
begun = threading.Event()
event.register("numba:compile", event.TimingListener())
real = event.TimingListener.on_start
event.TimingListener.on_start = lambda self, *a: (begun.set(), real(self, *a))[1]
other = threading.Thread(target=lambda: cache.gather(slots=[1, 2]))
other.start()
assert begun.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(60)
    cache.scatter(cache.gather(slots=[3]), slots=[4])
    os._exit(0)
other.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
"""


def test_a_child_forked_while_another_thread_compiles_does_not_hang(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED_WHILE_COMPILING],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stderr
