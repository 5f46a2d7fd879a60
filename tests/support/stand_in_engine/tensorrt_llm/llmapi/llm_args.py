from dataclasses import dataclass


@dataclass
class DecodingBaseConfig:
    max_draft_len: int | None = None
    max_total_draft_tokens: int | None = None
    speculative_model: str | None = None
    draft_len_schedule: dict | None = None


@dataclass
class EagleDecodingConfig(DecodingBaseConfig):
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int | None = None


@dataclass
class MTPDecodingConfig(DecodingBaseConfig):
    pass


@dataclass
class Eagle3DecodingConfig(EagleDecodingConfig):
    _max_batch_size: int | None = None
