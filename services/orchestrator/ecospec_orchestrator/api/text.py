"""Tokens to text while they arrive: whole characters only, cut before stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character


class Detokenizer:
    """Incremental decoding. The deltas joined are the decoding of all tokens, save that a character left unfinished at
    the very end is dropped.

    A window of the last tokens is decoded again at each push, because some tokenizers' text of a token depends on the
    token before it.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # tokens of the last delta, then the pending ones
        self._settled = 0  # how many of the window are already part of a delta

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)

    def push(self, token: int) -> str:
        """The text that became certain with this token; "" while a character is unfinished."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(BROKEN):
            return ""
        return self._take(text)

    def flush(self) -> str:
        """The rest, without a broken end."""
        return self._take(self._decode(self._window)).rstrip(BROKEN)

    def _take(self, text: str) -> str:
        before = self._decode(self._window[: self._settled])
        del self._window[: self._settled]
        self._settled = len(self._window)
        return text[len(before) :]


def possible_start(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of text that begins one of stops and is not all of it."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


class StopStrings:
    """Finds stop strings in text that arrives in pieces, and holds back what may be the start of one.

    The occurrence that ends first counts (of those, the one that starts first), so the cut does not depend on how the
    text was cut into pieces. The stop string itself is not part of the output.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Text that is safe to show; sets `found` when a stop string is complete."""
        if self.found is not None:
            return ""
        text = self._held + piece
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            _, start, self.found = min(hits)
            self._held = ""
            return text[:start]
        keep = possible_start(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held


class TextAssembler:
    """Detokenizer, then StopStrings, which look at the text behind the first min_tokens tokens."""

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), skip_special_tokens: bool = True, min_tokens: int = 0
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._stops = StopStrings(stops)
        self._too_early = min_tokens  # tokens that must come before a stop string counts
        self.characters = 0  # decoded so far, held back or not

    @property
    def stopped(self) -> bool:
        return self._stops.found is not None

    def push(self, token: int) -> str:
        piece = self._detokenizer.push(token)
        if self._too_early:
            self._too_early -= 1
            self.characters += len(piece)
            return piece
        return self._forward(piece)

    def flush(self) -> str:
        shown = self._forward(self._detokenizer.flush())
        return shown if self.stopped else shown + self._stops.flush()

    def _forward(self, piece: str) -> str:
        self.characters += len(piece)
        return self._stops.push(piece)
