"""The meaning of a spec, read without strides: a cursor that walks the tree and counts bits.

The proof compares the IR with this walk. It shares no code with ``lower``: where both agree on
every element of several geometries, the strides are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import lcm
from typing import NamedTuple

from kvloom_codegen.spec import (
    ChunkSpec,
    FieldBranch,
    FieldSpec,
    Fuse,
    Item,
    KvBranch,
    LayoutSpec,
    RegionBranch,
    axes_of,
    axis_words,
    split_item,
)


@dataclass(frozen=True)
class Geometry:
    """Sizes of one cache: counts, elements, bits of an element, and bits of padding a block."""

    layers: int
    blocks: int
    block_size: int
    heads: int
    head_size: int
    itembits: int = 16
    pad: int = 0

    @property
    def symbols(self) -> dict[str, int]:
        """The values of the symbols that layout expressions use."""
        return {
            "NL": self.layers,
            "NB": self.blocks,
            "BS": self.block_size,
            "NH": self.heads,
            "HS": self.head_size,
            "ITEMBITS": self.itembits,
            "PAD": self.pad,
        }

    @property
    def tokens(self) -> int:
        """Slots of the cache."""
        return self.blocks * self.block_size


class Element(NamedTuple):
    """The logical name of one element."""

    layer: int
    kv: int
    block: int
    token: int
    head: int
    field: str
    elem: int


class Place(NamedTuple):
    """Where an element lies: the tensor's position in the list, and bits from its start."""

    tensor: int
    bit: int


def tiny(spec: LayoutSpec, blocks: int = 3, pad: int = 0) -> Geometry:
    """The smallest geometry with more than one of everything in which all divisions are exact."""
    tokens, elements = units(spec, itembits=16)
    if spec.declared_fields:
        elements *= 2  # a field of HS/16 has more than one element too
    heads = 1 if "head" not in axes_of(spec) else 2
    return Geometry(2, blocks, lcm(2, tokens), heads, lcm(2, elements), pad=pad)


def units(spec: LayoutSpec, itembits: int) -> tuple[int, int]:
    """The numbers that a block's tokens and a head's elements must be multiples of."""
    tokens, elements = 1, 1
    words = set(axis_words(spec.memory))
    for name, factor in spec.split.items():
        by = factor_value(factor, itembits)
        if f"token/{name}" in words:
            tokens = lcm(tokens, by)
        if f"elem/{name}" in words:
            elements = lcm(elements, by)
    for one in spec.declared_fields.values():
        if isinstance(one.width, str) and "/" in one.width:
            elements = lcm(elements, int(one.width.split("/")[1]))
    return tokens, elements


def factor_value(factor: int | str, itembits: int) -> int:
    """Elements in one group of a split axis."""
    return factor if isinstance(factor, int) else int(factor.split("/")[0]) * 8 // itembits


