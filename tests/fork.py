"""Does something in a forked child, which is killed where it hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

SECONDS = 60


def in_a_child(action: Callable[[], bool]) -> bool:
    """What ``action`` finds in a forked child; the test fails where it hangs or raises."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if action() else 1
        finally:
            os._exit(status)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            if code not in (0, 1):
                pytest.fail(f"the child ended with {code}")
            return code == 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail(f"the child hung for {SECONDS} s")
