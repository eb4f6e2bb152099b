"""Says where every element of a layout lies, from the layout's name alone, one element at a time.

A second opinion for the tests: slow, plain, and with code of its own. It shares no line and no
file with the specs, the generator or the runtime, so an error there cannot repeat itself here.

Three ways to know a layout, tried in this order:

- **by hand** (`HAND_WRITTEN`): layouts whose name does not say their bytes;
- **letters**: a permutation of LBHNC, five axes of one buffer, each layer a strided view of it;
- **the name grammar**: list levels `NL`, `TWO`, `NP` joined by `_X_`, then one tensor's axes from
  outermost to innermost: `NL`, `TWO`, `NB`, `BS` (or `NBBS`), `NH`, `ONE`, `HS` (or `CS`).

A new name in the grammar needs no edit. `knows` tells whether a layout has an oracle.

Two views of a layout:

- `cells` enumerates a tight cache as bit addresses, for every layout;
- `expected_chunk` and `expected_after_scatter` do a transfer on live torch tensors, for layouts
  whose tensors are plain typed tensors (`is_plain`). They index a tensor's own dimensions in the
  order of the name and let its strides act, so padded, permuted and offset views need nothing
  special. Elements are moved as integers of their size: no dtype is ever interpreted.

An axis that a layout lacks has extent 1: `heads` is not looked at for MLA, nor `head_size` and
`element_bits` where the layout fixes its widths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

# Width in elements and bits per element of each plane of a layout with list level NP.
Planes = Sequence[tuple[int, int]]
SAMPLE_PLANES: Planes = ((512, 16), (64, 8))

# An index is an int, or an array of them where a whole row is looked up at once.
Index = Any


@dataclass(frozen=True)
class Geometry:
    """Extents of a cache.

    `head_size` counts elements of K or of V alone, also where a layout packs both in one content
    width (CS = 2·head_size). For MLA it is the latent width.
    """

    layers: int
    blocks: int
    block_size: int
    heads: int
    head_size: int
    element_bits: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}: got {value}, takes a positive number")

    @property
    def slots(self) -> int:
        return self.blocks * self.block_size


class Field(NamedTuple):
    """One part of a row: `width` elements for each head, `bits` each."""

    name: str
    width: int
    bits: int


class At(NamedTuple):
    """The logical coordinates of an element."""

    layer: Index
    kv: Index
    block: Index
    token: Index
    head: Index
    elem: Index


class Cell(NamedTuple):
    """One payload element and its two addresses.

    `tensor` is the position in pointer order (list levels row-major). `engine_bit` counts from
    that tensor's first byte in a tight tensor; where layers are views of one buffer, from the
    first byte of the layer's view. `chunk_bit` counts from the first byte of the chunk that holds
    all slots in order. A 4-bit element at a bit offset that is a multiple of 8 is the low nibble.
    `field` is empty where a layout has no fields.
    """

    layer: int
    kv: int
    block: int
    token: int
    head: int
    elem: int
    field: str
    tensor: int
    engine_bit: int
    bits: int
    chunk_bit: int


# --- chunks -----------------------------------------------------------------------------------


class ChunkAxes(NamedTuple):
    """A chunk tensor: its outer dimensions, then what lies end to end in its row."""

    outer: tuple[str, ...]
    row: tuple[str, ...]


CHUNKS = {
    "two_plane": ChunkAxes(("kv", "layer", "token"), ("field", "head", "elem")),
    "one_plane": ChunkAxes(("layer", "token"), ("field", "head", "elem")),
    "packed": ChunkAxes(("layer", "token"), ("head", "kv", "elem")),
    "record": ChunkAxes(("layer", "token"), ("field", "head", "elem")),
    "two_plane_record": ChunkAxes(("kv", "layer", "token"), ("field", "head", "elem")),
    "token_major": ChunkAxes(("token", "kv"), ("field", "head", "elem")),
    "plane_major": ChunkAxes(("kv", "token"), ("field", "head", "elem")),
    "single_plane": ChunkAxes(("token",), ("field", "head", "elem")),
}


# --- the name grammar -------------------------------------------------------------------------

LIST_SIGNS = {"NL", "TWO", "NP"}
TENSOR_SIGNS = {"NL", "TWO", "NB", "BS", "NBBS", "NH", "ONE", "HS", "CS"}
LETTERS = {"L": "NL", "B": "NB", "H": "NH", "N": "BS", "C": "CS"}


def _size(sign: str, g: Geometry, part: Field) -> int:
    """The extent of the dimension called `sign` in a tensor of `part`."""
    match sign:
        case "NL":
            return g.layers
        case "TWO":
            return 2
        case "NB":
            return g.blocks
        case "BS":
            return g.block_size
        case "NBBS":
            return g.blocks * g.block_size
        case "NH":
            return g.heads
        case "ONE":
            return 1
        case "HS":
            return part.width
        case "CS":
            return 2 * part.width
        case "HS/x":
            return part.width // _x(part)
        case "BS/x":
            return g.block_size // _x(part)
        case "HS%x" | "BS%x":
            return _x(part)
    raise AssertionError(sign)


@cache
def _sizes(signs: tuple[str, ...], g: Geometry, part: Field) -> tuple[int, ...]:
    return tuple(_size(sign, g, part) for sign in signs)


def _index(sign: str, at: At, g: Geometry, part: Field) -> Index:
    """The index of `at` in the dimension called `sign`."""
    match sign:
        case "NL":
            return at.layer
        case "TWO":
            return at.kv
        case "NB":
            return at.block
        case "BS":
            return at.token
        case "NBBS":
            return at.block * g.block_size + at.token
        case "NH":
            return at.head
        case "ONE":
            return 0
        case "HS":
            return at.elem
        case "CS":
            return at.kv * part.width + at.elem
        case "HS/x":
            return at.elem // _x(part)
        case "HS%x":
            return at.elem % _x(part)
        case "BS/x":
            return at.token // _x(part)
        case "BS%x":
            return at.token % _x(part)
    raise AssertionError(sign)


def _x(part: Field) -> int:
    """Elements in 16 bytes, the x of the x-split layouts."""
    return 128 // part.bits


def _row_major(sizes: Sequence[int], index: Sequence[int]) -> int:
    offset = 0
    for size, at in zip(sizes, index, strict=True):
        assert 0 <= at < size, (sizes, index)
        offset = offset * size + at
    return offset


# --- what is known of a layout ----------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """What the oracle knows of a layout.

    `place` gives an element's tensor position and bit offset; `fields` a row's parts.
    """

    has_layers: bool
    has_kv: bool
    has_heads: bool
    chunk: str
    fields: Callable[[Geometry, Planes], tuple[Field, ...]]
    place: Callable[[Geometry, tuple[Field, ...], int, At], tuple[int, int]]
    check: Callable[[Geometry], None] = field(default=lambda g: None)
    typed: Typed | None = None


@dataclass(frozen=True)
class Typed:
    """A layout of plain typed tensors: list levels, then the axes of one tensor.

    `key` and `value` are the axes of a K and a V tensor, the same ones unless they are separate
    tensors of different order. `buffer` is the one buffer that all tensors are views of, or empty.
    """

    lists: tuple[str, ...]
    key: tuple[str, ...]
    value: tuple[str, ...]
    buffer: tuple[str, ...] = ()

    def axes(self, kv: int) -> tuple[str, ...]:
        return self.value if kv == 1 else self.key

    def tensor(self, g: Geometry, parts: tuple[Field, ...], number: int, at: At) -> int:
        """The position in pointer order of the tensor that holds `at`."""
        sizes = {"NL": g.layers, "TWO": 2, "NP": len(parts)}
        index = {"NL": at.layer, "TWO": at.kv, "NP": number}
        return _row_major([sizes[s] for s in self.lists], [index[s] for s in self.lists])

    def place(self, g: Geometry, parts: tuple[Field, ...], number: int, at: At) -> tuple[int, int]:
        part = parts[number]
        memory = self.buffer or self.axes(at.kv)
        inside = at._replace(layer=0) if self.buffer else at
        index = [_index(sign, inside, g, part) for sign in memory]
        sizes = _sizes(memory, g, part)
        return self.tensor(g, parts, number, at), _row_major(sizes, index) * part.bits


def _one_field(g: Geometry, planes: Planes) -> tuple[Field, ...]:
    return (Field("", g.head_size, g.element_bits),)


def _plane_fields(g: Geometry, planes: Planes) -> tuple[Field, ...]:
    return tuple(Field(f"plane{i}", width, bits) for i, (width, bits) in enumerate(planes))


def _from_grammar(name: str) -> Layout | None:
    """The layout that `name` spells, or None where it is not in the grammar."""
    *lists, last = name.split("_X_")
    axes = last.split("_")
    signs = [sign for sign in lists + axes if sign != "ONE"]
    pages = [sign for sign in axes if sign in {"NB", "BS", "NBBS"}]
    well_formed = (
        set(lists) <= LIST_SIGNS
        and set(axes) <= TENSOR_SIGNS
        and len(set(signs)) == len(signs)
        and ("HS" in axes) != ("CS" in axes)
        and not ("CS" in axes and "TWO" in signs)
        and sorted(pages) in (["NBBS"], ["BS", "NB"])
    )
    if not well_formed:
        return None
    has_kv = "TWO" in signs or "CS" in signs
    if "NP" in lists:
        chunk = "two_plane_record" if has_kv else "record"
    elif "CS" in axes or axes[-2:] == ["TWO", "HS"]:
        chunk = "packed"
    else:
        chunk = "two_plane" if has_kv else "one_plane"
    typed = Typed(tuple(lists), tuple(axes), tuple(axes))
    return Layout(
        has_layers="NL" in signs,
        has_kv=has_kv,
        has_heads="NH" in axes,
        chunk=chunk,
        fields=_plane_fields if "NP" in lists else _one_field,
        place=typed.place,
        typed=None if "NP" in lists else typed,
    )


def _from_letters(name: str) -> Layout | None:
    """The layout that `name` spells in the letters L, B, H, N, C, or None."""
    if sorted(name) != sorted(LETTERS):
        return None
    buffer = tuple(LETTERS[letter] for letter in name)
    view = tuple(sign for sign in buffer if sign != "NL")
    typed = Typed(("NL",), view, view, buffer)
    return Layout(True, True, True, "packed", _one_field, typed.place, typed=typed)


# --- layouts written by hand ------------------------------------------------------------------


def _x_split(value: tuple[str, ...], *, splits_tokens: bool) -> Layout:
    """K [NB, NH, HS/x, BS, x] and V as given, x = 16 / itemsize; per layer K, then V."""
    typed = Typed(("NL", "TWO"), ("NB", "NH", "HS/x", "BS", "HS%x"), value)

    def check(g: Geometry) -> None:
        if 128 % g.element_bits:
            raise ValueError(f"element_bits: got {g.element_bits}, takes a divisor of 128")
        x = 128 // g.element_bits
        if g.head_size % x:
            raise ValueError(f"head_size: got {g.head_size}, takes a multiple of {x}")
        if splits_tokens and g.block_size % x:
            raise ValueError(f"block_size: got {g.block_size}, takes a multiple of {x}")

    return Layout(True, True, True, "two_plane", _one_field, typed.place, check, typed)


def _indexer_place(g: Geometry, parts: tuple[Field, ...], number: int, at: At) -> tuple[int, int]:
    """Per block: BS·128 value bytes, then BS·4 scale bytes."""
    page = at.block * g.block_size * (128 + 4)
    if number == 0:
        byte = page + at.token * 128 + at.elem
    else:
        byte = page + g.block_size * 128 + at.token * 4
    return at.layer, byte * 8


def _ds_mla_place(g: Geometry, parts: tuple[Field, ...], number: int, at: At) -> tuple[int, int]:
    """Per token 656 bytes: 512 fp8, 4 fp32 scales, 64 bf16."""
    record = (at.block * g.block_size + at.token) * 656
    byte = record + (at.elem, 512 + 4 * at.elem, 512 + 16 + 2 * at.elem)[number]
    return at.layer, byte * 8


def _sparse_place(g: Geometry, parts: tuple[Field, ...], number: int, at: At) -> tuple[int, int]:
    """Per block: BS·(448 fp8 + 64 bf16), then BS·8 scale bytes, padded to a multiple of 576."""
    tight = g.block_size * (448 + 128 + 8)
    page = at.block * math.ceil(tight / 576) * 576
    record = page + at.token * (448 + 128)
    scales = page + g.block_size * (448 + 128) + at.token * 8
    byte = (record + at.elem, record + 448 + 2 * at.elem, scales + at.elem)[number]
    return at.layer, byte * 8


def _nvfp4_fields(g: Geometry, planes: Planes) -> tuple[Field, ...]:
    return (Field("data", g.head_size, 4), Field("scale", g.head_size // 16, 8))


def _nvfp4_check(g: Geometry) -> None:
    if g.head_size % 16:
        raise ValueError(f"head_size: got {g.head_size}, takes a multiple of 16")


def _nvfp4_in_page_place(
    g: Geometry, parts: tuple[Field, ...], number: int, at: At
) -> tuple[int, int]:
    """Per block, per K and V: data of all heads and tokens, then their scales."""
    rows = g.heads * g.block_size
    data_bytes, scale_bytes = g.head_size // 2, g.head_size // 16
    page = (at.block * 2 + at.kv) * rows * (data_bytes + scale_bytes)
    row = at.head * g.block_size + at.token
    if number == 0:
        return at.layer, (page + row * data_bytes) * 8 + 4 * at.elem
    return at.layer, (page + rows * data_bytes + row * scale_bytes + at.elem) * 8


def _nvfp4_separate_place(
    g: Geometry, parts: tuple[Field, ...], number: int, at: At
) -> tuple[int, int]:
    """Per layer a tensor [NB, 2, NH, BS, HS/2] of packed data and one [NB, 2, NH, BS, HS/16]."""
    row = ((at.block * 2 + at.kv) * g.heads + at.head) * g.block_size + at.token
    if number == 0:
        return 2 * at.layer, row * g.head_size * 4 + 4 * at.elem
    return 2 * at.layer + 1, (row * (g.head_size // 16) + at.elem) * 8


def _latent(
    fields: tuple[Field, ...],
    place: Callable[[Geometry, tuple[Field, ...], int, At], tuple[int, int]],
) -> Layout:
    """One tensor per layer, no K/V axis and no heads, rows of fixed fields."""
    return Layout(True, False, False, "record", lambda g, planes: fields, place)


HAND_WRITTEN: dict[str, Layout] = {
    "VLLM_PAGED_XSPLIT": _x_split(("NB", "NH", "HS", "BS"), splits_tokens=False),
    "AITER_XSPLIT": _x_split(("NB", "NH", "BS/x", "HS", "BS%x"), splits_tokens=True),
    "NL_X_NB_BSV_BSS": _latent((Field("value", 128, 8), Field("scale", 1, 32)), _indexer_place),
    "FP8_DS_MLA": _latent(
        (Field("nope", 512, 8), Field("scale", 4, 32), Field("rope", 64, 16)), _ds_mla_place
    ),
    "DEEPSEEK_V4_SPARSE": _latent(
        (Field("nope", 448, 8), Field("rope", 64, 16), Field("scale", 8, 8)), _sparse_place
    ),
    "NVFP4_IN_PAGE": Layout(
        True, True, True, "two_plane_record", _nvfp4_fields, _nvfp4_in_page_place, _nvfp4_check
    ),
    "NVFP4_SEPARATE": Layout(
        True, True, True, "two_plane_record", _nvfp4_fields, _nvfp4_separate_place, _nvfp4_check
    ),
}


@cache
def _find(name: str) -> Layout | None:
    return HAND_WRITTEN.get(name) or _from_letters(name) or _from_grammar(name)


def _layout(name: str) -> Layout:
    found = _find(name)
    if found is None:
        raise ValueError(
            f"name: {name!r} is not in the name grammar and has no entry in HAND_WRITTEN"
        )
    return found


def _settle(name: str, geometry: Geometry) -> tuple[Layout, Geometry]:
    """The layout, and the geometry with extent 1 for the axes that the layout lacks."""
    layout = _layout(name)
    layers = geometry.layers if layout.has_layers else 1
    heads = geometry.heads if layout.has_heads else 1
    settled = replace(geometry, layers=layers, heads=heads)
    layout.check(settled)
    return layout, settled


def _chunk_axes(name: str, layout: Layout, g: Geometry, chunk: str | None) -> ChunkAxes:
    """The chunk layout asked for, or the layout's default; refused where it does not fit."""
    chunk = chunk or layout.chunk
    if chunk not in CHUNKS:
        raise ValueError(f"chunk: got {chunk!r}, takes one of {', '.join(CHUNKS)}")
    axes = CHUNKS[chunk]
    if ("kv" in axes.outer + axes.row) != layout.has_kv:
        has = "a" if layout.has_kv else "no"
        raise ValueError(f"chunk: {chunk} does not fit {name}, which has {has} K/V axis")
    if "layer" not in axes.outer and g.layers != 1:
        raise ValueError(f"chunk: {chunk} holds one layer, got {g.layers}")
    if "field" not in axes.row and len(layout.fields(g, SAMPLE_PLANES)) > 1:
        raise ValueError(f"chunk: {chunk} has no place for the fields of {name}")
    return axes


