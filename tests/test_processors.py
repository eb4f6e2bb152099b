"""The threads a transfer may use: as many as the process is allowed to keep busy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.processors import last_level_cache, processors, threads


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("KVLOOM_NUM_THREADS", raising=False)
    threads.cache_clear()
    yield
    threads.cache_clear()


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        pytest.param("0::/\n", {}, 8, id="no limit"),
        pytest.param("0::/\n", {f"{V2}/cpu.max": "max 100000\n"}, 8, id="limit says max"),
        pytest.param("0::/\n", {f"{V2}/cpu.max": "200000 100000\n"}, 2, id="two"),
        pytest.param("0::/\n", {f"{V2}/cpu.max": "250000 100000\n"}, 3, id="two and a half"),
        pytest.param("0::/\n", {f"{V2}/cpu.max": "20000 100000\n"}, 1, id="a fifth"),
        pytest.param("0::/\n", {f"{V2}/cpu.max": "9900000 100000\n"}, 8, id="more than there are"),
        pytest.param(
            "0::/a/b\n",
            {f"{V2}/a/cpu.max": "300000 100000\n", f"{V2}/a/b/cpu.max": "max 100000\n"},
            3,
            id="a group around it",
        ),
        pytest.param(
            "0::/host/path\n", {f"{V2}/cpu.max": "400000 100000\n"}, 4, id="path of the host"
        ),
        pytest.param(
            "5:cpuset:/\n4:cpu,cpuacct:/a\n0::/\n",
            {
                f"{V2}/cpu,cpuacct/a/cpu.cfs_quota_us": "150000\n",
                f"{V2}/cpu,cpuacct/a/cpu.cfs_period_us": "50000\n",
            },
            3,
            id="version 1",
        ),
        pytest.param(
            "4:cpu:/\n",
            {f"{V2}/cpu/cpu.cfs_quota_us": "-1\n", f"{V2}/cpu/cpu.cfs_period_us": "100000\n"},
            8,
            id="version 1 without limit",
        ),
    ],
)
def test_a_cgroups_quota_counts(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    assert processors(system(tmp_path, groups, files)) == expected


def test_a_system_without_cgroups_has_its_affinity(tmp_path: Path) -> None:
    assert processors(tmp_path) == 8


def test_the_variable_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOM_NUM_THREADS", " 3 ")
    assert threads() == 3


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5", "٣", "9" * 5000])
def test_a_wrong_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("KVLOOM_NUM_THREADS", given)
    with pytest.raises(ValueError, match=f"KVLOOM_NUM_THREADS: got '{given}', takes a number"):
        threads()


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOM_NUM_THREADS", "")
    assert threads() == processors()


def test_the_last_level_cache_has_a_size() -> None:
    assert 1 << 18 <= last_level_cache() <= 1 << 32
