"""Decoder layers whose experts get their logits by position or by name, from a gate module or past it."""

import torch
from torch import nn

from ..modules.fused_moe.routing import RenormalizeMoeRoutingMethod


class Experts(nn.Module):
    def __init__(self, top_k):
        super().__init__()
        self.routing_method = RenormalizeMoeRoutingMethod(top_k)
        self.seen = []  # experts that the rows of each call really took

    def forward(self, x, router_logits):
        self.seen.append(router_logits.topk(self.routing_method.top_k).indices.sort().values)
        return x


class Layer(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return x + 0.1 * self.mlp(x)


class Dense(nn.Module):
    def forward(self, x):
        return x


class Decoder(nn.Module):
    def __init__(self, vocabulary, size, target_layers):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding = nn.Parameter(torch.randn(vocabulary, size, generator=generator), requires_grad=False)
        self.target_layers = target_layers

    def forward(self, input_ids):
        x = self.embedding[input_ids.long()]
        for layer in self.decoder_layers()[: self.target_layers]:
            x = layer(x)
        return x

    def decoder_layers(self):
        return self.layers


def gate_weight(experts, size, seed):
    return torch.randn(experts, size, generator=torch.Generator().manual_seed(seed))
