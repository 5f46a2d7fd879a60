"""The expert predictor, as its callers and as itself see it."""

from __future__ import annotations

from typing import Any

from .panels import GREEN, RED, YELLOW, Query, course, curve, number, page
from .queries import PREDICTORS, mean, quantile, rate, ratio, value

CALL = "ecospec_predictor_call_seconds"
ASKED = rate("ecospec_step_seconds_count", phase="predict")
FALLBACKS = "ecospec_predictor_fallbacks_total"
ROLLING = "ecospec_predictor_rolling_top_k_accuracy_mean"


def _own(metric: str, by: str = "", **labels: str) -> str:
    return rate(metric, by, PREDICTORS, **labels)


def _glance() -> list[Any]:
    return [
        number(
            "Call, p50", "From the question to the answer's arrival, as orchestrators see it.", "s", quantile(0.5, CALL)
        ),
        number(
            "Call, p99",
            "From the question to the answer's arrival, as orchestrators see it.",
            "s",
            quantile(0.99, CALL),
        ),
        number(
            "Fallbacks",
            "Share of the steps that asked and went on without predictions.",
            "percentunit",
            ratio(rate(FALLBACKS), ASKED),
            (None, GREEN),
            (0.01, YELLOW),
            (0.1, RED),
        ),
        number(
            "Recall",
            "Share of the experts that verified nodes used which had been predicted.",
            "percentunit",
            ratio(rate("ecospec_predicted_and_actual_experts_total"), rate("ecospec_actual_experts_total")),
        ),
        number(
            "Live accuracy",
            "Top-k accuracy on recent live routes; the worst model.",
            "percentunit",
            value(ROLLING, of=PREDICTORS, how="min"),
        ),
        number(
            "Drift",
            "1 from when live accuracy falls below the held-out accuracy by more than the margin until it is back within half of it.",
            "none",
            value("ecospec_predictor_drift", of=PREDICTORS, how="max"),
            (None, GREEN),
            (1, RED),
            decimals=0,
        ),
    ]


def _calls() -> list[Any]:
    return [
        course(
            "Time of a call",
            "From the question to the answer's arrival, as orchestrators see it; a step may wait for less.",
            "s",
            *(Query(quantile(share, CALL), f"p{100 * share:g}") for share in (0.5, 0.9, 0.99)),
        ),
        course(
            "Wait of a step",
            "What steps that asked waited for the answer.",
            "s",
            *(
                Query(quantile(share, "ecospec_step_seconds", phase="predict"), f"p{100 * share:g}")
                for share in (0.5, 0.9, 0.99)
            ),
        ),
        course(
            "Deadline misses",
            "Calls that were too late, of the steps that asked.",
            "percentunit",
            Query(ratio(rate("ecospec_predictor_deadline_misses_total"), ASKED), "missed"),
        ),
        course(
            "Fallbacks, by reason",
            "Steps that went on without predictions, of those that asked.",
            "percentunit",
            Query(ratio(rate(FALLBACKS, "reason"), ASKED, shared=True), "{{reason}}"),
            stacked=True,
        ),
    ]


def _service() -> list[Any]:
    times = {"model": "ecospec_predictor_model_seconds", "queue": "ecospec_predictor_queue_seconds"}
    return [
        course(
            "Time inside the service",
            "Of one run of the model, and of a request's wait for it.",
            "s",
            *(
                Query(quantile(share, name, PREDICTORS), f"{part}, p{100 * share:g}")
                for part, name in times.items()
                for share in (0.5, 0.99)
            ),
        ),
        course(
            "Requests, by outcome",
            "Unary and of streams.",
            "reqps",
            Query(_own("ecospec_predictor_requests_total", "outcome"), "{{outcome}}"),
            stacked=True,
        ),
        course(
            "Batches",
            "Trees in one run of the model.",
            "none",
            Query(mean("ecospec_predictor_batch_trees", of=PREDICTORS), "mean"),
            Query(quantile(0.99, "ecospec_predictor_batch_trees", PREDICTORS), "p99"),
        ),
        course(
            "Versions",
            "1 for the version that orchestrators use, the one published last, and those served; and versions found, by outcome.",
            "none",
            Query(value("ecospec_predictor_version_info", "version", how="max"), "in use: {{version}}"),
            Query(value("ecospec_predictor_published_version_info", "version", how="max"), "published: {{version}}"),
            Query(
                value("ecospec_predictor_model_info", "target, version", PREDICTORS, "max"),
                "served: {{target}} {{version}}",
            ),
            Query(_own("ecospec_predictor_swaps_total", "outcome"), "found/s: {{outcome}}"),
            Query(rate("ecospec_predictor_version_changes_total"), "changes seen/s"),
        ),
    ]


def _sessions() -> list[Any]:
    return [
        course(
            "Sessions",
            "Contexts that the service keeps.",
            "none",
            Query(value("ecospec_predictor_sessions", of=PREDICTORS), "kept"),
        ),
        course(
            "Session uses",
            "Trees by what became of their context: started, hit or lost; contexts that orchestrators sent once more; sessions that "
            "ended, by cause.",
            "ops",
            Query(_own("ecospec_predictor_session_uses_total", "result"), "{{result}}"),
            Query(rate("ecospec_predictor_contexts_resent_total"), "sent once more"),
            Query(_own("ecospec_predictor_sessions_dropped_total", "cause"), "ended: {{cause}}"),
        ),
    ]


def _accuracy() -> list[Any]:
    return [
        course(
            "Accuracy and drift",
            "Top-k accuracy on recent live routes and on held-out ones when the model was trained; drift is 1 from when the first falls "
            "below the second by more than the margin until it is back within half of it.",
            "percentunit",
            Query(value(ROLLING, "fingerprint", PREDICTORS, "avg"), "live {{fingerprint}}"),
            Query(
                value("ecospec_predictor_held_out_top_k_accuracy", "fingerprint", PREDICTORS, "avg"),
                "held out {{fingerprint}}",
            ),
            Query(value("ecospec_predictor_drift", "fingerprint", PREDICTORS, "max"), "drift {{fingerprint}}"),
            most=1,
        ),
        curve(
            "Live accuracy by layer",
            "Top-k accuracy on recent live routes, now.",
            "percentunit",
            "layer",
            Query(value("ecospec_predictor_rolling_top_k_accuracy", "layer", PREDICTORS, "avg"), "accuracy"),
        ),
        course(
            "Live routes",
            "Rows that were scored, and records that broke the format.",
            "none",
            Query(_own("ecospec_predictor_scored_tokens_total"), "rows scored/s"),
            Query(_own("ecospec_predictor_trace_records_refused_total"), "records refused/s"),
        ),
        course(
            "State store",
            "1 while it answers every predictor.",
            "none",
            Query(value("ecospec_predictor_state_store_up", of=PREDICTORS, how="min"), "store up"),
        ),
    ]


def predictor() -> Any:
    return page(
        "predictor",
        "EcoSpec / Predictor",
        "Latency, deadline misses, fallbacks, accuracy and drift of the expert predictor.",
        ("At a glance", _glance()),
        ("Calls", _calls()),
        ("Service", _service()),
        ("Sessions", _sessions()),
        ("Accuracy", _accuracy()),
        predictors=True,
    )
