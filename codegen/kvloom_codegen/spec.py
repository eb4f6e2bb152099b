"""The typed models of the spec language: what a file under specs/ may say, word by word.

The manual is specs/README.md. Models are strict and frozen; an unknown key is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
)
from pydantic_core import ErrorDetails

from kvloom_codegen.problems import Problem, quoted
from kvloom_codegen.sources import PathInFile, Source

# Bits of one element by dtype name; the names are the ones a spec may use.
DTYPES = {"fp8": 8, "bf16": 16, "fp16": 16, "fp32": 32, "uint8": 8, "int8": 8}
AXES = ("layer", "kv", "block", "token", "head", "elem", "one")
SPLIT_AXES = ("elem", "token")
LIST_AXES = ("layer", "kv", "field")
CHUNK_AXES = ("layer", "kv", "token", "head", "field", "elem")
BRANCHES = ("kv", "field", "region")
VIEW_EXTENTS = ("NL", "NB", "BS", "NH", "HS")
LONGEST_NAME = 64

_SPLIT = re.compile(rf"({'|'.join(SPLIT_AXES)})([/%])([a-z])")


def split_item(item: str) -> tuple[str, str, str] | None:
    """``elem/x`` as (axis, "/" or "%", factor name); None for any other text."""
    match = _SPLIT.fullmatch(item)
    return (match[1], match[2], match[3]) if match else None


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


# --- words, names and numbers --------------------------------------------------------------------


def _only(meaning: str, fits: Callable[[Any], bool]) -> PlainValidator:
    """A value that ``fits``; ``meaning`` says in words what does."""

    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(f"{quoted(value)}; allowed: {meaning}")
        return value

    return PlainValidator(check)


def _is_text(value: Any, pattern: str) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and value >= least


def _one_of(words: tuple[str, ...], more: str = "") -> PlainValidator:
    return _only(", ".join(words) + more, lambda value: isinstance(value, str) and value in words)


def _name(pattern: str, meaning: str) -> PlainValidator:
    def fits(value: Any) -> bool:
        return _is_text(value, pattern) and len(value) <= LONGEST_NAME

    return _only(f"{meaning}, {LONGEST_NAME} characters at most", fits)


def _prose(value: Any) -> str:
    """Text that can stand in a docstring and in a table of Markdown, its line breaks folded."""
    text = " ".join(value.split()) if isinstance(value, str) else ""
    if not text:
        raise ValueError(f"{quoted(value)}; allowed: text")
    for bad in ("\\", '"""', "|", "<"):
        if bad in text:
            raise ValueError(f"holds {bad}; allowed: text without it")
    return text


_SPLITS = tuple(f"{axis}{part}x" for axis in SPLIT_AXES for part in "/%")

Axis: TypeAlias = Annotated[
    str,
    _only(
        ", ".join((*AXES, *_SPLITS)),
        lambda value: isinstance(value, str) and (value in AXES or split_item(value) is not None),
    ),
]
PlainAxis: TypeAlias = Annotated[str, _one_of(AXES)]
ListAxis: TypeAlias = Annotated[str, _one_of(LIST_AXES)]
ChunkAxis: TypeAlias = Annotated[str, _one_of(CHUNK_AXES)]
Dtype: TypeAlias = Annotated[str, _one_of(tuple(DTYPES))]
Attention: TypeAlias = Annotated[Literal["mha", "mla"], _one_of(("mha", "mla"))]

