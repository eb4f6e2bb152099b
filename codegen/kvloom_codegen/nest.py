"""From components to kernels: the loop nest of each operator, in columns of the geometry array."""

from __future__ import annotations

from kvloom_codegen.expr import ZERO, Expr, symbol
from kvloom_codegen.ir import (
    ADDRESSINGS,
    OPS,
    Addressing,
    Ahead,
    Component,
    Kernel,
    LayoutIR,
    Loop,
    Op,
)
from kvloom_codegen.spec import ChunkSpec, Fuse, LayoutSpec

# Every column a geometry array may have, in order; a layout has those that its axes need.
COLUMNS = (
    "block_size",
    "count.kv",
    "count.token",
    "count.head",
    "engine.layer",
    "engine.kv",
    "engine.block",
    "engine.token",
    "engine.head",
    "chunk.layer",
    "chunk.kv",
    "chunk.block",
    "chunk.token",
    "chunk.head",
    "run",
)


def column(name: str) -> Expr:
    """The value of one column in the row of the layer at hand."""
    if name not in COLUMNS:
        raise KeyError(f"no column {name}")
    return symbol(name)


def unsupported(spec: LayoutSpec, ir: LayoutIR) -> str:
    """Why no CPU kernel is generated for a layout, or nothing where one is."""
    if spec.declared_fields:
        names = ", ".join(spec.declared_fields)
        return f"its rows are made of fields ({names}), and kernels for fields are not generated"
    if spec.split:
        names = " and ".join(sorted({dim.axis for c in ir.components for dim in c.dims} & _HALVES))
        return f"an axis is split ({names}), and kernels for split axes are not generated"
    if len(ir.components) > 1:
        names = ", ".join(component.name or "region" for component in ir.components)
        return f"its memory has parts of different order ({names}), which no kernel moves"
    for item in spec.memory:
        fused = item.fuse if isinstance(item, Fuse) else ()
        hidden = [axis for axis in fused if axis not in ("kv", "one")]
        # Slots are the one exception: they are counted through blocks.
        if len(hidden) > 1 and fused != ("block", "token"):
            names = " and ".join(hidden)
            return f"the sizes of {names} can't be read from the dimension that fuses them"
    if ir.components[0].dims[-1].axis != "elem":
        return "its rows are not contiguous (elem is not innermost), and kernels copy whole rows"
    return ""


_HALVES = {"elem/x", "elem%x", "token/x", "token%x"}


def columns(component: Component) -> tuple[str, ...]:
    """The columns of a layout's geometry array."""
    needed = {"block_size", "run", "chunk.block", "chunk.token", "count.token"}
    for dim in component.dims:
        if dim.axis == "elem":
            continue
        if dim.pointer == ZERO:
            needed.add(f"engine.{dim.axis}")
        needed.add(f"chunk.{dim.axis}")
        if dim.axis in ("kv", "head"):
            needed.add(f"count.{dim.axis}")
    return tuple(name for name in COLUMNS if name in needed)


def kernels(spec: LayoutSpec, chunk: ChunkSpec, ir: LayoutIR) -> tuple[Kernel, ...]:
    """The four kernels of a layout that ``unsupported`` has nothing against."""
    (component,) = ir.components
    return tuple(
        _kernel(component, chunk, op, addressing) for op in OPS for addressing in ADDRESSINGS
    )


def _kernel(component: Component, chunk: ChunkSpec, op: Op, addressing: Addressing) -> Kernel:
    loops = [_loop(component, axis, addressing) for axis in _order(component, chunk, addressing)]
    pointer, level = ZERO, 0
    for depth, loop in enumerate(loops):
        dim = component.dim(loop.axis)
        if dim is not None and dim.pointer != ZERO:
            pointer += symbol(loop.variable) * dim.pointer
            level = depth
    used = set().union(*(_names(loop) for loop in loops)) | {"run"}
    read = tuple(name for name in COLUMNS if name in used)
    ahead = _ahead(loops, level) if op == "gather" and addressing == "slots" else None
    return Kernel(op, addressing, read, tuple(loops), pointer, level, column("run"), ahead)


def _order(component: Component, chunk: ChunkSpec, addressing: Addressing) -> tuple[str, ...]:
    """The loops from outermost to innermost.

    Layers come first, since geometry is per layer and work is split by layer. Below them the chunk
    is walked in its own order: of the two sides it is the one that lies in order, so processors
    foresee what is read of it, and whole lines are written to it.
    """
    inner = {"kv", "head"} | ({"token"} if addressing == "blocks" else set())
    axes = {dim.axis for dim in component.dims}
    order = ["layer"]
    for axis in chunk.order:
        order += ["index"] if axis == "token" else []
        order += [axis] if axis in inner & axes else []
    return tuple(order)


def _loop(component: Component, axis: str, addressing: Addressing) -> Loop:
    if axis == "layer":
        first, last = symbol("layer_first"), symbol("layer_last")
    elif axis == "index":
        return _index_loop(addressing)
    else:
        first, last = ZERO, column(f"count.{axis}")
    step = symbol(axis)
    dim = component.dim(axis)
    on_engine = dim is not None and dim.pointer == ZERO
    engine = step * column(f"engine.{axis}") if on_engine else ZERO
    chunk = step * column(f"chunk.{axis}")
    return Loop(axis, axis, first, last, engine, chunk)


def _index_loop(addressing: Addressing) -> Loop:
    first, last, position = symbol("first"), symbol("last"), symbol("position")
    if addressing == "blocks":
        engine, chunk = symbol("block") * column("engine.block"), position * column("chunk.block")
        return Loop("index", "number", first, last, engine, chunk, "position", "block")
    lets, engine = _of_slot("slot", "block", "token")
    chunk = position * column("chunk.token")
    return Loop("index", "number", first, last, engine, chunk, "position", "slot", lets, skips=True)


def _of_slot(slot: str, block: str, token: str) -> tuple[tuple[tuple[str, Expr], ...], Expr]:
    """A slot's block and token, by these names, and its step in the engine."""
    size = column("block_size")
    lets = ((block, symbol(slot) // size), (token, symbol(slot) - symbol(block) * size))
    steps = {block: column("engine.block"), token: column("engine.token")}
    return lets, sum((symbol(name) * step for name, step in steps.items()), ZERO)


def _ahead(loops: list[Loop], pointer_level: int) -> Ahead | None:
    """The rows of a later slot; None where its tensor is only known further in."""
    depth = next(depth for depth, loop in enumerate(loops) if loop.axis == "index")
    if pointer_level > depth:
        return None
    lets, engine = _of_slot("slot_ahead", "block_ahead", "token_ahead")
    return Ahead("slot_ahead", lets, engine, tuple(loops[depth + 1 :]))


def _names(loop: Loop) -> set[str]:
    names = loop.engine.symbols() | loop.chunk.symbols() | loop.last.symbols()
    for _, value in loop.lets:
        names |= value.symbols()
    return names
