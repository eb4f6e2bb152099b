"""What several Python threads move together when all of them gather and scatter at once.

The same eight chunks, each with blocks of its own in one cache, are dealt out to as many threads
as there are: fewer threads have more each, so that all of them together always touch the same
bytes. The single thread with which the others are compared takes turns with them, in the same
process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from statistics import median

import torch
from machine import facts

import kvloom
from kvloom.processors import threads

RESULT = Path(__file__).resolve().parent / "results" / "callers.json"
LAYOUT, MODEL, BLOCK_SIZE = "NL_X_TWO_NB_BS_NH_HS", "llama-3-8b", 16
CALLERS = (1, 2, 4, 8)
TOKENS = (16, 256)
TURNS = 5


def main(arguments: list[str] | None = None) -> int:
    """Measure, show, keep; 1 where a byte is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each turn")
    parser.add_argument("--quick", action="store_true", help="short turns, kept nowhere")
    options = parser.parse_args(arguments)
    seconds = 0.1 if options.quick else options.seconds
    found = [measured(tokens, seconds) for tokens in TOKENS]
    print(f"GB/s together, and × one caller; {threads()} processors")
    for one in found:
        words = [
            f"{count} callers {rate:.1f} ({rate / one['rates']['1']:.2f} ×)"
            for count, rate in one["rates"].items()
        ]
        print(f"{one['tokens']} tokens a call: {', '.join(words)}; right: {one['right']}")
    if not options.quick:
        kept = {"machine": facts(), "load": os.getloadavg()[0], "layout": LAYOUT, "cells": found}
        RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    return int(not all(one["right"] for one in found))


def measured(tokens: int, seconds: float) -> dict:
    """Medians over the turns of what each number of callers moves, in GB/s."""
    model, layout = kvloom.model(MODEL), kvloom.layout(LAYOUT)
    each = tokens // BLOCK_SIZE
    tensors = layout.empty(
        layers=model.layers,
        blocks=max(CALLERS) * each,
        block_size=BLOCK_SIZE,
        heads=model.heads,
        head_size=model.head_size,
        dtype=model.dtype,
    )
    cache = layout.bind(tensors)
    blocks = torch.randperm(max(CALLERS) * each).split(each)
    chunks = [cache.empty_chunk(tokens) for _ in blocks]
    for number, (chunk, mine) in enumerate(zip(chunks, blocks, strict=True)):
        chunk.fill_(number + 1)
        cache.scatter(chunk, blocks=mine)
    samples: dict[int, list[float]] = {count: [] for count in CALLERS}
    for _ in range(TURNS):
        for count, rates in samples.items():
            moved = [0] * count
            end = time.perf_counter() + seconds

            def run(number: int, moved: list[int] = moved, end: float = end) -> None:
                while time.perf_counter() < end:
                    for mine in range(number, len(chunks), len(moved)):
                        cache.gather(out=chunks[mine], blocks=blocks[mine])
                        cache.scatter(chunks[mine], blocks=blocks[mine])
                        moved[number] += 2 * chunks[mine].nbytes

            start = time.perf_counter()
            callers = [threading.Thread(target=run, args=(number,)) for number in range(count)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()
            rates.append(sum(moved) / (time.perf_counter() - start) / 1e9)
    right = all(
        bool((cache.gather(blocks=mine) == number + 1).all()) for number, mine in enumerate(blocks)
    )
    rates = {str(count): median(found) for count, found in samples.items()}
    return {"tokens": tokens, "rates": rates, "right": right}


if __name__ == "__main__":
    sys.exit(main())
