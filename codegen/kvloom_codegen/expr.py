"""Integer expressions over a geometry's symbols, kept in one canonical form.

An expression is a sum of products of atoms. Sums are expanded, like terms collected and factors
sorted, so two expressions that are equal as polynomials are equal as objects: that is how the
generator sees that two strides are the same. Printers turn the tree into a language.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

# The order in which factors are written: loop variables, then counts from the outside in, then
# what else there is (split factors, columns of the geometry array), the element last.
VARIABLES = (
    *("layer", "kv", "number", "position", "slot", "block", "token", "head"),
    *("slot_ahead", "block_ahead", "token_ahead"),
)
ORDER = ("NL", "KV", "NB", "BS", "NH", "HS", "ITEMBITS")


@dataclass(frozen=True)
class Symbol:
    """A named integer: a geometry extent, a loop variable, or a column of the geometry array."""

    name: str


@dataclass(frozen=True)
class Quotient:
    """``numerator // divisor``; an exact one is known to leave no remainder."""

    numerator: Expr
    divisor: Expr
    exact: bool = False


@dataclass(frozen=True)
class RoundUp:
    """The smallest multiple of ``unit`` that is not below ``value``."""

    value: Expr
    unit: int


Atom: TypeAlias = Symbol | Quotient | RoundUp


@dataclass(frozen=True)
class Term:
    """``coefficient`` times the product of ``factors``; a factor may stand several times."""

    coefficient: int
    factors: tuple[Atom, ...]


@dataclass(frozen=True)
class Expr:
    """A sum of terms with distinct factors; no terms is zero."""

    terms: tuple[Term, ...]

    def __add__(self, other: Expr | int) -> Expr:
        return _collect((*self.terms, *to_expr(other).terms))

    __radd__ = __add__

    def __sub__(self, other: Expr | int) -> Expr:
        return self + to_expr(other) * -1

    def __mul__(self, other: Expr | int) -> Expr:
        return _collect(
            term for a in self.terms for b in to_expr(other).terms for term in _product(a, b)
        )

    __rmul__ = __mul__

    def __floordiv__(self, divisor: Expr | int) -> Expr:
        return Expr((Term(1, (Quotient(self, to_expr(divisor)),)),))

    @property
    def constant(self) -> int | None:
        """The value where it depends on no symbol, else None."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0].factors:
            return self.terms[0].coefficient
        return None

    def symbols(self) -> set[str]:
        """The names of all symbols in it."""
        found: set[str] = set()
        for term in self.terms:
            for atom in term.factors:
                if isinstance(atom, Symbol):
                    found.add(atom.name)
                elif isinstance(atom, Quotient):
                    found |= atom.numerator.symbols() | atom.divisor.symbols()
                else:
                    found |= atom.value.symbols()
        return found

    def evaluate(self, values: Mapping[str, int]) -> int:
        """Its value where every symbol has one."""
        total = 0
        for term in self.terms:
            product = term.coefficient
            for atom in term.factors:
                product *= _value(atom, values)
            total += product
        return total


def _value(atom: Atom, values: Mapping[str, int]) -> int:
    if isinstance(atom, Symbol):
        return values[atom.name]
    if isinstance(atom, Quotient):
        return atom.numerator.evaluate(values) // atom.divisor.evaluate(values)
    return -(-atom.value.evaluate(values) // atom.unit) * atom.unit


def to_expr(value: Expr | int) -> Expr:
    """``value`` as an expression."""
    if isinstance(value, Expr):
        return value
    return Expr((Term(value, ()),) if value else ())


def symbol(name: str) -> Expr:
    """The expression that is one symbol."""
    return Expr((Term(1, (Symbol(name),)),))


def round_up(value: Expr, unit: int) -> Expr:
    """``value`` rounded up to a multiple of ``unit``."""
    return Expr((Term(1, (RoundUp(value, unit),)),))


def exact_quotient(numerator: Expr, divisor: Expr) -> Expr:
    """``numerator / divisor`` that is whole in every geometry; times ``divisor`` it cancels."""
    return Expr((Term(1, (Quotient(numerator, divisor, exact=True),)),))


def _rank(atom: Atom) -> tuple[int, str]:
    if not isinstance(atom, Symbol):
        return (len(ORDER), repr(atom))
    if atom.name in VARIABLES:
        return (-1, atom.name)
    if atom.name in ORDER:
        return (ORDER.index(atom.name), atom.name)
    return (len(ORDER) - 2, atom.name)


def _product(a: Term, b: Term) -> tuple[Term, ...]:
    """The product of two terms: several terms where an exact quotient meets its divisor."""
    factors = (*a.factors, *b.factors)
    for atom in factors:
        if isinstance(atom, Quotient) and atom.exact:
            for other in factors:
                if atom.divisor == Expr((Term(1, (other,)),)):
                    rest = list(factors)
                    rest.remove(atom)
                    rest.remove(other)
                    kept = Expr((Term(a.coefficient * b.coefficient, tuple(rest)),))
                    return (kept * atom.numerator).terms
    return (Term(a.coefficient * b.coefficient, _sorted(factors)),)


def _sorted(factors: tuple[Atom, ...]) -> tuple[Atom, ...]:
    return tuple(sorted(factors, key=_rank))


def _collect(terms: Iterable[Term]) -> Expr:
    total: dict[tuple[Atom, ...], int] = {}
    for term in terms:
        total[term.factors] = total.get(term.factors, 0) + term.coefficient
    kept = [Term(number, factors) for factors, number in total.items() if number]
    # More factors first: the outermost stride leads a printed sum.
    kept.sort(key=lambda term: (-len(term.factors), [_rank(atom) for atom in term.factors]))
    return Expr(tuple(kept))


ZERO = to_expr(0)
ONE = to_expr(1)
