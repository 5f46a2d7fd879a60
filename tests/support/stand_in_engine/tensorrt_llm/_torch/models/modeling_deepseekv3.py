from torch import nn

from ..speculative.eagle3_dynamic_tree import VOCABULARY
from .experts import Decoder, Dense, Experts, Layer, gate_weight
from .modeling_speculative import SpecDecOneEngineForCausalLM
from .modeling_utils import register_auto_model


class Deepseekv3MoE(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.gate.weight = nn.Parameter(gate_weight(config.num_experts, config.hidden_size, layer), requires_grad=False)
        self.experts = Experts(config.num_experts_per_tok)

    def forward(self, hidden_states):
        return self.experts(hidden_states, self.gate(hidden_states))


class DeepseekV3Model(Decoder):
    """The first layer is dense, and a draft layer with experts of its own lies behind the target's."""

    def __init__(self, config):
        super().__init__(VOCABULARY, config.hidden_size, config.num_hidden_layers)
        moe = [Layer(Deepseekv3MoE(config, number)) for number in range(1, config.num_hidden_layers + 1)]
        self.layers = nn.ModuleList([Layer(Dense()), *moe])


@register_auto_model("DeepseekV3ForCausalLM")
class DeepseekV3ForCausalLM(SpecDecOneEngineForCausalLM):
    def __init__(self, model_config):
        super().__init__(DeepseekV3Model(model_config.pretrained_config), model_config)
