"""Plain copies: all bytes of what is asked for and no other, in pieces that CUDA can take."""

from __future__ import annotations

import enum
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from guard import guarded
from kvloom import moves
from kvloom.lmcache import TransferDirection, batched_memcpy, lmcache_memcpy_async, memcpy
from kvloom.lmcache.memcpy import pieces

Bytes = NDArray[np.uint8]

ROOT = Path(__file__).resolve().parent.parent
PAGE = 4096
GIB = 1 << 30


class Plain(enum.Enum):
    """An enum that is no int, as those of LMCache's native module."""

    H2D = 0
    D2H = 1
    OTHER = 2


def some_bytes(count: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def at(array: Bytes, offset: int = 0) -> int:
    """The address of a byte of an array."""
    return array.ctypes.data + offset


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """What is shared among three threads, instead of as many as there are processors."""
    parts: list[range] = []
    real = memcpy.share

    def share(work: Any, given: list[range], helpers: int) -> None:
        parts.extend(given)
        real(work, given, helpers)

    monkeypatch.setattr(memcpy, "share", share)
    for module in (moves, memcpy):
        monkeypatch.setattr(module, "threads", lambda: 3)
    return parts


# --- batched_memcpy ------------------------------------------------------------------------------


@given(
    copies=st.lists(
        st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(-3, 60)), max_size=6
    ),
    within=st.booleans(),
)
def test_every_entry_is_copied_in_turn_and_nothing_else_changes(
    copies: list[tuple[int, int, int]], within: bool
) -> None:
    source = some_bytes(160)
    target = source if within else some_bytes(160, seed=1)
    expected = bytearray(target)
    for from_, to, size in copies:
        if size > 0:
            read = expected if within else source.tobytes()
            expected[to : to + size] = bytes(read[from_ : from_ + size])
    batched_memcpy(
        [at(source, from_) for from_, _, _ in copies],
        [at(target, to) for _, to, _ in copies],
        [size for _, _, size in copies],
    )
    assert target.tobytes() == bytes(expected)


@pytest.mark.parametrize("nothing", [0, -1, -(1 << 70)])
@pytest.mark.parametrize("address", [0, -5, 1 << 64, None])
def test_sizes_of_nothing_are_skipped_wherever_they_point(
    nothing: int, address: int | None
) -> None:
    source, target = some_bytes(8), np.zeros(8, np.uint8)
    there = at(target) if address is None else address
    batched_memcpy([there, at(source)], [there, at(target, 4)], [nothing, 4])
    assert target.tolist() == [0] * 4 + source[:4].tolist()


def test_no_entries_are_nothing_to_do() -> None:
    batched_memcpy([], [], [])


@pytest.mark.parametrize("end", [True, False])
def test_a_copy_touches_no_byte_beside_what_it_copies(end: bool) -> None:
    for nbytes in (1, 63, PAGE, PAGE + 1):
        source, target = guarded(nbytes, end), guarded(nbytes, end)
        source.copy_(torch.from_numpy(some_bytes(nbytes)))
        batched_memcpy([source.data_ptr()], [target.data_ptr()], [nbytes])
        assert torch.equal(source, target)


@pytest.mark.parametrize("short", range(3))
@pytest.mark.parametrize("count", [0, 1, 3])
def test_lists_of_different_lengths_are_refused(short: int, count: int) -> None:
    source, target = some_bytes(8), np.zeros(8, np.uint8)
    lists = [[at(source)] * 2, [at(target)] * 2, [8] * 2]
    lists[short] = (lists[short] * 2)[:count]
    with pytest.raises(ValueError, match=r"^(dst_ptrs|sizes): got \d entries, takes \d, as src_pt"):
        batched_memcpy(*lists)
    assert not target.any()


