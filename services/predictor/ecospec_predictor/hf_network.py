"""An expert predictor on the decoder of any Hugging Face causal language model: hidden states, a norm, one linear head.

It has the methods of network.ExpertPredictor. The backbone embeds the tokens with its own table, so its vocabulary must be
the target's (Qwen3-0.6B has that of Qwen3-235B).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from ecospec_proto.geometry import TargetGeometry

from .network import ExpertPredictor


@dataclass(frozen=True)
class HfConfig:
    """backbone: the config.json of the Hugging Face model, so that a checkpoint needs no other directory."""

    kind: Literal["hf"]
    backbone: dict[str, Any]
    max_context_tokens: int


class HfExpertPredictor(nn.Module):
    def __init__(self, config: HfConfig, geometry: TargetGeometry, backbone: nn.Module | None = None) -> None:
        """backbone: with its weights; built with random ones where missing. Raises ValueError for another vocabulary."""
        from transformers import AutoConfig, AutoModel

        super().__init__()
        self.config, self.geometry = config, geometry
        values = dict(config.backbone)
        hf_config = AutoConfig.for_model(values.pop("model_type"), **values)
        size = hf_config.get_text_config().vocab_size
        if size != geometry.vocab_size:
            raise ValueError(
                f"the backbone {config.backbone['model_type']} has a vocabulary of {size} tokens, but {geometry.name} has "
                f"{geometry.vocab_size}; choose a backbone with the target's own vocabulary."
            )
        self.backbone = backbone if backbone is not None else AutoModel.from_config(hf_config)
        hidden = hf_config.get_text_config().hidden_size
        self.norm = nn.Parameter(torch.ones(hidden))
        self.router = nn.Linear(hidden, geometry.moe_layers * geometry.experts)

    @classmethod
    def from_pretrained(cls, path: Path, geometry: TargetGeometry, max_context_tokens: int) -> HfExpertPredictor:
        """path: a model directory. Nothing is downloaded and none of its code is run. Raises ValueError or OSError."""
        from transformers import AutoConfig, AutoModel

        if not (path / "config.json").is_file():
            raise ValueError(f"{path} holds no config.json; give the directory of a Hugging Face model.")
        hf_config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        config = HfConfig("hf", hf_config.to_dict(), max_context_tokens)
        size = hf_config.get_text_config().vocab_size
        if size != geometry.vocab_size:
            return cls(config, geometry)  # refuses before the weights are read
        backbone = AutoModel.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, dtype=torch.float32, use_safetensors=True
        )
        return cls(config, geometry, backbone)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """tokens, positions: int64 [B, T]; mask: bool [B, T, T], True where a row may look -> float32 [B, T, hidden]."""
        dtype = next(self.backbone.parameters()).dtype
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        hidden = self.backbone(
            input_ids=tokens, position_ids=positions, attention_mask=bias[:, None], use_cache=False
        ).last_hidden_state.float()
        return F.rms_norm(hidden, hidden.shape[-1:], self.norm)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n, hidden] -> router logits [n, layers, experts]."""
        return self.router(rows.to(self.router.weight.dtype)).unflatten(
            -1, (self.geometry.moe_layers, self.geometry.experts)
        )

    save = ExpertPredictor.save  # the same files
