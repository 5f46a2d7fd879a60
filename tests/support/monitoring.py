"""What deploy/grafana and deploy/prometheus ask for, and what the two services export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from prometheus_client import CollectorRegistry

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.core import BytesRead, Decision, PredictedFootprint, StepReport
from ecospec_orchestrator.engine.base import CacheUse
from ecospec_orchestrator.selection.base import PolicyHealth
from ecospec_predictor.live.metrics import LiveMetrics
from ecospec_predictor.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
GRAFANA, PROMETHEUS = ROOT / "deploy/grafana", ROOT / "deploy/prometheus"


@dataclass(frozen=True)
class Exported:
    kind: str  # counter, gauge, histogram
    labels: frozenset[str]


@dataclass(frozen=True)
class Rule:
    """name: of the recorded series, or of the alert."""

    name: str
    expr: str
    alert: dict[str, Any] | None = None


def dashboards() -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text("utf-8")) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, panel) without the headings."""
    for file, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            if panel["type"] != "row":
                yield f"{file}: {panel['title']} ({panel['type']})", panel


def rules(file: str) -> list[Rule]:
    groups = yaml.safe_load((PROMETHEUS / file).read_text("utf-8"))["groups"]
    found = [rule for group in groups for rule in group["rules"]]
    return [Rule(r.get("record") or r["alert"], r["expr"], r if "alert" in r else None) for r in found]


def exported() -> dict[str, Exported]:
    """Every sample name of both services, after each has seen everything once."""
    samples: dict[str, Exported] = {}
    for registry in (_orchestrator(), _predictor()):
        for family in registry.collect():
            for sample in family.samples:
                samples[sample.name] = Exported(family.type, frozenset(sample.labels))
    return samples


def _orchestrator() -> CollectorRegistry:
    ledger, layers = Ledger(), np.ones(3, np.int64)
    footprint = PredictedFootprint(1, np.ones((3, 3), np.int64), layers, layers)
    decision = Decision("goodput", None, expected_tokens=1.0, expected_seconds=1.0, plain_seconds=1.0)
    ledger.observe_step(
        StepReport(
            requests=1,
            nodes=1,
            speculated=True,
            accepted=(1,),
            sent=(1,),
            emitted=2,
            distinct_experts=layers,
            bytes_read=BytesRead(1),
            bytes_upper_bound=1,
            bytes_autoregressive=1.0,
            predicted_actual_overlap=footprint.node_totals,
            draft_seconds=0.1,
            predict_seconds=0.1,
            select_seconds=0.1,
            verify_seconds=0.1,
            step_seconds=0.4,
            decision=decision,
            footprint=footprint,
        )
    )
    ledger.bind(lambda: 1, lambda: 0, lambda: CacheUse(64, 16, 4, 3))
    ledger.bind_policy(lambda: PolicyHealth({"greedy": 0.1}))
    ledger.model.describe("model", "revision", "cpu", 1.0)
    ledger.state.observe_version_in_use("1")
    ledger.state.observe_published_version("1")
    ledger.guard.key_requests.labels("alice", "admitted")
    ledger.guard.key_tokens.labels("alice", "prompt")
    return ledger.registry


def _predictor() -> CollectorRegistry:
    metrics = Metrics()
    live = LiveMetrics(metrics.registry)
    metrics.model_info.labels("target", "fingerprint", "version")
    for gauge in (live.drift, live.rolling, live.baseline):
        gauge.labels("fingerprint")
    live.rolling_by_layer.labels("fingerprint", "0")
    return metrics.registry
