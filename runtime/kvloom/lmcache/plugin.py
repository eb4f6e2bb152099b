"""The device plug-in by which LMCache 0.5 and newer finds kvloom on machines without accelerator.

LMCache loads it during its own import, through the entry point group ``lmcache.device_plugins``, so
nothing here may ask LMCache for its operators before they are asked for.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lmcache.v1.platform.devices.cpu import CpuDeviceSpec

NAME = "kvloom"
_MODULE = "_kvloom_device"
_ACCELERATORS = ("cuda", "xpu", "hpu", "npu", "musa", "mps")


class KvloomDeviceSpec(CpuDeviceSpec):  # type: ignore[misc]  # without types
    """The CPU as LMCache knows it, with kvloom's operators.

    It is taken where no accelerator is, or where ``LMCACHE_DEVICE_BACKEND=kvloom`` asks for it.
    """

    device_type = "cpu"
    backend_name = NAME
    torch_module_name = _MODULE

    def is_available(self) -> bool:
        """Whether LMCache should take it without being told."""
        asked = os.environ.get("LMCACHE_DEVICE_BACKEND", "").strip().lower()
        taken = asked == NAME if asked else not _accelerated()
        if taken and not hasattr(torch, _MODULE):
            # LMCache reaches a device through an attribute of torch. torch.cpu itself lacks what
            # LMCache asks of one, which its stand-in has.
            from lmcache.v1.platform.devices.cpu.stub_cpu_device import StubCPUDevice

            setattr(torch, _MODULE, StubCPUDevice("cpu"))
        return taken

    @property
    def ops_cls(self) -> type[Any]:
        """The class of LMCache's operators, which binds kvloom's."""
        from lmcache.v1.platform.devices.cpu.device_ops import CpuDeviceOps

        class KvloomDeviceOps(CpuDeviceOps):  # type: ignore[misc]
            """The operators of the CPU by kvloom; what it lacks is LMCache's own."""

            def ensure_native(self) -> None:
                """Bind kvloom's operators, once."""
                if not getattr(self, "_native_bound", False):
                    self._native_bound = True
                    import kvloom.lmcache as ours

                    self.bind_native(ours)

        return KvloomDeviceOps


def _accelerated() -> bool:
    """Whether torch finds a device that LMCache would rather have."""
    return any(
        module.is_available()
        for module in (getattr(torch, name, None) for name in _ACCELERATORS)
        if module is not None and hasattr(module, "is_available")
    )
