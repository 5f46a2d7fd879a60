"""What an expression of PromQL, in the plain forms that we write, asks for. Not a parser: Prometheus itself is one, see
test_prometheus.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

SELECTOR = re.compile(
    r"(?P<before>[a-z_0-9]*\()?"  # the function whose argument it is
    r"\b(?P<name>(?:ecospec[a-z0-9_:]+|up\b))"
    r"(?:\{(?P<matchers>[^}]*)\})?"
    r"(?:\[(?P<range>[^\]]*)\])?"
)
MATCHER = re.compile(r"(\w+)(?:=~|!~|!=|=)\"")
GROUPING = re.compile(r"\b(?:by|on|group_left) \(([^)]*)\)")
STRING = re.compile(r'"[^"]*"')
DIVISION = re.compile(r"/ (?:on \(\) group_left \(\) )?")


@dataclass(frozen=True)
class Selector:
    """before: the function that is applied to it, if any; series: what it selects, without the range."""

    name: str
    labels: frozenset[str]
    range: str | None
    before: str
    series: str


def selectors(expr: str) -> Iterator[Selector]:
    for found in SELECTOR.finditer(expr):
        labels = frozenset(MATCHER.findall(found["matchers"] or ""))
        series = found["name"] + (f"{{{found['matchers']}}}" if found["matchers"] else "")
        yield Selector(found["name"], labels, found["range"], (found["before"] or "").rstrip("("), series)


def groupings(expr: str) -> set[str]:
    """Labels in by (...), on (...) and group_left (...)."""
    return {label.strip() for labels in GROUPING.findall(expr) for label in labels.split(",") if label.strip()}


def unguarded(expr: str) -> list[str]:
    """The denominators that may be zero: all but "(... > 0)"."""
    bare = STRING.sub('""', expr)
    found = []
    for division in DIVISION.finditer(bare):
        denominator = _parenthesised(bare[division.end() :])
        if not denominator.endswith("> 0)"):
            found.append(denominator or bare[division.end() :])
    return found


def _parenthesised(text: str) -> str:
    """The group in parentheses that text begins with, else nothing."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: at + 1] if at else ""
    return ""
