"""The expert predictor: a small decoder LM over the target's token embeddings that answers, in one shot, with the router
logits of every MoE layer (paper section 3.1: a small decoder LM, target embeddings projected to its own width).

It is tree-aware: a draft node attends to the context and to its ancestors only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from ecospec_proto.geometry import TargetGeometry

from .base import Query

FORMAT_VERSION = 1
ROW_MULTIPLE = 8  # ragged sizes are padded: every new shape costs a kernel compilation


@dataclass(frozen=True)
class PredictorConfig:
    hidden_size: int
    layers: int
    heads: int
    mlp_size: int
    max_context_tokens: int  # tokens up to and including the root that it looks at
    rope_theta: float = 1e4


class Block(nn.Module):
    def __init__(self, c: PredictorConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.attention_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.qkv = nn.Linear(c.hidden_size, 3 * c.hidden_size, bias=False)
        self.out = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.up = nn.Linear(c.hidden_size, c.mlp_size, bias=False)
        self.down = nn.Linear(c.mlp_size, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        q, k, v = (
            _apply(self.qkv, F.rms_norm(x, (size,), self.attention_norm))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, attn_mask=mask[:, None]
        )
        x = x + _apply(self.out, attended.transpose(1, 2).flatten(2))
        return x + _apply(self.down, F.gelu(_apply(self.up, F.rms_norm(x, (size,), self.mlp_norm))))


def _apply(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The product in the weight's own dtype; the residual stream stays float32."""
    return layer(x.to(layer.weight.dtype))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


class ExpertPredictor(nn.Module):
    """Embeddings are the target's own table (bfloat16 [vocabulary, target hidden]); it is not part of the checkpoint."""

    embeddings: torch.Tensor

    def __init__(self, config: PredictorConfig, geometry: TargetGeometry, embeddings: torch.Tensor) -> None:
        super().__init__()
        if tuple(embeddings.shape) != (geometry.vocab_size, geometry.hidden_size):
            raise ValueError(
                f"the embedding table has shape {tuple(embeddings.shape)}, but this predictor was trained for a target with "
                f"shape ({geometry.vocab_size}, {geometry.hidden_size}); give the embeddings of {geometry.name}."
            )
        self.config, self.geometry = config, geometry
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.embedding_norm = nn.Parameter(torch.ones(geometry.hidden_size))
        self.project = nn.Linear(geometry.hidden_size, config.hidden_size, bias=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.router = nn.Linear(config.hidden_size, geometry.moe_layers * geometry.experts)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """tokens, positions: int64 [B, T]; mask: bool [B, T, T], True where a row may look.

        Returns hidden states [B, T, hidden]; logits() turns rows into router logits.
        """
        x = self.embeddings[tokens].float()
        x = _apply(self.project, F.rms_norm(x, x.shape[-1:], self.embedding_norm)).float()
        half = self.config.hidden_size // self.config.heads // 2
        frequency = self.config.rope_theta ** (-torch.arange(half) / half)
        angle = positions[..., None].float() * frequency
        cos, sin = (torch.cat([a, a], -1)[:, None] for a in (angle.cos(), angle.sin()))
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return F.rms_norm(x, x.shape[-1:], self.norm)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n, hidden] -> router logits [n, layers, experts]."""
        return _apply(self.router, rows).unflatten(-1, (self.geometry.moe_layers, self.geometry.experts))

    def save(self, directory: Path, note: dict[str, object]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        save_file({k: v.bfloat16().contiguous() for k, v in self.state_dict().items()}, directory / "model.safetensors")
        config = {
            "model_type": "ecospec_expert_predictor",
            "format_version": FORMAT_VERSION,
            "predictor": asdict(self.config),
            "target": asdict(self.geometry),
            "training": note,
        }
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class LoadedExpertModel:
    """Serves an ExpertPredictor through the service's ExpertModel interface."""

    def __init__(self, network: ExpertPredictor, version: str) -> None:
        self.network, self.version = network.eval(), version
        self.geometry, self.max_context_tokens = network.geometry, network.config.max_context_tokens

    @torch.inference_mode()
    def predict(self, queries: Sequence[Query]) -> list[np.ndarray]:
        """One array per query: uint8 (uint16 above 256 experts) [1 + nodes, layers, top_k], row 0 the root."""
        contexts = [np.asarray(q.context_tokens)[-self.max_context_tokens :] for q in queries]
        sizes = [len(c) + len(q.draft_tokens) for c, q in zip(contexts, queries, strict=True)]
        width = -(-max(sizes) // ROW_MULTIPLE) * ROW_MULTIPLE
        tokens = np.zeros((len(queries), width), np.int64)
        positions = np.zeros((len(queries), width), np.int64)
        mask = np.zeros((len(queries), width, width), bool)
        mask[:, np.arange(width), np.arange(width)] = True
        rows: list[np.ndarray] = []
        for i, (context, query) in enumerate(zip(contexts, queries, strict=True)):
            c = len(context)
            tokens[i, :c], tokens[i, c : c + len(query.draft_tokens)] = context, query.draft_tokens
            positions[i, :c] = np.arange(c)
            mask[i, :c, :c] = np.tri(c, dtype=bool)
            for node, parent in enumerate(query.parents):
                at, above = c + node, c + int(parent) if parent >= 0 else c - 1
                positions[i, at] = positions[i, above] + 1
                mask[i, at] |= mask[i, above]
            rows.append(i * width + c - 1 + np.arange(1 + len(query.draft_tokens)))
        hidden = self.network(torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(mask))
        logits = self.network.logits(hidden.flatten(0, 1)[torch.from_numpy(np.concatenate(rows))])
        dtype = np.uint8 if self.geometry.experts <= 256 else np.uint16
        chosen = logits.topk(self.geometry.top_k).indices.numpy().astype(dtype)
        return np.split(chosen, np.cumsum([len(r) for r in rows])[:-1])


def load_embeddings(path: Path) -> torch.Tensor:
    """The target's token embedding table from a GGUF file: bfloat16 [vocabulary, hidden]."""
    import gguf

    for tensor in gguf.GGUFReader(str(path)).tensors:
        if tensor.name == "token_embd.weight":
            return torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=torch.bfloat16)
    raise ValueError(f"{path} holds no tensor token_embd.weight; give the GGUF file that the target is made from.")