# --- questions about a layout -----------------------------------------------------------------


def knows(name: str) -> bool:
    """Whether the oracle can say where the elements of the layout called `name` lie."""
    return _find(name) is not None


def is_plain(name: str) -> bool:
    """Whether the layout's tensors are plain typed tensors, which the live functions take."""
    return _layout(name).typed is not None


def has_kv(name: str) -> bool:
    """Whether the layout has a K/V axis, packed or not."""
    return _layout(name).has_kv


def has_heads(name: str) -> bool:
    """Whether the layout has a head axis."""
    return _layout(name).has_heads


def default_chunk(name: str) -> str:
    """The name of the chunk layout that `cells` assumes where none is given."""
    return _layout(name).chunk


def chunk_shape(
    name: str,
    geometry: Geometry,
    tokens: int,
    chunk: str | None = None,
    planes: Planes = SAMPLE_PLANES,
) -> tuple[int, ...]:
    """The shape of a chunk of `tokens` tokens: rows in elements, or in bytes if it has fields."""
    layout, g = _settle(name, geometry)
    axes = _chunk_axes(name, layout, g, chunk)
    sizes = {"kv": 2, "layer": g.layers, "token": tokens}
    parts = layout.fields(g, planes)
    bits = _row_bits(axes, g, parts)
    row = bits // 8 if len(parts) > 1 else bits // parts[0].bits
    return (*(sizes[axis] for axis in axes.outer), row)


