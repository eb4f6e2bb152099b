"""LMCache's transfers between paged caches and chunks, by slots and by blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from kvloom import registry
from kvloom.arguments import integer
from kvloom.lmcache.formats import Names, Sizes, cache_of, flat, is_pointers, packed, planes
from kvloom.lmcache.wire import QUANTIZED, device_of, layout_of, operation
from kvloom.tensors import unaddressable

if TYPE_CHECKING:
    from kvloom.cache import Cache
    from kvloom.engine_layout import Layout
    from kvloom.select import Op

# Historical names, by wire id. One pointer a layer under the format of one tensor for all layers
# means tensors of [2, slots, D]. Unilateral calls mean K tensors, then V tensors, of [slots, D],
# whatever format they name.
_ALL_LAYERS, _PER_LAYER, _K_THEN_V = 0, 1, 4
# One layer's K tensor and V tensor, whose first dimensions are blocks and tokens, or slots.
_PAIR, _PAIR_OF_SLOTS = 16, 4

# Stand-ins for elements of which only the size is known.
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_TWO_PLANES = "two_plane"
_MOST = 1 << 48  # elements, tokens or bytes: more than memory has
_SAID_NAMES = ("nl", "nb", "bs", "nh", "hs", "element_size", "kv_size", "block_stride_elems")
_SAID = attrgetter(*_SAID_NAMES)
_DESCRIBED = Names(
    layers="shape_desc.nl",
    slots="shape_desc.nb",
    block_size="shape_desc.bs",
    row="shape_desc.nh",
    head_size="shape_desc.hs",
    block_stride="shape_desc.block_stride_elems",
)


def multi_layer_kv_transfer(
    key_value: torch.Tensor,
    key_value_ptrs: Any,
    slot_mapping: torch.Tensor,
    paged_memory_device: torch.device,
    page_buffer_size: int,
    direction: Any,
    engine_kv_format: Any,
    block_size: int = 0,
    head_size: int = 0,
    skip_prefix_n_tokens: int = 0,
    block_stride_elems: int = 0,
) -> None:
    """Move token t of a chunk from or to slot ``slot_mapping[t]`` of every layer.

    ``key_value`` is [2, NL, T, D] with a K plane and a V plane, or [1, NL, T, D] for MLA and for
    rows of K and V by turns. ``key_value_ptrs`` are addresses (a 1-D int64 or uint64 tensor), a
    tensor, or tensors in lists as the format has them. ``page_buffer_size`` counts slots,
    ``block_size`` tokens, ``head_size`` and ``block_stride_elems`` elements; 0 is not given. A
    negative slot and the first ``skip_prefix_n_tokens`` tokens are untouched on both sides.

    ValueError or TypeError, naming the argument, before the first byte moves.
    """
    op, layout = operation(direction), layout_of("multi_layer_kv_transfer", engine_kv_format)
    chunk = _multi_layer_chunk(key_value)
    first = next(flat(key_value_ptrs), None)
    if isinstance(first, torch.Tensor) and not is_pointers(key_value_ptrs):
        chunk = _in_dtype("key_value", chunk, first.dtype)
    if layout.id == _ALL_LAYERS and not _is_whole(layout, key_value_ptrs, chunk):
        layout = registry.layout(_PER_LAYER)
    sizes = Sizes(
        layers=chunk.shape[1],
        slots=_size("page_buffer_size", page_buffer_size, least=1),
        block_size=_size("block_size", block_size),
        row=_plane_row(layout, "key_value", chunk),
        head_size=_size("head_size", head_size),
        dtype=chunk.dtype,
        block_stride=_size("block_stride_elems", block_stride_elems),
        split=packed(layout) and chunk.shape[0] == 2,
    )
    _check_device("paged_memory_device", paged_memory_device, key_value_ptrs)
    cache = cache_of(layout, key_value_ptrs, "key_value_ptrs", sizes)
    skip = (skip_prefix_n_tokens, "skip_prefix_n_tokens")
    _move_slots(op, cache, "key_value", chunk, slot_mapping, *skip)


def multi_layer_kv_transfer_unilateral(
    key_value: torch.Tensor,
    key_value_ptrs: Any,
    slot_mapping: torch.Tensor,
    paged_memory_device: torch.device,
    page_buffer_size: int,
    direction: Any,
    engine_kv_format: Any,
) -> None:
    """Move tokens where each layer has a K tensor and a V tensor of [page_buffer_size, D].

    ``key_value_ptrs`` are 2·NL addresses or tensors, all K before all V. MLA formats have no such
    planes and are moved as by ``multi_layer_kv_transfer``, whose arguments and errors the others
    are.
    """
    layout = layout_of("multi_layer_kv_transfer_unilateral", engine_kv_format)
    multi_layer_kv_transfer(
        key_value,
        key_value_ptrs,
        slot_mapping,
        paged_memory_device,
        page_buffer_size,
        direction,
        layout.id if layout.attention == "mla" else _K_THEN_V,
    )


def multi_layer_block_kv_transfer(
    paged_buffer_ptrs_tensor: Any,
    lmcache_objects_ptrs: list[int] | list[torch.Tensor],
    block_ids: torch.Tensor | list[int],
    device: torch.device,
    direction: Any,
    shape_desc: Any,
    lmcache_chunk_size: int,
    engine_kv_format: Any,
    skip_prefix_n_blocks: int,
) -> None:
    """Move whole blocks: flat position i of the objects from or to block ``block_ids[i]``.

    An object holds ``lmcache_chunk_size`` tokens, P blocks of ``shape_desc.bs``, and object o the
    flat positions from o·P on: [2, NL, T, D], or [NL, T, D] where a row is all of a token. Objects
    are tensors, or addresses of such chunks. Positions behind the last id and the first
    ``skip_prefix_n_blocks`` are untouched on both sides. ``paged_buffer_ptrs_tensor`` is what
    ``multi_layer_kv_transfer`` takes as ``key_value_ptrs``. With tensors their shapes and strides
    count, and ``shape_desc`` must agree where it is not 0.

    ValueError or TypeError, naming the argument, before the first byte moves.
    """
    op, layout = operation(direction), layout_of("multi_layer_block_kv_transfer", engine_kv_format)
    if not isinstance(lmcache_objects_ptrs, (list, tuple)):
        kind = type(lmcache_objects_ptrs).__name__
        raise TypeError(f"lmcache_objects_ptrs: got {kind}, takes a list of tensors or addresses")
    sizes = _described(layout, shape_desc, paged_buffer_ptrs_tensor, lmcache_objects_ptrs)
    _check_device("device", device, paged_buffer_ptrs_tensor)
    cache = cache_of(layout, paged_buffer_ptrs_tensor, "paged_buffer_ptrs_tensor", sizes)
    if cache.block_size is None:
        raise ValueError(f"shape_desc.bs: got 0, takes the tokens of a block of {layout.name}")
    _check_described(layout, cache, shape_desc)
    skip = _size("skip_prefix_n_blocks", skip_prefix_n_blocks)
    names = ("block_ids", "skip_prefix_n_blocks")
    request = cache.request("blocks", block_ids, skip, names)
    block_size = cache.block_size
    tokens = _size("lmcache_chunk_size", lmcache_chunk_size, least=1)
    if tokens % block_size:
        raise ValueError(
            f"lmcache_chunk_size: got {tokens}, takes a multiple of the block size, {block_size}"
        )
    each = tokens // block_size
    if request.length > each * len(lmcache_objects_ptrs):
        raise ValueError(
            f"block_ids: got {request.length}, takes {each * len(lmcache_objects_ptrs)} at most: "
            f"{each} blocks for each of {len(lmcache_objects_ptrs)} objects"
        )
    chunks = []
    for number, given in enumerate(lmcache_objects_ptrs):
        what = f"lmcache_objects_ptrs[{number}]"
        chunk = _object(cache, layout, what, given, tokens)
        first, last = number * each, min((number + 1) * each, request.length)
        if first < last:
            part = request.part(first, last, block_size)
            if not part.tokens <= chunk.shape[-2] <= tokens:
                raise ValueError(
                    f"{what}: got {chunk.shape[-2]} tokens, takes {part.tokens} to {tokens}"
                )
            chunks.append((part, what, chunk.narrow(-2, 0, part.tokens)))
    cache.prepare_all(op, chunks, layout.facts.chunk).run()


def single_layer_kv_transfer(
    lmc_key_value_cache: torch.Tensor,
    vllm_key_value_cache: Any,
    slot_mapping: torch.Tensor,
    direction: Any,
    engine_kv_format: Any,
    token_major: bool = False,
) -> None:
    """Move tokens of one layer, from or to a chunk of [2, T, D], or [T, 2, D] if ``token_major``.

    A layer whose row is all of a token has a chunk of [T, D]; rows of K and V by turns are moved as
    they are to [T, NH·CS], and apart to one with planes. ``vllm_key_value_cache`` is the layer's
    tensor, or its pair where the format has K and V in tensors of their own; dimensions are the
    format's, and strides may be any.

    ValueError or TypeError, naming the argument, before the first byte moves.
    """
    op, layout = operation(direction), layout_of("single_layer_kv_transfer", engine_kv_format)
    _move_layer(
        op,
        layout,
        ("lmc_key_value_cache", lmc_key_value_cache),
        ("vllm_key_value_cache", vllm_key_value_cache),
        slot_mapping,
        token_major,
    )


def single_layer_kv_transfer_sgl(
    lmc_key_value_cache: torch.Tensor,
    sgl_key_cache: torch.Tensor,
    sgl_value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    direction: Any,
    token_major: bool = False,
) -> None:
    """Move tokens of one layer between a chunk and K and V tensors.

    The chunk is [2, T, D], or [T, 2, D] if ``token_major``; K and V are [NB, BS, NH, HS] or
    [slots, NH, HS]. Errors are those of ``single_layer_kv_transfer``.
    """
    keys = ("sgl_key_cache", sgl_key_cache)
    values = ("sgl_value_cache", sgl_value_cache)
    layout = _pair_layout(keys, values)
    chunk = ("lmc_key_value_cache", lmc_key_value_cache)
    pair = ("sgl_key_cache, sgl_value_cache", (sgl_key_cache, sgl_value_cache))
    _move_layer(operation(direction), layout, chunk, pair, slot_mapping, token_major)


def load_and_reshape_flash(
    key_value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layer_idx: int,
) -> None:
    """Gather tokens of one layer's K and V, [NB, BS, NH, HS], into its part of [2, NL, T, D].

    Tokens with a negative slot are untouched.
    """
    _move_flash("gather", key_value, key_cache, value_cache, slot_mapping, layer_idx)


def reshape_and_cache_back_flash(
    key_value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layer_idx: int,
) -> None:
    """Scatter one layer's part of [2, NL, T, D] to its K and V, [NB, BS, NH, HS].

    Tokens with a negative slot are passed over.
    """
    _move_flash("scatter", key_value, key_cache, value_cache, slot_mapping, layer_idx)


# --- what they are made of ------------------------------------------------------------------------


def _move_slots(
    op: Op,
    cache: Cache,
    what: str,
    chunk: torch.Tensor,
    slot_mapping: Any,
    skip: int = 0,
    skip_name: str = "",
) -> None:
    """Move tokens of a chunk of [planes, NL, T, D]."""
    chunk = _as_engine(cache, what, chunk)
    own = cache.layout.facts.chunk
    if chunk.shape[0] == 2 and packed(cache.layout):
        own = _TWO_PLANES
    request = cache.request("slots", slot_mapping, skip, ("slot_mapping", skip_name))
    cache.prepare(op, request, what, (chunk,), own).run()


def _move_layer(
    op: Op,
    layout: Layout,
    named_chunk: tuple[str, Any],
    named_tensors: tuple[str, Any],
    slot_mapping: Any,
    token_major: bool,
) -> None:
    what, given = named_chunk
    chunk = _tensor(what, given)
    if not isinstance(token_major, (bool, int)):
        raise TypeError(f"token_major: got {token_major!r}, takes a bool")
    if chunk.dim() == 3:
        chunk = (chunk.transpose(0, 1) if token_major else chunk)[:, None]
    elif chunk.dim() == 2:
        chunk = chunk[None, None]
    else:
        raise ValueError(
            f"{what}: got shape {tuple(chunk.shape)}, takes [2, T, D], [T, 2, D] or [T, D]"
        )
    name, tensors = named_tensors
    if "kv" in layout.facts.lists:
        if not isinstance(tensors, (list, tuple)) or len(tensors) != 2:
            raise TypeError(
                f"{name}: got {type(tensors).__name__}, takes K and V of a layer, a pair"
            )
    else:
        _tensor(name, tensors)
    sizes = Sizes(1, 0, 0, _plane_row(layout, what, chunk), 0, chunk.dtype)
    cache = cache_of(layout, tensors if "kv" not in layout.facts.lists else [*tensors], name, sizes)
    _move_slots(op, cache, what, chunk, slot_mapping)


def _move_flash(
    op: Op, key_value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, layer_idx: int
) -> None:
    layout = _pair_layout(("key_cache", key_cache), ("value_cache", value_cache))
    chunk = _multi_layer_chunk(key_value)
    layer = integer("layer_idx", layer_idx)
    if not 0 <= layer < chunk.shape[1]:
        raise ValueError(f"layer_idx: got {layer}, takes 0 to {chunk.shape[1] - 1}")
    part = chunk[:, layer : layer + 1]
    sizes = Sizes(1, 0, 0, _plane_row(layout, "key_value", part), 0, chunk.dtype)
    cache = cache_of(layout, [key_cache, value_cache], "key_cache, value_cache", sizes)
    _move_slots(op, cache, "key_value", part, slot_mapping)


def _pair_layout(keys: tuple[str, Any], values: tuple[str, Any]) -> Layout:
    """The layout of one layer's K and V tensors, by their number of dimensions."""
    for what, tensor in (keys, values):
        if _tensor(what, tensor).dim() != keys[1].dim() or tensor.dim() not in (3, 4):
            raise ValueError(
                f"{what}: got shape {tuple(tensor.shape)}, takes [NB, BS, NH, HS] or "
                "[slots, NH, HS], K and V alike"
            )
    return registry.layout(_PAIR if keys[1].dim() == 4 else _PAIR_OF_SLOTS)


