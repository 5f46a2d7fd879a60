"""Penalties, bias, min_tokens, grammars and scores through the whole step loop, under every policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_engine import LOGITS, VOCABULARY, greedy
from scheduler_harness import POLICIES, Harness
from scipy.special import log_softmax
from toy_grammar import ToyGrammar

from ecospec_orchestrator.core import InvalidRequestError, SamplingParams
from ecospec_orchestrator.prefill import SCORED_ROWS

SETTINGS: dict[str, SamplingParams] = {
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=0.8),
    "repetition": SamplingParams(repetition_penalty=1.4),
    "bias": SamplingParams(logit_bias=((3, 4.0), (7, -100.0))),
    "min_tokens": SamplingParams(min_tokens=9),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1, seed=4),
    "all, sampled": SamplingParams(
        1.1, 0.95, 12, 7, 0.01, 0.4, 0.2, 1.2, logit_bias=((3, 1.0), (9, -2.0)), min_tokens=5
    ),
}
STOP = frozenset({greedy((3, 4, 5), 20)[4]})


def texts(h: Harness, grammar: bool = False) -> dict[str, list[int]]:
    """Every setting at once in one batch."""
    for name, sampling in SETTINGS.items():
        made = ToyGrammar(VOCABULARY, ends=sorted(STOP), ends_after=6) if grammar else None
        h.submit(name, tokens=18, sampling=sampling, stop_token_ids=STOP, grammar=made)
    return {name: tokens for name, (tokens, _) in h.collect(len(SETTINGS)).items()}


@pytest.mark.parametrize("grammar", [False, True])
def test_every_policy_gives_plain_decodings_tokens(harness: Any, grammar: bool) -> None:
    plain = texts(harness("none", max_running=1), grammar)
    assert len({tuple(text) for text in plain.values()}) > 4, "the settings change too little to show anything"
    for i, policy in enumerate(POLICIES):
        h = harness(policy, max_running=(4, 2)[i % 2])
        assert texts(h, grammar) == plain, policy
        if policy == "likelihood":
            assert sum(sum(report.accepted) for report in h.reports) > 0, "no draft was right: the test shows nothing"


def test_min_tokens_puts_the_stop_token_off(harness: Any) -> None:
    h = harness("ecospec")
    h.submit("plain", stop_token_ids=STOP)
    h.submit("later", stop_token_ids=STOP, sampling=SamplingParams(min_tokens=9))
    found = h.collect(2)
    assert len(found["plain"][0]) < 9 <= len(found["later"][0])


def test_a_grammar_that_cannot_go_on_fails_its_request_alone(harness: Any) -> None:
    h = harness("likelihood")
    h.submit("broken", grammar=ToyGrammar(VOCABULARY, fails_after=3))
    h.submit("fine")
    found = h.collect(2)
    tokens, last = found["broken"]
    assert last.finish_reason == "error" and last.error == "the toy grammar broke." and len(tokens) < 3
    assert found["fine"][0] == greedy((3, 4, 5), 20)
    assert h.scheduler.alive


@pytest.mark.parametrize("policy", ["none", "ecospec"])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_prompt_scores_are_the_targets_own(harness: Any, policy: str, length: int) -> None:
    h = harness(policy)
    prompt = [(5 * i + 3) % VOCABULARY for i in range(length)]
    for name in ("a", "again"):  # what is scored is not taken from the cache
        h.submit(name, prompt, tokens=4, prompt_logprobs=2)
        event = h.events.get(timeout=10)
        assert event.tokens == () and event.finish_reason is None
        scores = event.prompt_logprobs
        assert [score.token for score in scores] == prompt[1:]
        for at, score in enumerate(scores):
            logits = log_softmax(LOGITS[prompt[at - 1] if at else 0, prompt[at]].astype(np.float64))
            assert score.logprob == pytest.approx(logits[score.token], abs=1e-6)
            assert [token for token, _ in score.alternatives] == np.argsort(-logits, kind="stable")[:2].tolist()
            assert score.rank == 1 + int((logits > logits[score.token]).sum())
        assert h.collect(1)[name][0] == greedy(prompt, 4)


def test_long_prompts_are_scored_in_small_parts(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecospec_orchestrator.prefill.SCORED_ROWS", 8)
    h = harness("likelihood")
    rows: list[int] = []
    verify = h.engine.verify
    monkeypatch.setattr(h.engine, "verify", lambda items: (rows.append(len(items[0].tokens)), verify(items))[1])
    prompt = [(5 * i + 3) % VOCABULARY for i in range(30)]
    h.submit("a", prompt, tokens=2, prompt_logprobs=0, record_routes=True)
    assert len(h.events.get(timeout=10).prompt_logprobs) == 29
    tokens, last = h.collect(1)["a"]
    assert tokens == greedy(prompt, 2) and max(rows) <= 11
    assert last.routes.tokens.tolist()[:29] == prompt[:29]
    assert SCORED_ROWS > 8


def test_a_bias_beyond_the_vocabulary_is_refused(harness: Any) -> None:
    h = harness("none")
    with pytest.raises(InvalidRequestError, match=f"logit_bias holds token id {VOCABULARY}"):
        h.submit("a", sampling=SamplingParams(logit_bias=((VOCABULARY, 1.0),)))
