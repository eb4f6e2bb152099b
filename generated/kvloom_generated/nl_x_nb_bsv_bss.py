# Generated from specs/layouts/NL_X_NB_BSV_BSS.yaml by `make generate`; do not edit.
"""NL_X_NB_BSV_BSS: vLLM DeepSeek indexer.

The cache of DeepSeek's sparse-attention indexer: a page holds the fp8 values of all its tokens,
then the fp32 scales of all its tokens. It is registered as if every token had 132 bytes in a row,
which no token has; a chunk's row does: 128 value bytes, then 4 scale bytes.

    layer    | 0 | 1 | … | NL-1 |  a list
    block    | 0 | 1 | … | NB-1 |  132·BS bytes each
    value    end to end            128·BS bytes
      token  | 0 | 1 | … | BS-1 |  128 bytes each
      elem   | 0 | 1 | … | 127 |   1 bytes each
    scale    end to end            4·BS bytes
      token  | 0 | 1 | … | BS-1 |  4 bytes each
      elem   | 0 |                 4 bytes each

Where an element of each part lies, in bytes, in a tight cache (slot = block·BS + token):

    value:
        tensor[layer]
            + block · 132·BS
            + token · 128
            + elem · 1
    scale:
        tensor[layer]
            + 128·BS
            + block · 132·BS
            + token · 4
            + elem · 4
"""

from __future__ import annotations

from kvloom._abi import EngineFacts, LayoutFacts

LAYOUT = LayoutFacts(
    name="NL_X_NB_BSV_BSS",
    module="nl_x_nb_bsv_bss",
    id=14,
    attention="mla",
    engines=(EngineFacts(name="vLLM DeepSeek indexer", alias="vllm-deepseek-indexer"),),
    doc=(
        "The cache of DeepSeek's sparse-attention indexer: a page holds the fp8 values of all its"
        " tokens, then the fp32 scales of all its tokens. It is registered as if every token had "
        "132 bytes in a row, which no token has; a chunk's row does: 128 value bytes, then 4 "
        "scale bytes."
    ),
    lists=("layer",),
    axes=(("block",),),
    memory=("block",),
    views=(),
    chunk="record",
    geometry=(),
    unsupported=(
        "its rows are made of fields (value, scale), and kernels for fields are not generated"
    ),
)
