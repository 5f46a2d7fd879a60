"""When spans are made, and what is said to whoever sets a variable wrongly."""

from __future__ import annotations

import subprocess
import sys

import pytest
from scheduler_harness import Harness

from ecospec_orchestrator import tracing
from ecospec_proto import telemetry
from ecospec_proto.telemetry import TelemetryError, traces

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_SERVICE_NAME": "x", "OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "True"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_traced_unless_it_is_asked_for(variables: dict[str, str]) -> None:
    with traces("test", variables):
        assert telemetry.tracer() is None
        with tracing.request_span({"traceparent": "x"}, "chat", {"gen_ai.request.model": "m"}) as span:
            assert span is None
        assert tracing.prediction_span("a:1", 1) is None


def test_without_the_variables_nothing_is_imported() -> None:
    program = (
        "import sys, ecospec_orchestrator.tracing, ecospec_predictor.service; assert 'opentelemetry' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4317"},
            "OTEL_EXPORTER_OTLP_ENDPOINT is 'localhost:4317'; allowed: ",
        ),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is 'zipkin'; allowed: otlp or none."),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "json"}, "is 'json'; allowed: grpc or http/protobuf."),
    ],
)
def test_wrong_variables_are_named(variables: dict[str, str], said: str) -> None:
    with pytest.raises(TelemetryError, match=said), traces("test", variables):
        pass


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    for kind in ("grpc", "http"):
        monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter", None)
    with pytest.raises(TelemetryError, match="install the extra 'telemetry'"):
        with traces("test", {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}):
            pass


def test_an_untraced_scheduler_works_as_before() -> None:
    h = Harness("ecospec")
    h.scheduler.start()
    try:
        h.submit("a")
        assert len(h.collect(1)["a"][0]) == 20
    finally:
        h.scheduler.stop()
