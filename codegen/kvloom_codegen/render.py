"""Fills the templates: everything a template prints is worked out here, as text."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvloom_codegen.drawing import draw, shape
from kvloom_codegen.expr import ZERO, Expr, symbol
from kvloom_codegen.ir import ADDRESSINGS, Component, Kernel, LayoutIR
from kvloom_codegen.lower import lower, moves
from kvloom_codegen.nest import columns, kernels, unsupported
from kvloom_codegen.printers import python, torch
from kvloom_codegen.printers.literals import Call, field_lines
from kvloom_codegen.printers.text import bits_as_bytes, plain
from kvloom_codegen.spec import ChunkSpec, Fuse, LayoutSpec, ModelSpec, axis_words

WIDTH = 100
CHUNK_EXTENTS = {"layer": "NL", "token": "T", "kv": "2", "head": "NH", "elem": "HS"}


@cache
def environment() -> Environment:
    """The one Jinja environment: an undefined name is an error, and text is not escaped."""
    return Environment(
        loader=PackageLoader("kvloom_codegen"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(template: str, **values: Any) -> str:
    """One output file's text."""
    return environment().get_template(f"{template}.j2").render(**values)


# --- a layout's module ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnText:
    """One column of the geometry array: its constant's name and its place."""

    constant: str
    place: int


def layout_module(spec: LayoutSpec, chunk: ChunkSpec) -> str:
    """The Python module of one layout: facts, and kernels where there are any."""
    ir = lower(spec, chunk)
    reason = unsupported(spec, ir)
    found = () if reason else kernels(spec, chunk, ir)
    names = () if reason else columns(ir.components[0])
    return render(
        "layout.py",
        name=spec.layout,
        title=_title(spec),
        doc=textwrap.wrap(spec.doc, WIDTH),
        drawing=draw(spec),
        address_lead=_address_lead(ir),
        address=_address(ir),
        facts=_facts(spec, names, reason),
        columns=[ColumnText(python.constant(name), i) for i, name in enumerate(names)],
        kernels=[python.kernel(one) for one in found],
        helpers=", ".join(_helpers(found)),
        views=torch.views(_tensor_axes(spec)[0], spec.lists) if found else None,
    )


def _helpers(found: tuple[Kernel, ...]) -> list[str]:
    """What the kernels use of the runtime's helpers."""
    prefetch = ["AHEAD", "prefetch"] if any(one.ahead is not None for one in found) else []
    return sorted([*prefetch, "copy", "finish", "kernel"])


def _title(spec: LayoutSpec) -> str:
    return f"{spec.layout}: {', '.join(engine.name for engine in spec.engines)}."


def _address_lead(ir: LayoutIR) -> str:
    what = "an element" if len(ir.components) == 1 else "an element of each part"
    return f"Where {what} lies, in bytes, in a tight cache (slot = block·BS + token):"


def _address(ir: LayoutIR) -> list[str]:
    lines: list[str] = []
    for component in ir.components:
        indent = "    " if component.name else ""
        lines += [f"{component.name}:"] if component.name else []
        lines += [f"{indent}tensor[{plain(_pointer(component))}]"]
        if component.engine != ZERO:
            lines.append(f"{indent}    + {_grouped(component.engine)}")
        for dim in component.dims:
            if dim.pointer == ZERO:
                lines.append(f"{indent}    + {dim.axis} · {_grouped(dim.engine)}")
    return lines


def _pointer(component: Component) -> Expr:
    total = component.pointer
    for dim in component.dims:
        total += symbol(dim.axis) * dim.pointer
    return total


def _grouped(expr: Expr) -> str:
    text = bits_as_bytes(expr)
    return f"({text})" if " + " in text else text


def _facts(spec: LayoutSpec, names: tuple[str, ...], reason: str) -> list[str]:
    engines = tuple(Call("EngineFacts", name=one.name, alias=one.alias) for one in spec.engines)
    axes, memory = _tensor_axes(spec)
    fields: tuple[tuple[str, object], ...] = (
        ("name", spec.layout),
        ("module", spec.module),
        ("id", spec.id),
        ("attention", spec.attention),
        ("engines", engines),
        ("doc", spec.doc),
        ("lists", spec.lists),
        ("axes", axes),
        ("memory", memory),
        ("views", spec.views),
        ("chunk", spec.chunk),
        ("geometry", names),
        ("unsupported", reason),
    )
    return [line for name, value in fields for line in field_lines(name, value, 4)]


