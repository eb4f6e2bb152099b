# Generated from specs/layouts/NL_X_NP_X_NB_BS_ONE_HS.yaml by `make generate`; do not edit.
"""NL_X_NP_X_NB_BS_ONE_HS: vLLM-Ascend MLA, vLLM-Ascend DSA.

Each layer is several planes, each a tensor of its own whose width and dtype may differ from the
others'. Those widths are nowhere but in the tensors, so addresses alone can't be bound; a chunk's
row is the planes' bytes end to end.

    layer    | 0 | 1 | … | NL-1 |  a list
    field    | 0 | 1 | … | NP-1 |  a list
    plane0   a tensor of bf16
      block  | 0 | 1 | … | NB-1 |  1024·BS bytes each
      token  | 0 | 1 | … | BS-1 |  1024 bytes each
      one    | 0 |                 1024 bytes each
      elem   | 0 | 1 | … | 511 |   2 bytes each
    plane1   a tensor of fp8
      block  | 0 | 1 | … | NB-1 |  64·BS bytes each
      token  | 0 | 1 | … | BS-1 |  64 bytes each
      one    | 0 |                 64 bytes each
      elem   | 0 | 1 | … | 63 |    1 bytes each

Where an element of each part lies, in bytes, in a tight cache (slot = block·BS + token):

    plane0:
        tensor[2·layer]
            + block · 1024·BS
            + token · 1024
            + elem · 2
    plane1:
        tensor[2·layer + 1]
            + block · 64·BS
            + token · 64
            + elem · 1
"""

from __future__ import annotations

from kvloom._abi import EngineFacts, LayoutFacts

LAYOUT = LayoutFacts(
    name="NL_X_NP_X_NB_BS_ONE_HS",
    module="nl_x_np_x_nb_bs_one_hs",
    id=17,
    attention="mla",
    engines=(
        EngineFacts(name="vLLM-Ascend MLA", alias="vllm-ascend-mla"),
        EngineFacts(name="vLLM-Ascend DSA", alias="vllm-ascend-dsa"),
    ),
    doc=(
        "Each layer is several planes, each a tensor of its own whose width and dtype may differ "
        "from the others'. Those widths are nowhere but in the tensors, so addresses alone can't "
        "be bound; a chunk's row is the planes' bytes end to end."
    ),
    lists=("layer", "field"),
    axes=(("block",), ("token",), ("one",), ("elem",)),
    memory=("block", "token", "one", "elem"),
    views=(),
    chunk="record",
    geometry=(),
    unsupported=(
        "its rows are made of fields (plane0, plane1), and kernels for fields are not generated"
    ),
)
