"""Cached keys are turned to other positions as the formula says, bit for bit, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draw import Memory
from fork import in_a_child
from kvloom import moves
from kvloom.lmcache import (
    rotary,
    rotary_embedding_k_fused,
    rotary_embedding_k_fused_strided,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# What a torch tensor of that size is seen as where bits count.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Floats = NDArray[np.float32]
Turn = Callable[[torch.Tensor, torch.Tensor, Any, Any, bool], None]


# --- the oracle ----------------------------------------------------------------------------------


def turned(key: Floats, table: Floats, old: Any, new: Any, is_neox: bool) -> Floats:
    """The key [T, NH, HS] at its new positions: numpy rounds each product and each sum."""
    found, half = key.copy(), table.shape[1] // 2
    for i in range(half):
        a, b = (i, i + half) if is_neox else (2 * i, 2 * i + 1)
        x, y = key[:, :, a], key[:, :, b]
        c, s = table[old, i][:, None], table[old, half + i][:, None]
        xc, ys, yc, xs = x * c, y * s, y * c, x * s
        x, y = xc + ys, yc - xs
        c, s = table[new, i][:, None], table[new, half + i][:, None]
        xc, ys, yc, xs = x * c, y * s, y * c, x * s
        found[:, :, a], found[:, :, b] = xc - ys, yc + xs
    assert found.dtype == np.float32
    return found


def rounded(numbers: Floats, dtype: torch.dtype) -> torch.Tensor:
    """Finite float32 numbers, each rounded once to ``dtype``, ties to even."""
    if dtype is torch.bfloat16:
        bits = numbers.view(np.uint32).astype(np.uint64)
        kept = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return torch.from_numpy(kept.astype(np.uint16).view(np.int16)).view(dtype)
    with np.errstate(over="ignore"):
        return torch.from_numpy(numbers.astype(str(dtype).removeprefix("torch.")))


def expected(key: torch.Tensor, table: torch.Tensor, old: Any, new: Any, neox: bool) -> Any:
    """The whole key afterwards, as ``key`` was before: what is past R has not changed a bit."""
    after = key.clone()
    rotated = table.shape[1]
    wide = key[..., :rotated].to(torch.float32).numpy()
    found = turned(wide, table.to(torch.float32).numpy(), old, new, neox)
    after[..., :rotated] = rounded(found, key.dtype)
    return after


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.element_size()])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are the same, also those of zeros with a sign."""
    return torch.equal(bits(one), bits(other))


# --- what is drawn -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A key in memory as engines and chunks have it, and where its tokens go."""

    shape: tuple[int, int, int]  # tokens, heads, elements from head to head
    head_size: int
    rotated: int
    dtype: torch.dtype
    table_dtype: torch.dtype
    memory: Memory
    table_padding: int
    positions: int
    index_dtype: torch.dtype
    is_neox: bool
    scale: int
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    head_size = draw(st.integers(1, 40))
    stride = draw(st.just(head_size) | st.integers(head_size, 2 * head_size))
    return Case(
        shape=(draw(st.integers(0, 5)), draw(st.integers(1, 4)), stride),
        head_size=head_size,
        rotated=2 * draw(st.integers(0, head_size // 2)),
        dtype=draw(st.sampled_from(DTYPES)),
        table_dtype=draw(st.sampled_from([*DTYPES, torch.float64])),
        memory=Memory(
            tuple(draw(st.permutations(range(3)) | st.just([0, 1, 2]))),
            tuple(draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))),
            draw(st.integers(0, 5)),
        ),
        table_padding=draw(st.integers(0, 2)),
        positions=draw(st.integers(1, 20)),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        is_neox=draw(st.booleans()),
        scale=draw(st.integers(-26, 12)),
        seed=draw(st.integers(0, 1 << 30)),
    )


