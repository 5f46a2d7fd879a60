import torch
from torch import nn

from ..speculative.eagle3_dynamic_tree import VOCABULARY
from .experts import Decoder, Experts, Layer, gate_weight
from .modeling_speculative import SpecDecOneEngineForCausalLM
from .modeling_utils import register_auto_model


class Qwen3MoE(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.gate.weight = nn.Parameter(gate_weight(config.num_experts, config.hidden_size, layer), requires_grad=False)
        self.experts = Experts(config.num_experts_per_tok)

    def forward(self, hidden_states):
        return self.experts(hidden_states, self.gate(hidden_states))


class Qwen3MoEModel(Decoder):
    def __init__(self, config):
        super().__init__(VOCABULARY, config.hidden_size, config.num_hidden_layers)
        self.layers = nn.ModuleList(Layer(Qwen3MoE(config, number)) for number in range(config.num_hidden_layers))


@register_auto_model("Qwen3MoeForCausalLM")
class Qwen3MoeForCausalLM(SpecDecOneEngineForCausalLM):
    def __init__(self, model_config):
        super().__init__(Qwen3MoEModel(model_config.pretrained_config), model_config)
        assert torch.is_tensor(self.spec_worker.history_score_buffer)
