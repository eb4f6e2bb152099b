"""Prints expressions and loop nests as Python, for numba."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom_codegen.expr import Atom, Expr, Quotient, Symbol, Term
from kvloom_codegen.ir import Ahead, Kernel, Loop

LAYERS = "layers"
WIDTH = 100


def local(column: str) -> str:
    """The variable that holds a column: ``engine.kv`` → engine_kv, ``count.kv`` → kv_count."""
    side, _, axis = column.partition(".")
    if side == "count":
        return f"{axis}_count"
    return f"{side}_{axis}" if axis else side


def constant(column: str) -> str:
    """The module constant that names a column's place in the geometry array."""
    return local(column).upper()


def expression(expr: Expr) -> str:
    """An expression as Python; columns are printed as the locals that hold them."""
    positive = [term for term in expr.terms if term.coefficient > 0]
    negative = [term for term in expr.terms if term.coefficient < 0]
    if not positive and not negative:
        return "0"
    text = " + ".join(_term(term) for term in positive) or "0"
    return "".join([text, *(f" - {_term(Term(-t.coefficient, t.factors))}" for t in negative)])


def _term(term: Term) -> str:
    words = [_atom(atom) for atom in term.factors]
    if term.coefficient != 1 or not words:
        words.insert(0, str(term.coefficient))
    return " * ".join(words)


def _atom(atom: Atom) -> str:
    if isinstance(atom, Symbol):
        return LAYERS if atom.name == "NL" else local(atom.name)
    if isinstance(atom, Quotient):
        return f"{_grouped(atom.numerator)} // {_grouped(atom.divisor)}"
    raise TypeError(f"no kernel rounds up: {atom}")


def _grouped(expr: Expr) -> str:
    text = expression(expr)
    return text if text.isidentifier() or text.isdigit() else f"({text})"


@dataclass(frozen=True)
class LoopText:
    """One loop of a kernel as text: its head, and the lines before the next loop or the copy."""

    indent: str
    head: str
    loads: bool
    lines: tuple[str, ...]


@dataclass(frozen=True)
class KernelText:
    """One kernel as text, ready for its template."""

    name: str
    index: str
    doc: str
    loads: tuple[str, ...]
    loops: tuple[LoopText, ...]
    indent: str
    copy: str


def kernel(one: Kernel) -> KernelText:
    """A loop nest as Python source, piece by piece."""
    index = one.addressing
    engine, chunk = "", "chunk"
    loops = []
    for depth, loop in enumerate(one.loops):
        lines = list(_entry(loop, index))
        before = engine
        pointer = f"pointers[{expression(one.pointer)}]" if depth == one.pointer_level else ""
        step = [] if loop.engine == Expr(()) else [expression(loop.engine)]
        parts = [part for part in (engine, pointer) if part] + step
        if pointer or step:
            engine = f"engine_at_{loop.position or loop.variable}"
            lines += _assignment(engine, " + ".join(parts), indent=12 + 4 * depth)
        at = f"chunk_at_{loop.position or loop.variable}"
        lines.append(f"{at} = {chunk} + {expression(loop.chunk)}")
        chunk = at
        if loop.skips and one.ahead is not None:
            lines += _prefetch(one.ahead, loop, before, expression(one.run), indent=12 + 4 * depth)
        first, last = expression(loop.first), expression(loop.last)
        bounds = last if first == "0" else f"{first}, {last}"
        head = f"for {loop.variable} in range({bounds}):"
        loops.append(LoopText("    " * (2 + depth), head, depth == 0, tuple(lines)))
    loads = [f"{local(name)} = geometry[layer, {constant(name)}]" for name in one.columns]
    if "NL" in one.pointer.symbols():
        loads.insert(0, f"{LAYERS} = geometry.shape[0]")
    source, target = (engine, chunk) if one.op == "gather" else (chunk, engine)
    return KernelText(
        one.name,
        index,
        _doc(one),
        tuple(loads),
        tuple(loops),
        "    " * (2 + len(one.loops)),
        f"copy({target}, {source}, {expression(one.run)}, streaming)",
    )


def _assignment(name: str, value: str, indent: int) -> list[str]:
    if indent + len(name) + len(value) + 3 <= WIDTH:
        return [f"{name} = {value}"]
    return [f"{name} = (", f"    {value}", ")"]


def _entry(loop: Loop, index: str) -> tuple[str, ...]:
    if not loop.entry:
        return ()
    lines = [f"{loop.position} = order[{loop.variable}]"]
    lines.append(f"{loop.entry} = {index}[{loop.position}]")
    if loop.skips:
        lines += [f"if {loop.entry} < 0:", "    continue"]
    lines += [f"{name} = {expression(value)}" for name, value in loop.lets]
    return tuple(lines)


def _prefetch(ahead: Ahead, loop: Loop, engine: str, run: str, indent: int) -> list[str]:
    """Ask for the rows of the slot that is AHEAD positions on, if it does not just follow."""
    last = expression(loop.last)
    lines = [
        f"{ahead.entry} = slots[order[min({loop.variable} + AHEAD, {last} - 1)]]",
        f"if {ahead.entry} != {loop.entry} + AHEAD:",
    ]
    lines += [f"    {name} = {expression(value)}" for name, value in ahead.lets]
    at, inside = "engine_ahead", "    "
    value = f"{engine} + {expression(ahead.engine)}"
    lines += [inside + line for line in _assignment(at, value, indent + len(inside))]
    for inner in ahead.inner:
        lines.append(f"{inside}for {inner.variable} in range({expression(inner.last)}):")
        inside += "    "
        step = f"{at}_{inner.variable}"
        lines.append(f"{inside}{step} = {at} + {expression(inner.engine)}")
        at = step
    return [*lines, f"{inside}prefetch({at}, {run})"]


def _doc(one: Kernel) -> str:
    arrow = "engine → chunk" if one.op == "gather" else "chunk → engine"
    if one.addressing == "slots":
        return f"{arrow}, one token per slot; a negative slot is skipped."
    return f"{arrow}, one block of tokens per block id."
