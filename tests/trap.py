"""Turns a touch of a guard page into an assertion error, which hypothesis can shrink.

A segmentation fault ends the process, and with it what could be said of the example. Here the
fault opens the guard page, so that the touch goes through and is reported when it is over. A fault
anywhere else still kills. Linux with 64 bits only.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from guard import PAGE

_SA_SIGINFO = 4
_PROT_READ_WRITE = 3
_ADDRESS = 16  # where siginfo_t says what was touched

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """struct sigaction."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@contextmanager
def trapped(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """AssertionError where a guard page of these tensors, made by ``guarded``, was touched.

    Tensors that are made inside may be added to them there.
    """
    __tracebackhide__ = True  # pytest shows what was touched, not how that is known
    touched: list[tuple[int, torch.Tensor]] = []
    before = _Action()

    def handle(_: int, info: int, __: int) -> None:
        address = ctypes.c_size_t.from_address(info + _ADDRESS).value
        page = address // PAGE * PAGE
        for tensor in tensors:
            if page in _guard_pages(tensor):
                touched.append((address, tensor))
                _libc.mprotect(page, PAGE, _PROT_READ_WRITE)
                return
        # Back to what handled faults before; the same instruction now faults once more.
        _libc.sigaction(signal.SIGSEGV, ctypes.byref(before), None)

    handler = _Handler(handle)
    action = _Action(ctypes.cast(handler, ctypes.c_void_p).value, flags=_SA_SIGINFO)
    _libc.sigaction(signal.SIGSEGV, ctypes.byref(action), ctypes.byref(before))
    try:
        yield
    finally:
        _libc.sigaction(signal.SIGSEGV, ctypes.byref(before), None)
    if touched:
        address, tensor = touched[0]
        first, end = _range(tensor)
        where = f"{first - address} before" if address < first else f"{address - end + 1} after"
        raise AssertionError(f"touched a byte {where} a buffer of {end - first} bytes")


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor's storage and of the first behind it."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _guard_pages(tensor: torch.Tensor) -> tuple[int, int]:
    """The pages without access before and behind a tensor that ``guarded`` made."""
    first, end = _range(tensor)
    return (first // PAGE - 1) * PAGE, -(-end // PAGE) * PAGE
