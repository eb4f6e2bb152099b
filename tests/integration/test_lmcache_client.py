"""LMCache's client moves blocks of every format it can find through kvloom's operators.

Its own gather and scatter decide what kvloom's operator is handed: tensors, or addresses of pinned
memory, as they would for compiled operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache", reason="`make test` puts LMCache on the path")

from lmcache import device_ops
from lmcache.v1.multiprocess.transfer_context import base
from lmcache.v1.platform import torch_ops

import kvloom.lmcache
from engines import BLOCK_SIZE, BLOCKS, ENGINES, LAYERS, PADDED, Engine, content, copies, memory

pytestmark = pytest.mark.lmcache

PER_CHUNK = 2
# Five chunks: compiled operators are given four at a time.
IDS = [3, 1, 6, 0, 12, 5, 2, 9, 11, 7]
# Formats that LMCache's own operators can't move when they are given so.
THEIRS_FAIL = {("tensors", 15), ("addresses", 16)}

Calls = list[tuple[int, bool]]


@pytest.fixture(params=["tensors", "addresses"])
def given(request: pytest.FixtureRequest, bound: pytest.MonkeyPatch) -> str:
    """What LMCache's client hands to an operator."""
    kind: str = request.param
    if kind == "addresses":
        _give_addresses(bound)
    return kind


def _give_addresses(bound: pytest.MonkeyPatch) -> None:
    allocate = torch.empty

    @wraps(allocate)
    def pageable(*arguments: Any, **named: Any) -> torch.Tensor:
        named.pop("pin_memory", None)  # refused without an accelerator
        return allocate(*arguments, **named)

    bound.setattr(base, "_detect_block_transfer_accepts_tensor", lambda operator: False)
    bound.setattr(torch, "empty", pageable)
    bound.setattr(torch.Tensor, "is_pinned", lambda self, *_: True)


@pytest.fixture
def calls(bound: pytest.MonkeyPatch) -> Calls:
    """The formats that kvloom's operator was called with, and whether with addresses."""
    found: Calls = []
    operator = kvloom.lmcache.multi_layer_block_kv_transfer

    @wraps(operator)
    def watched(paged: Any, *rest: Any) -> None:
        found.append((int(rest[6]), isinstance(paged, torch.Tensor) and paged.dim() == 1))
        operator(paged, *rest)

    bound.setattr(device_ops, "multi_layer_block_kv_transfer", watched)
    return found


def gather(engine: Engine, tensors: list[torch.Tensor], **more: Any) -> list[torch.Tensor]:
    return base.gather_paged_kv_to_cpu(
        _registered(engine, tensors),
        IDS,
        PER_CHUNK,
        layout_hints=engine.hints,
        engine_type=engine.engine,
        **more,
    )


def scatter(
    engine: Engine,
    tensors: list[torch.Tensor],
    chunks: list[torch.Tensor],
    ids: Sequence[int] = IDS,
    **more: Any,
) -> None:
    base.scatter_cpu_to_paged_kv(
        _registered(engine, tensors),
        [*ids],
        chunks,
        PER_CHUNK,
        layout_hints=engine.hints,
        engine_type=engine.engine,
        **more,
    )


def _registered(engine: Engine, tensors: list[torch.Tensor]) -> dict[str, Any]:
    return {f"layer.{number}": one for number, one in enumerate(engine.registered(tensors))}


