from torch import nn
from torch.nn import functional

from ..speculative.eagle3_dynamic_tree import VOCABULARY
from .experts import Decoder, Experts, Layer, gate_weight
from .modeling_speculative import SpecDecOneEngineForCausalLM
from .modeling_utils import register_auto_model


class MLPBlock(nn.Module):
    """Computes small batches' logits without calling its gate."""

    def __init__(self, config, layer):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.gate.weight = nn.Parameter(gate_weight(config.num_experts, config.hidden_size, layer), requires_grad=False)
        self.experts = Experts(config.num_experts_per_tok)

    def forward(self, x):
        return self.experts(x=x, router_logits=functional.linear(x, self.gate.weight))


class Transformer(Decoder):
    """Its layers have another name than those of the other models."""

    def __init__(self, config):
        super().__init__(VOCABULARY, config.hidden_size, config.num_hidden_layers)
        self.block = nn.ModuleList(Layer(MLPBlock(config, number)) for number in range(config.num_hidden_layers))

    def decoder_layers(self):
        return self.block


@register_auto_model("GptOssForCausalLM")
class GptOssForCausalLM(SpecDecOneEngineForCausalLM):
    def __init__(self, model_config):
        super().__init__(Transformer(model_config.pretrained_config), model_config)
