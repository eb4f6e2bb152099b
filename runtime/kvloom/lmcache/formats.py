"""An engine's paged cache as LMCache's calls describe it, bound to its layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from operator import attrgetter
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvloom._forks import held_across_forks
from kvloom.cache import bind_facts
from kvloom.geometry import SIGNS, TensorFacts, flat_slots, layout_text, shape_of, shape_text
from kvloom.overlap import span
from kvloom.tensors import Home, to_host

if TYPE_CHECKING:
    from kvloom.cache import Cache
    from kvloom.engine_layout import Layout

# Caches that were bound before, by all that they were bound to: an engine shows the same again and
# again, and binding costs more than moving a few tokens.
_MOST_CACHES = 256
_MOST_ADDRESS = 1 << 57  # what processors have
_caches: dict[tuple[Any, ...], _Known] = {}
_remembering = held_across_forks(Lock())


class _Known(NamedTuple):
    """A cache, and what its tensors were seen to be, if it was bound to tensors."""

    cache: Cache
    seen: list[list[Any]] | None = None


class Names(NamedTuple):
    """What a call's errors call the sizes of a paged cache."""

    layers: str = "key_value"
    slots: str = "page_buffer_size"
    block_size: str = "block_size"
    row: str = "key_value"
    head_size: str = "head_size"
    block_stride: str = "block_stride_elems"


BY_SLOTS = Names()


@dataclass(frozen=True)
class Sizes:
    """What a call says of a paged cache: counts, elements of a head, bytes of an element.

    ``row`` has the elements of one plane's token, ``head_size`` those of a head, of packed layouts
    both planes'. ``block_stride`` is in elements. What is 0 the call does not say. ``split`` says
    that a packed row goes to a K plane and a V plane.
    """

    layers: int
    slots: int
    block_size: int
    row: int
    head_size: int
    dtype: torch.dtype
    block_stride: int = 0
    split: bool = False
    names: Names = BY_SLOTS


# The operators that are told a format.
FORMATTED = (
    "multi_layer_kv_transfer",
    "multi_layer_kv_transfer_unilateral",
    "multi_layer_block_kv_transfer",
    "single_layer_kv_transfer",
)


def refusal(operator: str, layout: Layout) -> str:
    """Why one of the ``FORMATTED`` operators can't move a layout, or nothing where it can."""
    if layout.unsupported:
        return f"no kernel moves it: {layout.unsupported}"
    if operator == "single_layer_kv_transfer" and "layer" not in layout.facts.lists:
        return "one tensor holds all layers, and there is none of one layer alone"
    return ""


@cache
def planes(layout: Layout) -> int:
    """The planes of a chunk with all that a layout holds."""
    return 2 if "kv" in layout.chunk.axes[0] else 1


@cache
def packed(layout: Layout) -> bool:
    """Whether a token's row has K and V by turns, head by head."""
    return planes(layout) == 1 and "kv" in layout.facts.memory


@cache
def by_head(layout: Layout) -> bool:
    """Whether heads of a token lie apart, so that rows must be cut into heads."""
    memory = [axis for axis in layout.facts.memory if axis != "one"]
    return "head" in memory and "token" in memory[memory.index("head") :]


@cache
def by_block(layout: Layout) -> bool:
    """Whether a slot's address depends on how many tokens a block has."""
    memory = [axis for axis in layout.facts.memory if axis != "one"]
    return memory.index("token") != memory.index("block") + 1


def is_pointers(given: object) -> bool:
    """Whether a call's tensors are given as a tensor of addresses."""
    return (
        isinstance(given, torch.Tensor)
        and given.layout is torch.strided
        and given.dim() == 1
        and given.dtype in (torch.int64, torch.uint64)
    )


def cache_of(layout: Layout, given: Any, what: str, sizes: Sizes) -> Cache:
    """The cache that a call speaks of. Errors call its tensors or addresses ``what``."""
    cache = (_by_address if is_pointers(given) else _by_tensor)(layout, given, what, sizes)
    if len(cache.groups) > 1:
        raise ValueError(
            f"{what}: layers differ in heads, head size or dtype, takes a call for each of them, "
            "since they share no chunk"
        )
    return cache


