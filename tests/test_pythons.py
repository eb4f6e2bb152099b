"""The other Pythons at hand import kvloom, generate the same files, and run kernels, without torch.

`make pythons` builds their environments under build/pythons.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOWEST = "3.10"  # where `make pythons` installs the lower bounds of pyproject.toml


@pytest.fixture(params=["3.10", "3.12", "3.13"])
def python(request: pytest.FixtureRequest) -> Path:
    """An interpreter of that version with numba, numpy and the generator's needs, but no torch."""
    version: str = request.param
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        pytest.skip(f"Python {version} runs the whole suite")
    interpreter = ROOT / "build/pythons" / version / "bin/python"
    if not (interpreter.parent.parent / ".ready").exists():
        pytest.skip(f"no Python {version} at hand when `make pythons` last ran")
    return interpreter


def run(python: Path, *command: str, path: str, **environment: str) -> str:
    """Run ``command`` in the checkout, with its source folders ``path`` alone to import from."""
    result = subprocess.run(
        [str(python), *command],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in path.split()),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_it_generates_what_is_checked_in(python: Path) -> None:
    run(python, "-m", "kvloom_codegen", "--check", path="codegen")


LIST_LAYOUTS = """
import importlib.util, json
import kvloom
assert importlib.util.find_spec("torch") is None
print(json.dumps([layout.name for layout in kvloom.layouts()]))
"""


def test_it_lists_the_layouts(python: Path) -> None:
    layouts = json.loads(run(python, "-c", LIST_LAYOUTS, path="runtime generated"))
    assert sorted(layouts) == sorted(path.stem for path in (ROOT / "specs/layouts").glob("*.yaml"))


# Three layers of [2, NB, BS, NH, HS], chunks of [2, layers, tokens, NH*HS], rows of 5 bytes.
RUN_KERNELS = """
import numpy as np
from kvloom._kernel import HELPERS
from kvloom_generated.nl_x_two_nb_bs_nh_hs import LAYOUT, kernels

layers, blocks, block_size, heads, row = 3, 5, 4, 2, 5
random = np.random.default_rng(2)

def engine():
    shape = (2, blocks, block_size, heads, row)
    return [random.integers(0, 256, shape, np.uint8) for _ in range(layers)]

def pointers(tensors):
    return np.array([tensor.ctypes.data for tensor in tensors], np.int64)

def geometry(tensor, chunk):
    columns = {"block_size": block_size, "run": row}
    columns.update(zip(["count.kv", "count.token", "count.head"], [2, block_size, heads]))
    columns.update(
        zip(["engine.kv", "engine.block", "engine.token", "engine.head"], tensor.strides)
    )
    columns.update(zip(["chunk.kv", "chunk.layer", "chunk.token"], chunk.strides))
    columns["chunk.head"] = row
    columns["chunk.block"] = block_size * columns["chunk.token"]
    return np.array([[columns[name] for name in LAYOUT.geometry]] * layers, np.int64)

run = kernels(HELPERS)

cache = engine()
slots = np.array([17, -1, 0, 19, 6, 7, -1], np.int64)
order = np.arange(len(slots))[::-1].copy()
chunk = np.zeros((2, layers, len(slots), heads * row), np.uint8)
table = geometry(cache[0], chunk)
run.gather_slots(
    pointers(cache), chunk.ctypes.data, slots, order, table, 0, layers, 0, len(slots)
)
expected = np.zeros_like(chunk)
for kv in range(2):
    for layer in range(layers):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, block_size)
                expected[kv, layer, token] = cache[layer][kv, block, offset].reshape(-1)
assert (chunk == expected).all()

cache, ids = engine(), np.array([4, 0, 2], np.int64)
expected = [tensor.copy() for tensor in cache]
chunk = random.integers(0, 256, (2, layers, len(ids) * block_size, heads * row), np.uint8)
table = geometry(cache[0], chunk)
run.scatter_blocks(
    pointers(cache), chunk.ctypes.data, ids, np.arange(3), table, 0, layers, 0, len(ids)
)
for kv in range(2):
    for layer in range(layers):
        for position, block in enumerate(ids.tolist()):
            for token in range(block_size):
                value = chunk[kv, layer, position * block_size + token].reshape(heads, row)
                expected[layer][kv, block, token] = value
assert all((tensor == wanted).all() for tensor, wanted in zip(cache, expected))
print("same bytes")
"""


def test_its_kernels_move_the_right_bytes(python: Path, tmp_path: Path) -> None:
    cache = str(tmp_path)
    said = run(python, "-c", RUN_KERNELS, path="runtime generated", NUMBA_CACHE_DIR=cache)
    assert said.split() == ["same", "bytes"]


VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""


@pytest.mark.parametrize("python", [LOWEST], indirect=True)
def test_the_lowest_python_runs_the_lowest_versions_that_are_promised(python: Path) -> None:
    promised = {
        requirement.name: next(str(s.version) for s in requirement.specifier if s.operator == ">=")
        for requirement in map(Requirement, importlib.metadata.requires("kvloom") or ())
        if requirement.name in ("numba", "numpy", "jinja2", "pyyaml", "pydantic")
    }
    assert len(promised) == 5
    installed = json.loads(run(python, "-c", VERSIONS, *promised, path=""))
    short = {
        name: version
        for name, version in installed.items()
        if Version(version).release[: len(Version(promised[name]).release)]
        != Version(promised[name]).release
    }
    assert short == {}, f"pyproject.toml promises {promised}"
