"""Schemas that are small to write and take minutes to compile, which no limit of llguidance ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from ..core import InvalidRequestError
from .strict import is_number

MAX_PATTERNS = 64  # each pattern of an object's property names is compared with each other
MAX_MULTIPLE = 10_000  # a number's digits are read by an automaton of as many states
MAX_STATES = 1_000_000  # of all such automatons; a reference may stand for another one


def check_costs(schemas: Sequence[dict[str, Any]], field: str) -> None:
    """Looks at everything in one request's schemas, as if all of it were met together. Raises InvalidRequestError."""
    patterns, automatons, multiple = 0, 0, 1
    waiting: list[Any] = list(schemas)
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        waiting += part.values()
        automatons += "$ref" in part
        if isinstance(part.get("patternProperties"), dict):
            patterns += len(part["patternProperties"])
        if is_number(step := part.get("multipleOf", "")):
            automatons += 1
            multiple = min(math.lcm(multiple, _digits(step)), MAX_STATES)
    if patterns > MAX_PATTERNS:
        raise InvalidRequestError(
            f"Field '{field}' holds {patterns} patternProperties, which take too long to compile; at most {MAX_PATTERNS} are allowed.",
            field,
        )
    if multiple > MAX_MULTIPLE or (multiple > 1 and automatons * multiple > MAX_STATES):
        raise InvalidRequestError(
            f"Field '{field}' holds multipleOf that takes too long to compile; allowed are few and round ones: the least common "
            f"multiple of their digits may be {MAX_MULTIPLE}, and that times their number and that of $ref {MAX_STATES}.",
            field,
        )


def _digits(number: Any) -> int:
    """Without zeros at the end and the decimal point: 2.50 -> 25."""
    return int("".join(map(str, Decimal(str(number)).as_tuple().digits)).rstrip("0") or "1")