def _tensor_axes(spec: LayoutSpec) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The dimensions of one tensor and the order of its memory; branches end both."""
    axes: list[tuple[str, ...]] = []
    for item in spec.memory:
        if isinstance(item, str) and not (item == "layer" and spec.views):
            axes.append((item,))
        elif isinstance(item, Fuse):
            axes.append(item.fuse)
    plain_items = tuple(item for item in spec.memory if isinstance(item, (str, Fuse)))
    return tuple(axes), tuple(axis_words(plain_items))


# --- docs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunText:
    """What one copy moves, for one part of a layout."""

    part: str
    slots: str
    blocks: str


def layout_page(spec: LayoutSpec, chunk: ChunkSpec) -> str:
    """The docs page of one layout."""
    ir = lower(spec, chunk)
    reason = unsupported(spec, ir)
    link = f"../../generated/kvloom_generated/{spec.module}.py"
    return render(
        "layout.md",
        name=spec.layout,
        doc=spec.doc,
        id="none" if spec.id is None else spec.id,
        engines=", ".join(f"{one.name} (`{one.alias}`)" for one in spec.engines),
        attention=spec.attention.upper(),
        lists=_lists(spec),
        shape=shape(spec),
        chunk=spec.chunk,
        chunk_shape=chunk_shape(chunk),
        kernels=f"none yet: {reason}" if reason else f"[generated for the CPU]({link})",
        drawing=draw(spec),
        address_lead=_address_lead(ir),
        address=_address(ir),
        runs=_runs(ir),
    )


def _lists(spec: LayoutSpec) -> str:
    if not spec.lists:
        return "one tensor in all"
    counts = {"layer": "NL", "kv": "2 (K, V)", "field": "NP planes"}
    levels = " × ".join(counts[axis] for axis in spec.lists)
    return f"{levels}, in this order{', views into one buffer' if spec.views else ''}"


def _runs(ir: LayoutIR) -> list[RunText]:
    sizes: dict[str, dict[str, str]] = {}
    for addressing in ADDRESSINGS:
        for component in moves(ir, addressing):
            part = sizes.setdefault(component.name or "row", {})
            part[addressing] = f"{bits_as_bytes(component.run)} bytes"
    return [
        RunText(name, size.get("slots", "–"), size.get("blocks", "–"))
        for name, size in sizes.items()
    ]


def chunk_shape(chunk: ChunkSpec) -> str:
    """The shape of a chunk tensor: ``[2, NL, T, NH·HS]``."""
    sizes = []
    for dimension in chunk.axes:
        if "field" in dimension:
            sizes.append("row bytes")
        else:
            sizes.append("·".join(CHUNK_EXTENTS[axis] for axis in dimension))
    return f"[{', '.join(sizes)}]"


def layout_table(layouts: tuple[LayoutSpec, ...], chunks: dict[str, ChunkSpec], to: str) -> str:
    """The table of all layouts in Markdown; ``to`` leads to the folder of their pages."""
    lines = [
        "| id | layout | one tensor | held by | kernels |",
        "| --- | --- | --- | --- | --- |",
    ]
    for spec in layouts:
        reason = unsupported(spec, lower(spec, chunks[spec.chunk]))
        engines = ", ".join(engine.name for engine in spec.engines)
        number = "" if spec.id is None else str(spec.id)
        name = f"[`{spec.layout}`]({to}{spec.module}.md)"
        kernel = "declared" if reason else "CPU"
        lines.append(f"| {number} | {name} | `{shape(spec)}` | {engines} | {kernel} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class ChunkText:
    """One chunk layout as text."""

    name: str
    shape: str
    doc: str
    facts: tuple[str, ...]


@dataclass(frozen=True)
class ModelText:
    """One model geometry as text."""

    name: str
    attention: str
    layers: int
    heads: int
    head_size: int
    dtype: str
    doc: str
    facts: tuple[str, ...]


def chunk_text(chunk: ChunkSpec) -> ChunkText:
    """A chunk layout for its templates."""
    fields: tuple[tuple[str, object], ...]
    fields = (("name", chunk.chunk), ("doc", chunk.doc), ("axes", chunk.axes))
    facts = tuple(line for name, value in fields for line in field_lines(name, value, 8))
    return ChunkText(chunk.chunk, chunk_shape(chunk), chunk.doc, facts)


def model_text(model: ModelSpec) -> ModelText:
    """A model geometry for its templates."""
    fields: tuple[tuple[str, object], ...] = (
        ("name", model.model),
        ("doc", model.doc),
        ("attention", model.attention),
        ("layers", model.layers),
        ("heads", model.heads),
        ("head_size", model.head_size),
        ("dtype", model.dtype),
    )
    facts = tuple(line for name, value in fields for line in field_lines(name, value, 8))
    return ModelText(
        model.model,
        model.attention.upper(),
        model.layers,
        model.heads,
        model.head_size,
        model.dtype,
        model.doc,
        facts,
    )
