"""Caches that are not on the CPU are moved by torch's indexing, under the rules of all transfers.

That its bytes are right is tested on the CPU, by tests/test_transfer_rules.py. Here devices are
torch's ``meta``, which has shapes but no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvloom
import oracle
from kvloom.select import choose_backend

NHD = "NL_X_TWO_NB_BS_NH_HS"
WITH_KERNELS = [layout for layout in kvloom.layouts() if not layout.unsupported]
every_layout = pytest.mark.parametrize("layout", WITH_KERNELS, ids=lambda layout: layout.name)


def cache_on(device: str, layout: kvloom.Layout | str = NHD, **changes: Any) -> kvloom.Cache:
    if isinstance(layout, str):
        layout = kvloom.layout(layout)
    sizes = {"layers": 3, "blocks": 5, "block_size": 4, "head_size": 8, "dtype": "bf16"}
    sizes["heads"] = 2 if "head" in layout.facts.memory else 1
    return layout.bind(layout.empty(**{**sizes, **changes}, device=device), block_size=4)


@every_layout
def test_a_cache_on_another_device_gives_chunks_on_that_device(layout: kvloom.Layout) -> None:
    there, here = cache_on("meta", layout), cache_on("cpu", layout)
    assert (there.backend, here.backend) == ("torch", "cpu")
    for request in ({"slots": [3, -1, 19]}, {"blocks": [4, 0], "skip_prefix": 1}):
        chunk, expected = there.gather(**request), here.gather(**request)
        assert isinstance(chunk, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert (chunk.device.type, chunk.dtype) == ("meta", torch.bfloat16)
        assert chunk.shape == expected.shape
        there.scatter(chunk, **request)


def test_a_cache_on_a_gpu_is_left_to_torch() -> None:
    assert choose_backend("cuda", None) == "torch"


class Calls(TorchDispatchMode):
    """Counts what is asked of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@every_layout
def test_the_work_for_torch_does_not_grow_with_the_tokens(layout: kvloom.Layout) -> None:
    counts = []
    for tokens in (2, 16):
        cache = cache_on("meta", layout)
        chunk = cache.empty_chunk(tokens)
        with Calls() as calls:
            cache.gather(slots=range(tokens), out=chunk)
            cache.scatter(chunk, slots=range(tokens))
        counts.append(calls.count)
    assert counts[0] == counts[1] > 0


def test_the_backend_can_be_chosen_on_the_cpu() -> None:
    layout = kvloom.layout(NHD)
    tensors = layout.empty(
        layers=3, blocks=5, block_size=4, heads=2, head_size=8, dtype=torch.int16
    )
    for tensor in oracle.flat(tensors):
        tensor.random_()
    chunks = []
    for backend in ("cpu", "torch"):
        cache = layout.bind(tensors, backend=backend)
        assert cache.backend == cache.select("gather", "slots").backend == backend
        chunks.append(cache.gather(slots=[7, 0, 19]))
    assert torch.equal(*chunks)


def test_a_selection_by_indexing_says_so() -> None:
    selection = cache_on("meta").select("gather", "blocks")
    assert str(selection).startswith("gather by blocks on torch, chunk layout two_plane: torch's")


@pytest.mark.parametrize(
    ("device", "backend", "says"),
    [
        ("meta", "cpu", "backend: got 'cpu', takes 'torch' for tensors on meta"),
        ("cpu", "cuda", "backend: got 'cuda', takes cpu or torch"),
    ],
)
def test_a_backend_that_cannot_reach_the_tensors_is_refused(
    device: str, backend: Any, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        kvloom.layout(NHD).bind([torch.empty(2, 5, 4, 2, 8, device=device)], backend=backend)


def test_tensors_of_a_cache_are_on_one_device() -> None:
    tensors = [torch.empty(2, 5, 4, 2, 8, device=device) for device in ("meta", "cpu")]
    with pytest.raises(ValueError, match=r"tensors\[1\]: is on cpu, takes meta"):
        kvloom.layout(NHD).bind(tensors)


@pytest.mark.parametrize(("cache", "chunk"), [("meta", "cpu"), ("cpu", "meta")])
def test_a_chunk_on_another_device_is_refused(cache: str, chunk: str) -> None:
    there = cache_on(cache)
    given = torch.empty(2, 3, 2, 16, dtype=torch.bfloat16, device=chunk)
    with pytest.raises(ValueError, match=f"out: is on {chunk}, takes {cache}"):
        there.gather(slots=[0, 1], out=given)
    with pytest.raises(ValueError, match=f"source: is on {chunk}, takes {cache}"):
        there.scatter(given, slots=[0, 1])


def test_slots_without_values_are_refused() -> None:
    with pytest.raises(ValueError, match="slots: is on the meta device"):
        cache_on("meta").gather(slots=torch.zeros(2, dtype=torch.int64, device="meta"))


def buffer(count: int) -> torch.Tensor:
    return torch.empty(count, 2, 5, 4, 2, 8, device="meta")


def test_shared_bytes_are_seen_on_devices_without_addresses() -> None:
    one = buffer(3)
    apart: Sequence[torch.Tensor] = [one[0], one[1], buffer(1)[0]]
    cache = kvloom.layout(NHD).bind(apart)
    with pytest.raises(ValueError, match="share"):
        kvloom.layout(NHD).bind([one[0], one[1], one[1]])
    inside = one.view(-1)[: 2 * 3 * 2 * 16].view(2, 3, 2, 16)
    with pytest.raises(ValueError, match="share"):
        cache.gather(slots=[0, 1], out=inside)
    behind = one[2].view(-1)[: 2 * 3 * 1 * 16].view(2, 3, 1, 16)
    cache.gather(slots=[0], out=behind)


def test_chunks_of_many_storages_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.tensors._MOST_STORAGES", 6)
    cache = cache_on("meta")
    kept = [cache.gather(slots=[number]) for number in range(20)]
    assert len(kept) == 20
    assert len(cache._home._storages) <= 6