def expected_chunks(engine: Engine, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the blocks of each chunk have, in the shape that LMCache gives its chunks."""
    rows = engine.rows(tensors, IDS).split(PER_CHUNK * BLOCK_SIZE, dim=2)
    return [part if engine.planes == 2 else part[0] for part in rows]


def random_chunks(engine: Engine) -> list[torch.Tensor]:
    """Chunks with other bytes than the cache of the same engine."""
    return [one.contiguous() for one in expected_chunks(engine, engine.allocate(seed=2))]


def by_their_operators(bound: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """What ``run`` gives with LMCache's own operators instead of kvloom's."""
    with bound.context() as patch:
        theirs = torch_ops.multi_layer_block_kv_transfer
        patch.setattr(device_ops, "multi_layer_block_kv_transfer", theirs)
        return run()


@pytest.mark.parametrize("name", ENGINES)
def test_a_gather_in_lmcache_holds_what_its_own_operators_give(
    name: str, given: str, calls: Calls, bound: pytest.MonkeyPatch
) -> None:
    engine = ENGINES[name]
    tensors = engine.allocate(seed=1)
    before = memory(tensors)
    chunks = gather(engine, tensors)
    assert {*calls} == {(engine.format, given == "addresses")}
    assert [one.shape for one in chunks] == [one.shape for one in random_chunks(engine)]
    assert [*map(content, chunks)] == [*map(content, expected_chunks(engine, tensors))]
    assert memory(tensors) == before
    if (given, engine.format) not in THEIRS_FAIL:
        theirs = by_their_operators(bound, lambda: gather(engine, tensors))
        assert [*map(content, chunks)] == [*map(content, theirs)]


@pytest.mark.parametrize("skipped", [0, 3])
@pytest.mark.parametrize("name", ENGINES)
def test_a_scatter_in_lmcache_changes_what_its_own_operators_change(
    name: str, skipped: int, given: str, calls: Calls, bound: pytest.MonkeyPatch
) -> None:
    engine = ENGINES[name]
    tensors, chunks = engine.allocate(seed=1), random_chunks(engine)
    expected, theirs = copies(tensors), copies(tensors)
    sent = [*map(content, chunks)]
    skip = {"skip_first_n_tokens": skipped * BLOCK_SIZE}
    scatter(engine, tensors, chunks, **skip)
    assert {*calls} == {(engine.format, given == "addresses")}
    rows = torch.cat(chunks, dim=-2).view(engine.planes, LAYERS, len(IDS) * BLOCK_SIZE, -1)
    engine.put(expected, IDS[skipped:], rows[:, :, skipped * BLOCK_SIZE :])
    assert memory(tensors) == memory(expected)
    assert [*map(content, chunks)] == sent
    if (given, engine.format) not in THEIRS_FAIL:
        by_their_operators(bound, lambda: scatter(engine, theirs, chunks, **skip))
        assert memory(tensors) == memory(theirs)


@pytest.mark.parametrize("name", PADDED)
def test_the_bytes_between_padded_blocks_stay_in_lmcache(
    name: str, calls: Calls, bound: pytest.MonkeyPatch
) -> None:
    engine = PADDED[name]
    tensors, other = engine.allocate(seed=1), random_chunks(engine)
    chunks = gather(engine, tensors)
    assert [*map(content, chunks)] == [*map(content, expected_chunks(engine, tensors))]
    theirs = by_their_operators(bound, lambda: gather(engine, tensors))
    assert [*map(content, chunks)] == [*map(content, theirs)]
    expected = copies(tensors)
    rows = torch.cat(other, dim=-2).view(engine.planes, LAYERS, len(IDS) * BLOCK_SIZE, -1)
    engine.put(expected, IDS, rows)
    scatter(engine, tensors, other)
    assert memory(tensors) == memory(expected)
    assert {*calls} == {(engine.format, False)}


@pytest.mark.parametrize("name", ["id1", "id3", "id6", "id12"])
def test_lmcache_gathers_chosen_chunks_into_buffers_of_its_own(
    name: str, given: str, calls: Calls
) -> None:
    engine = ENGINES[name]
    tensors, buffers = engine.allocate(seed=1), random_chunks(engine)[:3]
    untouched = content(buffers[2])
    chunks = gather(engine, tensors, out=buffers, chunk_indices=[4, 1])
    assert [one.data_ptr() for one in chunks] == [one.data_ptr() for one in buffers[:2]]
    wanted = expected_chunks(engine, tensors)
    assert [*map(content, chunks)] == [content(wanted[4]), content(wanted[1])]
    assert content(buffers[2]) == untouched
    assert {*calls} == {(engine.format, given == "addresses")}


@pytest.mark.parametrize("block", [BLOCKS, -1])
def test_a_block_that_is_not_there_is_refused_before_a_byte_moves_in_lmcache(
    block: int, calls: Calls
) -> None:
    engine = ENGINES["id1"]
    tensors, chunks = engine.allocate(seed=1), random_chunks(engine)
    before = memory(tensors)
    with pytest.raises(ValueError, match=f"^block_ids: got {block} at position 9, takes"):
        scatter(engine, tensors, chunks, ids=[*IDS[:-1], block])
    assert memory(tensors) == before
    assert {*calls} == {(engine.format, False)}


def test_lmcache_hands_tensors_to_kvloom_without_being_told(bound: pytest.MonkeyPatch) -> None:
    operator = device_ops.multi_layer_block_kv_transfer
    assert operator is kvloom.lmcache.multi_layer_block_kv_transfer
    assert base._detect_block_transfer_accepts_tensor(operator)
