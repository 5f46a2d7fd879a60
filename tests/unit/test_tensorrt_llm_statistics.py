"""Iteration statistics and request metrics of TensorRT-LLM in our terms."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ecospec_orchestrator.accounting.iteration import IterationReport
from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.core import RequestStats
from ecospec_orchestrator.engine.base import CacheUse
from ecospec_orchestrator.engine.tensorrt_llm.statistics import add_request_metrics, cache_use, iteration_report

RECORD: dict[str, Any] = {
    "iter": 12,
    "iterLatencyMS": 8.5,
    "inflightBatchingStats": {
        "numScheduledRequests": 5,
        "numContextRequests": 1,
        "numGenRequests": 4,
        "numCtxTokens": 77,
    },
    "specDecodingStats": {"numDraftTokens": 30, "numAcceptedTokens": 7, "numRequestsWithDraftTokens": 3},
    "kvCacheStats": {"maxNumBlocks": 1000, "usedNumBlocks": 250, "freeNumBlocks": 750, "tokensPerBlock": 32},
}
REPORT = IterationReport(seconds=0.0085, generating=4, prompt_tokens=77, drafting=3, draft_tokens=30, accepted_tokens=7)


def test_an_iteration() -> None:
    assert iteration_report(RECORD) == REPORT
    assert cache_use(RECORD) == CacheUse(32, 1000, 250, 0)


def test_without_speculation_there_are_no_drafts() -> None:
    for drafts in ({}, None):
        report = iteration_report(RECORD | {"specDecodingStats": drafts})
        assert report is not None and (report.drafting, report.draft_tokens, report.accepted_tokens) == (0, 0, 0)


def test_rows_of_other_attention_parallel_ranks_are_left_out() -> None:
    assert iteration_report(RECORD | {"attentionDpRank": 0}) == REPORT
    assert iteration_report(RECORD | {"attentionDpRank": 1}) is None


def test_an_idle_iteration_is_none() -> None:
    assert iteration_report({"iter": 1, "iterLatencyMS": 0.1}) is None
    assert cache_use({"iter": 1}) is None


@pytest.mark.parametrize("value", [-1, float("nan"), "8.5", True, None])
def test_a_figure_that_is_none_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match="iterLatencyMS"):
        iteration_report(RECORD | {"iterLatencyMS": value})


def test_the_ledger_counts_iterations() -> None:
    ledger = Ledger()
    ledger.observe_iteration(REPORT)
    ledger.observe_iteration(IterationReport(0.5, 2, 0, 0, 0, 0))
    ledger.observe_iteration(IterationReport(0.25, 0, 100, 0, 0, 0))  # prompts alone are no decode step
    ledger.observe_accepted_path(2)
    ledger.observe_accepted_path(0)
    text = ledger.render().decode()
    for line in (
        'ecospec_steps_total{speculated="true"} 1.0',
        'ecospec_steps_total{speculated="false"} 1.0',
        'ecospec_step_seconds_count{phase="total"} 2.0',
        "ecospec_step_tokens_total 13.0",  # one of each generating request, and the accepted
        "ecospec_spec_decode_num_drafts_total 3.0",
        "ecospec_spec_decode_num_draft_tokens_total 30.0",
        "ecospec_spec_decode_num_accepted_tokens_total 7.0",
        'ecospec_spec_decode_num_accepted_tokens_per_pos_total{position="0"} 1.0',
        'ecospec_spec_decode_num_accepted_tokens_per_pos_total{position="1"} 1.0',
        "ecospec_prefill_tokens_total 177.0",
    ):
        assert line in text.splitlines(), line


def _metrics(times: tuple[float, float, float, float], drafts: int = 0) -> Any:
    names = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
    timing = SimpleNamespace(**{n: timedelta(seconds=t) for n, t in zip(names, times, strict=True)})
    return SimpleNamespace(timing_metrics=timing, speculative_decoding=SimpleNamespace(total_draft_tokens=drafts))


def test_times_and_drafts_of_a_finished_request() -> None:
    stats = RequestStats(prefill_seconds=9.0, draft_tokens=4)
    add_request_metrics(stats, _metrics((10.0, 10.5, 11.5, 14.0), 12))
    assert (stats.queue_seconds, stats.prefill_seconds, stats.decode_seconds) == (0.5, 1.0, 2.5)
    assert stats.draft_tokens == 12


@pytest.mark.parametrize("metrics", [None, _metrics((10.0, 0.0, 0.0, 0.0))])
def test_what_the_engine_does_not_tell_stays_as_measured_here(metrics: Any) -> None:
    stats = RequestStats(prefill_seconds=9.0, draft_tokens=4)
    add_request_metrics(stats, metrics)
    assert (stats.prefill_seconds, stats.draft_tokens, stats.queue_seconds) == (9.0, 4, 0.0)
