"""What callers see: latency, throughput, the queue, errors, the KV cache."""

from __future__ import annotations

from typing import Any

from .panels import GREEN, RED, YELLOW, Query, course, number, page
from .queries import mean, quantile, rate, ratio, value

FINISHED = rate("ecospec_request_success_total")
# 504 is a deadline, of the caller or of max_request_seconds: it has a panel and an alert of its own.
REFUSED = rate("ecospec_requests_refused_total", status="~50[0-3]")
BROKEN = rate("ecospec_request_success_total", finished_reason="error")


def _glance() -> list[Any]:
    return [
        number("Requests", "Finished per second.", "reqps", FINISHED),
        number(
            "Tokens", "That decode steps brought per second.", "none", rate("ecospec_step_tokens_total"), decimals=1
        ),
        number("Running", "Requests in the batch.", "none", value("ecospec_num_requests_running"), decimals=0),
        number(
            "Waiting",
            "Requests in the queue.",
            "none",
            value("ecospec_num_requests_waiting"),
            (None, GREEN),
            (1, YELLOW),
            (32, RED),
            decimals=0,
        ),
        number(
            "KV cache",
            "Share of the pages in use; the fullest instance.",
            "percentunit",
            value("ecospec_kv_cache_usage_perc", how="max"),
            (None, GREEN),
            (0.8, YELLOW),
            (0.95, RED),
        ),
        number(
            "Errors",
            "Requests that ended with an error or were answered with 500 to 503, over all that finished.",
            "percentunit",
            ratio(f"({BROKEN} + {REFUSED})", f"({FINISHED} + {REFUSED})"),
            (None, GREEN),
            (0.001, YELLOW),
            (0.02, RED),
        ),
    ]


def _quantiles(histogram: str, *shares: float) -> list[Query]:
    return [Query(quantile(share, histogram), f"p{100 * share:g}") for share in shares]


def _latency() -> list[Any]:
    return [
        course(
            "Time to first token (TTFT)",
            "From a request's arrival to its first token.",
            "s",
            *_quantiles("ecospec_time_to_first_token_seconds", 0.5, 0.9, 0.99),
        ),
        course(
            "Inter-token latency (ITL)",
            "A step's gap, spread over the tokens that it brought.",
            "s",
            *_quantiles("ecospec_inter_token_latency_seconds", 0.5, 0.9, 0.99),
        ),
        course(
            "End to end",
            "From a request's arrival to its last token.",
            "s",
            *_quantiles("ecospec_e2e_request_latency_seconds", 0.5, 0.9, 0.99),
        ),
        course(
            "Where a request's time goes",
            "Mean time in the queue, in prefill and in decode steps.",
            "s",
            *(Query(mean(f"ecospec_request_{part}_time_seconds"), part) for part in ("queue", "prefill", "decode")),
            stacked=True,
        ),
    ]


def _load() -> list[Any]:
    return [
        course(
            "Requests",
            "In the batch and in the queue.",
            "none",
            Query(value("ecospec_num_requests_running"), "running"),
            Query(value("ecospec_num_requests_waiting"), "waiting"),
        ),
        course(
            "Time in the queue",
            "From a request's arrival to its prefill.",
            "s",
            *_quantiles("ecospec_request_queue_time_seconds", 0.5, 0.95, 0.99),
        ),
        course(
            "Tokens per second",
            "Taken as prompts, computed of them, brought by decode steps, and sent in finished answers.",
            "none",
            Query(rate("ecospec_prompt_tokens_total"), "prompt"),
            Query(rate("ecospec_prefill_tokens_total"), "prefilled"),
            Query(rate("ecospec_step_tokens_total"), "decoded"),
            Query(rate("ecospec_generation_tokens_total"), "finished"),
        ),
        course(
            "Time of a prefill chunk",
            "Feeding the drafter included.",
            "s",
            *_quantiles("ecospec_prefill_chunk_seconds", 0.5, 0.9, 0.99),
        ),
    ]


