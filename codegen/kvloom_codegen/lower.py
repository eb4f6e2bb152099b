"""From a spec to the IR: pure functions from trees of axes to strides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kvloom_codegen.expr import ONE, ZERO, Expr, exact_quotient, round_up, symbol, to_expr
from kvloom_codegen.ir import Addressing, Component, Dim, LayoutIR
from kvloom_codegen.spec import (
    ChunkSpec,
    FieldBranch,
    FieldSpec,
    Fuse,
    Item,
    KvBranch,
    LayoutSpec,
    RegionBranch,
    axes_of,
    branch_word,
    members,
    split_item,
)

EXTENTS = {"layer": "NL", "block": "NB", "token": "BS", "head": "NH", "elem": "HS"}
PLANES = ("key", "value")
ITEMBITS = symbol("ITEMBITS")


def item_axes(item: Item) -> tuple[str, ...]:
    """The axes of an item that is no branch, outermost first."""
    if isinstance(item, Fuse):
        return item.fuse
    return (item,) if isinstance(item, str) else ()


def factors(spec: LayoutSpec) -> dict[str, Expr]:
    """The value of every split factor's symbol, in elements."""
    found = {}
    for name, factor in spec.split.items():
        if isinstance(factor, int):
            found[name] = to_expr(factor)
        else:
            found[name] = to_expr(8 * int(factor.split("/")[0])) // ITEMBITS
    return found


def width(field: FieldSpec | None) -> Expr:
    """Elements of one head (or record) of a field, or of a layout without fields."""
    if field is None or field.width == "HS":
        return symbol("HS")
    if isinstance(field.width, int):
        return to_expr(field.width)
    return exact_quotient(symbol("HS"), to_expr(int(field.width.split("/")[1])))


def element_bits(field: FieldSpec | None) -> Expr:
    """Bits of one element of a field, or of a layout without fields."""
    return ITEMBITS if field is None else to_expr(field.element_bits)


@dataclass(frozen=True)
class Context:
    """What is fixed on the way down the tree: the plane, the field, and the padding."""

    spec: LayoutSpec
    pad: Expr
    kv: int | None = None
    field: str | None = None

    @property
    def field_spec(self) -> FieldSpec | None:
        return self.spec.declared_fields[self.field] if self.field is not None else None

    def enter(self, word: str, name: str | int) -> Context:
        if word == "kv":
            return replace(self, kv=PLANES.index(str(name)))
        return replace(self, field=str(name)) if word == "field" else self

    def extent(self, axis: str) -> Expr:
        split = split_item(axis)
        if split:
            whole, part, name = split
            factor = symbol(name)
            return factor if part == "%" else exact_quotient(self.extent(whole), factor)
        if axis == "elem":
            return width(self.field_spec)
        if axis in ("kv", "one"):
            return to_expr(2 if axis == "kv" else 1)
        return symbol(EXTENTS[axis])

    def stride(self, item: Item, axis: str, tight: Expr) -> Expr:
        """The distance between steps of ``axis`` whose inside takes ``tight`` bits."""
        if axis != "block" or item != "block":
            return tight
        padding = self.spec.pad
        if padding is not None and isinstance(padding.block, int):
            tight = round_up(tight, 8 * padding.block)
        return tight + self.pad


def size_of(items: tuple[Item, ...], context: Context) -> Expr:
    """Bits of everything that ``items`` span."""
    if not items:
        return element_bits(context.field_spec)
    item, rest = items[0], items[1:]
    if isinstance(item, (KvBranch, FieldBranch, RegionBranch)):
        return sum((size_of(m, c) for _, m, c in branches(item, context)), ZERO)
    size = size_of(rest, context)
    for axis in reversed(item_axes(item)):
        size = context.stride(item, axis, size) * context.extent(axis)
    return size


def branches(
    branch: KvBranch | FieldBranch | RegionBranch, context: Context
) -> Iterator[tuple[str | int, tuple[Item, ...], Context]]:
    word = branch_word(branch)
    for name, items in members(branch).items():
        yield name, items, context.enter(word, name)


@dataclass(frozen=True)
class _Leaf:
    context: Context
    base: Expr
    steps: tuple[tuple[str, Expr, Expr], ...]  # axis, extent, stride


def _leaves(items: tuple[Item, ...], context: Context, base: Expr) -> Iterator[_Leaf]:
    """Every path from the root of the tree to an element, with the strides along it."""
    if not items:
        yield _Leaf(context, base, ())
        return
    item, rest = items[0], items[1:]
    if isinstance(item, (KvBranch, FieldBranch, RegionBranch)):
        apart = branch_word(item) in context.spec.lists
        for _, member, inside in branches(item, context):
            yield from _leaves(member, inside, base)
            if not apart:
                base += size_of(member, inside)
        return
    for leaf in _leaves(rest, context, base):
        size = size_of(rest, context)
        steps: tuple[tuple[str, Expr, Expr], ...] = ()
        for axis in reversed(item_axes(item)):
            stride = context.stride(item, axis, size)
            steps = ((axis, leaf.context.extent(axis), stride), *steps)
            size = stride * leaf.context.extent(axis)
        yield replace(leaf, steps=steps + leaf.steps)


def chunk_strides(
    spec: LayoutSpec, chunk: ChunkSpec, field: str | None
) -> tuple[dict[str, Expr], Expr]:
    """The tight chunk's stride for each axis, and where ``field`` starts in a row, in bits."""
    fields: dict[str | None, FieldSpec | None] = {None: None}
    if spec.declared_fields:
        fields = dict(spec.declared_fields.items())
    sizes = {name: element_bits(one) for name, one in fields.items()}
    strides: dict[str, Expr] = {}
    base = ZERO
    for axis in reversed(chunk.order):
        if axis == "field":
            names = list(sizes)
            base += sum((sizes[name] for name in names[: names.index(field)]), ZERO)
            total = sum(sizes.values(), ZERO)
            sizes = dict.fromkeys(names, total)
            continue
        strides[axis] = sizes[field]
        for name, one in fields.items():
            sizes[name] = sizes[name] * _chunk_extent(spec, axis, one)
    return strides, base


