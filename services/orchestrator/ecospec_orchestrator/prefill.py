"""How much of a prompt to compute between two decode steps, as a rule over measured seconds, and computing it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .accounting.ledger import Ledger
from .core import TokenEvent, TokenLogprob
from .drafting.base import Drafter
from .engine.base import Engine, VerifyItem
from .running import Running
from .verification.sampling import logprobs

SMALLEST_CHUNK = 32  # nearly every expert is read for fewer tokens, too: 16 cost about as much
LARGEST_CHUNK = 512  # what one forward of the engine takes
SCORED_ROWS = 64  # of a prompt whose logits are wanted, at a time: a row of them takes half a megabyte and more
_STEP_WEIGHT, _CHUNK_WEIGHT = 0.25, 0.1  # of the newest measurement in the decayed ones; two parts need more of them


@dataclass(frozen=True)
class PrefillCost:
    """Seconds of a chunk: a fixed part (reading the weights) and one per token."""

    fixed: float
    per_token: float

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens


class PrefillMeter:
    """The cost by decayed least squares over the measured chunks, but for the first, which also compiles and touches memory.

    Chunks of about one size cannot tell the two parts apart: their ratio then stays what it was. It begins high, because a
    balanced chunk then is one of another size, which tells; from too low a ratio small chunks would follow for ever."""

    def __init__(self) -> None:
        self.cost: PrefillCost | None = None
        self._warm = False
        self._fixed_in_tokens = 128.0
        self._sums = np.zeros(5)  # decayed: of 1, tokens, seconds, tokens^2, tokens * seconds

    def observe(self, tokens: int, seconds: float) -> None:
        if not self._warm:
            self._warm = True
            return
        self._sums += _CHUNK_WEIGHT * (np.array([1, tokens, seconds, tokens**2, tokens * seconds]) - self._sums)
        _, mean_tokens, mean_seconds, squares, products = self._sums / self._sums[0]
        variance = squares - mean_tokens**2
        if variance > (0.1 * mean_tokens) ** 2:
            slope = (products - mean_tokens * mean_seconds) / variance
            # Noise must not make either part vanish.
            per_token = min(max(slope, 0.01 * mean_seconds / mean_tokens), mean_seconds / mean_tokens)
            self._fixed_in_tokens = mean_seconds / per_token - mean_tokens
        per_token = mean_seconds / (mean_tokens + self._fixed_in_tokens)
        self.cost = PrefillCost(float(self._fixed_in_tokens * per_token), float(per_token))


def chunk_tokens(remaining: int, cost: PrefillCost, step_seconds: float) -> int:
    """Tokens of the next chunk beside decode steps of step_seconds: as long as one such step takes, but no less than half
    of its time for the tokens themselves, since a chunk's fixed part is paid for each. Chunks of about one size, without a
    crumb at the end, which would cost nearly as much."""
    one_step = (step_seconds - cost.fixed) / cost.per_token
    balanced = cost.fixed / cost.per_token
    wanted = min(max(SMALLEST_CHUNK, one_step, balanced), LARGEST_CHUNK)
    chunks = max(1, math.ceil(remaining / wanted - 0.25), math.ceil(remaining / LARGEST_CHUNK))
    return math.ceil(remaining / chunks)


def next_in_turn(remaining: list[int], turn: int) -> int:
    """Which of the waiting prompts, oldest first, gets the chunk: by turns the one with the fewest tokens left, so that a
    short one does not wait for a long one, and the oldest, so that no stream of short ones can starve it."""
    return min(range(len(remaining)), key=lambda i: (remaining[i], i)) if turn % 2 == 0 else 0


class PrefillPace:
    """Keeps the time for chunks at `share` of the time of the decode steps between them: a decoding request's mean time per
    token then grows to 1 + share times at most, beside one chunk that may have been saved up for."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._meter = PrefillMeter()
        self._step_seconds: float | None = None
        self._credit = 0.0  # seconds of prefill that decode steps have paid for

    def tokens(self, remaining: int, decoding: bool) -> int:
        """Tokens to compute now, at most `remaining`; 0: decode first."""
        if not decoding:
            return min(remaining, LARGEST_CHUNK)
        cost = self._meter.cost
        if cost is None or self._step_seconds is None:
            return min(remaining, SMALLEST_CHUNK)
        tokens = chunk_tokens(remaining, cost, self._step_seconds)
        return tokens if self._credit >= min(cost.seconds(tokens), self._saved_at_most()) else 0

    def observe_chunk(self, tokens: int, seconds: float, decoding: bool) -> None:
        """tokens: computed by the target; 0: seconds went to something else, such as feeding the drafter."""
        if decoding:  # an interruption of the machine is not paid back for long
            self._credit = max(self._credit - seconds, -4 * self._saved_at_most())
        else:
            self._credit = 0.0
        if tokens:
            self._meter.observe(tokens, seconds)

    def observe_step(self, seconds: float) -> None:
        """One decode step, which is all that ran."""
        last = seconds if self._step_seconds is None else self._step_seconds
        self._step_seconds = last + _STEP_WEIGHT * (seconds - last)
        self._credit = min(self._credit, self._saved_at_most()) + self.share * seconds

    def _saved_at_most(self) -> float:
        """Seconds of one ordinary chunk."""
        cost = self._meter.cost
        if cost is None or self._step_seconds is None:
            return 0.0
        return cost.seconds(chunk_tokens(LARGEST_CHUNK, cost, self._step_seconds))


