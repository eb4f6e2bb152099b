"""Every layout's golden is there and says what the code says now, and says enough to review."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import golden
from declared import CHUNKS, LAYOUTS
from golden import GOLDENS, check_golden
from kvloom_codegen import goldens
from kvloom_codegen.lower import lower
from kvloom_codegen.nest import unsupported
from kvloom_codegen.printers.text import plain
from kvloom_codegen.sources import specs_dir

FOLDER = GOLDENS / "layouts"

with_every_layout = pytest.mark.parametrize("name", LAYOUTS)


def test_every_spec_has_a_golden_and_every_golden_a_spec() -> None:
    found = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*"))
    specs = sorted((specs_dir() / "layouts").glob("*.yaml"))
    assert found == [f"{path.stem}.txt" for path in specs]


@with_every_layout
def test_a_golden_says_what_the_code_says_now(name: str, update_goldens: bool) -> None:
    spec = LAYOUTS[name]
    found = goldens.golden(spec, CHUNKS[spec.chunk])
    check_golden(FOLDER / f"{name}.txt", found, update_goldens)


# --- what a golden holds, but for its addresses: test_oracle_agrees.py has those ------------------


def sections(name: str) -> dict[str, list[str]]:
    """The lines of a golden below each line that stands at the margin."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    parts = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    return {head: below for head, *below in (part.splitlines() for part in parts if part)}


@with_every_layout
def test_a_golden_holds_every_component_with_its_dimensions(name: str) -> None:
    spec = LAYOUTS[name]
    shown = "\n".join(sections(name)["components (strides in bytes)"])
    parts = re.split(r"^  (?=\S)", shown, flags=re.MULTILINE)[1:]
    components = lower(spec, CHUNKS[spec.chunk]).components
    assert [part.partition(":")[0] for part in parts] == [one.name or "row" for one in components]
    for part, component in zip(parts, components, strict=True):
        assert re.match(r".*: pointer \S.*, engine \S.*, chunk \S.*\n", part)
        dims = [(dim.axis, plain(dim.extent)) for dim in component.dims]
        assert re.findall(r"^    (\S+) × (\S+): .*chunk \S", part, re.MULTILINE) == dims
        assert re.search(r"^    run \S", part, re.MULTILINE)


@with_every_layout
def test_a_golden_holds_what_moves_together_and_the_kernels(name: str) -> None:
    spec = LAYOUTS[name]
    reason = unsupported(spec, lower(spec, CHUNKS[spec.chunk]))
    heads = list(sections(name))
    assert {"moves by slots", "moves by blocks"} <= set(heads)
    kernels = [head.partition(",")[0] for head in heads if ", geometry columns " in head]
    if reason:
        assert f"no kernels: {reason}" in heads
        assert kernels == []
    else:
        assert kernels == ["gather_slots", "gather_blocks", "scatter_slots", "scatter_blocks"]


# --- how files are compared and renewed -----------------------------------------------------------


def failure(action: Callable[[], None]) -> str:
    """What a test that does ``action`` fails with."""
    with pytest.raises(pytest.fail.Exception) as raised:
        action()
    return str(raised.value)


def test_a_file_that_differs_fails_with_a_diff_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, "ROOT", tmp_path)
    path = tmp_path / "one.txt"
    path.write_text("same\nold\n", encoding="utf-8")
    said = failure(lambda: check_golden(path, "same\nnew\n", update=False))
    assert said.splitlines() == [
        f"one.txt differs; after review renew it with: {golden.UPDATE}",
        "--- one.txt (golden)",
        "+++ one.txt (now)",
        "@@ -1,2 +1,2 @@",
        " same",
        "-old",
        "+new",
    ]
    assert path.read_text(encoding="utf-8") == "same\nold\n"


@pytest.mark.parametrize("found", ["text\n", ""])
def test_a_file_that_is_missing_fails_even_where_nothing_is_found(
    tmp_path: Path, found: str
) -> None:
    path = tmp_path / "one.txt"
    said = failure(lambda: check_golden(path, found, update=False))
    assert said.startswith(f"one.txt is missing; after review renew it with: {golden.UPDATE}")
    assert not path.exists()


@pytest.mark.parametrize("held", [None, "old\n"])
def test_an_update_writes_what_was_found(tmp_path: Path, held: str | None) -> None:
    path = tmp_path / "one.txt"
    if held is not None:
        path.write_text(held, encoding="utf-8")
    check_golden(path, "neu·\n", update=True)
    assert path.read_bytes() == "neu·\n".encode()
    check_golden(path, "neu·\n", update=False)


def test_an_update_leaves_a_file_that_is_right(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("text\n", encoding="utf-8")
    os.utime(path, ns=(0, 0))
    check_golden(path, "text\n", update=True)
    assert path.stat().st_mtime_ns == 0


@pytest.mark.parametrize(("ci", "status"), [("true", 4), ("1", 4), ("false", 0), ("", 0)])
def test_an_update_is_refused_under_ci(ci: str, status: int) -> None:
    command = [sys.executable, "-m", "pytest", "--update-goldens", "--collect-only", "-q", __file__]
    done = subprocess.run(
        command, env={**os.environ, "CI": ci}, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert ("refused under CI" in done.stderr) == bool(status)
