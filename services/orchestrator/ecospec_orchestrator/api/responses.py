"""The JSON that a client gets back, for both endpoints, whole and in chunks."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ecospec_proto.trace_document import TraceDocument

from ..core import RequestStats
from .generation import Choice, ScoredToken, Update
from .steps import step_body
from .text import BROKEN


def _dense(histogram: dict[int, int]) -> list[int]:
    """Index j holds the steps that accepted exactly j draft tokens."""
    return [histogram.get(j, 0) for j in range(max(histogram, default=-1) + 1)]


def _merged(many: Sequence[RequestStats]) -> RequestStats:
    total = RequestStats()
    for stats in many:
        for name in ("steps", "steps_not_speculated", "draft_tokens", "accepted_tokens", "output_tokens"):
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        total.distinct_experts_sum += stats.distinct_experts_sum
        total.bytes_read += stats.bytes_read
        for length, histogram in stats.acceptance_histogram_by_draft_length.items():
            into = total.acceptance_histogram_by_draft_length.setdefault(length, {})
            for accepted, steps in histogram.items():
                into[accepted] = into.get(accepted, 0) + steps
    return total


def metrics_body(choices: Sequence[Choice]) -> dict[str, Any] | None:
    """Statistics of all choices together: vLLM's `speculative_decoding` object, and ours beside it.

    null where nothing was measured (no speculated step, no step). None when a choice has no statistics.
    """
    every = [choice.stats for choice in choices if choice.stats is not None]
    if len(every) < len(choices):
        return None
    stats = _merged(every)
    counted = stats.bytes_read > 0 or not stats.steps  # every step reads something, but not every engine tells
    per = lambda total, number: total / number if counted and number else None
    speculated = stats.steps - stats.steps_not_speculated
    # Steps without a draft are not verify steps of speculation; they are counted in ours only.
    by_length = {n: counts for n, counts in sorted(stats.acceptance_histogram_by_draft_length.items()) if n}
    accepted_steps: dict[int, int] = {}
    for counts in by_length.values():
        for accepted, steps in counts.items():
            accepted_steps[accepted] = accepted_steps.get(accepted, 0) + steps
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + stats.accepted_tokens / speculated if speculated else None,
            "draft_acceptance_rate": stats.accepted_tokens / stats.draft_tokens if stats.draft_tokens else None,
            "acceptance_histogram": _dense(accepted_steps),
            "acceptance_histogram_by_draft_length": {
                str(length): _dense(counts) for length, counts in by_length.items()
            },
            "num_spec_steps": speculated,
            "num_accepted_draft_tokens": stats.accepted_tokens,
            "num_draft_tokens": stats.draft_tokens,
        },
        "ecospec": {
            "mean_distinct_experts_per_layer_step": per(stats.distinct_experts_sum, stats.steps),
            "bytes_read": round(stats.bytes_read) if counted else None,
            "bytes_per_token": per(stats.bytes_read, stats.output_tokens),
            "steps": stats.steps,
            "steps_not_speculated": stats.steps_not_speculated,
        },
    }


def usage_body(choices: Sequence[Choice]) -> dict[str, int]:
    """A prompt counts once, however many choices it has."""
    prompts = {choice.prompt: len(choice.request.prompt_tokens) for choice in choices}
    prompt, completion = sum(prompts.values()), sum(choice.tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def routes_body(routes: TraceDocument | None) -> dict[str, Any] | None:
    """data: base64 of little-endian int16 [rows, MoE layers, top_k] in the given shape, -1 where unknown; one entry per row in
    the other lists. None when the scheduler did not tell in time."""
    if routes is None:
        return None
    return {
        "data": base64.b64encode(routes.routes.astype("<i2", copy=False).tobytes()).decode("ascii"),
        "shape": list(routes.routes.shape),
        "tokens": routes.tokens.tolist(),
        "positions": routes.positions.tolist(),
        "parents": routes.parents.tolist(),
        "accepted": routes.accepted.tolist(),
    }


@dataclass
class Collected:
    """All updates of one choice, joined."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, update: Update) -> None:
        self.text += update.text
        self.tokens += update.tokens  # in place: an answer may have very many steps
        self.scored += update.scored
        self.calls += update.calls
        self.finish_reason = update.finish_reason or self.finish_reason


def _message(result: Collected) -> dict[str, Any]:
    """content is null where the answer is calls alone."""
    if not result.calls:
        return {"role": "assistant", "content": result.text}
    calls = [{name: value for name, value in call.items() if name != "index"} for call in result.calls]
    return {"role": "assistant", "content": result.text or None, "tool_calls": calls}


