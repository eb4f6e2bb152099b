"""The README keeps its word: its code runs, its commands and links exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from golden import ROOT

PAGES = sorted(
    path
    for folder in (".", "docs", "specs", "benchmarks")
    for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
)
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_code_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    names: dict[str, torch.Tensor] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["chunk"].shape == (2, 32, 256, 8 * 128)
    assert capsys.readouterr().out.startswith("gather by blocks on cpu")


def test_the_commands_of_the_readme_exist() -> None:
    commands = [line.split()[:2] for block in blocks("sh") for line in block.splitlines()]
    assert commands == [["make", "demo"], ["make", "test"]]
    for _, target in commands:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}
            assert anchor in anchors, target
