# Generated from specs/layouts/VLLM_PAGED_XSPLIT.yaml by `make generate`; do not edit.
"""VLLM_PAGED_XSPLIT: vLLM paged attention v1.

The cache of vLLM's v1 paged-attention kernels: K keeps groups of x elements of a head, 16 bytes,
together and puts tokens between the groups; V has tokens innermost. A K row comes in pieces of 16
bytes, a V row in single elements, and x changes with the element size.

    layer     | 0 | 1 | … | NL-1 |      a list
    kv        | key | value |           a list
    key       a tensor                  NB·BS·NH·HS·itemsize bytes
      block   | 0 | 1 | … | NB-1 |      BS·NH·HS·itemsize bytes each
      head    | 0 | 1 | … | NH-1 |      BS·HS·itemsize bytes each
      elem/x  | 0 | 1 | … | (HS/x)-1 |  BS·x·itemsize bytes each
      token   | 0 | 1 | … | BS-1 |      x·itemsize bytes each
      elem%x  | 0 | 1 | … | x-1 |       itemsize bytes each
    value     a tensor                  NB·BS·NH·HS·itemsize bytes
      block   | 0 | 1 | … | NB-1 |      BS·NH·HS·itemsize bytes each
      head    | 0 | 1 | … | NH-1 |      BS·HS·itemsize bytes each
      elem    | 0 | 1 | … | HS-1 |      BS·itemsize bytes each
      token   | 0 | 1 | … | BS-1 |      itemsize bytes each

Where an element of each part lies, in bytes, in a tight cache (slot = block·BS + token):

    key:
        tensor[2·layer]
            + block · BS·NH·HS·itemsize
            + head · BS·HS·itemsize
            + elem/x · BS·x·itemsize
            + token · x·itemsize
            + elem%x · itemsize
    value:
        tensor[2·layer + 1]
            + block · BS·NH·HS·itemsize
            + head · BS·HS·itemsize
            + elem · BS·itemsize
            + token · itemsize
"""

from __future__ import annotations

from kvloom._abi import EngineFacts, LayoutFacts

LAYOUT = LayoutFacts(
    name="VLLM_PAGED_XSPLIT",
    module="vllm_paged_xsplit",
    id=None,
    attention="mha",
    engines=(EngineFacts(name="vLLM paged attention v1", alias="vllm-paged-attention"),),
    doc=(
        "The cache of vLLM's v1 paged-attention kernels: K keeps groups of x elements of a head, "
        "16 bytes, together and puts tokens between the groups; V has tokens innermost. A K row "
        "comes in pieces of 16 bytes, a V row in single elements, and x changes with the element "
        "size."
    ),
    lists=("layer", "kv"),
    axes=(),
    memory=(),
    views=(),
    chunk="two_plane",
    geometry=(),
    unsupported=(
        "an axis is split (elem%x and elem/x), and kernels for split axes are not generated"
    ),
)
