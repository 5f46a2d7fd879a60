"""A network's answers for windows of held-out text, in the order of their scored rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ecospec_proto.traces import TraceDocument

from .data import Part, Window, cut, pack, unit_hash
from .objective import Objective, collate


def sample(held_out: Part, rows: int, tokens: int) -> list[TraceDocument]:
    """Held-out documents with about `tokens` of their `rows` rows, the same ones every time."""
    share = tokens / max(rows, 1)
    found = [document for document in held_out if unit_hash(document.document_id, "sample") < share]
    return found or [next(iter(held_out))]


def windows(documents: Sequence[TraceDocument], window_tokens: int, draft_rows: int, context: int) -> list[Window]:
    """Each row is scored once, with at least half the predictor's context before it where the text has that much."""
    return [
        window
        for document in documents
        for window in cut(document, window_tokens, draft_rows, context=min(context, window_tokens - 1) // 2)
    ]


@torch.no_grad()
def predict(
    objective: Objective, found: Sequence[Window], width: int, batch: int, device: torch.device, bfloat16: bool
) -> Iterator[tuple[Window, np.ndarray, np.ndarray, np.ndarray]]:
    """(window, its scored rows with known routes [n], predicted experts [n, layers, top_k], their share of the router's
    mass float32 [n, layers, top_k]); one batch at a time."""
    k, reach = objective.network.geometry.top_k, objective.network.config.max_context_tokens
    rows = list(pack(iter(found), width))
    for at in range(0, len(rows), batch):
        packed = rows[at : at + batch]
        with torch.device(device), torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            _, logits = objective(collate(packed, width, reach).to(device))
        mass, chosen = logits.softmax(-1).topk(k)
        mass, chosen = mass.cpu().numpy(), chosen.cpu().numpy()
        start = 0
        for window in (w for windows_of_row in packed for w in windows_of_row):
            scored = np.flatnonzero(window.known.any(1))
            part = slice(start, start + len(scored))
            start = part.stop
            yield window, scored, chosen[part], mass[part]
