"""What the fields of a request do: they reach the scheduler, and their answers have the shapes that clients know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_server import MODEL, Running, assert_error, chat, complete, events, serve


@pytest.fixture(scope="module")
def server(byte_tokenizer: Any) -> Iterator[Running]:
    with serve(byte_tokenizer) as running:
        yield running


def test_every_sampling_field_reaches_the_scheduler(server: Running) -> None:
    fields = {
        "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25, "min_tokens": 1,
    }  # fmt: skip
    for ask in (complete, chat):
        body = {"prompt": "ab"} if ask is complete else {}
        ask(server, max_tokens=1, logit_bias={"5": -100, "7": 0.5}, **fields, **body)
        sampling = server.scheduler.seen[-1].sampling
        assert {name: getattr(sampling, name) for name in fields} == fields
        assert sampling.logit_bias == ((5, -100.0), (7, 0.5))
        assert server.scheduler.seen[-1].grammar is None


def test_min_tokens_puts_stop_strings_off(server: Running) -> None:
    body = complete(server, prompt="abcabd", max_tokens=6, stop="b", min_tokens=3)
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("abca", "stop")


# Echo and the scores of prompts.


def test_echo_repeats_the_prompt_whole_and_in_streams(server: Running, byte_tokenizer: Any) -> None:
    for prompt in ("abé", byte_tokenizer.encode("abé")):
        body = complete(server, prompt=prompt, max_tokens=2, echo=True)
        assert body["choices"][0]["text"] == "abéab" and body["usage"]["completion_tokens"] == 2
        streamed = events(server, prompt=prompt, max_tokens=2, echo=True)
        assert "".join(event["choices"][0]["text"] for event in streamed) == "abéab"


def test_a_stop_string_in_the_prompt_does_not_count(server: Running) -> None:
    choice = complete(server, prompt="abcde", max_tokens=3, echo=True, stop="bcd")["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abcdeabc", "length")


def test_echo_with_logprobs_scores_the_prompt(server: Running) -> None:
    """As evaluation harnesses ask for likelihoods."""
    for stream in (False, True):
        fields = {"prompt": "aé", "max_tokens": 2, "echo": True, "logprobs": 1}
        choices = (
            [event["choices"][0] for event in events(server, **fields)]
            if stream
            else complete(server, **fields)["choices"]
        )
        assert "".join(choice["text"] for choice in choices).startswith("aéa")
        merged: dict[str, list[Any]] = {}
        for choice in choices:
            for name, values in (choice["logprobs"] or {}).items():
                merged.setdefault(name, []).extend(values)
        assert merged["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.5]
        assert merged["text_offset"] == [0, 1, 1, 2, 3]
        assert merged["top_logprobs"][0] is None and merged["top_logprobs"][-1] is not None
        assert merged["tokens"][0] == "a" and len(merged["tokens"]) == 5


def test_prompt_logprobs_by_token_id(server: Running, byte_tokenizer: Any) -> None:
    first, second = byte_tokenizer.encode("ab")
    choice = complete(server, prompt="ab", max_tokens=1, prompt_logprobs=2)["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {
        str(second): {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
        str(second + 1): {"logprob": -1.25, "rank": 2, "decoded_token": "c"},
    }
    body = chat(server, max_tokens=1, prompt_logprobs=0)
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in complete(server, prompt="ab", max_tokens=1)["choices"][0]
    # Each field keeps its own number of alternatives.
    both = complete(server, prompt="ab", max_tokens=1, prompt_logprobs=0, echo=True, logprobs=3)["choices"][0]
    assert len(both["prompt_logprobs"][1]) == 1 and len(both["logprobs"]["top_logprobs"][1]) == 3
    assert server.scheduler.seen[-1].prompt_logprobs == 3


# Chats.


def prompt_of(server: Running, byte_tokenizer: Any) -> str:
    return byte_tokenizer.decode(server.scheduler.seen[-1].prompt_tokens)


def test_a_developer_is_the_system(server: Running, byte_tokenizer: Any) -> None:
    chat(
        server, messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "x"}], max_tokens=1
    )
    assert prompt_of(server, byte_tokenizer).startswith("<|im_start|>system\nbe brief<|im_end|>")


def test_a_final_message_is_continued(server: Running, byte_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer"}]
    chat(server, messages=messages, add_generation_prompt=False, continue_final_message=True, max_tokens=1)
    assert prompt_of(server, byte_tokenizer).endswith("<|im_start|>assistant\nThe answer")
    chat(server, messages=messages, add_generation_prompt=False, max_tokens=1)
    assert prompt_of(server, byte_tokenizer).endswith("The answer<|im_end|>\n")


def test_template_settings_reach_the_template(byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        byte_tokenizer, "chat_template", "{{ messages[0].content }}{% if thinking %} think{{ depth }}{% endif %}"
    )
    with serve(byte_tokenizer) as server:
        chat(server, text="a", max_tokens=1, chat_template_kwargs={"thinking": True, "depth": 3})
        assert prompt_of(server, byte_tokenizer) == "a think3"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages[9].content.nothing }}",
        "{{ 1 // 0 }}",
        "{{ messages + 1 }}",
    ],
)
def test_what_the_template_refuses_is_the_clients_fault(
    byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(byte_tokenizer, "chat_template", template)
    with serve(byte_tokenizer) as server:
        answer = server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert "chat template" in assert_error(answer, 400, "messages")["message"]


def test_a_chat_that_becomes_nothing_is_refused(byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_tokenizer, "chat_template", "{{ '' }}")
    with serve(byte_tokenizer) as server:
        answer = server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert_error(answer, 400, "messages")


# Tokens.


def test_tokenize_and_back(server: Running, byte_tokenizer: Any) -> None:
    body = complete(server, path="/tokenize", prompt="aé", model=MODEL)
    assert body == {"count": 3, "max_model_len": 2048, "tokens": byte_tokenizer.encode("aé"), "token_strs": None}
    assert complete(server, path="/detokenize", tokens=body["tokens"]) == {"prompt": "aé"}
    strings = complete(server, path="/tokenize", prompt="a", return_token_strs=True)
    assert strings["token_strs"] == ["a"]
    assert complete(server, path="/tokenize", prompt="")["count"] == 0


def test_tokenize_a_chat_as_it_is_served(server: Running) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    tokens = complete(server, path="/tokenize", messages=messages)["tokens"]
    chat(server, messages=messages, max_tokens=1)
    assert tuple(tokens) == server.scheduler.seen[-1].prompt_tokens
    open_ended = complete(server, path="/tokenize", messages=messages, add_generation_prompt=False)["tokens"]
    assert tokens[: len(open_ended)] == open_ended and len(open_ended) < len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ],
)
def test_bad_token_requests_are_refused_by_name(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    assert_error(server.client.post(path, json=body), 400, param)


def test_token_routes_know_models_and_keys(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, api_keys="k") as server:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}), ("/v1/responses", {})):
            assert_error(server.client.post(path, json=body), 401, None)
            right = {"Authorization": "Bearer k"}
            if path != "/v1/responses":
                assert server.client.post(path, json=body, headers=right).status_code == 200
                assert_error(server.client.post(path, json=body | {"model": "x"}, headers=right), 404, "model")


def test_responses_are_refused_with_what_to_use_instead(server: Running) -> None:
    error = assert_error(server.client.post("/v1/responses", json={"input": "x"}), 404, None)
    assert error["code"] == "unsupported_route" and "/v1/chat/completions" in error["message"]


def test_the_document_describes_every_route(server: Running) -> None:
    document = server.client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method in operations:
            assert server.client.request(method.upper(), path).status_code != 405, path
    served = {
        route.path
        for route in server.app.routes
        if getattr(route, "methods", None) and not route.path.startswith("/admin")
    }
    assert served == set(document["paths"])
    assert document["components"]["schemas"]["CompletionRequest"]["additionalProperties"] is False
