"""Every field of a request with real weights, and the same answers under every policy: fields are judged by each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from demo_process import Demo, running
from ports import free_port

KEY = "an-administrators-long-key"
POLICIES = ("likelihood", "ecospec", "goodput")
PROMPT = "def add(a, b):\n    return"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "capital"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Facts of a city.", "parameters": SCHEMA}}]
MESSAGES = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Tell me about the city of Paris."},
]


class Api:
    def __init__(self, demo: Demo, admin_port: int) -> None:
        self.demo, self.admin = demo, f"http://127.0.0.1:{admin_port}/admin/settings"
        self.client = httpx.Client(base_url=demo.url, timeout=300, trust_env=False)

    def use(self, policy: str) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = httpx.patch(self.admin, json={"policy": policy}, headers=headers, trust_env=False, timeout=20)
        assert answer.status_code == 200, answer.text

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, prompt: Any = PROMPT, **body: Any) -> dict[str, Any]:
        """Greedy unless told otherwise -> the one choice."""
        return self.post("/v1/completions", **{"prompt": prompt, "max_tokens": 24, "temperature": 0, **body})[
            "choices"
        ][0]

    def chat(self, **body: Any) -> dict[str, Any]:
        defaults = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0}
        return self.post("/v1/chat/completions", **{**defaults, **body})["choices"][0]

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        with self.client.stream("POST", path, json=body | {"stream": True}) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECOSPEC_ADMIN_KEY", KEY)
        with running(tmp_path_factory.mktemp("cache"), "--policy", "ecospec", "--admin-port", str(port)) as demo:
            found = Api(demo, port)
            yield found
            found.client.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_plain_decodings_under_every_policy(api: Api, policy: str) -> None:
    """Grammars and penalties included, alone and in company, greedy and drawn."""
    many: list[dict[str, Any]] = [
        {"response_format": FORMAT, "max_tokens": 40},
        {"response_format": {"type": "json_object"}, "max_tokens": 24},
        {"tools": TOOLS, "tool_choice": "required", "max_tokens": 40},
        {"tools": TOOLS, "max_tokens": 32},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 1, "seed": 5, "min_p": 0.05, "top_k": 50, "top_p": 0.95, "logit_bias": {"30": 2}},
        {"temperature": 0.8, "seed": 6, "response_format": FORMAT, "max_tokens": 40},
        {"stop": ["at"], "min_tokens": 5},
    ]
    ask = lambda body: api.chat(return_token_ids=True, **body)["token_ids"]
    api.use("none")
    with ThreadPoolExecutor(8) as pool:
        plain = list(pool.map(ask, many))
        api.use(policy)
        assert list(pool.map(ask, many)) == plain
    assert len({tuple(tokens) for tokens in plain}) == len(many), "the fields change too little to show anything"


def test_schemas_and_tools_are_kept(api: Api) -> None:
    for fields in ({}, {"temperature": 1.5, "seed": 1}, {"temperature": 1.5, "seed": 2}):
        choice = api.chat(response_format=FORMAT, max_tokens=80, **fields)
        assert choice["finish_reason"] == "stop", choice
        found = json.loads(choice["message"]["content"])
        assert set(found) == {"city", "capital"} and len(found["city"]) <= 6
        choice = api.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=80, **fields)
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "look_up" and set(json.loads(call["function"]["arguments"])) == set(found)


def test_stop_strings_cut_across_tokens_in_streams(api: Api) -> None:
    api.use("likelihood")
    whole = api.complete("Once upon a time, in a small village,", max_tokens=24, return_token_ids=True)
    pieces = [api.post("/detokenize", tokens=[token])["prompt"] for token in whole["token_ids"]]
    assert "".join(pieces) == whole["text"]
    borders = [sum(map(len, pieces[:at])) for at in range(3, 20)]
    for border in borders[::6]:
        stop = whole["text"][border - 2 : border + 2]
        cut = whole["text"][: whole["text"].index(stop)]
        body = {
            "prompt": "Once upon a time, in a small village,",
            "max_tokens": 40,
            "temperature": 0,
            "stop": [stop, "@@"],
        }
        choice = api.complete(**body)
        assert (choice["text"], choice["finish_reason"]) == (cut, "stop")
        chunks = [event["choices"][0] for event in api.events("/v1/completions", **body)]
        assert "".join(chunk["text"] for chunk in chunks) == cut and chunks[-1]["finish_reason"] == "stop"


def test_scores_agree_however_they_are_asked_for(api: Api) -> None:
    """A drafted token's score is that of the same token in a prompt."""
    api.use("likelihood")
    made = api.complete(logprobs=3, return_token_ids=True)
    prompt = api.post("/tokenize", prompt=PROMPT)["tokens"]
    scored = api.complete([*prompt, *made["token_ids"]], max_tokens=1, prompt_logprobs=3)["prompt_logprobs"]
    assert scored[0] is None and len(scored) == len(prompt) + 24
    for token, value, top, entry in zip(
        made["token_ids"],
        made["logprobs"]["token_logprobs"],
        made["logprobs"]["top_logprobs"],
        scored[len(prompt) :],
        strict=True,
    ):
        assert entry[str(token)]["logprob"] == pytest.approx(value, abs=0.02) and value == max(top.values())
    echoed = api.complete(made["text"], max_tokens=1, echo=True, logprobs=0)
    assert echoed["text"].startswith(made["text"]) and echoed["logprobs"]["token_logprobs"][0] is None
    content = api.chat(logprobs=True, top_logprobs=4)["logprobs"]["content"]
    assert all(
        len(entry["top_logprobs"]) == 4 and entry["top_logprobs"][0]["token"] == entry["token"] for entry in content
    )


