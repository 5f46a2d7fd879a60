"""Everything that the HTTP API refuses, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_server import (
    Running,
    assert_error,
    complete,
    serve,
)


@pytest.fixture(scope="module")
def server(byte_tokenizer: Any) -> Iterator[Running]:
    with serve(byte_tokenizer) as running:
        yield running


MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"name": "x", "schema": {"type": "object"}}
IMPOSSIBLE = {"name": "x", "schema": {"type": "string", "pattern": "(?=a)b"}}
REMOTE = {"name": "x", "schema": {"$ref": "https://example.org/schema.json"}}
HUGE = {"name": "x", "schema": {"enum": ["a" * 50] * 3000}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "colour": 1}, "colour"),
    ({"prompt": "a", "max_token": 4}, "max_token"),
    ({"prompt": "a", "messages": []}, "messages"),
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1, 2.5]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [258]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**40}, "max_tokens"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": 1e9}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_p": 1.1}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 1000}, "n"),
    ({"prompt": ["a"] * 30, "n": 3}, "n"),
    ({"prompt": "a", "seed": 2**64}, "seed"),
    ({"prompt": "a", "seed": 1.5}, "seed"),
    ({"prompt": "a", "stop": ["a"] * 5}, "stop"),
    ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "stop": 3}, "stop"),
    ({"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"prompt": "a", "logprobs": 6}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"prompt": "a", "request_id": "a b"}, "request_id"),
    ({"prompt": "a", "request_id": "a\n"}, "request_id"),
    ({"prompt": "a", "user": 5}, "user"),
    ({"prompt": "a", "min_p": 1.5}, "min_p"),
    ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": -2.1}, "frequency_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": 1, "01": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": True}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"258": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": "a", "echo": 1}, "echo"),
    ({"prompt": "a", "tools": []}, "tools"),
    ({"prompt": "a", "response_format": "json"}, "response_format"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format"),
    ({"prompt": "a", "response_format": {"type": "text", "json_schema": SCHEMA}}, "response_format"),
    (
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"prompt": "a", "response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": IMPOSSIBLE}}, "response_format"),
    ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": REMOTE}}, "response_format"),
    ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": HUGE}}, "response_format"),
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages.0.name"),
    ({"messages": MESSAGES, "prompt": "a"}, "prompt"),
    ({"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": MESSAGES, "logprobs": 2}, "logprobs"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages.0"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls.0.function"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{"}}]}]},
        "messages.0.tool_calls",
    ),
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools.0.function"),
    ({"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"messages": MESSAGES, "tools": [TOOL, TOOL]}, "tools"),
    ({"messages": MESSAGES, "tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    (
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    ({"messages": MESSAGES, "tool_choice": "auto"}, "tool_choice"),
    ({"messages": MESSAGES, "tools": [TOOL], "ignore_eos": True}, "ignore_eos"),
    ({"messages": MESSAGES, "tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
    (
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]},
        "tools",
    ),
    ({"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
    ({"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS)
def test_bad_completions_are_refused_by_name(server: Running, body: dict[str, Any], param: str) -> None:
    error = assert_error(server.client.post("/v1/completions", json=body), 400, param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("body", "param"), BAD_CHATS)
def test_bad_chats_are_refused_by_name(server: Running, body: dict[str, Any], param: str) -> None:
    assert_error(server.client.post("/v1/chat/completions", json=body), 400, param)


UNSUPPORTED_BOTH: dict[str, tuple[Any, Any]] = {  # a value that is refused, and a neutral one
    "priority": (1, 0),
    "guided_json": ({}, None),
    "structured_outputs": ({"json": {}}, None),
    "bad_words": (["a"], []),
    "allowed_token_ids": ([1], None),
    "length_penalty": (0.5, 1.0),
    "include_stop_str_in_output": (True, False),
    "truncate_prompt_tokens": (5, None),
    "service_tier": ("flex", "auto"),
}
UNSUPPORTED_COMPLETION = {"best_of": (2, 1), "suffix": ("x", "")}
UNSUPPORTED_CHAT = {
    "functions": ([{"name": "f"}], []),
    "function_call": ("auto", "none"),
    "reasoning_effort": ("high", "none"),
    "modalities": (["audio"], ["text"]),
    "chat_template": ("{{ messages }}", None),
    "documents": ([{"text": "a"}], []),
    "echo": (True, False),
}


@pytest.mark.parametrize(
    ("path", "base", "fields"),
    [
        ("/v1/completions", {"prompt": "ab", "max_tokens": 1}, UNSUPPORTED_BOTH | UNSUPPORTED_COMPLETION),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, UNSUPPORTED_BOTH | UNSUPPORTED_CHAT),
    ],
)
def test_unsupported_fields_are_refused_by_name_unless_neutral(
    server: Running, path: str, base: dict[str, Any], fields: dict[str, tuple[Any, Any]]
) -> None:
    for name, (refused, neutral) in fields.items():
        error = assert_error(server.client.post(path, json=base | {name: refused}), 400, name)
        assert error["code"] == "unsupported_field"
        complete(server, path=path, **base, **{name: neutral})
        complete(server, path=path, **base, **{name: None})


def test_true_is_not_a_neutral_one(server: Running) -> None:
    assert_error(
        server.client.post("/v1/completions", json={"prompt": "a", "repetition_penalty": True}),
        400,
        "repetition_penalty",
    )


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800"}', b"", b"{", b"[]", b"null", b'"prompt"',
        b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_broken_bodies(server: Running, raw: bytes) -> None:
    answer = server.client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    error = assert_error(answer, 400, answer.json()["error"]["param"])
    assert error["param"] in (None, "temperature")


def test_an_unknown_model(server: Running) -> None:
    answer = server.client.post("/v1/completions", json={"model": "gpt-5", "prompt": "a"})
    assert assert_error(answer, 404, "model")["code"] == "model_not_found"


def test_a_prompt_beyond_the_context_names_both_lengths(server: Running) -> None:
    error = assert_error(server.client.post("/v1/completions", json={"prompt": "a" * 2040}), 400, "prompt")
    assert all(number in error["message"] for number in ("2040", "16", "2056", "2048"))
    complete(server, prompt="a" * 2047, max_tokens=1)
    error = assert_error(
        server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a" * 3000}]}),
        400,
        "messages",
    )
    assert "2048" in error["message"]


def test_a_body_that_is_too_large(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, max_body_bytes=2048) as server:
        assert_error(server.client.post("/v1/completions", json={"prompt": "a" * 3000}), 413, None)

        def chunks() -> Iterator[bytes]:
            yield b'{"prompt": "'
            yield b"a" * 3000

        assert_error(server.client.post("/v1/completions", content=chunks()), 413, None)
        assert complete(server, prompt="a", max_tokens=1)["choices"][0]["text"] == "a"


def test_unknown_routes_and_methods_have_the_same_error_shape(server: Running) -> None:
    assert_error(server.client.get("/v1/nothing"), 404, None)
    assert_error(server.client.get("/v1/completions"), 405, None)
