"""Layouts are found by name; tensors bind by their strides, or are refused in words."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvloom
import oracle
from declared import KNOWN
from kvloom import geometry, overlap, registry, select
from kvloom.geometry import Axes, TensorFacts

ROOT = Path(__file__).resolve().parent.parent
LAYOUTS = kvloom.layouts()
WITH_KERNELS = [layout for layout in LAYOUTS if not layout.unsupported]
KNOWN_WITH_KERNELS = [layout for layout in WITH_KERNELS if layout.name in KNOWN]
WITHOUT_KERNELS = [layout for layout in LAYOUTS if layout.unsupported]

NHD, HND, MLA = "NL_X_TWO_NB_BS_NH_HS", "NL_X_TWO_NB_NH_BS_HS", "NL_X_NB_BS_HS"
BLOCKS_FIRST = "NL_X_NB_TWO_BS_NH_HS"
LAYERS_IN_ONE, FLAT, FLAT_MLA = "NB_NL_TWO_BS_NH_HS", "TWO_X_NL_X_NBBS_NH_HS", "NL_X_NBBS_ONE_HS"
PAIRS, PACKED = "NL_X_TWO_X_NB_BS_NH_HS", "NL_X_NB_NH_BS_CS"

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
every_layout_with_kernels = pytest.mark.parametrize(
    "layout", WITH_KERNELS, ids=lambda layout: layout.name
)
every_known_layout_with_kernels = pytest.mark.parametrize(
    "layout", KNOWN_WITH_KERNELS, ids=lambda layout: layout.name
)
every_layout_without_kernels = pytest.mark.parametrize(
    "layout", WITHOUT_KERNELS, ids=lambda layout: layout.name
)


def sizes(layout: kvloom.Layout, **changed: Any) -> dict[str, Any]:
    """A small cache: no two extents alike, and more than one of everything that there can be."""
    heads = 3 if "head" in layout.facts.memory else 1
    small = {"layers": 4, "blocks": 7, "block_size": 6, "heads": heads, "head_size": 5}
    return {**small, **changed}


def fill(tensors: Any) -> Any:
    """Random bytes in whole storages, what is between the elements included."""
    for tensor in oracle.flat(tensors):
        storage = tensor.untyped_storage()
        torch.empty(0, dtype=torch.uint8).set_(storage).random_(0, 256)
    return tensors


def nested(layout: kvloom.Layout, make: Callable[[], torch.Tensor], layers: int) -> Any:
    """Tensors from ``make``, nested as the layout takes them."""
    counts = [{"layer": layers, "kv": 2}[level] for level in layout.lists]

    def build(depth: int) -> Any:
        if depth == len(counts):
            return make()
        return [build(depth + 1) for _ in range(counts[depth])]

    return build(0)


def assert_reads(layout: kvloom.Layout, tensors: Any, given: dict[str, int]) -> None:
    """A bound cache gathers and scatters exactly the elements that the layout's name says."""
    cache = layout.bind(tensors, block_size=given["block_size"])
    itemsize = oracle.flat(tensors)[0].element_size()
    sized, own = oracle.Geometry(**given, element_bits=8 * itemsize), layout.facts.chunk
    slots = torch.randperm(sized.slots)[: sized.slots // 2]
    chunk = cache.gather(slots=slots)
    assert isinstance(chunk, torch.Tensor)
    assert oracle.same_bytes(
        chunk, oracle.expected_chunk(layout.name, tensors, slots.tolist(), sized, chunk=own)
    )
    fill(chunk)
    expected = oracle.expected_after_scatter(
        layout.name, tensors, chunk, slots.tolist(), sized, chunk=own
    )
    cache.scatter(chunk, slots=slots)
    assert oracle.same_storages(tensors, expected)


def facts(what: str, tensor: torch.Tensor) -> TensorFacts:
    return TensorFacts(
        what, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size(), "int8"
    )


# --- finding a layout -------------------------------------------------------------------------


@every_layout
def test_a_layout_is_found_by_name_alias_and_wire_id_in_any_case(layout: kvloom.Layout) -> None:
    keys: list[str | int] = [layout.name, layout.name.lower(), layout.name.title()]
    for alias in layout.aliases:
        keys += [alias, alias.upper()]
    if layout.id is not None:
        keys.append(layout.id)
    for key in keys:
        assert kvloom.layout(key) is layout


def test_layouts_with_a_wire_id_come_first_and_in_order() -> None:
    ids = [layout.id for layout in LAYOUTS]
    numbered = [number for number in ids if number is not None]
    assert ids == sorted(numbered) + [None] * (len(ids) - len(numbered))
    names = [layout.name for layout in LAYOUTS if layout.id is None]
    assert names == sorted(names)


@pytest.mark.parametrize(
    ("find", "key", "error", "says"),
    [
        (kvloom.layout, "NL_X_TWO_NB_BS_NH_HZ", ValueError, "nl_x_two_nb_bs_nh_hs"),
        (kvloom.layout, "vllm-flash-atention-nhd", ValueError, "vllm-flash-attention-nhd"),
        (kvloom.layout, "?", ValueError, "kvloom.layouts() lists all"),
        (kvloom.layout, 999, ValueError, "999"),
        (kvloom.layout, -1, ValueError, "-1"),
        (kvloom.layout, True, TypeError, "True"),
        (kvloom.layout, 1.0, TypeError, "1.0"),
        (kvloom.layout, None, TypeError, "None"),
        (kvloom.model, "llama-3-8", ValueError, "llama-3-8b"),
        (kvloom.model, 3, TypeError, "int"),
        (registry.chunk_layout, "two_planes", ValueError, "two_plane"),
        (registry.chunk_layout, 3, TypeError, "int"),
    ],
)
def test_a_wrong_key_is_answered_with_what_comes_close(
    find: Callable[[Any], object], key: object, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=re.escape(says)):
        find(key)


def test_models_and_chunk_layouts_are_found_by_name_in_any_case() -> None:
    for model in kvloom.models():
        assert kvloom.model(model.name.upper()) is model
    for chunk in kvloom.chunks():
        assert registry.chunk_layout(chunk.name.upper()) is chunk
    assert {layout.facts.chunk for layout in LAYOUTS} <= {chunk.name for chunk in kvloom.chunks()}


@every_layout
def test_a_layout_says_what_it_is(layout: kvloom.Layout) -> None:
    assert layout.name in repr(layout)
    assert all(engine.name in repr(layout) for engine in layout.engines)
    assert layout.chunk.name == layout.facts.chunk
    assert layout.doc == layout.facts.doc


def test_layouts_are_equal_by_name() -> None:
    again = kvloom.Layout(kvloom.layout(NHD).facts)
    assert again == kvloom.layout(NHD)
    assert hash(again) == hash(kvloom.layout(NHD))
    assert again != kvloom.layout(HND)
    assert again != NHD
    assert len({again, *LAYOUTS}) == len(LAYOUTS)


def test_kernels_are_made_once_however_many_threads_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_kernels", {})
    layout, barrier, found = kvloom.layout(MLA), threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        found.append(registry.kernels(layout))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(one) for one in found}) == 1


