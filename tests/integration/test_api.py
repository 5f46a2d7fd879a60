"""Answers of the HTTP API: completions, streams, chat, statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from api_server import (
    MODEL,
    Running,
    assert_error,
    chat,
    complete,
    events,
    metric,
    serve,
    wait_until,
)


@pytest.fixture(scope="module")
def server(byte_tokenizer: Any) -> Iterator[Running]:
    with serve(byte_tokenizer) as running:
        yield running


def test_a_completion_has_the_openai_shape(server: Running) -> None:
    body = complete(server, model=MODEL, prompt="abcde", max_tokens=7)
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion" and body["model"] == MODEL
    assert body["choices"] == [{"index": 0, "text": "abcdeab", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    assert abs(body["created"] - time.time()) < 60


def test_defaults_are_the_documented_ones(server: Running) -> None:
    body = complete(server, prompt="ab")
    assert body["usage"]["completion_tokens"] == 16
    request = server.scheduler.seen[-1]
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, 0)
    assert request.sampling.seed is None and request.logprobs is None


def test_sampling_reaches_the_scheduler(server: Running) -> None:
    complete(server, prompt="ab", max_tokens=1, temperature=0, top_p=0.5, top_k=7, seed=-3, user="me")
    sampling = server.scheduler.seen[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 0.5, 7, 2**63 - 3)
    complete(server, prompt="ab", max_tokens=1, top_k=-1)
    assert server.scheduler.seen[-1].sampling.top_k == 0


def test_all_prompt_forms_agree(server: Running, byte_tokenizer: Any) -> None:
    ids = {text: byte_tokenizer.encode(text) for text in ("abc", "de")}
    texts = [
        complete(server, prompt=prompt, max_tokens=4)["choices"][0]["text"] for prompt in ("abc", ["abc"], ids["abc"])
    ]
    assert texts == ["abca"] * 3
    for many in (["abc", "de"], [ids["abc"], ids["de"]]):
        body = complete(server, prompt=many, max_tokens=4)
        assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "abca"), (1, "dede")]
        assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}


def test_n_choices_have_derived_seeds(server: Running) -> None:
    body = complete(server, prompt="abcdefg", max_tokens=3, n=3, seed=1)
    first, second, third = server.scheduler.seen[-3:]
    assert first.sampling.seed == 1 and len({first.sampling.seed, second.sampling.seed, third.sampling.seed}) == 3
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["choices"][0]["text"] == complete(server, prompt="abcdefg", max_tokens=3, seed=1)["choices"][0]["text"]
    assert complete(server, prompt="abcdefg", max_tokens=3, n=3, seed=1)["choices"] == body["choices"]
    assert body["usage"]["prompt_tokens"] == 7, "a prompt counts once"
    complete(server, prompt="ab", max_tokens=1, n=2)
    assert all(request.sampling.seed is None for request in server.scheduler.seen[-2:])


def test_n_and_several_prompts_are_ordered_by_prompt(server: Running) -> None:
    body = complete(server, prompt=["aa", "bb"], max_tokens=2, n=2)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "aa"), (1, "aa"), (2, "bb"), (3, "bb")]


def test_logprobs_of_completions(server: Running) -> None:
    body = complete(server, prompt="aé", max_tokens=4, logprobs=2)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["tokens"][0] == "a" and logprobs["tokens"][3] == "a"
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert [set(top.values()) for top in logprobs["top_logprobs"]][0] == {-0.5, -1.5}
    only_chosen = complete(server, prompt="a", max_tokens=1, logprobs=0)["choices"][0]["logprobs"]
    assert only_chosen["top_logprobs"] == [{"a": -0.5}]


def test_token_ids_on_request(server: Running, byte_tokenizer: Any) -> None:
    ids = byte_tokenizer.encode("abc")
    choice = complete(server, prompt="abc", max_tokens=3, return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == ids and choice["prompt_token_ids"] == ids
    streamed = events(server, prompt="abc", max_tokens=5, return_token_ids=True)
    assert [token for event in streamed for token in event["choices"][0]["token_ids"]] == [*ids, *ids[:2]]
    assert ["prompt_token_ids" in event["choices"][0] for event in streamed] == [True] + [False] * (len(streamed) - 1)


@pytest.mark.parametrize(
    ("stop", "text"), [("fgh", "abcde"), (["zz", "d"], "abc"), ("é", "abcdefghij"), ("ja", "abcdefghié")]
)
def test_stop_strings_over_token_borders(server: Running, stop: Any, text: str) -> None:
    prompt = "abcdefghijé" if stop != "ja" else "abcdefghiéja"
    body = complete(server, prompt=prompt, max_tokens=40, stop=stop)
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (text, "stop")
    streamed = events(server, prompt=prompt, max_tokens=40, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in streamed) == text
    assert [event["choices"][0]["finish_reason"] for event in streamed][-1] == "stop"
    wait_until(lambda: server.scheduler.running == 0)


def test_metrics_come_with_a_stop_string_too(server: Running) -> None:
    body = complete(server, prompt="abcdef", max_tokens=400, stop="f")
    assert body["metrics"]["speculative_decoding"]["num_spec_steps"] >= 3
    assert body["usage"]["completion_tokens"] == 6


def test_held_back_text_is_sent_at_the_end(server: Running) -> None:
    streamed = events(server, prompt="abcdef", max_tokens=3, stop="cde")
    assert "".join(event["choices"][0]["text"] for event in streamed) == "abc"


def test_the_end_token_stops_unless_ignored(server: Running) -> None:
    body = complete(server, prompt="ab<|im_end|>c", max_tokens=5)
    assert body["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "text": "ab",
        "logprobs": None,
        "finish_reason": "stop",
    }
    body = complete(server, prompt="ab<|im_end|>c", max_tokens=5, ignore_eos=True)
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("abca", "length")
    body = complete(server, prompt="ab<|im_end|>c", max_tokens=4, ignore_eos=True, skip_special_tokens=False)
    assert body["choices"][0]["text"] == "ab<|im_end|>c"


def test_stop_token_ids(server: Running, byte_tokenizer: Any) -> None:
    (stop,) = byte_tokenizer.encode("c")
    body = complete(server, prompt="abcd", max_tokens=9, stop_token_ids=[stop])
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("ab", "stop")


@pytest.mark.parametrize("prompt", ["plain text", "héllo wörld", "漢字 and 😀 emoji"])
def test_a_stream_joins_to_the_whole_answer(server: Running, prompt: str) -> None:
    whole = complete(server, prompt=prompt, max_tokens=50)["choices"][0]["text"]
    streamed = events(server, prompt=prompt, max_tokens=50)
    texts = [event["choices"][0]["text"] for event in streamed]
    assert "".join(texts) == whole and len(texts) > 5
    assert not any("\ufffd" in text for text in texts)
    assert len({event["id"] for event in streamed}) == 1
    assert all("usage" not in event and "metrics" not in event for event in streamed)


def test_usage_comes_on_a_last_chunk_without_choices(server: Running) -> None:
    streamed = events(server, prompt="abcd", max_tokens=6, stream_options={"include_usage": True})
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in streamed[:-1])
    last = streamed[-1]
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    assert last["metrics"]["ecospec"]["steps"] == 3


def test_continuous_usage_counts_up(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = events(server, prompt="abcd", max_tokens=6, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in streamed] == [1, 3, 6, 6]


def test_several_choices_in_one_stream(server: Running) -> None:
    streamed = events(server, prompt=["abc", "xyz"], max_tokens=5, n=2)
    texts = {index: "" for index in range(4)}
    for event in streamed:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: "abcab", 1: "abcab", 2: "xyzxy", 3: "xyzxy"}


def test_a_chat_stream(server: Running) -> None:
    streamed = events(
        server, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=9,
        stream_options={"include_usage": True},
    )  # fmt: skip
    assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(event["object"] == "chat.completion.chunk" and event["id"].startswith("chatcmpl-") for event in streamed)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in streamed[:-1])
    assert text == "user\nhi"
    assert [event["choices"][0]["finish_reason"] for event in streamed[:-1]] == [None] * (len(streamed) - 2) + ["stop"]
    assert streamed[-1]["choices"] == [] and "metrics" in streamed[-1]


def test_chat_uses_the_template(server: Running, byte_tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "yo"}]},
    ]
    body = chat(server, messages=messages, max_completion_tokens=3)
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert set(body["choices"][0]["message"]) == {"role", "content"}
    prompt = byte_tokenizer.decode(server.scheduler.seen[-1].prompt_tokens)
    assert prompt == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nyo<|im_end|>\n<|im_start|>assistant\n"


def test_chat_logprobs(server: Running) -> None:
    body = chat(server, text="x", max_tokens=5, logprobs=True, top_logprobs=3)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 5 and len(content[0]["top_logprobs"]) == 3
    assert content[1] | {"top_logprobs": []} == {"token": "u", "logprob": -0.5, "bytes": [117], "top_logprobs": []}


def test_chat_without_a_limit_gets_the_rest_of_the_context(server: Running) -> None:
    body = chat(server, text="x", stop="user")
    request = server.scheduler.seen[-1]
    assert request.max_tokens + len(request.prompt_tokens) == 2048
    assert body["choices"][0]["finish_reason"] == "stop"


def test_metrics_object_has_vllms_shape_and_ours(server: Running) -> None:
    body = complete(server, prompt="abcd", max_tokens=6)  # steps of 1, 2 and 3 tokens
    assert body["metrics"] == {
        "speculative_decoding": {
            "mean_acceptance_length": 2.0,
            "draft_acceptance_rate": 0.25,
            "acceptance_histogram": [1, 1, 1],
            "acceptance_histogram_by_draft_length": {"4": [1, 1, 1]},
            "num_spec_steps": 3,
            "num_accepted_draft_tokens": 3,
            "num_draft_tokens": 12,
        },
        "ecospec": {
            "mean_distinct_experts_per_layer_step": 9.0,
            "bytes_read": 3000,
            "bytes_per_token": 500.0,
            "steps": 3,
            "steps_not_speculated": 0,
        },
    }
    both = complete(server, prompt=["abcd", "efgh"], max_tokens=6)["metrics"]
    assert both["speculative_decoding"]["acceptance_histogram"] == [2, 2, 2]
    assert both["ecospec"]["bytes_per_token"] == 500.0


def test_process_metrics_follow_requests(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer) as server:
        complete(server, prompt="abcd", max_tokens=6)
        complete(server, prompt="abcd", max_tokens=400, stop="d")
        complete(server, 400, prompt="")
        assert metric(server, "ecospec_prompt_tokens_total") == 8
        assert metric(server, "ecospec_generation_tokens_total") == 10
        assert metric(server, "ecospec_request_success_total", finished_reason="length") == 1
        assert metric(server, "ecospec_request_success_total", finished_reason="stop") == 1
        assert metric(server, "ecospec_time_to_first_token_seconds_count") == 2
        assert metric(server, "ecospec_e2e_request_latency_seconds_count") == 2
        assert metric(server, "ecospec_request_queue_time_seconds_count") == 2
        assert metric(server, "ecospec_requests_refused_total", status="400") == 1
        assert metric(server, "ecospec_num_requests_running") == 0


def test_models_and_version(server: Running) -> None:
    models = server.client.get("/v1/models").json()
    assert models["object"] == "list"
    (model,) = models["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 2048)
    version = server.client.get("/version").json()
    assert version["version"] and version["info"] == {"policy": "ecospec"}


def test_keys(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, api_keys="first-key, zweiter-schlüssel") as server:
        body = {"prompt": "a", "max_tokens": 1}
        for header in ("", "Bearer", "Bearer wrong", "Basic first-key", "Bearer first-key2"):
            answer = server.client.post("/v1/completions", json=body, headers={"Authorization": header})
            assert_error(answer, 401, None)
            assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("first-key", "zweiter-schlüssel"):
            header = f"Bearer {key}".encode()
            assert (
                server.client.post("/v1/completions", json=body, headers={"Authorization": header}).status_code == 200
            )
        assert server.client.get("/v1/models").status_code == 401
        for path in ("/health", "/ready", "/metrics"):
            assert server.client.get(path).status_code == 200
