# Generated from specs/models by `make generate`; do not edit.
"""The KV-cache geometries of known models."""

from __future__ import annotations

from kvloom._abi import ModelFacts

MODELS: dict[str, ModelFacts] = {
    "deepseek-v3": ModelFacts(
        name="deepseek-v3",
        doc=(
            "DeepSeek-V3, multi-head latent attention: a latent of 512 and a rope part of 64, one"
            " vector per token and layer. A token is 68.6 KiB of cache over all layers."
        ),
        attention="mla",
        layers=61,
        heads=1,
        head_size=576,
        dtype="bf16",
    ),
    "llama-3-8b": ModelFacts(
        name="llama-3-8b",
        doc=(
            "Llama 3 8B, grouped-query attention: 32 query heads share 8 KV heads. A token is 128"
            " KiB of cache over all layers."
        ),
        attention="mha",
        layers=32,
        heads=8,
        head_size=128,
        dtype="bf16",
    ),
    "minilm-l6": ModelFacts(
        name="minilm-l6",
        doc=(
            "all-MiniLM-L6-v2, multi-head attention: small enough that a sample of its real keys "
            "and values lies in examples/sample. A token is 9 KiB of cache over all layers."
        ),
        attention="mha",
        layers=6,
        heads=12,
        head_size=32,
        dtype="fp16",
    ),
    "minilm-l6-latent": ModelFacts(
        name="minilm-l6-latent",
        doc=(
            "all-MiniLM-L6-v2 as MLA layouts can hold it: K and V stand side by side as the "
            "latent row, which is {fuse: [kv, head, elem]}, 2 × 12 heads of 32. A token is 9 KiB "
            "of cache over all layers."
        ),
        attention="mla",
        layers=6,
        heads=1,
        head_size=768,
        dtype="fp16",
    ),
    "qwen1.5-7b": ModelFacts(
        name="qwen1.5-7b",
        doc=(
            "Qwen1.5 7B, multi-head attention: as many KV heads as query heads. A token is 512 "
            "KiB of cache over all layers."
        ),
        attention="mha",
        layers=32,
        heads=32,
        head_size=128,
        dtype="bf16",
    ),
    "qwen2.5-7b": ModelFacts(
        name="qwen2.5-7b",
        doc=(
            "Qwen2.5 7B, grouped-query attention: 28 query heads share 4 KV heads. A token is 56 "
            "KiB of cache over all layers."
        ),
        attention="mha",
        layers=28,
        heads=4,
        head_size=128,
        dtype="bf16",
    ),
}