class Tensors:
    """The tensors of a case; ``buffer`` is the memory around ``key``."""

    def __init__(self, case: Case) -> None:
        random = np.random.default_rng(case.seed)

        def numbers(count: int, scale: int, dtype: torch.dtype) -> torch.Tensor:
            found = random.standard_normal(count) * 2.0**scale
            return torch.from_numpy(found).to(dtype)

        strides = case.memory.strides(case.shape)
        reach = sum(size * step for size, step in zip(case.shape, strides, strict=True))
        self.buffer = numbers(case.memory.offset + reach + 1, case.scale, case.dtype)
        self.key = self.buffer.as_strided(case.shape, strides, case.memory.offset)
        width = case.rotated + case.table_padding
        table = numbers(case.positions * width, 0, case.table_dtype).view(case.positions, width)
        self.table = table[:, : case.rotated]
        self.old, self.new = (
            torch.from_numpy(random.integers(0, case.positions, case.shape[0])).to(case.index_dtype)
            for _ in range(2)
        )

    def after(self, case: Case) -> torch.Tensor:
        """The memory around the key as it must be afterwards."""
        found = self.buffer.clone()
        key = found.as_strided(self.key.shape, self.key.stride(), self.key.storage_offset())
        key.copy_(expected(self.key, self.table, self.old.numpy(), self.new.numpy(), case.is_neox))
        return found


def ramp(positions: int, rotated: int) -> torch.Tensor:
    """Cosines and sines as models have them."""
    rates = 1e4 ** -(torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), rates)
    return torch.cat([angles.cos(), angles.sin()], -1).float()