def load_model(model_dir: Path, embeddings: Path, threads: int) -> LoadedExpertModel:
    """Load a checkpoint directory. Raises ValueError (one sentence) when it is of another format or geometry."""
    torch.set_num_threads(threads)
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{model_dir} holds no config.json; give a directory written by the predictor's training."
        ) from None
    if config.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{model_dir} has format_version {config.get('format_version')!r}; this release reads {FORMAT_VERSION}: train it again."
        )
    geometry = TargetGeometry(**config["target"])
    network = ExpertPredictor(PredictorConfig(**config["predictor"]), geometry, load_embeddings(embeddings))
    network.load_state_dict({k: v.float() for k, v in load_file(model_dir / "model.safetensors").items()})
    model = LoadedExpertModel(network, version=str(config["training"].get("version", "0")))
    _use_faster_dtype(model)
    return model


def _use_faster_dtype(model: LoadedExpertModel) -> None:
    """bfloat16 weights are twice as fast where the CPU multiplies them and far slower elsewhere: try both on a typical tree."""
    query = Query(np.zeros(model.max_context_tokens, np.int64), np.zeros(10, np.int64), np.arange(10) // 2 - 1)
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        _set_dtype(model.network, dtype)
        model.predict([query])
        began = time.perf_counter()
        for _ in range(3):
            model.predict([query])
        seconds[dtype] = time.perf_counter() - began
    _set_dtype(model.network, min(seconds, key=lambda dtype: seconds[dtype]))


def _set_dtype(network: ExpertPredictor, dtype: torch.dtype) -> None:
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
