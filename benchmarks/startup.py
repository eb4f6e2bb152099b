"""What starting up costs: importing kvloom, and a kernel's first call, compiled or from disk.

Every sample is a fresh process (first_use.py). Processes of one comparison take turns, and a figure
is the median of its samples. Exits with 1 where a figure is above its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Literal, TypeAlias

from machine import facts
from rich.console import Console
from rich.progress import track

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "startup.json"

KERNELS = ("gather_slots", "scatter_slots", "gather_blocks", "scatter_blocks")
BASE = ("torch", "numba")
TOUCHES = ("[getattr(kvloom, name) for name in kvloom.__all__]", "kvloom.layouts()")

IMPORT_LIMIT = 50.0
COLD_LIMIT = 1500.0
WARM_LIMIT = 50.0

Limited: TypeAlias = Literal["median", "greatest", "above_empty"]


@dataclass(frozen=True)
class Figure:
    """One measured thing in milliseconds, and how far it lies above an empty njit's first call.

    ``limited`` is which of its numbers the limit is for.
    """

    what: str
    median: float
    least: float
    greatest: float
    above_empty: float | None = None
    limit: float | None = None
    limited: Limited = "median"

    @property
    def verdict(self) -> str:
        """Whether it keeps its limit; nothing where it has none."""
        if self.limit is None:
            return ""
        return "within" if getattr(self, self.limited) <= self.limit else "ABOVE"


def main(arguments: list[str] | None = None) -> int:
    """Measure, show, keep; 0 when every figure is within its limit, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11, help="processes per figure")
    parser.add_argument("--quick", action="store_true", help="3 repeats, few layouts, kept nowhere")
    parser.add_argument("--result", type=Path, default=RESULT, help="where the figures are kept")
    options = parser.parse_args(arguments)
    repeats = 3 if options.quick else options.repeats
    layouts = with_kernels()[:: 8 if options.quick else 1]
    load = os.getloadavg()[0]
    figures = [*imports(repeats), *cold(layouts, repeats), *warm(layouts[0], repeats)]
    show(figures)
    if not options.quick:
        keep(options.result, figures, repeats, [load, os.getloadavg()[0]])
    return int(any(figure.verdict == "ABOVE" for figure in figures))


def with_kernels() -> list[str]:
    """The names of all layouts with kernels."""
    script = "import kvloom; print(*(x.name for x in kvloom.layouts() if not x.unsupported))"
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=environment(), check=True, capture_output=True, text=True
    ).stdout.split()


# --- samples --------------------------------------------------------------------------------------


def environment(cache: str = "") -> dict[str, str]:
    """The checkout's packages, and a folder for numba's cache; Python keeps its own as usual."""
    root = HERE.parent
    found = {**os.environ, "PYTHONPATH": f"{root / 'runtime'}{os.pathsep}{root / 'generated'}"}
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**found, "NUMBA_CACHE_DIR": cache} if cache else found


def sample(command: Sequence[str], cache: str = "") -> list[float]:
    """Milliseconds that one process reports; without a cache folder it gets an empty one."""
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, str(HERE / "first_use.py"), *command],
            env=environment(cache or empty),
            check=True,
            capture_output=True,
            text=True,
        )
    return [1000 * seconds for seconds in json.loads(done.stdout)]


def in_turns(
    what: str, commands: Sequence[Sequence[str]], repeats: int, cache: str = ""
) -> list[list[list[float]]]:
    """For each command its samples, each a list; the commands take turns."""
    found: list[list[list[float]]] = [[] for _ in commands]
    processes = [one for _ in range(repeats) for one in zip(found, commands, strict=True)]
    console = Console(stderr=True)
    for samples, command in track(
        processes, what, console=console, transient=True, disable=not console.is_terminal
    ):
        samples.append(sample(command, cache))
    return found


def figure(
    what: str,
    times: Iterable[float],
    limit: float | None = None,
    *,
    empty: Sequence[float] = (),
    limited: Limited = "median",
) -> Figure:
    """The figure of some samples; those of an ``empty`` njit were taken in turns with them."""
    times = list(times)
    above = median(a - b for a, b in zip(times, empty, strict=True)) if empty else None
    numbers = [round(one, 2) for one in (median(times), min(times), max(times))]
    return Figure(what, *numbers, None if above is None else round(above, 2), limit, limited)