def _chunk_extent(spec: LayoutSpec, axis: str, field: FieldSpec | None) -> Expr:
    if axis == "elem":
        return width(field)
    if axis == "token":
        return symbol("NB") * symbol("BS")
    if axis not in axes_of(spec):
        return ONE
    return to_expr(2) if axis == "kv" else symbol(EXTENTS[axis])


def _list_strides(spec: LayoutSpec) -> dict[str, Expr]:
    counts = {"layer": symbol("NL"), "kv": to_expr(2)}
    counts["field"] = to_expr(len(spec.declared_fields))
    strides: dict[str, Expr] = {}
    step = ONE
    for axis in reversed(spec.lists):
        strides[axis] = step
        step = step * counts[axis]
    return strides


def lower(spec: LayoutSpec, chunk: ChunkSpec, pad: Expr = ZERO) -> LayoutIR:
    """The components of ``spec`` against ``chunk``; ``pad`` bits more than tight in each block."""
    roots = [Context(spec, pad)]
    if "field" in spec.lists and not _has_branch(spec.memory, FieldBranch):
        roots = [roots[0].enter("field", name) for name in spec.declared_fields]
    components = [
        _component(spec, chunk, leaf) for root in roots for leaf in _leaves(spec.memory, root, ZERO)
    ]
    view_step = None
    if spec.views:
        (leaf,) = _leaves(spec.memory, roots[0], ZERO)
        view_step = next(stride for axis, _, stride in leaf.steps if axis == "layer")
    return LayoutIR(spec.layout, chunk.chunk, tuple(components), view_step, factors(spec))


def _has_branch(items: tuple[Item, ...], kind: type[FieldBranch | KvBranch]) -> bool:
    return any(
        isinstance(item, kind)
        or (
            isinstance(item, (KvBranch, FieldBranch, RegionBranch))
            and any(_has_branch(member, kind) for member in members(item).values())
        )
        for item in items
    )


def _component(spec: LayoutSpec, chunk: ChunkSpec, leaf: _Leaf) -> Component:
    kv, field = leaf.context.kv, leaf.context.field
    in_chunk, chunk_base = chunk_strides(spec, chunk, field)
    lists = _list_strides(spec)
    pointer = ZERO
    dims: list[Dim] = []
    for axis in spec.lists:
        if axis == "field":
            pointer += lists[axis] * list(spec.declared_fields).index(str(field))
        elif axis == "kv" and kv is not None:
            pointer += lists[axis] * kv
        else:
            extent = symbol("NL") if axis == "layer" else to_expr(2)
            dims.append(Dim(axis, extent, lists[axis], ZERO, in_chunk[axis]))
    if kv is not None:
        chunk_base += in_chunk["kv"] * kv
    for axis, extent, stride in leaf.steps:
        if axis == "one" or (axis == "layer" and spec.views):
            continue
        dims.append(Dim(axis, extent, ZERO, stride, _chunk_step(spec, in_chunk, axis)))
    names = [PLANES[kv]] if kv is not None else []
    names += [field] if field is not None else []
    bits = element_bits(leaf.context.field_spec)
    return Component(" ".join(names), pointer, leaf.base, chunk_base, tuple(dims), bits)


def _chunk_step(spec: LayoutSpec, in_chunk: Mapping[str, Expr], axis: str) -> Expr:
    if axis == "block":
        return in_chunk["token"] * symbol("BS")
    split = split_item(axis)
    if split is None:
        return in_chunk[axis]
    whole, part, name = split
    return in_chunk[whole] if part == "%" else in_chunk[whole] * symbol(name)


# --- runs: what is contiguous on both sides moves in one copy -------------------------------------


def fusable(axis: str, addressing: Addressing) -> bool:
    """Whether all steps of ``axis`` move together: tokens of one block do, blocks never."""
    whole = axis.split("/")[0].split("%")[0]
    return whole in ("kv", "head", "elem") or (whole == "token" and addressing == "blocks")


def fuse(component: Component, addressing: Addressing) -> Component:
    """``component`` with every dim that extends its run on both sides drawn into the run."""
    run, dims = component.run, list(component.dims)
    while True:
        inner = next(
            (
                dim
                for dim in dims
                if fusable(dim.axis, addressing)
                and dim.pointer == ZERO
                and dim.engine == run
                and dim.chunk == run
            ),
            None,
        )
        if inner is None:
            return replace(component, dims=tuple(dims), run=run)
        run = run * inner.extent
        dims.remove(inner)


def join(components: tuple[Component, ...]) -> tuple[Component, ...]:
    """Neighbours that lie end to end on both sides, drawn together into one component."""
    joined: list[Component] = []
    for one in components:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.dims == one.dims
            and last.pointer == one.pointer
            and last.engine + last.run == one.engine
            and last.chunk + last.run == one.chunk
        ):
            name = f"{last.name} + {one.name}"
            joined[-1] = replace(last, name=name, run=last.run + one.run)
        else:
            joined.append(one)
    return tuple(joined)


def moves(ir: LayoutIR, addressing: Addressing) -> tuple[Component, ...]:
    """What is really copied under an addressing: components joined, with their longest runs."""
    return join(tuple(fuse(component, addressing) for component in ir.components))
