"""LMCache's own code over kvloom: what it reads of its surroundings, before anything imports it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.update(
    CUDA_VISIBLE_DEVICES="",  # LMCache on the CPU, whatever this machine has
    LMCACHE_DEVICE_BACKEND="kvloom",
    LMCACHE_LOG_LEVEL="WARNING",
    LMCACHE_TRACK_USAGE="false",  # it would tell its makers
)


def pytest_configure(config: pytest.Config) -> None:
    # Each logger that LMCache makes says so.
    config.addinivalue_line("filterwarnings", "ignore:`LoggingHandler`:DeprecationWarning")


@pytest.fixture(scope="session")
def _bound_once() -> None:
    from lmcache import device_ops

    import kvloom.lmcache

    device_ops.bind_native(kvloom.lmcache)


@pytest.fixture
def bound(_bound_once: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """LMCache with kvloom's operators, and a patch to give it others for as long as a test runs."""
    with monkeypatch.context() as patch:
        yield patch
