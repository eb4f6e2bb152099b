"""kvloom gets into LMCache by each of the ways that there are, and brings in nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="`make test` puts LMCache on the path")

import lmcache
import lmcache.lmcache_native as native
import msgspec
from lmcache import device_ops
from lmcache.v1.multiprocess import native_completion
from lmcache.v1.platform.devices.cpu.device_ops import CpuDeviceOps

import kvloom.lmcache
from kvloom.lmcache import wire

pytestmark = pytest.mark.lmcache

# What the drop-in is promised to have, by `bind_native` and otherwise.
OPERATORS = {
    "batched_memcpy",
    "drain_recorded_completions",
    "drain_recorded_events",
    "get_gpu_pci_bus_id",
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
    "DeviceHostFuncDispatcher",
}
TYPES = {"EngineKVFormat", "GPUKVFormat", "PageBufferShapeDesc", "TransferDirection"}
# LMCache takes other ways where an operator module has these.
SWITCHES = {
    "execute_object_group_transfer",
    "execute_cb_retrieve_plan_flat",
    "execute_direct_copy_transfer",
    "pop_completed_phase_timings",
}

INSTALLED = Path(lmcache.__file__).parents[2]  # one folder for each release, one for what they need
OLDER = "0.4.7"


def run(script: str, *arguments: str, release: str = "", **environment: str) -> Any:
    """What ``script`` prints last, as JSON, in a fresh interpreter with a release of LMCache."""
    result = start(script, *arguments, release=release, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def start(
    script: str, *arguments: str, release: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """``script`` in a fresh interpreter, in which LMCache itself chooses the device."""
    home = INSTALLED / release if release else Path(lmcache.__file__).parents[1]
    path = os.pathsep.join([str(home), str(INSTALLED / "packages")])
    plain = {name: value for name, value in os.environ.items() if name != "LMCACHE_DEVICE_BACKEND"}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**plain, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# --- bound to LMCache's operators -----------------------------------------------------------------


def test_binding_brings_in_the_promised_names_and_no_others() -> None:
    operators = CpuDeviceOps()
    before = {*vars(operators)}
    operators.bind_native(kvloom.lmcache)
    assert {*vars(operators)} - before == OPERATORS | TYPES
    ours = {name for name in OPERATORS if vars(operators)[name] is getattr(kvloom.lmcache, name)}
    assert ours == OPERATORS
    assert {name for name in SWITCHES if hasattr(operators, name)} == set()


def test_the_types_are_those_of_the_native_module() -> None:
    assert kvloom.lmcache.EngineKVFormat is native.EngineKVFormat
    assert kvloom.lmcache.GPUKVFormat is native.EngineKVFormat
    assert kvloom.lmcache.TransferDirection is native.TransferDirection
    assert kvloom.lmcache.PageBufferShapeDesc is native.PageBufferShapeDesc


def test_the_types_without_the_native_module_have_its_names_and_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(wire, "import_module", missing)
    types = wire.types()
    for name in ("EngineKVFormat", "TransferDirection"):
        theirs = getattr(native, name).__members__
        assert types[name] is not getattr(native, name)
        assert {one.name: int(one) for one in types[name]} == {n: int(theirs[n]) for n in theirs}
    assert types["GPUKVFormat"] is types["EngineKVFormat"]
    theirs = native.PageBufferShapeDesc()
    ours = vars(types["PageBufferShapeDesc"]())
    assert ours == {name: getattr(theirs, name) for name in ours}


class Stored(msgspec.Struct):
    """What a handler is told."""

    keys: list[str]
    tokens: int


class Stream:
    """All that is asked of a stream."""

    ptr = 0


def test_lmcache_hands_on_completions_that_kvloom_recorded(bound: pytest.MonkeyPatch) -> None:
    assert device_ops.record_completion_on_stream is kvloom.lmcache.record_completion_on_stream
    dispatcher = native_completion.DeviceHostFuncDispatcher(0.001)
    handled: list[Stored] = []
    enough = Event()

    def handle(stored: Stored) -> None:
        handled.append(stored)
        if len(handled) == 3:
            enough.set()

    def fail(tokens: int) -> None:
        raise RuntimeError(tokens)

    dispatcher.register("stored", handle, Stored)
    dispatcher.register("failed", fail, int)
    dispatcher.start()
    try:
        sent = [Stored([f"key {number}"], number) for number in range(3)]
        for number, one in enumerate(sent):
            native_completion.submit_callback_to_stream(Stream(), "failed", number)
            native_completion.submit_callback_to_stream(Stream(), "stored", one)
        assert enough.wait(60)
    finally:
        dispatcher.stop()
    assert handled == sent
    assert dispatcher.handler_exception_counts() == {"failed": 3}
    assert kvloom.lmcache.drain_recorded_completions() == []


# --- found by its entry point ---------------------------------------------------------------------

CHOSEN = """
import json, sys
import torch

