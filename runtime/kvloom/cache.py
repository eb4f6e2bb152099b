"""A paged KV cache bound to its layout: gathers tokens into chunks and scatters them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch

from kvloom import registry
from kvloom._forks import held_across_forks
from kvloom.arguments import index_array, integer
from kvloom.chunk import contiguous, obstacle, shape
from kvloom.geometry import read_groups
from kvloom.indexing import move
from kvloom.moves import (
    Move,
    carry_out,
    divisible,
    order_of,
    repeats,
    streamed_from,
    without_repeats,
)
from kvloom.overlap import Ranges, check_apart, check_self, span
from kvloom.select import ADDRESSINGS, OPS, Selection, choose_backend, describe, plan, refusal
from kvloom.tensors import Home, flatten, to_host, unaddressable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvloom._abi import ChunkFacts, Int64Array, Kernel
    from kvloom.engine_layout import Layout, Tensors
    from kvloom.geometry import Group, TensorFacts
    from kvloom.select import Addressing, Backend, Op, Plan

    Indices: TypeAlias = torch.Tensor | NDArray[np.int32] | NDArray[np.int64] | Sequence[int]

# What a call returns: one chunk, or for a cache with several groups one for each.
Chunks: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]

# How many plans a cache remembers: shapes of chunks that are soon met again.
_PLANS = 64
_remembering = held_across_forks(Lock())


def bind(
    layout: Layout, tensors: Tensors, block_size: int | None, backend: Backend | None
) -> Cache:
    """What ``Layout.bind`` does."""
    if layout.unsupported:
        raise NotImplementedError(f"{layout.name} has no kernels: {layout.unsupported}")
    if block_size is not None:
        block_size = integer("block_size", block_size)
        if block_size < 1:
            raise ValueError(f"block_size: got {block_size}, takes at least 1 token")
    counts: list[int] = []
    named = list(flatten(layout, tensors, "tensors", 0, counts))
    first = named[0][1]
    home = Home(first.device if isinstance(first, torch.Tensor) else torch.device("cpu"))
    facts = [home.facts(what, tensor) for what, tensor in named]
    home.settle()
    kept = [tensor for _, tensor in named]
    return bind_facts(layout, counts, facts, block_size, home, kept, backend)


def bind_facts(
    layout: Layout,
    counts: Sequence[int],
    facts: Sequence[TensorFacts],
    block_size: int | None,
    home: Home,
    tensors: Sequence[torch.Tensor] = (),
    backend: Backend | None = None,
) -> Cache:
    """A cache over the tensors that have these facts, in lists of lengths ``counts``.

    On the CPU it needs no tensors, but somebody must keep the memory alive.
    """
    backend = choose_backend(home.device.type, backend)
    groups = read_groups(layout.facts, counts, facts, block_size)
    for one in {(one.shape, one.strides, one.itemsize): one for one in reversed(facts)}.values():
        check_self(one)
    check_apart(facts)
    return Cache(layout, tensors, facts, groups, home, backend)


class Cache:
    """An engine's paged KV cache: tensors bound to their layout by ``Layout.bind``.

    It has ``layers``; ``blocks`` of ``block_size`` tokens, where both are those of the smallest
    layer, or None where the block size is not known or not the same everywhere; and ``capacity``
    slots.

    Calls name tokens by ``slots`` (slot = block * block_size + token), one for each token of a
    chunk, or by ``blocks``: ids of the blocks whose tokens fill a chunk one after the other, the
    last of them perhaps in part. Both are integers in a list, a range, or a one-dimensional int32
    or int64 array or tensor on any device.

    Layers that are unlike in dtype, heads, head size or block size form groups, and each group has
    a chunk of its own: a cache with one group takes and returns one tensor, one with more a tuple.

    A call checks everything before the first byte moves, and when it returns all bytes have moved.
    The tensors are kept alive; they must not be resized or given other storage.
    """

    layout: Layout
    backend: Backend
    groups: tuple[Group, ...]
    layers: int
    blocks: int | None
    block_size: int | None
    capacity: int

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        facts: Sequence[TensorFacts],
        groups: tuple[Group, ...],
        home: Home,
        backend: Backend,
    ) -> None:
        self.layout = layout
        self.backend = backend
        self.groups = groups
        self.layers = sum(len(group.layers) for group in groups)
        sizes = {group.block_size for group in groups}
        self.block_size = sizes.pop() if len(sizes) == 1 else None
        counts = [group.blocks for group in groups if group.blocks is not None]
        self.blocks = min(counts) if self.block_size is not None else None
        self.capacity = min(group.capacity for group in groups)
        self._tensors = tuple(tensors)
        self._home = home
        self._ranges = Ranges(facts)
        self._token_bytes = sum(group.token_bytes for group in groups)
        self._block_limit = min(group.blocks or 0 for group in groups)
        self._dtypes = tuple(getattr(torch, group.dtype) for group in groups)
        self._refused = {one: refusal(layout.facts, groups, one) for one in ADDRESSINGS}
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._kernels: dict[bool, dict[tuple[Op, Addressing], Kernel]] = {}
        self._compiled: set[Kernel] = set()

    def gather(
        self,
        *,
        slots: Indices | None = None,
        blocks: Indices | None = None,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
        chunk: str | None = None,
        skip_prefix: int = 0,
    ) -> Chunks:
        """Copy tokens from the engine into ``out``, or into a new chunk, and return it.

        ``out`` is written in place through its strides; its rows must be contiguous. Its chunk
        layout is ``chunk`` where that is given; else the layout's own if the shape fits it, or the
        one other that it fits. The first ``skip_prefix`` tokens (``blocks``: the first blocks) and
        tokens with a negative slot are not touched; in a new chunk they are zero.

        TypeError for a wrong type or dtype; ValueError for slots or block ids outside the cache,
        a chunk of another size, or one that shares bytes with itself or with the engine's tensors.
        """
        request = self._request(slots, blocks, chunk, skip_prefix)
        if out is None:
            chunks = self._new_chunks(request.tokens, chunk, zero=request.gaps)
        else:
            chunks = self._one_each("out", out)
        self.prepare("gather", request, "out", chunks, chunk).run()
        return chunks[0] if len(chunks) == 1 else chunks

    def scatter(
        self,
        source: torch.Tensor | Sequence[torch.Tensor],
        /,
        *,
        slots: Indices | None = None,
        blocks: Indices | None = None,
        chunk: str | None = None,
        skip_prefix: int = 0,
    ) -> None:
        """Copy the tokens of ``source``, a chunk, into the engine, and touch nothing else there.

        Arguments and errors are those of ``gather``. Where several tokens have the same slot, it is
        not said which of them a row of it holds afterwards, but it holds one of them.
        """
        request = self._request(slots, blocks, chunk, skip_prefix)
        self.prepare("scatter", request, "source", self._one_each("source", source), chunk).run()

    def empty_chunk(self, tokens: int, chunk: str | None = None) -> Chunks:
        """A new contiguous chunk with undefined contents, one for each group if there are several.

        ``chunk`` names its chunk layout, which is the layout's own without it.
        """
        if integer("tokens", tokens) < 0:
            raise ValueError(f"tokens: got {tokens}, takes 0 or more")
        chunks = self._new_chunks(tokens, chunk, zero=False)
        return chunks[0] if len(chunks) == 1 else chunks

    def select(
        self,
        op: Op,
        addressing: Addressing,
        chunks: torch.Tensor | Sequence[torch.Tensor] | None = None,
        *,
        chunk: str | None = None,
    ) -> Selection:
        """What a call with these chunks would be done by, and why, or why it would be refused.

        Without ``chunks`` it is about contiguous ones. Nothing moves, and ValueErrors that the
        call would raise about the chunks are the selection's ``refused``.
        """
        if op not in OPS:
            raise ValueError(f"op: got {op!r}, takes {' or '.join(OPS)}")
        if addressing not in ADDRESSINGS:
            raise ValueError(f"addressing: got {addressing!r}, takes {' or '.join(ADDRESSINGS)}")
        refused = self._refused[addressing]
        if not refused:
            try:
                if chunks is None:
                    plans = [self._contiguous_plan(addressing, one, chunk) for one in self.groups]
                else:
                    each = self._one_each("chunks", chunks)
                    plans = self._plans_for(op, addressing, "chunks", each, chunk)
                return describe(op, addressing, self.backend, self.groups, plans)
            except ValueError as error:
                refused = str(error)
        return Selection(op, addressing, refused=refused)

    def __copy__(self) -> Cache:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a Cache holds addresses of its tensors; copy these, and bind the copies")

    def __repr__(self) -> str:
        sizes = "; ".join(
            f"{len(group.layers)} layers of {group.heads} × {group.head_size} {group.dtype}, "
            + (
                f"{group.capacity} slots"
                if group.block_size is None
                else f"{group.blocks} blocks of {group.block_size} tokens"
            )
            for group in self.groups
        )
        return f"<Cache {self.layout.name}: {sizes}>"

    def _request(
        self,
        slots: Indices | None,
        blocks: Indices | None,
        chunk: str | None,
        skip_prefix: int,
    ) -> Request:
        """What a call asks for, checked as far as it does not depend on the chunks."""
        if chunk is not None and not isinstance(chunk, str):
            kind = type(chunk).__name__
            raise TypeError(f"chunk: got {kind}, takes the name of a chunk layout")
        if blocks is None and slots is not None:
            return self.request("slots", slots, skip_prefix)
        if slots is None and blocks is not None:
            return self.request("blocks", blocks, skip_prefix)
        got = "neither" if slots is None else "both"
        raise TypeError(f"slots, blocks: got {got}, takes one of them")

    def request(
        self,
        addressing: Addressing,
        given: Indices,
        skip_prefix: int,
        names: tuple[str, str] = ("", "skip_prefix"),
    ) -> Request:
        """Checked slots or block ids, of which the first ``skip_prefix`` are not looked at.

        ``names`` are what errors call the two.
        """
        what = names[0] or addressing
        limit = self.capacity if addressing == "slots" else self._block_limit
        if self._refused[addressing]:
            raise ValueError(self._refused[addressing])
        if isinstance(given, torch.Tensor):
            given = to_host(what, given)
        index = index_array(what, given)
        count = len(index)
        skip = integer(names[1], skip_prefix)
        if not 0 <= skip <= count:
            raise ValueError(f"{names[1]}: got {skip}, takes 0 to {count}, the number of {what}")
        moved = index[skip:] if skip else index
        least = greatest = 0
        if skip < count:
            least, greatest = np.minimum.reduce(moved), np.maximum.reduce(moved)
        if greatest >= limit or (least < 0 and addressing == "blocks"):
            wrong = moved >= limit if greatest >= limit else moved < 0
            position = skip + int(wrong.argmax())
            takes = f"slots below {limit}"
            if addressing == "blocks":
                takes = f"block ids from 0 to {limit - 1}"
            raise ValueError(f"{what}: got {index[position]} at position {position}, takes {takes}")
        tokens = count if addressing == "slots" else count * (self.block_size or 1)
        return Request(addressing, what, index, count, skip, tokens, skip > 0 or least < 0)

    def prepare(
        self,
        op: Op,
        request: Request,
        what: str,
        chunks: tuple[torch.Tensor, ...],
        chunk: str | None = None,
        tokens: int | None = None,
    ) -> Transfer:
        """Check the chunks, which errors call ``what``, against a request.

        Running the transfer that is returned can't fail. The chunks must outlive it. ``tokens`` are
        those of the whole call where this is a part of one.
        """
        addressing, _, index, count, skip, _, _ = request
        plans = self._plans_for(op, addressing, what, chunks, chunk)
        for number, (tensor, one) in enumerate(zip(chunks, plans, strict=True)):
            self._check_tokens(request, self._name(what, number), one.tokens)
            address = self._home.place(tensor)
            if self._ranges.meet(address, one.span):
                self._ranges.check_apart(self._home.facts(self._name(what, number), tensor))
        if op == "gather" and len(chunks) > 1:
            check_apart(
                [self._home.facts(self._name(what, n), tensor) for n, tensor in enumerate(chunks)]
            )
        if skip == count:
            return Transfer([], 0)
        if self._written(op, index, chunks, plans):
            index = index.copy()
            request = request._replace(slots_or_blocks=index)
        if self.backend == "torch":
            return Transfer([], 0, [partial(self._index, op, request, chunks, plans)])
        moved = request.tokens * (count - skip) // count
        nbytes = self._token_bytes * (tokens or moved)
        moves: list[Move] = []
        tails: list[Move] = []
        for number, (tensor, one) in enumerate(zip(chunks, plans, strict=True)):
            pointers, address = self.groups[number].pointers, tensor.data_ptr()
            block_size = self.groups[number].block_size or 1
            whole = count if addressing == "slots" else one.tokens // block_size
            if skip < whole:
                kernel = self._kernel(op, addressing, nbytes, one.run)
                order = order_of(op, index, skip, whole, nbytes)
                may_share = divisible(op, whole - skip, nbytes)
                moves.append(Move(kernel, pointers, address, index, order, one.geometry, may_share))
            if whole < count:
                # The chunk ends inside the last block: its tokens there move by slots.
                done = whole * block_size
                left = index[whole] * block_size + np.arange(one.tokens - done)
                by_slots = self._plan(op, "slots", what, number, tensor, chunk)
                kernel = self._kernel(op, "slots", nbytes, by_slots.run)
                address += done * one.token_stride
                order = order_of(op, left, 0, len(left), nbytes)
                may_share = divisible(op, len(left), nbytes)
                tails.append(
                    Move(kernel, pointers, address, left, order, by_slots.geometry, may_share)
                )
        if tails and op == "scatter" and index[count - 1] in index[skip : count - 1]:
            return Transfer([moves, tails], nbytes)  # two threads must not write one row
        return Transfer([moves + tails], nbytes)

    def prepare_all(
        self, op: Op, parts: Sequence[tuple[Request, str, torch.Tensor]], chunk: str | None
    ) -> Transfer:
        """One transfer for several chunks of a cache with one group, each with its name.

        ValueError also where the chunks of a gather share bytes.
        """
        tokens = sum(request.tokens for request, _, _ in parts)
        found = [
            self.prepare(op, request, what, (tensor,), chunk, tokens)
            for request, what, tensor in parts
        ]
        if len(found) == 1:
            return found[0]
        if op == "gather":
            facts = [self._home.facts(what, tensor) for _, what, tensor in parts]
            ends = sorted((one.address, one.address + span(one)) for one in facts)
            if any(two[0] < one[1] for one, two in pairwise(ends)):
                check_apart(facts)
        stages = [moves for one in found for moves in one.stages]
        ids = [request.slots_or_blocks for request, _, _ in parts]
        if op == "gather" or not ids or not repeats(ids):
            stages = [[move for moves in stages for move in moves]]
        indexing = [run for one in found for run in one.indexing]
        return Transfer(stages, self._token_bytes * tokens, indexing)

    def _written(
        self, op: Op, index: Int64Array, chunks: tuple[torch.Tensor, ...], plans: Sequence[Plan]
    ) -> bool:
        """Whether a transfer may write where its own slots or block ids are read."""
        if self._home.device.type != "cpu":
            return False
        first, nbytes = index.__array_interface__["data"][0], index.nbytes
        if op == "scatter":
            return self._ranges.meet(first, nbytes)
        return any(
            first < tensor.data_ptr() + one.span and tensor.data_ptr() < first + nbytes
            for tensor, one in zip(chunks, plans, strict=True)
        )

    def _index(
        self, op: Op, request: Request, chunks: tuple[torch.Tensor, ...], plans: Sequence[Plan]
    ) -> None:
        """Move what a request asks for by torch's indexing."""
        for group, tensor, one in zip(self.groups, chunks, plans, strict=True):
            slots = request.slots_or_blocks[request.skip :]
            skipped = request.skip
            if request.addressing == "blocks":
                size = group.block_size or 1
                skipped *= size
                slots = (slots[:, None] * size + np.arange(size)).reshape(-1)
                slots = slots[: max(one.tokens - skipped, 0)]
            if op == "scatter":
                slots = without_repeats(slots)
            tensors = [self._tensors[number] for number in group.tensors]
            views = registry.views(self.layout)
            move(op, views, tensors, tensor, one.chunk_axes, slots, skipped)

    def _kernel(self, op: Op, addressing: Addressing, nbytes: int, run: int) -> Kernel:
        """What copies ``run`` bytes at a time in a call of ``nbytes``, ready to run."""
        enough = streamed_from(run)
        streaming = enough is not None and nbytes >= enough
        kernels = self._kernels.get(streaming) or self._load_kernels(streaming)
        kernel = kernels[op, addressing]
        if kernel not in self._compiled:
            registry.compile_kernel(kernel)
            self._compiled.add(kernel)
        return kernel

    def _load_kernels(self, streaming: bool) -> dict[tuple[Op, Addressing], Kernel]:
        made = registry.kernels(self.layout, streaming)
        found = self._kernels[streaming] = {
            (op, one): getattr(made, f"{op}_{one}") for op in OPS for one in ADDRESSINGS
        }
        return found

    def _check_tokens(self, request: Request, what: str, tokens: int) -> None:
        """ValueError where a chunk has more or fewer tokens than a request names."""
        if request.addressing == "slots":
            if tokens != request.length:
                raise ValueError(
                    f"{request.what}: got {request.length}, takes {tokens}, one for each token of "
                    f"{what}"
                )
        elif -(-tokens // (self.block_size or 1)) != request.length:
            raise ValueError(
                f"{request.what}: got {request.length}, which is {request.tokens} tokens; takes as "
                f"many as cover the {tokens} tokens of {what} in blocks of {self.block_size}"
            )

    def _plans_for(
        self,
        op: Op,
        addressing: Addressing,
        what: str,
        chunks: tuple[torch.Tensor, ...],
        chunk: str | None,
    ) -> list[Plan]:
        return [
            self._plan(op, addressing, what, number, tensor, chunk)
            for number, tensor in enumerate(chunks)
        ]

    def _plan(
        self,
        op: Op,
        addressing: Addressing,
        what: str,
        number: int,
        tensor: torch.Tensor,
        chunk: str | None,
    ) -> Plan:
        """What a group's chunk calls for, remembered by its shape and strides."""
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise TypeError(f"{self._name(what, number)}: got {kind}, takes a tensor")
        if tensor.dtype is not self._dtypes[number]:
            raise TypeError(
                f"{self._name(what, number)}: got {tensor.dtype}, takes {self._dtypes[number]} as "
                "the engine's tensors have"
            )
        if (
            tensor.requires_grad
            or tensor.device != self._home.device
            or tensor.layout is not torch.strided
            or unaddressable(tensor)
        ):
            self._home.facts(self._name(what, number), tensor)
        key = (op, addressing, number, chunk, tensor.shape, tensor.stride())
        found = self._plans.get(key)
        if found is None:
            facts = self._home.facts(self._name(what, number), tensor)
            group = self.groups[number]
            found = plan(self.layout.facts, group, facts, self._layouts(group, chunk), addressing)
            if op == "gather":
                check_self(facts)
            with _remembering:
                if len(self._plans) >= _PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[key] = found
        return found

    def _contiguous_plan(self, addressing: Addressing, group: Group, chunk: str | None) -> Plan:
        """The plan for a contiguous chunk that need not exist."""
        layouts = self._layouts(group, chunk)
        # More than one block of tokens: K and V of a single one may happen to adjoin.
        tensor = contiguous(layouts[0], group, 2 * (group.block_size or 1))
        return plan(self.layout.facts, group, tensor, layouts, addressing)

    def _layouts(self, group: Group, chunk: str | None) -> list[ChunkFacts]:
        """The chunk layouts to look for: the named one, or all that can hold the group."""
        named = registry.chunk_layout(self.layout.facts.chunk if chunk is None else chunk)
        reason = obstacle(named, group)
        if reason:
            raise ValueError(f"chunk: {reason}")
        if chunk is not None:
            return [named]
        others = [one for one in registry.chunks() if one != named and not obstacle(one, group)]
        return [named, *others]

    def _new_chunks(
        self, tokens: int, chunk: str | None, *, zero: bool
    ) -> tuple[torch.Tensor, ...]:
        make = torch.zeros if zero else torch.empty
        return tuple(
            make(
                shape(self._layouts(group, chunk)[0], group, tokens),
                dtype=dtype,
                device=self._home.device,
            )
            for group, dtype in zip(self.groups, self._dtypes, strict=True)
        )

    def _one_each(
        self, what: str, chunks: torch.Tensor | Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The chunks of a call, one for each group."""
        count = len(self.groups)
        if count == 1:
            return (chunks,)  # type: ignore[return-value]  # what it is, is checked with its plan
        if isinstance(chunks, torch.Tensor) or not isinstance(chunks, Sequence):
            kind = type(chunks).__name__
            raise TypeError(
                f"{what}: got {kind}, takes {count} tensors, one for each group of layers"
            )
        if len(chunks) != count:
            raise ValueError(
                f"{what}: got {len(chunks)} tensors, takes {count}, one for each group of layers"
            )
        return tuple(chunks)

    def _name(self, what: str, number: int) -> str:
        return what if len(self.groups) == 1 else f"{what}[{number}]"


class Transfer(NamedTuple):
    """What a checked call has left to do: moves of ``nbytes`` in all, or torch's indexing.

    The moves of a stage may be done at the same time, one stage after the other.
    """

    stages: Sequence[Sequence[Move]]
    nbytes: int
    indexing: Sequence[Callable[[], None]] = ()

    def run(self) -> None:
        """Move every byte."""
        for index in self.indexing:
            index()
        for moves in self.stages:
            carry_out(moves, self.nbytes)


class Request(NamedTuple):
    """A call without its chunks: where it reads or writes in the engine.

    There are ``length`` slots or block ids, called ``what`` in errors, which span ``tokens``;
    ``gaps`` says whether some of these are not moved.
    """

    addressing: Addressing
    what: str
    slots_or_blocks: Int64Array
    length: int
    skip: int
    tokens: int
    gaps: bool

    def part(self, first: int, last: int, block_size: int) -> Request:
        """What of a request by blocks is about its entries from ``first`` to ``last``."""
        skip = min(max(self.skip - first, 0), last - first)
        return self._replace(
            slots_or_blocks=self.slots_or_blocks[first:last],
            length=last - first,
            skip=skip,
            tokens=(last - first) * block_size,
        )
