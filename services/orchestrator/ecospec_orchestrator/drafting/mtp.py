"""Drafting with DeepSeek's multi-token prediction (MTP) module: a chain of `depth` draft forwards of one module.

The checkpoint stores the module as layer num_hidden_layers, behind the target's own: enorm, hnorm, eh_proj, a whole decoder layer
(latent attention, routed and shared experts) and shared_head.norm. Its embed_tokens and shared_head.head are copies of the
target's, which are used instead. Forward at position p, from a hidden state h of position p and the token of p + 1:

    x = eh_proj([enorm(embed_tokens(token)), hnorm(h)]);  h' = shared_head.norm(decoder_layer(x));  token p + 2 ~ lm_head(h')

Source: DeepSeek-V3's technical report (arXiv 2412.19437, section 2.2) and the weights' description beside them. Neither says
whether h is taken before or behind the target's last norm, and RMS norms do not commute with their weights. The public
implementations agree on *behind*: h is what the target's lm_head reads (transformers' MTP model, vLLM, SGLang), and each further
level takes h' (vLLM and others once passed the decoder layer's output on, and gained acceptance by passing h': vllm pull
requests 45895 and 47448). So the feature is the output of the target's last layer, and the target's own norm is applied here.
Where more than one module is stored (DeepSeek has one), the first is used for all levels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from ..core import DraftTree, SettingsError
from ..engine.base import StepBytes
from ..engine.torch.cache import KvPool
from ..engine.torch.checkpoint import Checkpoint
from ..engine.torch.geometry import KvLayout, kv_layout_of
from ..engine.torch.loader import load_engine
from ..engine.torch.loader import memory_needed_bytes as target_memory_bytes
from ..engine.torch.modules import NAME, Bfloat16Linear, Segment, StepPlan
from .eagle3_head import RMSNorm
from .target import TargetFacts
from .tree_drafter import HeadState, TreeDrafter

SHARED = {  # a one-layer target's name -> where the module has it, and where the target itself has it
    "model.norm.weight": ("shared_head.norm.weight", None),
    "model.embed_tokens.weight": ("embed_tokens.weight", "model.embed_tokens.weight"),
    "lm_head.weight": ("shared_head.head.weight", "lm_head.weight"),
}
VIEW_PREFIX = "model.layers.0."
OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight")


class MtpModule(nn.Module):
    """decoder: the module's decoder layer as a transformers model of one layer, run through our attention and experts."""

    def __init__(self, decoder: nn.Module, enorm: nn.Module, hnorm: nn.Module, eh_proj: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary, self.norm = decoder.layers[0], decoder.rotary_emb, decoder.norm
        self.enorm, self.hnorm, self.eh_proj = enorm, hnorm, eh_proj

    def forward(
        self, embedding: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, plan: StepPlan
    ) -> torch.Tensor:
        """embedding, hidden: float32 [T, hidden]; positions: int64 [T] -> [T, hidden]."""
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], -1))[None]
        turns = self.rotary(x, position_ids=positions[None])
        return self.norm(self.layer(x, attention_mask=None, position_embeddings=turns, step_plan=plan))[0]


