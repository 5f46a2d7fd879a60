"""How good a predictor is on held-out documents, beside baselines made from the same training documents."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ecospec_proto.token_table import TokenTable
from ecospec_proto.traces import TraceReader

from ..errors import PredictorError
from ..networks import load_network
from .baselines import predictions
from .calibration import Calibration
from .data import split
from .objective import Objective
from .predictions import predict, sample, windows
from .processes import join
from .scores import Scores
from .unions import UnionScores, trees

BATCH_WINDOWS = 64
DRAFT_ROWS = 64  # rejected rows of one window, whatever the training took
PREDICTORS = ("predictor", "token_table", "previous_token", "popularity")


def evaluate(
    model_dir: Path, traces: Path, embeddings: Path | None, tokens: int, device: str = "auto"
) -> tuple[dict[str, Any], TokenTable]:
    """(figures, the token table that was the baseline) on about `tokens` held-out rows.

    The split is the one that the predictor was trained with. Raises PredictorError, SettingsError, TraceError.
    """
    reader = TraceReader(traces)
    geometry = reader.geometry
    try:
        network, config = load_network(model_dir, embeddings, geometry)
        note = config["training"]
        if missing := {"held_out_share", "window_tokens"} - note.keys():
            raise ValueError(f"its config.json does not tell {min(missing)}; train it again with this release.")
        share, window_tokens = float(note["held_out_share"]), int(note["window_tokens"])
    except (ValueError, KeyError, TypeError, OSError) as error:  # what broken files raise
        raise PredictorError(f"The model in {model_dir} cannot be evaluated: {error}") from None
    training, held_out = split(reader, share)
    sizes = [len(document.tokens) for document in held_out]
    if len(sizes) in (0, len(reader)):
        raise PredictorError(
            f"Of the {len(reader)} documents in {traces} {len(sizes)} are held out; some on both sides are needed."
        )
    table = TokenTable.build(training)
    scores = {name: Scores(geometry.moe_layers) for name in PREDICTORS}
    unions = {name: UnionScores(geometry.experts) for name in PREDICTORS}
    calibration, random = Calibration(), np.random.default_rng(0)
    documents = sample(held_out, sum(sizes), tokens)
    found = windows(documents, window_tokens, DRAFT_ROWS, network.config.max_context_tokens)
    scored = 0
    with join(device) as processes, tqdm(total=len(found), desc="evaluating", unit="windows", disable=None) as bar:
        objective = Objective(network.to(processes.device).eval())
        width = window_tokens + DRAFT_ROWS
        for window, rows, experts, mass in predict(objective, found, width, BATCH_WINDOWS, processes.device, False):
            bar.update()
            scored += len(rows)
            routes, depths = window.routes[rows], window.depths[rows]
            answers = {"predictor": experts, **predictions(table, window, rows)}
            calibration.add(experts, mass, routes)
            groups = list(trees(window, rows, random))
            for name, answer in answers.items():
                scores[name].add(answer, routes, depths, window.domain)
                for group in groups:
                    # all that can be copied before a tree is verified are the experts of the token before its root
                    known = group[:1].repeat(len(group)) if name == "previous_token" else group
                    unions[name].add(answer[known], routes[group])
    report = {
        "model": model_digest(model_dir),
        "version": str(note.get("version", "0")),
        "target": asdict(geometry),
        "fingerprint": geometry.fingerprint,
        "sources": list(reader.sources),
        "held_out_share": share,
        "documents": len(documents),
        "tokens": scored,
        "predictors": {name: scores[name].report() | unions[name].report() for name in PREDICTORS},
        "calibration": calibration.report(),
    }
    return report, table


def model_digest(model_dir: Path) -> str:
    """Names the weights: the first 32 hexadecimal digits of the SHA-256 of model.safetensors. Raises PredictorError."""
    try:
        with (model_dir / "model.safetensors").open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except OSError as error:
        raise PredictorError(f"The weights in {model_dir} cannot be read: {error}.") from None


def markdown(report: dict[str, Any]) -> str:
    """The figures as tables for a person."""
    predictors = report["predictors"]
    names = list(predictors)
    percent = lambda value: f"{100 * value:.1f} %"
    heads = {"predictor": "predictor", "token_table": "token table", "previous_token": "previous token"}
    title = [heads.get(name, name) for name in names]

    def table(first: str, rows: dict[str, list[float]]) -> list[str]:
        lines = [f"| {first} | {' | '.join(title)} |", f"|---|{'---|' * len(names)}"]
        return lines + [f"| {row} | {' | '.join(map(percent, values))} |" for row, values in rows.items()]

    across = lambda key: [predictors[name][key] for name in names]

    def parts(key: str) -> dict[str, list[float]]:
        return {row or "(none)": [predictors[n][key][row] for n in names] for row in predictors["predictor"][key]}

    layers = {
        str(at): [predictors[n]["by_layer"][at] for n in names]
        for at in range(len(predictors["predictor"]["by_layer"]))
    }
    overall = {
        f"top-{report['target']['top_k']} accuracy": across("accuracy"),
        "union recall": across("union_recall"),
        "union precision": across("union_precision"),
    }
    calibration = report["calibration"]
    bins = [
        f"| {b['from']:.1f} to {b['to']:.1f} | {b['predictions']} | {percent(b['predicted'])} | {percent(b['observed'])} |"
        for b in calibration["bins"]
    ]
    return "\n".join(
        [
            f"{report['tokens']} held-out tokens of {report['documents']} documents; target {report['target']['name']}, "
            f"revision {report['target']['revision']}.",
            "",
            *table("", overall),
            "",
            *table("domain", parts("by_domain")),
            "",
            "Depth is the distance of a rejected draft token from the text; 0 is the text itself.",
            "",
            *table("depth", parts("by_depth")),
            "",
            *table("MoE layer", layers),
            "",
            f"Calibration: expected calibration error {calibration['expected_calibration_error']:.3f}.",
            "",
            "| predicted probability | predictions | predicted | observed |",
            "|---|---|---|---|",
            *bins,
            "",
        ]
    )
