"""The streaming endpoint of step events over real HTTP, and the page that shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from typing import Any

import httpx
import jsonschema
import pytest
from api_server import EchoScheduler, Running, assert_error, chat, events, serve
from byte_engine import byte_scheduler
from openai import OpenAI
from scheduler_harness import build_policy

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.api.generation import MAX_WAITING_STEPS, Choice, Generation
from ecospec_orchestrator.api.playground import MEDIA_TYPES
from ecospec_orchestrator.api.text import TextAssembler
from ecospec_orchestrator.core import Request, TokenEvent

CHAT = "/v1/chat/completions"
WATCHED: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def server(byte_tokenizer: Any) -> Iterator[Running]:
    scheduler = byte_scheduler("likelihood")
    scheduler.other_policies = {name: build_policy(name) for name in ("none", "ecospec", "goodput")}
    with serve(byte_tokenizer, scheduler) as running:
        yield running


def steps_of(chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["ecospec"]["step"] for chunk in chunks for choice in chunk["choices"] if "ecospec" in choice]


def streamed_text(chunks: Sequence[dict[str, Any]], field: str = "delta") -> str:
    pick = (lambda c: c["delta"].get("content", "")) if field == "delta" else (lambda c: c["text"])
    return "".join(pick(choice) for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("policy", [None, "none", "likelihood", "ecospec", "goodput"])
def test_every_step_is_told_as_documented(server: Running, policy: str | None) -> None:
    whole = chat(server, **{key: value for key, value in WATCHED.items() if key != "messages"})
    wanted = {"steps": True} | ({} if policy is None else {"policy": policy})
    chunks = events(server, CHAT, **WATCHED, ecospec=wanted, stream_options={"include_usage": True})
    steps = steps_of(chunks)
    assert streamed_text(chunks) == whole["choices"][0]["message"]["content"]
    document = server.client.get("/openapi.json").json()
    validator = jsonschema.Draft202012Validator(document["components"]["schemas"]["StepEvent"])
    for step in steps:
        validator.validate(step)
    assert [step["index"] for step in steps] == list(range(len(steps)))
    assert chunks[-1]["usage"]["completion_tokens"] == sum(len(step["tokens"]) for step in steps)
    pieces = "".join(token["text"] for step in steps for token in step["tokens"])
    assert streamed_text(chunks).startswith(pieces)
    measured = chunks[-1]["metrics"]
    assert measured["ecospec"]["steps"] == len(steps)
    accepted = [sum(token["drafted"] for token in step["tokens"]) for step in steps]
    assert sum(accepted) <= measured["speculative_decoding"]["num_accepted_draft_tokens"]
    assert {step["policy"]["name"] for step in steps} == {policy or "likelihood"}
    if policy == "none":
        assert not any(step["candidates"] for step in steps)
        assert {step["policy"]["not_speculated"] for step in steps} == {"request"}
    elif policy != "goodput":
        assert any(accepted) and all(step["candidates"] for step in steps[:-2])
    if policy == "ecospec":
        assert all(step["experts"]["predicted"]["rows"] > 0 for step in steps if step["candidates"])


def test_streams_without_the_field_stay_as_they_were(server: Running) -> None:
    chunks = events(server, CHAT, **WATCHED)
    assert chunks and not any("ecospec" in choice for chunk in chunks for choice in chunk["choices"])


def test_each_choice_tells_its_own_steps_and_stop_strings_cut_them(server: Running) -> None:
    body: dict[str, Any] = {"prompt": ["abc", "hello"], "max_tokens": 12, "temperature": 0, "ecospec": {"steps": True}}
    chunks = events(server, **body)
    for index in (0, 1):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        steps = [choice["ecospec"]["step"] for choice in own if "ecospec" in choice]
        assert [step["index"] for step in steps] == list(range(len(steps))) and steps
        assert sum(len(step["tokens"]) for step in steps) == 12
    text = streamed_text([{"choices": [c]} for chunk in chunks for c in chunk["choices"] if c["index"] == 0], "text")
    cut = events(server, **body | {"prompt": "abc", "stop": text[4:6]})
    assert streamed_text(cut, "text") == text[: text.find(text[4:6])]
    assert cut[-1]["choices"][0]["finish_reason"] == "stop" and steps_of(cut)


def test_the_openai_client_passes_over_them(server: Running) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=httpx.Client(trust_env=False)) as client:
        stream = client.chat.completions.create(
            model="echo", **WATCHED, stream=True, extra_body={"ecospec": {"steps": True}}
        )
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == streamed_text(events(server, CHAT, **WATCHED))
    assert any("ecospec" in (c.choices[0].model_extra or {}) for c in chunks)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ecospec": {"steps": True}}, "ecospec.steps"),
        ({"ecospec": {"steps": True}, "stream": True, "n": 5}, "ecospec.steps"),
        ({"ecospec": {"policy": "best"}}, "ecospec.policy"),
        ({"ecospec": {"stepz": True}}, "ecospec.stepz"),
        ({"ecospec": {"steps": 1}}, "ecospec.steps"),
    ],
)
def test_wrong_fields_are_refused_by_name(server: Running, fields: dict[str, Any], param: str) -> None:
    assert_error(server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, **fields}), 400, param)


def test_a_policy_that_the_server_lacks_is_refused(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, byte_scheduler("none")) as server:
        refused = server.client.post(CHAT, json=WATCHED | {"ecospec": {"policy": "goodput"}})
        assert "allowed: none" in assert_error(refused, 400, "ecospec.policy")["message"]
        chunks = events(server, CHAT, **WATCHED, ecospec={"steps": True, "policy": "none"})
        assert {step["policy"]["not_speculated"] for step in steps_of(chunks)} == {"request"}


class AtOnce:
    """A scheduler whose whole answer is there before anybody reads."""

    alive = True

    def __init__(self, events: Sequence[TokenEvent]) -> None:
        self._events = events

    def submit(self, request: Request, on_event: Any) -> None:
        for event in self._events:
            on_event(event)

    def cancel(self, request_id: str) -> None: ...


async def test_a_slow_reader_misses_steps_and_no_text(byte_tokenizer: Any) -> None:
    step: Any = object()
    count = MAX_WAITING_STEPS + 100
    told = [TokenEvent("a", (65,), step=step) for _ in range(count)]
    told.append(TokenEvent("a", (66,), finish_reason="length", step=step))
    scheduler: Any = AtOnce(told)
    generation = Generation(
        scheduler, Ledger(), [Choice(Request("a", (65,), count + 1), 0, TextAssembler(byte_tokenizer))]
    )
    generation.submit()
    found = []
    async for update in generation.updates():
        found.append(update)
        await asyncio.sleep(0)
    assert sum(len(update.tokens) for update in found) == count + 1
    assert sum(update.step is not None for update in found) == MAX_WAITING_STEPS


# The page.


class Sources(HTMLParser):
    """Everything that a page loads or links, and whatever its policy would forbid."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href"):
                self.found.append(value or "")
            if name == "style" or name.startswith("on"):
                self.inline.append(f"{tag} {name}")
        if tag == "style" or (tag == "script" and "src" not in dict(attrs)):
            self.inline.append(tag)


