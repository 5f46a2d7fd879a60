"""The trained expert predictor behind the service's ExpertModel interface: loaded from its directory, and run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ecospec_proto.geometry import TargetGeometry

from .base import Query
from .hf_model import HfExpertModel
from .hf_network import HfExpertPredictor
from .network import ExpertPredictor
from .networks import load_network
from .packed import Kept, PackedPredictor, plan

# One core, the demo's predictor: a row costs 87 us in a run of 12, 47 us in one of 250 and 43 us in one of 990.
MAX_ROWS = 256


class LoadedExpertModel:
    """Serves an ExpertPredictor through the service's ExpertModel interface."""

    def __init__(self, network: ExpertPredictor, version: str, dtype: torch.dtype = torch.float32) -> None:
        self.version, self.packed = version, PackedPredictor(network, dtype)
        self.geometry, self.max_context_tokens = network.geometry, network.config.max_context_tokens
        c, self.max_rows = network.config, MAX_ROWS
        self.session_bytes = c.layers * 2 * c.max_context_tokens * c.hidden_size * 4

    @torch.inference_mode()
    def predict(self, queries: Sequence[Query]) -> list[np.ndarray]:
        """One array per query: uint8 (uint16 above 256 experts) [1 + nodes, layers, top_k], row 0 the root."""
        plans = [plan(query, self.max_context_tokens) for query in queries]
        experts, kept = self.packed.predict(plans)
        for query, keys_values in zip(queries, kept, strict=True):
            session = query.session
            if session is not None and (session.state is None or session.state.end <= query.length):
                session.state = Kept(keys_values.copy(), query.length)
        return np.split(experts, np.cumsum([1 + len(query.draft_tokens) for query in queries])[:-1])


def load_model(
    model_dir: Path,
    embeddings: Path | None,
    threads: int,
    geometry: TargetGeometry | None = None,
    device: str = "auto",
) -> LoadedExpertModel | HfExpertModel:
    """Load a checkpoint directory. device: auto, cpu, cuda or cuda:N, for a Hugging Face backbone; a small predictor runs on the
    CPU. Raises ValueError (one sentence) when it is of another format, or of another target than `geometry`, or for a device
    that is not there."""
    torch.set_num_threads(threads)
    where = _device_of(device)
    network, config = load_network(model_dir, embeddings, geometry)
    version = str(config["training"].get("version", "0"))
    if isinstance(network, HfExpertPredictor):
        return HfExpertModel(network, version, where)
    if device not in ("auto", "cpu"):
        raise ValueError(f"device is {device!r}, but a small predictor runs on the CPU; set auto or cpu.")
    return min((LoadedExpertModel(network, version, dtype) for dtype in (torch.bfloat16, torch.float32)), key=_seconds)


def _device_of(setting: str) -> torch.device:
    devices = torch.cuda.device_count()  # 0 where torch is built without CUDA
    if setting == "auto":
        return torch.device("cuda" if devices else "cpu")
    device = torch.device(setting)
    if device.type == "cuda" and (device.index or 0) >= devices:
        raise ValueError(
            f"device is {setting!r}, but torch {torch.__version__} finds {devices} CUDA devices here, numbered from 0; set one of "
            "them, auto or cpu."
        )
    return device


def _seconds(model: LoadedExpertModel) -> float:
    """bfloat16 is twice as fast where the CPU multiplies it and far slower elsewhere: both are tried on a typical tree."""
    query = Query(np.zeros(model.max_context_tokens, np.int64), np.zeros(10, np.int64), np.arange(10) // 2 - 1)
    model.predict([query])
    began = time.perf_counter()
    for _ in range(3):
        model.predict([query])
    return time.perf_counter() - began
