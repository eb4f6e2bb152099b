"""The operator module of LMCache, by kvloom: transfers, copies, rotary positions, recorders.

    import kvloom.lmcache as ops               # instead of ``from lmcache import c_ops as ops``
    kvloom.lmcache.install()                   # LMCache 0.4: be its operator module
    device_ops.bind_native(kvloom.lmcache)     # LMCache 0.5: be its native operators

Where kvloom is installed beside LMCache 0.5 or newer, the entry point of ``kvloom.lmcache.plugin``
does the last on machines without an accelerator. Names, order and defaults of arguments are
LMCache's, and so are the types wherever LMCache itself can be imported.
"""

from __future__ import annotations

from typing import Any

from kvloom.lmcache.device import get_gpu_pci_bus_id, tensor_from_ptr
from kvloom.lmcache.memcpy import batched_memcpy, lmcache_memcpy_async
from kvloom.lmcache.plugging import install
from kvloom.lmcache.recorders import (
    DeviceHostFuncDispatcher,
    drain_recorded_completions,
    drain_recorded_events,
    record_completion_on_stream,
    record_event_on_stream,
    submit_callback_to_stream,
)
from kvloom.lmcache.rotary import rotary_embedding_k_fused, rotary_embedding_k_fused_strided
from kvloom.lmcache.transfers import (
    load_and_reshape_flash,
    multi_layer_block_kv_transfer,
    multi_layer_kv_transfer,
    multi_layer_kv_transfer_unilateral,
    reshape_and_cache_back_flash,
    single_layer_kv_transfer,
    single_layer_kv_transfer_sgl,
)
from kvloom.lmcache.wire import TYPES, types

__all__ = [
    "DeviceHostFuncDispatcher",
    "EngineKVFormat",
    "GPUKVFormat",
    "PageBufferShapeDesc",
    "TransferDirection",
    "batched_memcpy",
    "drain_recorded_completions",
    "drain_recorded_events",
    "get_gpu_pci_bus_id",
    "install",
    "lmcache_memcpy_async",
    "load_and_reshape_flash",
    "multi_layer_block_kv_transfer",
    "multi_layer_kv_transfer",
    "multi_layer_kv_transfer_unilateral",
    "record_completion_on_stream",
    "record_event_on_stream",
    "reshape_and_cache_back_flash",
    "rotary_embedding_k_fused",
    "rotary_embedding_k_fused_strided",
    "single_layer_kv_transfer",
    "single_layer_kv_transfer_sgl",
    "submit_callback_to_stream",
    "tensor_from_ptr",
]


def __getattr__(name: str) -> Any:
    # At first use and not before: LMCache may be in the middle of its own import.
    if name not in TYPES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = types()
    globals().update(found)
    return found[name]


def __dir__() -> list[str]:
    # LMCache binds every name that is listed here, and switches on the presence of some.
    return [name for name in __all__ if name != "install"]
