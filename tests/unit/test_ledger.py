from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.core import BytesRead, Decision, PredictedFootprint, RequestStats, StepReport
from ecospec_orchestrator.engine.base import CacheUse
from ecospec_orchestrator.selection.base import PolicyHealth

REPORT = StepReport(
    requests=2,
    nodes=7,
    speculated=True,
    accepted=(2, 0),
    sent=(4, 3),
    emitted=4,
    distinct_experts=np.array([9, 11, 30]),
    bytes_read=BytesRead(experts=500, attention=40, shared=30, head=20, kv=6, draft=5),
    bytes_upper_bound=1500,
    bytes_autoregressive=900.5,
    predicted_actual_overlap=(100, 96, 80),
    draft_seconds=0.0004,
    predict_seconds=0.002,
    select_seconds=0.0001,
    verify_seconds=0.04,
    step_seconds=0.045,
)


class Scrape:
    """Values as a monitoring system reads them."""

    def __init__(self, ledger: Ledger) -> None:
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in text_string_to_metric_families(ledger.render().decode()):
            for sample in family.samples:
                self.values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        return self.values[f"ecospec_{name}", tuple(sorted(labels.items()))]

    def labels(self, name: str) -> set[tuple[tuple[str, str], ...]]:
        return {labels for known, labels in self.values if known == f"ecospec_{name}"}


def test_one_step_is_exported_as_measured() -> None:
    ledger = Ledger()
    ledger.observe_step(REPORT)
    get = Scrape(ledger)
    assert get("spec_decode_num_drafts_total") == 2
    assert get("spec_decode_num_draft_tokens_total") == 7
    assert get("spec_decode_num_accepted_tokens_total") == 2
    assert get("spec_decode_num_accepted_tokens_per_pos_total", position="0") == 1
    assert get("spec_decode_num_accepted_tokens_per_pos_total", position="1") == 1
    assert get("steps_total", speculated="true") == 1
    assert get("steps_total", speculated="false") == 0
    assert get("step_tokens_total") == 4
    assert get("distinct_experts_per_layer_step_count") == 3
    assert get("distinct_experts_per_layer_step_sum") == 50
    assert get("distinct_experts_per_layer_step_bucket", le="10.0") == 1
    assert get("distinct_experts_per_layer_step_bucket", le="12.0") == 2
    assert get("distinct_experts_by_layer_total", layer="2") == 30
    sizes = {"experts": 500, "attention": 40, "shared": 30, "head": 20, "kv": 6, "draft": 5}
    assert {name: get("bytes_read_total", component=name) for name in sizes} == sizes
    assert get("estimated_bytes_upper_bound_total") == 1500
    assert get("estimated_bytes_autoregressive_total") == 900.5
    assert get("predicted_experts_total") == 100
    assert get("actual_experts_total") == 96
    assert get("predicted_and_actual_experts_total") == 80
    phases = {"draft": 0.0004, "predict": 0.002, "select": 0.0001, "verify": 0.04, "total": 0.045}
    for phase, seconds in phases.items():
        assert get("step_seconds_sum", phase=phase) == pytest.approx(seconds)
    assert get("step_seconds_bucket", phase="select", le="0.0002") == 1
    assert get("step_seconds_bucket", phase="draft", le="0.0002") == 0


def test_steps_add_up() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.observe_step(REPORT)
    plain = replace(
        REPORT, speculated=False, accepted=(0, 0), sent=(0, 0), nodes=0, predicted_actual_overlap=None,
        draft_seconds=0.0, predict_seconds=0.0, select_seconds=0.0,
    )  # fmt: skip
    ledger.observe_step(plain)
    get = Scrape(ledger)
    assert get("steps_total", speculated="true") == 3
    assert get("steps_total", speculated="false") == 1
    assert get("spec_decode_num_drafts_total") == 6
    assert get("actual_experts_total") == 288
    assert get("step_seconds_count", phase="total") == 4
    assert get("step_seconds_count", phase="predict") == 3


@pytest.mark.parametrize(("reason", "label"), [("deadline", "deadline"), ("mismatch", "mismatch"), ("odd", "error")])
def test_fallbacks_have_a_bounded_reason(reason: str, label: str) -> None:
    ledger = Ledger()
    ledger.observe_step(replace(REPORT, fallback=reason))
    get = Scrape(ledger)
    assert get("predictor_fallbacks_total", reason=label) == 1
    assert get("predictor_deadline_misses_total") == (reason == "deadline")
    assert len(get.labels("predictor_fallbacks_total")) == 4


