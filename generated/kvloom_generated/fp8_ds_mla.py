# Generated from specs/layouts/FP8_DS_MLA.yaml by `make generate`; do not edit.
"""FP8_DS_MLA: vLLM FlashMLA sparse.

One record of 656 bytes per token: 512 fp8 latents, 4 fp32 scales, 64 bf16 rope elements. Three
dtypes share the row, it is registered as plain bytes, and blocks may be padded.

    layer   | 0 | 1 | … | NL-1 |  a list
    block   | 0 | 1 | … | NB-1 |  656·BS bytes each
    token   | 0 | 1 | … | BS-1 |  656 bytes each
    nope    end to end            512 bytes
      elem  | 0 | 1 | … | 511 |   1 bytes each
    scale   end to end            16 bytes
      elem  | 0 | 1 | … | 3 |     4 bytes each
    rope    end to end            128 bytes
      elem  | 0 | 1 | … | 63 |    2 bytes each

Where an element of each part lies, in bytes, in a tight cache (slot = block·BS + token):

    nope:
        tensor[layer]
            + block · 656·BS
            + token · 656
            + elem · 1
    scale:
        tensor[layer]
            + 512
            + block · 656·BS
            + token · 656
            + elem · 4
    rope:
        tensor[layer]
            + 528
            + block · 656·BS
            + token · 656
            + elem · 2
"""

from __future__ import annotations

from kvloom._abi import EngineFacts, LayoutFacts

LAYOUT = LayoutFacts(
    name="FP8_DS_MLA",
    module="fp8_ds_mla",
    id=None,
    attention="mla",
    engines=(EngineFacts(name="vLLM FlashMLA sparse", alias="vllm-flashmla-sparse"),),
    doc=(
        "One record of 656 bytes per token: 512 fp8 latents, 4 fp32 scales, 64 bf16 rope "
        "elements. Three dtypes share the row, it is registered as plain bytes, and blocks may be"
        " padded."
    ),
    lists=("layer",),
    axes=(("block",), ("token",)),
    memory=("block", "token"),
    views=(),
    chunk="record",
    geometry=(),
    unsupported=(
        "its rows are made of fields (nope, scale, rope), and kernels for fields are not "
        "generated"
    ),
)
