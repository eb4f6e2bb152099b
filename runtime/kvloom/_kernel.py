"""What generated CPU kernels are made of: the ``kernel`` decorator and ``copy`` for raw addresses.

A leaf module: it imports nothing of kvloom, so generated modules and runtime modules may be
imported in any order.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from kvloom._abi import Kernel

# numba keys its disk cache by a kernel's own file alone. Generated kernels close over this digest,
# which numba does hash, so that a change of the helpers below is never answered with old machine
# code.
HELPERS = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_warned = False


def kernel(function: Callable[..., None]) -> Kernel:
    """Compile ``function`` at its first call, without the interpreter lock, cached on disk.

    Where numba finds no writable cache folder (a read-only installation without a home), the
    kernel is compiled anew in each process, and the first such kernel warns once.
    """
    global _warned
    try:
        return cast("Kernel", numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        if not _warned:
            _warned = True
            warnings.warn(
                "kvloom: numba finds no writable cache folder, so kernels are compiled in each "
                "process (about half a second); set NUMBA_CACHE_DIR to a writable folder",
                RuntimeWarning,
                stacklevel=2,
            )
        return cast("Kernel", numba.njit(**_OPTIONS)(function))


def _move(nbytes: int) -> Any:
    """An inlined load and store of ``nbytes`` between two addresses of any alignment."""

    @intrinsic
    def move(typing_context: Any, target: Any, source: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = ir.IntType(8 * nbytes) if nbytes <= 8 else ir.VectorType(ir.IntType(8), nbytes)
            to, at = (builder.inttoptr(address, word.as_pointer()) for address in arguments)
            builder.store(builder.load(at, align=1), to, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    return move


_move64, _move32, _move16, _move8 = _move(64), _move(32), _move(16), _move(8)
_move4, _move2, _move1 = _move(4), _move(2), _move(1)


@numba.njit(**_OPTIONS)  # type: ignore[untyped-decorator, unused-ignore]
def copy(target: int, source: int, nbytes: int) -> None:
    """Copy ``nbytes`` from address ``source`` to address ``target``; they must not overlap.

    A loop of our own because rows are short: a call of memcpy per row costs more than the row.
    """
    done = 0
    while done + 256 <= nbytes:
        _move64(target + done, source + done)
        _move64(target + done + 64, source + done + 64)
        _move64(target + done + 128, source + done + 128)
        _move64(target + done + 192, source + done + 192)
        done += 256
    while done + 64 <= nbytes:
        _move64(target + done, source + done)
        done += 64
    if nbytes & 32:
        _move32(target + done, source + done)
        done += 32
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