class Prefiller:
    """Computes prompts chunk by chunk and feeds the drafter after each."""

    def __init__(self, engine: Engine, drafter: Drafter | None, share: float) -> None:
        self.pace = PrefillPace(share)
        self._engine, self._drafter, self._turn = engine, drafter, 0

    def turn(self, batch: Sequence[Running], ledger: Ledger) -> None:
        """One chunk of one prompt, where the decoding requests leave time for it."""
        waiting = [r for r in batch if not r.decodes]
        if not waiting:
            return
        decoding = len(waiting) < len(batch)
        running = waiting[next_in_turn([r.to_prefill for r in waiting], self._turn)]
        tokens = self.pace.tokens(running.to_prefill, decoding)
        if tokens == 0 and running.to_prefill:
            return
        self._turn += 1
        began = time.monotonic()
        if running.prefill_began is None:
            running.prefill_began = began
            self._reuse(running, ledger)
        most = running.to_prefill if running.prompt_scores is None else SCORED_ROWS
        computed = 0 if running.unfed else min(tokens, running.to_prefill, most)
        if running.unfed:  # what was reused, for the drafter alone
            self._feed(running, *running.unfed.pop(0))
        elif computed:
            begin, end = running.prefilled, running.prefilled + computed
            features = self._compute(running, np.array(running.tokens[begin:end], np.int64))
            running.prefilled = end
            self._feed(running, features, np.array(running.tokens[begin + 1 : end + 1], np.int64))
        now = time.monotonic()
        self.pace.observe_chunk(computed, now - began, decoding)
        if computed:
            ledger.observe_prefill(computed, now - began)
        if not running.to_prefill and not running.unfed:
            running.decode_began = now
            if running.prompt_scores is not None:
                scores = tuple(running.prompt_scores)
                running.on_event(TokenEvent(running.request.request_id, prompt_logprobs=scores))

    def _compute(self, running: Running, tokens: np.ndarray) -> Any:
        if running.prompt_scores is not None:
            return self._score(running, running.prompt_scores, tokens)
        if running.recorder is None:
            return self._engine.prefill(running.sequence, tokens)
        features, experts = self._engine.prefill_with_experts(running.sequence, tokens)
        running.recorder.prefilled(tokens, experts)
        return features

    def _score(self, running: Running, scores: list[TokenLogprob], tokens: np.ndarray) -> Any:
        """The next tokens of the prompt as a chain to verify, which is what brings logits."""
        (verified,) = self._engine.verify([VerifyItem(running.sequence, tokens, np.arange(-1, len(tokens) - 1))])
        self._engine.commit(running.sequence, np.arange(len(tokens)))
        if running.recorder is not None:
            running.recorder.prefilled(tokens, verified.experts)
        following = running.tokens[running.prefilled + 1 : running.prefilled + 1 + len(tokens)]
        alternatives = running.request.prompt_logprobs or 0
        scores += [logprobs(row, token, alternatives) for row, token in zip(verified.logits, following, strict=True)]
        return verified.features

    def _reuse(self, running: Running, ledger: Ledger) -> None:
        """Begin with what the cache holds of the prompt already."""
        if running.recorder is not None or running.prompt_scores is not None:
            return  # the cache knows neither which experts were used nor the logits
        prompt = np.array(running.tokens, np.int64)
        parts = self._engine.reuse(running.sequence, prompt[:-1])
        running.prefilled = sum(len(part) for part in parts)
        if self._drafter is not None and parts:
            features = self._drafter.join(parts)
            for begin in range(0, running.prefilled, LARGEST_CHUNK):
                rows = slice(begin, min(begin + LARGEST_CHUNK, running.prefilled))
                running.unfed.append((features[rows], prompt[rows.start + 1 : rows.stop + 1]))
        ledger.observe_prefix(len(prompt) - 1, running.prefilled)

    def _feed(self, running: Running, features: Any, next_tokens: np.ndarray) -> None:
        if self._drafter is not None:
            self._drafter.extend([running.draft_state], [features], [next_tokens])