def run(script: str) -> str:
    path = os.pathsep.join(str(ROOT / folder) for folder in ("runtime", "generated"))
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_kvloom_loads_neither_torch_nor_numba_nor_the_generator() -> None:
    script = "import sys, kvloom; dir(kvloom); print(*sys.modules)"
    loaded = {name.partition(".")[0] for name in run(script).split()}
    assert not loaded & {"torch", "numba", "numpy", "kvloom_generated", "kvloom_codegen"}


def test_layouts_and_geometry_work_where_torch_is_not_installed() -> None:
    script = """
import sys
sys.modules["torch"] = None
import kvloom, kvloom.geometry, kvloom.select, kvloom.overlap
for layout in kvloom.layouts():
    repr(layout)
    if not layout.unsupported:
        print(layout.shape(layers=2, blocks=3, block_size=4, head_size=5))
"""
    assert len(run(script).splitlines()) == len(WITH_KERNELS)


def test_every_public_name_is_there_and_no_other() -> None:
    for name in kvloom.__all__:
        assert getattr(kvloom, name) is not None
    assert set(kvloom.__all__) <= set(dir(kvloom))
    with pytest.raises(AttributeError, match="no attribute 'gathr'"):
        kvloom.gathr  # type: ignore[attr-defined]  # noqa: B018


