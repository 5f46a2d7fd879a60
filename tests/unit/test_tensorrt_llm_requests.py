"""Sampling parameters one by one, what is refused, and what is read from the engine's output."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from stand_in_llm import SamplingParams as Documented

from ecospec_orchestrator.core import InvalidRequestError, Request, SamplingParams, TokenLogprob
from ecospec_orchestrator.engine.tensorrt_llm.requests import (
    arguments_of,
    finish_reason_of,
    logprobs_of,
    until_stop,
)

ALWAYS = {"n": 1, "detokenize": False, "add_special_tokens": False, "return_perf_metrics": True}
NO_END = {"end_id": -1, "pad_id": 0}


GREEDY = SamplingParams()


def request(sampling: SamplingParams = GREEDY, **fields: Any) -> Request:
    return Request("r", (5, 6, 7), 9, sampling, **fields)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(), {"temperature": 0.0}),
        (SamplingParams(top_p=0.5, top_k=3, seed=4), {"temperature": 0.0}),  # greedy, whatever else there is
        (SamplingParams(0.7, seed=4), {"temperature": 0.7, "seed": 4}),
        (SamplingParams(1.0, top_p=0.9, seed=4), {"temperature": 1.0, "seed": 4, "top_p": 0.9}),
        (SamplingParams(1.0, top_k=5, seed=0), {"temperature": 1.0, "seed": 0, "top_k": 5}),
        (
            SamplingParams(2.0, 0.1, 1, 2**63 - 1),
            {"temperature": 2.0, "seed": 2**63 - 1, "top_p": 0.1, "top_k": 1},
        ),
    ],
)
@pytest.mark.parametrize("speculates", [True, False])
def test_how_the_next_token_is_drawn(sampling: SamplingParams, expected: dict[str, Any], speculates: bool) -> None:
    found = arguments_of(request(sampling), speculates)
    assert found == {"max_tokens": 9, **ALWAYS, **NO_END, **expected}
    Documented(**found)


def test_a_sampled_request_without_a_seed_gets_one_of_its_own() -> None:
    seeds = {arguments_of(request(SamplingParams(1.0)), True)["seed"] for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ((), {"end_id": -1, "pad_id": 0}),
        ((7,), {"end_id": 7, "pad_id": 7}),
        ((9, 7, 8), {"end_id": 7, "pad_id": 7, "stop_token_ids": [8, 9]}),
    ],
)
def test_what_ends_an_answer_is_never_left_to_the_engine(stops: tuple[int, ...], expected: dict[str, Any]) -> None:
    found = arguments_of(request(stop_token_ids=frozenset(stops)), True)
    assert {name: found[name] for name in expected} == expected
    assert ("stop_token_ids" in found) == (len(stops) > 1)


@dataclass(frozen=True)
class MoreSampling(SamplingParams):
    """With what the API may come to know."""

    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0


EDITED = [
    ("min_p", 0.1, {"min_p": 0.1}),
    ("min_tokens", 3, {"min_tokens": 3}),
    ("repetition_penalty", 1.2, {"repetition_penalty": 1.2}),
    ("presence_penalty", 0.5, {"presence_penalty": 0.5, "prompt_ignore_length": 3}),
    ("frequency_penalty", -0.5, {"frequency_penalty": -0.5, "prompt_ignore_length": 3}),
]


@pytest.mark.parametrize(("name", "value", "expected"), EDITED)
def test_what_edits_logits_is_taken_only_without_speculation(name: str, value: Any, expected: dict[str, Any]) -> None:
    sampling = MoreSampling(**{name: value})
    found = arguments_of(request(sampling), False)
    assert found == {"max_tokens": 9, **ALWAYS, **NO_END, "temperature": 0.0, **expected}
    Documented(**found)
    with pytest.raises(InvalidRequestError, match=f"Field '{name}' is not supported.*--policy none") as caught:
        arguments_of(request(sampling), True)
    assert caught.value.param == name


@pytest.mark.parametrize("speculates", [True, False])
def test_a_sampling_parameter_that_nobody_mapped_is_refused_by_name(speculates: bool) -> None:
    with pytest.raises(InvalidRequestError, match="Field 'dry_multiplier' is not supported"):
        arguments_of(request(MoreSampling(dry_multiplier=0.8)), speculates)


@dataclass(frozen=True)
class MoreRequest(Request):
    grammar: Any = None
    labels: tuple[str, ...] = field(default_factory=tuple)


def test_request_fields_that_nobody_mapped_are_refused_by_the_clients_name() -> None:
    base: dict[str, Any] = {"request_id": "r", "prompt_tokens": (5,), "max_tokens": 2}
    arguments_of(MoreRequest(**base), True)
    for values, name in (
        ({"record_routes": True}, "return_routed_experts"),
        ({"grammar": object()}, "response_format"),
        ({"labels": ("a",)}, "labels"),
    ):
        with pytest.raises(InvalidRequestError, match=f"Field '{name}'") as caught:
            arguments_of(MoreRequest(**base, **values), False)
        assert caught.value.param == name


def test_logprobs_only_without_speculation() -> None:
    assert arguments_of(request(logprobs=0), False)["logprobs"] == 0
    with pytest.raises(InvalidRequestError, match="Field 'logprobs'.*--policy none"):
        arguments_of(request(logprobs=0), True)


@pytest.mark.parametrize(
    ("tokens", "kept", "stopped"),
    [((), (), False), ((1, 2), (1, 2), False), ((1, 9, 2), (1,), True), ((8,), (), True), ((1, 8, 9), (1,), True)],
)
def test_output_ends_before_the_first_stop_token(tokens: Any, kept: Any, stopped: bool) -> None:
    assert until_stop(tokens, frozenset({8, 9})) == (kept, stopped)


def test_reasons() -> None:
    assert [finish_reason_of(r) for r in ("stop", "length", "cancelled", "timeout", None)] == [
        "stop",
        "length",
        "abort",
        "error",
        "error",
    ]


def test_logprobs_are_read_in_both_forms() -> None:
    score = lambda value: SimpleNamespace(logprob=value, rank=1)
    found = [{4: score(-1.0), 5: score(-0.5), 6: score(-1.0)}, {7: score(-0.1)}]
    assert logprobs_of((4, 7), found, 2) == (
        TokenLogprob(4, -1.0, ((5, -0.5), (4, -1.0))),
        TokenLogprob(7, -0.1, ((7, -0.1),)),
    )
    assert logprobs_of((4,), found, 0) == (TokenLogprob(4, -1.0),), "what the engine says beyond the output is left"
    assert logprobs_of((4, 7), [-0.25, -0.5], 0) == (TokenLogprob(4, -0.25), TokenLogprob(7, -0.5))


def test_a_traced_request_is_taken_like_any_other() -> None:
    assert arguments_of(request(span=object()), True) == arguments_of(request(), True)
