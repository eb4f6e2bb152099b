"""What startup.py times, run once in a fresh process: prints a list of seconds, in order.

    first_use.py imports NAME ...           import each, one after the other
    first_use.py calls LAYOUT KERNEL ...    first calls; the kernel "empty" is an njit that is empty

A name among the imports that is no module is an expression of kvloom, such as kvloom.layouts().
"""

# Nothing else is imported here: what a measured import needs must be loaded by that import.
import json
import sys
import time

SIZES = {"layers": 2, "blocks": 4, "block_size": 16, "heads": 2, "head_size": 8}


def imports(*names):
    """Seconds that each name takes to import or to evaluate."""
    seconds, seen = [], {}
    for name in names:
        code = compile(name if "(" in name else f"import {name}", "<timed>", "exec")
        start = time.perf_counter()
        exec(code, seen)
        seconds.append(time.perf_counter() - start)
    return seconds


def calls(name, *kernels):
    """Seconds from call to return, on a small bound cache of the layout, of each kernel in turn."""
    import numba
    import torch

    import kvloom

    @numba.njit(cache=True)
    def empty():
        pass

    layout = kvloom.layout(name)
    heads = SIZES["heads"] if layout.facts.attention == "mha" else 1
    tensors = layout.empty(**{**SIZES, "heads": heads}, dtype=torch.bfloat16)
    cache = layout.bind(tensors, block_size=SIZES["block_size"])
    seconds = []
    for kernel in kernels:
        run = empty if kernel == "empty" else transfer(cache, kernel)
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def transfer(cache, kernel):
    """A call that runs this kernel and moves 32 tokens."""
    op, addressing = kernel.split("_")
    index = {"slots": list(range(32)), "blocks": [0, 1]}[addressing]
    chunk = cache.empty_chunk(32)
    if op == "gather":
        return lambda: cache.gather(**{addressing: index}, out=chunk)
    return lambda: cache.scatter(chunk, **{addressing: index})


if __name__ == "__main__":
    print(json.dumps({"imports": imports, "calls": calls}[sys.argv[1]](*sys.argv[2:])))
