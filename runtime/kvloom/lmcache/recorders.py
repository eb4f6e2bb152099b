"""Completions and events in the order of a stream's work, and a thread that hands them on."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from threading import TIMEOUT_MAX, Event, Lock, Thread, current_thread
from typing import Any, NamedTuple, TypeAlias

import torch

from kvloom._forks import held_across_forks
from kvloom.arguments import integer

Completion: TypeAlias = tuple[str, bytes]
Recorded: TypeAlias = tuple[str, str, float, dict[str, str], dict[str, int]]

_log = logging.getLogger(__name__)
_recording = held_across_forks(Lock())
_completions: list[Completion] = []
_events: list[Recorded] = []
_latest: dict[int, float] = {}  # the last timestamp of each stream


def record_completion_on_stream(cuda_stream_ptr: int, kind: str, payload: bytes) -> None:
    """Have (``kind``, ``payload``) drained once the work before it on the stream is done.

    Without a usable CUDA device that is at once. NotImplementedError with one.
    """
    _stream(cuda_stream_ptr)
    if not isinstance(kind, str):
        raise TypeError(f"kind: got {type(kind).__name__}, takes a str")
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise TypeError(f"payload: got {type(payload).__name__}, takes bytes")
    with _recording:
        _completions.append((kind, bytes(payload)))


def drain_recorded_completions() -> list[Completion]:
    """All completions since the last call as (kind, payload), in the order recorded."""
    with _recording:
        found = _completions.copy()
        _completions.clear()
    return found


def record_event_on_stream(
    cuda_stream_ptr: int,
    event_type_name: str,
    session_id: str,
    str_metadata: dict[str, str],
    int_metadata: dict[str, int],
) -> None:
    """Have an event drained with the wall-clock seconds at which the stream gets to it.

    Timestamps of one stream never decrease. Without a usable CUDA device that is at once.
    NotImplementedError with one.
    """
    stream = _stream(cuda_stream_ptr)
    for name, given in (("event_type_name", event_type_name), ("session_id", session_id)):
        if not isinstance(given, str):
            raise TypeError(f"{name}: got {type(given).__name__}, takes a str")
    _check_metadata("str_metadata", str_metadata, str)
    _check_metadata("int_metadata", int_metadata, int)
    with _recording:
        now = max(time.time(), _latest.get(stream, 0.0))
        _latest[stream] = now
        _events.append((event_type_name, session_id, now, {**str_metadata}, {**int_metadata}))


def drain_recorded_events() -> list[Recorded]:
    """All events since the last call as (name, session, timestamp, texts, numbers), in order."""
    with _recording:
        found = _events.copy()
        _events.clear()
    return found


def submit_callback_to_stream(stream: Any, kind: str, payload: Any) -> None:
    """Have the handler of ``kind`` called with ``payload`` after the work on ``stream``.

    Of the stream only ``ptr`` is read. The payload is packed with msgpack.
    """
    import msgspec

    record_completion_on_stream(stream.ptr, kind, msgspec.msgpack.encode(payload))


class DeviceHostFuncDispatcher:
    """A thread that drains completions and calls the handler registered for each kind.

    An exception of a handler is logged and counted and stops nothing else.
    """

    def __init__(self, drain_interval_seconds: float = 0.005) -> None:
        interval = drain_interval_seconds
        if isinstance(interval, bool) or not isinstance(interval, (int, float)):
            raise TypeError(f"drain_interval_seconds: got {interval!r}, takes a number of seconds")
        if not 0 < interval <= TIMEOUT_MAX:
            raise ValueError(
                f"drain_interval_seconds: got {interval}, takes more than 0, {TIMEOUT_MAX} at most"
            )
        self._interval = interval
        self._handlers: dict[str, _Handler] = {}
        self._exceptions: Counter[str] = Counter()
        self._dispatched = 0
        self._lock = Lock()
        self._stopping = Event()
        self._thread: Thread | None = None

    def register(self, kind: str, handler: Callable[[Any], object], payload_type: Any) -> None:
        """Call ``handler`` with the payloads of ``kind``, decoded to ``payload_type``."""
        import msgspec

        if not isinstance(kind, str):
            raise TypeError(f"kind: got {type(kind).__name__}, takes a str")
        if not callable(handler):
            raise TypeError(f"handler: got {type(handler).__name__}, takes a function")
        decode = msgspec.msgpack.Decoder(type=payload_type).decode
        with self._lock:
            self._handlers[kind] = _Handler(handler, decode)

    def start(self) -> None:
        """Start the thread, if it does not run."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            self._stopping = Event()
            self._thread = Thread(
                target=self._serve, args=(self._stopping,), name=type(self).__name__, daemon=True
            )
            self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Stop the thread, waiting ``timeout`` seconds for it, and drain what is left."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stopping.set()
        if thread is not None and thread is not current_thread():  # a handler may stop it too
            thread.join(timeout)
        self._drain()

    def dispatched_count(self) -> int:
        """How many payloads were handled without an exception."""
        return self._dispatched

    def handler_exception_counts(self) -> dict[str, int]:
        """How many payloads of each kind could not be decoded or handled."""
        with self._lock:
            return dict(self._exceptions)

    def _serve(self, stopping: Event) -> None:
        while not stopping.wait(self._interval):
            self._drain()

    def _drain(self) -> None:
        for kind, payload in drain_recorded_completions():
            with self._lock:
                found = self._handlers.get(kind)
            if found is None:
                _log.warning("kvloom: nobody handles completions of kind %r", kind)
                continue
            try:
                found.handle(found.decode(payload))
            except Exception:
                _log.exception("kvloom: the handler of %r failed", kind)
                with self._lock:
                    self._exceptions[kind] += 1
            else:
                with self._lock:
                    self._dispatched += 1


class _Handler(NamedTuple):
    handle: Callable[[Any], object]
    decode: Callable[[bytes], Any]


def _stream(cuda_stream_ptr: Any) -> int:
    stream = integer("cuda_stream_ptr", cuda_stream_ptr)
    if torch.cuda.is_available():
        raise NotImplementedError("cuda_stream_ptr: CUDA streams can't be waited for yet")
    return stream


def _check_metadata(name: str, given: Any, kind: type) -> None:
    if not isinstance(given, dict) or not all(
        isinstance(key, str) and isinstance(value, kind) for key, value in given.items()
    ):
        raise TypeError(f"{name}: got {given!r}, takes a dict of str to {kind.__name__}")
