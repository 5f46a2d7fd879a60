"""How many log-probabilities one request may bring."""

from __future__ import annotations

from typing import Any

import pytest

from ecospec_orchestrator.api.schemas import ChatRequest, CompletionRequest
from ecospec_orchestrator.api.scores import MAX_SCORES, check_scores
from ecospec_orchestrator.core import InvalidRequestError


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


@pytest.mark.parametrize(
    ("request_", "prompt", "answer", "scores"),
    [
        (completion(), 10**6, 10**6, 0),
        (completion(logprobs=5), 10**6, 7, 6 * 7),
        (completion(logprobs=0, n=3), 10**6, 7, 3 * 7),
        (completion(logprobs=2, echo=True), 11, 7, 3 * 18),
        (completion(prompt_logprobs=20, n=2), 11, 10**6, 2 * 21 * 11),
        (chat(logprobs=True, top_logprobs=20, prompt_logprobs=0), 11, 7, 21 * 7 + 11),
    ],
)
def test_every_score_counts(
    request_: Any, prompt: int, answer: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ecospec_orchestrator.api.scores.MAX_SCORES", scores)
    check_scores(request_, [range(prompt)], [answer])
    if scores:
        monkeypatch.setattr("ecospec_orchestrator.api.scores.MAX_SCORES", scores - 1)
        with pytest.raises(
            InvalidRequestError, match=f"up to {scores} log-probabilities; at most {scores - 1}"
        ) as refused:
            check_scores(request_, [range(prompt)], [answer])
        assert refused.value.param == ("logprobs" if request_.prompt_logprobs is None else "prompt_logprobs")


def test_a_small_body_cannot_ask_for_gigabytes() -> None:
    prompts = [range(2000)] * 64
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_SCORES}"):
        check_scores(completion(prompt_logprobs=20), prompts, [1] * 64)
    check_scores(completion(logprobs=1, echo=True), prompts, [1] * 64)  # as evaluations do
