"""The kernel that turns rows of keys from one rotation to another, whatever they are held in.

It converts by whole-number arithmetic of its own: every processor can turn that into vectors, and
none of torch's threads, which hang in a forked child, has to help.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np

from kvloom._kernel import kernel

# What numbers are held in: their bits are uint16, or uint32 for float32.
FLOAT32: Final = 0
FLOAT16: Final = 1
BFLOAT16: Final = 2

_inner = numba.njit(nogil=True, error_model="numpy")

# Of float16, in the bits of a float32: its exponents are 112 less.
_GROW = np.float32(2.0**112)
_LEAST = np.uint32(113 << 23)  # the least that is not subnormal
_BEYOND = np.uint32(143 << 23)  # what would have the exponent of infinity
_INFINITY = np.uint32(255 << 23)
# A float32 whose last bit weighs what the least float16 does: adding it rounds to those.
_HALF = np.float32(0.5)
_HALF_BITS = np.uint32(126 << 23)

_u32 = np.uint32


@_inner  # type: ignore[untyped-decorator, unused-ignore]
def widen(held: int, row: Any, wide: Any) -> None:
    """The numbers of a row in float32."""
    if held == FLOAT32:
        for i in range(len(wide)):
            wide[i] = np.uint32(row[i]).view(np.float32)
    elif held == BFLOAT16:
        for i in range(len(wide)):
            wide[i] = np.uint32(_u32(row[i]) << _u32(16)).view(np.float32)
    else:
        for i in range(len(wide)):
            word = _u32(row[i])
            size = _u32((word & _u32(0x7FFF)) << _u32(13))
            grown = np.float32(np.uint32(size).view(np.float32) * _GROW).view(np.uint32)
            # An exponent of 31 is that of infinities and NaNs.
            rest = _INFINITY if size >= _u32(31 << 23) else _u32(0)
            sign = _u32((word & _u32(0x8000)) << _u32(16))
            wide[i] = np.uint32(grown | rest | sign).view(np.float32)


@_inner  # type: ignore[untyped-decorator, unused-ignore]
def narrow(held: int, wide: Any, row: Any) -> None:
    """A row of float32, each rounded to the nearest number that can be held, ties to even."""
    if held == FLOAT32:
        for i in range(len(wide)):
            row[i] = np.float32(wide[i]).view(np.uint32)
    elif held == BFLOAT16:
        for i in range(len(wide)):
            word = np.float32(wide[i]).view(np.uint32)
            rounded = _u32((word + _u32(0x7FFF) + (_u32(word >> _u32(16)) & _u32(1))) >> _u32(16))
            row[i] = _u32(0x7FC0) if _u32(word & _u32(0x7FFFFFFF)) > _INFINITY else rounded
    else:
        for i in range(len(wide)):
            word = np.float32(wide[i]).view(np.uint32)
            size = _u32(word & _u32(0x7FFFFFFF))
            subnormal = np.float32(np.uint32(size).view(np.float32) + _HALF).view(np.uint32)
            odd = _u32(_u32(size >> _u32(13)) & _u32(1))
            normal = _u32(_u32(_u32(size - _u32(112 << 23)) + _u32(0xFFF) + odd) >> _u32(13))
            found = _u32(subnormal - _HALF_BITS) if size < _LEAST else normal
            large = _u32(0x7E00) if size > _INFINITY else _u32(0x7C00)
            found = large if size >= _BEYOND else found
            row[i] = _u32(found | (_u32(word >> _u32(16)) & _u32(0x8000)))


def _rotate(
    flat: Any,
    held: int,
    token_step: int,
    head_step: int,
    step: int,
    heads: int,
    table: Any,
    table_held: int,
    old: Any,
    new: Any,
    first: int,
    last: int,
    is_neox: bool,
) -> None:
    """Turn the tokens from ``first`` to ``last``; ``flat`` has the bits from key's first one on."""
    rotated = table.shape[1]
    half = rotated // 2
    wide, gathered = np.empty(rotated, np.float32), np.empty(rotated, flat.dtype)
    undo, apply = np.empty(rotated, np.float32), np.empty(rotated, np.float32)
    for token in range(first, last):
        widen(table_held, table[old[token]], undo)
        widen(table_held, table[new[token]], apply)
        for head in range(heads):
            start = token * token_step + head * head_step
            row = gathered
            if step == 1:
                row = flat[start : start + rotated]
            else:
                for i in range(rotated):
                    row[i] = flat[start + i * step]
            widen(held, row, wide)
            if is_neox:
                for i in range(half):
                    x, y = wide[i], wide[i + half]
                    x, y = x * undo[i] + y * undo[i + half], y * undo[i] - x * undo[i + half]
                    wide[i] = x * apply[i] - y * apply[i + half]
                    wide[i + half] = y * apply[i] + x * apply[i + half]
            else:
                for i in range(half):
                    x, y = wide[2 * i], wide[2 * i + 1]
                    x, y = x * undo[i] + y * undo[i + half], y * undo[i] - x * undo[i + half]
                    wide[2 * i] = x * apply[i] - y * apply[i + half]
                    wide[2 * i + 1] = y * apply[i] + x * apply[i + half]
            narrow(held, wide, row)
            if step != 1:
                for i in range(rotated):
                    flat[start + i * step] = row[i]


rotate: Any = kernel(_rotate)


def compile_for(flat: Any, table: Any) -> None:
    """Have the machine code for arrays of such types before anything changes.

    Where it can't be kept on disk (a full one), that fails the first time only: it is there then.
    """
    none = np.zeros(0, np.int64)
    try:
        rotate(flat[:0], 0, 0, 0, 1, 0, table, 0, none, none, 0, 0, True)
    except OSError:
        if not rotate.signatures:
            raise
