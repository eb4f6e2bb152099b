"""The proof refuses what is wrong: mutants of every layout's IR and kernels, one fault at a time.

A mutant is left out only where it is the same object as what it was made from: expressions have
one canonical form, so equal strides are equal objects. Nothing is left out by its values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

import pytest

from declared import CHUNKS, LAYOUTS
from kvloom._abi import Kernels
from kvloom_codegen import prove
from kvloom_codegen.calls import Call
from kvloom_codegen.checks import load
from kvloom_codegen.expr import ONE, ZERO, Expr, Quotient, RoundUp, Symbol, Term, symbol, to_expr
from kvloom_codegen.ir import Addressing, Component, Dim, Kernel, LayoutIR, Loop
from kvloom_codegen.lower import fuse, lower
from kvloom_codegen.nest import columns, kernels, unsupported
from kvloom_codegen.problems import SpecError
from kvloom_codegen.prove import (
    Subject,
    calls_of,
    compatible,
    emitted,
    geometries,
    prove_ir,
    prove_kernel,
    prove_layout,
    subjects,
)
from kvloom_codegen.sources import specs_dir
from kvloom_codegen.spec import AtBind, ChunkSpec, Fuse, LayoutSpec
from kvloom_codegen.table import ProofError

PAD = symbol("PAD")

with_every_layout = pytest.mark.parametrize("name", LAYOUTS)


# --- mutants -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """What is wrong, and the wrong thing."""

    fault: str
    made: LayoutIR | Kernel


def swapped_symbol(expr: Expr, old: str, new: Expr) -> Expr:
    """``expr`` with ``new`` in place of each symbol ``old``."""
    total = ZERO
    for term in expr.terms:
        found = to_expr(term.coefficient)
        for atom in term.factors:
            found = found * swapped_in_atom(atom, old, new)
        total += found
    return total


def swapped_in_atom(atom: Symbol | Quotient | RoundUp, old: str, new: Expr) -> Expr:
    if isinstance(atom, Symbol):
        return new if atom.name == old else Expr((Term(1, (atom,)),))
    if isinstance(atom, RoundUp):
        return Expr((Term(1, (replace(atom, value=swapped_symbol(atom.value, old, new)),)),))
    numerator = swapped_symbol(atom.numerator, old, new)
    divisor = swapped_symbol(atom.divisor, old, new)
    return Expr((Term(1, (replace(atom, numerator=numerator, divisor=divisor),)),))


def wrong_values(expr: Expr, grain: Expr) -> Iterator[tuple[str, Expr]]:
    """Expressions that could stand for ``expr`` by mistake."""
    yield "+ grain", expr + grain
    yield "- grain", expr - grain
    yield "doubled", expr * 2
    yield "zero", ZERO


def misread(expr: Expr, kinds: Sequence[Mapping[str, Expr]]) -> Iterator[tuple[str, Expr]]:
    """``expr`` with one of its symbols taken for another of the same kind."""
    for old in sorted(expr.symbols()):
        for kind in kinds:
            for name, new in kind.items() if old in kind else ():
                yield f"{old} read as {name}", swapped_symbol(expr, old, new)


SIZES = {name: symbol(name) for name in ("NL", "NB", "BS", "NH", "HS", "ITEMBITS", "PAD")}
SIZES["2"] = to_expr(2)


def wrong_parts(whole: Component | Dim, parts: Sequence[str], grain: Expr) -> Iterator[Any]:
    for part in parts:
        value = getattr(whole, part)
        # Pointers and extents are counts, everything else is bits.
        step = ONE if part in ("pointer", "extent") else grain
        for fault, wrong in (*wrong_values(value, step), *misread(value, [SIZES])):
            yield f"{part} {fault}", replace(whole, **{part: wrong})


def ir_mutants(ir: LayoutIR, grain: Expr) -> Iterator[Mutant]:
    for i, component in enumerate(ir.components):
        where = component.name or "row"
        before, after = ir.components[:i], ir.components[i + 1 :]
        yield Mutant(f"{where}: dropped", replace(ir, components=(*before, *after)))
        twice = (*before, component, component, *after)
        yield Mutant(f"{where}: twice", replace(ir, components=twice))
        for fault, wrong in component_mutants(component, grain):
            made = replace(ir, components=(*before, wrong, *after))
            yield Mutant(f"{where}: {fault}", made)
    if ir.view_step is not None:
        step = ir.view_step
        for fault, wrong_step in (*wrong_values(step, grain), *misread(step, [SIZES])):
            yield Mutant(f"view step {fault}", replace(ir, view_step=wrong_step))
        yield Mutant("no views", replace(ir, view_step=None))
    for name, factor in ir.factors.items():
        at_16_bits = to_expr(factor.evaluate({"ITEMBITS": 16}))
        for fault, value in (("doubled", factor * 2), ("of 16 bits only", at_16_bits)):
            yield Mutant(f"{name} {fault}", replace(ir, factors={**ir.factors, name: value}))


def component_mutants(component: Component, grain: Expr) -> Iterator[tuple[str, Component]]:
    yield from wrong_parts(component, ("pointer", "engine", "chunk", "run"), grain)
    parts = ("pointer", "engine", "chunk", "extent")
    for i, dim in enumerate(component.dims):
        before, after = component.dims[:i], component.dims[i + 1 :]
        yield f"{dim.axis} dropped", replace(component, dims=(*before, *after))
        yield f"{dim.axis} twice", replace(component, dims=(*before, dim, dim, *after))
        for fault, wrong in wrong_parts(dim, parts, grain):
            yield f"{dim.axis} {fault}", replace(component, dims=(*before, wrong, *after))
    for (i, one), (j, two) in combinations(enumerate(component.dims), 2):
        for part in parts:
            dims = list(component.dims)
            dims[i] = replace(one, **{part: getattr(two, part)})
            dims[j] = replace(two, **{part: getattr(one, part)})
            fault = f"{part} of {one.axis} and {two.axis} swapped"
            yield fault, replace(component, dims=tuple(dims))


def kernel_mutants(kernel: Kernel, geometry: tuple[str, ...]) -> Iterator[Mutant]:
    """Mutants of a kernel whose layout has the columns ``geometry``."""
    variables = [loop.variable for loop in kernel.loops]
    variables += [name for loop in kernel.loops for name in names_of(loop)]
    arguments = ("NL", "layer_first", "layer_last", "first", "last")
    kinds = [{name: symbol(name) for name in kind} for kind in (geometry, variables, arguments)]

    def wrong(expr: Expr) -> Iterator[tuple[str, Expr]]:
        yield from wrong_values(expr, ONE)
        yield from misread(expr, kinds)

    def made(fault: str, **changes: Any) -> Mutant:
        # Columns are loaded as they are read: a wrong one too, as long as the layout has it.
        return Mutant(fault, with_columns(replace(kernel, **changes), geometry))

    for fault, value in wrong(kernel.pointer):
        yield made(f"pointer {fault}", pointer=value)
    for fault, value in wrong(kernel.run):
        yield made(f"run {fault}", run=value)
    if kernel.pointer != ZERO:
        yield made("tensor taken too early", pointer_level=kernel.pointer_level - 1)
    yield made("tensor never taken", pointer_level=len(kernel.loops))
    for name in kernel.columns:
        kept = tuple(column for column in kernel.columns if column != name)
        yield Mutant(f"{name} not loaded", replace(kernel, columns=kept))
    for i, loop in enumerate(kernel.loops):
        before, after = kernel.loops[:i], kernel.loops[i + 1 :]
        yield made(f"{loop.axis} loop dropped", loops=(*before, *after))
        yield made(f"{loop.axis} loop twice", loops=(*before, loop, loop, *after))
        if i:
            yield made(f"{loop.axis} loop before layers", loops=(loop, *before, *after))
        for fault, wrong_loop in loop_mutants(loop, wrong):
            yield made(f"{loop.axis} loop: {fault}", loops=(*before, wrong_loop, *after))


def names_of(loop: Loop) -> list[str]:
    """What is read and worked out at a level, besides its variable."""
    return [name for name in (loop.position, loop.entry, *dict(loop.lets)) if name]


def loop_mutants(
    loop: Loop, wrong: Callable[[Expr], Iterator[tuple[str, Expr]]]
) -> Iterator[tuple[str, Loop]]:
    for part in ("first", "last", "engine", "chunk"):
        for fault, value in wrong(getattr(loop, part)):
            yield f"{part} {fault}", replace(loop, **{part: value})
    for i, (name, value) in enumerate(loop.lets):
        before, after = loop.lets[:i], loop.lets[i + 1 :]
        yield f"{name} not worked out", replace(loop, lets=(*before, *after))
        for fault, wrong_value in wrong(value):
            lets = (*before, (name, wrong_value), *after)
            yield f"{name} {fault}", replace(loop, lets=lets)
    if loop.lets:
        yield "names in the wrong order", replace(loop, lets=loop.lets[::-1])
    if loop.entry:
        yield "entry not read", replace(loop, entry="")
        yield "order not read", replace(loop, position="")
    if loop.skips:
        yield "negative entries not skipped", replace(loop, skips=False)


def with_columns(kernel: Kernel, geometry: tuple[str, ...]) -> Kernel:
    used = kernel.run.symbols() | kernel.pointer.symbols()
    for loop in kernel.loops:
        parts = (loop.first, loop.last, loop.engine, loop.chunk, *dict(loop.lets).values())
        used |= {name for part in parts for name in part.symbols()}
    return replace(kernel, columns=tuple(name for name in geometry if name in used))


# --- what they are made from ---------------------------------------------------------------------


@dataclass(frozen=True)
class Original:
    """A layout's own IR and kernels, and what they are proved on, the cheapest first."""

    spec: LayoutSpec
    ir: LayoutIR
    kernels: tuple[Kernel, ...]
    subjects: tuple[Subject, ...]

    @property
    def grain(self) -> Expr:
        """One element; of several widths the narrowest."""
        declared = self.spec.declared_fields.values()
        if declared:
            return to_expr(min(one.element_bits for one in declared))
        return symbol("ITEMBITS")

    @cached_property
    def calls(self) -> list[tuple[Subject, Call]]:
        found = [(one, call) for one in self.subjects for call in calls_of(one, self.ir)]
        return sorted(found, key=lambda pair: (len(pair[0].places), not pair[1].unlike))


