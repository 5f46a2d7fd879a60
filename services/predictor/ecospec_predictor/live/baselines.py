"""How good each model was when it was trained: what live accuracy is compared with."""

from __future__ import annotations

import json
import math
from pathlib import Path

from ..base import ExpertModel
from ..versions import Load

# In order. Not that of held-out answers to the training's own kind of questions: live text is wider.
NAMES = ("held_out_top_k_accuracy", "held_out_documents_top_k_accuracy")


def baseline_in(directory: Path) -> float | None:
    """The held-out top-k accuracy in a model directory's config.json, 0 to 1; None when it tells none."""
    try:
        training = json.loads((directory / "config.json").read_text(encoding="utf-8"))["training"]
        found = next(training[name] for name in NAMES if name in training)
        return float(found) if math.isfinite(found) and 0 <= found <= 1 else None
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None


class Baselines:
    """Remembers them while models are loaded, in any thread, since a model itself does not know where it came from."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], float | None] = {}

    def remember(self, load: Load) -> Load:
        def load_and_remember(directory: Path, embeddings: Path | None) -> ExpertModel:
            model = load(directory, embeddings)
            self._known[model.geometry.fingerprint, model.version] = baseline_in(directory)
            return model

        return load_and_remember

    def get(self, model: ExpertModel) -> float | None:
        return self._known.get((model.geometry.fingerprint, model.version))
