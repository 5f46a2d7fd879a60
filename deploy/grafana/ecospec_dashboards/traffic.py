"""Bytes that decoding reads from memory, against plain decoding, against no sharing, and against the memory's peak. Only the embedded
engine tells them."""

from __future__ import annotations

from typing import Any

from .panels import GREEN, RED, YELLOW, Query, course, number, page
from .queries import rate, ratio, value


def told(expr: str) -> str:
    """Nothing, instead of 0, from an engine that does not tell its bytes."""
    return f"({expr} > 0)"


READ = "ecospec_bytes_read_total"
PLAIN = rate("ecospec_estimated_bytes_autoregressive_total")
UNSHARED = rate("ecospec_estimated_bytes_upper_bound_total")
TOKENS = rate("ecospec_step_tokens_total")
PEAK = value("ecospec_memory_bandwidth_bytes_per_second", how="avg")
BYTES = told(rate(READ))
ACHIEVED = ratio(BYTES, rate("ecospec_step_seconds_sum", phase="total"))


def _glance() -> list[Any]:
    return [
        number("Bytes per token", "Read by decode steps for each token.", "decbytes", ratio(BYTES, TOKENS)),
        number(
            "Plain decoding",
            "Estimated bytes for each token if the same tokens were decoded one per step and request.",
            "decbytes",
            ratio(told(PLAIN), TOKENS),
        ),
        number(
            "Actual over plain",
            "Bytes read over those of plain decoding: below 1, speculation saves traffic.",
            "percentunit",
            ratio(BYTES, PLAIN),
            (None, GREEN),
            (1.0, YELLOW),
            (1.2, RED),
        ),
        number(
            "Actual over no sharing",
            "Bytes read over those if no two rows of a step shared an expert.",
            "percentunit",
            ratio(BYTES, UNSHARED),
        ),
        number("Achieved bandwidth", "Bytes read for each second of a decode step.", "Bps", ACHIEVED),
        number(
            "Share of peak",
            "Achieved bandwidth over the memory's peak, where the setting memory_bandwidth_gb_per_second tells it.",
            "percentunit",
            ratio(f"({ACHIEVED})", PEAK),
        ),
    ]


def _per_token() -> list[Any]:
    return [
        course(
            "Bytes per token",
            "Read, and estimated for plain decoding of the same tokens and for steps whose rows share no expert.",
            "decbytes",
            Query(ratio(BYTES, TOKENS), "read"),
            Query(ratio(told(PLAIN), TOKENS), "plain decoding (estimated)"),
            Query(ratio(told(UNSHARED), TOKENS), "nothing shared (estimated)"),
        ),
        course(
            "Against the alternatives",
            "Bytes read over those of plain decoding, and over those of steps whose rows share no expert.",
            "percentunit",
            Query(ratio(BYTES, PLAIN), "of plain decoding"),
            Query(ratio(BYTES, UNSHARED), "of nothing shared"),
        ),
        course(
            "Bytes per token by component",
            "Routed experts, attention, shared layers, output head, KV cache and the drafter.",
            "decbytes",
            Query(ratio(told(rate(READ, "component")), TOKENS, shared=True), "{{component}}"),
            stacked=True,
        ),
        course(
            "Share by component",
            "Share of the bytes read.",
            "percentunit",
            Query(ratio(rate(READ, "component"), rate(READ), shared=True), "{{component}}"),
            stacked=True,
            most=1,
        ),
    ]


def _bandwidth() -> list[Any]:
    return [
        course(
            "Bandwidth",
            "Bytes read for each second of a decode step (mean of the instances), and the memory's peak as set.",
            "Bps",
            Query(ACHIEVED, "achieved"),
            Query(PEAK, "peak"),
        ),
        course(
            "Share of peak bandwidth",
            "Achieved over peak, where the setting memory_bandwidth_gb_per_second tells it.",
            "percentunit",
            Query(ratio(f"({ACHIEVED})", PEAK), "share"),
        ),
        course(
            "Bytes per second",
            "Read by decode steps, idle time included, by component.",
            "Bps",
            Query(rate(READ, "component"), "{{component}}"),
            stacked=True,
        ),
        course(
            "Busy time",
            "Share of the time in decode steps and in prefill, summed over the instances.",
            "percentunit",
            Query(rate("ecospec_step_seconds_sum", phase="total"), "decode steps"),
            Query(rate("ecospec_prefill_chunk_seconds_sum"), "prefill"),
        ),
    ]


def traffic() -> Any:
    return page(
        "traffic",
        "EcoSpec / HBM traffic",
        "Bytes that decoding reads from memory: per token, by component, and of the peak bandwidth.",
        ("At a glance", _glance()),
        ("Per token", _per_token()),
        ("Bandwidth", _bandwidth()),
    )