@cache
def original(name: str) -> Original:
    spec = narrow(LAYOUTS[name])
    chunk = CHUNKS[spec.chunk]
    found = sorted(subjects(spec, [chunk]), key=lambda one: len(one.places))
    return Original(spec, lower(spec, chunk, pad=PAD), emitted(spec, [chunk]), tuple(found))


def narrow(spec: LayoutSpec) -> LayoutSpec:
    """The same tree with fewer elements to a row: there are many mutants to interpret."""
    changes: dict[str, Any] = {"split": dict.fromkeys(spec.split, "8/itemsize")}
    if isinstance(spec.fields, AtBind):
        planes = spec.fields.at_bind.example
        small = tuple(plane.model_copy(update={"width": 3 + i}) for i, plane in enumerate(planes))
        example = spec.fields.at_bind.model_copy(update={"example": small})
        changes["fields"] = spec.fields.model_copy(update={"at_bind": example})
    else:
        changes["fields"] = {
            name: one.model_copy(update={"width": narrow_width(one.width, 3 + i)})
            for i, (name, one) in enumerate(spec.fields.items())
        }
    if spec.pad is not None and isinstance(spec.pad.block, int):
        # Fewer bytes than a block, so that what is rounded up still depends on what is in it.
        changes["pad"] = spec.pad.model_copy(update={"block": 7})
    return spec.model_copy(update=changes)