@pytest.mark.parametrize("name", ["src_ptrs", "dst_ptrs", "sizes"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (7, ": got int, takes a list of integers"),
        (b"\x08\x08", ": got bytes, takes a list of integers"),
        (None, ": got NoneType, takes a list of integers"),
        ([8, 1.5], r"\[1\]: got 1\.5, takes an integer"),
        ([8, None], r"\[1\]: got None, takes an integer"),
        ([8, True], r"\[1\]: got True, takes an integer"),
        ([8, "8"], r"\[1\]: got '8', takes an integer"),
    ],
)
def test_what_is_no_integer_is_refused_before_a_byte_moves(
    name: str, wrong: Any, message: str
) -> None:
    source, target = some_bytes(16), np.zeros(16, np.uint8)
    given = {"src_ptrs": [at(source)] * 2, "dst_ptrs": [at(target)] * 2, "sizes": [8, 8]}
    if isinstance(wrong, list):
        wrong = [given[name][0], wrong[1]]
    with pytest.raises(TypeError, match=f"^{name}{message}"):
        batched_memcpy(**{**given, name: wrong})
    assert not target.any()


@pytest.mark.parametrize("name", ["src_ptrs", "dst_ptrs"])
@pytest.mark.parametrize("wrong", [0, -1, 1 << 64, (1 << 64) - 7])
def test_what_can_be_no_address_is_refused_before_a_byte_moves(name: str, wrong: int) -> None:
    source, target = some_bytes(8), np.zeros(8, np.uint8)
    given = {"src_ptrs": [at(source)] * 2, "dst_ptrs": [at(target)] * 2, "sizes": [8, 8]}
    given[name] = [given[name][0], wrong]
    with pytest.raises(ValueError, match=rf"^{name}\[1\]: got {wrong}, takes an address with 8 by"):
        batched_memcpy(**given)
    assert not target.any()


def test_a_large_copy_is_shared_among_threads(three_threads: list[range]) -> None:
    nbytes = moves.SHARED_FROM + 4321
    source, target = some_bytes(nbytes + 9), some_bytes(nbytes + 9, seed=1)
    before = target.copy()
    batched_memcpy([at(source, 3)], [at(target, 5)], [nbytes])
    assert len(three_threads) == 3
    assert [three_threads[0].start, three_threads[-1].stop] == [0, nbytes]
    assert all(a.stop == b.start for a, b in pairwise(three_threads))
    assert (target[5:-4] == source[3:-6]).all()
    assert (target[:5] == before[:5]).all()
    assert (target[-4:] == before[-4:]).all()


@pytest.mark.parametrize("shift", [-100, 100, 0])
def test_an_entry_that_overlaps_itself_is_copied_as_by_memmove(
    shift: int, three_threads: list[range]
) -> None:
    nbytes = moves.SHARED_FROM + 1000
    memory = some_bytes(nbytes + 200)
    moved = memory[100 : 100 + nbytes].copy()
    batched_memcpy([at(memory, 100)], [at(memory, 100 + shift)], [nbytes])
    assert (memory[100 + shift : 100 + shift + nbytes] == moved).all()
    assert not three_threads


# --- lmcache_memcpy_async ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "direction", [*TransferDirection, Plain.H2D, Plain.D2H, 0, 1, False, True], ids=repr
)
@pytest.mark.parametrize("tensors", [True, False])
def test_any_name_of_a_direction_does(direction: Any, tensors: bool) -> None:
    source, target = torch.from_numpy(some_bytes(100)), torch.zeros(100, dtype=torch.uint8)
    pair = (target, source) if tensors else (target.data_ptr(), source.data_ptr())
    lmcache_memcpy_async(*pair, 60, direction, 0, 64)
    assert torch.equal(target[:60], source[:60])
    assert not target[60:].any()


@pytest.mark.parametrize(
    ("direction", "error"),
    [
        (2, ValueError),
        (-1, ValueError),
        (Plain.OTHER, ValueError),
        ("H2D", TypeError),
        (0.0, TypeError),
        (None, TypeError),
    ],
)
def test_what_is_no_direction_is_refused(direction: Any, error: type[Exception]) -> None:
    source, target = torch.ones(4), torch.zeros(4)
    for pair in ((target, source), (target.data_ptr(), source.data_ptr())):
        with pytest.raises(error, match=r"^direction: got "):
            lmcache_memcpy_async(*pair, 16, direction, 0, 64)
    assert not target.any()


