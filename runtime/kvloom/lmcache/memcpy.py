"""Plain copies between addresses or tensors, host to host, as LMCache asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import memmove
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from kvloom.arguments import integer
from kvloom.lmcache.wire import operation
from kvloom.moves import shared_from
from kvloom.pool import share
from kvloom.processors import threads
from kvloom.tensors import unaddressable

_ADDRESSES = 1 << 64


def batched_memcpy(src_ptrs: Sequence[int], dst_ptrs: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy ``sizes[i]`` bytes from ``src_ptrs[i]`` to ``dst_ptrs[i]``, one after the other.

    Sizes of 0 and below are skipped. ValueError where the lengths differ, or for an address that
    can't be one; TypeError for what is no integer.
    """
    lists = {"src_ptrs": src_ptrs, "dst_ptrs": dst_ptrs, "sizes": sizes}
    for name, some in lists.items():
        if not isinstance(some, Sequence) or isinstance(some, (str, bytes)):
            raise TypeError(f"{name}: got {type(some).__name__}, takes a list of integers")
        if len(some) != len(src_ptrs):
            raise ValueError(
                f"{name}: got {len(some)} entries, takes {len(src_ptrs)}, as src_ptrs has"
            )
    copies = []
    for number, (source, target, size) in enumerate(zip(src_ptrs, dst_ptrs, sizes, strict=True)):
        nbytes = integer(f"sizes[{number}]", size)
        found = [
            _address(f"{name}[{number}]", one, nbytes)
            for name, one in (("src_ptrs", source), ("dst_ptrs", target))
        ]
        if nbytes > 0:
            copies.append((*found, nbytes))
    for from_, to, nbytes in copies:
        _copy(to, from_, nbytes)


def lmcache_memcpy_async(
    dest: int | torch.Tensor,
    src: int | torch.Tensor,
    nbytes: int,
    direction: Any,
    host_buffer_offset: int,
    host_buffer_alignments: int,
) -> None:
    """Copy ``nbytes`` from ``src`` to ``dest``, both addresses or both contiguous tensors.

    Without a usable CUDA device it is done when this returns. Host memory that is registered with
    CUDA is so in pieces of ``host_buffer_alignments`` bytes, a power of two, and begins
    ``host_buffer_offset`` bytes into one: a copy to or from a device goes piece by piece.

    ValueError for a wrong value, TypeError for an address beside a tensor; NotImplementedError for
    addresses where a CUDA device is usable.
    """
    operation(direction)
    count = _not_negative("nbytes", nbytes)
    offset = _not_negative("host_buffer_offset", host_buffer_offset)
    alignment = integer("host_buffer_alignments", host_buffer_alignments)
    if alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"host_buffer_alignments: got {alignment}, takes a positive power of two")
    if offset + count > _ADDRESSES:
        raise ValueError(f"host_buffer_offset: got {offset}, which with nbytes is beyond 64 bits")
    if isinstance(dest, torch.Tensor) and isinstance(src, torch.Tensor):
        target, source = _first_bytes("dest", dest, count), _first_bytes("src", src, count)
        if target.device.type == source.device.type == "cpu":
            _copy(target.data_ptr(), source.data_ptr(), count)
            return
        for piece in pieces(offset, count, alignment):
            target[piece].copy_(source[piece], non_blocking=True)
        return
    if isinstance(dest, torch.Tensor) or isinstance(src, torch.Tensor):
        raise TypeError("dest, src: got a tensor and an address, takes two of a kind")
    to, from_ = _address("dest", dest, count), _address("src", src, count)
    if torch.cuda.is_available():
        raise NotImplementedError("dest, src: addresses on a CUDA device can't be copied yet")
    if count:
        _copy(to, from_, count)


def pieces(offset: int, nbytes: int, alignment: int) -> Iterator[slice]:
    """A copy of ``nbytes`` in pieces that end where ``offset`` + position is a multiple."""
    start = 0
    while start < nbytes:
        stop = min(nbytes, start + alignment - (offset + start) % alignment)
        yield slice(start, stop)
        start = stop


def _copy(target: int, source: int, nbytes: int) -> None:
    """Copy between addresses, which may overlap; on several threads where that pays."""
    enough = shared_from()
    if enough is None or nbytes < enough or abs(target - source) < nbytes:
        memmove(target, source, nbytes)
        return
    count = threads()
    bounds = [nbytes * number // count // 64 * 64 for number in range(count)] + [nbytes]
    parts = [range(*pair) for pair in pairwise(bounds)]
    share(partial(_copy_part, target, source), parts, count - 1)


def _copy_part(target: int, source: int, part: range) -> None:
    memmove(target + part.start, source + part.start, len(part))


def _first_bytes(name: str, tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` bytes of a tensor, as bytes."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{name}: got strides that leave gaps, takes a contiguous tensor")
    reason = "is on the meta device" if tensor.is_meta else unaddressable(tensor)
    if reason:
        raise ValueError(f"{name}: {reason}")
    if tensor.requires_grad:
        raise ValueError(f"{name}: requires grad, which a copy of bytes would not track; detach it")
    if count % tensor.element_size():
        raise ValueError(
            f"nbytes: got {count}, takes a multiple of {tensor.element_size()}, the bytes of an "
            f"element of {name}"
        )
    if count > tensor.nbytes:
        raise ValueError(f"nbytes: got {count}, takes {tensor.nbytes} at most, the bytes of {name}")
    return tensor.reshape(-1).view(torch.uint8)[:count]


def _address(name: str, given: Any, nbytes: int) -> int:
    address = integer(name, given)
    if nbytes > 0 and not 0 < address <= _ADDRESSES - nbytes:
        raise ValueError(f"{name}: got {address}, takes an address with {nbytes} bytes behind it")
    return address


def _not_negative(name: str, given: Any) -> int:
    value = integer(name, given)
    if value < 0:
        raise ValueError(f"{name}: got {value}, takes 0 or more")
    return value
