# Generated from specs/layouts/NVFP4_IN_PAGE.yaml by `make generate`; do not edit.
"""NVFP4_IN_PAGE: FlashInfer NVFP4, TensorRT-LLM NVFP4.

4-bit K and V with one fp8 scale for 16 elements: per head HS/2 packed bytes and HS/16 scale bytes.
In each K page and each V page the data of all heads and tokens comes before all their scales, so a
head's scales are nowhere near its data.

    layer    | 0 | 1 | … | NL-1 |       a list
    block    | 0 | 1 | … | NB-1 |       BS·NH·HS + 2·BS·NH·(HS/16) bytes each
    kv       | key | value |            BS·NH·HS/2 + BS·NH·(HS/16) bytes each
    data     end to end                 BS·NH·HS/2 bytes
      head   | 0 | 1 | … | NH-1 |       BS·HS/2 bytes each
      token  | 0 | 1 | … | BS-1 |       HS/2 bytes each
      elem   | 0 | 1 | … | HS-1 |       1/2 bytes each
    scale    end to end                 BS·NH·(HS/16) bytes
      head   | 0 | 1 | … | NH-1 |       BS·(HS/16) bytes each
      token  | 0 | 1 | … | BS-1 |       (HS/16) bytes each
      elem   | 0 | 1 | … | (HS/16)-1 |  1 bytes each

Where an element of each part lies, in bytes, in a tight cache (slot = block·BS + token):

    data:
        tensor[layer]
            + block · (BS·NH·HS + 2·BS·NH·(HS/16))
            + kv · (BS·NH·HS/2 + BS·NH·(HS/16))
            + head · BS·HS/2
            + token · HS/2
            + elem · 1/2
    scale:
        tensor[layer]
            + BS·NH·HS/2
            + block · (BS·NH·HS + 2·BS·NH·(HS/16))
            + kv · (BS·NH·HS/2 + BS·NH·(HS/16))
            + head · BS·(HS/16)
            + token · (HS/16)
            + elem · 1
"""

from __future__ import annotations

from kvloom._abi import EngineFacts, LayoutFacts

LAYOUT = LayoutFacts(
    name="NVFP4_IN_PAGE",
    module="nvfp4_in_page",
    id=None,
    attention="mha",
    engines=(
        EngineFacts(name="FlashInfer NVFP4", alias="flashinfer-nvfp4"),
        EngineFacts(name="TensorRT-LLM NVFP4", alias="tensorrt-llm-nvfp4"),
    ),
    doc=(
        "4-bit K and V with one fp8 scale for 16 elements: per head HS/2 packed bytes and HS/16 "
        "scale bytes. In each K page and each V page the data of all heads and tokens comes "
        "before all their scales, so a head's scales are nowhere near its data."
    ),
    lists=("layer",),
    axes=(("block",), ("kv",)),
    memory=("block", "kv"),
    views=(),
    chunk="two_plane_record",
    geometry=(),
    unsupported=(
        "its rows are made of fields (data, scale), and kernels for fields are not generated"
    ),
)