def _multi_layer_chunk(key_value: Any) -> torch.Tensor:
    """A chunk of [planes, NL, T, D]; its own planes may be left away where it has one."""
    chunk = _tensor("key_value", key_value)
    if chunk.dim() == 3:
        chunk = chunk[None]
    if chunk.dim() != 4:
        raise ValueError(
            f"key_value: got shape {tuple(chunk.shape)}, takes [2, NL, T, D] or [1, NL, T, D]"
        )
    return chunk


def _is_whole(layout: Layout, given: Any, chunk: torch.Tensor) -> bool:
    """Whether what is given is the tensor that holds all layers, and not a tensor for each."""
    tensors = given if isinstance(given, (list, tuple)) else [given]
    if is_pointers(given) or len(tensors) > 1 or not tensors:
        return len(given) == 1 and chunk.shape[1] > 1
    one = tensors[0]
    return isinstance(one, torch.Tensor) and (
        chunk.shape[1] > 1 or one.dim() == len(layout.facts.axes)
    )


def _plane_row(layout: Layout, what: str, chunk: torch.Tensor) -> int:
    """The elements of a token in one plane, where K and V by turns count as two."""
    width = chunk.shape[-1]
    if packed(layout) and chunk.shape[0] == 1:
        if width % 2:
            raise ValueError(f"{what}: got rows of {width} elements, takes K and V, an even number")
        return width // 2
    return width


