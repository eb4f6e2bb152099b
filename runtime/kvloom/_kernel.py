"""What generated CPU kernels are made of: the ``kernel`` decorator, and copies of raw addresses.

A leaf module: it imports nothing of kvloom, so generated modules and runtime modules may be
imported in any order.
"""

from __future__ import annotations

import hashlib
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numba
from llvmlite import ir
from llvmlite.binding import ffi
from numba import types
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

if TYPE_CHECKING:
    from kvloom._abi import Kernel

# numba keys its disk cache by a kernel's own file alone. Generated kernels close over this digest,
# which numba does hash, so that a change of the helpers below is never answered with old machine
# code.
HELPERS = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

# A child that is forked while another thread compiles, or frees what it compiled, would wait for
# numba's lock or for LLVM's for ever.
_compile_lock: Any = global_compiler_lock
_llvm_lock: Any = ffi.lib._lock


def _hold_locks() -> None:
    _compile_lock.acquire()
    _llvm_lock.__enter__()


def _release_locks() -> None:
    _llvm_lock.__exit__(None, None, None)
    _compile_lock.release()


os.register_at_fork(
    before=_hold_locks, after_in_parent=_release_locks, after_in_child=_release_locks
)

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_warned = False

# What kernels are called with, in the order of kvloom._abi.Kernel.
_INT, _ROW, _TABLE = types.int64, types.int64[::1], types.int64[:, ::1]
_SIGNATURE = (_ROW, _INT, _ROW, _ROW, _TABLE, _INT, _INT, _INT, _INT)

X86 = platform.machine().lower() in ("x86_64", "amd64")

# A slot this many positions ahead is prefetched, this many bytes of its row at most.
AHEAD = 2
PREFETCHED = 2048


def kernel(function: Callable[..., None]) -> Kernel:
    """Compile ``function`` at its first call, without the interpreter lock, cached on disk.

    Where numba finds no writable cache folder (a read-only installation without a home), the
    kernel is compiled anew in each process, and the first such kernel warns once.
    """
    try:
        return cast("Kernel", numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        _warn(
            "kvloom: numba finds no writable cache folder, so kernels are compiled in each "
            "process (about half a second); set NUMBA_CACHE_DIR to a writable folder"
        )
        return cast("Kernel", numba.njit(**_OPTIONS)(function))


def compile_now(kernel: Any) -> None:
    """Have the machine code of a kernel before anything moves: nothing can fail after that.

    Where it can't be kept on disk (a full one), it is used all the same, with one warning.
    """
    if kernel.signatures:
        return
    try:
        kernel.compile(_SIGNATURE)
    except OSError as error:
        if not kernel.signatures:
            raise
        _warn(f"kvloom: numba can't keep compiled kernels on disk ({error.strerror})")


def _warn(message: str) -> None:
    """One warning in a process is enough."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def _move(nbytes: int, *, streaming: bool = False) -> Any:
    """An inlined load and store of ``nbytes`` between two addresses.

    They may have any alignment; a streaming store, which goes around the caches, takes only a
    target that is a multiple of ``nbytes``.
    """

    @intrinsic
    def move(typing_context: Any, target: Any, source: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = ir.IntType(8 * nbytes) if nbytes <= 8 else ir.VectorType(ir.IntType(8), nbytes)
            to, at = (builder.inttoptr(address, word.as_pointer()) for address in arguments)
            stored = builder.store(builder.load(at, align=1), to, nbytes if streaming else 1)
            if streaming:
                one = ir.Constant(ir.IntType(32), 1)
                stored.set_metadata("nontemporal", builder.module.add_metadata([one]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    return move


_move64, _move32, _move16, _move8 = _move(64), _move(32), _move(16), _move(8)
_move4, _move2, _move1 = _move(4), _move(2), _move(1)
_stream64 = _move(64, streaming=True)


def _untyped(function: Callable[..., Any]) -> Any:
    """An intrinsic as those who call it see it: without the typing context."""
    return intrinsic(function)


@_untyped
def _fence(typing_context: Any) -> Any:
    """Streaming stores before it are seen by other threads before stores after it."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if X86:
            function = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse.sfence", (), function), [])
        else:
            builder.fence("release")
        return context.get_dummy_value()

    return types.void(), emit


@_untyped
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address that is about to be read; any address will do."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], function)
        to_read, keep, data = (ir.Constant(number, value) for value in (0, 3, 1))
        builder.call(prefetch, [builder.inttoptr(arguments[0], byte), to_read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@numba.njit(**_OPTIONS)  # type: ignore[untyped-decorator, unused-ignore]
def _copy_short(target: int, source: int, nbytes: int) -> int:
    """Copy fewer than 64 bytes; their number."""
    done = 0
    if nbytes & 32:
        _move32(target, source)
        done = 32
    if nbytes & 16:
        _move16(target + done, source + done)
        done += 16
    if nbytes & 8:
        _move8(target + done, source + done)
        done += 8
    if nbytes & 4:
        _move4(target + done, source + done)
        done += 4
    if nbytes & 2:
        _move2(target + done, source + done)
        done += 2
    if nbytes & 1:
        _move1(target + done, source + done)
        done += 1
    return done


@numba.njit(**_OPTIONS)  # type: ignore[untyped-decorator, unused-ignore]
def copy(target: int, source: int, nbytes: int, streaming: bool) -> None:
    """Copy ``nbytes`` from address ``source`` to address ``target``; they must not overlap.

    A loop of our own because rows are short: a call of memcpy per row costs more than the row.
    ``streaming`` writes whole cache lines around the caches, which saves reading them first; the
    bytes before the first line and after the last are stored as usual. ``finish`` must follow.
    """
    done = 0
    if streaming:
        if nbytes >= 128:
            done = _copy_short(target, source, -target & 63)
            while done + 256 <= nbytes:
                _stream64(target + done, source + done)
                _stream64(target + done + 64, source + done + 64)
                _stream64(target + done + 128, source + done + 128)
                _stream64(target + done + 192, source + done + 192)
                done += 256
            while done + 64 <= nbytes:
                _stream64(target + done, source + done)
                done += 64
    else:
        while done + 256 <= nbytes:
            _move64(target + done, source + done)
            _move64(target + done + 64, source + done + 64)
            _move64(target + done + 128, source + done + 128)
            _move64(target + done + 192, source + done + 192)
            done += 256
    while done + 64 <= nbytes:
        _move64(target + done, source + done)
        done += 64
    _copy_short(target + done, source + done, nbytes - done)


@numba.njit(**_OPTIONS)  # type: ignore[untyped-decorator, unused-ignore]
def finish(streaming: bool) -> None:
    """What a kernel does last: whoever is told that it is done finds every byte."""
    if streaming:
        _fence()


@numba.njit(**_OPTIONS)  # type: ignore[untyped-decorator, unused-ignore]
def prefetch(source: int, nbytes: int) -> None:
    """Ask for the first lines of a row that is read soon; the processor goes on by itself."""
    for line in range(0, min(nbytes, PREFETCHED), 64):
        _prefetch(source + line)
