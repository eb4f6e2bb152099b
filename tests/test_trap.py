"""A touch of a guard page fails the test and not the process; every other fault still kills."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from guard import PAGE, faults, guarded
from kvloom._kernel import copy
from trap import trapped


def load(address: int) -> None:
    _ = ctypes.c_uint8.from_address(address).value


def store(address: int) -> None:
    ctypes.c_uint8.from_address(address).value = 1


@pytest.mark.parametrize("nbytes", [1, 100, PAGE, PAGE + 1])
@pytest.mark.parametrize("touch", [load, store])
def test_a_byte_outside_fails_with_its_distance(touch: Callable[[int], None], nbytes: int) -> None:
    first, last = guarded(nbytes, end=False), guarded(nbytes)
    says = f"a byte 1 before a buffer of {nbytes} bytes"
    with pytest.raises(AssertionError, match=says), trapped([first, last]):
        touch(first.data_ptr() - 1)
    says = f"a byte 9 after a buffer of {nbytes} bytes"
    with pytest.raises(AssertionError, match=says), trapped([first, last]):
        touch(last.data_ptr() + nbytes + 8)


def test_a_byte_inside_does_not_fail() -> None:
    first, last = guarded(100, end=False), guarded(100)
    with trapped([first, last]):
        for tensor in (first, last):
            store(tensor.data_ptr())
            store(tensor.data_ptr() + 99)


@pytest.mark.parametrize("streaming", [False, True], ids=["ordinary", "streaming"])
@pytest.mark.parametrize("nbytes", [1, 3, 70, 300])
def test_a_kernel_that_copies_a_byte_too_many_ends_and_fails(nbytes: int, streaming: bool) -> None:
    source, target = guarded(nbytes), guarded(nbytes)
    copy(target.data_ptr(), source.data_ptr(), nbytes, streaming)
    with pytest.raises(AssertionError, match="1 after"), trapped([source, target]):
        copy(target.data_ptr(), source.data_ptr(), nbytes + 1, streaming)


def test_any_other_fault_still_kills() -> None:
    mine, other = guarded(10), guarded(10)

    def touch_the_other() -> None:
        with trapped([mine]):
            load(other.data_ptr() + 10)

    assert faults(touch_the_other)


def test_an_error_inside_comes_through() -> None:
    tensor = guarded(10)

    def touch_and_fail() -> None:
        load(tensor.data_ptr() + 10)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), trapped([tensor]):
        touch_and_fail()


def test_guard_pages_kill_afterwards() -> None:
    tensor = guarded(10)
    with trapped([tensor]):
        pass
    assert faults(lambda: load(tensor.data_ptr() + 10))
