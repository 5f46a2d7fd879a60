"""Traces by OpenTelemetry, where the standard OTEL_* variables ask for them; without them nothing is imported and nothing is done.

The packages are those of the extra `telemetry`. Trace context travels as W3C Trace Context says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTERS = "OTEL_TRACES_EXPORTER"
DEFAULT_PROTOCOL = "http/protobuf"

_tracer: Any = None


class TelemetryError(Exception):
    """A variable that cannot be used: one sentence for a person."""


def tracer() -> Any | None:
    """OpenTelemetry's Tracer, or None where nothing is traced."""
    return _tracer


@contextmanager
def traces(service: str, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Within it spans are exported if the environment names an OTLP endpoint; at its end those that are left are.

    service: the name that OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES may replace. Sampler, limits, headers and certificates are the
    SDK's own variables. Raises TelemetryError.
    """
    variables = os.environ if environment is None else environment
    make_exporter = _exporter_of(variables)
    if make_exporter is None:
        yield
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = variables.get("OTEL_SERVICE_NAME") or "service.name=" in variables.get("OTEL_RESOURCE_ATTRIBUTES", "")
    # What is given here wins over the variables.
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(make_exporter()))
    try:
        with using(provider):
            yield
    finally:
        provider.shutdown()


@contextmanager
def using(provider: Any) -> Iterator[None]:
    """Within it spans go to this TracerProvider."""
    global _tracer
    before, _tracer = _tracer, provider.get_tracer("ecospec")
    try:
        yield
    finally:
        _tracer = before


def context_of(carrier: Mapping[str, str]) -> Any:
    """The trace context that HTTP headers, or gRPC metadata, carry; an empty one without."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(carrier, Context())


def traceparent(span: Any) -> str:
    """The header's value that makes spans elsewhere children of this one."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier.get("traceparent", "")


def fail(span: Any, message: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, message))


def _exporter_of(variables: Mapping[str, str]) -> Any | None:
    """The exporter's class, or None where no traces are asked for. Raises TelemetryError."""
    asked = next((name for name in ENDPOINTS if variables.get(name)), None)
    exporters = variables.get(EXPORTERS) or "otlp"
    if asked is None or exporters == "none" or variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if exporters != "otlp":
        raise TelemetryError(f"Variable {EXPORTERS} is {exporters!r}; allowed: otlp or none.")
    if not variables[asked].startswith(("http://", "https://")):
        raise TelemetryError(
            f"Variable {asked} is {variables[asked]!r}; allowed: an address that begins with http:// or https://."
        )
    chosen = next((name for name in PROTOCOLS if variables.get(name)), None)
    protocol = DEFAULT_PROTOCOL if chosen is None else variables[chosen]
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

            return OverGrpc
        if protocol == DEFAULT_PROTOCOL:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

            return OverHttp
    except ImportError as error:
        raise TelemetryError(
            f"Variable {asked} asks for traces, but the package {error.name} is not installed; install the extra 'telemetry' or set "
            f"{EXPORTERS}=none."
        ) from error
    raise TelemetryError(f"Variable {chosen} is {protocol!r}; allowed: grpc or {DEFAULT_PROTOCOL}.")
