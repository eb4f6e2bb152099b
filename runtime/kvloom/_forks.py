"""Keeps locks usable in a forked child.

A child has only the thread that forked: a lock that another one held stays locked there for ever.

A leaf module: it imports nothing of kvloom.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

Lock = TypeVar("Lock", bound=Any)


def held_across_forks(lock: Lock) -> Lock:
    """``lock``, which every fork from now on waits for, so that it is free on both sides."""
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
    return lock