def _described(layout: Layout, shape_desc: Any, given: Any, objects: Sequence[Any]) -> Sizes:
    """The sizes in a ``PageBufferShapeDesc``."""
    try:
        values = _SAID(shape_desc)
    except AttributeError:
        kind = type(shape_desc).__name__
        raise TypeError(f"shape_desc: got {kind}, takes a PageBufferShapeDesc") from None
    for name, value in zip(_SAID_NAMES, values, strict=True):
        if type(value) is not int or not 0 <= value <= _MOST:
            _size(f"shape_desc.{name}", value)
    layers, blocks, block_size, heads, head_size, itemsize, kv_size, block_stride = values
    if kv_size not in (0, planes(layout)):
        raise ValueError(
            f"shape_desc.kv_size: got {kv_size}, takes {planes(layout)} for {layout.name}"
        )
    if not layers and not is_pointers(given):
        layers = sum(1 for _ in flat(given)) // (2 if "kv" in layout.facts.lists else 1)
    return Sizes(
        layers=layers,
        slots=blocks * block_size,
        block_size=block_size,
        row=heads * head_size // (2 if packed(layout) else 1),
        head_size=head_size,
        dtype=_described_dtype(shape_desc, itemsize, given, objects),
        block_stride=block_stride if is_pointers(given) else 0,
        names=_DESCRIBED,
    )


