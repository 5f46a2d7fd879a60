from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ecospec_orchestrator.api.text import BROKEN, Detokenizer, StopStrings, TextAssembler

shared_fixture = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=BROKEN), max_size=40)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@shared_fixture
@given(text=texts)
def test_deltas_join_to_the_text_and_never_show_half_a_character(byte_tokenizer: Any, text: str) -> None:
    detokenizer = Detokenizer(byte_tokenizer)
    deltas = [detokenizer.push(token) for token in encode(byte_tokenizer, text)]
    assert not any(BROKEN in delta for delta in deltas)
    assert "".join(deltas) + detokenizer.flush() == text


@shared_fixture
@given(tokens=st.lists(st.integers(0, 255), max_size=24))
def test_any_bytes_decode_like_the_whole_save_for_an_unfinished_end(byte_tokenizer: Any, tokens: list[int]) -> None:
    detokenizer = Detokenizer(byte_tokenizer)
    deltas = [detokenizer.push(token) for token in tokens]
    whole = byte_tokenizer.decode(tokens)
    assert not any(delta.endswith(BROKEN) for delta in deltas)
    assert ("".join(deltas) + detokenizer.flush()).rstrip(BROKEN) == whole.rstrip(BROKEN)


@pytest.mark.parametrize("text", ["é", "漢", "😀", "a😀"])
def test_an_unfinished_character_at_the_end_is_dropped(byte_tokenizer: Any, text: str) -> None:
    detokenizer = Detokenizer(byte_tokenizer)
    shown = "".join(detokenizer.push(token) for token in encode(byte_tokenizer, text)[:-1])
    assert shown + detokenizer.flush() == text[:-1]


def test_special_tokens_are_shown_only_on_request(byte_tokenizer: Any) -> None:
    tokens = encode(byte_tokenizer, "a<|im_end|>b")
    for skip, expected in ((True, "ab"), (False, "a<|im_end|>b")):
        detokenizer = Detokenizer(byte_tokenizer, skip_special_tokens=skip)
        assert "".join(map(detokenizer.push, tokens)) + detokenizer.flush() == expected


def brute_force_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read letter by letter; the first end at which some stop string is complete wins, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text("ab", max_size=5), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings_cut_like_brute_force_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown = ""
    for at, piece in enumerate(pieces):
        shown += matcher.push(piece)
        expected, found = brute_force_cut("".join(pieces[: at + 1]), stops)
        assert matcher.found == found
        assert expected.startswith(shown), "text was shown that belongs to a stop string"
    if matcher.found is None:
        shown += matcher.flush()
    assert shown == brute_force_cut("".join(pieces), stops)[0]


def test_only_what_may_start_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["END"])
    assert [matcher.push(piece) for piece in ("one E", "N", "x two", " EN", "D after", "more")] == [
        "one ", "", "ENx two", " ", "", "",
    ]  # fmt: skip
    assert matcher.found == "END"


@shared_fixture
@given(text=texts, stop=st.sampled_from(["é", "漢字", "😀!", "ab"]), tail=texts)
def test_a_stop_string_of_several_tokens_is_found(byte_tokenizer: Any, text: str, stop: str, tail: str) -> None:
    assembler = TextAssembler(byte_tokenizer, [stop])
    shown = ""
    for token in encode(byte_tokenizer, text + stop + tail):
        shown += assembler.push(token)
    assert assembler.stopped
    assert shown == (text + stop).partition(stop)[0]


def test_held_back_text_comes_out_when_generation_ends(byte_tokenizer: Any) -> None:
    assembler = TextAssembler(byte_tokenizer, ["stop!"])
    shown = "".join(assembler.push(token) for token in encode(byte_tokenizer, "do not stop"))
    assert shown == "do not "
    assert assembler.flush() == "stop"
    assert not assembler.stopped
