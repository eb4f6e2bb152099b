"""An engine layout as people hold it: what it is, tensors that have it, and binding to a cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeAlias, Union

from kvloom._abi import LayoutFacts
from kvloom.arguments import integer
from kvloom.geometry import layout_text, shape_of

if TYPE_CHECKING:
    import torch

    from kvloom._abi import Attention, ChunkFacts, EngineFacts
    from kvloom.cache import Cache
    from kvloom.select import Backend

# One tensor, or sequences of them nested as ``Layout.lists`` says.
Tensors: TypeAlias = Union["torch.Tensor", Sequence["Tensors"]]

# Element types by the names that specs give them.
_DTYPES = {
    "fp8": "float8_e4m3fn",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "uint8": "uint8",
    "int8": "int8",
}


@dataclass(frozen=True, repr=False, eq=False)
class Layout:
    """How an engine lays out a paged KV cache. Two layouts are equal if their names are."""

    facts: LayoutFacts

    @property
    def name(self) -> str:
        """The canonical name, such as NL_X_TWO_NB_BS_NH_HS."""
        return self.facts.name

    @property
    def id(self) -> int | None:
        """The wire id, or None where the layout has none."""
        return self.facts.id

    @property
    def attention(self) -> Attention:
        """``mha``: keys and values by head. ``mla``: one record a token."""
        return self.facts.attention

    @property
    def engines(self) -> tuple[EngineFacts, ...]:
        """Who holds it."""
        return self.facts.engines

    @property
    def aliases(self) -> tuple[str, ...]:
        """The names by which engines find it, besides the canonical one."""
        return tuple(engine.alias for engine in self.facts.engines)

    @property
    def doc(self) -> str:
        """What it is, and what bites."""
        return self.facts.doc

    @property
    def lists(self) -> tuple[str, ...]:
        """The list levels around the tensors, outermost first; empty for one tensor in all."""
        return self.facts.lists

    @property
    def chunk(self) -> ChunkFacts:
        """The chunk layout that a call uses when it names none."""
        from kvloom.registry import chunk_layout

        return chunk_layout(self.facts.chunk)

    @property
    def unsupported(self) -> str:
        """Why there are no kernels for it, or nothing where there are."""
        return self.facts.unsupported

    def shape(
        self, *, layers: int, blocks: int, block_size: int, head_size: int, heads: int = 1
    ) -> tuple[int, ...]:
        """The shape of each of its tensors for a cache of these sizes.

        ``block_size`` counts tokens, ``head_size`` elements. ValueError for a size below 1, or for
        several heads where the layout has no head axis; NotImplementedError for a layout without
        kernels.
        """
        extents = self._extents(layers, blocks, block_size, heads, head_size)
        return shape_of(self.facts.axes, extents)

    def empty(
        self,
        *,
        layers: int,
        blocks: int,
        block_size: int,
        head_size: int,
        dtype: torch.dtype | str,
        heads: int = 1,
        device: torch.device | str = "cpu",
    ) -> Tensors:
        """Tensors of this layout with undefined contents, nested as ``bind`` takes them.

        Sizes and errors are those of ``shape``; ``dtype`` is torch's or a spec's word such as
        ``bf16``. Where an engine registers views of one buffer, these are views of one buffer.
        """
        import torch

        extents = self._extents(layers, blocks, block_size, heads, head_size)
        shape = shape_of(self.facts.axes, extents)
        kind = torch_dtype(dtype)
        counts = [extents[axis] for axis in self.facts.lists]
        if self.facts.views:
            return _nest(counts, _views(self.facts, extents, kind, device))
        tensors = (torch.empty(shape, dtype=kind, device=device) for _ in range(prod(counts)))
        return _nest(counts, tensors)

    def bind(
        self,
        tensors: Tensors,
        *,
        block_size: int | None = None,
        backend: Backend | None = None,
    ) -> Cache:
        """A cache over an engine's tensors, nested as ``lists`` says; pointers are never copied.

        Sizes and strides are read from the tensors' dimensions in this layout's order, so permuted
        views, padded blocks and storage offsets are all right. ``block_size``, in tokens, is
        needed where the tensors don't show it (flat slots), and then only to move whole blocks.

        Tensors on the CPU are moved by generated kernels (``backend`` "cpu"), all others by torch's
        indexing ("torch"), which is slower and may be asked for on the CPU too.

        TypeError or ValueError, naming the tensor, for one that does not fit the layout or the
        others, has bytes in common with itself or another, is on another device, or requires grad;
        NotImplementedError for a layout that there are no kernels for.
        """
        from kvloom.cache import bind

        return bind(self, tensors, block_size, backend)

    def _extents(
        self, layers: int, blocks: int, block_size: int, heads: int, head_size: int
    ) -> dict[str, int]:
        if self.facts.unsupported:
            raise NotImplementedError(f"{self.name} has no kernels: {self.facts.unsupported}")
        given = {
            "layers": ("layer", layers),
            "blocks": ("block", blocks),
            "block_size": ("token", block_size),
            "heads": ("head", heads),
            "head_size": ("elem", head_size),
        }
        extents = {"kv": 2, "one": 1}
        for argument, (axis, size) in given.items():
            extents[axis] = integer(argument, size)
            if extents[axis] < 1:
                raise ValueError(f"{argument}: got {size}, takes a size of at least 1")
        if extents["head"] > 1 and "head" not in self.facts.memory:
            raise ValueError(f"heads: got {heads}, takes 1, because {self.name} has no head axis")
        return extents

    def __eq__(self, other: object) -> bool:
        return self.name == other.name if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        number = "" if self.id is None else f" (id {self.id})"
        held = ", ".join(engine.name for engine in self.engines)
        return f"<Layout {self.name}{number}: {layout_text(self.facts)}, held by {held}>"


def torch_dtype(given: torch.dtype | str) -> torch.dtype:
    """torch's dtype, given as such or by the word that specs have for it."""
    import torch

    if isinstance(given, torch.dtype):
        return given
    if not isinstance(given, str) or given not in _DTYPES:
        raise ValueError(f"dtype: got {given!r}, takes {', '.join(_DTYPES)}, or one of torch's")
    found: torch.dtype = getattr(torch, _DTYPES[given])
    return found


def _nest(counts: Sequence[int], tensors: Iterator[torch.Tensor]) -> Tensors:
    """Tensors in pointer order as lists of these lengths; no lengths is one tensor."""
    if not counts:
        return next(tensors)
    return [_nest(counts[1:], tensors) for _ in range(counts[0])]


def _views(
    facts: LayoutFacts, extents: Mapping[str, int], dtype: torch.dtype, device: torch.device | str
) -> Iterator[torch.Tensor]:
    """The views of one new buffer in memory order, one for each step of the viewed axis."""
    import torch

    (viewed,) = facts.views
    strides, size = {}, 1
    for axis in reversed(facts.memory):
        strides[axis] = size
        size *= extents[axis]
    buffer = torch.empty(size, dtype=dtype, device=device)
    shape = shape_of(facts.axes, extents)
    steps = [strides[dim[-1]] for dim in facts.axes]
    for position in range(extents[viewed]):
        yield buffer.as_strided(shape, steps, position * strides[viewed])
