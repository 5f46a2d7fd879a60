"""Step events and wishes for a policy: they tell what the step did, they change no token, and nobody pays for them who did not ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fake_engine import LAYERS, TOP_K, greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, build_policy

from ecospec_orchestrator import scheduler as scheduler_module
from ecospec_orchestrator.core import InvalidRequestError, SamplingParams, StepEvent, TokenEvent
from ecospec_orchestrator.wishes import policy_of_step

NAMES = ("none", "likelihood", "ecospec", "goodput")
REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(0, 22), min_size=1, max_size=6),
            "tokens": st.integers(1, 16),
            "temperature": st.sampled_from([0.0, 1.0]),
            "seed": st.integers(0, 1000),
            "stop": st.sampled_from([None, 3, 7]),
            "policy": st.sampled_from([None, *NAMES]),
            "step_events": st.booleans(),
        }
    ),
    min_size=1,
    max_size=4,
)


def answers(
    own: str, requests: Sequence[dict[str, Any]], others: bool = True, plain: bool = False
) -> list[list[TokenEvent]]:
    """Events of each request, all of them in one batch. plain: without wishes and events."""
    h = Harness(own)
    if others:
        h.scheduler.other_policies = {name: build_policy(name) for name in NAMES if name != own}
    for i, request in enumerate(requests):
        fields = {} if plain else {"policy": request["policy"], "step_events": request["step_events"]}
        h.submit(
            str(i),
            request["prompt"],
            request["tokens"],
            sampling=SamplingParams(temperature=request["temperature"], seed=request["seed"]),
            stop_token_ids=frozenset() if request["stop"] is None else frozenset({request["stop"]}),
            **fields,
        )
    found: list[list[TokenEvent]] = [[] for _ in requests]
    h.scheduler.start()
    try:
        ended = 0
        while ended < len(requests):
            event = h.events.get(timeout=20)
            found[int(event.request_id)].append(event)
            ended += event.finish_reason is not None
    finally:
        h.scheduler.stop()
    return found


def tokens_of(events: Sequence[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.tokens]


def steps_of(events: Sequence[TokenEvent]) -> list[StepEvent]:
    return [event.step for event in events if event.step is not None]


def request(**fields: Any) -> dict[str, Any]:
    plain = {"prompt": [3, 4, 5], "tokens": 16, "temperature": 0.0, "seed": 1, "stop": None}
    return plain | {"policy": None, "step_events": True} | fields


@settings(max_examples=40, deadline=None)
@given(own=st.sampled_from(["likelihood", "ecospec", "goodput"]), requests=REQUESTS)
def test_events_tell_the_step_and_change_nothing(own: str, requests: list[dict[str, Any]]) -> None:
    watched, reference = answers(own, requests), answers("none", requests, others=False, plain=True)
    for sent, events, plain in zip(requests, watched, reference, strict=True):
        assert tokens_of(events) == tokens_of(plain)
        assert [event.finish_reason for event in events][-1] == [event.finish_reason for event in plain][-1]
        steps = steps_of(events)
        if not sent["step_events"]:
            assert not steps
            continue
        stats = events[-1].stats
        assert stats is not None and [step.index for step in steps] == list(range(stats.steps))
        assert stats.draft_tokens == sum(int(step.chosen.sum()) for step in steps)
        assert stats.accepted_tokens == sum(int(step.accepted.sum()) for step in steps)
        root = sent["prompt"][-1]
        for step, event in zip(steps, (e for e in events if e.step is not None), strict=True):
            assert step.root == root
            check_step(step, event.tokens, sent)
            root = event.tokens[-1] if event.tokens else root


def check_step(step: StepEvent, tokens: Sequence[int], sent: dict[str, Any]) -> None:
    tree = step.tree
    assert (step.accepted <= step.chosen).all() and (tree.parents < np.arange(len(tree))).all()
    above = tree.parents[step.chosen]
    assert step.chosen[above[above >= 0]].all(), "chosen nodes without their parents"
    path = np.flatnonzero(step.accepted)
    assert tree.parents[path].tolist() == [-1, *path.tolist()][: len(path)], (
        "what was accepted is one path from the root"
    )
    assert tree.tokens[path].tolist()[: len(tokens)] == list(tokens)[: len(path)]
    assert (step.not_speculated is None) == bool(step.chosen.any())
    seen = step.target_probabilities[step.chosen]
    assert not np.isnan(step.target_probabilities[step.accepted]).any()
    assert ((seen >= 0) & (seen <= 1) | np.isnan(seen)).all()
    if sent["policy"] == "none":
        assert len(tree) == 0 and step.not_speculated == "request"
    assert len(step.plain_experts) == LAYERS and (step.plain_experts >= TOP_K - 1).all()
    assert (step.plain_experts <= step.report.distinct_experts).all()


def test_nothing_is_built_for_those_who_did_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    build = scheduler_module.step_events

    def counted(batch: Any, *rest: Any) -> Any:
        found = build(batch, *rest)
        made.extend(r.request.request_id for r, step in zip(batch, found, strict=True) if step is not None)
        return found

    monkeypatch.setattr(scheduler_module, "step_events", counted)
    monkeypatch.setattr("ecospec_orchestrator.step_events.observed_mass", lambda *_: 1 / 0)
    events = answers("ecospec", [request(step_events=False), request(step_events=False, prompt=[9])])
    assert not made and [tokens_of(each) for each in events] == [greedy((3, 4, 5), 16), greedy((9,), 16)]


def deciders(events: Sequence[TokenEvent]) -> set[str]:
    return {step.report.decision.policy for step in steps_of(events) if step.report.decision is not None}


@pytest.mark.parametrize("wish", NAMES)
@pytest.mark.parametrize("own", ["ecospec", "goodput", "likelihood"])
def test_a_wish_is_granted_to_one_alone(own: str, wish: str) -> None:
    (events,) = answers(own, [request(policy=wish)])
    assert deciders(events) == {wish} and tokens_of(events) == greedy((3, 4, 5), 16)
    if wish in ("likelihood", "ecospec"):
        assert any(step.chosen.any() for step in steps_of(events))


def test_plain_decoding_is_granted_in_any_company() -> None:
    plain, other = answers("likelihood", [request(policy="none", tokens=12), request(prompt=[6, 7], tokens=12)])
    assert {step.not_speculated for step in steps_of(plain)} == {"request"}
    assert any(step.chosen.any() for step in steps_of(other))
    together = [step for step in steps_of(other) if step.report.requests == 2]
    assert together and all(step.report.decision.policy == "likelihood" for step in together)  # type: ignore[union-attr]


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize(
    ("wishes", "decides"),
    [
        ([None], "goodput"),
        (["ecospec"], "ecospec"),
        (["ecospec", "ecospec", "none"], "ecospec"),
        (["ecospec", None], "goodput"),
        (["ecospec", "likelihood"], "goodput"),
        (["none", "none"], "none"),
        (["none", None], "goodput"),
        (["goodput"], "goodput"),
        (["unheard of"], "goodput"),
        ([], "none"),
    ],
)
def test_who_decides(wishes: list[str | None], decides: str) -> None:
    others: Any = {name: Named(name) for name in ("none", "likelihood", "ecospec")}
    own: Any = Named("goodput")
    assert policy_of_step(wishes, own, others).name == decides


def test_a_wish_that_cannot_be_granted_is_refused_by_name() -> None:
    h = Harness("none")
    with pytest.raises(InvalidRequestError, match="'ecospec.policy' is 'likelihood'.*allowed: none") as refused:
        h.submit("a", policy="likelihood")
    assert refused.value.param == "ecospec.policy"
    h.submit("b", policy="none")


def test_after_a_change_the_new_policy_may_be_wished_for_before_its_first_step() -> None:
    h = Harness("likelihood")
    h.scheduler.other_policies = {name: build_policy(name) for name in ("none", "likelihood")}
    h.scheduler.change(h.scheduler.limits, build_policy("ecospec"))
    h.submit("a", tokens=3, policy="ecospec")
    h.scheduler.start()
    try:
        assert h.collect(1)["a"][0] == greedy((3, 4, 5), 3)
        assert {report.decision.policy for report in h.reports if report.decision is not None} == {"ecospec"}
    finally:
        h.scheduler.stop()
