"""What ``kvloom.lmcache`` offers is what LMCache binds: names, signatures, types, nothing more."""

from __future__ import annotations

import ctypes
import inspect
import os
import pickle
import subprocess
import sys
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvloom
import kvloom.lmcache as ops
from guard import guarded
from kvloom.lmcache import get_gpu_pci_bus_id, tensor_from_ptr

ROOT = Path(__file__).resolve().parent.parent

NAMES = [
    "DeviceHostFuncDispatcher",
    "EngineKVFormat",
    "GPUKVFormat",
    "PageBufferShapeDesc",
    "TransferDirection",
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
]

SIGNATURES = {
    "multi_layer_kv_transfer": "key_value, key_value_ptrs, slot_mapping, paged_memory_device, "
    "page_buffer_size, direction, engine_kv_format, block_size=0, head_size=0, "
    "skip_prefix_n_tokens=0, block_stride_elems=0",
    "multi_layer_kv_transfer_unilateral": "key_value, key_value_ptrs, slot_mapping, "
    "paged_memory_device, page_buffer_size, direction, engine_kv_format",
    "multi_layer_block_kv_transfer": "paged_buffer_ptrs_tensor, lmcache_objects_ptrs, block_ids, "
    "device, direction, shape_desc, lmcache_chunk_size, engine_kv_format, skip_prefix_n_blocks",
    "single_layer_kv_transfer": "lmc_key_value_cache, vllm_key_value_cache, slot_mapping, "
    "direction, engine_kv_format, token_major=False",
    "single_layer_kv_transfer_sgl": "lmc_key_value_cache, sgl_key_cache, sgl_value_cache, "
    "slot_mapping, direction, token_major=False",
    "load_and_reshape_flash": "key_value, key_cache, value_cache, slot_mapping, layer_idx",
    "reshape_and_cache_back_flash": "key_value, key_cache, value_cache, slot_mapping, layer_idx",
    "batched_memcpy": "src_ptrs, dst_ptrs, sizes",
    "lmcache_memcpy_async": "dest, src, nbytes, direction, host_buffer_offset, "
    "host_buffer_alignments",
    "rotary_embedding_k_fused": "old_positions, new_positions, key, head_size, cos_sin_cache, "
    "is_neox",
    "rotary_embedding_k_fused_strided": "old_positions, new_positions, key, head_size, "
    "head_stride, cos_sin_cache, is_neox",
    "get_gpu_pci_bus_id": "device_id=0",
    "tensor_from_ptr": "ptr, shape, dtype, device",
    "record_completion_on_stream": "cuda_stream_ptr, kind, payload",
    "drain_recorded_completions": "",
    "record_event_on_stream": "cuda_stream_ptr, event_type_name, session_id, str_metadata, "
    "int_metadata",
    "drain_recorded_events": "",
    "DeviceHostFuncDispatcher": "drain_interval_seconds=0.005",
    "submit_callback_to_stream": "stream, kind, payload",
}

# Wire ids and names are read by others, so here they are written once more.
FORMATS = [
    "NB_NL_TWO_BS_NH_HS",
    "NL_X_TWO_NB_BS_NH_HS",
    "NL_X_NB_TWO_BS_NH_HS",
    "NL_X_NB_BS_HS",
    "TWO_X_NL_X_NBBS_NH_HS",
    "NL_X_NBBS_ONE_HS",
    "NL_X_TWO_NB_NH_BS_HS",
    "NL_X_NB_TWO_NH_BS_HS",
    "NB_NL_TWO_NH_BS_HS",
    "TWO_X_NL_X_NB_BS_NH_HS",
    "NL_X_NB_NH_BS_TWO_HS",
    "NL_X_NB_BS_NH_TWO_HS",
    "NL_X_NB_NH_BS_CS",
    "NL_X_NB_BS_NH_CS",
    "NL_X_NB_BSV_BSS",
    "NL_X_TWO_NB_NH_ONE_BS_HS",
    "NL_X_TWO_X_NB_BS_NH_HS",
    "NL_X_NP_X_NB_BS_ONE_HS",
    "NL_X_NB_BS_NH_HS",
]

own_types = pytest.mark.skipif(
    find_spec("lmcache") is not None, reason="LMCache is here, and so are its types"
)