class MtpDrafter(TreeDrafter):
    """target needs norm and lm_head. sizes: of the module as a target of one layer."""

    def __init__(
        self, module: MtpModule, target: TargetFacts, sizes: StepBytes, pool: KvPool, depth: int, top_k: int = 1
    ) -> None:
        super().__init__(pool, depth, top_k)
        assert target.norm is not None and target.lm_head is not None
        self.module, self.embed_tokens = module.eval(), target.embed_tokens
        self.target_norm, self.lm_head = target.norm, target.lm_head
        self._sizes = sizes
        own = (module.enorm, module.hnorm, module.eh_proj)
        self._layer_bytes = sizes.attention + sizes.shared + sum(_bytes(each) for each in own)
        self._routed: list[int] = []  # distinct experts of each forward of the last call
        self._fed_experts = 0
        self._level_experts: list[int] = []

    def bytes_read(self, levels: int, fed: bool) -> int:
        """Routed experts are those that the last extend() and draft() hit, measured."""
        forwards = max(0, levels - 1)
        experts = (self._fed_experts if fed else 0) + sum(self._level_experts[:forwards])
        return (forwards + fed) * self._layer_bytes + levels * self._sizes.head + experts * self._sizes.per_expert

    def extend(
        self, states: Sequence[HeadState], features: Sequence[torch.Tensor], next_tokens: Sequence[np.ndarray]
    ) -> None:
        self._routed = []
        super().extend(states, features, next_tokens)
        self._fed_experts = sum(self._routed)

    def draft(
        self, states: Sequence[HeadState], another_level: Callable[[list[DraftTree], int], bool] | None = None
    ) -> list[DraftTree]:
        self._routed = []
        trees = super().draft(states, another_level)
        self._level_experts = self._routed
        return trees

    def _fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self.target_norm(features)

    def _layer(
        self, tokens: np.ndarray, hidden: torch.Tensor, positions: np.ndarray, segments: list[Segment]
    ) -> torch.Tensor:
        embedding = self.embed_tokens(torch.from_numpy(tokens).to(self.device))
        out = self.module(embedding, hidden, torch.from_numpy(positions).to(self.device), StepPlan(segments))
        self._routed.append(len(self.module.layer.mlp.experts.routed.unique()))
        return out

    def _candidates(self, hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        probability, tokens = self.lm_head(hidden).softmax(-1).topk(self.top_k)
        return tokens.cpu().numpy(), probability.cpu().numpy()


def mtp_layout(checkpoint: Checkpoint) -> KvLayout:
    """What the module's cache keeps per token; checkpoint: the target's."""
    return kv_layout_of(module_view(checkpoint).config)


def mtp_memory_bytes(checkpoint: Checkpoint, device: torch.device) -> int:
    """What loading and running the module takes, but for its cache; checkpoint: the target's."""
    return target_memory_bytes(module_view(checkpoint), 0, device)


def mtp_drafter(
    checkpoint: Checkpoint,
    target: TargetFacts,
    depth: int,
    kv_pages: int,
    progress: Callable[[int, int], None] = lambda _done_bytes, _total_bytes: None,
    device: torch.device | str = "cpu",
) -> MtpDrafter:
    """Load the target checkpoint's MTP module. Raises SettingsError when it has none or it is damaged."""
    view, device = module_view(checkpoint), torch.device(device)
    enorm, hnorm, eh_proj = (_read(checkpoint, name, target.hidden_size).to(device) for name in OWN)
    try:
        engine = load_engine(view, max_context_tokens=1, kv_pages=1, progress=progress, device=device)
    except SettingsError as error:
        raise SettingsError(str(error).replace(VIEW_PREFIX, _prefix(checkpoint.config))) from None
    epsilon = float(checkpoint.config.get("rms_norm_eps", 1e-6))
    module = MtpModule(engine.model.model, _norm(enorm, epsilon), _norm(hnorm, epsilon), Bfloat16Linear(eh_proj))
    engine.model.set_attn_implementation(
        NAME
    )  # a draft forward is no captured step, for which CUDA has an attention of its own
    pool = KvPool(kv_layout_of(view.config), kv_pages, device)
    return MtpDrafter(module, target, engine.step_bytes, pool, depth)


def as_target(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a target whose one layer is the module's decoder layer."""
    return {**config, "num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}


def module_view(checkpoint: Checkpoint) -> Checkpoint:
    """The module as a target of one layer: the same tensors under other names. What both have is read once, for it."""
    config, stored = checkpoint.config, checkpoint.tensors
    if config.get("model_type") != "deepseek_v3":
        raise SettingsError(
            f"the target in {checkpoint.directory} is of model_type {config.get('model_type')!r}; MTP drafting is there for "
            "'deepseek_v3': use an EAGLE-3 head or 'ngram'."
        )
    prefix = _prefix(config)
    tensors = {}
    for name, info in stored.items():
        rest = name.removeprefix(prefix)
        if rest != name and rest not in OWN and not rest.startswith(("embed_tokens.", "shared_head.")):
            tensors[VIEW_PREFIX + rest] = info
    for name, (own, shared) in SHARED.items():
        found = stored.get(prefix + own) or (stored.get(shared) if shared is not None else None)
        if found is None:
            raise _missing(checkpoint, prefix + own)
        tensors[name] = found
    for name in OWN:
        if prefix + name not in stored:
            raise _missing(checkpoint, prefix + name)
    return dataclasses.replace(checkpoint, config=as_target(config), tensors=tensors)


def _prefix(config: dict[str, Any]) -> str:
    return f"model.layers.{config['num_hidden_layers']}."


def _missing(checkpoint: Checkpoint, name: str) -> SettingsError:
    return SettingsError(
        f"tensor {name} is missing from {checkpoint.directory}, so it holds no MTP module; use an EAGLE-3 head or 'ngram', or "
        "download all of its files."
    )


def _read(checkpoint: Checkpoint, name: str, hidden: int) -> torch.Tensor:
    info = checkpoint.tensors[_prefix(checkpoint.config) + name]
    shape = (hidden, 2 * hidden) if name.startswith("eh_proj") else (hidden,)
    if info.shape != shape or info.dtype not in ("BF16", "F16", "F32"):
        raise SettingsError(
            f"tensor {_prefix(checkpoint.config)}{name} in {info.file} is {info.dtype} {list(info.shape)}; {list(shape)} as BF16, F16 "
            "or F32 is needed."
        )
    with safe_open(info.file, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(_prefix(checkpoint.config) + name)
    return tensor.bfloat16() if len(shape) == 2 else tensor.float()


def _norm(weight: torch.Tensor, epsilon: float) -> RMSNorm:
    norm = RMSNorm(len(weight), epsilon)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
