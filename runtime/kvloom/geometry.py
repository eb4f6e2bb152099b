"""Sizes and byte strides of a cache, read from its tensors and fused into the kernels' array.

Everything here works on plain facts about tensors, so it needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvloom._abi import Int64Array, LayoutFacts

Dims: TypeAlias = tuple[tuple[str, ...], ...]

# The field's signs for the extents of axes.
SIGNS = {
    "layer": "NL",
    "kv": "2",
    "block": "NB",
    "token": "BS",
    "head": "NH",
    "elem": "HS",
    "one": "1",
}


@dataclass(frozen=True)
class TensorFacts:
    """A tensor without its contents: strides are in elements, ``what`` names it in errors."""

    what: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str


@dataclass(frozen=True)
class Axes:
    """The extent of each axis of a tensor, and the bytes from one step of it to the next.

    An axis that is a list level has an extent and no stride. An axis of extent 1 has stride 0:
    nothing ever steps along it, whatever the tensor says.
    """

    extents: Mapping[str, int]
    strides: Mapping[str, int]

    def extent(self, axis: str) -> int:
        """The extent of ``axis``; 1 for an axis that is not there."""
        return self.extents.get(axis, 1)


@dataclass(frozen=True, eq=False)
class Group:
    """Layers of a cache that share one chunk: equal in dtype, heads, head and block size.

    ``layers`` are their numbers in the cache, ``planes`` is 2 where they have keys and values.
    ``blocks`` and ``capacity``, in slots, are those of the smallest layer; ``blocks`` and
    ``block_size`` are None where neither the tensors nor the call that bound them tell the latter.
    """

    layers: tuple[int, ...]
    dtype: str
    itemsize: int
    planes: int
    heads: int
    head_size: int
    block_size: int | None
    blocks: int | None
    capacity: int
    tensors: tuple[int, ...] = field(repr=False)  # their numbers in the cache, in pointer order
    pointers: Int64Array = field(repr=False)
    kinds: tuple[Axes, ...] = field(repr=False)  # the distinct strides of its layers
    kind: NDArray[np.intp] = field(repr=False)  # which of them each layer has

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all of the layers."""
        return prod(self.extents.values()) * self.itemsize

    @property
    def extents(self) -> dict[str, int]:
        """The extents of everything but blocks and tokens."""
        return {
            "layer": len(self.layers),
            "kv": self.planes,
            "head": self.heads,
            "elem": self.head_size,
        }