def _described_dtype(shape_desc: Any, size: int, given: Any, objects: Sequence[Any]) -> torch.dtype:
    """The dtype of what addresses point to, or one of its size: rows are moved as bytes."""
    told = getattr(shape_desc, "dtype", None)
    unlike = isinstance(told, torch.dtype) and (size or told.itemsize) != told.itemsize
    if unlike or told in QUANTIZED:
        raise ValueError(
            f"shape_desc.dtype: got {told}, takes one of element_size, {size} bytes, that is not "
            "quantized"
        )
    of_objects = (one.dtype for one in objects if isinstance(one, torch.Tensor))
    for dtype in (told, _BY_SIZE.get(size), *of_objects):
        if isinstance(dtype, torch.dtype) and dtype.itemsize == (size or dtype.itemsize):
            return dtype
    if is_pointers(given):
        takes = ", ".join(map(str, _BY_SIZE))
        raise ValueError(f"shape_desc.element_size: got {size}, takes one of {takes} bytes")
    return torch.uint8  # tensors have their own


def _check_described(layout: Layout, cache: Cache, shape_desc: Any) -> None:
    """Whether a description's row is what tensors show; objects are as large as it says."""
    (group,) = cache.groups
    heads, size, itemsize = (getattr(shape_desc, name) for name in ("nh", "hs", "element_size"))
    row = group.heads * group.head_size * (2 if packed(layout) else 1)
    if heads and size and heads * size != row:
        raise ValueError(
            f"shape_desc.nh, shape_desc.hs: got {heads} · {size} elements, takes {row} as the "
            "tensors show"
        )
    if itemsize and itemsize != group.itemsize:
        raise ValueError(
            f"shape_desc.element_size: got {itemsize}, takes {group.itemsize}, the bytes of an "
            f"element of {group.dtype}"
        )