def shapes(name: str, geometry: Geometry) -> list[tuple[int, ...]]:
    """The shape of every tensor in pointer order, for a layout of plain typed tensors."""
    layout, g = _settle(name, geometry)
    typed = _typed(name, layout)
    part = layout.fields(g, SAMPLE_PLANES)[0]
    found: dict[int, tuple[int, ...]] = {}
    for layer, kv in itertools.product(range(g.layers), range(2 if layout.has_kv else 1)):
        at = At(layer, kv, 0, 0, 0, 0)
        found[typed.tensor(g, (part,), 0, at)] = _sizes(typed.axes(kv), g, part)
    return [found[position] for position in sorted(found)]


def view_step_bits(name: str, geometry: Geometry) -> int | None:
    """Bits from one layer's view to the next where layers are views of one tight buffer."""
    layout, g = _settle(name, geometry)
    if layout.typed is None or not layout.typed.buffer:
        return None
    part = layout.fields(g, SAMPLE_PLANES)[0]
    inner = layout.typed.buffer[layout.typed.buffer.index("NL") + 1 :]
    return math.prod(_sizes(inner, g, part)) * part.bits


# --- every element of a tight cache -----------------------------------------------------------


def _row_bits(axes: ChunkAxes, g: Geometry, parts: tuple[Field, ...]) -> int:
    kv = 2 if "kv" in axes.row else 1
    return sum(g.heads * kv * part.width * part.bits for part in parts)


