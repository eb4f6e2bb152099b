"""What LMCache asks about devices and raw memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from kvloom.arguments import integer
from kvloom.lmcache.transfers import tensor_at
from kvloom.lmcache.wire import QUANTIZED, device_of


def get_gpu_pci_bus_id(device_id: int = 0) -> str | None:
    """The PCI address of a GPU in upper case, "0000:29:00.0", or None without such a device."""
    number = integer("device_id", device_id)
    if not torch.cuda.is_available() or not 0 <= number < torch.cuda.device_count():
        return None
    found: Any = torch.cuda.get_device_properties(number)
    return f"{found.pci_domain_id:04X}:{found.pci_bus_id:02X}:{found.pci_device_id:02X}.0"


def tensor_from_ptr(
    ptr: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """A tensor over the memory at ``ptr``, which it neither copies nor keeps alive.

    ValueError for an address or size that can't be one; NotImplementedError on other devices than
    the CPU.
    """
    where = device_of("device", device)
    if where.type != "cpu":
        raise NotImplementedError(f"device: got {where}, takes cpu: others can't be wrapped yet")
    if not isinstance(dtype, torch.dtype) or dtype in QUANTIZED:
        raise TypeError(f"dtype: got {dtype!r}, takes a torch.dtype that is not quantized")
    if not isinstance(shape, Sequence) or isinstance(shape, (str, bytes)):
        raise TypeError(f"shape: got {type(shape).__name__}, takes a list or tuple of sizes")
    sizes = [integer(f"shape[{number}]", size) for number, size in enumerate(shape)]
    if min(sizes, default=0) < 0:
        raise ValueError(f"shape: got {tuple(sizes)}, takes sizes of 0 or more")
    if prod(max(1, size) for size in sizes) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"shape: got {tuple(sizes)}, takes less than 2**63 bytes")
    address, nbytes = integer("ptr", ptr), prod(sizes) * dtype.itemsize
    if nbytes and not 0 < address <= (1 << 64) - nbytes:
        raise ValueError(f"ptr: got {address}, takes an address with {nbytes} bytes behind it")
    return tensor_at(address, sizes, dtype)
