"""Threads share out work: each part once, whoever calls, and again after a fork or an error."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from fork import in_a_child
from kvloom import pool
from kvloom.pool import share


def together(count: int, action: Callable[[int], None]) -> None:
    """Run ``action`` on so many threads, all of which start at once; the first error is raised."""
    barrier, errors = threading.Barrier(count), []

    def run(number: int) -> None:
        barrier.wait()
        try:
            action(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


@pytest.mark.parametrize("helpers", [0, 1, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_every_part_is_done_once_when_the_call_returns(count: int, helpers: int) -> None:
    done: list[int] = []
    share(done.append, range(count), helpers)
    assert sorted(done) == list(range(count))


def test_parts_run_at_the_same_time_on_other_threads() -> None:
    barrier, names = threading.Barrier(3), set()

    def meet(_: int) -> None:
        barrier.wait(timeout=30)
        names.add(threading.current_thread().name)

    share(meet, range(3), 2)
    assert threading.current_thread().name in names
    assert {name for name in names if name.startswith("kvloom-")} == names - {
        threading.current_thread().name
    }


def test_threads_are_kept_from_call_to_call() -> None:
    share(lambda _: None, range(9), 2)
    before = {thread.ident for thread in threading.enumerate()}
    for _ in range(50):
        share(lambda _: None, range(9), 2)
    assert {thread.ident for thread in threading.enumerate()} == before


def test_many_callers_get_each_their_own_parts_done() -> None:
    def call(number: int) -> None:
        for _ in range(50):
            done: list[tuple[int, int]] = []
            share(done.append, [(number, part) for part in range(20)], 2)
            assert Counter(done) == Counter((number, part) for part in range(20))

    together(8, call)


def test_a_caller_does_not_wait_for_busy_threads() -> None:
    release, begun = threading.Event(), threading.Semaphore(0)

    def block(_: int) -> None:
        begun.release()
        release.wait(timeout=60)

    others = [threading.Thread(target=share, args=(block, range(3), 2)) for _ in range(3)]
    for other in others:
        other.start()
    for _ in range(3):  # at least one each: all threads of the pool are taken
        begun.acquire()
    done: list[int] = []
    share(done.append, range(10), 2)
    assert sorted(done) == list(range(10))
    release.set()
    for other in others:
        other.join()


def test_the_first_error_is_raised_once_nothing_runs_any_more() -> None:
    running, peak = set(), []

    def work(part: int) -> None:
        running.add(part)
        time.sleep(0.01)
        running.discard(part)
        if part == 1:
            raise RuntimeError("part 1")
        peak.append(part)

    with pytest.raises(RuntimeError, match="part 1"):
        share(work, range(1000), 2)
    assert not running
    assert len(peak) < 900  # parts that nobody had begun are dropped
    share(peak.append, range(3), 2)


@pytest.mark.parametrize("place", ["put", "run", "take", "wait"])
def test_an_interruption_anywhere_waits_for_what_has_begun(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever interrupts a transfer may free its buffers: no thread may write to them then."""
    begun, finished, main = threading.Event(), [], threading.get_ident()

    def work(_: int) -> None:
        if threading.get_ident() == main:
            time.sleep(0.01)
        else:
            begun.set()
            time.sleep(0.1)
            finished.append(True)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    class Parts(deque[int]):
        def popleft(self) -> int:
            if threading.get_ident() == main and begun.is_set():
                interrupt()
            return super().popleft()

    real = pool._jobs.put

    def put(job: object) -> None:
        real(job)
        assert begun.wait(30)
        interrupt()

    run = pool._Job.run

    def run_or_interrupt(job: pool._Job[int]) -> None:
        if threading.get_ident() == main:
            assert begun.wait(30)
            interrupt()
        run(job)

    share(lambda _: None, range(3), 1)
    if place == "put":
        monkeypatch.setattr(pool, "_jobs", SimpleNamespace(put=put))
    elif place == "run":
        monkeypatch.setattr(pool._Job, "run", run_or_interrupt)
    elif place == "take":
        monkeypatch.setattr(pool, "deque", Parts)
    else:
        monkeypatch.setattr(pool, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        share(work, range(100), 1)
    assert finished


def test_an_interruption_after_the_last_part_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, main = [], threading.get_ident()

    def ident() -> int:
        found = threading.get_ident()
        calls.extend([found] if found == main else [])
        if len(calls) == 2 and found == main:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(pool, "get_ident", ident)
    with pytest.raises(KeyboardInterrupt):
        share(lambda _: time.sleep(0.01), range(4), 1)


def test_without_more_threads_a_caller_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool, "Thread", refuse)
    monkeypatch.setattr(pool, "_started", 0)
    done: list[int] = []
    share(done.append, range(10), 3)
    assert done == list(range(10))


def shares_right() -> bool:
    """Whether all is done, and not by this thread alone."""
    done: list[int] = []
    share(done.append, range(100), 2)
    barrier = threading.Barrier(2)
    share(lambda _: barrier.wait(timeout=20), range(2), 1)
    return sorted(done) == list(range(100))


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    share(lambda _: None, range(9), 2)
    assert in_a_child(shares_right)


def test_a_child_is_forked_right_while_others_share() -> None:
    stop = threading.Event()

    def keep_sharing() -> None:
        while not stop.is_set():
            share(lambda _: None, range(20), 2)

    busy = [threading.Thread(target=keep_sharing) for _ in range(3)]
    for thread in busy:
        thread.start()
    try:
        for _ in range(10):
            assert in_a_child(shares_right)
    finally:
        stop.set()
        for thread in busy:
            thread.join()


def test_the_pool_starts_no_more_threads_than_were_asked_for() -> None:
    share(lambda _: None, range(9), 2)
    count = pool._started
    share(lambda _: None, range(9), count)
    assert pool._started == count
