"""Hostile bytes against everything that reads from outside: they are refused in the module's own words, or they are valid.

The default run is short; `pytest tests/unit/test_fuzz.py --fuzz-inputs 1000000` is the long one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from fuzzing import fuzz, mutated, text
from google.protobuf.message import DecodeError
from tiny_traces import GEOMETRY as TRACED
from tiny_traces import make_document, write_traces
from trace_records import GEOMETRY, random_record

from ecospec_orchestrator.api.parsing import json_object, parse, validate
from ecospec_orchestrator.api.schemas import ChatRequest, CompletionRequest
from ecospec_orchestrator.api.streaming import EventStream
from ecospec_orchestrator.api.tokenizing import DetokenizeRequest, TokenizeChat, TokenizeText
from ecospec_orchestrator.api.tools import CLOSE, OPEN, ToolCallParser
from ecospec_orchestrator.core import DraftTree, InvalidRequestError
from ecospec_orchestrator.footprint.calls import Part
from ecospec_orchestrator.footprint.contexts import Asked
from ecospec_proto import predictor_pb2
from ecospec_proto.codec import CodecError, decode_tree, encode_experts, encode_tree
from ecospec_proto.trace_document import TraceError
from ecospec_proto.trace_record import decode_record, encode_record
from ecospec_proto.traces import TraceReader, check_document


@pytest.fixture(scope="module")
def inputs(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--fuzz-inputs")


# Request bodies.

CHAT = {
    "model": "m", "messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "é"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "9"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], "tool_choice": "auto",
    "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 3, "seed": -1,
}  # fmt: skip
COMPLETION = {
    "prompt": [[1, 2], [3]], "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "n": 2,
    "stop": ["a", "b"], "stop_token_ids": [4], "logit_bias": {"5": -1.5}, "presence_penalty": 1, "echo": True,
    "logprobs": 2, "prompt_logprobs": 1, "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "object"}}}, "user": "u", "request_id": "a.b", "best_of": 1, "suffix": "",
}  # fmt: skip
BODIES = [json.dumps(body).encode() for body in (CHAT, COMPLETION, {"prompt": "a"}, {"tokens": [1, 2]})]


def test_request_bodies(inputs: int) -> None:
    def check(raw: bytes) -> None:
        for kind in (CompletionRequest, ChatRequest):
            try:
                parse(raw, kind)
            except InvalidRequestError as error:
                assert str(error).endswith((".", "?"))
        for other in (TokenizeText, TokenizeChat, DetokenizeRequest):
            try:
                validate(json_object(raw), other)
            except InvalidRequestError as error:
                assert str(error).endswith((".", "?"))

    fuzz(mutated(BODIES), check, inputs)


# Server-sent events.


def read_events(raw: bytes) -> list[str]:
    """A reader by the WHATWG's rules: lines end with LF, CR or CRLF, an empty one ends an event, fields are `name: value`."""
    text = raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    found = []
    for block in text.split("\n\n")[:-1]:
        names = [line.partition(":")[0] for line in block.split("\n")]
        assert set(names) == {"data"}, block
        found.append("\n".join(line.partition(":")[2].removeprefix(" ") for line in block.split("\n")))
    return found


HOSTILE = ("\n\n", "\r", "data: [DONE]\n\n", "\u2028", "event: x\n")


def texts(random: Random) -> list[str]:
    return [
        random.choice(HOSTILE) if random.randrange(3) == 0 else text(random, 12) for _ in range(random.randrange(5))
    ]


def test_server_sent_events(inputs: int) -> None:
    loop = asyncio.new_event_loop()

    def check(drawn: tuple[list[str], bool]) -> None:
        pieces, fails = drawn
        pieces = [
            piece.encode("utf-8", "replace").decode() for piece in pieces
        ]  # no lone surrogates, as from a tokenizer
        sent: list[dict[str, Any]] = []

        async def source() -> AsyncIterator[dict[str, Any]]:
            for piece in pieces:
                yield {"text": piece}
            if fails:
                raise InvalidRequestError("it \n\n broke.", "a\rb")

        async def send(message: Any) -> None:
            sent.append(message)

        loop.run_until_complete(EventStream(source(), lambda: None)._pump(send))
        events = read_events(b"".join(message.get("body", b"") for message in sent))
        assert events.pop() == "[DONE]"
        if fails:
            assert json.loads(events.pop())["error"]["message"] == "it \n\n broke."
        assert [json.loads(event)["text"] for event in events] == pieces

    try:
        # A failing stream writes its traceback to the log, which is slow: the long run is of whole ones.
        fuzz(lambda random: (texts(random), inputs <= 1000 and random.randrange(2) == 0), check, inputs)
    finally:
        loop.close()


# Calls of tools in what a model wrote.