@given(
    nbytes=st.integers(0, 300),
    offset=st.integers(0, 500),
    alignment=st.integers(0, 12).map(lambda power: 1 << power),
)
def test_a_copy_between_addresses_has_all_bytes_wherever_the_host_buffer_is_cut(
    nbytes: int, offset: int, alignment: int
) -> None:
    source, target = some_bytes(310), some_bytes(310, seed=1)
    expected = target.copy()
    expected[7 : 7 + nbytes] = source[3 : 3 + nbytes]
    lmcache_memcpy_async(at(target, 7), at(source, 3), nbytes, 1, offset, alignment)
    assert (target == expected).all()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.bool], ids=str
)
def test_a_copy_between_tensors_has_all_bytes(dtype: torch.dtype) -> None:
    source = torch.from_numpy(some_bytes(96) % 2).view(dtype)
    target = torch.zeros_like(source)
    nbytes = 5 * source.element_size()
    lmcache_memcpy_async(target, source, nbytes, 0, 0, 64)
    assert torch.equal(target[:5], source[:5])
    assert not target[5:].any()
    lmcache_memcpy_async(target, source, source.nbytes, 0, 0, 64)
    assert torch.equal(target, source)


def test_tensors_may_differ_in_shape_and_dtype_and_be_parts_of_others() -> None:
    source, target = torch.arange(24.0).view(2, 3, 4), torch.zeros(40, dtype=torch.int16)
    lmcache_memcpy_async(target[8:24], source[1], 32, 0, 0, 64)
    assert torch.equal(target[8:24].view(torch.float32), source[1].flatten()[:8])
    assert not target[:8].any()
    assert not target[24:].any()


def test_a_tensor_made_in_inference_mode_is_written_outside_of_it() -> None:
    with torch.inference_mode():
        target = torch.zeros(4)
    lmcache_memcpy_async(target, torch.ones(4), 16, 0, 0, 64)
    assert target.tolist() == [1.0] * 4


def test_a_large_copy_between_tensors_is_shared_among_threads(three_threads: list[range]) -> None:
    source = torch.from_numpy(some_bytes(moves.SHARED_FROM))
    target = torch.zeros_like(source)
    lmcache_memcpy_async(target, source, source.nbytes, 0, 0, 64)
    assert len(three_threads) == 3
    assert torch.equal(target, source)


@pytest.mark.parametrize("which", ["dest", "src"])
def test_a_tensor_with_gaps_is_refused_and_nothing_is_written(which: str) -> None:
    for wrong in (
        torch.zeros(4, 8)[:, :4],
        torch.zeros(4, 4).t(),
        torch.zeros(1).expand(16),
        torch.zeros(32)[::2],
    ):
        given = {"dest": torch.zeros(16), "src": torch.ones(16), which: wrong}
        with pytest.raises(ValueError, match=f"^{which}: .*takes a contiguous tensor"):
            lmcache_memcpy_async(given["dest"], given["src"], 64, 0, 0, 64)
        assert not given["dest"].any()


@pytest.mark.parametrize("which", ["dest", "src"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(16, requires_grad=True), "requires grad"),
        (lambda: torch.zeros(16).to_sparse(), "got strides that leave gaps"),
        (lambda: torch.zeros(16)._neg_view(), "is a conjugate or negative view"),
    ],
    ids=["grad", "sparse", "negative"],
)
def test_a_tensor_whose_bytes_are_not_its_values_is_refused(
    which: str, make: Any, message: str
) -> None:
    given = {"dest": torch.zeros(16), "src": torch.ones(16), which: make()}
    with pytest.raises(ValueError, match=f"^{which}: {message}"):
        lmcache_memcpy_async(given["dest"], given["src"], 64, 0, 0, 64)
    if which == "src":
        assert not given["dest"].any()


