"""Speed of gather and scatter on every layout, beside a torch copy of the same bytes.

Operator and copy take turns in one process, outputs are warm, and a figure is the median of the
turns. Three kinds of calls: whole blocks in random order ("blocks"), the slots of such blocks
("slots"), and single tokens in random order ("scattered"). Where LMCache can be imported, its own
CPU operators and kvloom's in their place take turns with them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import peer
import torch
from machine import facts
from rich.console import Console
from rich.progress import Progress

import kvloom
from kvloom.processors import threads

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
README = HERE.parent / "README.md"
MARKS = ("<!-- figures: written by `make bench`; do not edit -->", "<!-- end of figures -->")

MODELS = {"mha": "llama-3-8b", "mla": "deepseek-v3"}
BLOCK_SIZE = 16
TOKENS = (16, 64, 256, 1024, 4096)
KINDS = ("blocks", "slots", "scattered")
REGULAR = ("blocks", "slots")
OPS = ("gather", "scatter")
# Seconds between two calls, spent awake: torch's threads keep a processor busy for a while after
# their work is done, and would slow down whoever comes next.
REST = 1e-3
BESIDE_LMCACHE = peer.available()

# What the figures must keep, as ratios to a torch copy of the same bytes, and in seconds.
MEDIAN_REGULAR, WORST_REGULAR, SCATTERED = 1.1, 0.9, 0.6
SCATTERED_RUN = 2048
ONE_BLOCK = 150e-6
# And what operators in LMCache's place must keep, as ratios to LMCache's own.
LMCACHE_MEDIAN, LMCACHE_WORST, LMCACHE_ONE_BLOCK = 5.0, 1.5, 4.0


@dataclass(frozen=True)
class Cell:
    """One kind of call: medians in seconds, and the bytes it moves.

    ``lmcache_seconds`` are of LMCache's own operator where it can do the call, and
    ``in_place_seconds`` of kvloom's in its place.
    """

    layout: str
    op: str
    kind: str
    tokens: int
    layers: int
    threads: int
    run_bytes: int
    nbytes: int
    seconds: float
    copy_seconds: float
    in_place_seconds: float | None = None
    lmcache_seconds: float | None = None

    @property
    def lmcache_ratio(self) -> float:
        """How many times as fast as LMCache's own operator."""
        assert self.lmcache_seconds is not None
        assert self.in_place_seconds is not None
        return self.lmcache_seconds / self.in_place_seconds

    @property
    def ratio(self) -> float:
        """How many times as fast as a torch copy."""
        return self.copy_seconds / self.seconds

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.nbytes / self.seconds / 1e9


def main(arguments: list[str] | None = None) -> int:
    """Measure, show, keep; 0 when every figure keeps what it must, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layout", action="append", help="a layout's name (default: all)")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="sizes of the calls")
    parser.add_argument("--layers", type=int, help="layers (default: the model's)")
    parser.add_argument("--seconds", type=float, default=0.6, help="about, for each cell")
    parser.add_argument("--quick", action="store_true", help="few cells, kept nowhere")
    parser.add_argument("--cells", action="store_true", help="print the cells as JSON, and no more")
    options = parser.parse_args(arguments)
    names = options.layout or [one.name for one in kvloom.layouts() if not one.unsupported]
    tokens, seconds = options.tokens, options.seconds
    if options.quick:
        names, tokens, seconds = names[::8], TOKENS[:3], 0.05
    load = os.getloadavg()[0]
    cells = list(measured(names, tokens, options.layers, seconds))
    if options.cells:
        print(json.dumps([asdict(cell) for cell in cells]))
        return 0
    figures = summary(cells)
    print("\n".join([*table(cells), "", *figure_table(figures)]))
    if not options.quick and not options.layout:
        grown = growth()
        keep(cells, grown, figures, [load, os.getloadavg()[0]])
    return int(any(one["kept"] is False for one in figures))


# --- measuring ------------------------------------------------------------------------------------


def measured(
    names: Sequence[str], tokens: Sequence[int], layers: int | None, seconds: float
) -> Iterator[Cell]:
    """The cells of these layouts and sizes, with a progress bar."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(names) * len(tokens) * len(KINDS) * len(OPS))
        for name in names:
            progress.update(task, description=name)
            for cell in of_layout(kvloom.layout(name), tokens, layers, seconds):
                progress.advance(task)
                yield cell