def test_no_module_takes_the_name_of_a_public_function() -> None:
    modules = {path.stem for path in (ROOT / "runtime/kvloom").glob("*.py")}
    assert not modules & set(kvloom.__all__)


# --- tensors that have a layout ---------------------------------------------------------------


@every_known_layout_with_kernels
def test_empty_tensors_have_the_layouts_shape_and_nesting_and_bind(layout: kvloom.Layout) -> None:
    given = sizes(layout)
    tensors = layout.empty(**given, dtype=torch.int16)
    expected = oracle.shapes(layout.name, oracle.Geometry(**given, element_bits=16))
    assert [tuple(tensor.shape) for tensor in oracle.flat(tensors)] == expected
    assert {layout.shape(**given)} == set(expected)
    assert all(tensor.dtype is torch.int16 for tensor in oracle.flat(tensors))
    cache = layout.bind(tensors, block_size=given["block_size"])
    (group,) = cache.groups
    assert (cache.layers, group.layers) == (4, (0, 1, 2, 3))
    assert (cache.blocks, cache.block_size, cache.capacity) == (7, 6, 42)
    assert (group.heads, group.head_size, group.dtype) == (given["heads"], 5, "int16")
    assert layout.name in repr(cache)


@every_layout_with_kernels
def test_empty_views_share_one_buffer_that_they_fill(layout: kvloom.Layout) -> None:
    tensors = oracle.flat(layout.empty(**sizes(layout), dtype=torch.int16))
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(storages) == (1 if layout.facts.views else len(tensors))
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    assert sum(held.values()) == nbytes


@pytest.mark.parametrize("layout", [one for one in KNOWN_WITH_KERNELS if one.facts.views], ids=str)
def test_empty_views_are_as_far_apart_as_the_name_says(layout: kvloom.Layout) -> None:
    given = sizes(layout)
    first, second, *_ = oracle.flat(layout.empty(**given, dtype=torch.int16))
    step = oracle.view_step_bits(layout.name, oracle.Geometry(**given, element_bits=16))
    assert 8 * (second.data_ptr() - first.data_ptr()) == step


def test_empty_takes_the_words_that_specs_have_for_dtypes() -> None:
    words = {model.dtype for model in kvloom.models()}
    for word, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16}.items():
        tensors = kvloom.layout(MLA).empty(
            layers=1, blocks=1, block_size=1, head_size=1, dtype=word
        )
        assert oracle.flat(tensors)[0].dtype is dtype
        words.discard(word)
    assert not words
    with pytest.raises(ValueError, match=r"'bf8'.*bf16"):
        kvloom.layout(MLA).empty(layers=1, blocks=1, block_size=1, head_size=1, dtype="bf8")


@pytest.mark.parametrize(
    ("name", "changed", "error", "says"),
    [
        (NHD, {"layers": 0}, ValueError, "layers: got 0"),
        (NHD, {"blocks": -1}, ValueError, "blocks: got -1"),
        (NHD, {"block_size": 0}, ValueError, "block_size: got 0"),
        (NHD, {"heads": 0}, ValueError, "heads: got 0"),
        (NHD, {"head_size": 2.0}, TypeError, "head_size: got 2.0"),
        (NHD, {"layers": True}, TypeError, "layers: got True"),
        (MLA, {"heads": 2}, ValueError, "heads: got 2, takes 1"),
    ],
)
def test_sizes_that_no_cache_has_are_refused(
    name: str, changed: dict[str, Any], error: type[Exception], says: str
) -> None:
    layout = kvloom.layout(name)
    for make in (layout.shape, lambda **given: layout.empty(**given, dtype="bf16")):
        with pytest.raises(error, match=says):
            make(**sizes(layout, **changed))


@every_layout_without_kernels
def test_a_layout_without_kernels_says_why(layout: kvloom.Layout) -> None:
    refusal = pytest.raises(NotImplementedError, match=re.escape(layout.unsupported))
    with refusal:
        layout.bind([torch.zeros(4)])
    with refusal:
        layout.empty(**sizes(layout), dtype="bf16")
    with refusal:
        registry.kernels(layout)


