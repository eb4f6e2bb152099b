"""Completions and events come out once each and in order, and a dispatcher hands them on."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fork import in_a_child
from kvloom.lmcache import (
    DeviceHostFuncDispatcher,
    drain_recorded_completions,
    drain_recorded_events,
    record_completion_on_stream,
    record_event_on_stream,
    recorders,
    submit_callback_to_stream,
)

msgspec = pytest.importorskip("msgspec")

Dispatchers = Callable[..., DeviceHostFuncDispatcher]


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    """No test finds what another one left."""
    drain_recorded_completions()
    drain_recorded_events()
    yield
    drain_recorded_completions()
    drain_recorded_events()


@pytest.fixture
def dispatchers() -> Iterator[Dispatchers]:
    """Makes dispatchers, which are stopped afterwards."""
    made: list[DeviceHostFuncDispatcher] = []

    def make(*args: Any) -> DeviceHostFuncDispatcher:
        made.append(DeviceHostFuncDispatcher(*args))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def record_event(stream: int, name: str = "e") -> None:
    record_event_on_stream(stream, name, "s", {}, {})


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def together(count: int, action: Callable[[int], None]) -> None:
    """Run ``action`` on so many threads at once."""
    threads = [threading.Thread(target=action, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- completions ---------------------------------------------------------------------------------


def test_completions_come_out_once_in_the_order_recorded() -> None:
    given = [(f"kind {number % 3}", bytes([number])) for number in range(100)]
    for number, (kind, payload) in enumerate(given):
        record_completion_on_stream(number % 5, kind, payload)
    assert drain_recorded_completions() == given
    assert drain_recorded_completions() == []


def test_what_was_drained_is_not_changed_by_what_is_recorded_later() -> None:
    record_completion_on_stream(0, "a", b"1")
    found = drain_recorded_completions()
    record_completion_on_stream(0, "b", b"2")
    assert found == [("a", b"1")]


def test_a_payload_is_copied_into_bytes() -> None:
    payload = bytearray(b"abc")
    record_completion_on_stream(0, "a", payload)
    record_completion_on_stream(0, "b", memoryview(payload)[::2])
    payload[:] = b"xyz"
    found = drain_recorded_completions()
    assert found == [("a", b"abc"), ("b", b"ac")]
    assert all(type(one) is bytes for _, one in found)


def test_many_threads_record_and_drain_and_nothing_is_lost_or_doubled() -> None:
    each, found, stop = 400, [], threading.Event()

    def drain() -> None:
        while not stop.is_set():
            found.append(drain_recorded_completions())

    def record(number: int) -> None:
        for turn in range(each):
            record_completion_on_stream(number, str(number), str(turn).encode())

    drainers = [threading.Thread(target=drain) for _ in range(3)]
    for one in drainers:
        one.start()
    together(8, record)
    stop.set()
    for one in drainers:
        one.join()
    found.append(drain_recorded_completions())
    counts = Counter(one for some in found for one in some)
    assert counts == Counter(
        (str(number), str(turn).encode()) for number in range(8) for turn in range(each)
    )
    for some in found:  # what one thread recorded is in its order in each drain
        for number in range(8):
            turns = [int(payload) for kind, payload in some if kind == str(number)]
            assert turns == sorted(turns)


# --- events --------------------------------------------------------------------------------------


def test_an_event_has_the_wall_clock_time_at_which_it_was_recorded() -> None:
    before = time.time()
    record_event_on_stream(7, "store", "session", {"a": "b"}, {"n": 1 << 70})
    (event,) = drain_recorded_events()
    name, session, timestamp, texts, numbers = event
    assert (name, session, texts, numbers) == ("store", "session", {"a": "b"}, {"n": 1 << 70})
    assert before <= timestamp <= time.time()
    assert drain_recorded_events() == []


def test_timestamps_of_a_stream_never_decrease_though_the_clock_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([100.0, 90.0, 95.0, 101.0, 50.0, 60.0])
    monkeypatch.setattr(recorders, "_latest", {})
    monkeypatch.setattr(recorders, "time", SimpleNamespace(time=lambda: next(clock)))
    for stream in (1, 1, 2, 1, 2, 3):
        record_event(stream, str(stream))
    found = [(name, timestamp) for name, _, timestamp, _, _ in drain_recorded_events()]
    assert found == [("1", 100), ("1", 100), ("2", 95), ("1", 101), ("2", 95), ("3", 60)]


def test_timestamps_of_a_stream_never_decrease_whoever_records() -> None:
    def record(number: int) -> None:
        for _ in range(300):
            record_event(number % 2, str(number % 2))

    together(6, record)
    found = drain_recorded_events()
    assert len(found) == 1800
    for stream in ("0", "1"):
        times = [timestamp for name, _, timestamp, _, _ in found if name == stream]
        assert times == sorted(times)


def test_metadata_is_copied() -> None:
    texts, numbers = {"a": "b"}, {"n": 1}
    record_event_on_stream(0, "e", "s", texts, numbers)
    texts["a"], numbers["n"] = "changed", 2
    ((_, _, _, found_texts, found_numbers),) = drain_recorded_events()
    assert (found_texts, found_numbers) == ({"a": "b"}, {"n": 1})


@pytest.mark.parametrize(
    ("call", "name", "got"),
    [
        (lambda: record_completion_on_stream(None, "k", b""), "cuda_stream_ptr", "None"),
        (lambda: record_completion_on_stream(1.0, "k", b""), "cuda_stream_ptr", "1.0"),
        (lambda: record_completion_on_stream(0, b"k", b""), "kind", "bytes"),
        (lambda: record_completion_on_stream(0, None, b""), "kind", "NoneType"),
        (lambda: record_completion_on_stream(0, "k", "text"), "payload", "str"),
        (lambda: record_completion_on_stream(0, "k", 3), "payload", "int"),
        (lambda: record_event_on_stream("0", "e", "s", {}, {}), "cuda_stream_ptr", "'0'"),
        (lambda: record_event_on_stream(0, 1, "s", {}, {}), "event_type_name", "int"),
        (lambda: record_event_on_stream(0, "e", None, {}, {}), "session_id", "NoneType"),
        (lambda: record_event_on_stream(0, "e", "s", None, {}), "str_metadata", "None"),
        (lambda: record_event_on_stream(0, "e", "s", {"a": 1}, {}), "str_metadata", "{'a': 1}"),
        (lambda: record_event_on_stream(0, "e", "s", {1: "a"}, {}), "str_metadata", "{1: 'a'}"),
        (lambda: record_event_on_stream(0, "e", "s", {}, {"a": "1"}), "int_metadata", "{'a': '1'}"),
        (lambda: record_event_on_stream(0, "e", "s", {}, [("a", 1)]), "int_metadata", "[('a', 1)]"),
    ],
)
def test_a_wrong_type_is_refused_by_name_and_nothing_is_recorded(
    call: Callable[[], None], name: str, got: str
) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value).startswith(f"{name}: got {got}, takes ")
    assert drain_recorded_completions() == []
    assert drain_recorded_events() == []


def test_streams_of_a_usable_device_are_not_waited_for_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        for call in (
            lambda: record_completion_on_stream(1, "k", b""),
            lambda: record_event(1),
            lambda: submit_callback_to_stream(SimpleNamespace(ptr=1), "k", 1),
        ):
            with pytest.raises(NotImplementedError, match=r"^cuda_stream_ptr: "):
                call()
    assert drain_recorded_completions() == []
    assert drain_recorded_events() == []
    record_completion_on_stream(1, "k", b"")
    record_event(1)
    assert (len(drain_recorded_completions()), len(drain_recorded_events())) == (1, 1)


def test_a_child_forked_while_others_record_can_record_and_drain() -> None:
    stop = threading.Event()

    def keep_recording() -> None:
        while not stop.is_set():
            record_completion_on_stream(0, "parent", b"")
            record_event(0)
            drain_recorded_completions()

    def records() -> bool:
        drain_recorded_completions()
        drain_recorded_events()
        record_completion_on_stream(0, "child", b"1")
        record_event(0, "child")
        ((name, *_),) = drain_recorded_events()
        return drain_recorded_completions() == [("child", b"1")] and name == "child"

    busy = [threading.Thread(target=keep_recording) for _ in range(2)]
    for one in busy:
        one.start()
    try:
        assert all(in_a_child(records) for _ in range(10))
    finally:
        stop.set()
        for one in busy:
            one.join()


# --- the dispatcher ------------------------------------------------------------------------------


class Stored(msgspec.Struct):  # type: ignore[misc]
    """A payload as LMCache's are."""

    key: str
    count: int