LayoutName: TypeAlias = Annotated[
    str, _name(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", "upper-case words with underscores")
]
ChunkName: TypeAlias = Annotated[
    str, _name(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", "lower-case words with underscores")
]
FieldName: TypeAlias = ChunkName
ModelName: TypeAlias = Annotated[
    str, _name(r"[a-z][a-z0-9]*([-.][a-z0-9]+)*", "lower-case words with dashes and dots")
]
Alias: TypeAlias = Annotated[
    str, _name(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", "lower-case words with dashes")
]
Prose: TypeAlias = Annotated[str, PlainValidator(_prose)]
Count: TypeAlias = Annotated[int, _only("a whole number", lambda value: _is_number(value, 0))]
Positive: TypeAlias = Annotated[
    int, _only("a whole number above 0", lambda value: _is_number(value, 1))
]
Width: TypeAlias = Annotated[
    int | str,
    _only(
        "a whole number above 0, HS, or a part of it such as HS/16",
        lambda value: _is_number(value, 1) or _is_text(value, r"HS(/[1-9][0-9]{0,5})?"),
    ),
]
Factor: TypeAlias = Annotated[
    int | str,
    _only(
        "a whole number above 1, or as many as fill a multiple of 4 bytes, such as 16/itemsize",
        lambda value: _is_number(value, 2) or _fills_bytes(value),
    ),
]
Padding: TypeAlias = Annotated[
    int | str,
    _only(
        "any, or a whole number of bytes above 1",
        lambda value: value == "any" or _is_number(value, 2),
    ),
]
ViewExtent: TypeAlias = Annotated[
    int | str,
    _only(
        f"a whole number above 0, {', '.join(VIEW_EXTENTS)}",
        lambda value: _is_number(value, 1) or (isinstance(value, str) and value in VIEW_EXTENTS),
    ),
]


def _fills_bytes(value: Any) -> bool:
    """``16/itemsize``: whole elements of every dtype must fill the bytes."""
    if not _is_text(value, r"[1-9][0-9]{0,5}/itemsize"):
        return False
    return 8 * int(value.partition("/")[0]) % max(DTYPES.values()) == 0


# --- the tree ------------------------------------------------------------------------------------


class Fuse(_Model):
    """Adjacent axes that the engine sees as one tensor dimension."""

    fuse: Annotated[tuple[PlainAxis, ...], Field(min_length=2)]


class KvMembers(_Model):
    """The orders of the key part and of the value part."""

    key: Items
    value: Items


class KvBranch(_Model):
    """Keys and values, each in an order of its own."""

    kv: KvMembers


class FieldBranch(_Model):
    """The fields of a token or block, each in an order of its own."""

    field: Annotated[dict[str, Items], Field(min_length=1)]


class RegionBranch(_Model):
    """Regions that lie end to end and have no other meaning."""

    region: Annotated[tuple[Items, ...], Field(min_length=2)]


def _item_kind(value: Any) -> str:
    """The tag of an item: the one key of a mapping, axis for text."""
    if isinstance(value, dict) and len(value) == 1:
        return str(next(iter(value)))
    return "" if isinstance(value, (dict, tuple)) else "axis"


Item: TypeAlias = Annotated[
    Annotated[Axis, Tag("axis")]
    | Annotated[Fuse, Tag("fuse")]
    | Annotated[KvBranch, Tag("kv")]
    | Annotated[FieldBranch, Tag("field")]
    | Annotated[RegionBranch, Tag("region")],
    Discriminator(_item_kind),
]
Items: TypeAlias = Annotated[tuple[Item, ...], Field(min_length=1)]
Branch: TypeAlias = KvBranch | FieldBranch | RegionBranch


def members(branch: Branch) -> Mapping[str | int, tuple[Item, ...]]:
    """The members of a branch by name, in the order in which they lie in memory."""
    if isinstance(branch, KvBranch):
        return {"key": branch.kv.key, "value": branch.kv.value}
    if isinstance(branch, FieldBranch):
        return dict(branch.field.items())
    return dict(enumerate(branch.region))


def branch_word(branch: Branch) -> str:
    """The word of a branch: kv, field or region."""
    if isinstance(branch, KvBranch):
        return "kv"
    return "field" if isinstance(branch, FieldBranch) else "region"


# --- layouts, chunks and models ------------------------------------------------------------------


class FieldSpec(_Model):
    """One part of a token's data that has an element type and a width of its own."""

    dtype: Dtype | None = None
    bits: Annotated[Literal[4], _only("4", lambda value: value == 4)] | None = None
    first: Annotated[Literal["low", "high"], _one_of(("low", "high"))] | None = None
    width: Width

    @property
    def element_bits(self) -> int:
        """Bits of one element."""
        return DTYPES[self.dtype] if self.dtype is not None else (self.bits or 0)


class ExampleField(_Model):
    """One plane of the example that stands for fields whose sizes come at bind."""

    dtype: Dtype
    width: Positive


class Example(_Model):
    """Planes that stand for those an engine will bring, in drawings and in the proof."""

    example: Annotated[tuple[ExampleField, ...], Field(min_length=1)]


class AtBind(_Model):
    """Fields whose number, widths and dtypes come with the tensors."""

    at_bind: Example


class Pad(_Model):
    """How an engine pads the block axis."""

    block: Padding


class View(_Model):
    """The dtype and shape an engine registers where they say less than the memory."""

    dtype: Dtype
    shape: Annotated[tuple[ViewExtent, ...], Field(min_length=1)]


def _fields_kind(value: Any) -> str:
    at_bind = isinstance(value, AtBind) or (isinstance(value, dict) and "at_bind" in value)
    return "at_bind" if at_bind else "declared"


class EngineSpec(_Model):
    """A serving engine that holds the layout, and the short name a user may call it by."""

    name: Prose
    alias: Alias


class LayoutSpec(_Model):
    """specs/layouts/<NAME>.yaml: what one engine's KV cache looks like in memory."""

    layout: LayoutName
    id: Count | None = None
    attention: Attention
    engines: Annotated[tuple[EngineSpec, ...], Field(min_length=1)]
    doc: Prose
    lists: tuple[ListAxis, ...]
    memory: Items
    chunk: ChunkName
    fields: Annotated[
        Annotated[AtBind, Tag("at_bind")]
        | Annotated[dict[FieldName, FieldSpec], Field(min_length=1), Tag("declared")],
        Discriminator(_fields_kind),
    ] = Field(default_factory=dict)
    split: Annotated[dict[str, Factor], Field(min_length=1)] = Field(default_factory=dict)
    pad: Pad | None = None
    views: Annotated[
        tuple[Literal["layer"], ...], _only("[layer]", lambda value: value == ("layer",))
    ] = ()
    view: View | None = None

    @property
    def module(self) -> str:
        """The generated module's name."""
        return self.layout.lower()

    @property
    def declared_fields(self) -> dict[str, FieldSpec]:
        """The fields by name; for fields at bind, the planes of their example."""
        if isinstance(self.fields, AtBind):
            return {
                f"plane{i}": FieldSpec(dtype=plane.dtype, width=plane.width)
                for i, plane in enumerate(self.fields.at_bind.example)
            }
        return self.fields


class ChunkFuse(_Model):
    """The axes that make up a chunk's contiguous row."""

    fuse: Annotated[tuple[ChunkAxis, ...], Field(min_length=2)]


ChunkItem: TypeAlias = Annotated[
    Annotated[ChunkAxis, Tag("axis")] | Annotated[ChunkFuse, Tag("fuse")],
    Discriminator(_item_kind),
]


class ChunkSpec(_Model):
    """specs/chunks/<name>.yaml: how plain storage holds the tokens."""

    chunk: ChunkName
    doc: Prose
    memory: Annotated[tuple[ChunkItem, ...], Field(min_length=1)]

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The tensor's dimensions, outermost first, each as the axes fused in it."""
        return tuple(i.fuse if isinstance(i, ChunkFuse) else (i,) for i in self.memory)

    @property
    def order(self) -> tuple[str, ...]:
        """All axes, outermost first."""
        return tuple(axis for dimension in self.axes for axis in dimension)


class ModelSpec(_Model):
    """specs/models/<name>.yaml: the KV-cache geometry of one model."""

    model: ModelName
    doc: Prose
    attention: Attention
    layers: Positive
    heads: Positive = 1
    head_size: Positive
    dtype: Dtype


AnySpec: TypeAlias = LayoutSpec | ChunkSpec | ModelSpec
MODELS: dict[str, type[LayoutSpec | ChunkSpec | ModelSpec]] = {
    "layouts": LayoutSpec,
    "chunks": ChunkSpec,
    "models": ModelSpec,
}


def axis_words(items: tuple[Item, ...]) -> Iterator[str]:
    """Every axis, half axis and branched axis under ``items``, as written."""
    for item in items:
        if isinstance(item, str):
            yield item
        elif isinstance(item, Fuse):
            yield from item.fuse
        else:
            if not isinstance(item, RegionBranch):
                yield branch_word(item)
            for member in members(item).values():
                yield from axis_words(member)


def axes_of(spec: LayoutSpec) -> set[str]:
    """All axes of a layout, of its lists and of its memory; a split axis counts as a whole."""
    words = set(spec.lists) | set(axis_words(spec.memory))
    return {split[0] if (split := split_item(word)) else word for word in words}


# --- from a file to its model --------------------------------------------------------------------


def parse(kind: str, source: Source) -> AnySpec | list[Problem]:
    """The typed spec of ``source``, or all that is wrong with its words."""
    model = MODELS[kind]
    try:
        return model.model_validate(source.data)
    except ValidationError as error:
        found = [(_path_in_file(source, detail["loc"]), detail) for detail in error.errors()]
        return [
            _problem(source, model, path, detail)
            for path, detail in found
            if path not in source.faults and not _counts_only_right_entries(detail)
        ]


def _counts_only_right_entries(detail: ErrorDetails) -> bool:
    """Whether a list is only too short without its wrong entries, which are reported anyway."""
    if detail["type"] != "too_short":
        return False
    return len(detail["input"]) >= int(detail["ctx"]["min_length"])


_MEANINGS = {
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}


def _problem(
    source: Source, model: type[_Model], path: PathInFile, detail: ErrorDetails
) -> Problem:
    """One of pydantic's findings in the words of the spec language."""
    kind, got, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        word = str(detail["loc"][-1])
        return source.problem((*path, word), "is missing; it is required")
    if kind == "extra_forbidden":
        allowed = ", ".join(_model_at(path[:-1], model).model_fields)
        return source.problem(path, f"unknown key; allowed: {allowed}")
    if kind == "too_short":
        return source.problem(path, f"holds {len(got)}; allowed: {context['min_length']} or more")
    if kind == "union_tag_invalid":
        words = "fuse" if model is ChunkSpec else ", ".join(("fuse", *BRANCHES))
        return source.problem(
            path, f"{quoted(got)}; allowed: an axis, or a mapping of one key: {words}"
        )
    if kind == "value_error":
        return source.problem(path, str(context["error"]))
    return source.problem(path, f"{quoted(got)}; allowed: {_MEANINGS[kind]}")


def _path_in_file(source: Source, location: PathInFile) -> PathInFile:
    """pydantic's location without the tags of unions, which are no keys of the file."""
    path: PathInFile = ()
    for i, part in enumerate(location):
        is_tag = i == 1 and path == ("fields",)
        if not is_tag and (*path, part) in source.marks:
            path = (*path, part)
    return path


def _model_at(path: PathInFile, top: type[_Model]) -> type[_Model]:
    """The model that the mapping at ``path`` is read by."""
    match path:
        case ():
            return top
        case ("engines", _):
            return EngineSpec
        case ("pad",):
            return Pad
        case ("view",):
            return View
        case ("fields",):
            return AtBind
        case ("fields", "at_bind"):
            return Example
        case ("fields", "at_bind", "example", _):
            return ExampleField
        case ("fields", _):
            return FieldSpec
    return KvMembers