@dataclass(frozen=True)
class Shape:
    """How this request's responses look."""

    chat: bool
    public_id: str
    created: int  # Unix seconds
    model: str
    tokenizer: Any
    token_ids: bool
    alternatives: int | None  # per token of the answer; None: no log-probabilities
    prompts: tuple[tuple[int, ...], ...]
    n: int
    routed_experts: bool = False
    prompt_logprobs: int | None = None  # alternatives per token; None: the prompt's are not shown

    def whole(self, results: Sequence[Collected], choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer to a request without streaming."""
        items = []
        for index, result in enumerate(results):
            item: dict[str, Any] = {"index": index}
            if self.chat:
                item["message"] = _message(result)
            else:
                item["text"] = result.text
            item["logprobs"] = self._logprobs(result.scored)
            item["finish_reason"] = result.finish_reason
            if self.token_ids:
                item["token_ids"] = result.tokens
                if not self.chat:
                    item["prompt_token_ids"] = list(self.prompts[index // self.n])
            if self.prompt_logprobs is not None and not self.chat:
                item["prompt_logprobs"] = self._prompt_logprobs(choices[index])
            if self.routed_experts:
                item["routed_experts"] = routes_body(choices[index].routes)
            items.append(item)
        body = self._envelope("chat.completion" if self.chat else "text_completion", items)
        if self.token_ids and self.chat:
            body["prompt_token_ids"] = list(self.prompts[0])
        if self.prompt_logprobs is not None and self.chat:
            body["prompt_logprobs"] = self._prompt_logprobs(choices[0])
        body["usage"] = usage_body(choices)
        body["metrics"] = metrics_body(choices)
        return body

    def role_chunk(self, index: int) -> dict[str, Any]:
        """A chat stream opens every choice with its role."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        body = self._envelope("chat.completion.chunk", [choice])
        if self.token_ids and index == 0:
            body["prompt_token_ids"] = list(self.prompts[0])
        return body

    def chunk(self, update: Update, first: bool) -> dict[str, Any]:
        """first: nothing of this choice was sent before."""
        item: dict[str, Any] = {"index": update.choice}
        if self.chat:
            item["delta"] = {"content": update.text} if update.text else {}
            if update.calls:
                item["delta"]["tool_calls"] = list(update.calls)
        else:
            item["text"] = update.text
        item["logprobs"] = self._logprobs(update.scored) if update.scored else None
        item["finish_reason"] = update.finish_reason
        if self.token_ids:
            item["token_ids"] = list(update.tokens)
            if first and not self.chat:
                item["prompt_token_ids"] = list(self.prompts[update.choice // self.n])
        if update.step is not None:
            item["ecospec"] = {"step": step_body(update.step, update.tokens, update.pieces, self._token)}
        return self._envelope("chat.completion.chunk" if self.chat else "text_completion", [item])

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last chunk of a stream with include_usage."""
        body = self._envelope("chat.completion.chunk" if self.chat else "text_completion", [])
        return body | {"usage": usage_body(choices), "metrics": metrics_body(choices)}

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.public_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if self.alternatives is None:
            return None
        return self._chat_logprobs(scored) if self.chat else self._completion_logprobs(scored)

    def _completion_logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        """The sampled token is always among top_logprobs, which may so hold one more than was asked for."""
        tops: list[dict[str, float] | None] = []
        for each in scored:
            if each.logprob is None:
                tops.append(None)
                continue
            alternatives = each.logprob.alternatives[: self.alternatives]
            top = {self._token(token): value for token, value in alternatives}
            tops.append({self._token(each.token): each.logprob.logprob} | top)
        return {
            "text_offset": [each.offset for each in scored],
            "tokens": [self._token(each.token) for each in scored],
            "token_logprobs": [None if each.logprob is None else each.logprob.logprob for each in scored],
            "top_logprobs": tops,
        }

    def _chat_logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        content = []
        for each in scored:
            assert each.logprob is not None, "a chat echoes no prompt"
            entry = self._entry(each.logprob.token, each.logprob.logprob)
            entry["top_logprobs"] = [self._entry(token, value) for token, value in each.logprob.alternatives]
            content.append(entry)
        return {"content": content}

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, Any] | None]:
        """One entry per prompt token, null for the first: by token id, the token itself and the most probable ones."""
        entries: list[dict[str, Any] | None] = [None]
        for each in choice.prompt_logprobs:
            best = each.alternatives[: self.prompt_logprobs]
            ranked = [(token, value, at) for at, (token, value) in enumerate(best, 1)]
            entries.append(
                {
                    str(token): {"logprob": value, "rank": rank, "decoded_token": self._token(token)}
                    for token, value, rank in [*ranked, (each.token, each.logprob, each.rank)]
                }
            )
        return entries

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token(token)
        # Part of a character has no text of its own; its bytes are left out rather than guessed.
        return {"token": text, "logprob": logprob, "bytes": None if BROKEN in text else list(text.encode())}

    def _token(self, token: int) -> str:
        return _text_of(self.tokenizer, token)


@lru_cache(maxsize=2**18)  # a vocabulary: log-probabilities and step events name the same tokens over and over
def _text_of(tokenizer: Any, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