@dataclass
class _Cursor:
    """Hands out bits in the order in which it is asked."""

    spec: LayoutSpec
    geometry: Geometry
    bit: int = 0
    tensor: int = 0
    placed: dict[Element, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fields = self.spec.declared_fields

    def lay(self, items: tuple[Item, ...], at: dict[str, int], name: str) -> None:
        if not items:
            self._put(at, name)
            return
        item, rest = items[0], items[1:]
        if isinstance(item, KvBranch):
            for kv, member in enumerate((item.kv.key, item.kv.value)):
                if at.get("kv", kv) == kv:
                    self.lay(member, {**at, "kv": kv}, name)
        elif isinstance(item, FieldBranch):
            for field_name, member in item.field.items():
                if name in ("", field_name):
                    self.lay(member, at, field_name)
        elif isinstance(item, RegionBranch):
            for member in item.region:
                self.lay(member, at, name)
        elif isinstance(item, Fuse):
            self._steps(item.fuse, rest, at, name, alone=False)
        else:
            self._steps((item,), rest, at, name, alone=True)

    def _steps(
        self,
        axes: tuple[str, ...],
        rest: tuple[Item, ...],
        at: dict[str, int],
        name: str,
        alone: bool,
    ) -> None:
        for steps in product(*(range(self._extent(axis, name)) for axis in axes)):
            start = self.bit
            self.lay(rest, {**at, **dict(zip(axes, steps, strict=True))}, name)
            if alone and axes == ("block",):
                self._pad(start)

    def _pad(self, start: int) -> None:
        if self.spec.pad is not None and isinstance(self.spec.pad.block, int):
            self.bit += (start - self.bit) % (8 * self.spec.pad.block)
        self.bit += self.geometry.pad

    def _put(self, at: dict[str, int], name: str) -> None:
        bits = self.fields[name].element_bits if name else self.geometry.itembits
        element = Element(
            at.get("layer", 0),
            at.get("kv", 0),
            at["block"],
            self._whole(at, "token"),
            at.get("head", 0),
            name,
            self._whole(at, "elem"),
        )
        self.placed[element] = Place(self.tensor, self.bit)
        self.bit += bits

    def _whole(self, at: dict[str, int], axis: str) -> int:
        if axis in at:
            return at[axis]
        (name,) = [key[len(axis) + 1 :] for key in at if key.startswith(f"{axis}/")]
        return at[f"{axis}/{name}"] * self._factor(name) + at[f"{axis}%{name}"]

    def _factor(self, name: str) -> int:
        return factor_value(self.spec.split[name], self.geometry.itembits)

    def _extent(self, axis: str, name: str) -> int:
        split = split_item(axis)
        if split:
            whole, part, factor = split
            by = self._factor(factor)
            return by if part == "%" else self._extent(whole, name) // by
        if axis == "elem" and name:
            return width(self.fields[name], self.geometry)
        geometry = self.geometry
        return {
            "layer": geometry.layers,
            "kv": 2,
            "block": geometry.blocks,
            "token": geometry.block_size,
            "head": geometry.heads,
            "elem": geometry.head_size,
            "one": 1,
        }[axis]


def width(one: FieldSpec, geometry: Geometry) -> int:
    """Elements of one row of a field."""
    if isinstance(one.width, int):
        return one.width
    return geometry.head_size // int(one.width.partition("/")[2] or 1)


def engine_places(spec: LayoutSpec, geometry: Geometry) -> dict[Element, Place]:
    """Where every element of a cache lies, in tight tensors but for the geometry's padding."""
    if spec.views:
        return _view_places(spec, geometry)
    cursor = _Cursor(spec, geometry)
    counts = {"layer": geometry.layers, "kv": 2, "field": len(spec.declared_fields)}
    names = list(spec.declared_fields)
    for number, steps in enumerate(product(*(range(counts[axis]) for axis in spec.lists))):
        at = dict(zip(spec.lists, steps, strict=True))
        name = names[at.pop("field")] if "field" in at else ""
        cursor.tensor, cursor.bit = number, 0
        cursor.lay(spec.memory, at, name)
    return cursor.placed


def _view_places(spec: LayoutSpec, geometry: Geometry) -> dict[Element, Place]:
    starts = view_starts(spec, geometry)
    return {
        element: Place(element.layer, place.bit - starts[element.layer])
        for element, place in _buffer(spec, geometry).items()
    }


def view_starts(spec: LayoutSpec, geometry: Geometry) -> list[int]:
    """Where each layer's view starts in the one buffer, in bits; nothing without views."""
    starts: dict[int, int] = {}
    if spec.views:
        for element, place in _buffer(spec, geometry).items():
            starts[element.layer] = min(place.bit, starts.get(element.layer, place.bit))
    return [starts[layer] for layer in sorted(starts)]


def _buffer(spec: LayoutSpec, geometry: Geometry) -> dict[Element, Place]:
    cursor = _Cursor(spec, geometry)
    cursor.lay(spec.memory, {}, "")
    return cursor.placed


def chunk_bits(
    spec: LayoutSpec, chunk: ChunkSpec, geometry: Geometry
) -> Iterator[tuple[Element, int]]:
    """Each element of a cache with its bit in a tight chunk that holds every slot in order."""
    fields = spec.declared_fields
    names = list(fields) or [""]
    has_kv = "kv" in axes_of(spec)
    bit = 0

    def extent(axis: str, name: str) -> int:
        if axis == "elem":
            return width(fields[name], geometry) if name else geometry.head_size
        if axis == "token":
            return geometry.tokens
        if axis == "kv":
            return 2 if has_kv else 1
        return geometry.layers if axis == "layer" else geometry.heads

    def lay(axes: tuple[str, ...], at: dict[str, int], name: str) -> Iterator[tuple[Element, int]]:
        nonlocal bit
        if not axes:
            block, token = divmod(at["token"], geometry.block_size)
            kv, head = at.get("kv", 0), at.get("head", 0)
            yield Element(at.get("layer", 0), kv, block, token, head, name, at["elem"]), bit
            bit += fields[name].element_bits if name else geometry.itembits
        elif axes[0] == "field":
            for one in names:
                yield from lay(axes[1:], at, one)
        else:
            for step in range(extent(axes[0], name)):
                yield from lay(axes[1:], {**at, axes[0]: step}, name)

    yield from lay(chunk.order, {}, "")
