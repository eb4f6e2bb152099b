"""The table of what LMCache's operators move: it is fresh, and what it says is what calls do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvloom
import kvloom.lmcache as ops
from kvloom.lmcache.__main__ import MARKS, main, table
from kvloom.lmcache.formats import FORMATTED, refusal

ROOT = Path(__file__).resolve().parent.parent
NUMBERED = [one for one in kvloom.layouts() if one.id is not None]
REFUSED = [(name, one) for name in FORMATTED for one in NUMBERED if refusal(name, one)]


def test_the_docs_hold_the_table_as_it_is() -> None:
    assert main(["--check", str(ROOT / "docs/lmcache.md")]) == 0


def test_a_stale_table_is_shown_and_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.md"
    stale = f"before\n{MARKS[0]}\n| old |\n{MARKS[1]}\nafter\n"
    file.write_text(stale, encoding="utf-8")
    assert main(["--check", str(file)]) == 1
    said = capsys.readouterr().out
    assert "-| old |" in said
    assert "`make generate` mends it" in said
    assert file.read_text(encoding="utf-8") == stale
    assert main([str(file)]) == 0
    assert main(["--check", str(file)]) == 0
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines == ["before", MARKS[0], "", *table(), "", MARKS[1], "after"]
    file.write_text("no marks", encoding="utf-8")
    with pytest.raises(SystemExit):
        main([str(file)])


def test_the_table_has_every_number_and_every_operator_that_is_told_one() -> None:
    head, _, *rows = table()
    assert [word.strip(" `") for word in head.split("|")[3:-1]] == list(FORMATTED)
    numbers = [int(row.split("|")[1]) for row in rows if row.startswith("|")]
    assert numbers == sorted(one.id for one in NUMBERED if one.id is not None)
    refused = sum(row.count("refused (") for row in rows)
    assert refused == len(REFUSED)


@pytest.mark.parametrize(("operator", "layout"), REFUSED, ids=lambda one: getattr(one, "name", one))
def test_what_is_said_to_be_refused_is_so_for_the_reason_given(
    operator: str, layout: kvloom.Layout
) -> None:
    chunk, slots = torch.zeros(2, 1, 1, 8), torch.tensor([0])
    cpu, tensors = torch.device("cpu"), [torch.zeros(2, 1, 1, 1, 8)]
    calls: dict[str, tuple[Any, ...]] = {
        "multi_layer_kv_transfer": (chunk, tensors, slots, cpu, 1, 1, layout.id),
        "multi_layer_kv_transfer_unilateral": (chunk, tensors, slots, cpu, 1, 1, layout.id),
        "multi_layer_block_kv_transfer": (
            *(tensors, [chunk], [0], cpu, 1, ops.PageBufferShapeDesc(), 1, layout.id, 0),
        ),
        "single_layer_kv_transfer": (chunk[:, 0], tensors[0], slots, 1, layout.id),
    }
    with pytest.raises(ValueError, match=r"^engine_kv_format: got ") as caught:
        getattr(ops, operator)(*calls[operator])
    assert refusal(operator, layout) in str(caught.value)
