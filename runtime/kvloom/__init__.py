"""Gather and scatter operators for paged KV caches, generated from declared layouts.

    layout = kvloom.layout("vllm-flash-attention-nhd")
    cache = layout.bind(tensors)
    chunk = cache.gather(slots=slots)
    cache.scatter(chunk, slots=slots)

Names are resolved when they are first used: importing kvloom loads neither torch nor numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvloom._version import __version__

if TYPE_CHECKING:
    from kvloom._abi import ChunkFacts, EngineFacts, LayoutFacts, ModelFacts
    from kvloom.cache import Cache
    from kvloom.engine_layout import Layout
    from kvloom.geometry import Group
    from kvloom.registry import chunks, layout, layouts, model, models
    from kvloom.select import Selection
else:
    # The module of each public name. None of them may be called like a public name: importing a
    # submodule sets its name in the package.
    _MODULES = {
        "Cache": "cache",
        "ChunkFacts": "_abi",
        "EngineFacts": "_abi",
        "Group": "geometry",
        "Layout": "engine_layout",
        "LayoutFacts": "_abi",
        "ModelFacts": "_abi",
        "Selection": "select",
        "chunks": "registry",
        "layout": "registry",
        "layouts": "registry",
        "model": "registry",
        "models": "registry",
    }

    def __getattr__(name):
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted(set(globals()) | set(__all__))


__all__ = [
    "Cache",
    "ChunkFacts",
    "EngineFacts",
    "Group",
    "Layout",
    "LayoutFacts",
    "ModelFacts",
    "Selection",
    "__version__",
    "chunks",
    "layout",
    "layouts",
    "model",
    "models",
]
