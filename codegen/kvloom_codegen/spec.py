"""The typed models of the spec language: what a file under specs/ may say, word by word.

The manual is specs/README.md. Models are strict and frozen; an unknown key is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)
from pydantic_core import ErrorDetails

from kvloom_codegen.problems import Problem
from kvloom_codegen.sources import PathInFile, Source

# Bits of one element by dtype name; the names are the ones a spec may use.
DTYPES = {"fp8": 8, "bf16": 16, "fp16": 16, "fp32": 32, "uint8": 8, "int8": 8}
AXES = ("layer", "kv", "block", "token", "head", "elem", "one")
SPLIT_AXES = ("elem", "token")
LIST_AXES = ("layer", "kv", "field")
CHUNK_AXES = ("layer", "kv", "token", "head", "field", "elem")
MEMBER = r"[a-z][a-z0-9_]*"

_SPLIT = re.compile(rf"({'|'.join(SPLIT_AXES)})([/%])({MEMBER})")


def split_item(item: str) -> tuple[str, str, str] | None:
    """``elem/x`` as (axis, "/" or "%", factor name); None for any other text."""
    match = _SPLIT.fullmatch(item)
    return (match[1], match[2], match[3]) if match else None


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


def _axis(value: str) -> str:
    if value in AXES or split_item(value):
        return value
    splits = ", ".join(f"{axis}/x, {axis}%x" for axis in SPLIT_AXES)
    raise ValueError(f"'{value}' is no axis; allowed: {', '.join(AXES)}, {splits}")


def _one_of(allowed: tuple[str, ...]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"'{value}'; allowed: {', '.join(allowed)}")
        return value

    return AfterValidator(check)


def _text(pattern: str, meaning: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"'{value}'; allowed: {meaning}")
        return value

    return AfterValidator(check)


def _prose(value: str) -> str:
    if not value.strip():
        raise ValueError("empty; allowed: one sentence or more")
    return " ".join(value.split())


PlainAxis: TypeAlias = Annotated[str, _one_of(AXES)]
Alias: TypeAlias = Annotated[
    str,
    _text(r"[a-z0-9.]+(-[a-z0-9.]+)*", "lower-case letters, digits and dots, with dashes between"),
]
LayoutName: TypeAlias = Annotated[
    str, _text(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", "upper-case words with underscores")
]
ChunkName: TypeAlias = Annotated[str, _text(MEMBER, "lower-case words with underscores")]
Prose: TypeAlias = Annotated[str, AfterValidator(_prose)]
Positive: TypeAlias = Annotated[int, Field(gt=0)]


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
    if isinstance(value, dict) and len(value) == 1:
        (word,) = value
        if word in ("fuse", "kv", "field", "region"):
            return str(word)
    if isinstance(value, BaseModel):
        return type(value).__name__.removesuffix("Branch").lower()
    return "axis" if isinstance(value, str) else "unknown"


Item: TypeAlias = Annotated[
    Annotated[str, AfterValidator(_axis), Tag("axis")]
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


def _width(value: int | str) -> int | str:
    if isinstance(value, str) and not re.fullmatch(r"HS(/[1-9][0-9]*)?", value):
        raise ValueError(f"'{value}'; allowed: a positive number, HS, or HS/ and a number")
    if isinstance(value, int) and value < 1:
        raise ValueError(f"{value}; allowed: a positive number, HS, or HS/ and a number")
    return value


Width: TypeAlias = Annotated[int | str, AfterValidator(_width)]
Dtype: TypeAlias = Annotated[str, _one_of(tuple(DTYPES))]


class FieldSpec(_Model):
    """One part of a token's data that has an element type and a width of its own."""

    dtype: Dtype | None = None
    bits: Annotated[int, Field(ge=1, le=7)] | None = None
    first: Literal["low", "high"] | None = None
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


def _split_factor(value: int | str) -> int | str:
    if isinstance(value, str) and not re.fullmatch(r"[1-9][0-9]*/itemsize", value):
        raise ValueError(f"'{value}'; allowed: a number above 1, or bytes as in 16/itemsize")
    if isinstance(value, int) and value < 2:
        raise ValueError(f"{value}; allowed: a number above 1, or bytes as in 16/itemsize")
    return value


SplitFactor: TypeAlias = Annotated[int | str, AfterValidator(_split_factor)]


def _pad(value: int | str) -> int | str:
    if isinstance(value, str) and value != "any":
        raise ValueError(f"'{value}'; allowed: any, or a number of bytes above 1")
    if isinstance(value, int) and value < 2:
        raise ValueError(f"{value}; allowed: any, or a number of bytes above 1")
    return value


