"""Threads of our own that share out the work of a transfer, kept from one call to the next.

The thread that calls always works too, and does whatever no other has begun. So a call never waits
for a thread to become free: callers may be many, and a pool that is busy only makes each of them
do more itself.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Lock, Thread, get_ident
from time import sleep
from typing import Any, Generic, TypeVar

Part = TypeVar("Part")

_starting = Lock()
_jobs: SimpleQueue[_Job[Any]] = SimpleQueue()
_started = 0


def share(work: Callable[[Part], None], parts: Iterable[Part], helpers: int) -> None:
    """Call ``work`` with each of ``parts``, on this thread and on as many as ``helpers`` others.

    It returns when all parts are done. Where a part raises, parts that no thread has begun are
    dropped and the first error is raised, once no thread works on any part any more: an
    interruption must not leave threads that write to buffers which their owner thinks are free.
    """
    job = _Job(work, deque(parts))
    try:
        try:
            for _ in range(_start(helpers)):
                _jobs.put(job)
            job.run()
        except BaseException as error:
            job.fail(error)
        finally:
            job.wait()
    except BaseException as error:  # an interruption on the way into the wait
        job.fail(error)
        job.wait()
    if job.error is not None:
        raise job.error


class _Job(Generic[Part]):
    """The parts of one call that are left, and how many are being worked on."""

    def __init__(self, work: Callable[[Part], None], parts: deque[Part]) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._parts = parts
        self._busy: set[int] = set()  # the threads that work on a part
        self._lock = Lock()

    def run(self) -> None:
        """Work on parts until none is left; errors of the work are kept."""
        while True:
            begun = False
            try:
                with self._lock:
                    if not self._parts:
                        return
                    begun = True
                    self._busy.add(get_ident())
                    part = self._parts.popleft()
                self._work(part)
            except BaseException as error:
                self.fail(error)
            finally:
                if begun:
                    self._busy.discard(get_ident())

    def fail(self, error: BaseException) -> None:
        """Keep the first error, and begin no further part."""
        self.error = self.error or error
        self._parts.clear()

    def wait(self) -> None:
        """Until no part is left and none is worked on, whatever interrupts."""
        # Looked at again and again: a lock would be left behind where an interruption hits its
        # holder. At first only the processor is yielded, since the others are nearly done too.
        looks = 0
        while True:
            try:
                # Whoever waits works on nothing, even where an interruption left it among the busy.
                while self._parts or self._busy - {get_ident()}:
                    looks += 1
                    sleep(0 if looks < 200 else 2e-5)
                return
            except BaseException as error:
                self.fail(error)


def _start(count: int) -> int:
    """Have as many threads, or as many as the system grants; their number."""
    global _started
    if _started < count:
        with _starting:
            try:
                while _started < count:
                    name = f"kvloom-{_started}"
                    Thread(target=_serve, args=(_jobs,), name=name, daemon=True).start()
                    _started += 1
            except RuntimeError:  # a limit on threads, or an interpreter that is shutting down
                return _started
    return count


def _serve(jobs: SimpleQueue[_Job[Any]]) -> None:
    while True:
        jobs.get().run()


def _forget() -> None:
    """A forked child has none of its parent's threads, and perhaps locks that nobody will open."""
    global _starting, _jobs, _started
    _starting, _jobs, _started = Lock(), SimpleQueue(), 0


os.register_at_fork(after_in_child=_forget)
