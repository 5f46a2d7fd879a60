"""A span for every question whose caller is traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecospec_proto import telemetry

from .batching import Outcome
from .errors import Refused


def question_span(carrier: Mapping[str, str], method: str, trees: int) -> Any | None:
    """carrier: with the caller's traceparent; None without one, or where nothing is traced."""
    tracer = telemetry.tracer()
    if tracer is None or not carrier.get("traceparent"):
        return None
    from opentelemetry.trace import SpanKind

    told = {"rpc.system": "grpc", "rpc.method": method, "ecospec.trees": trees}
    span = tracer.start_span("ExpertPredictorService", telemetry.context_of(carrier), SpanKind.SERVER, told)
    return span if span.is_recording() else None


def end_question(span: Any | None, outcome: Outcome) -> None:
    if span is None:
        return
    if isinstance(outcome, Refused):
        span.set_attribute("error.type", outcome.outcome)
        telemetry.fail(span, outcome.message)
    else:
        span.set_attribute("ecospec.model_seconds", outcome.model_nanoseconds / 1e9)
    span.end()
