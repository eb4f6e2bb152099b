"""The generated modules as they stand: what they say, and what their kernels do as plain Python."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvloom_generated
import oracle
from declared import CHUNKS, KNOWN, LAYOUTS
from kvloom._abi import Kernels, LayoutFacts
from kvloom_codegen.render import layout_module
from kvloom_codegen.spec import AtBind, FieldSpec
from kvloom_generated.registry import MODULES
from oracle import Cell, Geometry

FOLDER = Path(kvloom_generated.__file__).parent
# No size is like another, or like that of K/V.
MOVED = Geometry(layers=3, blocks=4, block_size=5, heads=7, head_size=6, element_bits=16)
# The same where axes split, but HS/16 is 1 and x is BS: in the second they are not.
SAID = (
    Geometry(layers=3, blocks=4, block_size=8, heads=5, head_size=16, element_bits=16),
    Geometry(layers=1, blocks=2, block_size=16, heads=3, head_size=48, element_bits=32),
)


def load(module: str) -> ModuleType:
    """A generated module run from its text, apart from the one that the runtime imports."""
    made = ModuleType(module)
    exec(compile((FOLDER / f"{module}.py").read_text(encoding="utf-8"), module, "exec"), vars(made))
    return made


def facts(module: str) -> LayoutFacts:
    found: LayoutFacts = load(module).LAYOUT
    return found


def known(modules: Iterable[str]) -> list[str]:
    """Those whose layout the oracle knows."""
    return [module for module in modules if facts(module).name in KNOWN]


WITH_KERNELS = [module for module in MODULES if not facts(module).unsupported]

with_every_module = pytest.mark.parametrize("module", MODULES)
with_every_known_module = pytest.mark.parametrize("module", known(MODULES))
with_every_module_with_kernels = pytest.mark.parametrize("module", WITH_KERNELS)
with_every_known_module_with_kernels = pytest.mark.parametrize("module", known(WITH_KERNELS))


@lru_cache(maxsize=2)  # tests come module by module, and a table of elements is large
def cells(module: str, geometry: Geometry) -> list[Cell]:
    """Every element of a tight cache, as the oracle sees it."""
    declared = LAYOUTS[facts(module).name]
    planes = oracle.SAMPLE_PLANES
    if isinstance(declared.fields, AtBind):
        parts = declared.declared_fields.values()
        planes = tuple((int(one.width), one.element_bits) for one in parts)
    return list(oracle.cells(declared.layout, geometry, declared.chunk, planes))


# --- what a docstring says ------------------------------------------------------------------------

AXIS_LINE = re.compile(r"^ *(\S+)  .*  (\S.*) bytes each( \(one dimension\))?$", re.MULTILINE)
TENSOR_LINE = re.compile(r"^ *tensor\[(.*)\]$")
STEP_LINE = re.compile(r"^ *\+ (?:(\S+) · )?(.*)$")

with_sizes = pytest.mark.parametrize("sizes", SAID, ids=("unlike", "split"))


def drawing_and_address(module: str) -> tuple[str, str]:
    drawing, lead, address = str(load(module).__doc__).partition("Where an element")
    assert lead
    return drawing, address


def number(text: str, sizes: Geometry, **more: int) -> Fraction:
    """A formula as docstrings write it, such as ``2·BS·HS/2 + 8``, on a geometry."""
    names = {
        "NL": sizes.layers,
        "NB": sizes.blocks,
        "BS": sizes.block_size,
        "NH": sizes.heads,
        "HS": sizes.head_size,
        "x": 128 // sizes.element_bits,
        "itemsize": sizes.element_bits // 8,
        **more,
    }
    values: dict[str, Any] = {name: Fraction(size) for name, size in names.items()}
    values["roundup"] = lambda size, unit: -(-size // unit) * unit
    return Fraction(eval(text.replace("·", "*"), values))


def formulas(module: str) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Part → the index of its tensor, and the bytes of each step: (axis, or nothing; bytes)."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    part = ""
    for line in drawing_and_address(module)[1].splitlines()[1:]:
        if tensor := TENSOR_LINE.match(line):
            found[part] = (tensor[1], [])
        elif step := STEP_LINE.match(line):
            found[part][1].append((step[1] or "", step[2]))
        elif line:
            part = line.strip().removesuffix(":")
    return found


def coordinates(cell: Cell, sizes: Geometry) -> dict[str, int]:
    """The indices of an element by axis, those of the halves of a split axis too."""
    at = {axis: getattr(cell, axis) for axis in ("layer", "kv", "block", "token", "head", "elem")}
    for axis in ("token", "elem"):
        at[f"{axis}/x"], at[f"{axis}%x"] = divmod(at[axis], 128 // sizes.element_bits)
    return {**at, "": 1}


@with_every_module
def test_a_docstring_names_layout_and_engines_and_says_what_bites(module: str) -> None:
    title, doc, *_ = str(load(module).__doc__).split("\n\n")
    declared = LAYOUTS[facts(module).name]
    engines = ", ".join(engine.name for engine in declared.engines)
    assert title == f"{declared.layout}: {engines}."
    assert doc.split() == declared.doc.split()


@with_every_module
@with_sizes
def test_a_docstring_draws_every_axis_as_large_as_its_address_steps(
    sizes: Geometry, module: str
) -> None:
    drawing, _ = drawing_and_address(module)
    drawn = {(axis, number(size, sizes)) for axis, size, _ in AXIS_LINE.findall(drawing)}
    stepped = {
        (axis, number(size, sizes))
        for _, steps in formulas(module).values()
        for axis, size in steps
        if axis
    }
    assert stepped
    assert stepped <= drawn
    # What is drawn and never stepped by: an axis of length 1, and layers that are views.
    assert {axis for axis, _ in drawn - stepped} <= {"one", *facts(module).views}
    lists = re.findall(r"^    (\w+)  .*  a list(?: of views)?$", drawing, re.MULTILINE)
    assert tuple(lists) == facts(module).lists


@with_every_known_module
@with_sizes
def test_a_docstring_gives_the_address_of_every_element(sizes: Geometry, module: str) -> None:
    tensors, steps = {}, {}
    for part, (tensor, added) in formulas(module).items():
        bits = [(axis, 8 * number(size, sizes)) for axis, size in added]
        assert all(size.denominator == 1 for _, size in bits)
        steps[part] = [(axis, int(size)) for axis, size in bits]
        for layer, kv in product(range(sizes.layers), range(2)):
            tensors[part, layer, kv] = number(tensor, sizes, layer=layer, kv=kv)
    for cell in cells(module, sizes):
        plane = ("key", "value")[cell.kv]
        names = (f"{plane} {cell.field}", cell.field, plane)
        part = next(name for name in names if name in steps)
        at = coordinates(cell, sizes)
        bit = sum(at[axis] * size for axis, size in steps[part])
        assert (tensors[part, cell.layer, cell.kv], bit) == (cell.tensor, cell.engine_bit), cell


# --- what kernels are -----------------------------------------------------------------------------

# That this is kvloom._abi.Kernel, mypy sees.
ABI = (
    "(pointers: 'Int64Array', chunk: 'int', {index}: 'Int64Array', order: 'Int64Array', "
    "geometry: 'Int64Array', layer_first: 'int', layer_last: 'int', first: 'int', last: 'int') "
    "-> 'None'"
)


def plain_kernels(module: str, helpers: Memory | None, streaming: bool = False) -> dict[str, Any]:
    """The kernels of a module by name, as Python runs them, with the functions of ``helpers``."""
    made = load(module)
    made.kernel = lambda function: function
    if helpers is not None:
        made.copy, made.prefetch, made.finish = helpers.copy, helpers.prefetch, helpers.finish
    found = made.kernels("the helpers' digest", streaming)
    assert isinstance(found, Kernels)
    return {field.name: getattr(found, field.name) for field in fields(found)}


@with_every_module
def test_a_module_has_kernels_or_says_why_it_has_none(module: str) -> None:
    made = load(module)
    assert hasattr(made, "kernels") != bool(made.LAYOUT.unsupported)
    assert bool(made.LAYOUT.geometry) != bool(made.LAYOUT.unsupported)


@with_every_module_with_kernels
def test_kernels_are_at_most_eight_and_take_what_the_abi_says(module: str) -> None:
    kernels = plain_kernels(module, None)
    assert 2 * len(kernels) <= 8  # each with ordinary and with streaming stores
    for name, kernel in kernels.items():
        assert kernel.__name__ == name
        assert str(inspect.signature(kernel)) == ABI.format(index=name.partition("_")[2])


@with_every_module_with_kernels
def test_kernels_close_over_the_digest_of_their_helpers(module: str) -> None:
    """Closed over, it is part of the key under which numba keeps machine code."""
    for streaming in (False, True):
        for kernel in plain_kernels(module, None, streaming).values():
            found = inspect.getclosurevars(kernel).nonlocals
            assert found == {"helpers": "the helpers' digest", "streaming": streaming}


PLAIN = LAYOUTS["NL_X_TWO_X_NB_BS_NH_HS"]
SPLIT = {"split": {"x": "16/itemsize"}, "memory": ("block", "head", "elem/x", "token", "elem%x")}
FIELDS = {
    "lists": ("layer", "kv", "field"),
    "fields": {name: FieldSpec(dtype="fp8", width=8) for name in "ab"},
    "memory": ("block", "token", "elem"),
    "chunk": "two_plane_record",
}


@pytest.mark.parametrize("changes", [SPLIT, FIELDS], ids=["split", "fields"])
def test_a_layout_that_no_kernel_moves_is_written_without_any(changes: dict[str, Any]) -> None:
    spec = PLAIN.model_copy(update=changes)
    module = layout_module(spec, CHUNKS[spec.chunk])
    assert "kernels(" not in module
    assert "views(tensors" not in module


def test_a_module_imports_what_it_uses() -> None:
    """Where a tensor is only known inside the loop over tokens, nothing is prefetched."""
    memory = ("block", "head", "token", "elem")
    spec = PLAIN.model_copy(update={"memory": memory, "chunk": "packed"})
    module = layout_module(spec, CHUNKS[spec.chunk])
    assert "from kvloom._kernel import copy, finish, kernel\n" in module
    assert "prefetch(" not in module


# --- what kernels do ------------------------------------------------------------------------------

GAP = 61  # bytes that belong to nothing, before and after every tensor and the chunk
SLOTS = (17, -1, 0, 19, -1, 6, 7, 4, 12)
BLOCKS = (2, 0, 3)
# Layers and entries of the order that a call is for: all of them, and some in the middle.
WINDOWS = {"all": (0, None), "some": (1, -1)}


class Memory:
    """The tensors of a cache and a chunk in one address space, with random bytes everywhere."""

    def __init__(self, module: str, streaming: bool) -> None:
        self.cells = cells(module, MOVED)
        sizes = [0] * (1 + max(cell.tensor for cell in self.cells))
        for cell in self.cells:
            end = (cell.engine_bit + cell.bits) // 8
            sizes[cell.tensor] = max(sizes[cell.tensor], end)
        sizes.append(max(cell.chunk_bit + cell.bits for cell in self.cells) // 8)
        *self.pointers, self.chunk, end = accumulate((s + GAP for s in sizes), initial=GAP)
        self.bytes = np.random.default_rng(7).integers(0, 256, end, np.uint8)
        self.streaming = streaming
        self.finished = False
        self.read: set[int] = set()
        self.prefetched: set[int] = set()

    def copy(self, target: int, source: int, nbytes: int, streaming: bool) -> None:
        """What ``copy`` of the kernel helpers does, byte by byte."""
        assert streaming is self.streaming
        assert not self.finished
        assert min(target, source) >= 0
        for i in range(nbytes):
            self.bytes[target + i] = self.bytes[source + i]
            self.read.add(source + i)

    def prefetch(self, source: int, nbytes: int) -> None:
        self.prefetched.update(range(source, source + nbytes))

    def finish(self, streaming: bool) -> None:
        assert streaming is self.streaming
        self.finished = True


def geometry(module: str) -> NDArray[np.int64]:
    """The geometry array of a tight cache, read off the oracle's addresses."""
    at = {cell[:6]: cell for cell in cells(module, MOVED)}
    axes = ("layer", "kv", "block", "token", "head", "elem")

    def column(name: str) -> int:
        side, _, axis = name.partition(".")
        if side == "block_size":
            return MOVED.block_size
        if side == "run":
            return MOVED.head_size * MOVED.element_bits // 8
        if side == "count":
            return {"kv": 2, "token": MOVED.block_size, "head": MOVED.heads}[axis]
        origin, one_on = at[0, 0, 0, 0, 0, 0], at[tuple(int(name == axis) for name in axes)]
        return (getattr(one_on, f"{side}_bit") - getattr(origin, f"{side}_bit")) // 8

    row = [column(name) for name in facts(module).geometry]
    return np.array([row] * MOVED.layers, np.int64)


