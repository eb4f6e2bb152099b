"""Compares text with the file that holds what it should be, and renews that file on request."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"
UPDATE = "make goldens"


def check_golden(path: Path, found: str, update: bool) -> None:
    """Fail with a diff where ``path`` does not hold ``found``; with ``update`` write it instead."""
    wanted = path.read_text(encoding="utf-8") if path.is_file() else ""
    if found == wanted and path.is_file():
        return
    if update:
        path.write_text(found, encoding="utf-8", newline="\n")
        return
    shown = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    diff = difflib.unified_diff(
        wanted.splitlines(), found.splitlines(), f"{shown} (golden)", f"{shown} (now)", lineterm=""
    )
    state = "differs" if path.is_file() else "is missing"
    pytest.fail(
        "\n".join([f"{shown} {state}; after review renew it with: {UPDATE}", *diff]), pytrace=False
    )
