"""What a trace shows: a span for every HTTP request that generates, below it one for every step that it took part in, and below a step
the question to the predictor. Prompts and answers are no part of it.

Names of attributes are those of OpenTelemetry's conventions for generative AI where there are such, else `ecospec.*`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ecospec_proto import telemetry

from .core import RequestStats, StepReport

if TYPE_CHECKING:
    from .running import Running


@contextmanager
def request_span(headers: Mapping[str, str], operation: str, attributes: Mapping[str, Any]) -> Iterator[Any | None]:
    """A span in the trace that the headers name, or in a new one; None where it is not recorded. The block's failure ends it, else
    end_request() does. Attributes that are None are left out."""
    tracer = telemetry.tracer()
    if tracer is None:
        yield None
        return
    from opentelemetry.trace import SpanKind

    told = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "ecospec"}
    told |= {name: value for name, value in attributes.items() if value is not None}
    name = f"{operation} {attributes['gen_ai.request.model']}"
    span = tracer.start_span(name, telemetry.context_of(headers), SpanKind.SERVER, told)
    try:
        yield span if span.is_recording() else None
    except BaseException as error:
        fail(span, str(error), type(error).__name__)
        span.end()
        raise


def end_request(
    span: Any | None, response_id: str, prompt: int, output: int, reasons: Sequence[str], stats: Sequence[RequestStats]
) -> None:
    """prompt, output: tokens; reasons and stats: of the choices, stats only where there are some."""
    if span is None:
        return
    span.set_attributes(
        {
            "gen_ai.response.id": response_id,
            "gen_ai.response.finish_reasons": list(reasons),
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.output_tokens": output,
            "ecospec.steps": sum(each.steps for each in stats),
            "ecospec.draft_tokens": sum(each.draft_tokens for each in stats),
            "ecospec.accepted_tokens": sum(each.accepted_tokens for each in stats),
            "ecospec.queue_seconds": max((each.queue_seconds for each in stats), default=0.0),
            "ecospec.prefill_seconds": max((each.prefill_seconds for each in stats), default=0.0),
            "ecospec.decode_seconds": max((each.decode_seconds for each in stats), default=0.0),
        }
    )
    span.end()


def fail(span: Any | None, message: str, kind: str) -> None:
    if span is not None:
        span.set_attribute("error.type", kind)
        telemetry.fail(span, message)


def traced_step(step: Callable[[], StepReport], running: Sequence[Running]) -> StepReport:
    """step(), as a span of every traced request that takes part. The question to the predictor is a child of the first one's, to
    which the others link."""
    tracer = telemetry.tracer()
    if tracer is None:
        return step()
    batch = [r.request.span for r in running if r.decodes]
    owners = list(
        {id(span): span for span in batch if span is not None}.values()
    )  # choices of one request share a span
    if not owners:
        return step()
    from opentelemetry.trace import Link, set_span_in_context, use_span

    spans: list[Any] = []
    for owner in owners:
        links = [Link(spans[0].get_span_context())] if spans else None
        spans.append(tracer.start_span("step", set_span_in_context(owner), links=links))
    try:
        with use_span(spans[0], record_exception=False, set_status_on_exception=False):
            report = step()
        shared = _attributes(report)
        for span, owner in zip(spans, owners, strict=True):
            accepted = sum(n for n, of in zip(report.accepted, batch, strict=True) if of is owner)
            sent = sum(n for n, of in zip(report.sent, batch, strict=True) if of is owner)
            span.set_attributes({**shared, "ecospec.request.nodes": sent, "ecospec.request.accepted": accepted})
        return report
    except BaseException as error:
        for span in spans:
            fail(span, str(error), type(error).__name__)
        raise
    finally:
        for span in spans:
            span.end()


def _attributes(report: StepReport) -> dict[str, Any]:
    """Of the whole step, all requests together."""
    decision = report.decision
    found = {
        "ecospec.step.requests": report.requests,
        "ecospec.step.nodes": report.nodes,
        "ecospec.step.emitted": report.emitted,
        "ecospec.step.distinct_experts_per_layer": float(report.distinct_experts.mean()),
        "ecospec.step.bytes_read": report.bytes_read.total,
        "ecospec.step.draft_seconds": report.draft_seconds,
        "ecospec.step.predict_seconds": report.predict_seconds,
        "ecospec.step.select_seconds": report.select_seconds,
        "ecospec.step.verify_seconds": report.verify_seconds,
        "ecospec.step.fallback": report.fallback,
        "ecospec.step.policy": None if decision is None else decision.policy,
        "ecospec.step.not_speculated": None if decision is None else decision.not_speculated,
    }
    return {name: value for name, value in found.items() if value is not None}


def prediction_span(address: str, trees: int) -> Any | None:
    """A question to the predictor, as a child of the step in this thread; None where that is not traced."""
    tracer = telemetry.tracer()
    if tracer is None:
        return None
    from opentelemetry.trace import SpanKind, get_current_span

    if not get_current_span().is_recording():
        return None
    told = {"rpc.system": "grpc", "server.address": address, "ecospec.trees": trees}
    return tracer.start_span("predict", kind=SpanKind.CLIENT, attributes=told)


def end_prediction(span: Any | None, failure: tuple[str, str] | None) -> None:
    """failure: reason and message of what a person would be told."""
    if span is None:
        return
    if failure is not None:
        fail(span, failure[1], failure[0])
    span.end()
