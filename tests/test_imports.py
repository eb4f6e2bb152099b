"""Who may import whom: read from the source, then tried in fresh interpreters."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"kvloom_codegen": "codegen", "kvloom_generated": "generated", "kvloom": "runtime"}
MAY_IMPORT = {
    "kvloom_codegen": {"jinja2", "pydantic", "pydantic_core", "yaml"},
    "kvloom_generated": {"kvloom", "numba", "numpy"},
    "kvloom": {
        *("kvloom_generated", "numba", "llvmlite", "numpy", "torch", "cuda"),
        *("lmcache", "msgspec"),  # where they are installed: see the tests below
    },
}
# Imports LMCache, which alone imports it.
PLUGIN = "kvloom.lmcache.plugin"
LEAVES = ("kvloom._abi", "kvloom._forks", "kvloom._kernel")
GENERATOR_ONLY = ("kvloom_codegen", "jinja2", "pydantic", "pydantic_core", "yaml")


@dataclass(frozen=True)
class Import:
    """One imported name in full, such as ``kvloom._abi.LayoutFacts``, and where it stands."""

    name: str
    place: str
    for_types_only: bool

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.place} imports {self.name}"


def files(package: str) -> list[Path]:
    """All source files of ``package`` in the checkout."""
    found = sorted((ROOT / FOLDERS[package] / package).rglob("*.py"))
    assert found, f"{package} has no source files"
    return found


def module_name(package: str, path: Path) -> str:
    parts = path.relative_to(ROOT / FOLDERS[package]).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def importable(package: str) -> list[str]:
    """All modules of ``package`` but the plug-in, and ``__main__``, which is there to be run."""
    names = (module_name(package, path) for path in files(package))
    return [name for name in names if not name.endswith(".__main__") and name != PLUGIN]


def imports(package: str) -> list[Import]:
    """Everything that ``package`` imports anywhere, inside functions and for types too."""
    found: list[Import] = []
    for path in files(package):
        name = module_name(package, path)
        inside = name if path.name == "__init__.py" else name.rpartition(".")[0]
        shown = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), shown)
        for node, for_types_only in _nodes(tree, for_types_only=False):
            found.extend(
                Import(target, f"{shown}:{node.lineno}", for_types_only)
                for target in _imported(node, inside)
            )
    return found


def _nodes(node: ast.AST, *, for_types_only: bool) -> Iterator[tuple[ast.stmt | ast.expr, bool]]:
    for child in ast.iter_child_nodes(node):
        under_types = for_types_only or (
            isinstance(node, ast.If)
            and ast.unparse(node.test).endswith("TYPE_CHECKING")
            and child in node.body
        )
        if isinstance(child, (ast.stmt, ast.expr)):
            yield child, under_types
        yield from _nodes(child, for_types_only=under_types)


def _imported(node: ast.AST, inside: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = inside.split(".")[: len(inside.split(".")) - node.level + 1]
            base = ".".join([*parents, base] if base else parents)
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
        ("import_module", "__import__")
    ):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.JoinedStr):  # f"kvloom_generated.{name}"
            first = first.values[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in a fresh interpreter that sees the checkout's three packages."""
    path = os.pathsep.join(str(ROOT / folder) for folder in FOLDERS.values())
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("package", FOLDERS)
def test_a_package_imports_only_what_its_place_allows(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package} | sys.stdlib_module_names
    assert [str(found) for found in imports(package) if found.top not in allowed] == []


def test_generated_modules_import_only_leaves_of_the_runtime() -> None:
    strays = [
        str(found)
        for found in imports("kvloom_generated")
        if found.top == "kvloom" and not f"{found.name}.".startswith(tuple(f"{x}." for x in LEAVES))
    ]
    assert strays == []


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_imports_nothing_of_ours_when_it_runs(leaf: str) -> None:
    file = f"{FOLDERS['kvloom']}/{leaf.replace('.', '/')}.py"
    strays = [
        str(found)
        for found in imports("kvloom")
        if found.place.startswith(f"{file}:") and found.top in FOLDERS and not found.for_types_only
    ]
    assert strays == []


WITHOUT_GENERATOR = """
import importlib, sys

missing = sys.argv[1].split(",")

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for name in sys.argv[2:]:
    importlib.import_module(name)
print(*sorted(set(missing) & set(sys.modules)))
"""


def test_all_modules_work_where_neither_the_generator_nor_lmcache_is_installed() -> None:
    modules = ["kvloom", *importable("kvloom"), *importable("kvloom_generated")]
    missing = (*GENERATOR_ONLY, "lmcache", "msgspec")
    result = run(WITHOUT_GENERATOR, ",".join(missing), *modules)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


# A fork is a fresh interpreter as far as our modules go, without the seconds that torch and numba
# take to import.
EACH_FIRST = """
import importlib, os, sys, traceback
import numba, numpy, torch

for first in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        status = 0
        try:
            for name in [first, *sys.argv[1:]]:
                importlib.import_module(name)
        except BaseException:
            print(f"{first} first, then {name}:", file=sys.stderr)
            traceback.print_exc()
            status = 1
        sys.stderr.flush()
        os._exit(status)
    if os.waitpid(child, 0)[1]:
        print(first, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_every_module_can_be_the_first_that_is_imported() -> None:
    modules = importable("kvloom") + importable("kvloom_generated")
    assert {"kvloom", *LEAVES} <= set(modules)
    result = run(EACH_FIRST, *modules)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [], result.stderr
