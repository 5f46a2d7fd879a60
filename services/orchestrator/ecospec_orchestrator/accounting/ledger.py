"""Process metrics in Prometheus form. Labels are bounded: per layer, position or phase, never per expert or request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from ..core import RequestStats, StepReport
from .footprint_metrics import FootprintMetrics
from .guard_metrics import GuardMetrics
from .iteration import IterationReport
from .model_metrics import ModelMetrics
from .policy_metrics import PolicyMetrics
from .state_metrics import StateMetrics

if TYPE_CHECKING:
    from ..engine.base import CacheUse
    from ..selection.base import PolicyHealth

_MS = 1e-3
FINE_SECONDS = tuple(
    value * _MS
    for value in (
        0.2,
        0.3,
        0.5,
        0.75,
        1,
        1.5,
        2,
        3,
        5,
        7.5,
        10,
        15,
        20,
        30,
        50,
        75,
        100,
        150,
        200,
        300,
        500,
        1000,
        3000,
    )
)
TOKEN_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
REQUEST_SECONDS = (
    0.01,
    0.03,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    60.0,
    120.0,
    300.0,
)
EXPERTS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 28, 32, 40, 48, 64, 96, 128, 256)
COMPONENTS = ("experts", "attention", "shared", "head", "kv", "draft")
PHASES = ("draft", "predict", "select", "verify", "total")
FALLBACK_REASONS = ("unavailable", "deadline", "mismatch", "error")
KV_PAGE_STATES = ("used", "kept", "free")
FINISH_REASONS = ("stop", "length", "abort", "error")
REFUSED_STATUSES = ("400", "401", "404", "413", "429", "500", "503")
MAX_POSITION = 31  # deeper acceptances share the last label


class Ledger:
    """Every number is measured in the step or request that it describes; estimates say so in their name.

    The scheduler calls observe_step, observe_prefill, observe_prefix and observe_cache_violation, the predictor's client
    observe_predictor_call and observe_context_resent, the HTTP layer the observe_request_* and token methods. All are
    thread-safe. Seconds and bytes throughout.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._steps()
        self._predictor()
        self._requests()
        self._cache()
        self._footprint = FootprintMetrics(self.registry)
        self._policy = PolicyMetrics(self.registry)
        self.model = ModelMetrics(self.registry)
        self.state = StateMetrics(self.registry)
        self.guard = GuardMetrics(self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"ecospec_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"ecospec_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"ecospec_{name}", text, labels, registry=self.registry)

    def _steps(self) -> None:
        counter = self._counter
        self._drafts = counter("spec_decode_num_drafts", "Speculated request-steps.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens sent to verification.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._accepted_per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by depth from 0.", ("position",)
        )
        self._step_count = counter("steps", "Decode steps.", ("speculated",))
        self._step_tokens = counter("step_tokens", "Tokens that decode steps brought, all requests together.")
        self._step_seconds = self._histogram(
            "step_seconds", "Time of a decode step by phase.", FINE_SECONDS, ("phase",)
        )
        self._experts = self._histogram(
            "distinct_experts_per_layer_step", "Distinct routed experts that a step read in one layer.", EXPERTS
        )
        self._experts_by_layer = counter("distinct_experts_by_layer", "Distinct routed experts read.", ("layer",))
        self._bytes = counter("bytes_read", "Bytes that decode steps read.", ("component",))
        self._upper_bound = counter(
            "estimated_bytes_upper_bound", "Estimated bytes if no two tokens of a step shared an expert."
        )
        self._autoregressive = counter(
            "estimated_bytes_autoregressive", "Estimated bytes if the same tokens were decoded one per step."
        )
        self._predicted = counter("predicted_experts", "Experts predicted for verified nodes.")
        self._actual = counter("actual_experts", "Experts that the same nodes used.")
        self._both = counter("predicted_and_actual_experts", "Predicted experts that were used.")
        for component in COMPONENTS:
            self._bytes.labels(component)
        for phase in PHASES:
            self._step_seconds.labels(phase)
        for speculated in ("true", "false"):
            self._step_count.labels(speculated)

    def _predictor(self) -> None:
        self._call_seconds = self._histogram(
            "predictor_call_seconds", "Predictor call, from question to answer.", FINE_SECONDS
        )
        self._misses = self._counter("predictor_deadline_misses", "Predictor calls that were too late.")
        self._fallbacks = self._counter("predictor_fallbacks", "Steps that went on without predictions.", ("reason",))
        self._resent = self._counter(
            "predictor_contexts_resent", "Contexts that the predictor had lost and was sent once more."
        )
        for reason in FALLBACK_REASONS:
            self._fallbacks.labels(reason)

    def _requests(self) -> None:
        histogram = self._histogram
        self._first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", REQUEST_SECONDS)
        self._inter_token = histogram("inter_token_latency_seconds", "A step's gap over its tokens.", TOKEN_SECONDS)
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_SECONDS)
        self._queue = histogram("request_queue_time_seconds", "Time in the queue.", REQUEST_SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "Time in prefill.", REQUEST_SECONDS)
        self._decode = histogram("request_decode_time_seconds", "Time in decode steps.", REQUEST_SECONDS)
        self._running = self._gauge("num_requests_running", "Requests in the batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens taken.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._success = self._counter("request_success", "Finished requests.", ("finished_reason",))
        self._refused = self._counter("requests_refused", "HTTP requests answered with an error.", ("status",))
        for reason in FINISH_REASONS:
            self._success.labels(reason)
        for status in REFUSED_STATUSES:  # a series that exists from the start can be alerted on
            self._refused.labels(status)

    def _cache(self) -> None:
        self._chunk_seconds = self._histogram(
            "prefill_chunk_seconds", "Time of a prefill chunk, feeding the drafter included.", FINE_SECONDS
        )
        self._prefilled = self._counter("prefill_tokens", "Prompt tokens computed.")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked for in the KV cache.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the KV cache, not computed.")
        self._violations = self._counter(
            "kv_cache_violations", "Times that pages of the idle KV cache were not in order."
        )
        self._kv_share = self._gauge("kv_cache_usage_perc", "Share of the KV cache's pages in use, 0 to 1.")
        self._kv_capacity = self._gauge("kv_cache_capacity_pages", "Pages of the KV cache.")
        self._kv_pages = self._gauge(
            "kv_cache_pages", "Pages in use by requests, kept for their prefix, and free.", ("state",)
        )

    def bind(
        self,
        running: Callable[[], float],
        waiting: Callable[[], float],
        cache_use: Callable[[], CacheUse] | None = None,
    ) -> None:
        """Functions that are asked at each scrape."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)
        if cache_use is None:
            return
        self._kv_share.set_function(lambda: cache_use().used / cache_use().pages)
        self._kv_capacity.set_function(lambda: cache_use().pages)
        for state in KV_PAGE_STATES:
            self._kv_pages.labels(state).set_function(partial(_pages, cache_use, state))

    def bind_policy(self, health: Callable[[], PolicyHealth]) -> None:
        """Who is asked at each scrape how good the policy's estimates are; the last one bound counts."""
        self._policy.health = health

    def observe_step(self, report: StepReport) -> None:
        self._footprint.observe_step(report)
        self._policy.observe_step(report)
        self._step_tokens.inc(report.emitted)
        self._step_count.labels("true" if report.speculated else "false").inc()
        for accepted, sent in zip(report.accepted, report.sent, strict=True):
            if sent:
                self._drafts.inc()
                self._draft_tokens.inc(sent)
                self._accepted.inc(accepted)
                self.observe_accepted_path(accepted)
        self.observe_distinct_experts(report.distinct_experts.tolist())
        for component in COMPONENTS:
            self._bytes.labels(component).inc(getattr(report.bytes_read, component))
        self._upper_bound.inc(report.bytes_upper_bound)
        self._autoregressive.inc(report.bytes_autoregressive)
        if report.predicted_actual_overlap is not None:
            predicted, actual, both = report.predicted_actual_overlap
            self._predicted.inc(predicted)
            self._actual.inc(actual)
            self._both.inc(both)
        asked = report.predicted_actual_overlap is not None or report.fallback is not None
        for phase in PHASES:
            seconds = report.step_seconds if phase == "total" else getattr(report, f"{phase}_seconds")
            # A step that asked nobody would fill the lowest bucket and hide the real calls.
            if phase != "predict" or asked:
                self._step_seconds.labels(phase).observe(seconds)
        if report.fallback is not None:
            known = report.fallback if report.fallback in FALLBACK_REASONS else "error"
            self._fallbacks.labels(known).inc()
            if known == "deadline":
                self._misses.inc()

    def observe_iteration(self, report: IterationReport) -> None:
        """Instead of observe_step, from an engine that batches by itself; prompts beside the answers take part in its time."""
        self._prefilled.inc(report.prompt_tokens)
        if report.generating:
            self._step_count.labels("true" if report.drafting else "false").inc()
            self._step_seconds.labels("total").observe(report.seconds)
        self._step_tokens.inc(report.generating + report.accepted_tokens)
        self._drafts.inc(report.drafting)
        self._draft_tokens.inc(report.draft_tokens)
        self._accepted.inc(report.accepted_tokens)

    def observe_distinct_experts(self, by_layer: Sequence[int]) -> None:
        """Of one step, by MoE layer."""
        for layer, experts in enumerate(by_layer):
            self._experts.observe(experts)
            self._experts_by_layer.labels(str(layer)).inc(experts)

    def observe_accepted_path(self, accepted: int) -> None:
        """Beside observe_iteration: the draft tokens of one request that one step accepted, a path from the root."""
        for position in range(accepted):
            self._accepted_per_position.labels(str(min(position, MAX_POSITION))).inc()

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """One chunk of a prompt."""
        self._prefilled.inc(tokens)
        self._chunk_seconds.observe(seconds)

    def observe_prefix(self, tokens: int, found: int) -> None:
        """A prompt of so many tokens to compute was looked for in the KV cache, and so many of them were found."""
        self._prefix_queries.inc(tokens)
        self._prefix_hits.inc(found)

    def observe_cache_violation(self) -> None:
        self._violations.inc()

    def observe_predictor_call(self, seconds: float) -> None:
        """From the question to the answer's arrival; a step may wait for less when it drafted meanwhile."""
        self._call_seconds.observe(seconds)

    def observe_context_resent(self) -> None:
        self._resent.inc()

    def observe_request_start(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_inter_token(self, seconds: float, tokens: int) -> None:
        """The gap between two steps of a request, spread evenly over the tokens that the second brought."""
        for _ in range(tokens):
            self._inter_token.observe(seconds / tokens)

    def observe_request_finish(self, reason: str, seconds: float, tokens: int) -> None:
        """reason: stop, length, abort or error; seconds from arrival to the last token."""
        self._success.labels(reason if reason in FINISH_REASONS else "error").inc()
        self._e2e.observe(seconds)
        self._generated.inc(tokens)

    def observe_request_stats(self, stats: RequestStats) -> None:
        """What the scheduler measured; it comes after the last text when a stop string ended the request."""
        self._queue.observe(stats.queue_seconds)
        self._prefill.observe(stats.prefill_seconds)
        self._decode.observe(stats.decode_seconds)

    def observe_refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def render(self) -> bytes:
        """Prometheus text exposition, version 0.0.4."""
        return generate_latest(self.registry)


def _pages(cache_use: Callable[[], CacheUse], state: str) -> float:
    return float(getattr(cache_use(), state))