def _row_offset_bits(
    axes: ChunkAxes, g: Geometry, parts: tuple[Field, ...], number: int, at: At
) -> int:
    part = parts[number]
    if "kv" in axes.row:
        return int((at.head * 2 + at.kv) * part.width + at.elem) * part.bits
    before = sum(g.heads * earlier.width * earlier.bits for earlier in parts[:number])
    return before + int(at.head * part.width + at.elem) * part.bits


def cells(
    name: str,
    geometry: Geometry,
    chunk: str | None = None,
    planes: Planes = SAMPLE_PLANES,
) -> Iterator[Cell]:
    """Yields one `Cell` for every payload element of a tight cache; padding is in no cell.

    The chunk holds slot 0 to NB·BS - 1 in order, in the layout called `chunk`, by default the
    layout's own. `planes` gives (width, bits) of each plane where the layout leaves them open.
    Raises ValueError for an unknown name, a chunk that does not fit and sizes that do not split.
    """
    layout, g = _settle(name, geometry)
    axes = _chunk_axes(name, layout, g, chunk)
    parts = layout.fields(g, planes)
    row_bits = _row_bits(axes, g, parts)
    outer_sizes = [{"kv": 2, "layer": g.layers, "token": g.slots}[axis] for axis in axes.outer]
    for number, part in enumerate(parts):
        for at in itertools.starmap(
            At,
            itertools.product(
                range(g.layers),
                range(2 if layout.has_kv else 1),
                range(g.blocks),
                range(g.block_size),
                range(g.heads),
                range(part.width),
            ),
        ):
            tensor, engine_bit = layout.place(g, parts, number, at)
            slot = at.block * g.block_size + at.token
            outer = [{"kv": at.kv, "layer": at.layer, "token": slot}[axis] for axis in axes.outer]
            row = _row_major(outer_sizes, outer)
            chunk_bit = row * row_bits + _row_offset_bits(axes, g, parts, number, at)
            yield Cell(*at, part.name, tensor, engine_bit, part.bits, chunk_bit)