class Stream:
    """A stream of which nothing but ``ptr`` may be asked."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def submit(kind: str, payload: Any) -> None:
    submit_callback_to_stream(Stream(3), kind, payload)


def test_of_a_stream_only_its_pointer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(recorders, "record_completion_on_stream", lambda *args: found.append(args))
    submit_callback_to_stream(Stream(1 << 47), "k", Stored("a", 2))
    ((stream, kind, payload),) = found
    assert (stream, kind) == (1 << 47, "k")
    assert msgspec.msgpack.decode(payload) == {"key": "a", "count": 2}


def test_handlers_get_payloads_of_their_kind_in_order_as_the_type_they_asked_for(
    dispatchers: Dispatchers,
) -> None:
    structs: list[Stored] = []
    numbers: list[int] = []
    dispatcher = dispatchers()
    dispatcher.register("stored", structs.append, Stored)
    dispatcher.register("number", numbers.append, int)
    dispatcher.start()
    for number in range(50):
        submit("stored", Stored("a", number))
        submit("number", number)
    until(lambda: dispatcher.dispatched_count() == 100)
    assert structs == [Stored("a", number) for number in range(50)]
    assert numbers == list(range(50))
    assert dispatcher.handler_exception_counts() == {}


def test_handlers_run_on_a_thread_of_the_dispatcher(dispatchers: Dispatchers) -> None:
    threads: list[threading.Thread] = []
    dispatcher = dispatchers(0.001)
    dispatcher.register("k", lambda _: threads.append(threading.current_thread()), int)
    dispatcher.start()
    submit("k", 1)
    until(lambda: bool(threads))
    assert threads[0] is not threading.current_thread()
    assert threads[0].daemon


def test_one_handlers_exception_is_counted_and_logged_and_stops_nothing(
    dispatchers: Dispatchers, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[int] = []

    def fail(payload: int) -> None:
        raise RuntimeError(f"no {payload}")

    dispatcher = dispatchers()
    dispatcher.register("bad", fail, int)
    dispatcher.register("good", found.append, int)
    for number in range(3):
        submit("bad", number)
        submit("good", number)
    with caplog.at_level(logging.ERROR, "kvloom"):
        dispatcher.start()
        until(lambda: len(found) == 3)
        submit("good", 3)
        until(lambda: len(found) == 4)
    dispatcher.stop()
    assert found == [0, 1, 2, 3]
    assert dispatcher.handler_exception_counts() == {"bad": 3}
    assert dispatcher.dispatched_count() == 4
    assert [one.levelno for one in caplog.records] == [logging.ERROR] * 3
    assert "'bad'" in caplog.text
    assert "RuntimeError: no 2" in caplog.text


def test_a_payload_of_another_type_is_counted_and_its_handler_is_not_called(
    dispatchers: Dispatchers, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[Stored] = []
    dispatcher = dispatchers()
    dispatcher.register("stored", found.append, Stored)
    submit("stored", {"key": 1, "count": 2})
    record_completion_on_stream(0, "stored", b"\xc1")  # no msgpack at all
    submit("stored", Stored("a", 1))
    with caplog.at_level(logging.ERROR, "kvloom"):
        dispatcher.stop()
    assert found == [Stored("a", 1)]
    assert dispatcher.handler_exception_counts() == {"stored": 2}
    assert len(caplog.records) == 2


def test_a_kind_that_nobody_handles_is_logged(
    dispatchers: Dispatchers, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[int] = []
    dispatcher = dispatchers()
    dispatcher.register("known", found.append, int)
    submit("unknown", 1)
    submit("known", 2)
    with caplog.at_level(logging.WARNING, "kvloom"):
        dispatcher.stop()
    assert found == [2]
    assert "'unknown'" in caplog.text
    assert dispatcher.handler_exception_counts() == {}
    assert dispatcher.dispatched_count() == 1


def test_the_last_handler_registered_for_a_kind_counts(dispatchers: Dispatchers) -> None:
    first: list[int] = []
    second: list[int] = []
    dispatcher = dispatchers()
    dispatcher.register("k", first.append, int)
    dispatcher.register("k", second.append, int)
    submit("k", 1)
    dispatcher.stop()
    assert (first, second) == ([], [1])


def test_stopping_hands_on_what_is_left(dispatchers: Dispatchers) -> None:
    found: list[int] = []
    dispatcher = dispatchers(60.0)  # its thread sleeps until it is stopped
    dispatcher.register("k", found.append, int)
    dispatcher.start()
    for number in range(20):
        submit("k", number)
    assert found == []
    begun = time.monotonic()
    dispatcher.stop()
    assert time.monotonic() - begun < 30
    assert found == list(range(20))
    assert drain_recorded_completions() == []


def test_starting_twice_starts_one_thread(dispatchers: Dispatchers) -> None:
    found: list[int] = []
    dispatcher = dispatchers()
    dispatcher.register("k", found.append, int)
    before = threading.active_count()
    dispatcher.start()
    dispatcher.start()
    assert threading.active_count() == before + 1
    for number in range(20):
        submit("k", number)
    until(lambda: len(found) == 20)
    assert found == list(range(20))
    dispatcher.stop()
    assert threading.active_count() == before


def test_a_stopped_dispatcher_can_be_started_again(dispatchers: Dispatchers) -> None:
    found: list[int] = []
    dispatcher = dispatchers()
    dispatcher.register("k", found.append, int)
    for turn in range(3):
        dispatcher.start()
        submit("k", turn)
        until(lambda turn=turn: len(found) == turn + 1)  # type: ignore[misc]
        dispatcher.stop()
        dispatcher.stop()
    assert found == [0, 1, 2]


def test_a_handler_may_stop_its_dispatcher(dispatchers: Dispatchers) -> None:
    dispatcher = dispatchers()
    stopped = threading.Event()

    def stop(_: int) -> None:
        dispatcher.stop()
        stopped.set()

    before = threading.active_count()
    dispatcher.register("stop", stop, int)
    dispatcher.start()
    submit("stop", 1)
    assert stopped.wait(30)
    until(lambda: threading.active_count() == before)
    assert dispatcher.handler_exception_counts() == {}


def test_a_handler_may_submit_more(dispatchers: Dispatchers) -> None:
    found: list[int] = []

    def handle(left: int) -> None:
        found.append(left)
        if left:
            submit("k", left - 1)

    dispatcher = dispatchers()
    dispatcher.register("k", handle, int)
    dispatcher.start()
    submit("k", 5)
    until(lambda: len(found) == 6)
    assert found == [5, 4, 3, 2, 1, 0]


def test_a_forked_child_can_start_its_dispatcher_anew(dispatchers: Dispatchers) -> None:
    found: list[int] = []
    dispatcher = dispatchers()
    dispatcher.register("k", found.append, int)
    dispatcher.start()

    def dispatches() -> bool:
        dispatcher.start()
        submit("k", 1)
        until(lambda: found == [1])
        dispatcher.stop()
        return dispatcher.dispatched_count() == 1

    assert in_a_child(dispatches)
    assert found == []


@pytest.mark.parametrize("wrong", [0, -0.1, float("nan"), float("inf"), 1e300])
def test_an_interval_is_some_seconds(wrong: float) -> None:
    with pytest.raises(
        ValueError, match=rf"^drain_interval_seconds: got {re.escape(str(wrong))}, "
    ):
        DeviceHostFuncDispatcher(wrong)


@pytest.mark.parametrize("wrong", ["1", None, True])
def test_an_interval_is_a_number(wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"^drain_interval_seconds: got {wrong!r}, takes a number"):
        DeviceHostFuncDispatcher(wrong)


def test_a_kind_is_a_text_and_a_handler_can_be_called(dispatchers: Dispatchers) -> None:
    dispatcher = dispatchers()
    with pytest.raises(TypeError, match=r"^kind: got int, takes a str"):
        dispatcher.register(1, print, int)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^handler: got str, takes a function"):
        dispatcher.register("k", "print", int)  # type: ignore[arg-type]
