"""Chunks: what shape a group of layers has in a chunk layout, and which layout a tensor is in."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from kvloom.geometry import Axes, TensorFacts, axis_strides, shape_of, shape_text

if TYPE_CHECKING:
    from kvloom._abi import ChunkFacts
    from kvloom.geometry import Group


def obstacle(chunk: ChunkFacts, group: Group) -> str:
    """Why ``chunk`` can't hold the tokens of a group, or nothing where it can."""
    axes = {axis for dim in chunk.axes for axis in dim}
    for axis, extent in group.extents.items():
        if extent > 1 and axis not in axes:
            return f"{chunk.name} has no {axis} axis, and there are {extent} to hold"
    if chunk.axes[-1][-1] != "elem":
        return f"{chunk.name} keeps the elements of a head apart"
    return ""


def shape(chunk: ChunkFacts, group: Group, tokens: int) -> tuple[int, ...]:
    """The shape of a chunk with this many tokens of a group's layers."""
    return shape_of(chunk.axes, {**group.extents, "token": tokens})


def contiguous(chunk: ChunkFacts, group: Group, tokens: int) -> TensorFacts:
    """A contiguous chunk with this many tokens of a group's layers, at no address."""
    sizes = shape(chunk, group, tokens)
    strides = tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    return TensorFacts("a contiguous chunk", 0, sizes, strides, group.itemsize, group.dtype)


def recognise(
    tensor: TensorFacts, group: Group, layouts: Sequence[ChunkFacts]
) -> tuple[ChunkFacts, Axes]:
    """Which of these chunk layouts ``tensor`` is in, by its shape, and its axes.

    The first wins where it fits; another only where no two of them read the tensor differently. A
    dimension of 1 may stand before those of any layout. ValueError, with the shapes that are
    taken, where none fits; where several do; and where rows are not contiguous.
    """
    fits = [(one, axes) for one in layouts if (axes := _axes(tensor, group, one)) is not None]
    if not fits:
        shapes: dict[str, str] = {}
        for one in layouts:
            shapes.setdefault(shape_text(one.axes, {**group.extents, "token": "T"}), one.name)
        takes = " or ".join(f"{text} ({name})" for text, name in shapes.items())
        raise ValueError(f"{tensor.what}: got shape {tensor.shape}, takes {takes}")
    if fits[0][0] is not layouts[0]:
        unlike = [one.name for one, axes in fits if _differ(axes, fits[0][1])]
        if unlike:
            names = " and ".join([fits[0][0].name, *unlike])
            raise ValueError(
                f"{tensor.what}: got shape {tensor.shape}, which is that of {names}; say which by "
                "chunk="
            )
    if tensor.shape[-1] > 1 and tensor.strides[-1] != 1:
        raise ValueError(
            f"{tensor.what}: got strides {tensor.strides}, takes contiguous rows: stride 1 along "
            "the last dimension"
        )
    return fits[0]


def _axes(tensor: TensorFacts, group: Group, chunk: ChunkFacts) -> Axes | None:
    """The axes of ``tensor`` read as ``chunk``, or None where it has another shape."""
    sizes, strides = tensor.shape, tensor.strides
    if len(sizes) == len(chunk.axes) + 1 and sizes[0] == 1:
        sizes, strides = sizes[1:], strides[1:]
    if len(sizes) != len(chunk.axes):
        return None
    extents = group.extents
    for dim, size in zip(chunk.axes, sizes, strict=True):
        if "token" in dim:
            extents["token"] = size // prod(extents.get(axis, 1) for axis in dim)
    if shape_of(chunk.axes, extents) != tuple(sizes):
        return None
    return Axes(extents, axis_strides(chunk.axes, extents, strides, tensor.itemsize))


def _differ(one: Axes, other: Axes) -> bool:
    """Whether two readings of a tensor put anything in different places."""
    axes = {axis for axis, extent in one.extents.items() if extent > 1}
    return any(one.strides.get(axis) != other.strides.get(axis) for axis in axes)