def of_layout(
    layout: kvloom.Layout, tokens: Sequence[int], layers: int | None, seconds: float
) -> Iterator[Cell]:
    """The cells of one layout; a quarter more blocks than the largest call moves."""
    model = kvloom.model(MODELS[layout.attention])
    random = torch.Generator().manual_seed(0)
    blocks = max(tokens) // BLOCK_SIZE * 5 // 4 + 1
    tensors = layout.empty(
        layers=layers or model.layers,
        blocks=blocks,
        block_size=BLOCK_SIZE,
        heads=model.heads,
        head_size=model.head_size,
        dtype=model.dtype,
    )
    cache = layout.bind(tensors, block_size=BLOCK_SIZE)
    everything = cache.empty_chunk(cache.capacity)
    everything.view(torch.int64).random_()  # pages that were never written are no memory yet
    cache.scatter(everything, slots=range(cache.capacity))
    del everything
    for count in tokens:
        chosen = torch.randperm(blocks, generator=random)[: count // BLOCK_SIZE]
        inside = (chosen[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
        calls: dict[str, dict[str, Any]] = {
            "blocks": {"blocks": chosen},
            "slots": {"slots": inside},
            "scattered": {"slots": torch.randperm(cache.capacity, generator=random)[:count]},
        }
        chunk = cache.empty_chunk(count)
        source, target = torch.empty_like(chunk), torch.empty_like(chunk)
        for tensor in (chunk, source, target):
            tensor.view(torch.uint8).fill_(1)
        for kind, call in calls.items():
            for op in OPS:
                if op == "gather":
                    run = partial(cache.gather, out=chunk, **call)
                else:
                    run = partial(cache.scatter, chunk, **call)
                both = peer.pair(cache, tensors, chunk, op, call) if BESIDE_LMCACHE else None
                actions = [run, partial(target.copy_, source), *(both or ())]
                ours, theirs, *others = in_turns(actions, seconds)
                selection = cache.select(op, "blocks" if kind == "blocks" else "slots", chunk)
                yield Cell(
                    layout=layout.name,
                    op=op,
                    kind=kind,
                    tokens=count,
                    layers=cache.layers,
                    threads=threads(),
                    run_bytes=min(selection.run_bytes),
                    nbytes=chunk.nbytes,
                    seconds=ours,
                    copy_seconds=theirs,
                    in_place_seconds=others[0] if both else None,
                    lmcache_seconds=others[1] if both else None,
                )


def in_turns(actions: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """The medians of all, run in turns after a first time that counts for nothing."""
    times: list[list[float]] = [[] for _ in actions]
    begun = time.perf_counter()
    for action in actions:
        action()
    while len(times[0]) < 5 or time.perf_counter() - begun < seconds:
        for action, found in zip(actions, times, strict=True):
            rest_until = time.perf_counter() + REST
            while (start := time.perf_counter()) < rest_until:
                pass
            action()
            found.append(time.perf_counter() - start)
    return [median(found) for found in times]


def growth() -> dict[str, list[Cell]]:
    """How the cost of a layout's calls grows with tokens, layers and threads."""
    layout = ["--layout", "NL_X_TWO_NB_BS_NH_HS"]
    by_tokens = [2**power for power in range(4, 13)]
    sweeps: dict[str, list[tuple[list[str], dict[str, str]]]] = {
        "tokens": [(["--tokens", *map(str, by_tokens)], {})],
        "layers": [
            (["--tokens", "1024", "--layers", str(count)], {}) for count in (1, 2, 4, 8, 16, 32)
        ],
        "threads": [
            (["--tokens", "4096"], {"KVLOOM_NUM_THREADS": str(count)})
            for count in range(1, threads() + 1)
        ],
    }
    found: dict[str, list[Cell]] = {}
    for axis, runs in sweeps.items():
        found[axis] = []
        for arguments, variables in runs:
            printed = subprocess.run(
                [sys.executable, __file__, "--cells", *layout, *arguments],
                env={**os.environ, **variables},
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            found[axis] += [Cell(**one) for one in json.loads(printed)]
    return found


# --- what is shown and kept -----------------------------------------------------------------------


def summary(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The figures that matter, each with its limit and whether it is kept."""
    most = max(cell.tokens for cell in cells)
    regular = [cell for cell in cells if cell.kind in REGULAR and cell.tokens == most]
    by_layout = {
        name: median(cell.ratio for cell in regular if cell.layout == name)
        for name in dict.fromkeys(cell.layout for cell in regular)
    }
    worst, cell = min(by_layout, key=by_layout.__getitem__), min(regular, key=lambda c: c.ratio)
    what = f"{most} tokens, whole blocks and slots in block order"
    found = [
        _figure(f"{what}: the median layout", median(by_layout.values()), MEDIAN_REGULAR),
        _figure(f"… the worst layout, `{worst}`", by_layout[worst], WORST_REGULAR),
        _figure(f"… the worst call, {_named(cell)}", cell.ratio, WORST_REGULAR),
    ]
    scattered = [
        cell
        for cell in cells
        if cell.kind == "scattered" and cell.tokens == most and cell.run_bytes == SCATTERED_RUN
    ]
    if scattered:
        slow = min(scattered, key=lambda cell: cell.ratio)
        what = f"{most} tokens, scattered rows of 2 KiB: the worst call, {_named(slow)}"
        found.append(_figure(what, slow.ratio, SCATTERED))
    single = [
        cell
        for cell in cells
        if cell.kind == "blocks" and cell.tokens == BLOCK_SIZE and cell.layers == 32
    ]
    if single:
        slow = max(single, key=lambda cell: cell.seconds)
        found.append(
            {
                "what": f"one block of 16 tokens × 32 layers: the slowest call, {_named(slow)}",
                "value": f"{slow.seconds * 1e6:.0f} µs",
                "limit": f"below {ONE_BLOCK * 1e6:.0f} µs",
                "kept": slow.seconds < ONE_BLOCK,
            }
        )
    return [*found, *beside_lmcache([cell for cell in cells if cell.lmcache_seconds is not None])]


def beside_lmcache(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The figures of kvloom's operators in the place of LMCache's."""
    if not cells:
        return []
    worst, middle = min(cells, key=lambda cell: cell.lmcache_ratio), "the median call"
    what = f"in the place of LMCache's CPU operators, {len(cells)} calls it can do: "
    ratio = median(cell.lmcache_ratio for cell in cells)
    found = [
        _figure(what + middle, ratio, LMCACHE_MEDIAN),
        _figure(f"… the worst call, {_sized(worst)}", worst.lmcache_ratio, LMCACHE_WORST),
    ]
    single = [cell for cell in cells if cell.kind == "blocks" and cell.tokens == BLOCK_SIZE]
    if single:
        slow = min(single, key=lambda cell: cell.lmcache_ratio)
        what = f"… one block, the worst call, {_named(slow)}"
        found.append(_figure(what, slow.lmcache_ratio, LMCACHE_ONE_BLOCK))
    return found


def _sized(cell: Cell) -> str:
    return f"{_named(cell)}, {cell.tokens} tokens"


def _named(cell: Cell) -> str:
    return f"{cell.op} {cell.kind} of `{cell.layout}`"


def _figure(what: str, ratio: float, limit: float) -> dict[str, Any]:
    return {
        "what": what,
        "value": f"{ratio:.2f} ×",
        "limit": f"at least {limit} ×",
        "kept": ratio >= limit,
    }


def figure_table(figures: Sequence[dict[str, Any]]) -> list[str]:
    """The figures in Markdown."""
    met = {True: "yes", False: "not yet"}
    rows = [
        f"| {one['what']} | {one['value']} | {one['limit']} | {met[one['kept']]} |"
        for one in figures
    ]
    return ["| figure | measured | aim | met |", "| --- | --- | --- | --- |", *rows]


def table(cells: Sequence[Cell]) -> list[str]:
    """GB/s and ratio of every layout's calls of the largest size, in Markdown."""
    most = max(cell.tokens for cell in cells)
    found = {(cell.layout, cell.kind, cell.op): cell for cell in cells if cell.tokens == most}
    heads = [f"{op} {kind}" for kind in KINDS for op in OPS]
    lines = [f"| {most} tokens | {' | '.join(heads)} |", f"| --- {'| ---: ' * len(heads)}|"]
    for name in dict.fromkeys(cell.layout for cell in cells):
        row = (found[name, kind, op] for kind in KINDS for op in OPS)
        words = [f"{cell.rate:.1f} GB/s {cell.ratio:.2f}×" for cell in row]
        lines.append(f"| `{name}` | {' | '.join(words)} |")
    return lines


def keep(
    cells: Sequence[Cell],
    grown: dict[str, list[Cell]],
    figures: Sequence[dict[str, Any]],
    load: Sequence[float],
) -> None:
    """Write JSON, tables, plots and the README's table."""
    RESULTS.mkdir(exist_ok=True)
    everything = {
        "machine": facts(),
        "load": load,
        "threads": threads(),
        "figures": figures,
        "cells": [asdict(cell) for cell in cells],
        "growth": {axis: [asdict(cell) for cell in some] for axis, some in grown.items()},
    }
    (RESULTS / "transfers.json").write_text(json.dumps(everything, indent=1) + "\n")
    lines = ["# Transfers", "", *figure_table(figures), "", *table(cells), ""]
    lines += ["![Ratios](transfers.png)", "", "![Growth](growth.png)"]
    (RESULTS / "transfers.md").write_text("\n".join(lines) + "\n")
    plot_ratios(cells, RESULTS / "transfers.png")
    plot_growth(grown, RESULTS / "growth.png")
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    region = "\n".join([MARKS[0], "", *figure_table(figures), "", MARKS[1]])
    README.write_text(before + region + after, encoding="utf-8")


def plot_ratios(cells: Sequence[Cell], path: Path) -> None:
    """Each layout's ratio to a torch copy over the size of the call, one panel per kind and op."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, 3, figsize=(13, 7), sharex=True, sharey=True)
    for row, op in enumerate(OPS):
        for column, kind in enumerate(KINDS):
            axes = panels[row][column]
            for name in dict.fromkeys(cell.layout for cell in cells):
                some = [c for c in cells if (c.layout, c.op, c.kind) == (name, op, kind)]
                axes.plot([c.tokens for c in some], [c.ratio for c in some], alpha=0.6)
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set_xscale("log", base=2)
            axes.set_title(f"{op} {kind}")
            axes.set_ylim(bottom=0)
    figure.supxlabel("tokens")
    figure.supylabel("× a torch copy of the same bytes; one line a layout")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def plot_growth(grown: dict[str, list[Cell]], path: Path) -> None:
    """Milliseconds of a call over tokens, over layers and over threads."""
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(grown), figsize=(13, 4))
    for axes, (axis, cells) in zip(panels, grown.items(), strict=True):
        for op in OPS:
            for kind in KINDS:
                some = [cell for cell in cells if (cell.op, cell.kind) == (op, kind)]
                x = [getattr(cell, axis) for cell in some]
                axes.plot(x, [cell.seconds * 1e3 for cell in some], "o-", label=f"{op} {kind}")
        axes.set_xlabel(axis)
        axes.set_ylabel("ms")
        if axis != "threads":
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
            axes.set_xticks(sorted({cell.threads for cell in cells}))
    panels[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
