from torch import nn

from ..speculative.eagle3_dynamic_tree import Eagle3OneModelDynamicTreeWorker


class SpecDecOneEngineForCausalLM(nn.Module):
    def __init__(self, model, model_config):
        super().__init__()
        self.model, self.config, self.draft_model, self.epilogue = model, model_config.pretrained_config, None, []
        self.spec_worker = Eagle3OneModelDynamicTreeWorker(model_config.spec_config)
        self.epilogue.append(self.spec_worker)

    def forward(self, attn_metadata, input_ids, position_ids, spec_metadata):
        hidden_states = self.model(input_ids)
        return self.spec_worker(
            input_ids=input_ids,
            position_ids=position_ids,
            hidden_states=hidden_states,
            logits=None,
            attn_metadata=attn_metadata,
            spec_metadata=spec_metadata,
            draft_model=self.draft_model,
            resource_manager=None,
        )
