"""Templates hold no logic: names to print, loops over names, and plain ifs; all else is Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jinja2 import Environment, UndefinedError, nodes

from declared import CHUNKS, LAYOUTS
from kvloom_codegen.checks import Specs
from kvloom_codegen.outputs import desired
from kvloom_codegen.render import environment, render

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "codegen" / "kvloom_codegen" / "templates"
TEMPLATES = sorted(path.name for path in FOLDER.iterdir())

# Names that Jinja gives a template without being asked: loop.first, range, dict, ...
GIVEN = {"loop", "self", *environment().globals}


def logic(source: str) -> list[str]:
    """What a template's source holds beyond names, loops over names and plain ifs."""
    return [f"line {node.lineno}: {node}" for node in _logic(environment().parse(source))]


def _logic(node: nodes.Node) -> Iterator[nodes.Node]:
    match node:
        case nodes.Template(body=inside) | nodes.Output(nodes=inside):
            parts = inside
        case nodes.For(
            target=nodes.Name(), iter=listed, body=body, else_=[], test=None, recursive=False
        ):
            parts = [listed, *body]
        case nodes.If(test=nodes.Not(node=asked) | asked, body=body, elif_=[], else_=other):
            parts = [asked, *body, *other]
        case nodes.TemplateData():
            parts = []
        case nodes.Getattr(node=nodes.Name() | nodes.Getattr() as owner):
            parts = [owner]
        case nodes.Name(name=name) if name not in GIVEN:
            parts = []
        case _:
            yield node
            return
    for part in parts:
        yield from _logic(part)


# --- the templates --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_holds_no_logic(name: str) -> None:
    assert logic((FOLDER / name).read_text(encoding="utf-8")) == []


def test_no_template_is_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()
    find = Environment.get_template

    def record(self: Environment, name: str) -> object:
        used.add(name)
        return find(self, name)

    monkeypatch.setattr(Environment, "get_template", record)
    desired(Specs(tuple(LAYOUTS.values()), CHUNKS, ()), ROOT)
    assert sorted(used) == TEMPLATES


# --- the environment ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ unknown }}",
        "{{ known.unknown }}",
        "{% if unknown %}{% endif %}",
        "{% if not unknown %}{% endif %}",
        "{% for one in unknown %}{% endfor %}",
        "{% for one in known %}{{ one.unknown }}{% endfor %}",
    ],
)
def test_an_unknown_name_is_an_error(source: str) -> None:
    template = environment().from_string(source)
    with pytest.raises(UndefinedError, match="unknown"):
        template.render(known=["text"])


def test_a_value_that_is_not_given_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'chunks' is undefined"):
        render("chunks.py")


def test_text_is_printed_as_it_is() -> None:
    template = environment().from_string('{{ text }}\n{% if text %}\n  "kept"\n{% endif %}\n')
    assert template.render(text="<&'\"") == '<&\'"\n  "kept"\n'


# --- the ban itself -------------------------------------------------------------------------------

ALLOWED = [
    "",
    "text { } % # only",
    "{{ name }}",
    "{{ one.name.more }}",
    "{% for one in many %}{{ one }}{% endfor %}",
    "{% for one in many.more %}{{ one.name }}{% endfor %}",
    "{% if name %}{{ name }}{% endif %}",
    "{% if not one.name %}text{% else %}{{ one.name }}{% endif %}",
    "{% for a in many %}{% if a.b %}{% for c in a.d %}{{ c }}{% endfor %}{% endif %}{% endfor %}",
    "{# a comment #}",
]
BANNED = {
    "a call": "{{ f() }}",
    "a method": "{{ a.upper() }}",
    "a call in a loop": "{% for a in f(b) %}{% endfor %}",
    "a call in an if": "{% if f(a) %}{% endif %}",
    "a range": "{% for a in range %}{% endfor %}",
    "a sum": "{{ a + 1 }}",
    "a sign": "{{ -a }}",
    "a product": "{{ a * b }}",
    "a quotient": "{{ a // b }}",
    "a power": "{{ a ** b }}",
    "a remainder": "{{ a % b }}",
    "text joined": "{{ a ~ b }}",
    "a comparison": "{{ a == b }}",
    "a comparison in an if": "{% if a > 1 %}{% endif %}",
    "membership": "{% if a in b %}{% endif %}",
    "a conditional expression": "{{ a if b else c }}",
    "a conditional expression in a loop": "{% for a in (b if c else d) %}{% endfor %}",
    "and": "{% if a and b %}{% endif %}",
    "or": "{{ a or b }}",
    "not printed": "{{ not a }}",
    "not of not": "{% if not not a %}{% endif %}",
    "elif": "{% if a %}{% elif b %}{% endif %}",
    "a filter": "{{ a | upper }}",
    "a filter with arguments": "{{ a | join(', ') }}",
    "a filter in a loop": "{% for a in b | sort %}{% endfor %}",
    "a filter block": "{% filter upper %}a{% endfilter %}",
    "a test": "{% if a is defined %}{% endif %}",
    "a constant": "{{ 1 }}",
    "an if of a constant": "{% if true %}{% endif %}",
    "a list": "{% for a in [b, c] %}{% endfor %}",
    "a dict": "{{ {'a': b} }}",
    "a subscript": "{{ a[0] }}",
    "a key": "{{ a['b'] }}",
    "a slice": "{% for a in b[1:] %}{% endfor %}",
    "an attribute of a call": "{{ f().a }}",
    "an attribute of a constant": "{{ 'text'.a }}",
    "a loop's filter": "{% for a in b if c %}{% endfor %}",
    "a loop's else": "{% for a in b %}{% else %}none{% endfor %}",
    "a recursive loop": "{% for a in b recursive %}{% endfor %}",
    "unpacking": "{% for a, b in c %}{% endfor %}",
    "the loop's own counts": "{% for a in b %}{% if not loop.last %}, {% endif %}{% endfor %}",
    "set": "{% set a = b %}",
    "a set block": "{% set a %}b{% endset %}",
    "with": "{% with a = b %}{% endwith %}",
    "a macro": "{% macro a(b) %}{% endmacro %}",
    "a call block": "{% call a() %}{% endcall %}",
    "include": "{% include 'a' %}",
    "include of a name": "{% include a %}",
    "import": "{% import 'a' as b %}",
    "from import": "{% from 'a' import b %}",
    "extends": "{% extends 'a' %}",
    "a block": "{% block a %}{% endblock %}",
    "autoescape": "{% autoescape true %}{% endautoescape %}",
}
PLACES = [
    "{}",
    "{{% for one in many %}}{}{{% endfor %}}",
    "{{% if name %}}{}{{% endif %}}",
    "{{% if not name %}}{{% else %}}{}{{% endif %}}",
]


@pytest.mark.parametrize("source", ALLOWED)
def test_what_holds_no_logic_is_allowed(source: str) -> None:
    assert logic(source) == []


@pytest.mark.parametrize("source", BANNED.values(), ids=BANNED)
def test_logic_is_found_wherever_it_stands(source: str) -> None:
    for place in PLACES:
        assert logic(place.format(source)), place
