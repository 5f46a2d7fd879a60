"""What TensorRT-LLM measures, in our terms: its iteration statistics and its metrics of a finished request.

Source: the JSON of the executor's IterationStats (iterLatencyMS, inflightBatchingStats, specDecodingStats, kvCacheStats) and
RequestPerfMetrics (timing_metrics, speculative_decoding).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...accounting.iteration import IterationReport
from ...core import RequestStats
from ..base import CacheUse


def iteration_report(record: Mapping[str, Any]) -> IterationReport | None:
    """One iteration; None for one without a scheduled request, and for the rows of other attention-parallel ranks, which repeat
    the first rank's speculation. Raises ValueError naming a figure that is none."""
    if record.get("attentionDpRank"):
        return None
    batch = _part(record, "inflightBatchingStats")
    generating, prompts = _count(batch, "numGenRequests"), _count(batch, "numContextRequests")
    if not generating and not prompts:
        return None
    drafts = _part(record, "specDecodingStats")
    return IterationReport(
        seconds=_number(record, "iterLatencyMS") / 1e3,
        generating=generating,
        prompt_tokens=_count(batch, "numCtxTokens"),
        drafting=_count(drafts, "numRequestsWithDraftTokens"),
        draft_tokens=_count(drafts, "numDraftTokens"),
        accepted_tokens=_count(drafts, "numAcceptedTokens"),
    )


def cache_use(record: Mapping[str, Any]) -> CacheUse | None:
    """The KV cache of one GPU; blocks that only wait to be used again count as free. None where the record does not tell."""
    cache = _part(record, "kvCacheStats")
    pages = _count(cache, "maxNumBlocks")
    if not pages:
        return None
    return CacheUse(_count(cache, "tokensPerBlock"), pages, min(pages, _count(cache, "usedNumBlocks")), 0)


def add_request_metrics(stats: RequestStats, metrics: Any) -> None:
    """Fill times and draft tokens from the engine's metrics of a finished request, where it has them; what is there stays where it
    has not."""
    timing = getattr(metrics, "timing_metrics", None)
    arrival, scheduled, first, last = (
        _seconds(getattr(timing, name, None))
        for name in ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
    )
    if arrival is not None and scheduled is not None and first is not None and last is not None:
        stats.queue_seconds = max(0.0, scheduled - arrival)
        stats.prefill_seconds = max(0.0, first - scheduled)
        stats.decode_seconds = max(0.0, last - first)
    drafts = getattr(metrics, "speculative_decoding", None)
    if drafts is not None and drafts.total_draft_tokens > 0:
        stats.draft_tokens = int(drafts.total_draft_tokens)


def _seconds(value: Any) -> float | None:
    """Of a timedelta since the engine's own zero; None where the moment never came."""
    if value is None:
        return None
    seconds = float(value.total_seconds())
    return seconds if seconds > 0 else None


def _part(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = record.get(name)
    return part if isinstance(part, Mapping) else {}


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r}; a number of at least 0 is needed.")
    return float(value)


def _count(record: Mapping[str, Any], name: str) -> int:
    return int(_number(record, name))