# --- geometry is read from strides ------------------------------------------------------------


@every_known_layout_with_kernels
def test_any_memory_order_of_the_outer_axes_is_read_by_strides(layout: kvloom.Layout) -> None:
    given = sizes(layout)
    shape = layout.shape(**given)
    for order in list(permutations(range(len(shape) - 1)))[:: max(1, len(shape) - 3)]:
        order = (*order, len(shape) - 1)
        back = [order.index(dim) for dim in range(len(shape))]

        def make(order: tuple[int, ...] = order, back: list[int] = back) -> torch.Tensor:
            return torch.empty([shape[dim] for dim in order], dtype=torch.int16).permute(back)

        assert_reads(layout, fill(nested(layout, make, given["layers"])), given)


@every_known_layout_with_kernels
def test_padding_on_every_axis_and_storage_offsets_are_stepped_over(layout: kvloom.Layout) -> None:
    given = sizes(layout)

    def make() -> torch.Tensor:
        shape = layout.shape(**given)
        window = tuple(slice(1, 1 + size) for size in shape)
        return torch.empty([size + 3 for size in shape], dtype=torch.int16)[window]

    assert_reads(layout, fill(nested(layout, make, given["layers"])), given)


@every_known_layout_with_kernels
@pytest.mark.parametrize("axis", ["layers", "blocks", "block_size", "heads", "head_size"])
def test_a_cache_with_one_of_something_is_read_right(layout: kvloom.Layout, axis: str) -> None:
    given = sizes(layout, **{axis: 1})
    assert_reads(layout, fill(layout.empty(**given, dtype=torch.float32)), given)


def test_a_stride_of_an_axis_of_length_one_means_nothing() -> None:
    given = {"layers": 1, "blocks": 1, "block_size": 3, "heads": 1, "head_size": 4}
    tensor = fill(torch.empty(64, dtype=torch.int16)).as_strided((2, 1, 3, 1, 4), (12, 0, 4, 3, 1))
    assert_reads(kvloom.layout(NHD), [tensor], given)


def test_two_blocks_are_not_taken_for_keys_and_values() -> None:
    layout = kvloom.layout(BLOCKS_FIRST)
    given = sizes(layout, blocks=2, heads=2)
    assert_reads(layout, fill(layout.empty(**given, dtype=torch.uint8)), given)


def test_layers_may_differ_in_strides_and_number_of_blocks() -> None:
    layout = kvloom.layout(NHD)
    given = sizes(layout, layers=3)
    tight, padded = layout.shape(**given), (2, 9, 6, 4, 5)
    tensors = fill([torch.empty(size, dtype=torch.int16) for size in (tight, padded, tight)])
    tensors[1] = tensors[1][:, :, :, :3]
    cache = layout.bind(tensors)
    assert len(cache.groups) == 1
    assert (cache.blocks, cache.capacity) == (7, 42)
    tensors[1] = tensors[1][:, :7]
    assert_reads(layout, tensors, given)


def test_layers_unlike_in_dtype_heads_head_or_block_size_form_groups() -> None:
    layout = kvloom.layout(NHD)
    shapes = [(2, 8, 4, 3, 5), (2, 8, 4, 3, 9), (2, 8, 4, 3, 5), (2, 3, 8, 3, 5), (2, 8, 4, 1, 9)]
    tensors = [torch.zeros(shape, dtype=torch.int16) for shape in shapes]
    tensors.append(torch.zeros(shapes[0], dtype=torch.uint8))
    tensors.append(torch.zeros(shapes[1], dtype=torch.int16))
    cache = layout.bind(tensors)
    assert [group.layers for group in cache.groups] == [(0, 2), (1, 6), (3,), (4,), (5,)]
    assert [group.head_size for group in cache.groups] == [5, 9, 5, 9, 5]
    assert [group.heads for group in cache.groups] == [3, 3, 3, 1, 3]
    assert [group.block_size for group in cache.groups] == [4, 4, 8, 4, 4]
    assert [group.dtype for group in cache.groups] == ["int16"] * 4 + ["uint8"]
    assert cache.layers == 7
    assert cache.capacity == 24
    assert (cache.block_size, cache.blocks) == (None, None)


