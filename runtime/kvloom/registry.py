"""Finds layouts, chunk layouts, models and kernels among the generated modules, and keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from operator import index
from threading import Lock
from typing import TYPE_CHECKING

from kvloom._forks import held_across_forks
from kvloom.engine_layout import Layout
from kvloom_generated.registry import IDS, MODULES, NAMES

if TYPE_CHECKING:
    from types import ModuleType

    from kvloom._abi import ChunkFacts, Kernel, Kernels, ModelFacts, Views

_loading_kernels = held_across_forks(Lock())
_kernels: dict[tuple[str, bool], Kernels] = {}


def layouts() -> tuple[Layout, ...]:
    """Every layout: those with a wire id first, by id, then the rest by name."""
    return tuple(_load(module) for module in MODULES)


def layout(key: str | int) -> Layout:
    """The layout with this canonical name, engine alias (both in any case) or wire id.

    ValueError where there is none, with the names that come close; TypeError for another type.
    """
    if isinstance(key, str):
        if key.casefold() not in NAMES:
            raise ValueError(_unknown("layout", key, NAMES, "kvloom.layouts()"))
        return _load(NAMES[key.casefold()])
    try:
        number = index(key)
    except TypeError:
        number = None
    if number is None or isinstance(key, bool):
        raise TypeError(f"layout: got {key!r}, takes a name, an engine's alias or a wire id")
    if number not in IDS:
        raise ValueError(f"layout: no layout has wire id {number}; kvloom.layouts() lists all")
    return _load(IDS[number])


def chunks() -> tuple[ChunkFacts, ...]:
    """Every chunk layout, by name."""
    return tuple(_chunks().values())


def chunk_layout(name: str) -> ChunkFacts:
    """The chunk layout with this name, in any case; ValueError where there is none."""
    if not isinstance(name, str):
        kind = type(name).__name__
        raise TypeError(f"chunk: got {kind}, takes the name of a chunk layout")
    found = _chunks().get(name.casefold())
    if found is None:
        raise ValueError(_unknown("chunk", name, _chunks(), "kvloom.chunks()"))
    return found


def models() -> tuple[ModelFacts, ...]:
    """The KV-cache geometry of every model, by name."""
    return tuple(_models().values())


def model(name: str) -> ModelFacts:
    """The KV-cache geometry of the model with this name, in any case; ValueError without one."""
    if not isinstance(name, str):
        raise TypeError(f"model: got {type(name).__name__}, takes the name of a model")
    found = _models().get(name.casefold())
    if found is None:
        raise ValueError(_unknown("model", name, _models(), "kvloom.models()"))
    return found


def kernels(layout: Layout, streaming: bool = False) -> Kernels:
    """The four kernels of ``layout``, made at the first call and compiled at their own.

    ``streaming`` ones store past the caches.

    NotImplementedError, with the reason, for a layout that has none.
    """
    found = _kernels.get((layout.name, streaming))
    if found is None:
        if layout.unsupported:
            raise NotImplementedError(f"{layout.name} has no kernels: {layout.unsupported}")
        from kvloom._kernel import HELPERS

        with _loading_kernels:
            found = _kernels.get((layout.name, streaming))
            if found is None:
                made: Kernels = _module(layout.facts.module).kernels(HELPERS, streaming)
                found = _kernels[layout.name, streaming] = made
    return found


def compile_kernel(kernel: Kernel) -> None:
    """Have the machine code of a kernel, from disk or new."""
    from kvloom._kernel import compile_now

    compile_now(kernel)


def views(layout: Layout) -> Views:
    """How torch sees the tensors of ``layout``, which must have kernels."""
    found: Views = _module(layout.facts.module).views
    return found


def _module(name: str) -> ModuleType:
    return import_module(f"kvloom_generated.{name}")


@cache
def _load(module: str) -> Layout:
    return Layout(_module(module).LAYOUT)


@cache
def _chunks() -> dict[str, ChunkFacts]:
    found: dict[str, ChunkFacts] = _module("chunks").CHUNKS
    return {name: found[name] for name in sorted(found)}


@cache
def _models() -> dict[str, ModelFacts]:
    found: dict[str, ModelFacts] = _module("models").MODELS
    return {name: found[name] for name in sorted(found)}


def _unknown(kind: str, got: str, names: Iterable[str], every: str) -> str:
    close = get_close_matches(got.casefold(), names, n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{kind}: there is none called {got!r}; {hint}{every} lists all"
