"""Prints expressions for people: sizes and strides in docs, docstrings and goldens, in bytes."""

from __future__ import annotations

from math import gcd

from kvloom_codegen.expr import Atom, Expr, Quotient, RoundUp, Symbol, Term

ITEMSIZE = "itemsize"


def bits_as_bytes(expr: Expr) -> str:
    """A number of bits in bytes: ``NH·HS·itemsize``, ``BS·132``, ``HS/2``."""
    if not expr.terms:
        return "0"
    return " + ".join(_term_in_bytes(term) for term in expr.terms)


def plain(expr: Expr) -> str:
    """A count, or an expression in loop variables and columns: ``HS/x``, ``kv·NL + layer``."""
    if not expr.terms:
        return "0"
    terms = sorted(expr.terms, key=lambda term: term.coefficient < 0)
    text = " + ".join(_product(term.coefficient, term.factors) for term in terms)
    return text.replace("+ -", "- ")


def _term_in_bytes(term: Term) -> str:
    """A term holds bits in exactly one place: itembits, a rounded size, or its coefficient."""
    factors = list(term.factors)
    for atom in term.factors:
        if atom == Symbol("ITEMBITS") or isinstance(atom, RoundUp):
            factors.remove(atom)
            words = [_atom(atom) if isinstance(atom, RoundUp) else ITEMSIZE]
            if factors or term.coefficient != 1:
                words.insert(0, _product(term.coefficient, tuple(factors)))
            return "·".join(words)
    shared = gcd(term.coefficient, 8)
    whole = _product(term.coefficient // shared, term.factors)
    return whole if shared == 8 else f"{whole}/{8 // shared}"


def _product(coefficient: int, factors: tuple[Atom, ...]) -> str:
    words = [_atom(factor) for factor in factors]
    if coefficient == -1 and words:
        return "-" + "·".join(words)
    if coefficient != 1 or not words:
        words.insert(0, str(coefficient))
    return "·".join(words)


def _atom(atom: Atom) -> str:
    if isinstance(atom, Symbol):
        return atom.name
    if isinstance(atom, Quotient):
        return f"({_grouped(atom.numerator)}/{_grouped(atom.divisor)})"
    return f"roundup({bits_as_bytes(atom.value)}, {atom.unit // 8})"


def _grouped(expr: Expr) -> str:
    text = plain(expr)
    return text if text.replace("_", "").isalnum() else f"({text})"
