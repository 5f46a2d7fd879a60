"""A trained predictor as a directory that can be served and handed on: weights, configuration, model card, figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.token_table import TableError, TokenTable

from ..errors import PredictorError
from ..networks import read_checkpoint_config, require_geometry
from .evaluate import markdown, model_digest

WEIGHTS, EVALUATION, TABLE = "model.safetensors", "evaluation.json", "token_table.safetensors"


def export(run: Path, out: Path, licence: str, data_source: str, geometry: TargetGeometry | None = None) -> None:
    """run: a training run's directory that `eval` has been through. geometry: the target it is meant for.

    Raises PredictorError when parts of it belong to another target or to other weights, and for an `out` that holds
    another target's predictor.
    """
    best = run / "best"
    try:
        config, trained_for = read_checkpoint_config(best)
        if geometry is not None:
            require_geometry(best, trained_for, geometry)
        if (out / "config.json").exists():
            require_geometry(out, read_checkpoint_config(out)[1], trained_for)
        table = TokenTable.load(run / TABLE, trained_for)
    except TableError as error:
        raise PredictorError(f"{error} Run `ecospec-predictor eval {run}` first.") from None
    except ValueError as error:
        raise PredictorError(f"The predictor cannot be exported: {error}") from None
    report = _evaluation(run, trained_for, model_digest(best))
    out.mkdir(parents=True, exist_ok=True)
    table.save(out / TABLE)
    (out / EVALUATION).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(card(config, report, licence, data_source), encoding="utf-8")
    shutil.copyfile(best / WEIGHTS, out / WEIGHTS)
    shutil.copyfile(best / "config.json", out / "config.json")  # last: it makes the directory a checkpoint


def _evaluation(run: Path, geometry: TargetGeometry, digest: str) -> dict[str, Any]:
    path = run / EVALUATION
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        found = (report["fingerprint"], report["model"])
    except FileNotFoundError:
        raise PredictorError(f"{run} holds no {EVALUATION}; run `ecospec-predictor eval {run}` first.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PredictorError(f"{path} cannot be read: {error}; run `ecospec-predictor eval {run}` again.") from None
    if found != (geometry.fingerprint, digest):
        raise PredictorError(
            f"{path} is of the target {found[0]!r:.40} and the weights {found[1]!r:.40}, but this predictor is of "
            f"{geometry.fingerprint} and {digest}; run `ecospec-predictor eval {run}` again."
        )
    return report


def card(config: dict[str, Any], report: dict[str, Any], licence: str, data_source: str) -> str:
    """The model card, Markdown."""
    target, note = config["target"], config["training"]
    sizes = ", ".join(f"{k} {v}" for k, v in config["predictor"].items() if not isinstance(v, dict))
    return "\n".join(
        [
            "---",
            f"license: {licence}",
            "tags: [expert-prediction, speculative-decoding, mixture-of-experts]",
            "---",
            f"# Expert predictor for {target['name']}",
            "",
            f"Names the {target['top_k']} of {target['experts']} experts that a token will use in each of "
            f"{target['moe_layers']} MoE layers of {target['name']}, revision {target['revision']} (fingerprint "
            f"{report['fingerprint']}). For this target only: another one is refused when it is loaded.",
            "",
            f"Network: {sizes}.",
            f"Version {note['version']}. Licence: {licence}.",
            "",
            "## Data",
            data_source,
            f"Router traces by {', '.join(note['sources'])}: {note['training_tokens']} tokens of "
            f"{note['training_documents']} documents for training, {note['held_out_tokens']} of "
            f"{note['held_out_documents']} held out; no document is on both sides.",
            "",
            "## Training",
            f"    {note['command']}",
            "",
            f"{note['steps']} steps, {note['epochs']} epochs, {note['tokens_seen']} tokens seen.",
            "",
            "## Figures",
            markdown(report),
        ]
    )
