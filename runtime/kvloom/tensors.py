"""What there is to know of torch's tensors: whether operators can move them, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch

from kvloom.geometry import TensorFacts, layout_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvloom.engine_layout import Layout, Tensors

# Room for the largest storage: places of different ones never meet.
_STORAGE_ROOM = 1 << 45
_MOST_STORAGES = 1 << 16

# Views whose bytes torch conjugates or negates when they are read. Tensor.is_conj and is_neg tell
# them too, but let other threads have the interpreter meanwhile, which costs several times a call.
_LAZY = sum(
    torch._C.DispatchKeySet(key).raw_repr()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
)


class Home:
    """The device that all tensors of a cache are on, and the places of its storages.

    On the CPU a place is an address. Pointers of other devices need not be: there each storage
    has a range of places of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._storages: dict[int, int] = {}
        self._engine = 0

    def settle(self) -> None:
        """The storages seen so far are the engine's; those of chunks may be forgotten."""
        self._engine = len(self._storages)

    def facts(self, what: str, tensor: torch.Tensor) -> TensorFacts:
        """The facts of an engine's tensor or a chunk, called ``what`` in errors.

        TypeError for what is no strided tensor; ValueError for one on another device, or that
        requires grad.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what}: got {type(tensor).__name__}, takes a tensor")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{what}: got a tensor of layout {tensor.layout}, takes a strided one")
        if tensor.device != self.device:
            raise ValueError(
                f"{what}: is on {tensor.device}, takes {self.device}, where the cache is"
            )
        reason = unaddressable(tensor)
        if reason:
            raise ValueError(f"{what}: {reason}")
        if tensor.requires_grad:
            raise ValueError(
                f"{what}: requires grad, which a copy of bytes would not track; detach it"
            )
        return TensorFacts(
            what,
            self.place(tensor),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.element_size(),
            str(tensor.dtype).removeprefix("torch."),
        )

    def place(self, tensor: torch.Tensor) -> int:
        """Where a tensor's first byte lies."""
        if self.device.type == "cpu":
            return tensor.data_ptr()
        storage = tensor.untyped_storage()._cdata
        if storage not in self._storages and len(self._storages) >= _MOST_STORAGES:
            self._storages = dict(islice(self._storages.items(), self._engine))
        number = self._storages.setdefault(storage, len(self._storages))
        return number * _STORAGE_ROOM + int(tensor.storage_offset()) * tensor.element_size()


def unaddressable(tensor: torch.Tensor) -> str:
    """Why a strided tensor's bytes are not its values, or are not there; nothing if all is well.

    Storages may shrink after a tensor was bound or first seen, so calls ask anew.
    """
    if tensor.is_nested:
        return "is a nested tensor, takes one of a single shape"
    if tensor.is_quantized:
        return "is quantized, and its scale would not move with its bytes; move int_repr()"
    if torch._C._dispatch_keys(tensor).raw_repr() & _LAZY:
        return "is a conjugate or negative view, whose bytes are not its values; resolve it"
    try:
        storage = tensor.untyped_storage()
        there = storage.device == tensor.device and storage.nbytes()
    except (RuntimeError, NotImplementedError):
        there = 0
    size, strides = tensor.shape, tensor.stride()
    reach = sum((count - 1) * step for count, step in zip(size, strides, strict=True))
    end = (int(tensor.storage_offset()) + reach + 1) * tensor.element_size()
    lacks = end > there or (tensor.device.type == "cpu" and tensor.data_ptr() == 0)
    if 0 not in size and lacks:
        return "has no bytes of its own, or fewer than its shape says"
    return ""


def to_host(name: str, tensor: torch.Tensor) -> NDArray[np.int32] | NDArray[np.int64]:
    """A tensor of slots or block ids as an array; TypeError for another dtype."""
    if tensor.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: got a tensor of {tensor.dtype}, takes int32 or int64")
    if tensor.device.type == "meta":
        raise ValueError(f"{name}: is on the meta device, where there are no values")
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError) as error:  # sparse ones, and those of a tracer
        raise TypeError(f"{name}: got a tensor that can't be read as an array: {error}") from None


def flatten(
    layout: Layout, tensors: Tensors, what: str, depth: int, counts: list[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in pointer order, each with its name; ``counts`` gets the lengths of the levels.

    TypeError where the nesting is not the layout's, ValueError where lengths are not.
    """
    if depth == len(layout.lists):
        yield what, tensors  # type: ignore[misc]  # checked with the tensor's facts
        return
    takes = f"{layout.name} takes {layout_text(layout.facts)}"
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"{what}: got {type(tensors).__name__}, takes a list; {takes}")
    count = len(tensors)
    if depth == len(counts):
        counts.append(count)
    wanted = 2 if layout.lists[depth] == "kv" else counts[depth]
    if count != wanted or count == 0:
        raise ValueError(f"{what}: got {count} entries, takes {wanted or 'at least 1'}; {takes}")
    for number, one in enumerate(tensors):
        yield from flatten(layout, one, f"{what}[{number}]", depth + 1, counts)