class Pad(_Model):
    """How an engine pads the block axis."""

    block: Annotated[int | str, AfterValidator(_pad)]


def _view_extent(value: int | str) -> int | str:
    allowed = ("NL", "NB", "BS", "NH", "HS")
    if isinstance(value, str) and value not in allowed:
        raise ValueError(f"'{value}'; allowed: a positive number, {', '.join(allowed)}")
    if isinstance(value, int) and value < 1:
        raise ValueError(f"{value}; allowed: a positive number, {', '.join(allowed)}")
    return value


class View(_Model):
    """The dtype and shape an engine registers where they say less than the memory."""

    dtype: Dtype
    shape: Annotated[
        tuple[Annotated[int | str, AfterValidator(_view_extent)], ...], Field(min_length=1)
    ]


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
    id: Annotated[int, Field(ge=0)] | None = None
    attention: Literal["mha", "mla"]
    engines: Annotated[tuple[EngineSpec, ...], Field(min_length=1)]
    doc: Prose
    lists: tuple[Annotated[str, _one_of(LIST_AXES)], ...]
    memory: Items
    chunk: ChunkName
    fields: Annotated[
        Annotated[AtBind, Tag("at_bind")] | Annotated[dict[str, FieldSpec], Tag("declared")],
        Discriminator(_fields_kind),
    ] = Field(default_factory=dict)
    split: dict[str, SplitFactor] = Field(default_factory=dict)
    pad: Pad | None = None
    views: tuple[Literal["layer"], ...] = ()
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

    fuse: Annotated[tuple[Annotated[str, _one_of(CHUNK_AXES)], ...], Field(min_length=2)]


class ChunkSpec(_Model):
    """specs/chunks/<name>.yaml: how plain storage holds the tokens."""

    chunk: ChunkName
    doc: Prose
    memory: Annotated[
        tuple[Annotated[str, _one_of(CHUNK_AXES)] | ChunkFuse, ...], Field(min_length=1)
    ]

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

    model: Alias
    doc: Prose
    attention: Literal["mha", "mla"]
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


def parse(kind: str, source: Source) -> AnySpec | list[Problem]:
    """The typed spec of ``source``, or all that is wrong with its words."""
    model = MODELS[kind]
    try:
        return model.model_validate(source.data)
    except ValidationError as error:
        return [_problem(source, model, detail) for detail in error.errors()]


_MEANINGS = {
    "string_type": "text",
    "int_type": "a whole number",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "union_tag_invalid": f"one of the axes {', '.join(AXES)}, or one of fuse, kv, field, region",
}


def _problem(source: Source, model: type[_Model], detail: ErrorDetails) -> Problem:
    """One of pydantic's findings in the words of the spec language."""
    path = _path_in_file(source, detail["loc"])
    kind, got, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return source.problem((*path, detail["loc"][-1]), "is missing; it is required")
    if kind == "extra_forbidden":
        allowed = ", ".join(_model_at(path[:-1], model).model_fields)
        return source.problem(path, f"unknown key; allowed: {allowed}")
    if kind == "value_error":
        return source.problem(path, str(context["error"]))
    if kind == "literal_error":
        return source.problem(path, f"{_show(got)}; allowed: {context['expected']}")
    if kind == "too_short":
        message = f"{context['actual_length']} items; allowed: {context['min_length']} or more"
        return source.problem(path, message)
    if kind in _MEANINGS:
        return source.problem(path, f"{_show(got)}; allowed: {_MEANINGS[kind]}")
    return source.problem(path, f"{_show(got)}; {detail['msg'][0].lower()}{detail['msg'][1:]}")


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return "a list"
    return "a mapping" if isinstance(value, dict) else f"'{value}'"


def _path_in_file(source: Source, location: PathInFile) -> PathInFile:
    """pydantic's location without the tags of unions, which are no keys of the file."""
    path: PathInFile = ()
    for part in location:
        if (*path, part) in source.marks:
            path = (*path, part)
    return path


def _model_at(path: PathInFile, top: type[_Model]) -> type[_Model]:
    """The model that the mapping at ``path`` is read by."""
    words = [part for part in path if isinstance(part, str)]
    if not words:
        return top
    nested: dict[str, type[_Model]] = {
        "engines": EngineSpec,
        "pad": Pad,
        "view": View,
        "kv": KvMembers,
        "at_bind": Example,
        "example": ExampleField,
    }
    if words[-1] in nested:
        return nested[words[-1]]
    return FieldSpec if words[0] == "fields" else top
