"""Puts kvloom's operators where LMCache looks for its own."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

from kvloom.lmcache.wire import TYPES

# LMCache 0.4 has compiled operators, and the same in Python, which had another name before 0.4.6.
_MODULES = ("c_ops", "python_ops_fallback", "non_cuda_equivalents")


def install() -> None:
    """Be LMCache's operator module, now where it was imported, else as soon as it is.

    In LMCache 0.4 ``lmcache.c_ops`` and ``lmcache.python_ops_fallback`` become modules with
    kvloom's operators, wherever their names were already imported; what kvloom has not is theirs as
    before, and so are the types. In LMCache 0.5 the operators are bound to ``lmcache.device_ops``.
    A second call does nothing.
    """
    package = sys.modules.get("lmcache")
    if package is not None:
        _replace(package)
    elif not any(isinstance(finder, _OnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnImport())


class _OnImport(MetaPathFinder):
    """Replaces the operators at the end of the first ``import lmcache`` that succeeds."""

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "lmcache":
            return None
        for finder in sys.meta_path:
            ask = getattr(finder, "find_spec", None)
            found = None if finder is self or ask is None else ask(name, path, target)
            if found is not None:
                if found.loader is not None:
                    found.loader = _ReplacingLoader(found.loader, self)
                return cast("ModuleSpec", found)
        return None


class _ReplacingLoader(Loader):
    """Another loader, and then the replacement."""

    def __init__(self, loader: Loader, finder: MetaPathFinder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _replace(module)


class _Operators(ModuleType):
    """An operator module of LMCache in which all that kvloom has is kvloom's."""

    def __init__(self, name: str, replaced: ModuleType | None) -> None:
        super().__init__(name, "LMCache's operators by kvloom, and what it lacks as it was.")
        import kvloom.lmcache as ours

        theirs = _public(replaced)
        # The types stay LMCache's: its compiled functions take no others.
        types = {one: theirs[one] for one in TYPES if one in theirs}
        formats = types.get("EngineKVFormat") or types.get("GPUKVFormat")
        if formats is not None:
            types.update(EngineKVFormat=formats, GPUKVFormat=formats)
        self.__dict__.update({**theirs, **_public(ours), **types})


def _public(module: ModuleType | None) -> dict[str, Any]:
    """What a module lists, which may be more than it holds."""
    names = [] if module is None else dir(module)
    missing = object()
    found = {name: getattr(module, name, missing) for name in names if not name.startswith("__")}
    return {name: value for name, value in found.items() if value is not missing}


def _replace(package: ModuleType) -> None:
    device_ops = getattr(package, "device_ops", None)
    if device_ops is not None:
        import kvloom.lmcache as ours

        device_ops.bind_native(ours)
        return
    found = {short: _imported(f"{package.__name__}.{short}") for short in _MODULES}
    in_python = next((one for one in list(found.values())[1:] if one is not None), None)
    for short, replaced in found.items():
        if isinstance(replaced, _Operators) or (replaced is None and short != _MODULES[0]):
            continue
        # Where the compiled module can't be imported, LMCache takes what it lacks from the other.
        made = _Operators(f"{package.__name__}.{short}", replaced or in_python)
        sys.modules[made.__name__] = made
        setattr(package, short, made)
        if replaced is not None:
            _rename(replaced, made)


def _imported(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except Exception:  # not in this version, or compiled for a CUDA that is not here
        return None


def _rename(replaced: ModuleType, made: ModuleType) -> None:
    """Let whoever imported a module, or an operator from it, have the new one."""
    changed = {
        id(theirs): vars(made)[name]
        for name, theirs in _public(replaced).items()
        if callable(theirs) and vars(made)[name] is not theirs
    }
    changed[id(replaced)] = made
    for name, module in list(sys.modules.items()):
        inside = name.startswith("lmcache.") and isinstance(module, ModuleType)
        for own, value in list(vars(module).items()) if inside and module is not replaced else ():
            if id(value) in changed:
                setattr(module, own, changed[id(value)])