if "accelerated" in sys.argv:
    torch.cuda.is_available = lambda: True
import lmcache
from lmcache.v1.platform import current_device_spec, resolve_device_ops

import kvloom.lmcache as ours

theirs = lmcache.device_ops
print(json.dumps({
    "backend": current_device_spec.backend_name,
    "device": lmcache.torch_device_type,
    "the same for tensors on the CPU": resolve_device_ops("cpu") is theirs,
    "operators": [
        name for name in dir(ours) if getattr(theirs, name, None) is getattr(ours, name)
    ],
}))
"""


@pytest.mark.parametrize("asked", ["", " KVLOOM "], ids=["not asked", "asked"])
def test_lmcache_takes_kvloom_where_no_accelerator_is(asked: str) -> None:
    said = run(CHOSEN, **({"LMCACHE_DEVICE_BACKEND": asked} if asked else {}))
    assert said == {
        "backend": "kvloom",
        "device": "cpu",
        "the same for tensors on the CPU": True,
        "operators": sorted(OPERATORS | TYPES),
    }


def test_lmcache_does_not_take_kvloom_where_an_accelerator_is() -> None:
    said = run(CHOSEN, "accelerated")
    assert said["backend"] != "kvloom"
    assert OPERATORS & {*said["operators"]} == set()


def test_lmcache_takes_kvloom_beside_an_accelerator_if_asked() -> None:
    said = run(CHOSEN, "accelerated", LMCACHE_DEVICE_BACKEND="kvloom")
    assert (said["backend"], said["operators"]) == ("kvloom", sorted(OPERATORS | TYPES))


def test_lmcache_does_not_take_kvloom_if_asked_for_its_own_cpu() -> None:
    # Its own can't be asked for: it is what remains where nothing is available.
    result = start(CHOSEN, LMCACHE_DEVICE_BACKEND="cpu")
    assert result.returncode != 0
    assert "'cpu' is registered but not available" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("asked", "accelerated", "available"),
    [
        ("", False, True),
        ("", True, False),
        ("kvloom", True, True),
        ("kvloom", False, True),
        ("cpu", False, False),
        ("cuda", True, False),
    ],
)
def test_the_device_is_available_without_an_accelerator_or_if_asked_for(
    asked: str, accelerated: bool, available: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvloom.lmcache.plugin import KvloomDeviceSpec

    monkeypatch.setenv("LMCACHE_DEVICE_BACKEND", asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: accelerated)
    assert KvloomDeviceSpec().is_available() is available


# --- installed as its operator module -------------------------------------------------------------

# Before LMCache is imported, or after it and modules that have its operators by name. Its client
# takes all on the CPU for HND.
INSTALL = """
import importlib, json, sys
import torch
import kvloom.lmcache as ours

USERS = ("v1.memory_management", "v1.kv_layer_groups", "v1.gpu_connector.utils",
         "v1.multiprocess.native_completion")

def users():
    return [importlib.import_module(f"lmcache.{name}") for name in USERS]

when, calls = sys.argv[1], int(sys.argv[2])
finders = len(sys.meta_path)
if when == "after":
    import lmcache
    users()
    import lmcache.c_ops, lmcache.python_ops_fallback
for _ in range(calls):
    ours.install()
import lmcache
from lmcache import c_ops
import lmcache.python_ops_fallback as in_python
for _ in range(calls - 1):
    ours.install()