def parameters(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def run(script: str) -> str:
    """What ``script`` writes in a fresh interpreter."""
    path = os.pathsep.join(str(ROOT / one) for one in ("runtime", "generated"))
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# --- names and signatures ------------------------------------------------------------------------


def test_the_module_lists_the_contract_and_nothing_else() -> None:
    assert dir(ops) == NAMES
    assert set(NAMES) | {"install"} == set(ops.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there_and_can_be_called(name: str) -> None:
    assert callable(getattr(ops, name))


@pytest.mark.parametrize(
    "name",
    [
        "execute_object_group_transfer",
        "execute_cb_retrieve_plan_flat",
        "execute_direct_copy_transfer",
        "pop_completed_phase_timings",
        "anything_else",
    ],
)
def test_what_lmcache_switches_on_is_not_there(name: str) -> None:
    assert not hasattr(ops, name)
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
        getattr(ops, name)


def test_every_operator_has_a_signature_here() -> None:
    types = {"EngineKVFormat", "GPUKVFormat", "PageBufferShapeDesc", "TransferDirection"}
    assert set(SIGNATURES) == set(NAMES) - types


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_the_order_names_and_defaults_of_the_contract(name: str) -> None:
    found = parameters(getattr(ops, name))
    assert {one.kind for one in found} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    shown = (str(one.replace(annotation=inspect.Parameter.empty)) for one in found)
    assert ", ".join(shown).replace(" = ", "=") == SIGNATURES[name]


@pytest.mark.parametrize(
    ("method", "expected"),
    [("register", ["kind", "handler", "payload_type"]), ("start", []), ("stop", [])],
)
def test_the_dispatchers_methods_need_no_more_than_the_contract(
    method: str, expected: list[str]
) -> None:
    found = parameters(getattr(ops.DeviceHostFuncDispatcher, method))[1:]
    assert [one.name for one in found if one.default is one.empty] == expected


def test_lmcache_reads_that_objects_may_be_tensors() -> None:
    found = inspect.signature(ops.multi_layer_block_kv_transfer).parameters["lmcache_objects_ptrs"]
    assert "Tensor" in str(found.annotation)
    assert "list[int]" in str(found.annotation)


@own_types
def test_importing_it_imports_neither_a_compiler_nor_lmcache() -> None:
    script = """
import sys
import kvloom.lmcache
print(*{"numba", "llvmlite", "lmcache", "msgspec"} & set(sys.modules))
kvloom.lmcache.EngineKVFormat
print(*{"lmcache"} & set(sys.modules))
"""
    assert run(script).split() == []


# --- types without LMCache -----------------------------------------------------------------------


@own_types
def test_formats_have_the_registrys_names_and_ids() -> None:
    formats = ops.EngineKVFormat
    assert issubclass(formats, IntEnum)
    assert [(one.name, one.value) for one in formats] == [
        (name, number) for number, name in enumerate(FORMATS)
    ]
    registered = {one.id: one.name for one in kvloom.layouts() if one.id is not None}
    assert {one.value: one.name for one in formats} == registered


@own_types
def test_gpu_kv_format_is_the_same_object() -> None:
    assert ops.GPUKVFormat is ops.EngineKVFormat


@own_types
def test_directions_are_ints() -> None:
    assert issubclass(ops.TransferDirection, IntEnum)
    assert {one.name: int(one) for one in ops.TransferDirection} == {"H2D": 0, "D2H": 1}


@own_types
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_members_survive_pickling_as_themselves(protocol: int) -> None:
    for one in [*ops.EngineKVFormat, *ops.TransferDirection]:
        assert pickle.loads(pickle.dumps(one, protocol)) is one


@own_types
def test_a_pickled_member_is_read_where_nothing_was_imported() -> None:
    data = pickle.dumps([ops.EngineKVFormat.NL_X_NB_BS_HS, ops.TransferDirection.D2H])
    assert run(f"import pickle; print(*map(int, pickle.loads({data!r})))").split() == ["3", "1"]


@own_types
def test_a_description_begins_with_zeros_and_takes_any_attribute() -> None:
    one, other = ops.PageBufferShapeDesc(), ops.PageBufferShapeDesc()
    names = ("nl", "nb", "bs", "nh", "hs", "element_size", "kv_size", "block_stride_elems")
    assert [getattr(one, name) for name in names] == [0] * len(names)
    assert not hasattr(one, "dtype")
    for number, name in enumerate((*names, "dtype", "of_a_later_version")):
        setattr(one, name, number)
        assert getattr(one, name) == number
    assert not hasattr(other, "dtype")
    assert other.nl == 0


def test_types_do_not_change_from_one_look_to_the_next() -> None:
    for name in ("EngineKVFormat", "TransferDirection", "PageBufferShapeDesc"):
        assert getattr(ops, name) is getattr(ops, name)


# --- get_gpu_pci_bus_id --------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [(0, 0x29, 0), (0x10, 0xAB, 0x1F)]
    gpus = [
        SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=device)
        for domain, bus, device in places
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpus[number])


def test_without_a_gpu_there_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_gpu_pci_bus_id() is None
    assert get_gpu_pci_bus_id(0) is None
    assert get_gpu_pci_bus_id(device_id=7) is None


def test_an_address_is_written_in_upper_case(two_gpus: None) -> None:
    assert get_gpu_pci_bus_id() == "0000:29:00.0"
    assert get_gpu_pci_bus_id(1) == "0010:AB:1F.0"


@pytest.mark.parametrize("number", [2, -1, 1 << 70])
def test_a_gpu_that_is_not_there_has_no_address(two_gpus: None, number: int) -> None:
    assert get_gpu_pci_bus_id(number) is None


@pytest.mark.parametrize("wrong", ["0", None, 0.0, True])
def test_the_number_of_a_gpu_is_an_integer(wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"^device_id: got {wrong!r}, takes an integer"):
        get_gpu_pci_bus_id(wrong)


# --- tensor_from_ptr -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float64], ids=str
)
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
@pytest.mark.parametrize("shape", [(2, 3), [6], torch.Size([1, 6, 1]), ()])
def test_a_tensor_is_a_view_of_the_memory(
    dtype: torch.dtype, device: torch.device | str, shape: Any
) -> None:
    memory = guarded(6 * dtype.itemsize)
    memory.copy_(torch.arange(len(memory)) % 2)
    tensor = tensor_from_ptr(memory.data_ptr(), shape, dtype, device)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == (torch.Size(shape), dtype, "cpu")
    assert tensor.data_ptr() == memory.data_ptr()
    assert tensor.is_contiguous()
    seen = tensor.reshape(-1).view(torch.uint8)
    assert torch.equal(seen, memory[: len(seen)])
    seen.fill_(1)
    assert (memory[: len(seen)] == 1).all()
    memory.zero_()
    assert not seen.any()