@pytest.mark.parametrize("pair", [(torch.zeros(4), 4096), (4096, torch.zeros(4))])
def test_an_address_beside_a_tensor_is_refused(pair: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError, match=r"^dest, src: got a tensor and an address, takes two of"):
        lmcache_memcpy_async(*pair, 16, 0, 0, 64)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"host_buffer_alignments": 0}, ValueError, "got 0, takes a positive power of two"),
        ({"host_buffer_alignments": 3}, ValueError, "got 3, takes a positive power of two"),
        ({"host_buffer_alignments": -4}, ValueError, "got -4, takes a positive power of two"),
        ({"host_buffer_alignments": 4.0}, TypeError, r"got 4\.0, takes an integer"),
        ({"host_buffer_alignments": True}, TypeError, "got True, takes an integer"),
        ({"host_buffer_offset": -1}, ValueError, "got -1, takes 0 or more"),
        ({"host_buffer_offset": (1 << 64) - 15}, ValueError, "got .* is beyond 64 bits"),
        ({"host_buffer_offset": 1 << 64}, ValueError, "got .* is beyond 64 bits"),
        ({"host_buffer_offset": None}, TypeError, "got None, takes an integer"),
        ({"nbytes": -16}, ValueError, "got -16, takes 0 or more"),
        ({"nbytes": 16.0}, TypeError, r"got 16\.0, takes an integer"),
    ],
)
@pytest.mark.parametrize("tensors", [True, False])
def test_a_wrong_number_is_refused_by_name_and_nothing_is_copied(
    changed: dict[str, Any], error: type[Exception], message: str, tensors: bool
) -> None:
    source, target = torch.ones(4), torch.zeros(4)
    given: dict[str, Any] = {
        "dest": target if tensors else target.data_ptr(),
        "src": source if tensors else source.data_ptr(),
        "nbytes": 16,
        "direction": 0,
        "host_buffer_offset": 0,
        "host_buffer_alignments": 64,
        **changed,
    }
    with pytest.raises(error, match=f"^{next(iter(changed))}: {message}"):
        lmcache_memcpy_async(**given)
    assert not target.any()


def test_a_copy_may_end_with_the_last_of_64_bits() -> None:
    source, target = torch.ones(4), torch.zeros(4)
    lmcache_memcpy_async(target, source, 16, 0, (1 << 64) - 16, 64)
    assert torch.equal(target, source)


@pytest.mark.parametrize("which", ["dest", "src"])
@pytest.mark.parametrize(
    ("nbytes", "message"),
    [(6, "got 6, takes a multiple of 4, the bytes of an element"), (20, "got 20, takes 16 at")],
)
def test_bytes_that_a_tensor_does_not_have_are_refused(
    which: str, nbytes: int, message: str
) -> None:
    given = {"dest": torch.zeros(64, dtype=torch.uint8), "src": torch.ones(64, dtype=torch.uint8)}
    given[which] = torch.zeros(4)
    with pytest.raises(ValueError, match=f"^nbytes: {message}.* of {which}$"):
        lmcache_memcpy_async(given["dest"], given["src"], nbytes, 0, 0, 64)
    assert not given["dest"].any()


@pytest.mark.parametrize("name", ["dest", "src"])
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (1 << 64, ValueError),
        ((1 << 64) - 15, ValueError),
        (1.5, TypeError),
        (None, TypeError),
        (True, TypeError),
        (b"address", TypeError),
    ],
)
def test_what_can_be_no_address_is_refused_by_name(
    name: str, wrong: Any, error: type[Exception]
) -> None:
    source, target = torch.ones(4), torch.zeros(4)
    given = {"dest": target.data_ptr(), "src": source.data_ptr(), name: wrong}
    with pytest.raises(error, match=f"^{name}: got "):
        lmcache_memcpy_async(given["dest"], given["src"], 16, 0, 0, 64)
    assert not target.any()


def test_a_copy_of_nothing_is_done_at_once() -> None:
    lmcache_memcpy_async(0, 0, 0, 0, 0, 1)
    lmcache_memcpy_async(torch.empty(0), torch.empty(0), 0, 0, 0, 1)


# --- pieces --------------------------------------------------------------------------------------


@given(
    offset=st.integers(0, 1 << 62),
    alignment=st.integers(0, 40).map(lambda power: 1 << power),
    data=st.data(),
)
def test_pieces_cover_a_copy_and_none_crosses_a_boundary(
    offset: int, alignment: int, data: st.DataObject
) -> None:
    nbytes = data.draw(st.integers(0, 50 * alignment))
    found = [(piece.start, piece.stop) for piece in pieces(offset, nbytes, alignment)]
    bounds = [0, *(stop for _, stop in found)]
    assert found == list(pairwise(bounds))  # adjacent, from the first byte on
    assert bounds[-1] == nbytes
    for start, stop in found:
        assert start < stop
        assert (offset + start) // alignment == (offset + stop - 1) // alignment
    # As few as there are segments.
    first, last = offset // alignment, (offset + nbytes - 1) // alignment
    assert len(found) == (last - first + 1 if nbytes else 0)


