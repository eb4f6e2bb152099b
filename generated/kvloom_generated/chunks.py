# Generated from specs/chunks by `make generate`; do not edit.
"""The chunk layouts: how plain storage holds tokens."""

from __future__ import annotations

from kvloom._abi import ChunkFacts

CHUNKS: dict[str, ChunkFacts] = {
    "one_plane": ChunkFacts(
        name="one_plane",
        doc=(
            "All layers, one plane: [NL, T, NH·HS]. For MLA, whose row is the latent, and for "
            "layouts whose entries are K or V alone."
        ),
        axes=(("layer",), ("token",), ("head", "elem")),
    ),
    "packed": ChunkFacts(
        name="packed",
        doc=(
            "All layers, one plane in which each head's K lies directly before its V: [NL, T, "
            "NH·CS]. A row holds K and V interleaved by head and can't be cut into a K half and a"
            " V half."
        ),
        axes=(("layer",), ("token",), ("head", "kv", "elem")),
    ),
    "plane_major": ChunkFacts(
        name="plane_major",
        doc="One layer, a K plane and a V plane: [2, T, NH·HS].",
        axes=(("kv",), ("token",), ("head", "elem")),
    ),
    "record": ChunkFacts(
        name="record",
        doc=(
            "All layers, one plane whose row is a token's fields end to end in declared order: "
            "[NL, T, row bytes]. Fields may differ in width and dtype, so a row is bytes."
        ),
        axes=(("layer",), ("token",), ("field", "elem")),
    ),
    "single_plane": ChunkFacts(
        name="single_plane",
        doc="One layer, one plane: [T, NH·HS].",
        axes=(("token",), ("head", "elem")),
    ),
    "token_major": ChunkFacts(
        name="token_major",
        doc="One layer, K and V of a token side by side: [T, 2, NH·HS].",
        axes=(("token",), ("kv",), ("head", "elem")),
    ),
    "two_plane": ChunkFacts(
        name="two_plane",
        doc=(
            "All layers, a K plane and a V plane: [2, NL, T, NH·HS]. The usual chunk of layouts "
            "that keep K and V apart."
        ),
        axes=(("kv",), ("layer",), ("token",), ("head", "elem")),
    ),
    "two_plane_record": ChunkFacts(
        name="two_plane_record",
        doc=(
            "All layers, a K plane and a V plane whose rows are the fields end to end, each field"
            " with all its heads: [2, NL, T, row bytes]. For quantised heads with scales: the "
            "data of all heads, then the scales of all heads."
        ),
        axes=(("kv",), ("layer",), ("token",), ("field", "head", "elem")),
    ),
}
