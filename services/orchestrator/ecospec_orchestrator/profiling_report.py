"""What a profile says, for people: the table and the sentence that `ecospec-orchestrator profile` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

import numpy as np

from .selection.cost import Profile, ProfileError, Sample, StepCost, StepFeatures, charges


def typical_steps(samples: Sequence[Sample]) -> tuple[StepFeatures, StepFeatures]:
    """Medians of plain and of speculated steps at the smallest batch size that has both; the speculated one asks the
    predictor. Raises ProfileError."""
    plain = [f for f, _ in samples if f.tokens == f.requests]
    speculated = [f for f, _ in samples if f.tokens > f.requests]
    sizes = {f.requests for f in plain} & {f.requests for f in speculated}
    if not sizes:
        raise ProfileError("Too few steps were measured to tell plain from speculated ones; measure for longer.")
    size = min(sizes)

    def median(steps: Sequence[StepFeatures], **changes: int) -> StepFeatures:
        chosen = [asdict(f) for f in steps if f.requests == size]
        return StepFeatures(
            **{k.name: int(np.median([f[k.name] for f in chosen])) for k in fields(StepFeatures)} | changes
        )

    # A plain step may have drafted for nothing, or asked: what it costs without is what speculation competes with.
    nothing = {"draft_levels": 0, "drafted_requests": 0, "fed_rows": 0, "predicted_requests": 0}
    return median(plain, **nothing), median(speculated, predicted_requests=size)


def report(profile: Profile, samples: Sequence[Sample]) -> str:
    """The coefficients, what they make up of typical steps, the error of the fit, and what follows."""
    plain, speculated = typical_steps(samples)
    plain_charges, speculated_charges = charges(profile.cost, plain), charges(profile.cost, speculated)
    plain_seconds, speculated_seconds = sum(plain_charges.values()), sum(speculated_charges.values())
    lines = [f"{'coefficient':<20}{'microseconds':>14}{'of a plain step':>18}{'of a speculated step':>23}"]
    for name, value in asdict(profile.cost).items():
        shares = plain_charges[name] / plain_seconds, speculated_charges[name] / speculated_seconds
        lines.append(f"{name:<20}{value * 1e6:>14.2f}{shares[0]:>18.1%}{shares[1]:>23.1%}")
    lines.append(
        f"{'the step':<20}{'':>14}{plain_seconds * 1e3:>15.1f} ms{speculated_seconds * 1e3:>20.1f} ms"
        f"   (batch {plain.requests}, {speculated.tokens - speculated.requests} nodes)"
    )
    q = profile.quality
    lines.append(
        f"Error on {q.samples} steps that the fit did not see (median; share of variance explained): "
        f"verification {q.verify_error:.1%} ({q.verify_r_squared:.2f}), drafting {q.draft_error:.1%} "
        f"({q.draft_r_squared:.2f}), whole step {q.step_error:.1%} ({q.step_r_squared:.2f})."
    )
    return "\n".join([*lines, conclusion(profile.cost, plain, speculated)])


def conclusion(cost: StepCost, plain: StepFeatures, speculated: StepFeatures) -> str:
    """When speculation pays on this machine, in one sentence; a plain step yields a token per request."""
    nodes = speculated.tokens - speculated.requests
    new_pairs = max(0, speculated.pairs - plain.pairs) / nodes
    plain_seconds = cost.total(plain)
    node = (cost.per_token + cost.per_pair * new_pairs) / plain_seconds
    needed = node * plain.requests
    drafting = (
        cost.draft(speculated.draft_levels, speculated.drafted_requests) + cost.feeding(speculated.fed_rows)
    ) / (plain_seconds)
    predicting = cost.predicting(speculated.predicted_requests) / plain_seconds
    pays = (
        f"pays when its probability is above about {needed:.2f}" if needed < 1 else "never pays, however likely it is"
    )
    return (
        f"At batch {plain.requests} a draft node costs about {node:.0%} of a plain step ({new_pairs:.0f} new experts, all layers "
        f"together), so it {pays}; the nodes of a step must also earn its drafting ({drafting:.0%} of a plain step) and, where "
        f"the predictor is asked, its answer ({predicting:.0%})."
    )