def narrow_width(width: int | str, few: int) -> int | str:
    if isinstance(width, str):
        return "HS/2" if "/" in width else width
    return min(width, few)


# --- every mutant is refused ---------------------------------------------------------------------

NAMES_ELEMENTS = re.compile(
    r"two elements collide at (chunk|engine) bit -?\d+.*: .* and (chunk|engine) bit -?\d+"
    r"|touches engine bit -?\d+ of tensor -?\d+ \(.*\), which it must leave alone"
    r"|but it belongs with chunk bit|never moves engine bit .*elem"
    r"|reads .*, which it does not have|divides by zero|the views lie"
)


def steps_only(ir: LayoutIR) -> LayoutIR:
    """The IR without dims that take one step, whose strides never count."""
    components = [
        replace(one, dims=tuple(dim for dim in one.dims if dim.extent != ONE))
        for one in ir.components
    ]
    return replace(ir, components=tuple(components))


def refusal(proofs: Iterable[Callable[[], None]]) -> str:
    """The first of ``proofs`` that fails, in its own words; nothing where all pass."""
    for prove_one in proofs:
        try:
            prove_one()
        except ProofError as error:
            return str(error)
    return ""


@with_every_layout
def test_every_mutant_of_an_ir_is_refused(name: str) -> None:
    one = original(name)

    def refused(ir: LayoutIR) -> str:
        return refusal(partial(prove_ir, subject, ir) for subject in one.subjects)

    assert refused(one.ir) == ""
    mutants = [
        mutant
        for mutant in ir_mutants(one.ir, one.grain)
        if steps_only(mutant.made) != steps_only(one.ir)
    ]
    said = {mutant.fault: refused(mutant.made) for mutant in mutants}
    assert [fault for fault, words in said.items() if not words] == []
    assert [words for words in said.values() if not NAMES_ELEMENTS.search(words)] == []
    assert len(said) > 100


