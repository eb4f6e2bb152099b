"""What of a machine matters to a figure, and nothing that tells which machine it is."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from kvloom.processors import last_level_cache, processors


def facts() -> dict[str, object]:
    """Processor, caches and versions."""
    return {
        "processor": _processor(),
        "processors": processors(),
        "last_level_cache_bytes": last_level_cache(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numba", "numpy")},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