def example(
    shape: tuple[int, int, int], dtype: torch.dtype = torch.float32, rotated: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Old positions, new positions, a key and a table."""
    random = torch.Generator().manual_seed(1)
    table = ramp(500, shape[2] if rotated is None else rotated)
    old, new = (torch.randint(0, 500, (shape[0],), generator=random) for _ in range(2))
    return old, new, torch.randn(shape, generator=random).to(dtype), table


# --- what it does --------------------------------------------------------------------------------


@given(case=cases())
def test_every_bit_is_the_formulas_and_no_other_byte_changes(case: Case) -> None:
    made = Tensors(case)
    after = made.after(case)
    args = (made.old, made.new, made.key, case.head_size)
    rotary_embedding_k_fused_strided(*args, case.shape[2], made.table, case.is_neox)
    assert same(made.buffer, after)


@given(case=cases())
def test_torchs_own_arithmetic_for_other_devices_agrees(case: Case) -> None:
    made = Tensors(case)
    after = made.after(case)
    part = made.key[..., : case.rotated]
    assume(part.numel())
    positions = (made.old.long().numpy(), made.new.long().numpy())
    rotary.turn(part, made.table, *positions, case.is_neox)
    assert same(made.buffer, after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
def test_heads_without_a_stride_are_as_long_as_the_key_says(
    dtype: torch.dtype, is_neox: bool
) -> None:
    old, new, key, table = example((7, 3, 64), dtype)
    after = expected(key, table, old, new, is_neox)
    rotary_embedding_k_fused(old, new, key, 64, table, is_neox)
    assert same(key, after)


def test_a_turn_there_and_back_is_as_good_as_none() -> None:
    old, new, key, table = example((9, 2, 32))
    before = key.clone()
    rotary_embedding_k_fused(old, new, key, 32, table, True)
    assert not torch.allclose(key, before, atol=0.1)
    rotary_embedding_k_fused(new, old, key, 32, table, True)
    torch.testing.assert_close(key, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
def test_partial_rotary_leaves_the_other_dimensions_alone(
    dtype: torch.dtype, is_neox: bool
) -> None:
    """VLLM 43676."""
    old, new, key, table = example((11, 2, 128), dtype, rotated=64)
    bits(key)[0, 0, 100] = -1  # a NaN with a payload
    after = expected(key, table, old, new, is_neox)
    before = key.clone()
    rotary_embedding_k_fused(old, new, key, 128, table, is_neox)
    assert same(key[..., 64:].contiguous(), before[..., 64:].contiguous())
    assert same(key, after)
    assert not same(key, before)


@pytest.mark.parametrize("is_neox", [True, False])
def test_heads_that_hold_a_value_too_keep_it(is_neox: bool) -> None:
    old, new, both, table = example((6, 2, 2 * 32), torch.bfloat16, rotated=32)
    before = both.clone()
    after = expected(before[..., :32].contiguous(), table, old, new, is_neox)
    rotary_embedding_k_fused_strided(old, new, both, 32, 64, table, is_neox)
    assert same(both[..., :32].contiguous(), after)
    assert same(both[..., 32:].contiguous(), before[..., 32:].contiguous())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_number_is_read_and_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """All 65,536, subnormal ones, infinities and NaNs too, by factors that give each kind."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    key = torch.stack([every, every.flip(0)], -1)[:, None].contiguous()
    factors = [1.0, 0.5, -0.75, 2.0**-9, 1.0009766, 3.0, 0.33333334, 1e-8, 60000.0]
    table = torch.tensor([[factor, 0.0] for factor in factors])
    still = torch.zeros(len(key), dtype=torch.int64)
    for row, factor in enumerate(factors):
        found = key.clone()
        rotary_embedding_k_fused(still, still + row, found, 2, table, True)
        x, y = key.float().unbind(-1)
        zero = torch.zeros(())
        x, y = x + y * zero, y - x * zero
        wide = torch.stack([x * factor - y * zero, y * factor + x * zero], -1)
        right, nan = wide.to(dtype), wide.isnan()
        assert torch.equal(found.isnan(), nan), factor
        assert torch.equal(bits(found)[~nan], bits(right)[~nan]), factor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_keys_are_shared_among_threads_and_come_out_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, key, table = example((3001, 4, 64), dtype)
    alone = key.clone()
    monkeypatch.setattr(moves, "threads", lambda: 1)
    rotary_embedding_k_fused(old, new, alone, 64, table, False)
    shared: list[range] = []
    real = rotary.share

    def share(work: Any, parts: list[range], helpers: int) -> None:
        shared.extend(parts)
        real(work, parts, helpers)

    monkeypatch.setattr(rotary, "share", share)
    for module in (moves, rotary):
        monkeypatch.setattr(module, "threads", lambda: 3)
    apart = key[:100].clone()
    rotary_embedding_k_fused(old[:100], new[:100], apart, 64, table, False)
    assert not shared
    rotary_embedding_k_fused(old, new, key, 64, table, False)
    assert len(shared) > 3
    assert [token for part in shared for token in part] == list(range(3001))
    assert same(key, alone)
    assert same(key[:100], apart)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("made", ["transposed", "sliced", "permuted"])
def test_a_view_is_turned_in_place(made: str, dtype: torch.dtype) -> None:
    old, new, key, table = example((8, 3, 32), dtype)
    after = expected(key, table, old, new, True)
    if made == "transposed":
        memory = torch.empty(3, 8, 32, dtype=dtype)
        view = memory.transpose(0, 1)
    elif made == "sliced":
        memory = torch.empty(20, 7, 80, dtype=dtype)
        view = memory[4:20:2, 2:5, 16:48]
    else:
        memory = torch.empty(32, 3, 8, dtype=dtype)
        view = memory.permute(2, 1, 0)
    view.copy_(key)
    address = view.data_ptr()
    rotary_embedding_k_fused(old, new, view, 32, table, True)
    assert view.data_ptr() == address
    assert same(view.contiguous(), after)


@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 0, 8)])
def test_a_key_without_elements_is_nothing_to_do(shape: tuple[int, int, int]) -> None:
    old = torch.zeros(shape[0], dtype=torch.int64)
    rotary_embedding_k_fused(old, old, torch.empty(shape), 8, ramp(4, 8), True)


def test_a_table_without_rows_does_for_a_key_without_tokens() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    rotary_embedding_k_fused(none, none, torch.empty(0, 2, 8), 8, torch.empty(0, 8), False)


