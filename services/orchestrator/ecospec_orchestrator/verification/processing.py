"""What a request's settings make of the target's logits before a token is chosen: grammar, bias, penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from ..core import GrammarState, Request, SamplingParams


class LogitProcessor:
    """The logits of one request's next token as a function of the tokens before it alone, so that what was drafted and
    rejected leaves no trace: the walk down a tree asks at a row and advances by the target's own token, as decoding without
    drafts does.

    In this order: what the grammar rules out goes; stop tokens go while there are fewer than min_tokens output tokens, unless
    nothing else is left; logit_bias is added; logits of tokens seen in prompt or output are divided by repetition_penalty
    where positive, else multiplied by it; frequency_penalty times the token's count in the output, and presence_penalty where
    it occurs there, are subtracted.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_tokens: Sequence[int] = (),
        stop: Collection[int] = frozenset(),
        grammar: GrammarState | None = None,
    ) -> None:
        self._sampling = sampling
        self._grammar = grammar
        self._stop = np.array(sorted(stop), np.int64)
        self._bias_tokens = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self._bias = np.array([value for _, value in sampling.logit_bias], np.float32)
        self._seen = dict.fromkeys(prompt_tokens) if sampling.repetition_penalty != 1 else {}
        self._output: Counter[int] = Counter()
        self._length = 0  # of the output

    @property
    def error(self) -> str | None:
        """Why the request cannot go on, for a person."""
        return None if self._grammar is None else self._grammar.error

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """logits float32 [vocabulary] of the next token -> what it is chosen by, float32 [vocabulary], -inf where it must not be."""
        row = logits.copy()
        if self._grammar is not None:
            allowed = self._grammar.allowed()[: len(row)]
            row[: len(allowed)][~allowed] = -np.inf
            row[len(allowed) :] = -np.inf  # padding of the vocabulary, which is no text
        if self._length < self._sampling.min_tokens:
            stop = self._stop[self._stop < len(row)]
            kept = row[stop]
            row[stop] = -np.inf
            if not np.isfinite(row.max()):  # the grammar is at its end
                row[stop] = kept
        row[self._bias_tokens] += self._bias
        self._penalise(row)
        return row

    def advance(self, token: int) -> None:
        """The output goes on with this token, which is no stop token."""
        self._output[token] += 1
        self._length += 1
        if self._sampling.repetition_penalty != 1:
            self._seen[token] = None
        if self._grammar is not None:
            self._grammar.advance(token)

    def _penalise(self, row: np.ndarray) -> None:
        sampling = self._sampling
        if self._seen:
            seen = np.fromiter(self._seen, np.int64, len(self._seen))
            values = row[seen]
            row[seen] = np.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
        if self._output and (sampling.frequency_penalty or sampling.presence_penalty):
            tokens = np.fromiter(self._output, np.int64, len(self._output))
            counts = np.fromiter(self._output.values(), np.float32, len(self._output))
            row[tokens] -= sampling.frequency_penalty * counts + np.float32(sampling.presence_penalty)


def processor_for(request: Request) -> LogitProcessor | None:
    """None where the logits stay as they are."""
    sampling = request.sampling
    plain = (
        request.grammar is None
        and not sampling.min_tokens
        and not sampling.logit_bias
        and sampling.repetition_penalty == 1
        and not sampling.frequency_penalty
        and not sampling.presence_penalty
    )
    if plain:
        return None
    grammar = None if request.grammar is None else request.grammar.start()
    return LogitProcessor(sampling, request.prompt_tokens, request.stop_token_ids, grammar)
