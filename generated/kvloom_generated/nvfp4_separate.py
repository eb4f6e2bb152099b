# Generated from specs/layouts/NVFP4_SEPARATE.yaml by `make generate`; do not edit.
"""NVFP4_SEPARATE: FlashInfer NVFP4 with separate scales, TensorRT-LLM NVFP4 with a scale pool.

4-bit K and V with one fp8 scale for 16 elements, the scales in a tensor of their own. Each layer is
a data tensor and a scale tensor with the same order of axes and different widths; moving one
without the other leaves numbers that look valid.

    layer    | 0 | 1 | … | NL-1 |       a list
    field    | 0 | 1 | … | NP-1 |       a list
    data     a tensor of 4-bit
      block  | 0 | 1 | … | NB-1 |       BS·NH·HS bytes each
      kv     | key | value |            BS·NH·HS/2 bytes each
      head   | 0 | 1 | … | NH-1 |       BS·HS/2 bytes each
      token  | 0 | 1 | … | BS-1 |       HS/2 bytes each
      elem   | 0 | 1 | … | HS-1 |       1/2 bytes each
    scale    a tensor of fp8
      block  | 0 | 1 | … | NB-1 |       2·BS·NH·(HS/16) bytes each
      kv     | key | value |            BS·NH·(HS/16) bytes each
      head   | 0 | 1 | … | NH-1 |       BS·(HS/16) bytes each
      token  | 0 | 1 | … | BS-1 |       (HS/16) bytes each
      elem   | 0 | 1 | … | (HS/16)-1 |  1 bytes each

Where an element of each part lies, in bytes, in a tight cache (slot = block·BS + token):

    data:
        tensor[2·layer]
            + block · BS·NH·HS
            + kv · BS·NH·HS/2
            + head · BS·HS/2
            + token · HS/2
            + elem · 1/2
    scale:
        tensor[2·layer + 1]
            + block · 2·BS·NH·(HS/16)
            + kv · BS·NH·(HS/16)
            + head · BS·(HS/16)
            + token · (HS/16)
            + elem · 1
"""

from __future__ import annotations

from kvloom._abi import EngineFacts, LayoutFacts

LAYOUT = LayoutFacts(
    name="NVFP4_SEPARATE",
    module="nvfp4_separate",
    id=None,
    attention="mha",
    engines=(
        EngineFacts(
            name="FlashInfer NVFP4 with separate scales",
            alias="flashinfer-nvfp4-separate",
        ),
        EngineFacts(
            name="TensorRT-LLM NVFP4 with a scale pool",
            alias="tensorrt-llm-nvfp4-separate",
        ),
    ),
    doc=(
        "4-bit K and V with one fp8 scale for 16 elements, the scales in a tensor of their own. "
        "Each layer is a data tensor and a scale tensor with the same order of axes and different"
        " widths; moving one without the other leaves numbers that look valid."
    ),
    lists=("layer", "field"),
    axes=(("block",), ("kv",), ("head",), ("token",), ("elem",)),
    memory=("block", "kv", "head", "token", "elem"),
    views=(),
    chunk="two_plane_record",
    geometry=(),
    unsupported=(
        "its rows are made of fields (data, scale), and kernels for fields are not generated"
    ),
)