def test_a_key_made_in_inference_mode_is_turned_outside_of_it() -> None:
    old, new, key, table = example((5, 2, 16), torch.float16)
    after = expected(key, table, old, new, True)
    with torch.inference_mode():
        made, other = key.clone(), key.clone()
    rotary_embedding_k_fused(old, new, made, 16, table, True)
    rotary.turn(other, table, old.numpy(), new.numpy(), True)
    assert same(made, after)
    assert same(other, after)


def test_a_table_that_is_a_parameter_is_only_read() -> None:
    old, new, key, table = example((5, 2, 16))
    after = expected(key, table, old, new, True)
    rotary_embedding_k_fused(old, new, key, 16, torch.nn.Parameter(table), True)
    assert same(key, after)


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_forked_child_turns_keys_after_its_parent_did(
    table_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's threads, which a large tensor starts, hang in a child."""
    for module in (moves, rotary):
        monkeypatch.setattr(module, "threads", lambda: 3)
    old, new, key, table = example((2000, 8, 64), torch.bfloat16)
    table = table.to(table_dtype)
    after = expected(key, table, old, new, True)
    first = key.clone()
    rotary_embedding_k_fused(old, new, first, 64, table, True)
    torch.ones(1 << 22).add_(1)
    right = bits(after).numpy()

    def turns() -> bool:
        rotary_embedding_k_fused(old, new, key, 64, table, True)
        return bool((bits(key).numpy() == right).all())

    assert same(first, after)
    assert in_a_child(turns)


# --- what it refuses -----------------------------------------------------------------------------


def positions_with(wrong: int) -> torch.Tensor:
    return torch.tensor([0, 1, wrong, 2])


def shape_of(*sizes: int, **given: Any) -> torch.Tensor:
    return torch.zeros(sizes, **given)


REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    (name, value, error, f"{name}: {message}")
    for name in ("old_positions", "new_positions")
    for value, error, message in (
        (positions_with(-1), ValueError, "got -1 at position 2, takes 0 to 9"),
        (positions_with(10), ValueError, "got 10 at position 2, takes 0 to 9"),
        (positions_with(1 << 40), ValueError, "got 1099511627776 at position 2"),
        (torch.zeros(3, dtype=torch.int64), ValueError, "got 3, takes 4, one for each token"),
        (torch.zeros(5, dtype=torch.int32), ValueError, "got 5, takes 4, one for each token"),
        (torch.zeros(2, 2, dtype=torch.int64), ValueError, "got 2 dimensions"),
        (torch.zeros(4), TypeError, r"got a tensor of torch\.float32, takes int32 or int64"),
        (torch.zeros(4, dtype=torch.int16), TypeError, r"got a tensor of torch\.int16"),
        (torch.zeros(4, dtype=torch.bool), TypeError, r"got a tensor of torch\.bool"),
        (torch.zeros(4, dtype=torch.int64, device="meta"), ValueError, "is on the meta device"),
        ("0123", TypeError, "got str"),
        (None, TypeError, "got NoneType"),
    )
]
REFUSED += [
    ("key", [0.0], TypeError, "key: got list, takes a tensor"),
    ("key", shape_of(4, 2, 8, dtype=torch.float64), TypeError, r"key: got torch\.float64"),
    ("key", shape_of(4, 2, 8, dtype=torch.uint8), TypeError, r"key: got torch\.uint8"),
    ("key", shape_of(4, 16), ValueError, r"key: got shape \(4, 16\), takes \[T, NH, 8\]"),
    ("key", shape_of(4, 2, 9), ValueError, r"key: got shape \(4, 2, 9\), takes \[T, NH, 8\]"),
    ("key", shape_of(1, 4, 2, 8), ValueError, r"key: got shape \(1, 4, 2, 8\)"),
    ("key", shape_of(4, 2, 8, device="meta"), ValueError, "key: is on the meta device"),
    ("key", shape_of(4, 2, 8, requires_grad=True), ValueError, "key: requires grad"),
    ("key", shape_of(4, 2, 8)._neg_view(), ValueError, "key: is a conjugate or negative view"),
    ("key", shape_of(4, 2, 8).to_sparse(), TypeError, "key: got a tensor of layout"),
    ("key", shape_of(4, 1, 8).expand(4, 2, 8), ValueError, "key: .* share bytes"),
    ("key", shape_of(1, 2, 8).expand(4, 2, 8), ValueError, "key: .* share bytes"),
    ("key", shape_of(60).as_strided((4, 2, 8), (10, 5, 1)), ValueError, "key: .* share bytes"),
    ("head_size", 0, ValueError, "head_size: got 0, takes 1 or more"),
    ("head_size", -8, ValueError, "head_size: got -8, takes 1 or more"),
    ("head_size", 9, ValueError, r"head_stride: got 8, takes head_size \(9\) or more"),
    ("head_size", 8.0, TypeError, r"head_size: got 8\.0, takes an integer"),
    ("head_size", True, TypeError, "head_size: got True, takes an integer"),
    ("head_stride", 7, ValueError, r"head_stride: got 7, takes head_size \(8\) or more"),
    ("head_stride", 16, ValueError, r"key: got shape \(4, 2, 8\), takes \[T, NH, 16\]"),
    ("head_stride", "8", TypeError, "head_stride: got '8', takes an integer"),
    ("cos_sin_cache", None, TypeError, "cos_sin_cache: got NoneType, takes a tensor"),
    ("cos_sin_cache", shape_of(10, 7), ValueError, r"cos_sin_cache: got shape \(10, 7\), .* even"),
    ("cos_sin_cache", shape_of(10, 10), ValueError, "cos_sin_cache: got 10 columns, takes 8 at"),
    ("cos_sin_cache", shape_of(80), ValueError, r"cos_sin_cache: got shape \(80,\)"),
    ("cos_sin_cache", shape_of(10, 8).int(), TypeError, r"cos_sin_cache: got torch\.int32"),
    ("cos_sin_cache", shape_of(10, 8, device="meta"), ValueError, "cos_sin_cache: is on meta"),
    ("cos_sin_cache", shape_of(10, 8)._neg_view(), ValueError, "cos_sin_cache: is a conjugate or"),
    ("cos_sin_cache", shape_of(10, 8).to_sparse(), TypeError, "cos_sin_cache: got a tensor of lay"),
    ("is_neox", "yes", TypeError, "is_neox: got 'yes', takes a bool"),
    ("is_neox", None, TypeError, "is_neox: got None, takes a bool"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), REFUSED)
