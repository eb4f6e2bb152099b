"""What callers hand over, checked and brought into one form: sizes, slots and block ids."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvloom._abi import Int64Array

_ACCEPTED = "a list, a range, or a one-dimensional int32 or int64 array or tensor"


def integer(name: str, value: object) -> int:
    """``value`` as an int; TypeError, naming the argument, for what is no integer."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # the latter of tensors whose values can't be had
        raise TypeError(f"{name}: got {value!r}, takes an integer") from None


def index_array(name: str, value: Any) -> Int64Array:
    """Slots or block ids as a one-dimensional int64 array that kernels can read.

    An int64 array is used as it is where it is contiguous. TypeError for anything but integers.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name}: got a masked array, takes {_ACCEPTED}")
    try:
        if isinstance(value, np.ndarray):
            array = value
        elif isinstance(value, range):
            array = np.arange(value.start, value.stop, value.step, dtype=np.int64)
        elif isinstance(value, (list, tuple)):
            array = _from_list(name, value)
        else:
            raise TypeError(f"{name}: got {type(value).__name__}, takes {_ACCEPTED}")
    except OverflowError:
        raise ValueError(f"{name}: got a number beyond 64 bits") from None
    if array.dtype != np.int64 and array.dtype != np.int32:
        raise TypeError(f"{name}: got an array of {array.dtype}, takes {_ACCEPTED}")
    if array.ndim != 1:
        raise ValueError(f"{name}: got {array.ndim} dimensions, takes {_ACCEPTED}")
    # For an array of another kind, such as a read-only one, kernels would be compiled once more.
    # One entry is contiguous whatever its stride, which torch takes only as it should be.
    if (
        type(array) is np.ndarray
        and array.dtype == np.int64
        and array.flags.carray
        and array.strides == (array.itemsize,)
    ):
        return array
    return np.array(array, np.int64, subok=False)


def _from_list(name: str, value: list[Any] | tuple[Any, ...]) -> Int64Array:
    for kind in set(map(type, value)):
        if kind is bool or not issubclass(kind, (int, np.integer)):
            raise TypeError(f"{name}: got a list with {kind.__name__}, takes {_ACCEPTED}")
    return np.array(value, dtype=np.int64)