def shape_of(dims: Dims, extents: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor with these dimensions; an axis without an extent counts as 1."""
    return tuple(prod(extents.get(axis, 1) for axis in dim) for dim in dims)


def shape_text(dims: Dims, extents: Mapping[str, int | str]) -> str:
    """The dimensions in the field's signs, or in numbers where ``extents`` has them."""
    words = []
    for dim in dims:
        sizes = [extents.get(axis, 1) for axis in dim]
        numbers = [size for size in sizes if isinstance(size, int)]
        signs = [size for size in sizes if isinstance(size, str)]
        if not signs or prod(numbers) != 1:
            signs.insert(0, str(prod(numbers)))
        words.append("·".join(signs))
    return f"[{', '.join(words)}]"


def layout_text(facts: LayoutFacts) -> str:
    """A layout's lists and the shape of one tensor in the field's signs."""
    levels = [SIGNS.get(level, level) for level in facts.lists]
    return " × ".join([*levels, shape_text(facts.axes, SIGNS)])


def axis_strides(
    dims: Dims, extents: Mapping[str, int], strides: Sequence[int], itemsize: int
) -> dict[str, int]:
    """Bytes per step of every axis of a tensor whose dimensions have these element strides."""
    found = {}
    for dim, stride in zip(dims, strides, strict=True):
        step = stride * itemsize
        for axis in reversed(dim):
            extent = extents.get(axis, 1)
            found[axis] = step if extent > 1 else 0
            step *= extent
    return found


def read_axes(tensor: TensorFacts, facts: LayoutFacts, block_size: int | None) -> Axes:
    """The axes of one of a layout's tensors, read from its shape and strides.

    ValueError for a tensor of another shape, or whose elements of a head are not adjacent.
    """
    takes = f"{facts.name} takes {shape_text(facts.axes, SIGNS)}"
    if len(tensor.shape) != len(facts.axes):
        raise ValueError(f"{tensor.what}: got shape {tensor.shape}, {takes}")
    known = {"kv": 2, "one": 1}
    if block_size is not None or flat_slots(facts):
        known["token"] = block_size or 1
    extents: dict[str, int] = {}
    for number, (dim, size) in enumerate(zip(facts.axes, tensor.shape, strict=True)):
        sizes = {axis: known[axis] for axis in dim if axis in known}
        unknown = [axis for axis in dim if axis not in known]
        for axis in unknown:
            sizes[axis] = size // prod(sizes.values())
        if size < 1 or prod(sizes.values()) != size:
            given = "" if block_size is None else f" with block_size {block_size}"
            raise ValueError(
                f"{tensor.what}: got shape {tensor.shape}, whose dimension {number} does not fit; "
                f"{takes}{given}"
            )
        extents.update(sizes)
    strides = axis_strides(facts.axes, extents, tensor.strides, tensor.itemsize)
    if extents["elem"] > 1 and strides["elem"] != tensor.itemsize:
        raise ValueError(
            f"{tensor.what}: got strides {tensor.strides}, takes stride 1 along the elements of a "
            "head"
        )
    return Axes(extents, strides)


def flat_slots(facts: LayoutFacts) -> bool:
    """Whether its tensors have one dimension for blocks and tokens, which hides the block size."""
    return any(dim == ("block", "token") for dim in facts.axes)


def read_groups(
    facts: LayoutFacts,
    counts: Sequence[int],
    tensors: Sequence[TensorFacts],
    block_size: int | None,
) -> tuple[Group, ...]:
    """The groups of a cache, in the order in which its layers first show them.

    ``tensors`` are in pointer order and ``counts`` are the lengths of the list levels around them.
    ValueError for a tensor that does not fit the layout or the other tensors of its layer.
    """
    places = list(product(*(range(count) for count in counts)))
    level = facts.lists.index("layer") if "layer" in facts.lists else None
    listed = dict(zip(facts.lists, counts, strict=True))
    seen: dict[tuple[object, ...], Axes] = {}
    of_layer: dict[int, tuple[TensorFacts, Axes]] = {}
    for place, tensor in zip(places, tensors, strict=True):
        key = (tensor.shape, tensor.strides, tensor.itemsize)
        if key not in seen:
            axes = read_axes(tensor, facts, block_size)
            seen[key] = Axes({**axes.extents, **listed}, axes.strides)
        axes = seen[key]
        layers = range(axes.extent("layer")) if level is None else (place[level],)
        for layer in layers:
            first, expected = of_layer.setdefault(layer, (tensor, axes))
            if axes != expected or tensor.dtype != first.dtype:
                raise ValueError(
                    f"{tensor.what}: got {_described(tensor)}, takes what {first.what} of the same "
                    f"layer has: {_described(first)}"
                )
    members: dict[tuple[object, ...], list[int]] = {}
    for layer, (tensor, axes) in sorted(of_layer.items()):
        sizes = tuple(axes.extent(axis) for axis in ("head", "elem", "token"))
        members.setdefault((tensor.dtype, tensor.itemsize, *sizes), []).append(layer)
    groups = []
    for chosen in members.values():
        inside = set(chosen)
        numbers = [
            number for number, place in enumerate(places) if level is None or place[level] in inside
        ]
        addresses = [tensors[number].address for number in numbers]
        shown = block_size is not None or not flat_slots(facts)
        found = [of_layer[layer] for layer in chosen]
        groups.append(_group(chosen, found, numbers, addresses, shown))
    return tuple(groups)


@dataclass(frozen=True)
class Fused:
    """The bytes of one copy, and how often it is done along each axis that is left.

    ``axes`` are those that lie end to end on both sides, innermost first.
    """

    run: int
    counts: Mapping[str, int]
    axes: tuple[str, ...]


def fuse(engine: Axes, chunk: Axes, counted: Sequence[str], itemsize: int) -> Fused:
    """Draw every one of the ``counted`` axes that continues the run on both sides into it."""
    run = engine.extent("elem") * itemsize
    counts = {axis: engine.extent(axis) for axis in counted}
    axes: list[str] = []
    while True:
        left = (axis for axis in counted if counts[axis] > 1)
        inner = next(
            (axis for axis in left if engine.strides.get(axis) == run == chunk.strides.get(axis)),
            None,
        )
        if inner is None:
            return Fused(run, counts, tuple(axes))
        axes.append(inner)
        run *= counts[inner]
        counts[inner] = 1


def row(columns: Sequence[str], engine: Axes, chunk: Axes, fused: Fused) -> list[int]:
    """One layer's row of a kernel's geometry array, which has these columns."""
    block_size = engine.extent("token")
    values = {"block_size": block_size, "run": fused.run}
    values["chunk.block"] = block_size * chunk.strides["token"]
    sides = {"count": fused.counts, "engine": engine.strides, "chunk": chunk.strides}
    for name in columns:
        side, _, axis = name.partition(".")
        if name not in values:
            values[name] = sides[side].get(axis, 1 if side == "count" else 0)
    return [values[name] for name in columns]


def _group(
    layers: Sequence[int],
    found: Sequence[tuple[TensorFacts, Axes]],
    numbers: Sequence[int],
    addresses: Sequence[int],
    shown: bool,
) -> Group:
    tensor, axes = found[0]
    kinds = {id(one): one for _, one in found}
    number = {key: position for position, key in enumerate(kinds)}
    blocks = min(one.extent("block") for one in kinds.values())
    block_size = axes.extent("token")
    return Group(
        layers=tuple(layers),
        dtype=tensor.dtype,
        itemsize=tensor.itemsize,
        planes=axes.extent("kv"),
        heads=axes.extent("head"),
        head_size=axes.extent("elem"),
        block_size=block_size if shown else None,
        blocks=blocks if shown else None,
        capacity=blocks * block_size,
        tensors=tuple(numbers),
        pointers=np.array(addresses, np.int64),
        kinds=tuple(kinds.values()),
        kind=np.array([number[id(one)] for _, one in found], np.intp),
    )


def _described(tensor: TensorFacts) -> str:
    return f"{tensor.dtype}, shape {tensor.shape}, strides {tensor.strides}"