KERNELS = {
    f"{name}-{kernel.name}": (name, kernel) for name in LAYOUTS for kernel in original(name).kernels
}


@pytest.mark.parametrize(("name", "kernel"), KERNELS.values(), ids=KERNELS)
def test_every_mutant_of_a_kernel_is_refused(name: str, kernel: Kernel) -> None:
    one = original(name)

    def refused(made: Kernel) -> str:
        return refusal(partial(prove_kernel, subject, made, call) for subject, call in one.calls)

    assert refused(kernel) == ""
    geometry = columns(one.ir.components[0])
    mutants = [mutant for mutant in kernel_mutants(kernel, geometry) if mutant.made != kernel]
    said = {mutant.fault: refused(mutant.made) for mutant in mutants}
    assert [fault for fault, words in said.items() if not words] == []
    assert [words for words in said.values() if not NAMES_ELEMENTS.search(words)] == []
    assert len(said) > 100


# --- what else the proof sees --------------------------------------------------------------------


def fused_on_the_engine_alone(component: Component, addressing: Addressing) -> Component:
    """The rule of runs without its other half."""
    blind = replace(component, dims=tuple(replace(d, chunk=d.engine) for d in component.dims))
    fused = fuse(blind, addressing)
    return replace(fused, dims=tuple(d for d in component.dims if fused.dim(d.axis)))


def test_a_run_must_be_contiguous_in_the_chunk_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_moves(ir: LayoutIR, addressing: Addressing) -> tuple[Component, ...]:
        return tuple(fused_on_the_engine_alone(one, addressing) for one in ir.components)

    monkeypatch.setattr(prove, "moves", wrong_moves)
    with pytest.raises(ProofError, match="runs by slots: two elements collide at chunk bit"):
        prove_layout(LAYOUTS["NL_X_NB_BS_NH_CS"], [CHUNKS["two_plane"]])


def test_components_with_a_gap_between_them_must_not_be_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong_moves(ir: LayoutIR, addressing: Addressing) -> tuple[Component, ...]:
        first, *rest = (fuse(one, addressing) for one in ir.components)
        return (replace(first, run=sum((one.run for one in rest), first.run)),)

    monkeypatch.setattr(prove, "moves", wrong_moves)
    with pytest.raises(ProofError, match="runs by slots: two elements collide at engine bit"):
        prove_layout(LAYOUTS["NL_X_NB_BSV_BSS"], [CHUNKS["record"]])


