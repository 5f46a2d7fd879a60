"""Schemas and tools through the whole server with a real step loop: they fit, and speculation changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from api_server import Running, chat, complete, events, serve
from byte_engine import byte_scheduler

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def server(byte_tokenizer: Any) -> Iterator[Running]:
    with serve(byte_tokenizer, byte_scheduler("ecospec")) as running:
        yield running


@pytest.fixture(scope="module")
def plain(byte_tokenizer: Any) -> Iterator[Running]:
    with serve(byte_tokenizer, byte_scheduler("none", max_running=1)) as running:
        yield running


def whole_answers(server: Running, **body: Any) -> list[dict[str, Any]]:
    choices = chat(server, max_tokens=400, n=6, **body)["choices"]
    ended = [choice for choice in choices if choice["finish_reason"] != "length"]
    assert len(ended) >= 3, "too few answers ended to show anything"
    return ended


def test_json_schema_answers_fit(server: Running) -> None:
    for choice in whole_answers(server, response_format=FORMAT, seed=1):
        found = json.loads(choice["message"]["content"])
        assert set(found) == {"name", "sizes"} and len(found["name"]) <= 12
        assert all(type(size) is int for size in found["sizes"]) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object"}, "top_p": 0.9, "presence_penalty": 0.3},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "frequency_penalty": 0.2},
        {"logit_bias": {"64": 3}, "repetition_penalty": 1.1, "min_p": 0.02, "min_tokens": 30, "stop": ["aa"]},
    ],
)
def test_speculation_changes_no_answer(server: Running, plain: Running, fields: dict[str, Any]) -> None:
    answers = []
    for each in (plain, server):
        found = []
        for temperature in (0, 1):
            body = chat(each, max_tokens=80, n=3, seed=5, temperature=temperature, return_token_ids=True, **fields)
            found += [(choice["token_ids"], choice["finish_reason"]) for choice in body["choices"]]
        answers.append(found)
    assert answers[0] == answers[1]
    body = chat(server, max_tokens=80, seed=5, **fields)
    assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_a_stream_is_the_whole_answer(server: Running) -> None:
    fields = {"response_format": FORMAT, "max_tokens": 200, "seed": 3}
    whole = complete(server, prompt="x", **fields)["choices"][0]["text"]
    assert "".join(event["choices"][0]["text"] for event in events(server, prompt="x", **fields)) == whole
    assert whole.startswith("{")


def test_required_tools_are_called(server: Running) -> None:
    for choice in whole_answers(server, tools=TOOLS, tool_choice="required", seed=2):
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls" and message["content"] is None
        for call in message["tool_calls"]:
            assert set(call) == {"id", "type", "function"} and call["function"]["name"] == "weather"
            assert set(json.loads(call["function"]["arguments"])) == {"name", "sizes"}


def test_streamed_calls_are_the_same_calls(server: Running) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "seed": 2, "max_tokens": 400, "parallel_tool_calls": False}
    whole = chat(server, **fields)["choices"][0]
    messages = [{"role": "user", "content": "hello"}]
    streamed = events(server, "/v1/chat/completions", messages=messages, **fields)
    deltas = [event["choices"][0]["delta"] for event in streamed]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["function"] for call in calls] == [call["function"] for call in whole["message"].get("tool_calls", [])]
    assert streamed[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_the_prompt_tells_of_the_tools(server: Running, byte_tokenizer: Any) -> None:
    told = complete(server, path="/tokenize", messages=[{"role": "user", "content": "x"}], tools=TOOLS)["tokens"]
    assert '"name": "weather"' in byte_tokenizer.decode(told)


def test_prompts_are_scored_by_the_target(server: Running, plain: Running) -> None:
    bodies = [
        complete(each, prompt="abcabc", max_tokens=2, prompt_logprobs=2, temperature=0)["choices"][0]["prompt_logprobs"]
        for each in (server, plain)
    ]
    assert bodies[0] == bodies[1] and len(bodies[0]) == 6
    assert all(entry["rank"] >= 1 for score in bodies[0][1:] for entry in score.values())
