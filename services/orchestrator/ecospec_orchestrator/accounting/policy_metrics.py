"""Metrics of what the policy decided and expected, beside what came of it. Seconds and tokens throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ..core import StepReport

if TYPE_CHECKING:
    from ..selection.base import PolicyHealth

NODES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
OTHER = "other"  # any value not listed below shares one label, so that labels stay bounded
NOT_SPECULATED = ("policy", "drafting_does_not_pay", "no_node_pays", "nothing_drafted", "budget", OTHER)
PREDICTIONS = ("asked", "does_not_pay", "cannot_matter", "off", OTHER)
FALLBACK_POLICIES = ("none", "likelihood", "ecospec", OTHER)


class PolicyMetrics:
    """Counts the decision of every step that has one. health, when set, is asked at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.health: Callable[[], PolicyHealth] | None = None

        def counter(name: str, text: str, label: str | None = None, values: tuple[str, ...] = ()) -> Counter:
            made = Counter(f"ecospec_policy_{name}", text, (label,) if label else (), registry=registry)
            for value in values:
                made.labels(value)
            return made

        self._not_speculated = counter(
            "steps_not_speculated", "Steps that verified the roots alone.", "reason", NOT_SPECULATED
        )
        self._nodes = Histogram(
            "ecospec_policy_nodes_chosen",
            "Draft nodes chosen for one request in one step.",
            buckets=NODES,
            registry=registry,
        )
        self._probes = counter("probes", "Steps that drafted to look, although it did not pay lately.")
        self._predictions = counter("predictions", "Steps by what became of the prediction.", "decision", PREDICTIONS)
        self._expected_tokens = counter("expected_tokens", "Tokens expected of the steps that had an expectation.")
        self._expected_seconds = counter("expected_seconds", "Time expected of the steps that had an expectation.")
        self._realised_tokens = counter("realised_tokens", "Tokens that the same steps brought.")
        self._realised_seconds = counter("realised_seconds", "Time that the same steps took.")
        self._autoregressive = counter(
            "estimated_autoregressive_seconds", "Estimated time of the same tokens, decoded one per step and request."
        )
        self._fallbacks = counter(
            "fallback_steps",
            "Steps decided by another policy for want of a valid cost profile.",
            "policy",
            FALLBACK_POLICIES,
        )
        registry.register(_HealthCollector(self))

    def observe_step(self, report: StepReport) -> None:
        decision = report.decision
        if decision is None:
            return
        if decision.not_speculated is not None:
            self._not_speculated.labels(_known(decision.not_speculated, NOT_SPECULATED)).inc()
        for nodes in report.sent:
            self._nodes.observe(nodes)
        if decision.probe:
            self._probes.inc()
        self._predictions.labels(_known(decision.prediction, PREDICTIONS)).inc()
        if decision.expected_tokens is not None and decision.expected_seconds is not None:
            # Sums over the same steps: the quotients compare predicted with realised tokens per second.
            self._expected_tokens.inc(decision.expected_tokens)
            self._expected_seconds.inc(decision.expected_seconds)
            self._realised_tokens.inc(report.emitted)
            self._realised_seconds.inc(report.step_seconds)
            if decision.plain_seconds is not None:
                self._autoregressive.inc(decision.plain_seconds * report.emitted / report.requests)
        if decision.fallback_policy is not None:
            self._fallbacks.labels(_known(decision.fallback_policy, FALLBACK_POLICIES)).inc()


def _known(value: str, allowed: tuple[str, ...]) -> str:
    return value if value in allowed else OTHER


class _HealthCollector(Collector):
    """One question per scrape, so that the gauges of a scrape belong together; no gauges while nobody is bound."""

    def __init__(self, metrics: PolicyMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if self._metrics.health is None:
            return
        health = self._metrics.health()
        errors = GaugeMetricFamily(
            "ecospec_policy_calibration_error",
            "Mean absolute difference of predicted and observed acceptance, recent steps; NaN while unobserved.",
            labels=["class"],
        )
        for name, error in health.calibration_error.items():
            errors.add_metric([name], error)
        yield errors
        for name, text, value in (
            ("cost_error", "Median absolute relative error of predicted step time, recent steps.", health.cost_error),
            ("cost_drifted", "1 while step times disagree with the cost profile.", float(health.cost_drifted)),
            ("profile_valid", "1 while a valid cost profile is in use.", float(health.profile_valid)),
        ):
            yield GaugeMetricFamily(f"ecospec_policy_{name}", text, value=value)