def test_a_request_from_start_to_finish() -> None:
    ledger = Ledger()
    ledger.observe_request_start(12)
    ledger.observe_first_token(0.25)
    ledger.observe_inter_token(0.06, 3)
    stats = RequestStats(queue_seconds=0.1, prefill_seconds=0.12, decode_seconds=0.4)
    ledger.observe_request_finish("length", 0.7, 4)
    ledger.observe_request_stats(stats)
    get = Scrape(ledger)
    assert get("prompt_tokens_total") == 12
    assert get("generation_tokens_total") == 4
    assert get("time_to_first_token_seconds_sum") == 0.25
    assert get("inter_token_latency_seconds_count") == 3
    assert get("inter_token_latency_seconds_sum") == pytest.approx(0.06)
    assert get("e2e_request_latency_seconds_sum") == 0.7
    assert get("request_queue_time_seconds_sum") == 0.1
    assert get("request_prefill_time_seconds_sum") == 0.12
    assert get("request_decode_time_seconds_sum") == 0.4
    assert get("request_success_total", finished_reason="length") == 1
    assert get("request_success_total", finished_reason="stop") == 0


def test_gauges_are_asked_at_each_scrape() -> None:
    ledger = Ledger()
    load = {"running": 3, "waiting": 5}
    ledger.bind(lambda: load["running"], lambda: load["waiting"], lambda: CacheUse(64, 16, 4, 3))
    get = Scrape(ledger)
    assert (get("num_requests_running"), get("num_requests_waiting")) == (3, 5)
    assert (get("kv_cache_capacity_pages"), get("kv_cache_usage_perc")) == (16, 0.25)
    assert [get("kv_cache_pages", state=s) for s in ("used", "kept", "free")] == [4, 3, 9]
    load["running"] = 0
    assert Scrape(ledger)("num_requests_running") == 0


def test_predictor_calls_have_buckets_below_a_millisecond() -> None:
    ledger = Ledger()
    ledger.observe_predictor_call(0.00025)
    ledger.observe_step(replace(REPORT, predict_seconds=0.00001))  # what was left to wait for, no call
    get = Scrape(ledger)
    assert get("predictor_call_seconds_bucket", le="0.0002") == 0
    assert get("predictor_call_seconds_bucket", le="0.0003") == 1
    assert get("predictor_call_seconds_count") == 1


def test_positions_are_bounded() -> None:
    ledger = Ledger()
    ledger.observe_step(replace(REPORT, accepted=(1000, 0), sent=(1000, 0)))
    get = Scrape(ledger)
    assert len(get.labels("spec_decode_num_accepted_tokens_per_pos_total")) == 32
    assert get("spec_decode_num_accepted_tokens_total") == 1000


def test_two_ledgers_are_independent() -> None:
    first, second = Ledger(), Ledger()
    first.observe_step(REPORT)
    assert Scrape(second)("steps_total", speculated="true") == 0


SPECULATED = Decision("goodput", None, prediction="asked", expected_tokens=4.5, expected_seconds=0.05)


def test_decisions_and_expectations_are_counted() -> None:
    ledger = Ledger()
    ledger.observe_step(REPORT)  # without a decision
    ledger.observe_step(replace(REPORT, decision=SPECULATED))
    ledger.observe_step(replace(REPORT, decision=replace(SPECULATED, probe=True, expected_tokens=3.5)))
    plain = Decision("goodput", "drafting_does_not_pay")  # no estimate: in none of the four sums
    ledger.observe_step(replace(REPORT, decision=plain, accepted=(0, 0), sent=(0, 0), nodes=0, speculated=False))
    get = Scrape(ledger)
    assert get("policy_steps_not_speculated_total", reason="drafting_does_not_pay") == 1
    assert get("policy_steps_not_speculated_total", reason="no_node_pays") == 0
    assert get("policy_nodes_chosen_count") == 6
    assert get("policy_nodes_chosen_sum") == 14
    assert get("policy_nodes_chosen_bucket", le="0.0") == 2
    assert get("policy_nodes_chosen_bucket", le="3.0") == 4
    assert get("policy_nodes_chosen_bucket", le="64.0") == 6
    assert get("policy_probes_total") == 1
    assert get("policy_predictions_total", decision="asked") == 2
    assert get("policy_predictions_total", decision="off") == 1
    assert get("policy_expected_tokens_total") == 8
    assert get("policy_expected_seconds_total") == pytest.approx(0.1)
    assert get("policy_realised_tokens_total") == 8
    assert get("policy_realised_seconds_total") == pytest.approx(0.09)


