"""What is drafted, chosen and accepted, whether it pays, and how good the policy's estimates are."""

from __future__ import annotations

from typing import Any

from .panels import GREEN, RED, YELLOW, Query, course, number, page
from .queries import mean, quantile, rate, ratio, value

DRAFTS = rate("ecospec_spec_decode_num_drafts_total")
SENT = rate("ecospec_spec_decode_num_draft_tokens_total")
ACCEPTED = rate("ecospec_spec_decode_num_accepted_tokens_total")
STEPS = rate("ecospec_steps_total")
SPEED_UP = ratio(
    rate("ecospec_policy_estimated_autoregressive_seconds_total"), rate("ecospec_policy_realised_seconds_total")
)
LENGTH = f"1 + {ratio(ACCEPTED, DRAFTS)}"
NODES = "ecospec_policy_nodes_chosen"


def _glance() -> list[Any]:
    return [
        number("Acceptance length", "Tokens of a request's speculated step, the bonus token included.", "none", LENGTH),
        number(
            "Acceptance rate",
            "Share of the verified draft tokens that were accepted.",
            "percentunit",
            ratio(ACCEPTED, SENT),
        ),
        number("Nodes chosen", "Draft nodes that a request's step verifies.", "none", mean(NODES)),
        number(
            "Steps not speculated",
            "Share of the decode steps that verify no drafts.",
            "percentunit",
            ratio(rate("ecospec_steps_total", speculated="false"), STEPS),
        ),
        number(
            "Speed-up",
            "Estimated time of the same tokens in plain decoding, by the cost model, over the time that they took.",
            "none",
            SPEED_UP,
            (None, RED),
            (0.98, YELLOW),
            (1.0, GREEN),
        ),
        number(
            "Cost error",
            "Median relative error of the predicted step time in recent steps; the worst instance.",
            "percentunit",
            value("ecospec_policy_cost_error", how="max"),
            (None, GREEN),
            (0.2, YELLOW),
            (0.4, RED),
        ),
    ]


def _acceptance() -> list[Any]:
    return [
        course(
            "Acceptance length",
            "Tokens of a request's speculated step, and the draft tokens that were verified for it.",
            "none",
            Query(LENGTH, "tokens"),
            Query(ratio(SENT, DRAFTS), "draft tokens verified"),
        ),
        course(
            "Acceptance by position",
            "Share of the speculated steps in which the draft token at this depth was accepted; the first is 0.",
            "percentunit",
            Query(
                ratio(rate("ecospec_spec_decode_num_accepted_tokens_per_pos_total", "position"), DRAFTS, shared=True),
                "depth {{position}}",
            ),
            most=1,
        ),
        course(
            "Nodes chosen",
            "Draft nodes that a request's step verifies.",
            "none",
            Query(mean(NODES), "mean"),
            *(Query(quantile(share, NODES), f"p{100 * share:g}") for share in (0.5, 0.9)),
        ),
        course(
            "Steps not speculated, and why",
            "Share of the decode steps that verified no drafts, by the policy's reason.",
            "percentunit",
            Query(ratio(rate("ecospec_policy_steps_not_speculated_total", "reason"), STEPS, shared=True), "{{reason}}"),
            stacked=True,
            most=1,
        ),
    ]


def _worth() -> list[Any]:
    return [
        course(
            "Against plain decoding",
            "Estimated time of plain decoding over the time taken, and estimated bytes of plain decoding over the bytes read: above "
            "1, speculation pays.",
            "none",
            Query(SPEED_UP, "time"),
            Query(
                ratio(rate("ecospec_estimated_bytes_autoregressive_total"), rate("ecospec_bytes_read_total")), "bytes"
            ),
        ),
        course(
            "Time of a step by phase",
            "Mean time of a decode step; predict only in steps that asked.",
            "s",
            Query(
                ratio(
                    rate("ecospec_step_seconds_sum", "phase", phase="~draft|predict|select|verify"),
                    rate("ecospec_step_seconds_count", "phase", phase="~draft|predict|select|verify"),
                ),
                "{{phase}}",
            ),
            stacked=True,
        ),
        course(
            "Time of a step",
            "Whole decode steps.",
            "s",
            *(
                Query(quantile(share, "ecospec_step_seconds", phase="total"), f"p{100 * share:g}")
                for share in (0.5, 0.9, 0.99)
            ),
        ),
        course(
            "Tokens per step",
            "Tokens that a decode step brings, all its requests together.",
            "none",
            Query(ratio(rate("ecospec_step_tokens_total"), STEPS), "tokens"),
        ),
    ]


def _calibration() -> list[Any]:
    return [
        course(
            "Calibration error",
            "Mean absolute difference of predicted and observed acceptance in recent steps, by class of temperature.",
            "percentunit",
            Query(value("ecospec_policy_calibration_error", "class", how="avg"), "{{class}}"),
        ),
        course(
            "Cost model",
            "Median relative error of the predicted step time in recent steps, and whether times left the profile behind.",
            "none",
            Query(value("ecospec_policy_cost_error", how="max"), "error"),
            Query(value("ecospec_policy_cost_drifted", how="max"), "drifted"),
            Query(value("ecospec_policy_profile_valid", how="min"), "profile valid"),
        ),
        course(
            "Expected over realised",
            "Tokens and seconds that the policy expected of its steps, over what came of them: 1 is right.",
            "none",
            Query(
                ratio(rate("ecospec_policy_expected_tokens_total"), rate("ecospec_policy_realised_tokens_total")),
                "tokens",
            ),
            Query(
                ratio(rate("ecospec_policy_expected_seconds_total"), rate("ecospec_policy_realised_seconds_total")),
                "seconds",
            ),
        ),
    ]


def speculation() -> Any:
    return page(
        "speculation",
        "EcoSpec / Speculation",
        "Acceptance, the nodes chosen, steps not speculated and why, and calibration.",
        ("At a glance", _glance()),
        ("Acceptance", _acceptance()),
        ("Does it pay", _worth()),
        ("Calibration", _calibration()),
    )
