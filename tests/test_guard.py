"""Guarded tensors: every byte inside is usable, one byte outside kills the process."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch

from guard import PAGE, exit_signal, faults, guarded, guarded_like, guarded_tensor

SIZES = [1, 7, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5]


def load(address: int) -> int:
    return ctypes.c_uint8.from_address(address).value


def store(address: int) -> None:
    ctypes.c_uint8.from_address(address).value = 1


def mapped(address: int) -> bool:
    """Whether the address lies in any mapping of this process, with or without access."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("touch", [load, store])
def test_one_byte_past_the_end_kills(nbytes, touch):
    start = (tensor := guarded(nbytes)).data_ptr()
    assert tensor.numel() == nbytes
    assert exit_signal(lambda: touch(start + nbytes - 1)) == 0
    assert faults(lambda: touch(start + nbytes))


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("touch", [load, store])
def test_one_byte_before_the_start_kills(nbytes, touch):
    start = (tensor := guarded(nbytes, end=False)).data_ptr()
    assert tensor.numel() == nbytes
    assert exit_signal(lambda: touch(start)) == 0
    assert faults(lambda: touch(start - 1))


@pytest.mark.parametrize("end", [True, False])
def test_the_other_side_is_guarded_from_the_page_boundary_on(end):
    start = (tensor := guarded(PAGE + 5, end)).data_ptr()
    first = start // PAGE * PAGE
    assert tensor.numel() == PAGE + 5
    assert faults(lambda: load(first - 1))
    assert faults(lambda: load(first + 2 * PAGE))


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_byte_inside_is_zero_and_usable(nbytes):
    tensor = guarded(nbytes)
    assert not tensor.any()
    tensor.fill_(255)
    assert bool((tensor == 255).all())


def test_an_empty_tensor_needs_no_pages():
    assert guarded(0).numel() == 0
    assert guarded_tensor((2, 0, 3), torch.float16).shape == (2, 0, 3)


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="nbytes: got -1"):
        guarded(-1)


def test_memory_is_unmapped_when_the_last_view_dies():
    tensor = guarded(3 * PAGE)
    view, address = tensor[5:9], tensor.data_ptr()
    del tensor
    gc.collect()
    assert mapped(address)
    view.fill_(1)
    del view
    gc.collect()
    assert not mapped(address)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float32]
)
@pytest.mark.parametrize("end", [True, False])
def test_a_typed_tensor_touches_the_guard(dtype, end):
    tensor = guarded_tensor((3, 5, 7), dtype, end=end)
    assert tensor.shape == (3, 5, 7)
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    outside = tensor.data_ptr() + tensor.nbytes if end else tensor.data_ptr() - 1
    assert outside % PAGE == (0 if end else PAGE - 1)
    assert faults(lambda: load(outside))


def test_padding_after_the_last_block_lies_in_the_guard():
    # 3 blocks of 2 × 4 elements, 10 apart: the last element is 2·10 + 1·4 + 3 = 27 from the first.
    tensor = guarded_tensor((3, 2, 4), torch.float16, strides=(10, 4, 1))
    assert tensor.stride() == (10, 4, 1)
    start = tensor.data_ptr()
    assert exit_signal(lambda: load(start + 27 * 2 + 1)) == 0
    assert faults(lambda: load(start + 28 * 2))


@pytest.mark.parametrize("end", [True, False])
def test_a_copy_keeps_values_and_strides(end):
    source = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4).permute(2, 0, 1)
    copy = guarded_like(source, end)
    assert copy.stride() == source.stride()
    assert torch.equal(copy, source)
    assert copy.data_ptr() != source.data_ptr()


def test_a_childs_exception_is_no_silent_success():
    with pytest.raises(RuntimeError, match="child process"):
        exit_signal(lambda: 1 // 0)
