"""Which experts steps read, which were predicted, and what the policy made of it."""

from __future__ import annotations

from typing import Any

from .panels import GREEN, RED, YELLOW, Query, course, curve, map_of_layers, number, page
from .queries import ALL, mean, quantile, rate, ratio, sortable_layers

DISTINCT = "ecospec_distinct_experts_per_layer_step"
RECALL = ratio(rate("ecospec_predicted_and_actual_experts_total"), rate("ecospec_actual_experts_total"))
PRECISION = ratio(rate("ecospec_predicted_and_actual_experts_total"), rate("ecospec_predicted_experts_total"))


def _by(label: str, above: str, below: str) -> str:
    return ratio(rate(above, label, window=ALL), rate(below, label, window=ALL))


def _glance() -> list[Any]:
    union = ratio(
        rate("ecospec_predicted_distinct_experts_by_nodes_total"),
        rate("ecospec_predicted_rows_distinct_experts_by_nodes_total"),
    )
    steps = rate("ecospec_steps_total")
    return [
        number(
            "Distinct experts", "Routed experts that a step reads in one layer, on average.", "none", mean(DISTINCT)
        ),
        number(
            "Recall",
            "Share of the experts that verified nodes used which had been predicted.",
            "percentunit",
            RECALL,
            (None, RED),
            (0.5, YELLOW),
            (0.8, GREEN),
        ),
        number("Precision", "Share of the predicted experts that were used.", "percentunit", PRECISION),
        number(
            "Predicted over actual",
            "Distinct experts predicted for the rows of a step, over those that the same rows used: above 1, nodes look dearer "
            "than they are; below 1, cheaper.",
            "none",
            union,
        ),
        number(
            "Draft nodes per step",
            "Draft nodes that a decode step verifies, all requests together.",
            "none",
            ratio(rate("ecospec_spec_decode_num_draft_tokens_total"), steps),
        ),
        number(
            "Steps that speculate",
            "Share of the decode steps that verify draft nodes.",
            "percentunit",
            ratio(rate("ecospec_steps_total", speculated="true"), steps),
        ),
    ]


def _against_nodes() -> list[Any]:
    layers, predicted = "ecospec_layer_steps_by_nodes_total", "ecospec_predicted_layer_steps_by_nodes_total"
    return [
        curve(
            "Distinct experts against draft nodes",
            "Experts of one layer of one step, by the step's draft nodes (at most so many), over the whole time range: read, and "
            "for the rows with a prediction, roots included, predicted and used.",
            "none",
            "nodes",
            Query(_by("nodes", "ecospec_distinct_experts_by_nodes_total", layers), "read"),
            Query(_by("nodes", "ecospec_predicted_distinct_experts_by_nodes_total", predicted), "predicted"),
            Query(
                _by("nodes", "ecospec_predicted_rows_distinct_experts_by_nodes_total", predicted), "used by these rows"
            ),
        ),
        course(
            "Distinct experts per layer and step",
            "How many routed experts a step reads in one layer.",
            "none",
            Query(mean(DISTINCT), "mean"),
            *(Query(quantile(share, DISTINCT), f"p{100 * share:g}") for share in (0.5, 0.9, 0.99)),
        ),
    ]


def _by_layer() -> list[Any]:
    both, actual = "ecospec_predicted_and_actual_experts_by_layer_total", "ecospec_actual_experts_by_layer_total"
    experts = ratio(rate("ecospec_distinct_experts_by_layer_total", "layer"), rate("ecospec_steps_total"), shared=True)
    return [
        map_of_layers(
            "Distinct experts by layer",
            "Routed experts that a step reads in each MoE layer, on average.",
            "none",
            sortable_layers(experts),
        ),
        map_of_layers(
            "Recall by layer over time",
            "Share of the experts that verified nodes used in a layer which had been predicted.",
            "percentunit",
            sortable_layers(ratio(rate(both, "layer"), rate(actual, "layer"))),
        ),
        curve(
            "Recall and precision by layer",
            "Of all verified nodes with a prediction in the time range: used experts that were predicted, and predicted experts "
            "that were used.",
            "percentunit",
            "layer",
            Query(_by("layer", both, actual), "recall"),
            Query(_by("layer", both, "ecospec_predicted_experts_by_layer_total"), "precision"),
        ),
        course(
            "Predicted and actual experts of a node",
            "Recall and precision of all layers together.",
            "percentunit",
            Query(RECALL, "recall"),
            Query(PRECISION, "precision"),
            most=1,
        ),
    ]


def _decisions() -> list[Any]:
    return [
        course(
            "Steps by decision",
            "Decode steps that verified drafts, and those that did not, by the policy's reason.",
            "ops",
            Query(rate("ecospec_steps_total", speculated="true"), "speculated"),
            Query(rate("ecospec_policy_steps_not_speculated_total", "reason"), "{{reason}}"),
            stacked=True,
        ),
        course(
            "Questions to the predictor",
            "Steps by what the policy decided about asking: asked, or why not.",
            "ops",
            Query(rate("ecospec_policy_predictions_total", "decision"), "{{decision}}"),
            stacked=True,
        ),
        course(
            "Expected and realised speed",
            "Tokens per second of busy time that the policy expected of its steps, and that came of them.",
            "none",
            Query(
                ratio(rate("ecospec_policy_expected_tokens_total"), rate("ecospec_policy_expected_seconds_total")),
                "expected",
            ),
            Query(
                ratio(rate("ecospec_policy_realised_tokens_total"), rate("ecospec_policy_realised_seconds_total")),
                "realised",
            ),
        ),
        course(
            "Looks and stand-ins",
            "Steps that drafted only to see whether it pays again, and steps that another policy decided for want of a valid cost "
            "profile.",
            "ops",
            Query(rate("ecospec_policy_probes_total"), "probes"),
            Query(rate("ecospec_policy_fallback_steps_total", "policy"), "decided by {{policy}}"),
        ),
    ]


def footprint() -> Any:
    return page(
        "footprint",
        "EcoSpec / Expert footprint",
        "Distinct experts per layer and step, predicted against actual, and the decisions that follow.",
        ("At a glance", _glance()),
        ("Experts against draft nodes", _against_nodes()),
        ("By layer", _by_layer()),
        ("Goodput decisions", _decisions()),
    )
