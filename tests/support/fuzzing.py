"""Many inputs without many megabytes: hypothesis keeps a tree of what it has tried, so long runs go round by round."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tqdm import tqdm

ROUND = 5000
GROWTH_BYTES = 256 << 20  # of a whole run: hypothesis's own share is well below


@st.composite
def mutated(draw: Any, corpus: Sequence[bytes]) -> bytes:
    """Something valid with a few bytes changed, cut out, repeated or put in; or anything at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    data = bytearray(draw(st.sampled_from(corpus)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["set", "cut", "insert", "repeat", "end"]))
        if kind == "set" and at < len(data):
            data[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 16))]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        elif kind == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 32))]
        else:
            del data[at:]
    return bytes(data)


def fuzz(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], inputs: int) -> None:
    """check() of `inputs` values, each round from another seed; what it raises ends the run with the smallest such value."""
    check(_first_of(strategy))  # what is loaded and compiled once counts for nobody's growth
    before = _resident_bytes()
    for number in tqdm(range(-(-inputs // ROUND)), disable=inputs <= ROUND, unit="round"):
        count = min(ROUND, inputs - number * ROUND)
        run = given(strategy)(check)
        limits = settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        seed(number)(limits(run))()
    growth = _resident_bytes() - before
    assert growth < GROWTH_BYTES, f"memory grew by {growth >> 20} MiB over {inputs} inputs"


def _first_of(strategy: st.SearchStrategy[Any]) -> Any:
    found: list[Any] = []

    def keep(value: Any) -> None:
        found.append(value)

    once = settings(max_examples=1, database=None, deadline=None, derandomize=True)
    once(given(strategy)(keep))()
    return found[0]


def _resident_bytes() -> int:
    """The most that the process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
