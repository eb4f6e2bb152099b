"""The main job on every layout: offload a paged cache to chunks, wipe it, reload it, verify it.

Run by ``make demo``. Exits with 1 where a single byte is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import kvloom
from attention import Survival, survival
from kvloom.verify import Rate, RoundTrip, round_trip, sizes_for

MODELS = {"mha": "llama-3-8b", "mla": "deepseek-v3"}
# The cache, what it held before, what it must hold after and the chunks are in memory together:
# less than four times this.
CACHE_MIB = 256
BLOCKS = 256


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 when every byte of every layout came back, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--layout", action="append", help="a layout's name, alias or wire id (default: all)"
    )
    parser.add_argument("--cache-mib", type=int, default=CACHE_MIB, help="size of each cache")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="blocks of 16 tokens each")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the choice of tokens")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        layouts = _chosen(options.layout)
        sizes = {
            layout: sizes_for(
                kvloom.model(MODELS[layout.facts.attention]),
                options.blocks,
                options.cache_mib << 20,
            )
            for layout in layouts
        }
    except ValueError as error:
        parser.error(str(error.args[0]))
    start = time.perf_counter()
    results: list[RoundTrip] = []
    survivals: list[Survival] = []
    columns = (
        TextColumn("{task.description}", justify="left"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(layouts))
        for layout in layouts:

            def show(step: str, name: str = layout.name) -> None:
                progress.update(task, description=f"{name}: {step}")

            results.append(round_trip(layout, sizes[layout], seed=options.seed, progress=show))
            show("attention")
            survivals.append(survival(layout, seed=options.seed))
            progress.advance(task)
    console.print(_table(layouts, results))
    return _verdict(console, results, survivals, time.perf_counter() - start)


def _chosen(keys: list[str] | None) -> list[kvloom.Layout]:
    """The layouts asked for, or all that have kernels."""
    if not keys:
        return [layout for layout in kvloom.layouts() if not layout.facts.unsupported]
    chosen = [kvloom.layout(int(key) if key.isdigit() else key) for key in keys]
    for layout in chosen:
        if layout.facts.unsupported:
            raise ValueError(f"{layout.name}: no kernels yet: {layout.facts.unsupported}")
    return chosen


def _table(layouts: list[kvloom.Layout], results: list[RoundTrip]) -> Table:
    table = Table(
        title="GB/s, and × a torch copy of the same bytes in the same run",
        caption="blocks: whole blocks in random order; slots: single tokens in random order",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    # Narrow enough for 80 columns: the engine stands below the layout it holds.
    table.add_column("layout\nengine", width=25, overflow="fold")
    for heading in ("gather\nblocks", "scatter\nblocks", "gather\nslots", "scatter\nslots"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for layout, result in zip(layouts, results, strict=True):
        rates = [_rate(rate) for rate in result.rates.values()]
        verdict = "[red]✗[/]" if result.faults else "[green]✓[/]"
        engine = f"[dim]{layout.engines[0].name}[/]"
        table.add_row(f"{layout.name}\n{engine}", *rates, verdict)
    return table


def _rate(rate: Rate) -> str:
    """GB/s and ratio, in ten characters also where they are large: a wider table loses columns."""
    speed, ratio = rate.operator / 1e9, rate.ratio
    return f"{speed:.{1 if speed < 99 else 0}f} {ratio:.{2 if ratio < 9 else 0}f}×"


def _layouts(count: int) -> str:
    return f"{count} layout{'s' if count != 1 else ''}"


def _verdict(
    console: Console, results: list[RoundTrip], survivals: list[Survival], seconds: float
) -> int:
    faults = [(result.layout, fault) for result in results for fault in result.faults]
    faults += [
        (one.layout, f"attention over real keys and values differs by {one.difference:.1e}")
        for one in survivals
        if not one.ok
    ]
    for layout, fault in faults:
        console.print(f"[red]{layout}: {fault}[/]")
    if faults:
        wrong = list(dict.fromkeys(layout for layout, _ in faults))
        count = f"{len(wrong)} of {_layouts(len(results))}"
        console.print(f"FAIL: {count}: {', '.join(wrong)}")
        return 1
    console.print("Attention over real keys and values is the same before and after, bit by bit.")
    # Short enough for one line of 80 columns.
    moved = sum(result.nbytes for result in results) / 2**30
    console.print(
        f"PASS: {_layouts(len(results))}, {moved:.2f} GiB offloaded and reloaded, no byte wrong, "
        f"in {seconds:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
