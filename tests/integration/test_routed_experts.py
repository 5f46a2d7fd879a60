"""return_routed_experts over HTTP: the shape of the answer, what is refused, and the geometry that explains it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from api_server import EchoScheduler, Running, assert_error, chat, complete, serve
from fake_engine import ChainEngine, experts_of
from scheduler_harness import Harness

from ecospec_orchestrator.core import TokenEvent
from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.traces import TraceDocument, check_document


@pytest.fixture(scope="module")
def server(byte_tokenizer: Any) -> Iterator[Running]:
    scheduler: Any = Harness("likelihood", max_context_tokens=256).scheduler
    with serve(byte_tokenizer, scheduler, max_context_tokens=256) as running:
        geometry = ChainEngine.geometry
        running.app.state.service.info |= {"geometry": asdict(geometry), "fingerprint": geometry.fingerprint}
        yield running


def decode(routed: dict[str, Any]) -> TraceDocument:
    data = np.frombuffer(base64.b64decode(routed["data"]), "<i2").reshape(routed["shape"])
    columns = {name: np.array(routed[name], np.int32) for name in ("tokens", "positions", "parents")}
    document = TraceDocument("x", "", **columns, routes=data.astype(np.int16), accepted=np.array(routed["accepted"]))
    check_document(document, ChainEngine.geometry)
    return document


def test_routes_of_prompt_output_and_rejected_drafts(server: Running) -> None:
    prompts = [[3, 4, 5], [7]]
    body = complete(
        server, prompt=prompts, max_tokens=15, temperature=0, return_routed_experts=True, return_token_ids=True
    )
    for prompt, choice in zip(prompts, body["choices"], strict=True):
        document = decode(choice["routed_experts"])
        assert document.tokens[document.accepted].tolist() == prompt + choice["token_ids"]
        assert not document.accepted.all()
        for token, routes in zip(document.tokens[:-1].tolist(), document.routes, strict=False):
            assert np.array_equal(routes, experts_of(token))
    drafts = body["metrics"]["speculative_decoding"]
    rejected = sum(np.count_nonzero(~np.array(choice["routed_experts"]["accepted"])) for choice in body["choices"])
    assert rejected == drafts["num_draft_tokens"] - drafts["num_accepted_draft_tokens"]


def test_an_answer_without_them_has_no_such_field(server: Running) -> None:
    assert "routed_experts" not in complete(server, prompt=[3], max_tokens=2)["choices"][0]
    assert "routed_experts" not in complete(server, prompt=[3], max_tokens=2, return_routed_experts=False)["choices"][0]


def test_a_stop_string_still_brings_the_routes(server: Running, byte_tokenizer: Any) -> None:
    plain = complete(server, prompt=[3, 4, 5], max_tokens=20, temperature=0, return_token_ids=True)["choices"][0]
    stop = byte_tokenizer.decode(plain["token_ids"][5:7])
    body = complete(server, prompt=[3, 4, 5], max_tokens=20, temperature=0, stop=stop, return_routed_experts=True)
    choice = body["choices"][0]
    assert choice["finish_reason"] == "stop" and len(choice["text"]) < len(plain["text"])
    accepted = decode(choice["routed_experts"])
    text = accepted.tokens[accepted.accepted].tolist()
    assert text == ([3, 4, 5] + plain["token_ids"])[: len(text)] and len(text) >= 3 + 7


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"stream": True}, "together with 'stream'"),
        ({"n": 5}, "for 5 choices; at most 4"),
        ({"prompt": [[3], [4], [5]], "n": 2}, "for 6 choices"),
        ({"return_routed_experts": 1}, "'return_routed_experts' is 1"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(server: Running, body: dict[str, Any], message: str) -> None:
    request = {"prompt": [3], "max_tokens": 2, "return_routed_experts": True} | body
    answer = server.client.post("/v1/completions", json=request)
    assert message in assert_error(answer, 400, "return_routed_experts")["message"]


def test_routes_that_could_outgrow_memory_are_refused_by_name(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecospec_orchestrator.recording.MAX_BYTES", 2000)
    body = {"prompt": [3], "max_tokens": 200, "return_routed_experts": True}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "return_routed_experts"
    assert "lower max_tokens" in answer.json()["error"]["message"]


def test_the_model_tells_its_geometry(server: Running) -> None:
    told = server.client.get("/v1/models").json()["data"][0]["ecospec"]
    assert TargetGeometry(**told["geometry"]) == ChainEngine.geometry
    assert told["fingerprint"] == ChainEngine.geometry.fingerprint


class RoutedEcho(EchoScheduler):
    """Tells one row of routes with the last event of a request that asked for them."""

    def _step(self, job: Any) -> TokenEvent:
        event = super()._step(job)
        if event.finish_reason is None or not job.request.record_routes:
            return event
        row = np.zeros(1, np.int32)
        routes = TraceDocument("x", "", row + 9, row, row - 1, np.array([[[3, -1]]], np.int16), np.ones(1, bool))
        return replace(event, routes=routes)


def test_chat_brings_them_too_byte_for_byte(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, RoutedEcho()) as server:
        assert "routed_experts" not in chat(server, max_tokens=2)["choices"][0]
        choices = chat(server, max_tokens=2, n=2, return_routed_experts=True)["choices"]
        assert [choice["routed_experts"] for choice in choices] == [
            {
                "data": base64.b64encode(b"\x03\x00\xff\xff").decode(),
                "shape": [1, 1, 2],
                "tokens": [9],
                "positions": [0],
                "parents": [-1],
                "accepted": [True],
            }
        ] * 2
        answer = server.client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "a"}], "stream": True, "return_routed_experts": True},
        )
        assert_error(answer, 400, "return_routed_experts")
