"""Does attention survive? Real keys and values in a paged cache: offloaded, wiped and reloaded.

``sample/README.md`` says where they come from. They are written into the cache and read from it by
torch's indexing over the axes that a layout declares: kvloom does not judge what kvloom moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import kvloom
from kvloom.verify import BLOCK_SIZE, flat, pages

SAMPLE = Path(__file__).resolve().parent / "sample" / "minilm-l6.npz"
MODELS = {"mha": "minilm-l6", "mla": "minilm-l6-latent"}


@dataclass(frozen=True)
class Survival:
    """Attention over a cache before an offload and after the reload, beside the sample's own.

    ``difference`` is the largest from the latter, NaN where wiped bytes were left over; ``ok`` says
    that all three are equal, bit by bit.
    """

    layout: str
    tokens: int
    difference: float
    ok: bool


def survival(layout: kvloom.Layout, *, seed: int = 0) -> Survival:
    """Offload the sample from random blocks, wipe the cache, and reload it into other blocks.

    Full blocks move as blocks, the tokens after them by their slots; all other slots hold noise.
    """
    generator = torch.Generator().manual_seed(seed)
    held = content(layout)
    tokens, layers, _, heads, _, head_size = held.shape
    used, full = -(-tokens // BLOCK_SIZE), tokens // BLOCK_SIZE
    sizes = {"layers": layers, "heads": heads, "head_size": head_size, "block_size": BLOCK_SIZE}
    tensors = layout.empty(**sizes, blocks=3 * used, dtype=held.dtype)
    for tensor in flat(tensors):
        tensor.normal_(generator=generator)
    old, new, _ = torch.randperm(3 * used, generator=generator).split(used)
    old_slots, new_slots = (
        (table[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:tokens]
        for table in (old, new)
    )
    for page, part in pages(layout, tensors, held):
        page[old_slots // BLOCK_SIZE, old_slots % BLOCK_SIZE] = part
    before = attention(read(layout, tensors, old_slots))

    bound = layout.bind(tensors, block_size=BLOCK_SIZE)
    blocks = bound.gather(blocks=old[:full])
    rest = bound.gather(slots=old_slots[full * BLOCK_SIZE :])
    for tensor in flat(tensors):
        tensor.fill_(float("nan"))
    bound.scatter(blocks, blocks=new[:full])
    bound.scatter(rest, slots=new_slots[full * BLOCK_SIZE :])

    after = attention(read(layout, tensors, new_slots))
    difference = float((torch.stack([before, after]) - attention(held)).abs().max())
    ok = torch.equal(before, attention(held)) and torch.equal(after, before)
    return Survival(layout.name, tokens, difference, ok)


@cache
def sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [layer, head, query, elem], and keys and values [token, layer, kv, head, elem]."""
    with np.load(SAMPLE) as arrays:
        keys, values = torch.from_numpy(arrays["keys"]), torch.from_numpy(arrays["values"])
        queries = torch.from_numpy(arrays["queries"]).float().transpose(1, 2)
    return queries, torch.stack([keys, values], 2).transpose(0, 1).contiguous()


def attention(held: torch.Tensor) -> torch.Tensor:
    """What the queries make, in fp32, of keys and values in the form of ``content``."""
    queries, both = sample()
    keys, values = held.view_as(both).permute(2, 1, 3, 0, 4).float().contiguous()
    return scaled_dot_product_attention(queries, keys, values)


def content(layout: kvloom.Layout) -> torch.Tensor:
    """The sample as the layout holds it and ``pages`` takes it: the same numbers in the same order.

    Where a layout has no K/V axis, K and V are entries of their own (K0, V0, K1, …) and count as
    layers; where it has no heads either, they stand side by side as the latent row.
    """
    _, both = sample()
    model = kvloom.model(MODELS[layout.attention])
    planes = 2 if "kv" in (*layout.lists, *layout.facts.memory) else 1
    return both.view(len(both), -1, planes, model.heads, 1, model.head_size)


def read(layout: kvloom.Layout, tensors: object, slots: torch.Tensor) -> torch.Tensor:
    """What the cache holds at ``slots``, in the form of ``content``."""
    held = torch.empty_like(content(layout))
    for page, part in pages(layout, tensors, held):
        part[:] = page[slots // BLOCK_SIZE, slots % BLOCK_SIZE]
    return held
