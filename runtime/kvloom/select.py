"""Chooses what moves the bytes of a transfer, works out what it is given, and says why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from kvloom.chunk import recognise
from kvloom.geometry import Fused, fuse, row
from kvloom.moves import shared_from, streamed_from
from kvloom.overlap import span

if TYPE_CHECKING:
    from kvloom._abi import ChunkFacts, Int64Array, LayoutFacts
    from kvloom.geometry import Axes, Group, TensorFacts

Op: TypeAlias = Literal["gather", "scatter"]
Addressing: TypeAlias = Literal["slots", "blocks"]
Backend: TypeAlias = Literal["cpu", "torch"]

OPS: tuple[Op, ...] = ("gather", "scatter")
ADDRESSINGS: tuple[Addressing, ...] = ("slots", "blocks")
BACKENDS: tuple[Backend, ...] = ("cpu", "torch")


@dataclass(frozen=True)
class Selection:
    """What moves the bytes of a transfer and why, or why nothing does.

    ``chunk`` is the chunk layout, ``run_bytes`` are the contiguous bytes of one copy in each layer,
    ``fused`` are the axes that such a copy covers in every layer, innermost first, and ``why`` says
    what keeps the others out. From ``shared_from`` tokens on a call is shared out among threads,
    from ``streamed_from`` on it stores past the caches; None is never. Where ``refused`` has a
    reason, nothing moves and the rest is empty.
    """

    op: Op
    addressing: Addressing
    backend: str = ""
    kernel: str = ""
    chunk: str = ""
    run_bytes: tuple[int, ...] = ()
    fused: tuple[str, ...] = ()
    shared_from: int | None = None
    streamed_from: int | None = None
    why: str = ""
    refused: str = ""

    def __str__(self) -> str:
        what = f"{self.op} by {self.addressing}"
        if self.refused:
            return f"{what}, refused: {self.refused}"
        words = [f"{what} on {self.backend}, chunk layout {self.chunk}: {self.why}"]
        if self.shared_from is not None:
            words.append(f"on several threads from {self.shared_from} tokens")
        if self.streamed_from is not None:
            words.append(f"past the caches from {self.streamed_from} tokens")
        return "; ".join(words)


@dataclass(frozen=True, eq=False)
class Plan:
    """How one group's layers and a chunk of one shape meet: what a kernel is given, and why.

    ``token_stride`` and ``span`` are the chunk's, ``run`` is the shortest copy, all in bytes;
    ``fused`` and ``why`` have an entry for each of the group's layers.
    """

    chunk: str
    tokens: int
    token_stride: int
    span: int
    run: int
    chunk_axes: Axes
    geometry: Int64Array
    fused: tuple[Fused, ...]
    why: tuple[str, ...]


def choose_backend(device: str, given: str | None) -> Backend:
    """What moves the bytes of a cache on this type of device: kernels on the CPU, else torch.

    ``given`` is what the caller asks for; ValueError where there is no such backend, or where it
    can't reach the device.
    """
    if given is None:
        return "cpu" if device == "cpu" else "torch"
    if given not in BACKENDS:
        raise ValueError(f"backend: got {given!r}, takes {' or '.join(BACKENDS)}")
    if given == "cpu" and device != "cpu":
        raise ValueError(f"backend: got 'cpu', takes 'torch' for tensors on {device}")
    return given


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
        run=min(one.run for one in fused),
        chunk_axes=axes,
        geometry=table[group.kind],
        fused=tuple(fused[kind] for kind in group.kind),
        why=tuple(why[kind] for kind in group.kind),
    )


def describe(
    op: Op,
    addressing: Addressing,
    backend: Backend,
    groups: Sequence[Group],
    plans: Sequence[Plan],
) -> Selection:
    """The selection of a transfer that these plans, one for each group, carry out."""
    if backend == "torch":
        return Selection(
            op=op,
            addressing=addressing,
            backend=backend,
            kernel="views",
            chunk=", ".join(dict.fromkeys(one.chunk for one in plans)),
            why="torch's indexing, on whatever device the tensors are",
        )
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
        backend=backend,
        kernel=f"{op}_{addressing}",
        chunk=", ".join(dict.fromkeys(one.chunk for one in plans)),
        run_bytes=tuple(fused[layer].run for layer in sorted(fused)),
        fused=tuple(axis for axis in plans[0].fused[0].axes if axis in everywhere),
        shared_from=_tokens(shared_from(), groups),
        streamed_from=_tokens(streamed_from(min(one.run for one in plans)), groups),
        why="; ".join(sentences),
    )


def _tokens(nbytes: int | None, groups: Sequence[Group]) -> int | None:
    """The tokens that make up so many bytes at least."""
    if nbytes is None:
        return None
    return -(-nbytes // sum(group.token_bytes for group in groups))


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
