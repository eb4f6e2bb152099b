"""What a generated module hands to the runtime: plain facts about a layout and its kernels.

A leaf module: it imports nothing of kvloom, so generated modules and runtime modules may be
imported in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor as Tensor

    Int64Array: TypeAlias = NDArray[np.int64]

Attention = Literal["mha", "mla"]

# Arguments: pointers, chunk, index, order, geometry, layer_first, layer_last, first, last. Entries
# first to last of ``order`` are the positions of the index that are moved, one by one.
Kernel: TypeAlias = Callable[
    ["Int64Array", int, "Int64Array", "Int64Array", "Int64Array", int, int, int, int], None
]

# Tensors in pointer order and a chunk seen as [token, kv, layer, head, elem]: each tensor as
# [block, token, …] beside its part of the chunk, as [token, …].
Views: TypeAlias = Callable[["Sequence[Tensor]", "Tensor"], "Iterator[tuple[Tensor, Tensor]]"]


@dataclass(frozen=True)
class EngineFacts:
    """A serving engine, or one attention backend of it, that holds a layout."""

    name: str
    alias: str


@dataclass(frozen=True)
class LayoutFacts:
    """One engine layout as declared in specs/layouts.

    Axes are named layer, kv, block, token, head, elem, field and one. ``lists`` are the axes that
    are list levels, outermost first. ``axes`` are the dimensions of one tensor in the order of its
    memory when nothing permutes it; a dimension that fuses several axes lists them outermost
    first. ``memory`` is the order of all axes in one allocation: it differs from ``axes`` only
    where layers are views (``views``) into one buffer. ``geometry`` names the columns of the
    kernels' geometry array. ``unsupported`` says why there are no kernels, or is empty.
    """

    name: str
    module: str
    id: int | None
    attention: Attention
    engines: tuple[EngineFacts, ...]
    doc: str
    lists: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    memory: tuple[str, ...]
    views: tuple[str, ...]
    chunk: str
    geometry: tuple[str, ...]
    unsupported: str


@dataclass(frozen=True)
class ChunkFacts:
    """One chunk layout as declared in specs/chunks: its tensor dimensions, outermost first."""

    name: str
    doc: str
    axes: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ModelFacts:
    """The KV-cache geometry of one model as declared in specs/models.

    ``heads`` is 1 for MLA, whose ``head_size`` is the latent width. Sizes are in elements.
    """

    name: str
    doc: str
    attention: Attention
    layers: int
    heads: int
    head_size: int
    dtype: str


@dataclass(frozen=True)
class Kernels:
    """The four kernels of one layout; gather is engine → chunk, scatter is chunk → engine."""

    gather_slots: Kernel
    scatter_slots: Kernel
    gather_blocks: Kernel
    scatter_blocks: Kernel
