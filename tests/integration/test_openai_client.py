"""The official client against a live server: what its users do, without a line for this server in particular."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pydantic
import pytest
import pytest_asyncio
from api_server import MODEL, EchoScheduler, Running, serve
from byte_engine import byte_scheduler

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


class Thing(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str
    sizes: list[int]


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": Thing.model_json_schema(),
        "strict": True,
    },
}


@pytest.fixture(scope="module")
def server(byte_tokenizer: Any) -> Iterator[Running]:
    with serve(byte_tokenizer, byte_scheduler("ecospec"), api_keys="right") as running:
        yield running


def connect(server: Running, **options: Any) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(
        base_url=f"{server.url}/v1", http_client=http, **{"api_key": "right", "max_retries": 0, **options}
    )


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with connect(server) as connected:
        yield connected


@pytest_asyncio.fixture
async def later(server: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="right", http_client=http) as connected:
        yield connected


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_completions(client: openai.OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt=["ab", "cd"], max_tokens=5, n=2, seed=1, logprobs=2, echo=True)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith(("ab", "cd")[choice.index // 2]) for choice in made.choices)
    assert made.usage is not None and made.usage.completion_tokens == 20
    scores = made.choices[0].logprobs
    assert scores is not None and scores.token_logprobs is not None and len(scores.token_logprobs) == 7


def test_completion_stream(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "prompt": "ab", "max_tokens": 9, "seed": 1}
    whole = client.completions.create(**fields).choices[0].text
    with client.completions.create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 9


def test_chat_with_every_field(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=12, temperature=0.7, top_p=0.9, n=2, seed=4, stop=["zz"],
        presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"64": 2}, logprobs=True, top_logprobs=3, user="me",
        extra_body={"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 4, "return_token_ids": True},
    )  # fmt: skip
    assert len(made.choices) == 2 and made.choices[0].message.role == "assistant"
    scores = made.choices[0].logprobs
    assert scores is not None and scores.content is not None and len(scores.content[0].top_logprobs) == 3
    assert len(made.choices[0].token_ids) >= 4  # type: ignore[attr-defined]
    assert made.metrics["speculative_decoding"]["num_spec_steps"] > 0  # type: ignore[attr-defined]


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=20, seed=4) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.current_completion_snapshot  # get_final_completion() refuses an answer that was cut
    assert "".join(deltas) == final.choices[0].message.content
    assert final.choices[0].finish_reason in ("length", "stop")


def test_structured_answers(client: openai.OpenAI) -> None:
    for seed in range(20):
        try:
            made = client.chat.completions.parse(
                model=MODEL, messages=MESSAGES, response_format=Thing, max_tokens=300, seed=seed
            )
        except openai.LengthFinishReasonError:
            continue  # a random model may go on for long
        thing = made.choices[0].message.parsed
        assert isinstance(thing, Thing)
        return
    raise AssertionError("no answer ended")


def test_tools_there_and_back(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 300, "tools": [TOOL], "tool_choice": "required"}
    for seed in range(20):
        made = client.chat.completions.create(**fields, messages=MESSAGES, seed=seed, parallel_tool_calls=False)
        if made.choices[0].finish_reason == "tool_calls":
            break
    (call,) = made.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"name", "sizes"}
    # The message goes back as the client made it, its nulls included.
    talk = [
        *MESSAGES,
        made.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    again = client.chat.completions.create(model=MODEL, messages=talk, tools=[TOOL], tool_choice="none", max_tokens=5)
    assert again.choices[0].finish_reason == "length" and not again.choices[0].message.tool_calls


async def test_the_asynchronous_client(later: openai.AsyncOpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 10, "seed": 9}
    made = await later.chat.completions.create(**fields)
    text = ""
    async for chunk in await later.chat.completions.create(**fields, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == made.choices[0].message.content


def test_errors_become_the_clients_own(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.completions.create(model=MODEL, prompt="a", temperature=9)
    assert bad.value.param == "temperature" and bad.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="'best_of'"):
        client.completions.create(model=MODEL, prompt="a", best_of=3)
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        client.responses.create(model=MODEL, input="a")
    with connect(server, api_key="wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_full_queue_is_tried_again(byte_tokenizer: Any) -> None:
    scheduler = EchoScheduler(step_seconds=0.02, max_running=1, max_waiting=0)
    with serve(byte_tokenizer, scheduler) as busy, connect(busy, max_retries=2) as client:
        blocker = threading.Thread(
            target=busy.client.post, args=("/v1/completions",), kwargs={"json": {"prompt": "ab", "max_tokens": 100}}
        )
        blocker.start()
        while not scheduler.running:
            pass
        with connect(busy) as impatient, pytest.raises(openai.RateLimitError):
            impatient.completions.create(model=MODEL, prompt="a", max_tokens=1)
        assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices[0].text == "a"
        blocker.join()


def test_a_failure_in_mid_stream_reaches_the_caller(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, EchoScheduler(fail_after=2)) as broken, connect(broken) as client:
        with pytest.raises(openai.APIError, match="The fake engine broke"):
            for _ in client.completions.create(model=MODEL, prompt="ab", max_tokens=30, stream=True):
                pass