PIECES = (
    OPEN,
    CLOSE,
    OPEN[:5],
    OPEN[5:],
    CLOSE[:4],
    '{"name": "f", "arguments": {}}',
    '{"name": "</tool_call>"}',
    "{",
    "\n",
    "a",
)


def some_pieces(random: Random) -> list[str]:
    return [random.choice(PIECES) if random.randrange(4) else text(random, 3) for _ in range(random.randrange(9))]


def read_calls(pieces: list[str]) -> tuple[str, list[Any]]:
    parser, rest, calls = ToolCallParser(), "", []
    for piece in pieces:
        shown, found = parser.push(piece)
        rest += shown
        calls += [call["function"] for call in found]
    return rest + parser.flush(), calls


def test_calls_do_not_depend_on_how_the_text_arrives(inputs: int) -> None:
    def check(pieces: list[str]) -> None:
        whole = "".join(pieces)
        rest, calls = read_calls(pieces)
        assert (rest, calls) == read_calls(list(whole)) == read_calls([whole])
        if OPEN not in whole:
            assert rest == whole and not calls

    fuzz(some_pieces, check, inputs)


# Messages of the predictor.

TREE = DraftTree(
    np.array([5, 6, 7], np.int32), np.array([-1, 0, 0], np.int32), np.ones(3, np.float32), np.array([1, 2, 2], np.int32)
)


def test_predictor_requests(inputs: int) -> None:
    context, tokens, parents = encode_tree([1, 2, 3], TREE.tokens, TREE.parents)
    query = predictor_pb2.TreeQuery(context_tokens=context, draft_tokens=tokens, parents=parents, session_id=9)
    request = predictor_pb2.PredictRequest(target_fingerprint="f" * 32, trees=[query, query], end_sessions=[4])
    stream = predictor_pb2.PredictStreamRequest(request_id=3, request=request, timeout_microseconds=5)

    def check(data: bytes) -> None:
        message = predictor_pb2.PredictStreamRequest()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return
        for tree in message.request.trees:
            try:
                arrays = decode_tree(tree.context_tokens, tree.draft_tokens, tree.parents, 1000, 64, 16)
            except CodecError:
                continue
            assert all(array.dtype == np.int64 for array in arrays) and 1 <= len(arrays[0]) <= 16
            assert (arrays[2] < np.arange(len(arrays[2]))).all() and (arrays[2] >= -1).all()

    fuzz(mutated([stream.SerializeToString()]), check, inputs)


def test_predictor_responses(inputs: int) -> None:
    asked = [Asked("", (1, 2), 2, TREE)]
    experts, dtype = encode_experts(np.arange(4 * 3 * 4).reshape(4, 3, 4).astype(np.uint8) % GEOMETRY.experts)
    response = predictor_pb2.PredictResponse(
        expert_dtype=dtype, trees=[predictor_pb2.TreePrediction(experts=experts)], model_version="v"
    )

    def check(data: bytes) -> None:
        message = predictor_pb2.PredictResponse()
        try:
            message.ParseFromString(data)
            (found,) = Part(asked, message).footprints(GEOMETRY)
        except (DecodeError, CodecError):
            return
        assert found.experts.shape == (4, GEOMETRY.moe_layers, 1) and found.known.all()

    fuzz(mutated([response.SerializeToString()]), check, inputs)


# Traces.


def test_trace_records(inputs: int) -> None:
    random = np.random.default_rng(0)
    corpus = [
        encode_record(random_record(random, rows, unrouted), GEOMETRY) for rows, unrouted in ((1, 0), (9, 4), (30, 1))
    ]

    def check(data: bytes) -> None:
        try:
            check_document(decode_record(data, GEOMETRY), GEOMETRY)
        except TraceError:
            pass

    fuzz(mutated(corpus), check, inputs)


def test_trace_shards(inputs: int, tmp_path: Path) -> None:
    write_traces(tmp_path, 2, drafts=True)
    tensors, sidecar = tmp_path / "shard-00000.safetensors", tmp_path / "shard-00000.json"
    whole = {tensors: tensors.read_bytes(), sidecar: sidecar.read_bytes()}
    assert len(list(TraceReader(tmp_path, TRACED))) == 2
    assert make_document(0, drafts=True).document_id in {document.document_id for document in TraceReader(tmp_path)}

    def check(drawn: tuple[bool, bytes]) -> None:
        part, data = (tensors if drawn[0] else sidecar), drawn[1]
        part.write_bytes(data)
        try:
            for document in TraceReader(tmp_path):
                check_document(document, TRACED)
        except TraceError:
            pass
        finally:
            part.write_bytes(whole[part])

    parts = (True, mutated([whole[tensors]])), (False, mutated([whole[sidecar]]))

    def changed(random: Random) -> tuple[bool, bytes]:
        is_tensors, make = random.choice(parts)
        return is_tensors, make(random)

    fuzz(changed, check, inputs)
