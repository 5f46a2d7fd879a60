"""Spans from HTTP through the step loop to the predictor: in memory, and through real OTLP receivers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from api_server import EchoScheduler, chat, complete, events, serve, wait_until
from byte_engine import ByteEngine, byte_scheduler
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from predictor_server import predictor_process

from ecospec_orchestrator.footprint.remote import RemoteFootprintSource
from ecospec_proto import telemetry

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def memory() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with telemetry.using(provider):
        yield exporter
    provider.shutdown()


def named(memory: InMemorySpanExporter, name: str) -> list[Any]:
    return [span for span in memory.get_finished_spans() if span.name == name]


def test_a_request_and_its_steps(byte_tokenizer: Any, memory: InMemorySpanExporter) -> None:
    with serve(byte_tokenizer, byte_scheduler("ecospec")) as server:
        server.client.headers = SAMPLED
        body = chat(server, max_tokens=12, n=2, seed=3, temperature=0.5)
        wait_until(lambda: named(memory, "chat echo"))
    (request,) = named(memory, "chat echo")
    assert f"{request.context.trace_id:032x}" == TRACE and f"{request.parent.span_id:016x}" == PARENT
    told = request.attributes
    assert told["gen_ai.response.id"] == body["id"] and told["gen_ai.request.seed"] == 3
    assert told["gen_ai.usage.output_tokens"] == body["usage"]["completion_tokens"]
    assert told["gen_ai.usage.input_tokens"] == body["usage"]["prompt_tokens"]
    assert list(told["gen_ai.response.finish_reasons"]) == [choice["finish_reason"] for choice in body["choices"]]
    assert "hello" not in str(told), "prompts stay out of traces"
    steps = named(memory, "step")
    assert steps and all(step.parent.span_id == request.context.span_id for step in steps)
    # Both choices of the request share its span, so a step with both is one span.
    assert len(steps) <= told["ecospec.steps"]
    assert sum(step.attributes["ecospec.request.nodes"] for step in steps) == told["ecospec.draft_tokens"] > 0
    assert sum(step.attributes["ecospec.request.accepted"] for step in steps) == told["ecospec.accepted_tokens"]
    assert all(step.attributes["ecospec.step.policy"] == "ecospec" for step in steps)


def test_requests_of_one_batch_keep_their_own_steps(byte_tokenizer: Any, memory: InMemorySpanExporter) -> None:
    scheduler = byte_scheduler("ecospec")
    scheduler.engine.gate = gate = threading.Event()
    with serve(byte_tokenizer, scheduler) as server, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(complete, server, prompt=text, max_tokens=20, temperature=0) for text in ("ab", "cd")]
        wait_until(lambda: scheduler.running == 2)
        gate.set()
        for answer in answers:
            answer.result()
        wait_until(lambda: len(named(memory, "text_completion echo")) == 2)
    requests = named(memory, "text_completion echo")
    assert requests[0].context.trace_id != requests[1].context.trace_id
    by_trace = {request.context.trace_id: [] for request in requests}
    for step in named(memory, "step"):
        by_trace[step.context.trace_id].append(step)
    for request in requests:
        steps = by_trace[request.context.trace_id]
        assert len(steps) == request.attributes["ecospec.steps"]
        assert (
            sum(step.attributes["ecospec.request.nodes"] for step in steps)
            == request.attributes["ecospec.draft_tokens"]
        )
    linked = [step for step in named(memory, "step") if step.links]
    assert linked and all(step.attributes["ecospec.step.requests"] == 2 for step in linked)


def test_an_untraced_caller_makes_no_spans(byte_tokenizer: Any, memory: InMemorySpanExporter) -> None:
    """The sampler follows what the caller decided."""
    with serve(byte_tokenizer, byte_scheduler("ecospec")) as server:
        server.client.headers = {"traceparent": SAMPLED["traceparent"][:-1] + "0"}
        complete(server, prompt="ab", max_tokens=5)
        server.client.headers = {"traceparent": "nonsense"}
        complete(server, prompt="ab", max_tokens=5)
        wait_until(lambda: named(memory, "text_completion echo"))
    (request,) = named(memory, "text_completion echo")
    assert request.parent is None


def test_failures_are_errors_of_the_span(byte_tokenizer: Any, memory: InMemorySpanExporter) -> None:
    with serve(byte_tokenizer, EchoScheduler(fail_after=2)) as server:
        complete(server, 500, prompt="ab", max_tokens=30)
        assert "error" in events(server, prompt="ab", max_tokens=30)[-1]
        complete(server, 400, prompt="ab", max_tokens=30, logit_bias={"999": 1})
        wait_until(lambda: len(named(memory, "text_completion echo")) == 3)
    spans = named(memory, "text_completion echo")
    assert [span.status.status_code for span in spans] == [StatusCode.ERROR] * 3
    assert [span.attributes["error.type"] for span in spans] == ["EngineError", "EngineError", "InvalidRequestError"]
    assert "The fake engine broke." in spans[0].status.description


# Receivers.


class Receiver:
    """What was exported: (service name, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    def take(self, data: bytes) -> bytes:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            (name,) = [each.value.string_value for each in resource.resource.attributes if each.key == "service.name"]
            self.spans += [(name, span) for scope in resource.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse().SerializeToString()

    def one(self, service: str, name: str) -> Any:
        return next(span for of, span in self.spans if (of, span.name) == (service, name))


@contextmanager
def over_grpc(receiver: Receiver) -> Iterator[str]:
    method = grpc.unary_unary_rpc_method_handler(lambda data, _context: receiver.take(data))
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@contextmanager
def over_http(receiver: Receiver) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = receiver.take(body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("protocol", "receiving"), [("grpc", over_grpc), ("http/protobuf", over_http)])
def test_one_trace_through_both_services(
    byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, protocol: str, receiving: Any
) -> None:
    receiver = Receiver()
    with receiving(receiver) as url:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.lower(), raising=False)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        with predictor_process(ByteEngine.geometry) as (predictor, port):
            with telemetry.traces("ecospec-orchestrator"):
                scheduler = byte_scheduler("ecospec")
                source = RemoteFootprintSource(f"127.0.0.1:{port}", ByteEngine.geometry, 5.0)
                scheduler.footprint_source = source
                wait_until(lambda: source._stream.link is not None)
                with serve(byte_tokenizer, scheduler) as server:
                    server.client.headers = SAMPLED
                    complete(server, prompt="ab", max_tokens=12, temperature=0)
            predictor.send_signal(signal.SIGTERM)
            assert predictor.wait(20) == 0
    ours, theirs = "ecospec-orchestrator", "ecospec-predictor"
    answered = receiver.one(theirs, "ExpertPredictorService")
    asked = next(span for of, span in receiver.spans if of == ours and span.span_id == answered.parent_span_id)
    step = next(span for of, span in receiver.spans if of == ours and span.span_id == asked.parent_span_id)
    request = next(span for of, span in receiver.spans if of == ours and span.span_id == step.parent_span_id)
    assert (asked.name, step.name, request.name) == ("predict", "step", "text_completion echo")
    assert request.parent_span_id.hex() == PARENT
    assert {span.trace_id.hex() for _, span in receiver.spans} == {TRACE}
    assert request.start_time_unix_nano <= step.start_time_unix_nano <= asked.start_time_unix_nano
    assert asked.start_time_unix_nano <= answered.start_time_unix_nano <= answered.end_time_unix_nano
