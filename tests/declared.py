"""The project's own specs as the generator reads them: parsed, but neither checked nor proved."""

from __future__ import annotations

import oracle
from kvloom_codegen.sources import read_specs, specs_dir
from kvloom_codegen.spec import ChunkSpec, LayoutSpec, parse

_SOURCES, _ = read_specs(specs_dir())
_PARSED = [parse(kind, source) for kind, sources in _SOURCES.items() for source in sources]

LAYOUTS: dict[str, LayoutSpec] = {one.layout: one for one in _PARSED if isinstance(one, LayoutSpec)}
CHUNKS: dict[str, ChunkSpec] = {one.chunk: one for one in _PARSED if isinstance(one, ChunkSpec)}

# A layout that the oracle does not know is the complaint of one test, in test_oracle_agrees.py, and
# is left out where the oracle is asked.
KNOWN = [name for name in LAYOUTS if oracle.knows(name)]