def test_a_wrong_argument_is_named_and_nothing_changes(
    name: str, value: Any, error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {
        "old_positions": torch.tensor([0, 1, 2, 3]),
        "new_positions": torch.tensor([9, 8, 7, 6], dtype=torch.int32),
        "key": torch.randn(4, 2, 8),
        "head_size": 8,
        "head_stride": 8,
        "cos_sin_cache": ramp(10, 8),
        "is_neox": True,
        name: value,
    }
    key = given["key"]
    dense = isinstance(key, torch.Tensor) and key.device.type == "cpu" and not key.is_sparse
    before = key.detach().clone() if dense else None
    with pytest.raises(error, match=f"^{message}"):
        rotary_embedding_k_fused_strided(**given)
    if before is not None:
        assert same(key.detach().resolve_neg().contiguous(), before.resolve_neg().contiguous())


def test_a_key_that_lies_on_the_table_is_refused() -> None:
    memory = torch.randn(200)
    before = memory.clone()
    key, table = memory[:64].view(4, 2, 8), memory[56:136].view(10, 8)
    still = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="key and cos_sin_cache share bytes"):
        rotary_embedding_k_fused(still, still, key, 8, table, True)
    assert same(memory, before)
    rotary_embedding_k_fused(still, still, key, 8, memory[64:144].view(10, 8), True)


def test_without_a_stride_heads_are_as_wide_as_they_are_long() -> None:
    old, new, key, table = example((4, 2, 16))
    before = key.clone()
    with pytest.raises(ValueError, match=r"^key: got shape \(4, 2, 16\), takes \[T, NH, 8\]"):
        rotary_embedding_k_fused(old, new, key, 8, table[:, :8], True)
    assert same(key, before)