def test_labels_of_decisions_are_bounded() -> None:
    ledger = Ledger()
    odd = Decision("x", "odd reason", prediction="odd", fallback_policy="odd")
    for decision in (odd, replace(odd, not_speculated="odd too"), replace(odd, fallback_policy="likelihood")):
        ledger.observe_step(replace(REPORT, decision=decision))
    get = Scrape(ledger)
    assert get("policy_steps_not_speculated_total", reason="other") == 3
    assert get("policy_predictions_total", decision="other") == 3
    assert get("policy_fallback_steps_total", policy="other") == 2
    assert get("policy_fallback_steps_total", policy="likelihood") == 1
    for name, labels in (("steps_not_speculated", 6), ("predictions", 5), ("fallback_steps", 4)):
        assert len(get.labels(f"policy_{name}_total")) == labels


def test_the_policys_health_is_asked_once_per_scrape() -> None:
    ledger = Ledger()
    assert not Scrape(ledger).labels("policy_cost_error")  # nobody is bound: no number instead of a wrong one
    asked = []
    health = PolicyHealth({"greedy": 0.05, "sampled_low": math.nan}, 0.08, True, False)
    ledger.bind_policy(lambda: asked.append(1) or health)
    assert not asked
    get = Scrape(ledger)
    assert len(asked) == 1
    assert get("policy_calibration_error", **{"class": "greedy"}) == 0.05
    assert math.isnan(get("policy_calibration_error", **{"class": "sampled_low"}))
    assert get("policy_cost_error") == 0.08
    assert (get("policy_cost_drifted"), get("policy_profile_valid")) == (1, 0)
    ledger.bind_policy(lambda: PolicyHealth({}, 0.01, False, True))  # another policy took over
    get = Scrape(ledger)
    assert (get("policy_cost_error"), get("policy_cost_drifted"), get("policy_profile_valid")) == (0.01, 0, 1)
    assert not get.labels("policy_calibration_error")


def test_footprints_are_counted_by_layer_and_by_draft_nodes() -> None:
    ledger = Ledger()
    nodes = np.array([[8, 8, 8], [8, 8, 8], [6, 7, 8]])
    told = PredictedFootprint(
        rows=9, nodes=nodes, union_predicted=np.array([9, 10, 29]), union_actual=np.array([8, 11, 30])
    )
    ledger.observe_step(replace(REPORT, footprint=told))  # 7 draft nodes: at most 8
    ledger.observe_step(replace(REPORT, footprint=told, nodes=8))
    ledger.observe_step(replace(REPORT, footprint=None, nodes=9))
    none = np.zeros(3, np.int64)
    unknown = PredictedFootprint(rows=0, nodes=np.zeros((3, 3), np.int64), union_predicted=none, union_actual=none)
    ledger.observe_step(replace(REPORT, footprint=unknown, nodes=10**6))  # more than any label
    get = Scrape(ledger)
    assert [get("predicted_experts_by_layer_total", layer=layer) for layer in "012"] == [16, 16, 16]
    assert [get("actual_experts_by_layer_total", layer=layer) for layer in "012"] == [16, 16, 16]
    assert [get("predicted_and_actual_experts_by_layer_total", layer=layer) for layer in "012"] == [12, 14, 16]
    expected = {"8": (6, 100, 6, 96, 98), "16": (3, 50, 0, 0, 0), "65536": (3, 50, 0, 0, 0), "0": (0, 0, 0, 0, 0)}
    names = (
        "layer_steps_by_nodes",
        "distinct_experts_by_nodes",
        "predicted_layer_steps_by_nodes",
        "predicted_distinct_experts_by_nodes",
        "predicted_rows_distinct_experts_by_nodes",
    )
    assert {label: tuple(get(f"{n}_total", nodes=label) for n in names) for label in expected} == expected
    assert len(get.labels("layer_steps_by_nodes_total")) == 18


def test_time_against_plain_decoding_is_of_the_same_tokens() -> None:
    ledger = Ledger()
    # A plain step of both requests takes 30 ms and brings 2 tokens: the 4 tokens of this step would take 60 ms.
    ledger.observe_step(replace(REPORT, decision=replace(SPECULATED, plain_seconds=0.03)))
    ledger.observe_step(replace(REPORT, decision=SPECULATED))  # no estimate
    get = Scrape(ledger)
    assert get("policy_estimated_autoregressive_seconds_total") == pytest.approx(0.06)


def test_what_is_served_and_refused_is_there_from_the_start() -> None:
    ledger = Ledger()
    ledger.model.describe("a", "r1", "cpu", 4.8e12)
    ledger.model.describe("a", "r2", "cpu")
    ledger.observe_context_resent()
    get = Scrape(ledger)
    assert get.labels("model_info") == {(("device", "cpu"), ("model", "a"), ("revision", "r2"))}
    assert get("memory_bandwidth_bytes_per_second") == 0
    assert get("predictor_contexts_resent_total") == 1
    assert get("requests_refused_total", status="429") == 0
