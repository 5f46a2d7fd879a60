"""A small batched forward of the dense base model, for collecting training data quickly.

The demo target computes the same function as its dense base whatever the routing, so answers, features and FFN inputs
collected here are the target's. Shapes: B sequences, T new positions, H hidden, C cache positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ecospec_orchestrator.engine.torch.demo import FEATURE_LAYERS, HIDDEN, LAYERS

HEADS, KV_HEADS, HEAD, ROPE_BASE, EPS = 9, 3, 64, 1e5, 1e-5


class Dense:
    def __init__(self, state: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        get = lambda n: state[n].to(dtype)  # noqa: E731
        self.embed = get("model.embed_tokens.weight")
        self.norm = get("model.norm.weight")
        self.layers = []
        for i in range(LAYERS):
            p = f"model.layers.{i}."
            qkv = torch.cat([get(p + f"self_attn.{x}_proj.weight") for x in "qkv"])
            gate_up = torch.cat([get(p + "mlp.gate_proj.weight"), get(p + "mlp.up_proj.weight")])
            self.layers.append(
                (
                    get(p + "input_layernorm.weight"),
                    qkv,
                    get(p + "self_attn.o_proj.weight"),
                    get(p + "post_attention_layernorm.weight"),
                    gate_up,
                    get(p + "mlp.down_proj.weight"),
                )
            )
        freq = 1.0 / ROPE_BASE ** (torch.arange(0, HEAD, 2).float() / HEAD)
        angle = torch.outer(torch.arange(8192).float(), freq)
        self.cos, self.sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        self.dtype = dtype

    def new_cache(self, batch: int, length: int) -> torch.Tensor:
        return torch.zeros(LAYERS, 2, batch, KV_HEADS, length, HEAD, dtype=self.dtype)

    def forward(self, tokens, positions, cache, start, mask, on_ffn=None):
        """tokens, positions: [B, T]; mask: bool [B, 1, T, start + T]. Returns (features [B, T, 3H], final [B, T, H])."""
        b, t = tokens.shape
        h = self.embed[tokens].float()  # the residual stream stays fp32: it carries activations of 1e4
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        features = []
        for i, (n1, qkv, o, n2, gate_up, down) in enumerate(self.layers):
            x = F.linear(rms(h, n1).to(qkv.dtype), qkv).view(b, t, HEADS + 2 * KV_HEADS, HEAD).transpose(1, 2)
            q, k, v = x.split((HEADS, KV_HEADS, KV_HEADS), 1)
            cache[i, 0, :b, :, start : start + t] = rope(k, cos, sin)
            cache[i, 1, :b, :, start : start + t] = v
            kk, vv = cache[i, 0, :b, :, : start + t], cache[i, 1, :b, :, : start + t]
            h = h + F.linear(attend(rope(q, cos, sin), kk, vv, mask).transpose(1, 2).reshape(b, t, HIDDEN), o)
            x = rms(h, n2).to(gate_up.dtype)
            if on_ffn is not None:
                on_ffn(i, x)
            g, u = F.linear(x, gate_up).chunk(2, -1)
            h = h + F.linear(F.silu(g) * u, down)
            if i in FEATURE_LAYERS:
                features.append(h)
        return torch.cat(features, -1).to(self.dtype), rms(h, self.norm).to(self.dtype)

    def logits(self, final):
        return F.linear(final, self.embed)


def attend(q, k, v, mask):
    """Grouped-query attention; one query position is a plain batched product, where the fused kernel is slow on CPUs."""
    b, _, t, _ = q.shape
    if t > 1:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = (q.view(b, KV_HEADS, HEADS // KV_HEADS, HEAD) @ k.transpose(-1, -2)).float() / HEAD**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask.view(b, 1, 1, -1), float("-inf"))
    return (scores.softmax(-1).to(v.dtype) @ v).view(b, HEADS, 1, HEAD)


def rms(x, weight):
    return F.rms_norm(x.float(), (HIDDEN,), weight.float(), EPS).to(x.dtype)


def rope(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)
