"""One decode step as JSON: `choices[i].ecospec.step` of a chunk. What the fields mean: docs/step-events.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..core import Decision, PredictedFootprint, StepEvent


def step_body(
    event: StepEvent, tokens: Sequence[int], pieces: Sequence[str], text_of: Callable[[int], str]
) -> dict[str, Any]:
    """tokens: what the step added to the answer; pieces: of each, what it added to the streamed text; text_of: of one token by
    itself."""
    report, accepted = event.report, int(event.accepted.sum())
    return {
        "index": event.index,
        "root": {"token": event.root, "text": text_of(event.root)},
        "candidates": _candidates(event, text_of),
        "tokens": [
            {"token": token, "text": piece, "drafted": at < accepted}
            for at, (token, piece) in enumerate(zip(tokens, pieces, strict=True))
        ],
        "policy": _policy(event, report.decision),
        "batch": {"requests": report.requests, "nodes": report.nodes, "tokens": report.emitted},
        "experts": {
            "read": report.distinct_experts.tolist(),
            "plain": event.plain_experts.tolist(),
            "predicted": _predicted(report.footprint),
        },
        "bytes": {"read": report.bytes_read.total, "plain_estimated": round(report.bytes_autoregressive)},
        "seconds": {
            "step": _rounded(report.step_seconds),
            "draft": _rounded(report.draft_seconds),
            "predict": _rounded(report.predict_seconds),
            "select": _rounded(report.select_seconds),
            "verify": _rounded(report.verify_seconds),
        },
    }


def _candidates(event: StepEvent, text_of: Callable[[int], str]) -> list[dict[str, Any]]:
    tree = event.tree
    rows = zip(
        tree.tokens.tolist(),
        tree.parents.tolist(),
        tree.probabilities.tolist(),
        event.target_probabilities.tolist(),
        event.chosen.tolist(),
        event.accepted.tolist(),
        strict=True,
    )
    return [
        {
            "token": token,
            "text": text_of(token),
            "parent": parent,
            "probability": _rounded(probability),
            "target_probability": None if math.isnan(target) else _rounded(target),
            "chosen": chosen,
            "accepted": accepted,
        }
        for token, parent, probability, target, chosen, accepted in rows
    ]


def _policy(event: StepEvent, decision: Decision | None) -> dict[str, Any]:
    """decision is of the whole step, not_speculated of this request."""
    told = decision or Decision("unknown", None)
    return {
        "name": told.policy,
        "decided_by": told.fallback_policy or told.policy,
        "not_speculated": event.not_speculated,
        "probe": told.probe,
        "prediction": told.prediction,
        "prediction_failed": event.report.fallback,
        "expected_tokens": _rounded(told.expected_tokens),
        "expected_seconds": _rounded(told.expected_seconds),
        "plain_seconds": _rounded(told.plain_seconds),
    }


def _predicted(footprint: PredictedFootprint | None) -> dict[str, Any] | None:
    if footprint is None:
        return None
    predicted, actual, both = footprint.node_totals
    return {
        "rows": footprint.rows,
        "experts": footprint.union_predicted.tolist(),
        "actual": footprint.union_actual.tolist(),
        "pairs": {"predicted": predicted, "actual": actual, "both": both},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