@pytest.mark.parametrize(
    ("offset", "nbytes", "alignment", "expected"),
    [
        pytest.param(4095, 2, 4096, [(0, 1), (1, 2)], id="just below a boundary"),
        pytest.param(4096, 4096, 4096, [(0, 4096)], id="one whole segment"),
        pytest.param(4096, 4097, 4096, [(0, 4096), (4096, 4097)], id="one byte more"),
        pytest.param(10, 20, 4096, [(0, 20)], id="inside a segment"),
        pytest.param(4095, 1, 4096, [(0, 1)], id="ends at a boundary"),
        pytest.param(
            GIB - 1,
            2 * GIB + 2,
            GIB,
            [(0, 1), (1, GIB + 1), (GIB + 1, 2 * GIB + 1), (2 * GIB + 1, 2 * GIB + 2)],
            id="2 GiB and more",
        ),
        pytest.param(0, 5 * GIB, 8 * GIB, [(0, 5 * GIB)], id="5 GiB in one piece"),
        pytest.param(0, 0, 64, [], id="nothing"),
    ],
)
def test_a_copy_is_cut_where_pinned_memory_is(
    offset: int, nbytes: int, alignment: int, expected: list[tuple[int, int]]
) -> None:
    """LMCache 2413, 3079, 4288."""
    assert [(one.start, one.stop) for one in pieces(offset, nbytes, alignment)] == expected


# --- with and without a device -------------------------------------------------------------------


def test_whether_a_device_is_there_is_asked_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = torch.ones(4), torch.zeros(4)
    copy = (target.data_ptr(), source.data_ptr(), 16, TransferDirection.H2D, 0, 64)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            with pytest.raises(NotImplementedError, match=r"^dest, src: addresses on a CUDA de"):
                lmcache_memcpy_async(*copy)
            assert not target.any()
            # What says itself where it is needs no device.
            lmcache_memcpy_async(target, source, 16, TransferDirection.H2D, 0, 64)
            assert torch.equal(target, source)
            target.zero_()
        lmcache_memcpy_async(*copy)
        assert torch.equal(target, source)
        target.zero_()


WITH_A_LIBRARY = """
import ctypes
import torch
import kvloom.lmcache as ops

loaded = []
real = ctypes.CDLL.__init__

def spy(self, name, *args, **kwargs):
    loaded.append(str(name))
    real(self, name, *args, **kwargs)

ctypes.CDLL.__init__ = spy

source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
pair = target.data_ptr(), source.data_ptr()
ops.lmcache_memcpy_async(*pair, 32, ops.TransferDirection.D2H, 0, 16)
ops.lmcache_memcpy_async(target[32:], source[32:], 16, ops.TransferDirection.H2D, 0, 16)
ops.batched_memcpy([pair[1] + 48], [pair[0] + 48], [16])
assert torch.equal(source, target), target
assert not torch.cuda.is_available()
assert not [name for name in loaded if "cuda" in name], loaded
with open("/proc/self/maps") as maps:
    assert "cudart" not in maps.read()
ctypes.CDLL("libcudart.so.12")  # it could have been loaded
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch itself has the library")
def test_a_cuda_library_without_a_device_changes_nothing(tmp_path: Path) -> None:
    """LMCache 3009."""
    from numpy.random import _common

    for name in ("libcudart.so", "libcudart.so.11.0", "libcudart.so.12", "libcudart.so.13"):
        shutil.copy(_common.__file__, tmp_path / name)
    path = os.pathsep.join(str(ROOT / one) for one in ("runtime", "generated"))
    result = subprocess.run(
        [sys.executable, "-c", WITH_A_LIBRARY],
        env={**os.environ, "PYTHONPATH": path, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
