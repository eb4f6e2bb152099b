"""How many threads this process may keep busy, and how much its last-level cache holds."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

VARIABLE = "KVLOOM_NUM_THREADS"

# What a last-level cache is taken for where the system does not say.
_CACHE_BYTES = 16 << 20


@cache
def threads() -> int:
    """The threads a transfer may use: ``KVLOOM_NUM_THREADS``, or the processors it may run on.

    These are the processors of its affinity mask, or fewer where a cgroup's quota grants less time.
    ValueError where the variable is no positive number.
    """
    given = os.environ.get(VARIABLE, "").strip()
    if not given:
        return processors()
    if not given.isascii() or not given.isdigit() or len(given) > 9 or int(given) == 0:
        raise ValueError(f"{VARIABLE}: got {given!r}, takes a number of threads, 1 or more")
    return int(given)


def processors(root: Path = Path("/")) -> int:
    """The processors that this process may keep busy; ``root`` is where files of the system are."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        allowed = os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _quotas(root)]
    return max(1, min([allowed, *quotas]))


def _quotas(root: Path) -> list[float]:
    """Processors granted by this process's cgroups and by those around them; none without limits.

    Inside a container the path that the kernel names may be the host's: what exists of it counts.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = [controllers, "cpu"] if controllers else ["", "unified"]
        inside = Path(path.lstrip("/"))
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            for place in (inside, *inside.parents):
                found += [_quota_v1(top / place) if controllers else _quota_v2(top / place)]
    return [quota for quota in found if quota > 0]


def _quota_v2(group: Path) -> float:
    """Processors that ``cpu.max`` grants: a quota and a period in microseconds; 0 without one."""
    words = _words(group / "cpu.max")
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else 0


def _quota_v1(group: Path) -> float:
    quota, period = _words(group / "cpu.cfs_quota_us"), _words(group / "cpu.cfs_period_us")
    return int(quota[0]) / int(period[0]) if quota and period else 0


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


@cache
def last_level_cache() -> int:
    """Bytes of the last-level cache of the first processor."""
    found = [_size(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size")]
    return max(found, default=0) or _CACHE_BYTES


def _size(path: Path) -> int:
    """A cache's size in bytes: the system writes it as ``32768K``."""
    (text,) = _words(path) or ["0"]
    return int(text.rstrip("K")) << 10 if text.endswith("K") else int(text)