def padded_subject() -> tuple[Subject, LayoutIR]:
    spec, chunk = LAYOUTS["NL_X_NB_TWO_BS_NH_HS"], CHUNKS["two_plane"]
    (subject,) = (one for one in subjects(spec, [chunk]) if one.geometry.pad)
    return subject, lower(spec, chunk, pad=PAD)


def test_a_block_stride_without_the_padding_lands_in_the_padding() -> None:
    subject, ir = padded_subject()
    with pytest.raises(ProofError, match=r"touches engine bit \d+ of tensor 0 \(padding\), which"):
        prove_ir(subject, lower(subject.spec, subject.chunk))
    prove_ir(subject, ir)


def test_a_copy_of_padding_alone_is_refused() -> None:
    subject, ir = padded_subject()
    (component,) = ir.components
    block = component.dim("block")
    assert block is not None
    chunk_end = max(move.chunk + move.bits for move in subject.payload)
    extra = replace(
        component, dims=(), run=PAD, engine=block.engine - PAD, chunk=to_expr(chunk_end)
    )
    with pytest.raises(ProofError, match=r"components: touches .* \(padding\), which it must"):
        prove_ir(subject, replace(ir, components=(component, extra)))


def test_padding_up_to_a_multiple_is_padding() -> None:
    spec, chunk = LAYOUTS["DEEPSEEK_V4_SPARSE"], CHUNKS["record"]
    subject = next(subjects(spec, [chunk]))
    with pytest.raises(ProofError, match=r"\(padding\)"):
        prove_ir(subject, lower(spec.model_copy(update={"pad": None}), chunk))


def test_a_view_that_runs_into_another_layer_collides() -> None:
    spec, chunk = LAYOUTS["BLHNC"], CHUNKS["packed"]
    subject = next(subjects(spec, [chunk]))
    ir = lower(spec, chunk)
    (component,) = ir.components
    dims = [replace(d, extent=d.extent * 2) if d.axis == "head" else d for d in component.dims]
    wrong = replace(ir, components=(replace(component, dims=tuple(dims)),))
    with pytest.raises(ProofError, match=r"collide at engine bit \d+ of tensor 0 \(layer 1 "):
        prove_ir(subject, wrong)


