"""Prints which of LMCache's operators move which format, or keeps that table in a Markdown file."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from kvloom import registry
from kvloom.lmcache.formats import FORMATTED, refusal

MARKS = ("<!-- formats: written by `make generate`; do not edit -->", "<!-- end of formats -->")


def main(arguments: list[str] | None = None) -> int:
    """0, or 1 where the file that is checked holds another table."""
    parser = argparse.ArgumentParser(prog="python -m kvloom.lmcache", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="a Markdown file with the table's marks")
    parser.add_argument("--check", action="store_true", help="only say whether the file is stale")
    options = parser.parse_args(arguments)
    if options.file is None:
        print("\n".join(table()))
        return 0
    text = options.file.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    if not mark:
        parser.error(f"{options.file} lacks the marks of the table: {' and '.join(MARKS)}")
    wanted = before + "\n".join([MARKS[0], "", *table(), "", MARKS[1]]) + after
    if options.check and wanted != text:
        names = (f"{options.file} as it is", f"{options.file} as generated")
        lines = (text.splitlines(), wanted.splitlines())
        print(*difflib.unified_diff(*lines, *names, lineterm=""), sep="\n")
        print(f"stale: {options.file}; `make generate` mends it")
        return 1
    if wanted != text:
        options.file.write_text(wanted, encoding="utf-8")
    return 0


def table() -> list[str]:
    """Every format with a number, and of each operator whether it moves it, in Markdown."""
    reasons: list[str] = []
    rows = []
    for layout in registry.layouts():
        if layout.id is None:
            continue
        cells = []
        for operator in FORMATTED:
            reason = refusal(operator, layout)
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"refused ({reasons.index(reason) + 1})" if reason else "moves")
        rows.append(f"| {layout.id} | `{layout.name}` | {' | '.join(cells)} |")
    heads = " | ".join(f"`{operator}`" for operator in FORMATTED)
    lines = [f"| id | format | {heads} |", f"| --- | --- |{' --- |' * len(FORMATTED)}", *rows]
    return [*lines, "", *(f"{number}. {reason}." for number, reason in enumerate(reasons, 1))]


if __name__ == "__main__":
    sys.exit(main())