def test_flat_slots_bind_without_a_block_size() -> None:
    for name in (FLAT, FLAT_MLA):
        layout = kvloom.layout(name)
        cache = layout.bind(layout.empty(**sizes(layout), dtype="bf16"))
        assert (cache.block_size, cache.blocks, cache.capacity) == (None, None, 42)
        assert "42 slots" in repr(cache)


def test_a_cache_keeps_its_tensors_alive() -> None:
    layout = kvloom.layout(PAIRS)
    tensors = layout.empty(**sizes(layout), dtype="bf16")
    alive = [weakref.ref(tensor) for tensor in oracle.flat(tensors)]
    cache = layout.bind(tensors)
    del tensors
    gc.collect()
    assert all(one() is not None for one in alive)
    del cache
    gc.collect()
    assert all(one() is None for one in alive)


@pytest.mark.parametrize("name", ["BLHNC", "BHLNC"])
def test_binding_eighty_interleaved_layers_takes_milliseconds(name: str) -> None:
    layout = kvloom.layout(name)
    tensors = layout.empty(
        layers=80, blocks=64, block_size=16, heads=8, head_size=128, dtype="bf16"
    )
    took = []
    for _ in range(5):
        start = time.perf_counter()
        layout.bind(tensors)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.05


# --- what does not fit is refused -------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = torch.int16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


K = zeros(7, 6, 3, 5)