def test_a_tensor_may_lie_at_any_byte() -> None:
    memory = (ctypes.c_uint8 * 16)(*range(16))
    tensor = tensor_from_ptr(ctypes.addressof(memory) + 3, (2, 4), torch.uint8, "cpu")
    assert tensor.tolist() == [[3, 4, 5, 6], [7, 8, 9, 10]]
    tensor[1, 3] = 99
    assert memory[10] == 99
    assert bytes(memory)[11:] == bytes(range(11, 16))


@pytest.mark.parametrize("shape", [(0,), (3, 0, 4)])
@pytest.mark.parametrize("address", [0, 1 << 20])
def test_a_tensor_without_elements_needs_no_memory(shape: tuple[int, ...], address: int) -> None:
    tensor = tensor_from_ptr(address, shape, torch.float16, "cpu")
    assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.float16)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"ptr": 0}, ValueError, "ptr: got 0, takes an address with 16 bytes behind it"),
        ({"ptr": -8}, ValueError, "ptr: got -8, takes an address"),
        ({"ptr": 1 << 64}, ValueError, "ptr: got 18446744073709551616, takes an address"),
        ({"ptr": (1 << 64) - 15}, ValueError, "ptr: got .*, takes an address with 16 bytes"),
        ({"ptr": 1.0}, TypeError, r"ptr: got 1\.0, takes an integer"),
        ({"ptr": None}, TypeError, "ptr: got None, takes an integer"),
        ({"shape": (2, -1)}, ValueError, r"shape: got \(2, -1\), takes sizes of 0 or more"),
        ({"shape": (1 << 62,)}, ValueError, "shape: got .*, takes less than"),
        ({"shape": (0, 1 << 62)}, ValueError, "shape: got .*, takes less than"),
        ({"shape": (2, 2.0)}, TypeError, r"shape\[1\]: got 2\.0, takes an integer"),
        ({"shape": 4}, TypeError, "shape: got int, takes a list or tuple of sizes"),
        ({"shape": "4"}, TypeError, "shape: got str, takes a list or tuple of sizes"),
        ({"dtype": "float32"}, TypeError, r"dtype: got 'float32', takes a torch\.dtype"),
        ({"dtype": None}, TypeError, r"dtype: got None, takes a torch\.dtype"),
        ({"dtype": torch.quint8}, TypeError, r"dtype: got torch\.quint8, takes .* not quantized"),
        ({"device": "nowhere"}, ValueError, "device: got 'nowhere', takes a torch.device"),
        ({"device": None}, TypeError, "device: got None, takes a torch.device"),
        ({"device": "cuda:0"}, NotImplementedError, "device: got cuda:0, takes cpu"),
        ({"device": "meta"}, NotImplementedError, "device: got meta, takes cpu"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    memory = torch.zeros(4)
    given: dict[str, Any] = {
        "ptr": memory.data_ptr(),
        "shape": (2, 2),
        "dtype": torch.float32,
        "device": "cpu",
        **changed,
    }
    with pytest.raises(error, match=f"^{message}"):
        tensor_from_ptr(**given)


RACE = """
import sys, threading
sys.setswitchinterval(1e-6)
import kvloom.lmcache as ops
together, found = threading.Barrier(8), []
def ask():
    together.wait()
    found.append(ops.EngineKVFormat)
threads = [threading.Thread(target=ask) for _ in range(8)]
for one in threads: one.start()
for one in threads: one.join()
print(len(found), len(set(map(id, found))))
"""


def test_threads_that_ask_for_a_type_first_get_the_same() -> None:
    path = os.pathsep.join(str(ROOT / name) for name in ("runtime", "generated"))
    done = subprocess.run(
        [sys.executable, "-c", RACE],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "8 1\n", done.stderr
