"""``install`` beside a small package that looks like LMCache 0.4, however it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PACKAGE = {
    "__init__.py": "from lmcache import use",
    "c_ops.py": """
import enum
class GPUKVFormat(enum.IntEnum):
    ANY = 1
def multi_layer_kv_transfer(): return "theirs"
def alloc_pinned_ptr(): return "theirs"
""",
    "python_ops_fallback.py": "from lmcache.c_ops import *",
    "use.py": """
import lmcache.c_ops as ops
from lmcache.c_ops import multi_layer_kv_transfer as transfer
""",
}
SHOWN = """
import kvloom.lmcache as ours
import lmcache.c_ops, lmcache.python_ops_fallback
from lmcache import c_ops, use
for module in (lmcache.c_ops, lmcache.python_ops_fallback, c_ops, use.ops):
    assert module.multi_layer_kv_transfer is ours.multi_layer_kv_transfer, module
assert use.transfer is ours.multi_layer_kv_transfer
assert c_ops is lmcache.c_ops is use.ops
assert c_ops.alloc_pinned_ptr() == "theirs"
assert c_ops.EngineKVFormat is c_ops.GPUKVFormat
assert c_ops.GPUKVFormat.__module__ == "lmcache.c_ops"
print("ours")
"""


def run(tmp_path: Path, script: str, **changed: str) -> str:
    folder = tmp_path / "lmcache"
    folder.mkdir()
    for name, text in {**PACKAGE, **changed}.items():
        (folder / name.replace("_py", ".py")).write_text(text, encoding="utf-8")
    path = [str(tmp_path), *(str(ROOT / name) for name in ("runtime", "generated"))]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


BEFORE = "import kvloom.lmcache as k; k.install()\n"
ORDERS = {
    "before the import": BEFORE,
    "twice before": BEFORE + BEFORE,
    "after it": "import lmcache, kvloom.lmcache as k; k.install()\n",
    "before and after": BEFORE + "import lmcache; k.install()\n",
    "with a look for it between": BEFORE
    + "from importlib.util import find_spec; assert find_spec('lmcache') is not None\n",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_whoever_imports_the_operators_gets_kvlooms(tmp_path: Path, order: str) -> None:
    assert run(tmp_path, order + SHOWN) == "ours\n"


def test_an_import_that_fails_at_first_is_replaced_when_it_succeeds(tmp_path: Path) -> None:
    failing = "import os\nif os.environ.pop('FAIL', ''): raise RuntimeError('not yet')\n"
    script = (
        "import os; os.environ['FAIL'] = '1'\n"
        + BEFORE
        + "try: import lmcache\nexcept RuntimeError: pass\n"
        + SHOWN
    )
    assert run(tmp_path, script, __init___py=failing + PACKAGE["__init__.py"]) == "ours\n"


def test_compiled_operators_that_cannot_be_imported_do_not_matter(tmp_path: Path) -> None:
    """What kvloom lacks is then taken from the operators in Python."""
    script = (
        BEFORE + "import lmcache\nfrom lmcache import c_ops\n"
        "assert c_ops.multi_layer_kv_transfer is k.multi_layer_kv_transfer\n"
        "print(c_ops.alloc_pinned_ptr())\n"
    )
    changed = {
        "__init___py": "",
        "c_ops_py": "raise OSError('no CUDA library')",
        "python_ops_fallback_py": PACKAGE["c_ops.py"],
        "use_py": "",
    }
    assert run(tmp_path, script, **changed) == "theirs\n"


def test_where_lmcache_is_not_installed_nothing_happens() -> None:
    script = BEFORE + "import importlib.util; print(importlib.util.find_spec('lmcache'))"
    path = [str(ROOT / name) for name in ("runtime", "generated")]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "None\n", done.stderr