# --- what is measured -----------------------------------------------------------------------------


def imports(repeats: int) -> list[Figure]:
    """The modules that kvloom needs, without it and with it; then what a program touches first."""
    commands = [("imports", *BASE), ("imports", *BASE, "kvloom", *TOUCHES)]
    for command in commands:
        sample(command)  # leaves bytecode, and the files in memory
    without, with_kvloom = in_turns("imports", commands, repeats)
    _, _, alone, names, layouts = zip(*with_kvloom, strict=True)
    everything = map(sum, zip(alone, names, layouts, strict=True))
    return [
        figure("import torch, numba", map(sum, without)),
        figure("import torch, numba, kvloom", (sum(one[:3]) for one in with_kvloom)),
        figure("  of which kvloom", alone, IMPORT_LIMIT),
        figure("  then every public name", names),
        figure("  then kvloom.layouts()", layouts),
        figure("  kvloom, names and layouts", everything, IMPORT_LIMIT),
    ]


def cold(layouts: Sequence[str], repeats: int) -> list[Figure]:
    """First calls that compile: every layout once, then the slowest again and again."""
    commands = [("calls", name, *KERNELS) for name in layouts]
    firsts, *others = zip(*(one for (one,) in in_turns("every layout", commands, 1)), strict=True)
    slowest = layouts[firsts.index(max(firsts))]
    commands = [("calls", slowest, kernel) for kernel in ("empty", *KERNELS)]
    empty, *kernels = (list(chain(*one)) for one in in_turns(slowest, commands, repeats))
    return [
        figure("compiled, each layout's first kernel", firsts, COLD_LIMIT, limited="greatest"),
        figure("compiled, each layout's further kernels", chain(*others)),
        figure("compiled, an empty njit", empty),
        *(
            figure(f"compiled, {slowest} {kernel}", times, COLD_LIMIT, empty=empty)
            for kernel, times in zip(KERNELS, kernels, strict=True)
        ),
    ]


def warm(layout: str, repeats: int) -> list[Figure]:
    """First calls that find on disk what an earlier process compiled."""
    commands = [("calls", layout, kernel) for kernel in ("empty", *KERNELS)]
    commands += [("calls", layout, "empty", *KERNELS)]
    with tempfile.TemporaryDirectory() as cache:
        sample(commands[-1], cache)  # compiles
        *alone, together = in_turns("from disk", commands, repeats, cache)
    empty, *kernels = (list(chain(*one)) for one in alone)
    _, second, *further = zip(*together, strict=True)
    return [
        figure("from disk, an empty njit", empty),
        *(
            figure(
                f"from disk, {layout} {kernel}",
                times,
                WARM_LIMIT,
                empty=empty,
                limited="above_empty",
            )
            for kernel, times in zip(KERNELS, kernels, strict=True)
        ),
        figure("from disk, first kernel after an empty njit", second, WARM_LIMIT),
        figure("from disk, further kernels", chain(*further), WARM_LIMIT),
    ]


# --- what is shown and kept -----------------------------------------------------------------------


def show(figures: Iterable[Figure]) -> None:
    """A table of the figures, as wide as it needs to be."""
    print(f"{'milliseconds':58}  median   least    most  above empty   limit")
    for one in figures:
        above = "" if one.above_empty is None else f"{one.above_empty:.1f}"
        limit = "" if one.limit is None else f"{one.limit:.0f}"
        times = "".join(f"{time:8.1f}" for time in (one.median, one.least, one.greatest))
        print(f"{one.what:58}{times}{above:>13}{limit:>8}  {one.verdict}")


def keep(path: Path, figures: Iterable[Figure], repeats: int, load: list[float]) -> None:
    """Write the figures, and what of the machine they depend on, as JSON."""
    text = {
        "command": "python benchmarks/startup.py",
        "repeats": repeats,
        "unit": "ms",
        "machine": facts(),
        "load before and after": [round(one, 1) for one in load],
        "figures": [asdict(one) for one in figures],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(text, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