@pytest.mark.parametrize(
    ("name", "tensors", "error", "says"),
    [
        (NHD, zeros(2, 7, 6, 3, 5), TypeError, "tensors: got Tensor, takes a list; .* NL × "),
        (NHD, "kv", TypeError, r"tensors\[0\]: got str, takes a tensor"),
        (NHD, iter([]), TypeError, "tensors: got list_iterator, takes a list"),
        (NHD, [], ValueError, "tensors: got 0 entries, takes at least 1"),
        (NHD, [zeros(2, 7, 6, 3, 5), 5], TypeError, r"tensors\[1\]: got int, takes a tensor"),
        (NHD, [[zeros(2, 7, 6, 3, 5)]], TypeError, r"tensors\[0\]: got list, takes a tensor"),
        (LAYERS_IN_ONE, [zeros(7, 4, 2, 6, 3, 5)], TypeError, "tensors: got list, takes a tensor"),
        (PAIRS, [[K, K, K]], ValueError, r"tensors\[0\]: got 3 entries, takes 2"),
        (PAIRS, [K, K], TypeError, r"tensors\[0\]: got Tensor, takes a list"),
        (FLAT, [[zeros(42, 3, 5)] * 2, [zeros(42, 3, 5)]], ValueError, r"tensors\[1\]: got 1 en"),
        (FLAT, [[zeros(42, 3, 5)]], ValueError, "tensors: got 1 entries, takes 2"),
        (NHD, [zeros(7, 6, 3, 5)], ValueError, r"tensors\[0\]: .*takes \[2, NB, BS, NH, HS\]"),
        (NHD, [zeros(7, 2, 6, 3, 5)], ValueError, r"\(7, 2, 6, 3, 5\), whose dimension 0"),
        (FLAT_MLA, [zeros(42, 2, 5)], ValueError, r"\(42, 2, 5\), whose dimension 1 does not fit"),
        (PACKED, [zeros(7, 3, 6, 11)], ValueError, r"\(7, 3, 6, 11\), whose dimension 3"),
        (NHD, [zeros(2, 0, 6, 3, 5)], ValueError, r"\(2, 0, 6, 3, 5\), whose dimension 1"),
        (NHD, [zeros(2, 7, 6, 3, 0)], ValueError, r"\(2, 7, 6, 3, 0\), whose dimension 4"),
        (NHD, [zeros(2, 7, 6, 5, 3).mT], ValueError, "takes stride 1 along the elements"),
        (MLA, [zeros(7, 6, 10)[..., ::2]], ValueError, "takes stride 1 along the elements"),
        (PAIRS, [[K, zeros(7, 6, 3, 4)]], ValueError, r"tensors\[0\]\[1\]: .*tensors\[0\]\[0\]"),
        (PAIRS, [[K, K.byte()]], ValueError, r"tensors\[0\]\[1\]: got uint8.*: int16"),
        (PAIRS, [[K, zeros(7, 6, 4, 5)[:, :, :3]]], ValueError, r"tensors\[0\]\[1\]: .*strides"),
        (NHD, [zeros(2, 7, 6, 3, 5).float().requires_grad_()], ValueError, "requires grad"),
        (MLA, [zeros(7, 6, 5).to_sparse()], TypeError, "layout torch.sparse_coo"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    name: str, tensors: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        kvloom.layout(name).bind(tensors)


@pytest.mark.parametrize(
    ("name", "block_size", "error", "says"),
    [
        (NHD, 8, ValueError, r"whose dimension 2 does not fit; .* with block_size 8"),
        (
            FLAT,
            8,
            ValueError,
            r"\(42, 3, 5\), whose dimension 0 does not fit; .* with block_size 8",
        ),
        (FLAT, 0, ValueError, "block_size: got 0"),
        (FLAT, 6.0, TypeError, "block_size: got 6.0"),
        (FLAT, True, TypeError, "block_size: got True"),
    ],
)
def test_a_block_size_that_does_not_fit_is_refused(
    name: str, block_size: Any, error: type[Exception], says: str
) -> None:
    layout = kvloom.layout(name)
    tensors = layout.empty(**sizes(layout), dtype="bf16")
    with pytest.raises(error, match=says):
        layout.bind(tensors, block_size=block_size)


# --- shared bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "pair"),
    [
        ((2, 7, 6, 3, 5), (0, 90, 15, 5, 1), "(0, 0, 0, 0, 0) and (1, 0, 0, 0, 0)"),
        ((2, 7, 6, 3, 5), (630, 90, 0, 5, 1), "(0, 0, 0, 0, 0) and (0, 0, 1, 0, 0)"),
        ((2, 7, 6, 3, 5), (629, 90, 15, 5, 1), "(0, 6, 5, 2, 4) and (1, 0, 0, 0, 0)"),
        ((2, 7, 6, 3, 5), (630, 90, 15, 4, 1), "(0, 0, 0, 0, 4) and (0, 0, 0, 1, 0)"),
    ],
)
def test_a_tensor_whose_elements_share_bytes_is_refused_by_two_of_them(
    shape: tuple[int, ...], strides: tuple[int, ...], pair: str
) -> None:
    tensor = zeros(2000).as_strided(shape, strides)
    with pytest.raises(ValueError, match=rf"tensors\[1\]: .*{re.escape(pair)} share bytes"):
        kvloom.layout(NHD).bind([zeros(*shape), tensor])


def test_tensors_that_share_bytes_are_refused_by_two_of_their_elements() -> None:
    layout = kvloom.layout(MLA)
    one = zeros(7, 6, 5)
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[2\] share bytes"):
        layout.bind([one, zeros(7, 6, 5), one])
    buffer = zeros(500)
    shifted = [buffer[start : start + 210].view(7, 6, 5) for start in (0, 209)]
    says = r"element \(6, 5, 4\) of one and \(0, 0, 0\) of the other"
    with pytest.raises(ValueError, match=says):
        layout.bind(shifted)
    layout.bind([buffer[start : start + 210].view(7, 6, 5) for start in (0, 210)])
    raw = torch.zeros(1000, dtype=torch.uint8)
    with pytest.raises(ValueError, match="share bytes"):
        layout.bind([raw[:420].view(torch.int16).view(7, 6, 5), raw[419:629].view(7, 6, 5)])


def test_layers_may_lie_between_each_others_bytes() -> None:
    layout = kvloom.layout(MLA)
    for dim in range(3):
        shape = [7, 6, 5]
        shape.insert(dim, 3)
        given = {"layers": 3, "blocks": 7, "block_size": 6, "heads": 1, "head_size": 5}
        assert_reads(layout, list(fill(zeros(*shape)).unbind(dim)), given)
    # Blocks of unlike layers take turns: pages of 30 and of 54 elements.
    pages = fill(zeros(7, 84))
    layout.bind([pages[:, :30].unflatten(1, (6, 5)), pages[:, 30:].unflatten(1, (6, 9))])
    with pytest.raises(ValueError, match=r"\(0, 5, 4\) of one and \(0, 0, 0\) of the other"):
        layout.bind([pages[:, :30].unflatten(1, (6, 5)), pages[:, 29:83].unflatten(1, (6, 9))])
    # One layer has two blocks where the other has one.
    pages = fill(zeros(24, 6, 5))
    layout.bind([pages[::2], pages[1::4]])
    with pytest.raises(ValueError, match=r"\(1, 0, 0\) of one and \(0, 0, 0\) of the other"):
        layout.bind([pages[::2], pages[2::4]])


def bytes_of(tensor: TensorFacts) -> list[int]:
    """Every byte address that a tensor's elements take, repeated where they share it."""
    offsets = np.zeros(1, np.int64)
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
    taken = offsets[:, None] * tensor.itemsize + np.arange(tensor.itemsize)
    return [int(tensor.address + byte) for byte in taken.ravel()]


def test_shared_bytes_are_found_exactly_as_by_looking_at_every_byte() -> None:
    random = np.random.default_rng(0)
    strides = [0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 32, 48]
    seen: dict[tuple[str, bool], int] = {}

    def some(what: str) -> TensorFacts:
        rank = int(random.integers(1, 5))
        shape = tuple(int(size) for size in random.integers(1, 5, rank))
        steps = tuple(int(step) for step in random.choice(strides, rank))
        itemsize = int(random.choice([1, 2, 4]))
        return TensorFacts(what, int(random.integers(80)), shape, steps, itemsize, "")

    def refused(check: Callable[..., None], *arguments: object) -> bool:
        try:
            check(*arguments)
        except ValueError as error:
            return "share bytes" in str(error)
        return False

    for _ in range(2000):
        one, other = some("one"), some("other")
        taken = bytes_of(one)
        alone = len(set(taken)) < len(taken)
        assert refused(overlap.check_self, one) == alone
        shared = not set(taken).isdisjoint(bytes_of(other))
        assert refused(overlap.check_apart, [one, other]) == shared
        assert refused(overlap.Ranges([other]).check_apart, one) == shared
        assert overlap.Ranges([other]).meet(one.address, overlap.span(one)) or not shared
        seen["alone", alone] = seen.get(("alone", alone), 0) + 1
        seen["shared", shared] = seen.get(("shared", shared), 0) + 1
    assert min(seen.values()) > 200
    assert len(seen) == 4


def test_strides_too_entangled_are_refused_in_words() -> None:
    primes = (1_000_003, 999_983, 999_979)
    tensor = TensorFacts("tensors[0]", 0, (3000, 3000, 3000, 2), (*primes, 999_961), 1, "uint8")
    with pytest.raises(ValueError, match=r"tensors\[0\]: strides too entangled"):
        overlap.check_self(tensor)


# --- runs -------------------------------------------------------------------------------------


def axes(**steps: tuple[int, int]) -> Axes:
    return Axes(
        {axis: extent for axis, (extent, _) in steps.items()},
        {axis: stride for axis, (_, stride) in steps.items() if stride >= 0},
    )


@pytest.mark.parametrize(
    ("engine", "chunk", "counted", "run", "fused"),
    [
        # Heads and tokens both go on where the run ends; keys and values do not.
        (
            axes(kv=(2, 999), token=(4, 30), head=(3, 10), elem=(5, 2)),
            axes(kv=(2, 777), token=(8, 30), head=(3, 10), elem=(5, 2)),
            ["kv", "token", "head"],
            120,
            ("head", "token"),
        ),
        # By slots tokens are not counted.
        (
            axes(kv=(2, 999), token=(4, 30), head=(3, 10), elem=(5, 2)),
            axes(kv=(2, 777), token=(8, 30), head=(3, 10), elem=(5, 2)),
            ["kv", "head"],
            30,
            ("head",),
        ),
        # Tokens before heads in the engine: neither goes on on both sides.
        (
            axes(token=(4, 10), head=(3, 40), elem=(5, 2)),
            axes(token=(8, 30), head=(3, 10), elem=(5, 2)),
            ["token", "head"],
            10,
            (),
        ),
        # Chunk rows are padded: heads go on, tokens do not.
        (
            axes(token=(4, 30), head=(3, 10), elem=(5, 2)),
            axes(token=(8, 32), head=(3, 10), elem=(5, 2)),
            ["token", "head"],
            30,
            ("head",),
        ),
        # One head: its stride keeps tokens from nothing.
        (
            axes(token=(4, 10), head=(1, 0), elem=(5, 2)),
            axes(token=(8, 10), head=(1, 0), elem=(5, 2)),
            ["token", "head"],
            40,
            ("token",),
        ),
        # Keys and values in tensors of their own never go on.
        (
            axes(kv=(2, -1), head=(3, 10), elem=(5, 2)),
            axes(kv=(2, 30), head=(3, 10), elem=(5, 2)),
            ["kv", "head"],
            30,
            ("head",),
        ),
        # Packed: K, then V, then the next head.
        (
            axes(kv=(2, 10), token=(4, 60), head=(3, 20), elem=(5, 2)),
            axes(kv=(2, 10), token=(8, 60), head=(3, 20), elem=(5, 2)),
            ["kv", "token", "head"],
            240,
            ("kv", "head", "token"),
        ),
    ],
)
def test_a_run_takes_in_every_axis_that_goes_on_on_both_sides(
    engine: Axes, chunk: Axes, counted: list[str], run: int, fused: tuple[str, ...]
) -> None:
    found = geometry.fuse(engine, chunk, counted, 2)
    assert (found.run, found.axes) == (run, fused)
    assert found.counts == {axis: 1 if axis in fused else engine.extents[axis] for axis in counted}


def test_a_row_of_the_geometry_array_is_filled_by_the_names_of_its_columns() -> None:
    row = {"head": (3, 5), "elem": (5, 1)}
    engine = axes(layer=(9, 1000), kv=(2, 500), block=(7, 90), token=(6, 15), **row)
    chunk = axes(layer=(9, 81), kv=(2, 800), token=(8, 16), **row)
    fused = geometry.fuse(engine, chunk, ["kv", "head"], 1)
    columns = {
        "run": 15,
        "chunk.block": 96,
        "chunk.token": 16,
        "chunk.layer": 81,
        "chunk.kv": 800,
        "chunk.head": 5,
        "engine.layer": 1000,
        "engine.kv": 500,
        "engine.block": 90,
        "engine.token": 15,
        "engine.head": 5,
        "count.kv": 2,
        "count.head": 1,
        "block_size": 6,
    }
    assert geometry.row(tuple(columns), engine, chunk, fused) == list(columns.values())
    backwards = tuple(reversed(columns))
    assert geometry.row(backwards, engine, chunk, fused) == list(columns.values())[::-1]


@every_known_layout_with_kernels
@pytest.mark.parametrize("addressing", select.ADDRESSINGS)
def test_the_selected_runs_are_the_longest_that_are_contiguous_on_both_sides(
    layout: kvloom.Layout, addressing: select.Addressing
) -> None:
    given = sizes(layout)
    cache = layout.bind(layout.empty(**given, dtype=torch.uint8), block_size=given["block_size"])
    found = cache.select("gather", addressing)
    token = {"slots": [0], "blocks": range(given["block_size"])}[addressing]
    at = {
        (cell.engine_bit, cell.chunk_bit, cell.tensor)
        for cell in oracle.cells(
            layout.name, oracle.Geometry(**given, element_bits=8), layout.facts.chunk
        )
        if cell.layer == 0 and cell.block == 0 and cell.token in token
    }
    # A run starts at an element that does not continue one on both sides.
    starts = [(e, c, t) for e, c, t in at if (e - 8, c - 8, t) not in at]
    assert {len(at) // len(starts)} == set(found.run_bytes)
    assert len(found.run_bytes) == given["layers"]
    assert found.refused == ""
    assert f"of {found.run_bytes[0]} bytes per" in found.why
    assert (found.backend, found.kernel) == ("cpu", f"gather_{addressing}")
