"""Router traces in which the experts follow from the token and the one before it, so that a network can learn them and a
table of tokens cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.traces import TraceDocument, TraceWriter, document_id

GEOMETRY = TargetGeometry("tiny", "r1", 16, 12, 3, 8, 2)


def routes_of(tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """int16 [T, 3, 2]: layer 0 follows from the token alone, layer 1 from both tokens, layer 2 from the one before."""
    before = np.where(parents >= 0, tokens[parents], 0)
    first = np.stack([tokens % 8, (tokens + 4 * (before % 2)) % 8, before % 8], 1)
    return np.stack([first, (first + 1) % 8], 2).astype(np.int16)


def make_document(seed: int, rows: int = 40, drafts: bool = False, domain: str = "") -> TraceDocument:
    """drafts: after every fifth token two rejected ones hang in a chain."""
    random = np.random.default_rng(seed)
    parents, accepted, last = [-1], [True], 0
    while len(parents) < rows:
        if drafts and len(parents) % 7 == 5:
            parents += [last, len(parents)]
            accepted += [False, False]
        parents.append(last)
        accepted.append(True)
        last = len(parents) - 1
    above = np.array(parents, np.int32)
    tokens = random.integers(0, 16, len(above)).astype(np.int32)
    positions = np.zeros_like(above)
    for row in range(1, len(above)):
        positions[row] = positions[above[row]] + 1
    return TraceDocument(
        document_id(tokens), domain, tokens, positions, above, routes_of(tokens, above), np.array(accepted)
    )


def write_traces(
    directory: Path, documents: int = 60, drafts: bool = False, geometry: TargetGeometry = GEOMETRY
) -> None:
    with TraceWriter(directory, geometry, "test") as writer:
        for seed in range(documents):
            writer.add(make_document(seed, drafts=drafts, domain=("even", "odd")[seed % 2]))


def write_embeddings(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    save_file({"model.embed_tokens.weight": torch.randn(16, 12, generator=generator).bfloat16()}, path)


CONFIG = """
traces: {folder}/traces
out: {folder}/run
embeddings: {folder}/embeddings.safetensors
backbone: {{kind: small, hidden_size: 32, layers: 2, heads: 2, mlp_size: 64, context_tokens: 8}}
data: {{window_tokens: 16, draft_rows: 8}}
optimiser: {{learning_rate: 1e-2, warmup_steps: 5}}
training: {{epochs: 15, batch_windows: 8, precision: float32, device: cpu, threads: 1, evaluate_every_steps: 50, tensorboard: false}}
"""


def write_run_inputs(folder: Path, documents: int = 60, drafts: bool = False) -> Path:
    """Traces, embeddings and a configuration in `folder`; the path of the last."""
    write_traces(folder / "traces", documents, drafts)
    write_embeddings(folder / "embeddings.safetensors")
    path = folder / "predictor.yaml"
    path.write_text(CONFIG.format(folder=folder), encoding="utf-8")
    return path
