"""Chooses what moves the bytes of a transfer, works out what it is given, and says why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from kvloom.chunk import recognise
from kvloom.geometry import Fused, fuse, row
from kvloom.overlap import span

if TYPE_CHECKING:
    from kvloom._abi import ChunkFacts, Int64Array, LayoutFacts
    from kvloom.geometry import Axes, Group, TensorFacts

Op: TypeAlias = Literal["gather", "scatter"]
Addressing: TypeAlias = Literal["slots", "blocks"]

OPS: tuple[Op, ...] = ("gather", "scatter")
ADDRESSINGS: tuple[Addressing, ...] = ("slots", "blocks")


@dataclass(frozen=True)
class Selection:
    """What moves the bytes of a transfer and why, or why nothing does.

    ``chunk`` is the chunk layout, ``run_bytes`` are the contiguous bytes of one copy in each layer,
    ``fused`` are the axes that such a copy covers in every layer, innermost first, and ``why`` says
    what keeps the others out. Where ``refused`` has a reason, nothing moves and the rest is empty.
    """

    op: Op
    addressing: Addressing
    backend: str = ""
    kernel: str = ""
    chunk: str = ""
    run_bytes: tuple[int, ...] = ()
    fused: tuple[str, ...] = ()
    why: str = ""
    refused: str = ""

    def __str__(self) -> str:
        what = f"{self.op} by {self.addressing}"
        if self.refused:
            return f"{what}, refused: {self.refused}"
        return f"{what} on {self.backend}, chunk layout {self.chunk}: {self.why}"


@dataclass(frozen=True, eq=False)
class Plan:
    """How one group's layers and a chunk of one shape meet: what a kernel is given, and why.

    ``token_stride`` and ``span`` are the chunk's, in bytes; ``fused`` and ``why`` have an entry for
    each of the group's layers.
    """

    chunk: str
    tokens: int
    token_stride: int
    span: int
    geometry: Int64Array
    fused: tuple[Fused, ...]
    why: tuple[str, ...]


def refusal(facts: LayoutFacts, groups: Sequence[Group], addressing: Addressing) -> str:
    """Why a cache can't be addressed like this, or nothing where it can."""
    if addressing == "slots":
        return ""
    sizes = sorted({group.block_size or 0 for group in groups})
    if sizes[0] == 0:
        return (
            f"blocks: the tensors of {facts.name} don't show how many tokens a block has; give "
            "bind their block_size"
        )
    if len(sizes) > 1:
        return (
            f"blocks: layers have blocks of {' and '.join(map(str, sizes))} tokens, so a block id "
            "names different tokens in each; use slots, or bind the layers apart"
        )
    return ""


def plan(
    facts: LayoutFacts,
    group: Group,
    tensor: TensorFacts,
    layouts: Sequence[ChunkFacts],
    addressing: Addressing,
) -> Plan:
    """What moves a group's tokens to or from ``tensor``, which is in one of the chunk ``layouts``.

    ValueError where the tensor is in none of them.
    """
    chunk, axes = recognise(tensor, group, layouts)
    counted = [name.removeprefix("count.") for name in facts.geometry if name.startswith("count.")]
    if addressing == "slots":
        counted.remove("token")
    fused = [fuse(engine, axes, counted, group.itemsize) for engine in group.kinds]
    kinds = list(zip(group.kinds, fused, strict=True))
    table = np.array([row(facts.geometry, engine, axes, one) for engine, one in kinds], np.int64)
    why = [_sentence(engine, axes, one, addressing) for engine, one in kinds]
    return Plan(
        chunk=chunk.name,
        tokens=axes.extents["token"],
        token_stride=axes.strides["token"],
        span=span(tensor),
        geometry=table[group.kind],
        fused=tuple(fused[kind] for kind in group.kind),
        why=tuple(why[kind] for kind in group.kind),
    )


def describe(
    op: Op, addressing: Addressing, groups: Sequence[Group], plans: Sequence[Plan]
) -> Selection:
    """The selection of a transfer that these plans, one for each group, carry out."""
    fused: dict[int, Fused] = {}
    layers_of: dict[str, list[int]] = {}
    for group, one in zip(groups, plans, strict=True):
        fused.update(zip(group.layers, one.fused, strict=True))
        for layer, why in zip(group.layers, one.why, strict=True):
            layers_of.setdefault(why, []).append(layer)
    sentences = list(layers_of)
    if len(sentences) > 1:
        sentences = [f"layers {_ranges(layers)}: {why}" for why, layers in layers_of.items()]
    everywhere = set.intersection(*(set(one.axes) for one in fused.values()))
    return Selection(
        op=op,
        addressing=addressing,
        backend="cpu",
        kernel=f"{op}_{addressing}",
        chunk=", ".join(dict.fromkeys(one.chunk for one in plans)),
        run_bytes=tuple(fused[layer].run for layer in sorted(fused)),
        fused=tuple(axis for axis in plans[0].fused[0].axes if axis in everywhere),
        why="; ".join(sentences),
    )


def _sentence(engine: Axes, chunk: Axes, fused: Fused, addressing: Addressing) -> str:
    """What of a layer moves in one copy, and what keeps more from doing so."""
    apart = {axis: count for axis, count in fused.counts.items() if count > 1}
    copies = prod(apart.values())
    verb = "fuses" if len(fused.axes) == 1 else "fuse"
    *most, last = fused.axes or ("no axes",)
    words = [
        f"{' and '.join([', '.join(most), last]) if most else last} {verb}:",
        "one run" if copies == 1 else f"{copies} runs",
        f"of {fused.run} bytes per {addressing.removesuffix('s').replace('slot', 'token')}",
    ]
    return "; ".join([" ".join(words), *(_apart(axis, engine, chunk) for axis in apart)])


def _apart(axis: str, engine: Axes, chunk: Axes) -> str:
    """What keeps an axis out of a run."""
    if axis not in engine.strides:
        return f"{axis} is a list of tensors"
    inside, outside = engine.strides[axis], chunk.strides[axis]
    return f"{axis} steps {inside} bytes in the engine and {outside} in the chunk"


def _ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in short: 0–3, 5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}–{last}" if first < last else str(first) for first, last in spans)