found = {name: getattr(c_ops, name) for name in dir(c_ops) if not name.startswith("_")}
tensors = [torch.randint(0, 255, (2, 9, 4, 3, 8), dtype=torch.uint8) for _ in range(2)]
slots = torch.tensor([35, 0, 7, 8, 21])
chunk = torch.zeros(2, 2, 5, 24, dtype=torch.uint8)
memory = importlib.import_module("lmcache.v1.memory_management")
memory.lmc_ops.multi_layer_kv_transfer(
    chunk,
    torch.tensor([one.data_ptr() for one in tensors]),
    slots,
    torch.device("cpu"),
    36,
    c_ops.TransferDirection.D2H,
    c_ops.GPUKVFormat.NL_X_TWO_NB_BS_NH_HS,
    block_size=4,
    head_size=8,
)
rows = torch.stack([one.view(2, 36, 24)[:, slots] for one in tensors], dim=1)
base = importlib.import_module("lmcache.v1.multiprocess.transfer_context.base")
apart = [one.view(2, 9, 3, 4, 8) for one in tensors]
blocks = base.gather_paged_kv_to_cpu(dict(enumerate(apart)), [3, 1, 8, 0], 2)
wanted = [one[:, [8, 0]].transpose(2, 3).reshape(2, 8, 24) for one in apart]

print(json.dumps({
    "one module": lmcache.c_ops is c_ops is sys.modules["lmcache.c_ops"],
    "its users have it": [
        name for name, user in zip(USERS, users())
        for one in vars(user).values() if one is c_ops
    ],
    "ours": [name for name in dir(ours) if found.get(name) is getattr(ours, name)],
    "ours in Python": [
        name for name in dir(ours) if getattr(in_python, name, None) is getattr(ours, name)
    ],
    "theirs": {name: found[name].__module__ for name in sys.argv[3].split(",")},
    "switches": [name for name in sys.argv[4].split(",") if name in found],
    "right": [torch.equal(chunk, rows), torch.equal(blocks[1], torch.stack(wanted, dim=1))],
    "finders": len(sys.meta_path) - finders,
}))
"""


@pytest.mark.parametrize("calls", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_installing_makes_kvloom_the_operator_module_of_older_releases(
    when: str, calls: int
) -> None:
    kept = {"alloc_pinned_ptr", "free_pinned_ptr", "calculate_cdf", "encode_fast_new"}
    kept |= {"TransferDirection", "GPUKVFormat", "EngineKVFormat", "PageBufferShapeDesc"}
    said = run(INSTALL, when, str(calls), ",".join(kept), ",".join(SWITCHES), release=OLDER)
    users = ["memory_management", "kv_layer_groups", "gpu_connector.utils"]
    users.append("multiprocess.native_completion")
    assert said == {
        "one module": True,
        "its users have it": [f"v1.{name}" for name in users],
        "ours": sorted(OPERATORS),
        "ours in Python": sorted(OPERATORS),
        "theirs": dict.fromkeys(kept, "lmcache.python_ops_fallback"),
        "switches": [],
        "right": [True, True],
        "finders": 0,
    }


# Without the entry point, by which LMCache would have taken kvloom before.
BIND = """
import importlib.metadata, json, sys

importlib.metadata.entry_points = lambda **_: []
import kvloom.lmcache as ours

if sys.argv[1] == "after":
    import lmcache
    before = lmcache.device_ops
ours.install()
import lmcache
ours.install()
theirs = lmcache.device_ops
print(json.dumps({
    "class": type(theirs).__name__,
    "the same": sys.argv[1] == "before" or theirs is before,
    "operators": [
        name for name in dir(ours) if getattr(theirs, name, None) is getattr(ours, name)
    ],
    "c_ops": "lmcache.c_ops" in sys.modules,
}))
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_installing_binds_the_operators_of_newer_releases(when: str) -> None:
    assert run(BIND, when) == {
        "class": "CpuDeviceOps",
        "the same": True,
        "operators": sorted(OPERATORS | TYPES),
        "c_ops": False,
    }
