"""What kernels are made of: ``copy``, and how numba compiles them and keeps the machine code."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guard import PAGE, exit_signal, guarded
from kvloom import _kernel
from kvloom._kernel import HELPERS, copy, kernel
from kvloom_generated.registry import MODULES

ROOT = Path(__file__).resolve().parent.parent

# --- copy -----------------------------------------------------------------------------------------

both_stores = pytest.mark.parametrize("streaming", [False, True], ids=["ordinary", "streaming"])

# Every remainder of 64 after 0 to 3 words of 64 bytes and 0 to 2 rounds of 256.
LENGTHS = range(3 * 256)


def ends(nbytes: int) -> Iterator[tuple[slice, slice]]:
    """A target and a source of ``nbytes`` in a page each, at its first or its last byte."""
    first, last = slice(0, nbytes), slice(PAGE - nbytes, PAGE)
    yield from product((first, last), repeat=2)


@both_stores
def test_copy_reads_and_writes_no_byte_beyond_its_rows(streaming: bool) -> None:
    target, source = guarded(PAGE), guarded(PAGE)  # a whole page: guarded on both sides
    copy(target.data_ptr(), source.data_ptr(), 0, streaming)  # compiled before the fork

    def copy_at_all_ends() -> None:
        for nbytes in LENGTHS:
            for at, start in ends(nbytes):
                to, start_at = target.data_ptr() + at.start, source.data_ptr() + start.start
                copy(to, start_at, nbytes, streaming)

    assert exit_signal(copy_at_all_ends) == 0


@both_stores
def test_copy_moves_every_length(streaming: bool) -> None:
    random = np.random.default_rng(3)
    target, source = (random.integers(0, 256, PAGE, np.uint8) for _ in range(2))
    for nbytes in LENGTHS:
        for at, start in ends(nbytes):
            expected = target.copy()
            expected[at] = source[start]
            to, start_at = target.ctypes.data + at.start, source.ctypes.data + start.start
            copy(to, start_at, nbytes, streaming)
            assert (target == expected).all(), (nbytes, at, start)
            random.shuffle(source)


@both_stores
@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16, 32, 64, 127, 128, 256, 383])
def test_copy_moves_between_addresses_of_any_alignment(nbytes: int, streaming: bool) -> None:
    random = np.random.default_rng(nbytes)
    source = random.integers(0, 256, 64 + nbytes, np.uint8)
    for to, start in product(range(64), repeat=2):
        target = np.zeros(64 + nbytes, np.uint8)
        expected = target.copy()
        expected[to : to + nbytes] = source[start : start + nbytes]
        copy(target.ctypes.data + to, source.ctypes.data + start, nbytes, streaming)
        assert (target == expected).all(), (to, start)


# --- how kernels are compiled ---------------------------------------------------------------------


def kernels(module: str) -> list[Any]:
    loaded = importlib.import_module(f"kvloom_generated.{module}")
    return list(vars(loaded.kernels(HELPERS)).values())


WITH_KERNELS = [
    module
    for module in MODULES
    if not importlib.import_module(f"kvloom_generated.{module}").LAYOUT.unsupported
]


@pytest.mark.parametrize("module", WITH_KERNELS)
def test_kernels_let_other_threads_run_and_are_compiled_when_called(module: str) -> None:
    for one in kernels(module):
        assert one.targetoptions["nogil"]
        assert one.signatures == []


def test_an_error_that_is_not_about_the_cache_is_no_reason_to_go_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(cache: bool = False, **_: object) -> Any:
        if cache:
            raise RuntimeError("something else")
        return lambda function: function

    monkeypatch.setattr(_kernel.numba, "njit", broken)
    with pytest.raises(RuntimeError, match="something else"):
        kernel(lambda: None)


FULL_DISK = """
import resource, signal, warnings
import torch, kvloom

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tensors = [torch.zeros(8, 16, 4, dtype=torch.int16)]
cache = kvloom.layout("NL_X_NB_BS_HS").bind(tensors)
chunk = torch.ones(1, 20, 4, dtype=torch.int16)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cache.scatter(chunk, blocks=[2, 3])
    print(int(tensors[0].sum()), *(one.message for one in caught))
"""


def test_a_full_disk_costs_one_warning_and_no_byte(tmp_path: Path) -> None:
    moved, _, warning = run(FULL_DISK, NUMBA_CACHE_DIR=str(tmp_path)).strip().partition(" ")
    assert moved == "80"
    assert warning.startswith("kvloom: numba can't keep compiled kernels on disk")
    assert warning.count("kvloom:") == 1


AARCH64 = """
import re
import numba
from llvmlite import binding
from kvloom import _kernel
from kvloom._kernel import HELPERS, _OPTIONS
from kvloom_generated.nl_x_two_nb_bs_nh_hs import kernels

