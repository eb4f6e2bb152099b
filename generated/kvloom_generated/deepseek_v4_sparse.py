# Generated from specs/layouts/DEEPSEEK_V4_SPARSE.yaml by `make generate`; do not edit.
"""DEEPSEEK_V4_SPARSE: DeepSeek V4 sparse attention.

A page holds its tokens' records of 448 fp8 and 64 bf16 elements, then 8 scale bytes for each token,
and is padded to a multiple of 576 bytes. It is registered as if every token had 584 bytes in a row,
which no token has.

    layer     | 0 | 1 | … | NL-1 |  a list
    block     | 0 | 1 | … | NB-1 |  roundup(584·BS, 576) bytes each
    region 0  end to end            576·BS bytes
      token   | 0 | 1 | … | BS-1 |  576 bytes each
      nope    end to end            448 bytes
        elem  | 0 | 1 | … | 447 |   1 bytes each
      rope    end to end            128 bytes
        elem  | 0 | 1 | … | 63 |    2 bytes each
    region 1  end to end            8·BS bytes
      token   | 0 | 1 | … | BS-1 |  8 bytes each
      scale   end to end            8 bytes
        elem  | 0 | 1 | … | 7 |     1 bytes each

Where an element of each part lies, in bytes, in a tight cache (slot = block·BS + token):

    nope:
        tensor[layer]
            + block · roundup(584·BS, 576)
            + token · 576
            + elem · 1
    rope:
        tensor[layer]
            + 448
            + block · roundup(584·BS, 576)
            + token · 576
            + elem · 2
    scale:
        tensor[layer]
            + 576·BS
            + block · roundup(584·BS, 576)
            + token · 8
            + elem · 1
"""

from __future__ import annotations

from kvloom._abi import EngineFacts, LayoutFacts

LAYOUT = LayoutFacts(
    name="DEEPSEEK_V4_SPARSE",
    module="deepseek_v4_sparse",
    id=None,
    attention="mla",
    engines=(EngineFacts(name="DeepSeek V4 sparse attention", alias="deepseek-v4-sparse"),),
    doc=(
        "A page holds its tokens' records of 448 fp8 and 64 bf16 elements, then 8 scale bytes for"
        " each token, and is padded to a multiple of 576 bytes. It is registered as if every "
        "token had 584 bytes in a row, which no token has."
    ),
    lists=("layer",),
    axes=(("block",),),
    memory=("block",),
    views=(),
    chunk="record",
    geometry=(),
    unsupported=(
        "its rows are made of fields (nope, rope, scale), and kernels for fields are not "
        "generated"
    ),
)
