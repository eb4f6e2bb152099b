"""The oracle itself, against addresses worked out by hand from the layouts' descriptions.

The numbers in the tables are literals; the comment beside each is the sum that gives it.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

import oracle
from oracle import Cell, Geometry

# Different extents on every axis, so that two axes changed for each other give another address.
# NL 3, NB 7, BS 4, NH 5, HS 8, 16 bits; 28 slots; a K or V row has 40 elements.
G = Geometry(layers=3, blocks=7, block_size=4, heads=5, head_size=8, element_bits=16)
# For x-split: x = 16 bytes / 2 = 8, so HS/x = 3 and BS/x = 2; 112 slots, rows of 120.
X = Geometry(layers=3, blocks=7, block_size=16, heads=5, head_size=24, element_bits=16)
# For NVFP4: per head and token 16 bytes of data and 2 scales.
F = Geometry(layers=3, blocks=7, block_size=4, heads=5, head_size=32, element_bits=4)

# P and Q are two elements: layer, kv, block, token, head, elem. Slots 2·4+3 = 11 and 5·4+1 = 21.
P = (1, 1, 2, 3, 1, 5)
Q = (2, 0, 5, 1, 2, 6)

# In a chunk [2, NL 3, T 28, 40]: strides 3360, 1120, 40; head 8.
P_SPLIT = 4933  # 3360 + 1120 + 11·40 + 8 + 5
Q_SPLIT = 3102  # 0 + 2·1120 + 21·40 + 2·8 + 6
# In a chunk [NL 3, T 28, NH 5, 2, HS 8]: strides 2240, 80, 16, 8.
P_PACKED = 3149  # 2240 + 11·80 + 16 + 8 + 5
Q_PACKED = 6198  # 2·2240 + 21·80 + 2·16 + 0 + 6

# Layouts with a K/V axis and heads. For P, then Q: tensor, element in it.
ELEMENTS = {
    # [NB, NL, 2, BS, NH, HS]: strides 960, 320, 160, 40, 8
    "NB_NL_TWO_BS_NH_HS": (
        (0, 2533),  # 2·960 + 320 + 160 + 3·40 + 8 + 5
        (0, 5502),  # 5·960 + 2·320 + 0 + 40 + 2·8 + 6
    ),
    # [2, NB, BS, NH, HS]: strides 1120, 160, 40, 8
    "NL_X_TWO_NB_BS_NH_HS": (
        (1, 1573),  # 1120 + 2·160 + 3·40 + 8 + 5
        (2, 862),  # 0 + 5·160 + 40 + 2·8 + 6
    ),
    # [NB, 2, BS, NH, HS]: strides 320, 160, 40, 8
    "NL_X_NB_TWO_BS_NH_HS": (
        (1, 933),  # 2·320 + 160 + 3·40 + 8 + 5
        (2, 1662),  # 5·320 + 0 + 40 + 2·8 + 6
    ),
    # K0 K1 K2 V0 V1 V2, each [NBBS, NH, HS]: strides 40, 8
    "TWO_X_NL_X_NBBS_NH_HS": (
        (4, 453),  # tensor 3 + 1; 11·40 + 8 + 5
        (2, 862),  # tensor 0 + 2; 21·40 + 2·8 + 6
    ),
    # [2, NB, NH, BS, HS]: strides 1120, 160, 32, 8
    "NL_X_TWO_NB_NH_BS_HS": (
        (1, 1501),  # 1120 + 2·160 + 32 + 3·8 + 5
        (2, 878),  # 0 + 5·160 + 2·32 + 8 + 6
    ),
    # [NB, 2, NH, BS, HS]: strides 320, 160, 32, 8
    "NL_X_NB_TWO_NH_BS_HS": (
        (1, 861),  # 2·320 + 160 + 32 + 3·8 + 5
        (2, 1678),  # 5·320 + 0 + 2·32 + 8 + 6
    ),
    # [NB, NL, 2, NH, BS, HS]: strides 960, 320, 160, 32, 8
    "NB_NL_TWO_NH_BS_HS": (
        (0, 2461),  # 2·960 + 320 + 160 + 32 + 3·8 + 5
        (0, 5518),  # 5·960 + 2·320 + 0 + 2·32 + 8 + 6
    ),
    # K0 K1 K2 V0 V1 V2, each [NB, BS, NH, HS]: strides 160, 40, 8
    "TWO_X_NL_X_NB_BS_NH_HS": (
        (4, 453),  # tensor 3 + 1; 2·160 + 3·40 + 8 + 5
        (2, 862),  # tensor 0 + 2; 5·160 + 40 + 2·8 + 6
    ),
    # [2, NB, NH, 1, BS, HS]: strides 1120, 160, 32, 32, 8
    "NL_X_TWO_NB_NH_ONE_BS_HS": (
        (1, 1501),  # 1120 + 2·160 + 32 + 0 + 3·8 + 5
        (2, 878),  # 0 + 5·160 + 2·32 + 0 + 8 + 6
    ),
    # K0 V0 K1 V1 K2 V2, each [NB, BS, NH, HS]: strides 160, 40, 8
    "NL_X_TWO_X_NB_BS_NH_HS": (
        (3, 453),  # tensor 2·1 + 1; 2·160 + 3·40 + 8 + 5
        (4, 862),  # tensor 2·2 + 0; 5·160 + 40 + 2·8 + 6
    ),
    # A name that no engine holds: [NH, NB, 2, BS, HS]: strides 448, 64, 32, 8
    "NL_X_NH_NB_TWO_BS_HS": (
        (1, 637),  # 448 + 2·64 + 32 + 3·8 + 5
        (2, 1230),  # 2·448 + 5·64 + 0 + 8 + 6
    ),
}

# Layouts that pack K and V in a head's content, CS = 16; content 8 + 5 = 13 of P, 6 of Q.
PACKED_ELEMENTS = {
    # [NB, NH, BS, 2, HS]: strides 320, 64, 16, 8
    "NL_X_NB_NH_BS_TWO_HS": (
        (1, 765),  # 2·320 + 64 + 3·16 + 8 + 5
        (2, 1750),  # 5·320 + 2·64 + 16 + 0 + 6
    ),
    # [NB, BS, NH, 2, HS]: strides 320, 80, 16, 8
    "NL_X_NB_BS_NH_TWO_HS": (
        (1, 909),  # 2·320 + 3·80 + 16 + 8 + 5
        (2, 1718),  # 5·320 + 80 + 2·16 + 0 + 6
    ),
    # [NB, NH, BS, CS]: strides 320, 64, 16
    "NL_X_NB_NH_BS_CS": (
        (1, 765),  # 2·320 + 64 + 3·16 + 13
        (2, 1750),  # 5·320 + 2·64 + 16 + 6
    ),
    # [NB, BS, NH, CS]: strides 320, 80, 16
    "NL_X_NB_BS_NH_CS": (
        (1, 909),  # 2·320 + 3·80 + 16 + 13
        (2, 1718),  # 5·320 + 80 + 2·16 + 6
    ),
    # From here on the element counts from its layer's first: the layer's own term is left out.
    # L 2240, B 320, H 64, N 16
    "LBHNC": (
        (1, 765),  # 2·320 + 64 + 3·16 + 13
        (2, 1750),  # 5·320 + 2·64 + 16 + 6
    ),
    # L 2240, B 320, N 80, H 16
    "LBNHC": (
        (1, 909),  # 2·320 + 3·80 + 16 + 13
        (2, 1718),  # 5·320 + 80 + 2·16 + 6
    ),
    # L 2240, H 448, B 64, N 16
    "LHBNC": (
        (1, 637),  # 448 + 2·64 + 3·16 + 13
        (2, 1238),  # 2·448 + 5·64 + 16 + 6
    ),
    # B 960, L 320, H 64, N 16
    "BLHNC": (
        (1, 2045),  # 2·960 + 64 + 3·16 + 13
        (2, 4950),  # 5·960 + 2·64 + 16 + 6
    ),
    # B 960, L 320, N 80, H 16
    "BLNHC": (
        (1, 2189),  # 2·960 + 3·80 + 16 + 13
        (2, 4918),  # 5·960 + 80 + 2·16 + 6
    ),
    # B 960, H 192, L 64, N 16
    "BHLNC": (
        (1, 2173),  # 2·960 + 192 + 3·16 + 13
        (2, 5206),  # 5·960 + 2·192 + 16 + 6
    ),
}

# Elements from one layer's first to the next one's, in the buffer that they share.
VIEW_STEPS = {
    "LBHNC": 2240,  # 7·5·4·16
    "LBNHC": 2240,
    "LHBNC": 2240,
    "BLHNC": 320,  # 5·4·16
    "BLNHC": 320,
    "BHLNC": 64,  # 4·16
}

# Layouts with one plane: (layer, kv, block, token, head, elem), tensor, element, chunk element.
ONE_PLANE_ELEMENTS = {
    # [NB, BS, HS]: strides 32, 8; chunk [3, 28, 8]: strides 224, 8
    "NL_X_NB_BS_HS": (
        ((1, 0, 2, 3, 0, 5), 1, 93, 317),  # 2·32 + 3·8 + 5; 224 + 11·8 + 5
        ((2, 0, 5, 1, 0, 6), 2, 174, 622),  # 5·32 + 8 + 6; 2·224 + 21·8 + 6
    ),
    # [NBBS, 1, HS]: strides 8, 8
    "NL_X_NBBS_ONE_HS": (
        ((1, 0, 2, 3, 0, 5), 1, 93, 317),  # 11·8 + 0 + 5; as above
        ((2, 0, 5, 1, 0, 6), 2, 174, 622),  # 21·8 + 0 + 6
    ),
    # [NB, BS, NH, HS]: strides 160, 40, 8; chunk [3, 28, 40]: strides 1120, 40
    "NL_X_NB_BS_NH_HS": (
        ((1, 0, 2, 3, 1, 5), 1, 453, 1573),  # 2·160 + 3·40 + 8 + 5; 1120 + 11·40 + 8 + 5
        ((2, 0, 5, 1, 2, 6), 2, 862, 3102),  # 5·160 + 40 + 2·8 + 6; 2·1120 + 21·40 + 2·8 + 6
    ),
}

# x-split: K and V differ in order; per layer K, then V. Chunk [2, 3, 112, 120]: strides 40320,
# 13440, 120; head 24. Key [NB, NH, 3, 16, 8]: strides 1920, 384, 128, 8.
X_KEY = (2, 0, 5, 9, 2, 22)  # slot 89; 22 = 2·8 + 6
X_VALUE = (1, 1, 2, 11, 1, 13)  # slot 43; token 11 = 1·8 + 3
X_ELEMENTS = {
    "VLLM_PAGED_XSPLIT": (
        # 5·1920 + 2·384 + 2·128 + 9·8 + 6; 2·13440 + 89·120 + 2·24 + 22
        (X_KEY, 4, 10702, 37630),
        # [NB, NH, 24, 16]: 2·1920 + 384 + 13·16 + 11; 40320 + 13440 + 43·120 + 24 + 13
        (X_VALUE, 3, 4443, 58957),
    ),
    "AITER_XSPLIT": (
        (X_KEY, 4, 10702, 37630),
        # [NB, NH, 2, 24, 8]: 2·1920 + 384 + 1·192 + 13·8 + 3; chunk as above
        (X_VALUE, 3, 4523, 58957),
    ),
}

# Rows of fields, one plane: field, (layer, kv, block, token, head, elem), bits, tensor, byte in
# it, byte of the chunk. All at layer 1, block 2, token 3: slot 11.
BYTES = {
    # Page of 4 tokens: 4·132 = 528 bytes. Chunk [3, 28, 132]: layer 3696, row 132.
    "NL_X_NB_BSV_BSS": (
        # 2·528 + 3·128 + 5; 3696 + 11·132 + 5
        ("value", (1, 0, 2, 3, 0, 5), 8, 1, 1445, 5153),
        # 2·528 + 4·128 + 3·4; 3696 + 11·132 + 128
        ("scale", (1, 0, 2, 3, 0, 0), 32, 1, 1580, 5276),
    ),
    # Planes of 512 elements of 16 bits and 64 of 8. Chunk [3, 28, 1088]: layer 30464.
    "NL_X_NP_X_NB_BS_ONE_HS": (
        # tensor 2·1 + 0; 2·(11·512 + 5); 30464 + 11·1088 + 2·5
        ("plane0", (1, 0, 2, 3, 0, 5), 16, 2, 11274, 42442),
        # tensor 2·1 + 1; 11·64 + 5; 30464 + 11·1088 + 1024 + 5
        ("plane1", (1, 0, 2, 3, 0, 5), 8, 3, 709, 43461),
    ),
    # Records of 656 bytes: 11·656 = 7216. Chunk [3, 28, 656]: layer 18368.
    "FP8_DS_MLA": (
        # 7216 + 5; 18368 + 7216 + 5
        ("nope", (1, 0, 2, 3, 0, 5), 8, 1, 7221, 25589),
        # 7216 + 512 + 4·2; 18368 + 7216 + 512 + 8
        ("scale", (1, 0, 2, 3, 0, 2), 32, 1, 7736, 26104),
        # 7216 + 512 + 16 + 2·5; 18368 + 7216 + 528 + 10
        ("rope", (1, 0, 2, 3, 0, 5), 16, 1, 7754, 26122),
    ),
    # Block: 4·576 + 4·8 = 2336, rounded up to 5·576 = 2880. Chunk [3, 28, 584]: layer 16352,
    # slot 11 at 16352 + 6424 = 22776.
    "DEEPSEEK_V4_SPARSE": (
        # 2·2880 + 3·576 + 5; 22776 + 5
        ("nope", (1, 0, 2, 3, 0, 5), 8, 1, 7493, 22781),
        # 2·2880 + 3·576 + 448 + 2·5; 22776 + 448 + 10
        ("rope", (1, 0, 2, 3, 0, 5), 16, 1, 7946, 23234),
        # 2·2880 + 4·576 + 3·8 + 2; 22776 + 448 + 128 + 2
        ("scale", (1, 0, 2, 3, 0, 2), 8, 1, 8090, 23354),
    ),
}

# NVFP4: field, element of P, bits, tensor, bit in it, bit of the chunk. Chunk row: 5 heads' data
# (80 bytes), then 5 heads' scales (10 bytes); [2, 3, 28, 90]: strides 7560, 2520, 90 bytes;
# P's row at 7560 + 2520 + 990 = 11070.
NVFP4_BITS = {
    # Page of K or V: 20 rows of 16 bytes, then 20 of 2: 360 bytes. P's page at (2·2+1)·360 = 1800,
    # row 1·4 + 3 = 7.
    "NVFP4_IN_PAGE": (
        # low nibble: 8·(1800 + 7·16 + 2) + 0; 8·(11070 + 16 + 2) + 0
        ("data", 4, 4, 1, 15312, 88704),
        # high nibble of the same byte
        ("data", 5, 4, 1, 15316, 88708),
        # 8·(1800 + 20·16 + 7·2 + 1); 8·(11070 + 80 + 2 + 1)
        ("scale", 1, 8, 1, 17080, 89224),
    ),
    # Data [NB, 2, NH, BS, 16 bytes], scales [NB, 2, NH, BS, 2]; row ((2·2+1)·5+1)·4+3 = 107.
    "NVFP4_SEPARATE": (
        # tensor 2·1; 8·(107·16 + 2) + 4; chunk as above
        ("data", 5, 4, 2, 13716, 88708),
        # tensor 2·1 + 1; 8·(107·2 + 1)
        ("scale", 1, 8, 3, 1720, 89224),
    ),
}

NAMES = [
    *ELEMENTS,
    *PACKED_ELEMENTS,
    *ONE_PLANE_ELEMENTS,
    *X_ELEMENTS,
    *BYTES,
    *NVFP4_BITS,
]
PLAIN = [*ELEMENTS, *PACKED_ELEMENTS, *ONE_PLANE_ELEMENTS, *X_ELEMENTS]
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32]


def at(name: str, where: tuple[int, ...], geometry: Geometry, field: str = "", **more) -> Cell:
    found = oracle.cells(name, geometry, **more)
    return next(cell for cell in found if cell[:6] == where and cell.field == field)


def small(name: str, bits: int = 16) -> Geometry:
    """A small geometry that the layout can take."""
    if name in X_ELEMENTS:
        return Geometry(2, 3, 16, 2, 32, bits)
    if name in NVFP4_BITS:
        return Geometry(2, 3, 4, 5, 32, 4)
    return Geometry(2, 3, 4, 5, 7, bits)


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def bytes_from(tensor: torch.Tensor) -> bytes:
    """The storage's bytes from the tensor's first byte on."""
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.dtype.itemsize
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy()[start:])


# --- addresses by hand ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTS)
def test_two_planes_by_hand(name):
    chunks = (P_SPLIT, Q_SPLIT)
    for where, (tensor, element), chunk in zip((P, Q), ELEMENTS[name], chunks, strict=True):
        cell = at(name, where, G)
        assert (cell.tensor, cell.engine_bit, cell.chunk_bit) == (tensor, element * 16, chunk * 16)
        assert cell.bits == 16


@pytest.mark.parametrize("name", PACKED_ELEMENTS)
def test_packed_by_hand(name):
    chunks = (P_PACKED, Q_PACKED)
    for where, (tensor, element), chunk in zip((P, Q), PACKED_ELEMENTS[name], chunks, strict=True):
        cell = at(name, where, G)
        assert (cell.tensor, cell.engine_bit, cell.chunk_bit) == (tensor, element * 16, chunk * 16)


@pytest.mark.parametrize("name", PACKED_ELEMENTS)
def test_packed_layouts_fill_a_split_chunk_with_real_planes(name):
    for where, chunk in ((P, P_SPLIT), (Q, Q_SPLIT)):
        assert at(name, where, G, chunk="two_plane").chunk_bit == chunk * 16


@pytest.mark.parametrize("name", [*ONE_PLANE_ELEMENTS, *X_ELEMENTS])
def test_one_plane_and_x_split_by_hand(name):
    geometry = X if name in X_ELEMENTS else G
    for where, tensor, element, chunk in (ONE_PLANE_ELEMENTS | X_ELEMENTS)[name]:
        cell = at(name, where, geometry)
        assert (cell.tensor, cell.engine_bit, cell.chunk_bit) == (tensor, element * 16, chunk * 16)


@pytest.mark.parametrize("name", BYTES)
def test_fields_by_hand(name):
    for field, where, bits, tensor, byte, chunk in BYTES[name]:
        cell = at(name, where, G, field)
        assert (cell.tensor, cell.engine_bit, cell.chunk_bit) == (tensor, byte * 8, chunk * 8)
        assert cell.bits == bits


@pytest.mark.parametrize("name", NVFP4_BITS)
def test_nvfp4_by_hand(name):
    for field, elem, bits, tensor, engine_bit, chunk_bit in NVFP4_BITS[name]:
        cell = at(name, (*P[:5], elem), F, field)
        assert (cell.tensor, cell.engine_bit, cell.chunk_bit) == (tensor, engine_bit, chunk_bit)
        assert cell.bits == bits


@pytest.mark.parametrize("name", VIEW_STEPS)
def test_layers_of_one_buffer_by_hand(name):
    assert oracle.view_step_bits(name, G) == VIEW_STEPS[name] * 16


def test_single_layer_chunks_by_hand():
    one = Geometry(1, 7, 4, 5, 8, 16)
    where = (0, *P[1:])
    two_planes, one_plane = "NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_BS_NH_HS"
    # [T, 2, 40]: 11·80 + 40 + 8 + 5 = 933; [2, T, 40]: 28·40 + 11·40 + 8 + 5 = 1573
    assert at(two_planes, where, one, chunk="token_major").chunk_bit == 933 * 16
    assert at(two_planes, where, one, chunk="plane_major").chunk_bit == 1573 * 16
    # [T, 40]: 11·40 + 8 + 5 = 453
    assert at(one_plane, (0, 0, *P[2:]), one, chunk="single_plane").chunk_bit == 453 * 16


def test_planes_given_by_the_caller():
    # Three planes of 8, 32 and 16 bits: rows of 3 + 8 + 8 = 19 bytes; chunk layer 28·19 = 532.
    # Plane 2, element 1: tensor 3·1 + 2; 2·(11·4 + 1) = 90; 532 + 11·19 + 11 + 2 = 754.
    planes = ((3, 8), (2, 32), (4, 16))
    cell = at("NL_X_NP_X_NB_BS_ONE_HS", (1, 0, 2, 3, 0, 1), G, "plane2", planes=planes)
    assert (cell.tensor, cell.engine_bit, cell.chunk_bit) == (5, 90 * 8, 754 * 8)


# --- every element ----------------------------------------------------------------------------


def covered(spans: list[tuple[int, int]]) -> tuple[int, bool]:
    """Where the spans end, and whether they leave no gap from 0; no two may overlap."""
    end, tight = 0, True
    for first, last in sorted(spans):
        assert first >= end, f"bit {first} is taken twice"
        tight &= first == end
        end = last
    return end, tight


@pytest.mark.parametrize("name", NAMES)
def test_every_element_has_one_address_and_the_chunk_has_no_gap(name):
    geometry = small(name)
    step = oracle.view_step_bits(name, geometry)
    tensors: dict[int, list[tuple[int, int]]] = {}
    chunk, coordinates, count = [], set(), 0
    for cell in oracle.cells(name, geometry):
        first = cell.engine_bit + (step * cell.layer if step else 0)
        tensors.setdefault(0 if step else cell.tensor, []).append((first, first + cell.bits))
        chunk.append((cell.chunk_bit, cell.chunk_bit + cell.bits))
        coordinates.add((*cell[:6], cell.field))
        count += 1
    assert len(coordinates) == count
    assert sorted(tensors) == list(range(len(tensors)))

    end, tight = covered(chunk)
    assert tight
    *outer, row = oracle.chunk_shape(name, geometry, geometry.slots)
    row_bits = row * (16 if name in PLAIN else 8)
    assert end == math.prod(outer) * row_bits
    assert sum(covered(spans)[0] for spans in tensors.values()) >= end
    if name != "DEEPSEEK_V4_SPARSE":
        assert all(covered(spans)[1] for spans in tensors.values())


def test_only_the_rounding_of_a_sparse_block_is_padding():
    # Blocks of 4 tokens hold 2336 bytes in 2880: the 544 after them are in no cell.
    geometry = small("DEEPSEEK_V4_SPARSE")
    cells = list(oracle.cells("DEEPSEEK_V4_SPARSE", geometry))
    inside = {cell.engine_bit // 8 % 2880 for cell in cells}
    assert max(inside) == 2335
    # Blocks of 64 tokens hold 37376 bytes in 65·576 = 37440.
    larger = Geometry(1, 2, 64, 1, 1, 8)
    last = max(cell.engine_bit // 8 for cell in oracle.cells("DEEPSEEK_V4_SPARSE", larger))
    assert last == 37440 + 37376 - 1


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_knows_every_layout(name):
    assert oracle.knows(name)
    assert oracle.is_plain(name) == (name in PLAIN)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NL",
        "LBHN",
        "LBHNCC",
        "NL_X_NB_BS",  # no content
        "NL_X_NB_HS",  # no tokens
        "NL_X_NBBS_BS_HS",  # tokens twice
        "NL_X_NBBS_NB_BS_HS",
        "NL_X_NB_NB_BS_HS",
        "NL_X_TWO_NB_BS_NH_CS",  # K/V twice
        "TWO_X_NL_X_TWO_NB_BS_HS",
        "NL_X_NB_BS_HS_CS",
        "NL_X_NL_NB_BS_HS",
        "NB_X_NL_BS_HS",  # blocks are no list level
        "NL_X_NB_BS_NH_HD",
        "nl_x_nb_bs_hs",
    ],
)
def test_other_names_are_unknown(name):
    assert not oracle.knows(name)
    with pytest.raises(ValueError, match="HAND_WRITTEN"):
        next(oracle.cells(name, G))


@pytest.mark.parametrize(
    ("name", "kv", "heads", "chunk"),
    [
        ("NL_X_TWO_NB_BS_NH_HS", True, True, "two_plane"),
        ("TWO_X_NL_X_NBBS_NH_HS", True, True, "two_plane"),
        ("NL_X_NB_BS_HS", False, False, "one_plane"),
        ("NL_X_NBBS_ONE_HS", False, False, "one_plane"),
        ("NL_X_NB_BS_NH_HS", False, True, "one_plane"),
        ("NL_X_NB_NH_BS_TWO_HS", True, True, "packed"),
        ("NL_X_NB_BS_NH_CS", True, True, "packed"),
        ("BHLNC", True, True, "packed"),
        ("NL_X_NB_BSV_BSS", False, False, "record"),
        ("NL_X_NP_X_NB_BS_ONE_HS", False, False, "record"),
        ("NVFP4_IN_PAGE", True, True, "two_plane_record"),
        ("VLLM_PAGED_XSPLIT", True, True, "two_plane"),
        ("NL_X_NH_NB_TWO_BS_HS", True, True, "two_plane"),
    ],
)
def test_what_a_name_says(name, kv, heads, chunk):
    assert oracle.has_kv(name) == kv
    assert oracle.has_heads(name) == heads
    assert oracle.default_chunk(name) == chunk


@pytest.mark.parametrize(
    ("name", "geometry", "chunk", "message"),
    [
        ("NL_X_TWO_NB_BS_NH_HS", G, "one_plane", "has a K/V axis"),
        ("NL_X_NB_BS_HS", G, "two_plane", "has no K/V axis"),
        ("NL_X_TWO_NB_BS_NH_HS", G, "token_major", "holds one layer"),
        ("NVFP4_IN_PAGE", F, "packed", "no place for the fields"),
        ("NL_X_TWO_NB_BS_NH_HS", G, "rows", "takes one of"),
        ("VLLM_PAGED_XSPLIT", Geometry(1, 1, 16, 1, 20, 16), None, "head_size: got 20"),
        ("AITER_XSPLIT", Geometry(1, 1, 12, 1, 16, 16), None, "block_size: got 12"),
        ("AITER_XSPLIT", Geometry(1, 1, 16, 1, 16, 24), None, "element_bits: got 24"),
        ("NVFP4_SEPARATE", Geometry(1, 1, 4, 1, 24, 4), None, "head_size: got 24"),
    ],
)
def test_what_does_not_fit_is_refused(name, geometry, chunk, message):
    with pytest.raises(ValueError, match=message):
        next(oracle.cells(name, geometry, chunk))


def test_an_empty_axis_is_refused():
    with pytest.raises(ValueError, match="blocks: got 0"):
        Geometry(1, 0, 4, 1, 8, 16)


def test_axes_that_a_layout_lacks_are_not_looked_at():
    wide, narrow = Geometry(2, 3, 4, 5, 8, 16), Geometry(2, 3, 4, 1, 8, 16)
    assert list(oracle.cells("NL_X_NB_BS_HS", wide)) == list(oracle.cells("NL_X_NB_BS_HS", narrow))


def test_the_oracle_has_code_of_its_own():
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    allowed = {"collections", "dataclasses", "functools", "itertools", "math", "typing"}
    assert imported <= {"__future__", "numpy", "torch"} | allowed


# --- live tensors -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_live_tensors_agree_with_the_cells(name, dtype):
    geometry = small(name, dtype.itemsize * 8)
    tensors = oracle.make(name, geometry, dtype, random_bytes)
    buffers = [bytes_from(tensor) for tensor in oracle.flat(tensors)]
    chunks = ["packed", "two_plane"] if oracle.has_kv(name) else ["one_plane"]
    for chunk in chunks:
        got = oracle.expected_chunk(name, tensors, range(geometry.slots), geometry, chunk=chunk)
        assert got.dtype == dtype
        assert bytes_from(got) == oracle.gather_tight(name, buffers, geometry, chunk)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_scatter_undoes_gather(name, dtype):
    geometry = small(name, dtype.itemsize * 8)
    tensors = oracle.make(name, geometry, dtype, random_bytes)
    slots = torch.randperm(geometry.slots).tolist()
    chunk = oracle.expected_chunk(name, tensors, slots, geometry)
    wiped = oracle.make(name, geometry, dtype)
    after = oracle.expected_after_scatter(name, wiped, chunk, slots, geometry)
    assert oracle.same_storages(after, tensors)
    assert not any(tensor.view(torch.uint8).any() for tensor in oracle.flat(wiped))


def test_nested_lists_are_in_pointer_order():
    geometry = Geometry(3, 2, 4, 1, 8, 16)
    outer_kv = oracle.make("TWO_X_NL_X_NB_BS_NH_HS", geometry, torch.float16)
    outer_layer = oracle.make("NL_X_TWO_X_NB_BS_NH_HS", geometry, torch.float16)
    assert [len(entry) for entry in outer_kv] == [3, 3]
    assert [len(entry) for entry in outer_layer] == [2, 2, 2]
    assert oracle.flat(outer_layer)[3] is outer_layer[1][1]
    assert oracle.shapes("NL_X_TWO_X_NB_BS_NH_HS", geometry) == [(2, 4, 1, 8)] * 6


def test_a_name_without_list_levels_is_one_tensor():
    tensor = oracle.make("NB_NL_TWO_BS_NH_HS", G, torch.float16)
    assert tensor.shape == (7, 3, 2, 4, 5, 8)


@pytest.mark.parametrize("name", VIEW_STEPS)
def test_layers_are_views_of_one_buffer(name):
    views = oracle.make(name, G, torch.float16)
    starts = [view.data_ptr() - views[0].data_ptr() for view in views]
    assert starts == [VIEW_STEPS[name] * 2 * layer for layer in range(3)]


def test_strides_decide_not_shapes():
    # Logical [2, NB, BS, NH, HS] over memory [2, NB, NH, BS, HS].
    geometry = Geometry(1, 3, 4, 2, 8, 16)
    memory = random_bytes((2, 3, 2, 4, 8), torch.float16)
    nhd, hnd = "NL_X_TWO_NB_BS_NH_HS", "NL_X_TWO_NB_NH_BS_HS"
    seen = oracle.expected_chunk(nhd, [memory.permute(0, 1, 3, 2, 4)], range(12), geometry)
    assert oracle.same_bytes(seen, oracle.expected_chunk(hnd, [memory], range(12), geometry))


def test_padding_and_storage_offset_by_hand():
    # 3 blocks of 2 tokens of 4 elements, 11 apart, from element 5 on; element i holds i.
    buffer = torch.arange(40, dtype=torch.int32)
    view = buffer.as_strided((3, 2, 4), (11, 4, 1), 5)
    geometry = Geometry(1, 3, 2, 1, 4, 32)
    # Slot 5 is block 2, token 1: 5 + 2·11 + 4 = 31. Slot 2 is block 1, token 0: 5 + 11 = 16.
    got = oracle.expected_chunk("NL_X_NB_BS_HS", [view], [5, 2], geometry)
    assert got.tolist() == [[[31, 32, 33, 34], [16, 17, 18, 19]]]
    assert oracle.read("NL_X_NB_BS_HS", [view], geometry, slot=5, elem=2) == 33

    chunk = torch.tensor([[[-1, -2, -3, -4]]], dtype=torch.int32)
    (after,) = oracle.expected_after_scatter("NL_X_NB_BS_HS", [view], chunk, [2], geometry)
    assert after.stride() == (11, 4, 1)
    whole = torch.empty(0, dtype=torch.int32).set_(after.untyped_storage())
    changed = list(range(40))
    changed[16:20] = [-1, -2, -3, -4]
    assert whole.tolist() == changed
    assert buffer.tolist() == list(range(40))
    assert not oracle.same_storages([view], [after])


def test_a_neighbours_byte_is_noticed():
    buffer = torch.zeros(40, dtype=torch.int32)
    view = buffer.as_strided((3, 2, 4), (11, 4, 1), 5)
    before = oracle.copy_with_storage([view])
    assert oracle.same_storages([view], before)
    buffer[13] = 1  # between block 0, which ends at 12, and block 1, which starts at 16
    assert torch.equal(view, before[0])
    assert not oracle.same_storages([view], before)


def test_tensors_of_one_storage_stay_together():
    views = oracle.make("BLHNC", G, torch.float16, random_bytes)
    copies = oracle.copy_with_storage(views)
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    assert copies[1].data_ptr() - copies[0].data_ptr() == VIEW_STEPS["BLHNC"] * 2


def test_packed_rows_and_split_planes_by_hand():
    # One token, two heads of two elements: memory K00 K01 V00 V01 K10 K11 V10 V11.
    geometry = Geometry(1, 1, 1, 2, 2, 32)
    tensor = torch.arange(8, dtype=torch.int32).reshape(1, 1, 2, 4)
    name = "NL_X_NB_BS_NH_CS"
    packed = oracle.expected_chunk(name, [tensor], [0], geometry)
    assert packed.tolist() == [[[0, 1, 2, 3, 4, 5, 6, 7]]]
    split = oracle.expected_chunk(name, [tensor], [0], geometry, chunk="two_plane")
    assert split.tolist() == [[[[0, 1, 4, 5]]], [[[2, 3, 6, 7]]]]
    for chunk, layout in ((packed, "packed"), (split, "two_plane")):
        zeros = [torch.zeros_like(tensor)]
        after = oracle.expected_after_scatter(name, zeros, chunk, [0], geometry, chunk=layout)
        assert oracle.same_storages(after, [tensor])


def test_negative_slots_and_skipped_prefix_are_left_alone():
    name, geometry = "NL_X_NB_BS_HS", Geometry(1, 3, 2, 1, 1, 32)
    tensor = torch.arange(6, dtype=torch.int32).reshape(3, 2, 1)
    slots = [4, 3, -1, 5]
    got = oracle.expected_chunk(name, [tensor], slots, geometry, skip_prefix=1)
    assert got.flatten().tolist() == [0, 3, 0, 5]
    out = torch.full((1, 4, 1), 9, dtype=torch.int32)
    got = oracle.expected_chunk(name, [tensor], slots, geometry, skip_prefix=1, out=out)
    assert got.flatten().tolist() == [9, 3, 9, 5]
    assert out.flatten().tolist() == [9, 9, 9, 9]
    (after,) = oracle.expected_after_scatter(name, [tensor], out, slots, geometry, skip_prefix=1)
    assert after.flatten().tolist() == [0, 1, 2, 9, 4, 9]


def test_the_slots_of_skipped_tokens_are_not_looked_at():
    tensor = torch.zeros(3, 2, 1)
    geometry = Geometry(1, 3, 2, 1, 1, 32)
    oracle.expected_chunk("NL_X_NB_BS_HS", [tensor], [6, 0], geometry, skip_prefix=1)
    with pytest.raises(ValueError, match="slots: got 6"):
        oracle.expected_chunk("NL_X_NB_BS_HS", [tensor], [0, 6], geometry, skip_prefix=1)


def test_whole_blocks_are_their_slots():
    assert oracle.slots_of_blocks([2, 0], 3) == [6, 7, 8, 0, 1, 2]


def test_no_tokens_give_an_empty_chunk():
    tensor = torch.zeros(3, 2, 1)
    got = oracle.expected_chunk("NL_X_NB_BS_HS", [tensor], [], Geometry(1, 3, 2, 1, 1, 32))
    assert got.shape == (1, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=str)
def test_bits_are_moved_and_never_interpreted(dtype):
    # All bits set is a NaN in each of these: equal as bits, never as a number.
    tensor = torch.full((1, 1, dtype.itemsize), 255, dtype=torch.uint8).view(dtype)
    geometry = Geometry(1, 1, 1, 1, 1, dtype.itemsize * 8)
    got = oracle.expected_chunk("NL_X_NB_BS_HS", [tensor], [0], geometry)
    assert oracle.same_bytes(got, tensor)
    assert oracle.read("NL_X_NB_BS_HS", [tensor], geometry) == 2**geometry.element_bits - 1


def test_same_bytes_compares_dtype_shape_and_bits():
    zero, minus_zero = torch.zeros(4), -torch.zeros(4)
    assert oracle.same_bytes(zero, torch.zeros(8)[::2])
    assert not oracle.same_bytes(zero, minus_zero)
    assert not oracle.same_bytes(zero, torch.zeros(2, 2))
    assert not oracle.same_bytes(zero, torch.zeros(4, dtype=torch.int32))


def test_chunks_may_be_strided_views():
    name, geometry = "NL_X_TWO_NB_BS_NH_HS", Geometry(1, 2, 2, 1, 3, 32)
    tensor = random_bytes((2, 2, 2, 1, 3), torch.int32)
    tight = oracle.expected_chunk(name, [tensor], range(4), geometry)
    loose = torch.zeros(2, 1, 8, 5, dtype=torch.int32)[:, :, ::2, 1:4]
    loose.copy_(tight)
    after = oracle.expected_after_scatter(
        name, [torch.zeros_like(tensor)], loose, range(4), geometry
    )
    assert oracle.same_storages(after, [tensor])


def test_wrong_tensors_and_chunks_are_refused():
    name, geometry = "NL_X_NB_BS_HS", Geometry(2, 3, 2, 1, 4, 32)
    good = [torch.zeros(3, 2, 4), torch.zeros(3, 2, 4)]
    with pytest.raises(ValueError, match="takes shapes"):
        oracle.expected_chunk(name, good[:1], [0], geometry)
    with pytest.raises(ValueError, match="takes shapes"):
        oracle.expected_chunk(name, [good[0], torch.zeros(3, 4, 2)], [0], geometry)
    with pytest.raises(ValueError, match="elements of 32 bits"):
        oracle.expected_chunk(name, [tensor.half() for tensor in good], [0], geometry)
    with pytest.raises(ValueError, match="chunk: got"):
        oracle.expected_after_scatter(name, good, torch.zeros(2, 2, 4), [0], geometry)
    with pytest.raises(ValueError, match="chunk: got"):
        oracle.expected_chunk(name, good, [0], geometry, out=torch.zeros(2, 1, 4).int())
    with pytest.raises(ValueError, match="no plain typed tensors"):
        oracle.expected_chunk("FP8_DS_MLA", good, [0], geometry)
    with pytest.raises(ValueError, match="dtype: got"):
        oracle.make(name, geometry, torch.float16)


# --- bytes of layouts with fields ------------------------------------------------------------


def test_gather_of_nibbles_by_hand():
    # One token, one head of 16 elements: K data 8 bytes, K scale, V data 8 bytes, V scale.
    geometry = Geometry(1, 1, 1, 1, 16, 4)
    page = bytes(range(0x10, 0x22))
    assert oracle.gather_tight("NVFP4_IN_PAGE", [page], geometry) == page
    # Two tokens of one head: data, data, scale, scale become two rows of data and scale.
    geometry = Geometry(1, 1, 2, 1, 16, 4)
    page = b"aaaaaaaabbbbbbbbABccccccccddddddddCD"
    rows = b"aaaaaaaaAbbbbbbbbBccccccccCddddddddD"
    assert oracle.gather_tight("NVFP4_IN_PAGE", [page], geometry) == rows
    data, scales = b"aaaaaaaabbbbbbbbccccccccdddddddd", b"ABCD"
    assert oracle.gather_tight("NVFP4_SEPARATE", [data, scales], geometry) == rows


def test_gather_of_block_major_scales_by_hand():
    # Two tokens: 2·128 value bytes, then 2·4 scale bytes.
    geometry = Geometry(1, 1, 2, 1, 1, 8)
    page = b"v" * 128 + b"w" * 128 + b"SSSS" + b"TTTT"
    rows = b"v" * 128 + b"SSSS" + b"w" * 128 + b"TTTT"
    assert oracle.gather_tight("NL_X_NB_BSV_BSS", [page], geometry) == rows