def _errors() -> list[Any]:
    return [
        course(
            "Finished, by reason",
            "stop and length are whole answers; abort: the caller went away; error: the engine failed.",
            "reqps",
            Query(rate("ecospec_request_success_total", "finished_reason"), "{{finished_reason}}"),
            stacked=True,
        ),
        course(
            "Refused, by status",
            "HTTP requests answered with an error: 429 is a full queue or a limit of a key, 503 a server that loads or drains, 504 a deadline.",
            "reqps",
            Query(rate("ecospec_requests_refused_total", "status"), "{{status}}"),
            stacked=True,
        ),
    ]


def _callers() -> list[Any]:
    return [
        course(
            "Requests, by what became of them",
            "Let in, or over the rate, the quota or the requests at a time of their key.",
            "reqps",
            Query(rate("ecospec_key_requests_total", "outcome"), "{{outcome}}"),
            stacked=True,
        ),
        course(
            "Requests, by key",
            "The ten keys with the most requests; anonymous is everybody on an open server.",
            "reqps",
            Query(f"topk(10, {rate('ecospec_key_requests_total', 'key, outcome')})", "{{key}}: {{outcome}}"),
        ),
        course(
            "Tokens, by key",
            "Of prompts and of answers; the ten largest.",
            "none",
            Query(f"topk(10, {rate('ecospec_key_tokens_total', 'key, kind')})", "{{key}}: {{kind}}"),
        ),
        course(
            "Without a key, or too late",
            "Requests without a valid key, and requests that their deadline ended.",
            "reqps",
            Query(rate("ecospec_auth_failures_total"), "no valid key"),
            Query(rate("ecospec_deadlines_exceeded_total"), "deadline exceeded"),
        ),
        course(
            "Connections ended by the server",
            "Nothing came (headers, body), nothing was taken (response), or too many were open (connections).",
            "ops",
            Query(rate("ecospec_slow_clients_total", "phase"), "{{phase}}"),
            stacked=True,
        ),
        course(
            "State store and quotas",
            "Whether every instance reaches the store (1 also where nothing is shared), 1 while a replica applies quotas by itself, and "
            "the decisions that were made so.",
            "none",
            Query(value("ecospec_state_store_up", how="min"), "store up"),
            Query(value("ecospec_quotas_degraded", how="max"), "quotas degraded"),
            Query(rate("ecospec_quota_local_decisions_total"), "decisions/s"),
        ),
    ]


def _cache() -> list[Any]:
    lost = "ecospec_trace_records_dropped_total"
    return [
        course(
            "KV cache pages",
            "In use by requests, kept because a prompt may begin alike, and free.",
            "none",
            Query(value("ecospec_kv_cache_pages", "state"), "{{state}}"),
            Query(value("ecospec_kv_cache_capacity_pages"), "capacity"),
        ),
        course(
            "Prefix reuse",
            "Share of the prompt tokens that were found in the KV cache.",
            "percentunit",
            Query(ratio(rate("ecospec_prefix_cache_hits_total"), rate("ecospec_prefix_cache_queries_total")), "found"),
            most=1,
        ),
        course(
            "Cache violations",
            "Times that the pages of an idle cache were not in order: always 0.",
            "ops",
            Query(rate("ecospec_kv_cache_violations_total"), "violations"),
        ),
        course(
            "Sampled routes",
            "Rows whose routes were sampled for the trainer, and trace records that the state store took, and that were lost.",
            "none",
            Query(rate("ecospec_trace_sampled_tokens_total"), "tokens sampled/s"),
            Query(rate("ecospec_trace_records_written_total"), "records written/s"),
            Query(rate(lost, "reason"), "lost/s: {{reason}}"),
        ),
    ]


def serving() -> Any:
    return page(
        "serving",
        "EcoSpec / Serving",
        "Latency, throughput, the queue, errors by reason, callers and their limits, and the KV cache.",
        ("At a glance", _glance()),
        ("Latency", _latency()),
        ("Load", _load()),
        ("Errors", _errors()),
        ("Callers and their limits", _callers()),
        ("Cache and sampled routes", _cache()),
    )