def gather_tight(
    name: str,
    buffers: Sequence[bytes],
    geometry: Geometry,
    chunk: str | None = None,
    planes: Planes = SAMPLE_PLANES,
) -> bytes:
    """All slots of a tight cache as one chunk: `buffers` are the tensors' bytes, pointer order.

    Where layers are views of one buffer, each entry starts at its layer's first byte. Works for
    every layout, 4-bit elements included (low nibble first on both sides).
    """
    shape = chunk_shape(name, geometry, geometry.slots, chunk, planes)
    layout, g = _settle(name, geometry)
    row_bits = _row_bits(_chunk_axes(name, layout, g, chunk), g, layout.fields(g, planes))
    out = bytearray(math.prod(shape[:-1]) * row_bits // 8)
    for cell in cells(name, geometry, chunk, planes):
        source, target = buffers[cell.tensor], cell.chunk_bit // 8
        start = cell.engine_bit // 8
        if cell.bits == 4:
            nibble = source[start] >> cell.engine_bit % 8 & 0xF
            out[target] |= nibble << cell.chunk_bit % 8
        else:
            size = cell.bits // 8
            out[target : target + size] = source[start : start + size]
    return bytes(out)


# --- transfers on live tensors ----------------------------------------------------------------


def flat(tensors: Any) -> list[torch.Tensor]:
    """Tensors in pointer order, out of one tensor or lists of lists of them."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for entry in tensors for tensor in flat(entry)]


def slots_of_blocks(blocks: Iterable[int], block_size: int) -> list[int]:
    """The slots of whole blocks, in the order in which a chunk holds their tokens."""
    return [block * block_size + token for block in blocks for token in range(block_size)]


def make(
    name: str,
    geometry: Geometry,
    dtype: torch.dtype,
    allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
) -> Any:
    """Tight tensors of a plain layout, nested as its list levels say, or one tensor.

    `allocate(shape, dtype)` makes each allocation; zeros by default.
    """
    allocate = allocate or (lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    layout, g = _settle(name, geometry)
    typed = _typed(name, layout)
    if dtype.itemsize * 8 != g.element_bits:
        raise ValueError(f"dtype: got {dtype}, takes one of {g.element_bits} bits")
    if typed.buffer:
        part = layout.fields(g, SAMPLE_PLANES)[0]
        buffer = allocate(_sizes(typed.buffer, g, part), dtype)
        return list(buffer.unbind(typed.buffer.index("NL")))
    tensors: list[Any] = [allocate(shape, dtype) for shape in shapes(name, geometry)]
    for sign in reversed(typed.lists):
        length = {"NL": g.layers, "TWO": 2}[sign]
        tensors = [tensors[i : i + length] for i in range(0, len(tensors), length)]
    return tensors[0]


def read(
    name: str,
    tensors: Any,
    geometry: Geometry,
    *,
    layer: int = 0,
    slot: int = 0,
    kv: int = 0,
    head: int = 0,
    elem: int = 0,
) -> int:
    """The raw bits of one element of live tensors, as an unsigned number."""
    layout, g = _settle(name, geometry)
    arrays = _checked_arrays(name, layout, tensors, g)
    block, token = divmod(slot, g.block_size)
    position, index = _locate(layout, g, At(layer, kv, block, token, head, elem))
    return int(arrays[position][index]) & (1 << g.element_bits) - 1


def expected_chunk(
    name: str,
    tensors: Any,
    slots: Iterable[int],
    geometry: Geometry,
    *,
    chunk: str | None = None,
    skip_prefix: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a gather of `slots` must give: a new chunk of the engine's dtype.

    The chunk layout is `chunk`, by default the layout's own. Rows of negative slots and of the
    first `skip_prefix` tokens hold what `out` holds there (it is only read), or zeros.
    """
    slots = list(slots)
    layout, g = _settle(name, geometry)
    arrays = _checked_arrays(name, layout, tensors, g)
    dtype = flat(tensors)[0].dtype
    shape = chunk_shape(name, g, len(slots), chunk)
    if out is None:
        result = torch.zeros(shape, dtype=_integer(dtype)).view(dtype)
    else:
        _check_chunk(out, shape, dtype)
        result = out.detach().clone(memory_format=torch.contiguous_format)
    rows = _raw(result)
    for position, engine, row in _moves(name, layout, g, slots, chunk, skip_prefix):
        rows[row] = arrays[position][engine]
    return result


def expected_after_scatter(
    name: str,
    tensors: Any,
    chunk_tensor: torch.Tensor,
    slots: Iterable[int],
    geometry: Geometry,
    *,
    chunk: str | None = None,
    skip_prefix: int = 0,
) -> list[torch.Tensor]:
    """What the tensors must be after a scatter: copies with the same strides, in pointer order.

    Whole storages are copied, padding and neighbours included, and tensors that share a storage
    share its copy: `same_storages` then shows that nothing else changed. Of several tokens with
    the same slot the last wins here, which a transfer need not promise.
    """
    slots = list(slots)
    layout, g = _settle(name, geometry)
    copies = copy_with_storage(flat(tensors))
    arrays = _checked_arrays(name, layout, copies, g)
    _check_chunk(chunk_tensor, chunk_shape(name, g, len(slots), chunk), copies[0].dtype)
    rows = _raw(chunk_tensor)
    for position, engine, row in _moves(name, layout, g, slots, chunk, skip_prefix):
        arrays[position][engine] = rows[row]
    return copies


def copy_with_storage(tensors: Any) -> list[torch.Tensor]:
    """Copies of whole storages, and the same views of them: offset, shape and strides."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies = []
    for tensor in flat(tensors):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in storages:
            storages[address] = storage.clone()
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(storages[address], tensor.storage_offset(), tensor.shape, tensor.stride())
        copies.append(view)
    return copies


def same_storages(got: Any, expected: Any) -> bool:
    """Whether two sets of tensors hold the same bytes in all of their storages."""
    pairs = zip(flat(got), flat(expected), strict=True)
    return all(torch.equal(_storage_bytes(a), _storage_bytes(b)) for a, b in pairs)


def same_bytes(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits in every element."""
    alike = got.dtype == expected.dtype and got.shape == expected.shape
    return alike and bool(np.array_equal(_raw(got), _raw(expected)))


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def _integer(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def _raw(tensor: torch.Tensor) -> np.ndarray:
    """A view of the tensor, same dimensions and strides, as integers of the element's size."""
    array: np.ndarray = tensor.detach().view(_integer(tensor.dtype)).numpy()
    return array


def _typed(name: str, layout: Layout) -> Typed:
    if layout.typed is None:
        raise ValueError(f"name: the tensors of {name} are no plain typed tensors")
    return layout.typed


def _check_chunk(chunk: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(chunk.shape) != shape or chunk.dtype != dtype:
        raise ValueError(f"chunk: got {chunk.dtype} {tuple(chunk.shape)}, takes {dtype} {shape}")


def _checked_arrays(name: str, layout: Layout, tensors: Any, g: Geometry) -> list[np.ndarray]:
    _typed(name, layout)
    found = flat(tensors)
    wanted = shapes(name, g)
    got = [tuple(tensor.shape) for tensor in found]
    if got != wanted:
        raise ValueError(f"tensors: {name} takes shapes {wanted}, got {got}")
    if any(tensor.dtype.itemsize * 8 != g.element_bits for tensor in found):
        raise ValueError(f"tensors: takes elements of {g.element_bits} bits")
    return [_raw(tensor) for tensor in found]


def _locate(layout: Layout, g: Geometry, at: At) -> tuple[int, tuple[Index, ...]]:
    """The tensor's position in pointer order, and the index in its own dimensions."""
    typed = layout.typed
    assert typed is not None
    parts = layout.fields(g, SAMPLE_PLANES)
    index = tuple(_index(sign, at, g, parts[0]) for sign in typed.axes(at.kv))
    return typed.tensor(g, parts, 0, at), index


def _moves(
    name: str,
    layout: Layout,
    g: Geometry,
    slots: list[int],
    chunk: str | None,
    skip_prefix: int,
) -> Iterator[tuple[int, tuple[Index, ...], tuple[Index, ...]]]:
    """Yields (tensor, its index, chunk index) for each row: all heads and elements at once."""
    axes = _chunk_axes(name, layout, g, chunk)
    heads, elems = np.arange(g.heads)[:, None], np.arange(g.head_size)[None, :]
    for row, slot in enumerate(slots):
        if row < skip_prefix or slot < 0:
            continue
        if slot >= g.slots:
            raise ValueError(f"slots: got {slot}, takes a slot below {g.slots}")
        block, token = divmod(slot, g.block_size)
        for layer, kv in itertools.product(range(g.layers), range(2 if layout.has_kv else 1)):
            position, engine = _locate(layout, g, At(layer, kv, block, token, heads, elems))
            if "kv" in axes.row:
                column = (heads * 2 + kv) * g.head_size + elems
            else:
                column = heads * g.head_size + elems
            outer = tuple({"kv": kv, "layer": layer, "token": row}[axis] for axis in axes.outer)
            yield position, engine, (*outer, column)
