"""The project's own specs as the generator reads them: parsed, but neither checked nor proved."""

from __future__ import annotations

from kvloom_codegen.sources import read_specs, specs_dir
from kvloom_codegen.spec import ChunkSpec, LayoutSpec, parse

_SOURCES, _ = read_specs(specs_dir())
_PARSED = [parse(kind, source) for kind, sources in _SOURCES.items() for source in sources]

LAYOUTS: dict[str, LayoutSpec] = {one.layout: one for one in _PARSED if isinstance(one, LayoutSpec)}
CHUNKS: dict[str, ChunkSpec] = {one.chunk: one for one in _PARSED if isinstance(one, ChunkSpec)}
