"""The types of LMCache's calls, its own where they can be imported, and how values are read."""

from __future__ import annotations

from enum import IntEnum
from importlib import import_module
from operator import index
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from kvloom import registry
from kvloom._forks import held_across_forks
from kvloom.lmcache.formats import refusal

if TYPE_CHECKING:
    from kvloom.engine_layout import Layout
    from kvloom.select import Op

TYPES = ("EngineKVFormat", "GPUKVFormat", "PageBufferShapeDesc", "TransferDirection")
# Numbers of these need a scale, which memory does not have; torch crashes without one.
QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_NATIVE_NAMES = {"GPUKVFormat": "EngineKVFormat"}
_own_types: dict[str, Any] = {}
_making = held_across_forks(Lock())
_OPS: tuple[Op, Op] = ("scatter", "gather")  # by direction: H2D 0, D2H 1


class TransferDirection(IntEnum):
    """H2D: chunk → engine. D2H: engine → chunk."""

    H2D = 0
    D2H = 1


class PageBufferShapeDesc:
    """The sizes of one paged buffer: counts, and elements where nothing else is said.

    ``nl`` layers, ``nb`` blocks of ``bs`` tokens, ``nh`` heads of ``hs`` elements of
    ``element_size`` bytes, ``kv_size`` planes of a chunk, and ``block_stride_elems`` elements from
    one block to the next, 0 where blocks are tight. Other attributes may be added.
    """

    def __init__(self) -> None:
        self.nl = self.nb = self.bs = self.nh = self.hs = 0
        self.element_size = self.kv_size = self.block_stride_elems = 0

    def __repr__(self) -> str:
        return f"PageBufferShapeDesc({', '.join(f'{k}={v}' for k, v in vars(self).items())})"


def types() -> dict[str, Any]:
    """The types by name, the same in every thread.

    LMCache's functions refuse all others where its native module is there.
    """
    found = _native_types()
    if found is None:
        with _making:
            if not _own_types:
                _own_types.update(_made_types())
        found = _own_types
    return found


def _native_types() -> dict[str, Any] | None:
    try:
        native = import_module("lmcache.lmcache_native")
        return {name: getattr(native, _NATIVE_NAMES.get(name, name)) for name in TYPES}
    except Exception:  # not installed, of another version, or without what it needs itself
        return None


def _made_types() -> dict[str, Any]:
    ids = {one.name: one.id for one in registry.layouts() if one.id is not None}
    formats: Any = IntEnum("EngineKVFormat", ids, module="kvloom.lmcache")  # type: ignore[misc]
    return {
        "EngineKVFormat": formats,
        "GPUKVFormat": formats,
        "TransferDirection": TransferDirection,
        "PageBufferShapeDesc": PageBufferShapeDesc,
    }


def number(name: str, value: object, takes: str) -> int:
    """The number of an enum's member, or of an int or a bool; TypeError for anything else."""
    try:
        return index(getattr(value, "value", value))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: got {value!r}, takes {takes}") from None


def operation(direction: object) -> Op:
    """What a direction asks for: H2D (0) is scatter, D2H (1) is gather."""
    takes = "TransferDirection.H2D (0, chunk → engine) or D2H (1, engine → chunk)"
    value = number("direction", direction, takes)
    if value not in (0, 1):
        raise ValueError(f"direction: got {direction!r}, takes {takes}")
    return _OPS[value]


def layout_of(operator: str, engine_kv_format: object) -> Layout:
    """The layout of a format; ValueError for one that the operator does not take."""
    takes = "a member of EngineKVFormat, or its number"
    value = number("engine_kv_format", engine_kv_format, takes)
    try:
        found = registry.layout(value)
    except ValueError:
        raise ValueError(f"engine_kv_format: got {engine_kv_format!r}, takes {takes}") from None
    reason = refusal(operator, found)
    if reason:
        raise ValueError(f"engine_kv_format: got {found.name}; {reason}")
    return found


def device_of(name: str, device: object) -> torch.device:
    """A device, given as such or by torch's name."""
    if isinstance(device, torch.device):
        return device
    takes = "a torch.device or its name"
    if not isinstance(device, str):
        raise TypeError(f"{name}: got {device!r}, takes {takes}")
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"{name}: got {device!r}, takes {takes}") from None
