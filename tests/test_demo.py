"""The demo passes where every byte came back, and fails, naming the layout, where one did not."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import kvloom
from kvloom.verify import BLOCK_SIZE, Rate, RoundTrip, Sizes, round_trip, sizes_for

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "demo.py"
LAYOUTS = [layout for layout in kvloom.layouts() if not layout.unsupported]
NHD, MLA = "NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_BS_HS"


def demo(*options: str, search: Path | None = None) -> tuple[int, list[str]]:
    """The exit code and the printed lines of a small run; packages in ``search`` come first."""
    unset = {"COLUMNS", "FORCE_COLOR"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    if search is not None:
        path = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join([str(search), path])
    command = [sys.executable, str(DEMO), "--cache-mib=2", "--blocks=8", *options]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, result.stdout.splitlines()


def verdicts(lines: list[str]) -> dict[str, str]:
    """The mark at the end of each layout's row."""
    rows = [line.split() for line in lines if line.rstrip().endswith(("✓", "✗"))]
    assert len(rows) == len({row[0] for row in rows})
    return {row[0]: row[-1] for row in rows}


# --- the program ------------------------------------------------------------------------------


def test_every_layout_with_kernels_has_a_row_and_one_line_says_pass() -> None:
    code, lines = demo()
    assert code == 0
    assert verdicts(lines) == {layout.name: "✓" for layout in LAYOUTS}
    assert lines[-1].startswith(f"PASS: {len(LAYOUTS)} layouts, ")
    assert sum("PASS" in line for line in lines) == 1
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in "".join(lines)


def test_a_broken_kernel_fails_and_its_layout_is_named(tmp_path: Path) -> None:
    copy = tmp_path / "kvloom_generated"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "generated" / "kvloom_generated", copy, ignore=ignored)
    module = copy / f"{kvloom.layout(MLA).facts.module}.py"
    healthy = module.read_text(encoding="utf-8")
    module.write_text(healthy.replace(", run)", ", run - 1)"), encoding="utf-8")
    code, lines = demo(f"--layout={MLA}", f"--layout={NHD}", search=tmp_path)
    assert code == 1
    assert verdicts(lines) == {MLA: "✗", NHD: "✓"}
    assert lines[-1] == f"FAIL: 1 of 2 layouts: {MLA}"
    assert max(map(len, lines)) <= 80


def test_layouts_are_chosen_by_name_alias_or_id() -> None:
    alias = kvloom.layout(NHD).aliases[0]
    code, lines = demo(f"--layout={alias}", f"--layout={kvloom.layout(MLA).id}")
    assert code == 0
    assert list(verdicts(lines)) == [NHD, MLA]


@pytest.mark.parametrize(("operator", "copy"), [(4e7, 4e10), (1.2e12, 1e9), (9.996e10, 1e10)])
def test_no_rate_is_too_wide_for_the_table(operator: float, copy: float) -> None:
    layout, sizes = kvloom.layout(NHD), sizes_for(kvloom.model("llama-3-8b"), 2, 1 << 20)
    rates = {str(number): Rate(operator, copy) for number in range(4)}
    table = runpy.run_path(str(DEMO))["_table"]([layout], [RoundTrip(NHD, sizes, 0, rates, ())])
    printed = StringIO()
    Console(width=80, file=printed).print(table)
    lines = printed.getvalue().splitlines()
    assert verdicts(lines) == {NHD: "✓"}
    assert "…" not in "".join(lines)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--blocks=1"], "blocks: got 1, takes at least 2"),
        (["--blocks=-3"], "blocks: got -3, takes at least 2"),
        (["--cache-mib=0"], "got 0, takes 16777216 (16 MiB) or more: one layer of llama-3-8b"),
        (["--cache-mib=x"], "argument --cache-mib: invalid int value: 'x'"),
        (["--layout=vllm-mlo"], "none called 'vllm-mlo'; did you mean vllm-mla"),
        (["--layout=999"], "no layout has wire id 999"),
        (["--layout=FP8_DS_MLA"], "FP8_DS_MLA: no kernels yet: "),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_an_option_that_cannot_be_is_answered_in_one_line(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(DEMO))["main"]
    with pytest.raises(SystemExit) as exit_:
        main(options)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    *usage, error = err.splitlines()
    assert usage[0].startswith("usage: ")
    assert all(line.startswith(" ") for line in usage[1:])
    assert says in error


# --- the round trip ---------------------------------------------------------------------------

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


def trip(layout: kvloom.Layout, seed: int = 0) -> tuple[str, ...]:
    """The faults that a small round trip finds."""
    heads = 2 if "head" in layout.facts.memory else 1
    sizes = Sizes(layers=2, blocks=6, heads=heads, head_size=3, dtype=torch.bfloat16)
    return round_trip(layout, sizes, seed=seed).faults


def change_a_byte(cache: kvloom.Cache, slot: int) -> None:
    token = cache.gather(slots=[slot])
    assert isinstance(token, torch.Tensor)
    token.view(torch.uint8).flatten()[-1] ^= 1
    cache.scatter(token, slots=[slot])


def restore_a_byte_wrong(cache: kvloom.Cache, _: torch.Tensor, slots: torch.Tensor) -> None:
    change_a_byte(cache, int(slots[0]))


def touch_another_token(cache: kvloom.Cache, _: torch.Tensor, slots: torch.Tensor) -> None:
    """One that does not move, of a block of which others do."""
    pages = (slots // BLOCK_SIZE).unique() * BLOCK_SIZE
    there = (pages[:, None] + torch.arange(BLOCK_SIZE)).flatten().tolist()
    change_a_byte(cache, next(slot for slot in there if slot not in slots.tolist()))


def take_a_byte_wrong(_: kvloom.Cache, chunk: torch.Tensor, __: torch.Tensor) -> None:
    chunk.view(torch.uint8).flatten()[-1] ^= 1


@every_layout
def test_a_round_trip_finds_no_fault_whatever_the_seed(layout: kvloom.Layout) -> None:
    for seed in (0, -1, 1 << 80):
        assert trip(layout, seed) == ()


@every_layout
@pytest.mark.parametrize(
    ("op", "sabotage", "says"),
    [
        ("gather", take_a_byte_wrong, "the chunk gathered by slots differs"),
        ("gather", touch_another_token, "offloading changed the cache"),
        ("scatter", touch_another_token, "1 bytes of the reloaded cache are wrong, first at"),
        ("scatter", restore_a_byte_wrong, "1 bytes of the reloaded cache are wrong, first at"),
    ],
)
def test_a_round_trip_notices_a_single_byte(
    layout: kvloom.Layout,
    op: str,
    sabotage: Callable[..., None],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = getattr(kvloom.Cache, op)

    def once(cache: kvloom.Cache, *arguments: Any, **request: Any) -> Any:
        done = real(cache, *arguments, **request)
        if "slots" in request:
            monkeypatch.undo()
            sabotage(cache, done, request["slots"])
        return done

    monkeypatch.setattr(kvloom.Cache, op, once)
    assert says in trip(layout)[0]


def test_a_cache_has_as_many_layers_as_fit() -> None:
    model = kvloom.model("llama-3-8b")
    layer = 2 * model.heads * model.head_size * 2 * 8 * BLOCK_SIZE
    assert sizes_for(model, 8, 3 * layer + 1).layers == 3
    assert sizes_for(model, 8, layer).layers == 1
    assert sizes_for(model, 8, 999 * layer).layers == model.layers
    with pytest.raises(ValueError, match=f"got {layer - 1}, takes {layer} "):
        sizes_for(model, 8, layer - 1)
