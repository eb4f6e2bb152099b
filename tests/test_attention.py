"""Attention over real keys and values survives an offload in every layout, or is said not to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import attention
import demo
import kvloom

FOLDER = attention.SAMPLE.parent
TOKENS, QUERIES = 134, 8
WITH_KERNELS = [layout for layout in kvloom.layouts() if not layout.unsupported]

every_layout = pytest.mark.parametrize("layout", WITH_KERNELS, ids=lambda layout: layout.name)


@pytest.fixture(scope="module")
def arrays() -> dict[str, NDArray[Any]]:
    with np.load(attention.SAMPLE) as file:
        return dict(file)


def spoil(
    monkeypatch: pytest.MonkeyPatch, addressing: str, change: Callable[[torch.Tensor], object]
) -> None:
    """Let scatters with this addressing write what ``change`` makes of their chunk, in place."""
    scatter = kvloom.Cache.scatter

    def spoiled(cache: kvloom.Cache, chunk: torch.Tensor, **named: Any) -> None:
        if addressing in named:
            change(chunk)
        scatter(cache, chunk, **named)

    monkeypatch.setattr(kvloom.Cache, "scatter", spoiled)


def flip_lowest_bit(chunk: torch.Tensor) -> None:
    """In the first element: of a key of the first layer, in every chunk layout."""
    chunk.view(torch.int16).view(-1)[0] ^= 1


# --- a cache with the sample in it --------------------------------------------------------------


@every_layout
def test_attention_survives_an_offload(layout: kvloom.Layout) -> None:
    assert attention.survival(layout) == attention.Survival(layout.name, TOKENS, 0.0, ok=True)


@every_layout
@pytest.mark.parametrize("addressing", ["blocks", "slots"])
def test_one_wrong_bit_after_a_reload_is_noticed(
    layout: kvloom.Layout, addressing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, addressing, flip_lowest_bit)
    found = attention.survival(layout)
    assert not found.ok
    assert 0 < found.difference < 1


@every_layout
def test_tokens_left_wiped_are_noticed(
    layout: kvloom.Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvloom.Cache, "scatter", lambda *_, **__: None)
    found = attention.survival(layout)
    assert not found.ok
    assert math.isnan(found.difference)


def test_the_demo_fails_where_attention_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = WITH_KERNELS[:2]

    def survival(layout: kvloom.Layout, *, seed: int) -> attention.Survival:
        return attention.Survival(layout.name, TOKENS, 0.25, ok=layout is one)

    monkeypatch.setattr(demo, "survival", survival)
    small = ["--cache-mib", "1", "--blocks", "2"]
    assert demo.main(["--layout", one.name, *small]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "same before and after, bit by bit. PASS: 1 layout," in said
    assert demo.main(["--layout", one.name, "--layout", other.name, *small]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"{other.name}: attention over real keys and values differs by 2.5e-01" in said
    assert said.endswith(f"FAIL: 1 of 2 layouts: {other.name}")


# --- the sample ---------------------------------------------------------------------------------


def test_the_sample_is_what_its_script_says(arrays: dict[str, NDArray[Any]]) -> None:
    model = kvloom.model("minilm-l6")
    row = (model.heads, model.head_size)
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
        "keys": ((model.layers, TOKENS, *row), np.float16),
        "values": ((model.layers, TOKENS, *row), np.float16),
        "queries": ((model.layers, QUERIES, *row), np.float16),
        "outputs": ((model.layers, QUERIES, *row), np.float32),
    }
    assert all(np.isfinite(array).all() for array in arrays.values())


@pytest.mark.parametrize("name", ["keys", "values"])
def test_no_two_tokens_of_the_sample_are_alike(name: str, arrays: dict[str, NDArray[Any]]) -> None:
    for layer in arrays[name]:
        assert len(np.unique(layer.reshape(TOKENS, -1), axis=0)) == TOKENS


def test_attention_over_the_sample_is_the_models_own(arrays: dict[str, NDArray[Any]]) -> None:
    """All that may differ is what rounding to fp16 takes away."""
    found = attention.attention(attention.content(WITH_KERNELS[0])).transpose(1, 2)
    assert np.abs(found.numpy() - arrays["outputs"]).max() < 2e-3


def test_the_sample_ends_inside_a_block() -> None:
    assert TOKENS % attention.BLOCK_SIZE


def test_the_sample_is_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir() if file.is_file()) <= 2 << 20


def test_a_latent_row_has_room_for_keys_and_values_of_every_head() -> None:
    whole, latent = (kvloom.model(name) for name in attention.MODELS.values())
    assert latent.head_size == 2 * whole.heads * whole.head_size
    assert (latent.layers, latent.dtype) == (whole.layers, whole.dtype)
