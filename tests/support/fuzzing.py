"""Many inputs without many megabytes, and fast: hypothesis draws numbers, of each of which a block of inputs is made."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tqdm import tqdm

BLOCK = 100  # hypothesis takes longer for one number than most checks for an input
ROUND = 20_000  # and keeps a tree of what it has tried, so long runs go round by round
GROWTH_BYTES = 256 << 20  # of a whole run: hypothesis's own share is well below
SPECIAL_BYTES = (0, 1, 0x7F, 0x80, 0xFF)

Input = TypeVar("Input")


def mutated(corpus: Sequence[bytes]) -> Callable[[Random], bytes]:
    """Something valid with a few bytes changed, cut out, repeated, put in or spliced; or anything at all."""

    def make(random: Random) -> bytes:
        if random.randrange(10) == 0:
            return random.randbytes(random.randrange(200))
        data = bytearray(random.choice(corpus))
        for _ in range(random.randrange(5)):
            at, kind = random.randrange(len(data) + 1), random.randrange(6)
            if kind == 0 and at < len(data):
                data[at] = random.choice(SPECIAL_BYTES) if random.randrange(2) else random.randrange(256)
            elif kind == 1:
                del data[at : at + random.randrange(1, 17)]
            elif kind == 2:
                data[at:at] = random.randbytes(random.randrange(9))
            elif kind == 3:
                data[at:at] = data[at : at + random.randrange(1, 33)]
            elif kind == 4:
                other = random.choice(corpus)
                data[at:] = other[random.randrange(len(other) + 1) :]
            elif kind == 5:
                del data[at:]
        return bytes(data)

    return make


def text(random: Random, longest: int) -> str:
    """ASCII, any other characters, and halves of surrogate pairs."""
    return "".join(
        chr(random.choice((random.randrange(128), random.randrange(0x800), random.randrange(0x110000))))
        for _ in range(random.randrange(longest + 1))
    )


def fuzz(make: Callable[[Random], Input], check: Callable[[Input], None], inputs: int) -> None:
    """check() of `inputs` values, rounded up to blocks, no two rounds with the same; what it raises ends the run and names the value."""

    def check_block(number: int) -> None:
        random = Random(number)
        for _ in range(BLOCK):
            value = make(random)
            try:
                check(value)
            except BaseException as error:
                error.add_note(f"input: {value!r}")
                raise

    check(make(Random(0)))  # what is loaded and compiled once counts for nobody's growth
    before = _resident_bytes()
    for number in tqdm(range(-(-inputs // ROUND)), disable=inputs <= ROUND, unit="round", mininterval=10):
        blocks = -(-min(ROUND, inputs - number * ROUND) // BLOCK)
        numbers = st.integers(0, 2**64 - 1).map(lambda drawn, high=number << 64: high | drawn)
        limits = settings(max_examples=blocks, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        seed(number)(limits(given(numbers)(check_block)))()
    growth = _resident_bytes() - before
    assert growth < GROWTH_BYTES, f"memory grew by {growth >> 20} MiB over {inputs} inputs"
    if inputs > ROUND:
        print(f"{inputs} inputs, memory grew by {growth >> 20} MiB to {_resident_bytes() >> 20} MiB")


def _resident_bytes() -> int:
    """The most that the process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
