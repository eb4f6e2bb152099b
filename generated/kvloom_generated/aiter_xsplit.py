# Generated from specs/layouts/AITER_XSPLIT.yaml by `make generate`; do not edit.
"""AITER_XSPLIT: ROCm AITER.

K as in vLLM's paged attention: groups of x elements, 16 bytes, with tokens between them. V groups
tokens instead, x at a time, with the head's elements between the groups, so a page must hold a
multiple of x tokens and a V row comes in single elements.

    layer      | 0 | 1 | … | NL-1 |      a list
    kv         | key | value |           a list
    key        a tensor                  NB·BS·NH·HS·itemsize bytes
      block    | 0 | 1 | … | NB-1 |      BS·NH·HS·itemsize bytes each
      head     | 0 | 1 | … | NH-1 |      BS·HS·itemsize bytes each
      elem/x   | 0 | 1 | … | (HS/x)-1 |  BS·x·itemsize bytes each
      token    | 0 | 1 | … | BS-1 |      x·itemsize bytes each
      elem%x   | 0 | 1 | … | x-1 |       itemsize bytes each
    value      a tensor                  NB·BS·NH·HS·itemsize bytes
      block    | 0 | 1 | … | NB-1 |      BS·NH·HS·itemsize bytes each
      head     | 0 | 1 | … | NH-1 |      BS·HS·itemsize bytes each
      token/x  | 0 | 1 | … | (BS/x)-1 |  HS·x·itemsize bytes each
      elem     | 0 | 1 | … | HS-1 |      x·itemsize bytes each
      token%x  | 0 | 1 | … | x-1 |       itemsize bytes each

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
            + token/x · HS·x·itemsize
            + elem · x·itemsize
            + token%x · itemsize
"""

from __future__ import annotations

from kvloom._abi import EngineFacts, LayoutFacts

LAYOUT = LayoutFacts(
    name="AITER_XSPLIT",
    module="aiter_xsplit",
    id=None,
    attention="mha",
    engines=(EngineFacts(name="ROCm AITER", alias="rocm-aiter"),),
    doc=(
        "K as in vLLM's paged attention: groups of x elements, 16 bytes, with tokens between "
        "them. V groups tokens instead, x at a time, with the head's elements between the groups,"
        " so a page must hold a multiple of x tokens and a V row comes in single elements."
    ),
    lists=("layer", "kv"),
    axes=(),
    memory=(),
    views=(),
    chunk="two_plane",
    geometry=(),
    unsupported=(
        "an axis is split (elem%x and elem/x and token%x and token/x), and kernels for split axes"
        " are not generated"
    ),
)