def _extents(layout: Layout, sizes: Sizes) -> dict[str, int]:
    """The sizes of a layout's axes; ValueError where the call leaves one open."""
    names, block_size = sizes.names, sizes.block_size
    if not block_size:
        if by_block(layout) or sizes.block_stride:
            raise ValueError(
                f"{names.block_size}: got 0, takes the tokens of a block, on which the addresses "
                f"of {layout.name} depend"
            )
        block_size = 1
    if sizes.slots < 1 or sizes.slots % block_size:
        raise ValueError(
            f"{names.slots}: got {sizes.slots} slots, takes a multiple of {block_size}, which is "
            f"{names.block_size}"
        )
    if sizes.layers < 1 or sizes.row < 1:
        name = names.row if sizes.layers else names.layers
        raise ValueError(f"{name}: got {sizes.layers} layers of {sizes.row} elements a token")
    found = {"layer": sizes.layers, "kv": 2, "one": 1, "token": block_size}
    found["block"] = sizes.slots // block_size
    if "head" not in layout.facts.memory:
        return {**found, "elem": sizes.row}
    head_size = _head_size(layout, sizes)
    return {**found, "head": sizes.row // head_size, "elem": head_size}


def _head_size(layout: Layout, sizes: Sizes) -> int:
    """The elements of one plane's head."""
    given, name = sizes.head_size, sizes.names.head_size
    if not given and (by_head(layout) or sizes.split):
        raise ValueError(
            f"{name}: got 0, takes the elements of a head, into which the rows of {layout.name} "
            "must be cut"
        )
    if not given:
        return sizes.row
    if packed(layout) and given % 2:
        raise ValueError(f"{name}: got {given}, takes K and V of a head, an even number")
    found = given // 2 if packed(layout) else given
    if sizes.row % found:
        raise ValueError(
            f"{name}: got {given}, takes what divides the {sizes.row} elements of a plane's row in "
            f"{sizes.names.row}"
        )
    return found


def _by_address(layout: Layout, given: torch.Tensor, what: str, sizes: Sizes) -> Cache:
    addresses = to_host(what, given if given.dtype == torch.int64 else given.view(torch.int64))
    key = (layout.name, addresses.tobytes(), sizes)
    found = _caches.get(key)
    if found is not None:
        return found.cache
    extents = _extents(layout, sizes)
    counts = [extents[axis] for axis in layout.facts.lists]
    if len(addresses) != prod(counts):
        raise ValueError(
            f"{what}: got {len(addresses)} addresses, takes {prod(counts)} for {sizes.layers} "
            f"layers; {layout.name} takes {layout_text(layout.facts)}"
        )
    if not addresses.all():
        raise ValueError(
            f"{what}: got 0 at position {int((addresses == 0).argmax())}, takes addresses"
        )
    shape = shape_of(layout.facts.axes, extents)
    strides = _strides(layout, extents, sizes)
    itemsize, dtype = sizes.dtype.itemsize, str(sizes.dtype).removeprefix("torch.")
    facts = [
        TensorFacts(f"{what}[{number}]", address, shape, strides, itemsize, dtype)
        for number, address in enumerate(addresses.tolist())
    ]
    ends = [one.address + span(one) for one in facts]
    if min(addresses) < 0 or max(ends) > _MOST_ADDRESS:
        raise ValueError(
            f"{what}, {sizes.names.slots}: got addresses to {max(ends)}, takes what memory has"
        )
    block_size = extents["token"] if flat_slots(layout.facts) else None
    cache = bind_facts(layout, counts, facts, block_size, Home(torch.device("cpu")))
    _remember(key, _Known(cache))
    return cache


def _strides(layout: Layout, extents: dict[str, int], sizes: Sizes) -> tuple[int, ...]:
    """Element strides of one tensor, whose blocks may lie apart."""
    block_stride, name = sizes.block_stride, sizes.names.block_stride
    steps, size = [], 1
    for dim in reversed(layout.facts.axes):
        if block_stride and "block" in dim:
            tight = size * prod(extents[axis] for axis in dim if axis != "block")
            if block_stride < tight or (dim != ("block",) and block_stride != tight):
                raise ValueError(
                    f"{name}: got {block_stride}, takes "
                    f"{tight}{' or more' if dim == ('block',) else ''}, the elements of a block"
                )
            size = block_stride if dim == ("block",) else size
        steps.append(size)
        size *= prod(extents.get(axis, 1) for axis in dim)
    return tuple(reversed(steps))


def _by_tensor(layout: Layout, given: Any, what: str, sizes: Sizes) -> Cache:
    if not isinstance(given, (torch.Tensor, list, tuple)):
        raise TypeError(
            f"{what}: got {type(given).__name__}, takes a 1-D int64 or uint64 tensor of addresses, "
            "a tensor, or a list of tensors"
        )
    tensors = [given] if isinstance(given, torch.Tensor) else list(flat(given))
    key = (layout.name, sizes, _places(tensors), _nesting(given))
    found = _caches.get(key)
    if found is not None and found.seen == _seen(tensors):
        return found.cache
    counts = [sizes.layers if axis == "layer" else 2 for axis in layout.facts.lists]
    named = list(_leaves(given, what, counts))
    if len(named) != prod(counts) or not named:
        raise ValueError(
            f"{what}: got {len(named)} tensors, takes {prod(counts)} for {sizes.layers} layers; "
            f"{layout.name} takes {layout_text(layout.facts)}"
        )
    home = Home(named[0][1].device)
    on_cpu = home.device.type == "cpu"
    views = [_as(layout, sizes, one, tensor) for one, tensor in named]
    facts = [home.facts(one, tensor) for (one, _), tensor in zip(named, views, strict=True)]
    home.settle()
    block_size = sizes.block_size or None if flat_slots(layout.facts) else None
    cache = bind_facts(layout, counts, facts, block_size, home, () if on_cpu else views)
    group, has_heads = cache.groups[0], "head" in layout.facts.memory
    head_size = group.head_size * (2 if packed(layout) else 1)
    for name, said, found_size in (
        (sizes.names.layers, sizes.layers, cache.layers),
        (sizes.names.block_size, sizes.block_size, cache.block_size),
        (sizes.names.slots, sizes.slots, cache.capacity),
        (sizes.names.head_size, sizes.head_size, head_size if has_heads else None),
    ):
        if said and found_size is not None and said != found_size:
            raise ValueError(f"{name}: got {said}, takes {found_size} as {what} shows")
    if on_cpu:
        _remember(key, _Known(cache, _seen(tensors)))
    return cache


_FACTS = attrgetter("shape", "dtype", "requires_grad")


def _places(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    try:
        return tuple(map(torch.Tensor.data_ptr, tensors))
    except (RuntimeError, NotImplementedError, TypeError):  # to be refused, with a reason
        return ()


def _seen(tensors: list[torch.Tensor]) -> list[list[Any]]:
    """All that a bound cache depends on of its tensors, besides where they lie.

    Asked at every call, so it is quick: dispatch keys hold device, layout and kind.
    """
    keys = map(torch._C._dispatch_keys, tensors)
    return [
        list(map(_FACTS, tensors)),
        list(map(torch.Tensor.stride, tensors)),
        list(map(torch._C.DispatchKeySet.raw_repr, keys)),
    ]


def _nesting(given: Any) -> tuple[int, ...]:
    """The lengths of the lists in a list, −1 for what is none; nothing where there are none."""
    if isinstance(given, torch.Tensor):
        return ()
    lengths = tuple(len(one) if isinstance(one, (list, tuple)) else -1 for one in given)
    return lengths if any(length >= 0 for length in lengths) else ()


def flat(given: Any) -> Iterator[Any]:
    """What lists and tuples hold, one after the other."""
    for one in given if isinstance(given, (list, tuple)) else [given]:
        if isinstance(one, (list, tuple)):
            yield from flat(one)
        else:
            yield one


def _leaves(given: Any, what: str, counts: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in pointer order: one, a flat list, or a list nested as the levels are."""
    if isinstance(given, torch.Tensor):
        yield what, given
        return
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{what}: got {type(given).__name__}, takes a tensor")
    nested = any(isinstance(one, (list, tuple)) for one in given)
    if nested and (len(counts) < 2 or len(given) != counts[0]):
        takes = f"{counts[0]} lists" if len(counts) > 1 else "tensors"
        raise ValueError(f"{what}: got {len(given)} lists, takes {takes}")
    for number, one in enumerate(given):
        if nested and (not isinstance(one, (list, tuple)) or len(one) != counts[1]):
            got = len(one) if isinstance(one, (list, tuple)) else type(one).__name__
            raise ValueError(f"{what}[{number}]: got {got}, takes a list of {counts[1]}")
        yield from _leaves(one, f"{what}[{number}]", counts[1:] if nested else ())


def _as(layout: Layout, sizes: Sizes, what: str, tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` in the dimensions of its layout, which may have been merged or split."""
    dims = layout.facts.axes
    try:
        for number in range(len(dims)):
            if dims[number] == ("one",) and tensor.dim() == len(dims) - 1:
                tensor = tensor.unsqueeze(number)
        if "head" not in layout.facts.memory and tensor.dim() > len(dims) and tensor.shape[-2] == 1:
            tensor = tensor.squeeze(-2)  # the one head that MLA has
        if dims[0] == ("block", "token") and tensor.dim() == len(dims) + 1:
            tensor = tensor.view(-1, *tensor.shape[2:])
        if dims[-1] == ("kv", "elem") and tensor.dim() == len(dims) + 1:
            tensor = tensor.view(*tensor.shape[:-2], -1)
        if dims[-2:] == (("kv",), ("elem",)) and tensor.dim() == len(dims) - 1:
            tensor = tensor.unflatten(-1, (2, -1))
        if tensor.dim() != len(dims) and sizes.slots:
            tensor = tensor.view(shape_of(dims, _extents(layout, sizes)))
    except RuntimeError:
        pass
    if tensor.dim() != len(dims):
        raise ValueError(
            f"{what}: got shape {tuple(tensor.shape)} with strides {tensor.stride()}, takes "
            f"{shape_text(dims, SIGNS)} for {layout.name}, or a view of it"
        )
    return tensor


def _remember(key: tuple[Any, ...], known: _Known) -> None:
    with _remembering:
        if len(_caches) >= _MOST_CACHES:
            del _caches[next(iter(_caches))]
        _caches[key] = known