def _object(cache: Cache, layout: Layout, what: str, given: Any, tokens: int) -> torch.Tensor:
    """One object of a block transfer as a chunk of [2, NL, T, D] or [NL, T, D]."""
    (group,) = cache.groups
    row = group.heads * group.head_size
    shape = (2, cache.layers, tokens, row)
    if planes(layout) == 1:
        shape = (cache.layers, tokens, row * group.planes)  # type: ignore[assignment]
    if not isinstance(given, torch.Tensor):
        address = integer(what, given)
        if not 0 < address < 1 << 57:
            raise ValueError(f"{what}: got {address}, takes a tensor or its address")
        return tensor_at(address, shape, getattr(torch, group.dtype))
    if _tensor(what, given).dim() not in (3, 4):
        raise ValueError(f"{what}: got shape {tuple(given.shape)}, takes {list(shape)}")
    chunk = _as_engine(cache, what, given)
    if packed(layout) and chunk.dim() == 4 and chunk.shape[0] == 2:
        # The same bytes: whoever allocates by planes does not ask how a row is divided.
        try:
            return chunk.view(shape)
        except RuntimeError:
            raise ValueError(
                f"{what}: got shape {tuple(chunk.shape)} with strides {chunk.stride()}, takes "
                f"{list(shape)}, or as many contiguous bytes"
            ) from None
    return chunk


def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over host memory that starts at ``address``, without a copy."""
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def _as_engine(cache: Cache, what: str, chunk: torch.Tensor) -> torch.Tensor:
    """A chunk seen in the engine's dtype: rows are moved as the bytes they are."""
    return _in_dtype(what, chunk, getattr(torch, cache.groups[0].dtype))


def _in_dtype(what: str, chunk: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if chunk.dtype is dtype:
        return chunk
    if chunk.requires_grad:
        raise ValueError(f"{what}: requires grad, which a copy of bytes would not track; detach it")
    try:
        return chunk.view(dtype)
    except RuntimeError:
        raise ValueError(
            f"{what}: got {chunk.dtype} in shape {tuple(chunk.shape)}, takes rows of {dtype}"
        ) from None


def _check_device(name: str, device: Any, given: Any) -> None:
    """Whether the tensors, or the memory that addresses point to, can be reached."""
    where = device_of(name, device)
    if is_pointers(given):
        if where.type != "cpu":
            raise NotImplementedError(
                f"{name}: got {where}, takes cpu: addresses on other devices can't be followed "
                "yet; give the tensors"
            )
        return
    for one in flat(given):
        if isinstance(one, torch.Tensor) and one.device.type != where.type:
            raise ValueError(f"{name}: got {where}, takes {one.device}, where the tensors are")
        return


def _tensor(what: str, given: Any) -> torch.Tensor:
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{what}: got {type(given).__name__}, takes a tensor")
    if given.layout is not torch.strided:
        raise TypeError(f"{what}: got a tensor of layout {given.layout}, takes a strided one")
    if given.is_quantized or given.is_nested:
        raise ValueError(f"{what}: {unaddressable(given)}")
    return given


def _size(name: str, given: Any, least: int = 0) -> int:
    value = integer(name, given)
    if not least <= value <= _MOST:
        raise ValueError(f"{name}: got {value}, takes {least} to 2**48")
    return value
