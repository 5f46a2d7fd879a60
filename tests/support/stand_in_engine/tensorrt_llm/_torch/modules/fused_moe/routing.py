from abc import ABC, abstractmethod

import torch


class BaseMoeRoutingMethod(ABC):
    @abstractmethod
    def apply(self, _router_logits): ...


class RenormalizeMoeRoutingMethod(BaseMoeRoutingMethod):
    def __init__(self, top_k):
        self.top_k = top_k

    def apply(self, router_logits):
        values, ids = torch.topk(router_logits, self.top_k, dim=-1)
        return ids.to(torch.int32), torch.softmax(values.float(), dim=-1)