_kernel.X86 = False
binding.initialize_all_targets()
binding.initialize_all_asmprinters()
target = binding.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(opt=3)
both = [*vars(kernels(HELPERS)).values(), *vars(kernels(HELPERS, True)).values()]
for kernel in both:
    here = numba.njit(**_OPTIONS)(kernel.py_func)  # machine code from the disk has no LLVM text
    here.compile(_kernel._SIGNATURE)
    module = binding.parse_assembly(here.inspect_llvm(here.signatures[0]))
    module.triple, module.data_layout = target.triple, str(target.target_data)
    for function in module.functions:
        # numba's own are for this machine, and no part of the kernel.
        if not function.is_declaration and not re.match(r"_ZN[0-9]+kvloom", function.name):
            function.linkage = "available_externally"
    print(target.emit_assembly(module))
"""


def test_kernels_compile_for_aarch64_to_wide_moves_without_a_call_of_memcpy() -> None:
    assembly = run(AARCH64)
    assert assembly.count(".globl\t_ZN16kvloom_generated") == 8
    assert "\tldp\tq" in assembly
    assert "\tstp\tq" in assembly
    assert "\tstnp\tq" in assembly  # past the caches
    assert "\tdmb\tish" in assembly
    assert "memcpy" not in assembly
    assert "memmove" not in assembly


# --- how machine code is kept ---------------------------------------------------------------------

# Gathers three rows of 5 bytes, after kernels of two layouts were made.
GATHER = """
import json, warnings
import numpy as np
from kvloom._kernel import HELPERS
from kvloom_generated import nl_x_nb_bs_hs, nl_x_nbbs_one_hs

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    nl_x_nbbs_one_hs.kernels(HELPERS)
    gather = nl_x_nb_bs_hs.kernels(HELPERS).gather_slots

cache, chunk = np.arange(1, 41, dtype=np.uint8).reshape(4, 2, 5), np.zeros((3, 5), np.uint8)
columns = dict.fromkeys(nl_x_nb_bs_hs.LAYOUT.geometry, 0)
columns |= {"block_size": 2, "engine.block": 10, "engine.token": 5, "chunk.token": 5, "run": 5}
pointers, slots, order = np.array([cache.ctypes.data]), np.array([7, 0, 3]), np.arange(3)
gather(pointers, chunk.ctypes.data, slots, order, np.array([[*columns.values()]]), 0, 1, 0, 3)
print(json.dumps({
    "whole": (chunk == cache.reshape(8, 5)[slots]).all().item(),
    "first bytes": (chunk[:, 0] == cache.reshape(8, 5)[slots, 0]).all().item(),
    "from disk": sum(gather.stats.cache_hits.values()),
    "warnings": [f"{one.category.__name__}: {one.message}" for one in caught],
}))
"""

CHANGED = '''

@numba.njit(**_OPTIONS)
def copy(target: int, source: int, nbytes: int, streaming: bool) -> None:
    """Copy the first byte alone."""
    _move1(target, source)
'''


def run(script: str, root: Path = ROOT, **environment: str) -> str:
    """What ``script`` prints, with runtime and generated modules from ``root``."""
    path = os.pathsep.join(str(root / folder) for folder in ("runtime", "generated"))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def gathered(root: Path, **environment: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(GATHER, root, **environment))
    return found


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A copy of the runtime and the generated modules without anything that was compiled."""
    for folder in ("runtime", "generated"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    return tmp_path


def test_machine_code_is_kept_until_a_helper_changes(installed: Path, tmp_path: Path) -> None:
    kept = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    right = {"whole": True, "first bytes": True, "warnings": []}
    assert gathered(installed, **kept) == {**right, "from disk": 0}
    assert gathered(installed, **kept) == {**right, "from disk": 1}
    with (installed / "runtime/kvloom/_kernel.py").open("a", encoding="utf-8") as helpers:
        helpers.write(CHANGED)
    assert gathered(installed, **kept) == {**right, "from disk": 0, "whole": False}


def test_without_a_writable_cache_folder_kernels_run_and_one_warning_says_so(
    installed: Path, tmp_path: Path
) -> None:
    # A file where a folder should be stops even a user who may write everywhere.
    file = tmp_path / "file"
    for path in (file, installed / "generated/kvloom_generated/__pycache__"):
        path.write_text("no folder", encoding="utf-8")
    nowhere = dict.fromkeys(("NUMBA_CACHE_DIR", "HOME", "XDG_CACHE_HOME"), str(file / "cache"))
    found = gathered(installed, **nowhere)
    (warning,) = found.pop("warnings")
    assert warning.startswith("RuntimeWarning: kvloom: numba finds no writable cache folder")
    assert "NUMBA_CACHE_DIR" in warning
    assert found == {"whole": True, "first bytes": True, "from disk": 0}
