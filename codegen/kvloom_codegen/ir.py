"""What the generator knows of a layout before it is a language: components and loop nests.

Strides and sizes are expressions in bits; pointer strides count tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvloom_codegen.expr import Expr

Op: TypeAlias = Literal["gather", "scatter"]
Addressing: TypeAlias = Literal["slots", "blocks"]
OPS: tuple[Op, ...] = ("gather", "scatter")
ADDRESSINGS: tuple[Addressing, ...] = ("slots", "blocks")


@dataclass(frozen=True)
class Dim:
    """One axis of a component: how far a step goes in the pointers, the tensor and the chunk."""

    axis: str
    extent: Expr
    pointer: Expr
    engine: Expr
    chunk: Expr


@dataclass(frozen=True)
class Component:
    """The part of a layout that one loop nest visits: all its elements have the same strides.

    ``dims`` are in the engine's memory order, list levels first; ``run`` is what lies contiguous
    on both sides below the innermost dim.
    """

    name: str
    pointer: Expr
    engine: Expr
    chunk: Expr
    dims: tuple[Dim, ...]
    run: Expr

    def dim(self, axis: str) -> Dim | None:
        """The dim of ``axis``, or None where the component lacks it."""
        return next((dim for dim in self.dims if dim.axis == axis), None)


@dataclass(frozen=True)
class LayoutIR:
    """A layout against one chunk layout.

    ``view_step`` is the distance between the starts of consecutive tensors where they are views
    into one buffer, else None: tensors are then allocations of their own. ``factors`` are the
    values of the split factors that the strides name.
    """

    layout: str
    chunk: str
    components: tuple[Component, ...]
    view_step: Expr | None
    factors: Mapping[str, Expr]

    def values(self, geometry: Mapping[str, int]) -> dict[str, int]:
        """The values of all symbols of the IR on a geometry given by its extents."""
        return {**geometry, **{name: one.evaluate(geometry) for name, one in self.factors.items()}}


@dataclass(frozen=True)
class Loop:
    """One level of a kernel: each step adds ``engine`` and ``chunk`` bytes to the two addresses.

    ``position`` names what is read from the order array at this level, and ``entry`` what the index
    array has at that position (slot or block); ``lets`` are names worked out from it; ``skips``
    says that a negative entry is passed over.
    """

    axis: str
    variable: str
    first: Expr
    last: Expr
    engine: Expr
    chunk: Expr
    position: str = ""
    entry: str = ""
    lets: tuple[tuple[str, Expr], ...] = ()
    skips: bool = False


@dataclass(frozen=True)
class Ahead:
    """What a kernel asks the caches for while earlier rows move: the rows of a later entry.

    ``entry``, ``lets`` and ``engine`` are to the later entry what those of the index loop are to
    the one at hand; ``inner`` are the loops below it. It is a hint: it moves nothing.
    """

    entry: str
    lets: tuple[tuple[str, Expr], ...]
    engine: Expr
    inner: tuple[Loop, ...]


@dataclass(frozen=True)
class Kernel:
    """A loop nest around one copy of ``run`` bytes.

    The nest's first loop is over layers. ``columns`` are the columns of the geometry array that it
    reads, ``pointer`` is the index of the tensor, known from loop ``pointer_level`` on. ``ahead``
    is there where rows are read from slots in any order.
    """

    op: Op
    addressing: Addressing
    columns: tuple[str, ...]
    loops: tuple[Loop, ...]
    pointer: Expr
    pointer_level: int
    run: Expr
    ahead: Ahead | None = None

    @property
    def name(self) -> str:
        """gather_slots, scatter_slots, gather_blocks or scatter_blocks."""
        return f"{self.op}_{self.addressing}"
