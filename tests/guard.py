"""Lays tensors between pages without access, so that a stray byte kills the process.

Kernels that work on raw addresses are seen by no bounds checker. Here the first byte past a
tensor (or before it) belongs to a page that may be neither read nor written: one byte too far is
a segmentation fault, not luck. Linux only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import mmap
import os
import resource
import signal
import warnings
import weakref
from collections.abc import Callable, Sequence

import torch

PAGE = mmap.PAGESIZE
PROT_NONE = 0
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def guarded(nbytes: int, end: bool = True) -> torch.Tensor:
    """A zeroed uint8 tensor of `nbytes` bytes that touches a page without access.

    With `end` its last byte lies just before that page, else its first byte just after it. The
    other side is guarded too, from the page boundary on. The memory is unmapped when the tensor
    and every view of it are gone.
    """
    if nbytes < 0:
        raise ValueError(f"nbytes: got {nbytes}, takes 0 or more")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    inside = math.ceil(nbytes / PAGE) * PAGE
    base = _map(inside + 2 * PAGE)
    first = base + PAGE
    _forbid(base, PAGE)
    _forbid(first + inside, PAGE)
    start = first + inside - nbytes if end else first
    block = (ctypes.c_uint8 * nbytes).from_address(start)
    # Not at exit: threads may still hold the tensor then, and the process gives all back anyway.
    weakref.finalize(block, _libc.munmap, base, inside + 2 * PAGE).atexit = False
    return torch.frombuffer(block, dtype=torch.uint8)  # holds a reference to block


def guarded_tensor(
    shape: Sequence[int],
    dtype: torch.dtype,
    strides: Sequence[int] | None = None,
    end: bool = True,
) -> torch.Tensor:
    """A zeroed tensor between guard pages, tight or with `strides` (in elements, not negative).

    The memory ends with the last element that the strides reach: padding after the last block is
    not part of it, so an engine's padding is guarded there.
    """
    shape = tuple(shape)
    strides = _tight(shape) if strides is None else tuple(strides)
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    elements = 0 if 0 in shape else reach + 1
    whole = guarded(elements * dtype.itemsize, end).view(dtype)
    return whole.as_strided(shape, strides)


def guarded_like(tensor: torch.Tensor, end: bool = True) -> torch.Tensor:
    """A copy of `tensor` between guard pages: same values, shape, strides and dtype."""
    copy = guarded_tensor(tensor.shape, tensor.dtype, tensor.stride(), end)
    copy.copy_(tensor)
    return copy


def exit_signal(action: Callable[[], object]) -> int:
    """Runs `action` in a forked child and returns the signal that killed it, 0 if none did.

    An exception in the child is a RuntimeError here. The action must start no thread and use
    none of the parent's: after a fork they are gone.
    """
    with warnings.catch_warnings():
        # The interpreter warns of forks with threads; the child below only touches memory.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            action()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    if os.WEXITSTATUS(status):
        raise RuntimeError("action: raised an exception in the child process")
    return 0


def faults(action: Callable[[], object]) -> bool:
    """Whether `action`, run in a forked child, dies of a segmentation fault."""
    return exit_signal(action) == signal.SIGSEGV


def _map(nbytes: int) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address is None or address == _MAP_FAILED:
        raise MemoryError(f"nbytes: mapping {nbytes} bytes failed: {_error()}")
    return int(address)


def _forbid(address: int, nbytes: int) -> None:
    if _libc.mprotect(address, nbytes, PROT_NONE):
        raise OSError(f"mprotect of a guard page failed: {_error()}")


def _error() -> str:
    return os.strerror(ctypes.get_errno())


def _tight(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