def test_the_page_and_what_it_loads_come_from_here_without_a_key(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, EchoScheduler(), api_keys="secret-key") as server:
        page = server.client.get("/")
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
        assert policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
        sources = Sources()
        sources.feed(page.text)
        assert not sources.inline
        assert {each for each in sources.found if not each.startswith("data:image/svg+xml,")} <= set(MEDIA_TYPES)
        for path, media_type in MEDIA_TYPES.items():
            answer = server.client.get(path)
            assert answer.status_code == 200 and answer.headers["content-type"] == media_type
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert (
                "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in answer.text
            )
        assert server.client.get("/playground/__init__.py").status_code == 401
        key = {"Authorization": "Bearer secret-key"}
        assert server.client.get("/playground/__init__.py", headers=key).status_code == 404
        assert server.client.post("/").status_code in (401, 405)
        assert set(MEDIA_TYPES) <= set(server.client.get("/openapi.json").json()["paths"])


def test_the_package_brings_the_page() -> None:
    import tomllib
    from pathlib import Path

    root = Path(__file__).resolve().parents[2] / "services" / "orchestrator"
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = root / "ecospec_orchestrator" / "api" / "playground"
    packed = {path.name for pattern in data["ecospec_orchestrator.api.playground"] for path in folder.glob(pattern)}
    assert packed == {path.rpartition("/")[2] or "index.html" for path in MEDIA_TYPES}
