"""Routes of a request: every verified row with the experts that it used, hanging where it was verified."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from fake_engine import LAYERS, TOP_K, ChainEngine, experts_of, greedy
from scheduler_harness import POLICIES

from ecospec_orchestrator.core import InvalidRequestError, SamplingParams
from ecospec_proto.traces import TraceDocument, check_document


def check(routes: TraceDocument, text: list[int]) -> None:
    """The accepted rows are the text, all is a valid trace, and every row but the last of the text used its token's experts."""
    check_document(routes, ChainEngine.geometry)
    assert routes.tokens[routes.accepted].tolist() == text
    assert routes.positions[routes.accepted].tolist() == list(range(len(text)))
    known = (routes.routes >= 0).all((1, 2))
    assert np.array_equal(routes.routes[known], np.stack([experts_of(int(t)) for t in routes.tokens[known]]))
    unknown = np.flatnonzero(~known)
    assert set(unknown.tolist()) <= {len(routes.tokens) - 1}


@pytest.mark.parametrize("policy", POLICIES)
def test_routes_cover_prompt_output_and_rejected_drafts(harness: Any, policy: str) -> None:
    h = harness(policy)
    prompts = {f"r{i}": [i + 1, *([2 * i] * i)] for i in range(4)}
    for name, prompt in prompts.items():
        h.submit(name, prompt, tokens=17, record_routes=name != "r3")
    found = h.collect(4)
    assert found["r3"][1].routes is None
    for name in ("r0", "r1", "r2"):
        tokens, last = found[name]
        check(last.routes, prompts[name] + tokens)
        rows = len(prompts[name]) + 17
        # Every draft that was verified is a row: accepted ones are part of the text.
        assert len(last.routes.tokens) == rows + last.stats.draft_tokens - last.stats.accepted_tokens


def test_sampled_routes_follow_the_text(harness: Any) -> None:
    h = harness("likelihood")
    h.submit("a", record_routes=True, sampling=SamplingParams(temperature=1.0, seed=3))
    tokens, last = h.collect(1)["a"]
    check(last.routes, [3, 4, 5, *tokens])
    assert not last.routes.accepted.all(), "no draft was rejected: the test shows nothing"


@pytest.mark.parametrize("policy", ["none", "likelihood"])
def test_a_stop_token_is_part_of_the_routes_once(harness: Any, policy: str) -> None:
    whole = greedy((3, 4, 5), 20)
    for at in (4, 6, 9):
        h = harness(policy)
        h.submit("a", record_routes=True, stop_token_ids=frozenset({whole[at]}))
        tokens, last = h.collect(1)["a"]
        check(last.routes, [3, 4, 5, *tokens, whole[at]])


def test_a_long_prompt_is_recorded_in_chunks_and_computed_although_the_cache_has_it(harness: Any) -> None:
    h = harness("likelihood", max_context_tokens=400, pages=64)
    prompt = [i * 7 % 23 for i in range(300)]
    h.submit("first", prompt, tokens=3)
    h.collect(1)
    h.submit("again", prompt, tokens=3, record_routes=True)
    tokens, last = h.collect(1)["again"]
    check(last.routes, prompt + tokens)
    assert len(last.routes.tokens[last.routes.accepted]) == 303


def test_a_request_that_was_cancelled_tells_what_it_has(harness: Any) -> None:
    h = harness("likelihood")
    h.engine.gate = threading.Event()
    h.submit("a", record_routes=True)
    while not h.engine.prefills:  # from here on the first step comes before the cancellation
        time.sleep(0.001)
    h.scheduler.cancel("a")
    h.engine.gate.set()
    tokens, last = h.collect(1)["a"]
    assert last.finish_reason == "abort" and tokens
    check(last.routes, [3, 4, 5, *tokens])


def test_routes_that_could_outgrow_memory_are_refused_by_name(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = 13 + 2 * LAYERS * TOP_K
    monkeypatch.setattr(
        "ecospec_orchestrator.recording.MAX_BYTES", (3 + 11 * 10) * row
    )  # 10 drafts and a root per token
    h = harness("likelihood")
    h.submit("fits", tokens=10, record_routes=True)
    with pytest.raises(InvalidRequestError, match="lower max_tokens to 10 or less") as caught:
        h.submit("too long", tokens=11, record_routes=True)
    assert caught.value.param == "return_routed_experts"
    h.submit("not recorded", tokens=11)
    h.collect(2)
