"""Prints how a layout's tensors are seen as torch views with blocks and tokens first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The order of the axes of a view: what is indexed comes first.
ORDER = ("block", "token", "kv", "layer", "head", "elem", "one")
# The axes of a chunk between its tokens and the elements of a head.
INSIDE = ("kv", "layer", "head")
KNOWN = {"kv": "2", "one": "1"}


@dataclass(frozen=True)
class ViewsText:
    """The lines that come to one tensor, the tensor's view, and the part of a chunk beside it."""

    lines: tuple[str, ...]
    indent: str
    engine: str
    chunk: str


def views(axes: Sequence[tuple[str, ...]], lists: tuple[str, ...]) -> ViewsText:
    """The views of tensors with the dimensions ``axes`` inside the list levels ``lists``."""
    names = [axis for dim in axes for axis in (("block",) if _flat(dim) else dim)]
    return ViewsText(
        lines=_lines(lists),
        indent="    " * (2 if lists else 1),
        engine=f"tensor{_unfused(axes)}{_ordered(names)}",
        chunk=_part(names, lists),
    )


def _flat(dim: tuple[str, ...]) -> bool:
    """Whether blocks and tokens are one dimension: slots, each as good as a block of one token."""
    return dim == ("block", "token")


def _lines(lists: tuple[str, ...]) -> tuple[str, ...]:
    if not lists:
        return ("(tensor,) = tensors",)
    if len(lists) == 1:
        return (f"for {lists[0]}, tensor in enumerate(tensors):",)
    outer, inner = lists
    count = KNOWN.get(inner, f"len(tensors) // {KNOWN.get(outer, '1')}")
    return (
        "for number, tensor in enumerate(tensors):",
        f"    {outer}, {inner} = divmod(number, {count})",
    )


def _unfused(axes: Sequence[tuple[str, ...]]) -> str:
    """The calls that split fused dimensions, the last one first: the others keep their place."""
    calls = ""
    for place, dim in reversed(list(enumerate(axes))):
        if len(dim) > 1 and not _flat(dim):
            calls += f".unflatten({place}, ({', '.join(KNOWN.get(axis, '-1') for axis in dim)}))"
    return calls


def _ordered(names: list[str]) -> str:
    order = sorted(names, key=ORDER.index)
    calls = ""
    if order != names:
        calls += f".permute({', '.join(str(names.index(axis)) for axis in order)})"
    if "token" not in names:
        calls += ".unsqueeze(1)"
    return f"{calls}[..., 0]" if "one" in names else calls


def _part(names: list[str], lists: tuple[str, ...]) -> str:
    places = [":" if axis in names else axis if axis in lists else "0" for axis in INSIDE]
    while places and places[-1] == ":":
        places.pop()
    return f"chunk[:, {', '.join(places)}]" if places else "chunk"
