"""The generator's command line: ``python -m kvloom_codegen`` writes, ``--check`` only looks."""

from __future__ import annotations

import argparse
import os
import sys
from io import TextIOWrapper
from pathlib import Path

from kvloom_codegen.checks import load
from kvloom_codegen.outputs import compare, desired, write
from kvloom_codegen.problems import SpecError
from kvloom_codegen.sources import specs_dir


def main(arguments: list[str] | None = None) -> int:
    """Run the generator; 0 when all is as the specs ask, 1 when not, 2 for a wrong command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # diffs hold more than ASCII
    parser = _parser()
    options = parser.parse_args(arguments)
    root = options.root or _checkout(parser)
    if options.update_goldens and (options.check or options.dry_run):
        parser.error("--update-goldens writes; it goes with neither --check nor --dry-run")
    if options.update_goldens and _under_ci():
        parser.error(
            "--update-goldens is refused under CI: goldens are reviewed, not renewed there"
        )
    try:
        specs = load(options.specs or specs_dir())
        differences = compare(desired(specs, root), root)
    except SpecError as error:
        print(error, file=sys.stderr)
        print(f"{len(error.problems)} problem(s); nothing was written", file=sys.stderr)
        return 1
    if options.check:
        for one in differences:
            print(one.report())
        count = f"{len(specs.layouts)} layouts"
        print(f"{len(differences)} file(s) differ" if differences else f"up to date: {count}")
        return 1 if differences else 0
    if options.dry_run:
        for one in differences:
            print(f"{one.state}: {one.path}")
        return 0
    left = write(differences, root, update_goldens=options.update_goldens, log=print)
    for one in left:
        print(one.report(), file=sys.stderr)
    return 1 if left else 0


def _under_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false", "no")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvloom_codegen",
        description="Write operators, registry, docs and goldens of all layouts under specs/.",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 and show what differs"
    )
    mode.add_argument(
        "--dry-run", action="store_true", help="write nothing; list what would be written"
    )
    parser.add_argument(
        "--update-goldens", action="store_true", help="renew goldens that differ, after review"
    )
    parser.add_argument("--root", type=Path, help="the project's root (default: the checkout)")
    parser.add_argument("--specs", type=Path, help="the folder of specs (default: the project's)")
    return parser


def _checkout(parser: argparse.ArgumentParser) -> Path:
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / "pyproject.toml").is_file():
        parser.error("not in a checkout; name the project's root with --root")
    return root


if __name__ == "__main__":
    sys.exit(main())