def expected(
    memory: Memory, op: str, tokens: Mapping[int, int], layers: range
) -> NDArray[np.uint8]:
    """``memory`` after each of ``tokens``, from the chunk's to the slot, was moved by elements."""
    after = memory.bytes.copy()
    by_slot: dict[int, list[Cell]] = {}
    for cell in memory.cells:
        by_slot.setdefault(cell.block * MOVED.block_size + cell.token, []).append(cell)
    for token, slot in tokens.items():
        for there, here in zip(by_slot[slot], by_slot[token], strict=True):
            assert (there[:2], there[4:7]) == (here[:2], here[4:7])
            if there.layer in layers:
                engine = memory.pointers[there.tensor] + there.engine_bit // 8
                chunk = memory.chunk + here.chunk_bit // 8
                target, source = (chunk, engine) if op == "gather" else (engine, chunk)
                size = there.bits // 8
                after[target : target + size] = memory.bytes[source : source + size]
    return after


@pytest.mark.parametrize("streaming", [False, True], ids=["ordinary", "streaming"])
@pytest.mark.parametrize(("start", "stop"), WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("name", [field.name for field in fields(Kernels)])
@with_every_known_module_with_kernels
def test_a_kernel_moves_the_elements_of_its_tokens_and_nothing_else(
    module: str, name: str, start: int, stop: int | None, streaming: bool
) -> None:
    memory = Memory(module, streaming)
    op, _, addressing = name.partition("_")
    index = SLOTS if addressing == "slots" else BLOCKS
    layers, numbers = range(MOVED.layers)[start:stop], range(len(index))[start:stop]
    order = [*range(len(index))[1::2], *range(len(index))[::2]]
    positions = order[numbers.start : numbers.stop]
    if addressing == "slots":
        tokens = {at: index[at] for at in positions if index[at] >= 0}
    else:
        size = MOVED.block_size
        tokens = {at * size + i: index[at] * size + i for at in positions for i in range(size)}
    after = expected(memory, op, tokens, layers)
    assert (after != memory.bytes).any()
    plain_kernels(module, memory, streaming)[name](
        np.array(memory.pointers, np.int64),
        memory.chunk,
        np.array(index, np.int64),
        np.array(order, np.int64),
        geometry(module),
        layers.start,
        layers.stop,
        numbers.start,
        numbers.stop,
    )
    assert (memory.bytes == after).all()
    assert memory.finished
    if name == "gather_slots":
        # Every row but the first few, and of slots that are passed over whatever it may be.
        assert memory.read & memory.prefetched
        assert len(memory.prefetched - memory.read) <= len(memory.prefetched) // 2
    else:
        assert not memory.prefetched