def test_a_spec_that_fails_is_refused_with_the_two_elements_that_collide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, stem in (("layouts", "NL_X_NB_BS_HS"), ("chunks", "one_plane")):
        (tmp_path / kind).mkdir()
        file = specs_dir() / kind / f"{stem}.yaml"
        (tmp_path / kind / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")

    def tokens_too_close(spec: LayoutSpec, chunk: ChunkSpec, pad: Expr = ZERO) -> LayoutIR:
        ir = lower(spec, chunk, pad)
        (component,) = ir.components
        close = [
            replace(dim, engine=symbol("ITEMBITS")) if dim.axis == "token" else dim
            for dim in component.dims
        ]
        return replace(ir, components=(replace(component, dims=tuple(close)),))

    load(tmp_path)
    monkeypatch.setattr(prove, "lower", tokens_too_close)
    with pytest.raises(SpecError) as failure:
        load(tmp_path)
    (problem,) = failure.value.problems
    assert re.fullmatch(
        r"specs/layouts/NL_X_NB_BS_HS\.yaml:\d+:\d+: memory: the proof fails: .*: components: "
        r"two elements collide at engine bit 16 of tensor 0 \(layer 0 block 0 token 0 elem 1\): "
        r"chunk bit 16 \(layer 0 chunk token 0 elem 1\) "
        r"and chunk bit 32 \(layer 0 chunk token 1 elem 0\)",
        str(problem),
    )


# --- what the proof is carried out on ------------------------------------------------------------


def values_on(spec: LayoutSpec, sizes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The value of each size on all geometries of the proof; ``2`` is the K/V axis's length."""
    found = [{**one.symbols, "2": 2} for one in geometries(spec)]
    return {name: tuple(values[name] for values in found) for name in sizes}


def test_no_two_products_of_sizes_agree_on_all_geometries() -> None:
    sizes = values_on(LAYOUTS["NL_X_TWO_NB_BS_NH_HS"], ("2", "NL", "NB", "BS", "NH", "HS"))
    products: dict[tuple[int, ...], tuple[int, ...]] = {}
    for powers in product(range(3), repeat=len(sizes)):
        values = tuple(
            prod(size**power for size, power in zip(on_one, powers, strict=True))
            for on_one in zip(*sizes.values(), strict=True)
        )
        assert products.setdefault(values, powers) == powers


@with_every_layout
def test_no_two_sizes_agree_on_all_geometries(name: str) -> None:
    spec = LAYOUTS[name]
    sizes = ["2", "NL", "NB", "BS", "ITEMBITS"]
    heads = ["NH"] if geometries(spec)[0].heads > 1 else []
    values = values_on(spec, [*sizes, *heads, "HS"])
    assert len(set(values.values())) == len(values)


@with_every_layout
def test_padded_blocks_and_other_element_sizes_are_proved(name: str) -> None:
    found = geometries(LAYOUTS[name])
    assert {geometry.pad > 0 for geometry in found} == {True, False}
    assert len({geometry.itembits for geometry in found}) > 1


@with_every_layout
def test_no_two_columns_agree_on_all_calls(name: str) -> None:
    one = original(name)
    if not one.kernels:
        return
    rows = [row for _, call in one.calls for row in call.rows]
    for first, second in combinations(columns(one.ir.components[0]), 2):
        assert any(row[first] != row[second] for row in rows), (first, second)


@with_every_layout
def test_kernels_are_those_of_the_dataclass_and_at_most_eight(name: str) -> None:
    found = [kernel.name for kernel in original(name).kernels]
    assert len(found) <= 8
    assert not found or sorted(found) == sorted(field.name for field in fields(Kernels))


@with_every_layout
def test_kernels_do_not_depend_on_the_padding_they_are_proved_with(name: str) -> None:
    spec = LAYOUTS[name]
    chunk = CHUNKS[spec.chunk]
    tight, padded = lower(spec, chunk), lower(spec, chunk, pad=PAD)
    assert unsupported(spec, tight) == unsupported(spec, padded)
    if not unsupported(spec, tight):
        assert kernels(spec, chunk, tight) == kernels(spec, chunk, padded)


def test_rows_that_are_not_contiguous_are_proved_but_have_no_kernels() -> None:
    spec = LAYOUTS["NL_X_NB_BS_HS"].model_copy(update={"memory": ("block", "elem", "token")})
    prove_layout(spec, CHUNKS.values())
    assert "elem is not innermost" in unsupported(spec, lower(spec, CHUNKS[spec.chunk]))
    assert not emitted(spec, CHUNKS.values())


@pytest.mark.parametrize("fused", [("token", "block"), ("block", "kv", "token"), ("token", "head")])
def test_dimensions_that_hide_two_sizes_are_proved_but_have_no_kernels(fused: Any) -> None:
    rest = [axis for axis in ("block", "kv", "token", "head") if axis not in fused]
    memory = (*rest, Fuse(fuse=fused), "elem")
    spec = LAYOUTS["NL_X_TWO_NB_BS_NH_HS"].model_copy(update={"memory": memory})
    prove_layout(spec, CHUNKS.values())
    assert "can't be read from the dimension" in unsupported(spec, lower(spec, CHUNKS[spec.chunk]))


def test_the_emitted_kernels_are_proved_against_every_chunk_layout_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proved: set[tuple[str, str, str]] = set()

    def record(subject: Subject, kernel: Kernel, call: Call) -> None:
        proved.add((subject.spec.layout, subject.chunk.chunk, kernel.name))

    monkeypatch.setattr(prove, "prove_kernel", record)
    for spec in LAYOUTS.values():
        prove_layout(spec, CHUNKS.values())
    assert proved == {
        (name, chunk.chunk, kernel.name)
        for name, spec in LAYOUTS.items()
        for chunk in CHUNKS.values()
        if compatible(spec, chunk)
        for kernel in emitted(spec, [CHUNKS[spec.chunk]])
    }
