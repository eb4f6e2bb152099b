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
from threading import Lock, Thread
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
    if helpers > 0:
        _start(helpers)
        for _ in range(helpers):
            _jobs.put(job)
    job.run()
    job.wait()
    if job.error is not None:
        raise job.error


class _Job(Generic[Part]):
    """The parts of one call that are left, and how many are being worked on."""

    def __init__(self, work: Callable[[Part], None], parts: deque[Part]) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._parts = parts
        self._busy = 0
        self._lock = Lock()
        self._idle = Lock()  # held while a part is worked on

    def run(self) -> None:
        """Work on parts until none is left; errors are kept."""
        while True:
            with self._lock:
                if not self._parts:
                    return
                part = self._parts.popleft()
                self._busy += 1
                if self._busy == 1:
                    self._idle.acquire()
            try:
                self._work(part)
            except BaseException as error:
                with self._lock:
                    self._parts.clear()
                    self.error = self.error or error
            finally:
                with self._lock:
                    self._busy -= 1
                    if self._busy == 0:
                        self._idle.release()

    def wait(self) -> None:
        """Until no part is left and none is worked on, whatever interrupts."""
        while True:
            try:
                with self._idle:
                    return
            except BaseException as error:
                self.error = self.error or error


def _start(count: int) -> None:
    """Have at least ``count`` threads."""
    global _started
    if _started >= count:
        return
    with _starting:
        while _started < count:
            Thread(target=_serve, args=(_jobs,), name=f"kvloom-{_started}", daemon=True).start()
            _started += 1


def _serve(jobs: SimpleQueue[_Job[Any]]) -> None:
    while True:
        jobs.get().run()


def _forget() -> None:
    """A forked child has none of its parent's threads, and perhaps locks that nobody will open."""
    global _starting, _jobs, _started
    _starting, _jobs, _started = Lock(), SimpleQueue(), 0


os.register_at_fork(after_in_child=_forget)
