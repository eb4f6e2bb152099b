"""The golden of a layout: its IR and the address table of a tiny geometry, as text to review."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvloom_codegen.expr import ZERO, Expr
from kvloom_codegen.ir import ADDRESSINGS, Component, Dim, Kernel, LayoutIR
from kvloom_codegen.lower import lower, moves
from kvloom_codegen.nest import kernels, unsupported
from kvloom_codegen.printers.text import bits_as_bytes, plain
from kvloom_codegen.spec import ChunkSpec, LayoutSpec
from kvloom_codegen.walk import Geometry, tiny


def golden(spec: LayoutSpec, chunk: ChunkSpec) -> str:
    """The text of tests/goldens/layouts/<NAME>.txt."""
    ir = lower(spec, chunk)
    reason = unsupported(spec, ir)
    lines = [f"{spec.layout} against chunk {chunk.chunk}", ""]
    lines += ["components (strides in bytes)", *_components(ir.components)]
    for addressing in ADDRESSINGS:
        lines += ["", f"moves by {addressing}", *_components(moves(ir, addressing))]
    if reason:
        lines += ["", f"no kernels: {reason}"]
    else:
        for kernel in kernels(spec, chunk, ir):
            lines += ["", *_kernel(kernel)]
    lines += ["", *_table(ir, tiny(spec))]
    return "\n".join(lines) + "\n"


def _components(components: tuple[Component, ...]) -> Iterator[str]:
    for one in components:
        bases = (plain(one.pointer), bits_as_bytes(one.engine), bits_as_bytes(one.chunk))
        yield f"  {one.name or 'row'}: pointer {bases[0]}, engine {bases[1]}, chunk {bases[2]}"
        for dim in one.dims:
            yield f"    {_dim(dim)}"
        yield f"    run {bits_as_bytes(one.run)}"


def _dim(dim: Dim) -> str:
    steps = []
    if dim.pointer != ZERO:
        steps.append(f"pointer {plain(dim.pointer)}")
    if dim.engine != ZERO:
        steps.append(f"engine {bits_as_bytes(dim.engine)}")
    steps.append(f"chunk {bits_as_bytes(dim.chunk)}")
    return f"{dim.axis} × {plain(dim.extent)}: {', '.join(steps)}"


def _kernel(kernel: Kernel) -> Iterator[str]:
    yield f"{kernel.name}, geometry columns {', '.join(kernel.columns)}"
    for depth, loop in enumerate(kernel.loops):
        indent = "  " * (depth + 1)
        yield f"{indent}{loop.variable} from {plain(loop.first)} to {plain(loop.last)}"
        if loop.position:
            yield f"{indent}  {loop.position} of order[{loop.variable}]"
        if loop.entry:
            skip = ", negative skipped" if loop.skips else ""
            yield f"{indent}  {loop.entry} of index[{loop.position}]{skip}"
        for name, value in loop.lets:
            yield f"{indent}  {name} = {plain(value)}"
        if depth == kernel.pointer_level:
            yield f"{indent}  engine + pointers[{plain(kernel.pointer)}]"
        if loop.engine != ZERO:
            yield f"{indent}  engine + {plain(loop.engine)}"
        yield f"{indent}  chunk + {plain(loop.chunk)}"
    yield f"{'  ' * (len(kernel.loops) + 1)}copy {plain(kernel.run)} bytes"


def _table(ir: LayoutIR, geometry: Geometry) -> Iterator[str]:
    sizes = ", ".join(
        f"{name}={value}" for name, value in geometry.symbols.items() if name != "PAD"
    )
    yield f"addresses of every run by slots, {sizes}"
    yield "  part | axes | tensor | byte | chunk byte | bytes"
    values = ir.values(geometry.symbols)
    for component in moves(ir, "slots"):
        start = [base.evaluate(values) for base in _bases(component)]
        run = _bytes(component.run.evaluate(values))
        for place, (tensor, engine, chunk) in _steps(component.dims, start, values):
            where = " ".join(f"{axis}={i}" for axis, i in place)
            at = f"{tensor} | {_bytes(engine)} | {_bytes(chunk)} | {run}"
            yield f"  {component.name or 'row'} | {where} | {at}"


def _bases(component: Component) -> tuple[Expr, Expr, Expr]:
    return component.pointer, component.engine, component.chunk


def _steps(
    dims: tuple[Dim, ...], at: list[int], values: Mapping[str, int]
) -> Iterator[tuple[list[tuple[str, int]], list[int]]]:
    if not dims:
        yield [], at
        return
    dim, rest = dims[0], dims[1:]
    steps = [one.evaluate(values) for one in (dim.pointer, dim.engine, dim.chunk)]
    for i in range(dim.extent.evaluate(values)):
        moved = [base + i * step for base, step in zip(at, steps, strict=True)]
        for place, end in _steps(rest, moved, values):
            yield [(dim.axis, i), *place], end


def _bytes(bits: int) -> str:
    whole, rest = divmod(bits, 8)
    return f"{whole}+{rest}b" if rest else str(whole)