def test_filters_that_leave_one_token_are_greedy(api: Api) -> None:
    greedy = api.complete()["text"]
    for fields in ({"min_p": 1}, {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-6}):
        assert api.complete(**{"temperature": 1.5, "seed": 3, **fields})["text"] == greedy
    assert api.complete(temperature=1.5, seed=3)["text"] != greedy


def test_bias_and_penalties(api: Api) -> None:
    (word,) = api.post("/tokenize", prompt=" the")["tokens"]
    forced = api.complete(logit_bias={str(word): 100}, max_tokens=4, return_token_ids=True)["token_ids"]
    assert forced == [word] * 4
    story = "The cat sat. The cat sat. The cat sat. The cat"
    first = api.complete(story, max_tokens=4, return_token_ids=True)["token_ids"][0]
    banned = api.complete(story, max_tokens=4, logit_bias={str(first): -100}, return_token_ids=True)["token_ids"]
    assert first not in banned
    many = [{}, {"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 2}]
    with ThreadPoolExecutor(4) as pool:
        ask = lambda fields: api.complete(story, max_tokens=16, return_token_ids=True, **fields)["token_ids"]
        plain, *penalised = [max(map(tokens.count, tokens)) for tokens in pool.map(ask, many)]
    assert all(repeated < plain for repeated in penalised)


def test_ends(api: Api) -> None:
    body = {"messages": [{"role": "user", "content": "Say only: yes"}], "max_tokens": 60}
    first = api.chat(**body, return_token_ids=True)
    assert first["finish_reason"] == "stop"
    longer = len(first["token_ids"]) + 6
    for fields in ({"min_tokens": longer}, {"ignore_eos": True}):
        found = api.chat(**body, **fields, return_token_ids=True)
        assert len(found["token_ids"]) >= longer
    shown = api.chat(**body, ignore_eos=True, skip_special_tokens=False)
    assert "<|im_end|>" in shown["message"]["content"] and shown["finish_reason"] == "length"
    assert "<|im_end|>" not in api.chat(**body, ignore_eos=True)["message"]["content"]
    at = first["token_ids"][0]
    assert api.chat(**body, stop_token_ids=[at], return_token_ids=True)["token_ids"] == []


def test_seeds_and_choices(api: Api) -> None:
    fields = {"temperature": 1, "seed": 42, "return_token_ids": True}
    api.use("none")
    alone = api.complete(**fields)["token_ids"]
    api.use("ecospec")
    body = {"prompt": [PROMPT, "Hello"], "max_tokens": 24, "n": 3, **fields}
    choices = api.post("/v1/completions", **body)["choices"]
    texts = [choice["token_ids"] for choice in choices]
    assert texts[0] == alone and len({tuple(text) for text in texts}) == 6
    assert [choice["token_ids"] for choice in api.post("/v1/completions", **body)["choices"]] == texts
    assert api.complete(temperature=1)["text"] != api.complete(temperature=1)["text"]


def test_streams_and_whole_answers_agree(api: Api) -> None:
    body = {"messages": MESSAGES, "max_tokens": 30, "temperature": 0.7, "seed": 9, "logprobs": True, "n": 2}
    whole = api.post("/v1/chat/completions", **body)
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = api.events("/v1/chat/completions", **body, stream_options=options, return_token_ids=True)
    for choice in whole["choices"]:
        mine = [e["choices"][0] for e in streamed if e["choices"] and e["choices"][0]["index"] == choice["index"]]
        assert "".join(c["delta"].get("content") or "" for c in mine) == choice["message"]["content"]
        scores = [entry for c in mine for entry in (c["logprobs"] or {"content": []})["content"]]
        assert scores == choice["logprobs"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
    counts = [event["usage"]["completion_tokens"] for event in streamed]
    assert counts == sorted(counts) and streamed[-1]["usage"] == whole["usage"] and streamed[-1]["choices"] == []
    assert streamed[-1]["metrics"]["ecospec"]["bytes_per_token"] > 0


def test_chats_are_what_the_template_makes_of_them(api: Api) -> None:
    tokens = api.post("/tokenize", messages=MESSAGES)["tokens"]
    text = api.post("/detokenize", tokens=tokens)["prompt"]
    assert "You are brief." in text and text.rstrip().endswith("assistant")
    as_chat = api.chat(return_token_ids=True)
    assert api.complete(tokens, return_token_ids=True)["token_ids"] == as_chat["token_ids"]
    begun = [*MESSAGES, {"role": "assistant", "content": "Paris is the capital of"}]
    went_on = api.chat(messages=begun, add_generation_prompt=False, continue_final_message=True)
    assert "France" in went_on["message"]["content"]
    instead = [{"role": "developer", "content": "You are brief."}, MESSAGES[1]]
    assert api.post("/tokenize", messages=instead)["tokens"] == tokens


def test_what_is_not_supported_is_refused_by_name(api: Api) -> None:
    for field, value in (("priority", 1), ("best_of", 2), ("suffix", "x"), ("guided_json", {}), ("nonsense", 1)):
        answer = api.client.post("/v1/completions", json={"prompt": "a", field: value})
        assert answer.status_code == 400 and f"'{field}'" in answer.json()["error"]["message"]
    answer = api.client.post("/v1/responses", json={"input": "a"})
    assert answer.status_code == 404 and "/v1/chat/completions" in answer.json()["error"]["message"]
