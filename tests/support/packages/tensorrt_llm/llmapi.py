"""The configuration classes of TensorRT-LLM 1.3 that the launcher uses, with the fields and rules that its reference documents and no
others: what the original refuses is refused here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class KvCacheConfig(_Strict):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: Annotated[float, Field(ge=0, le=1)] | None = 0.9
    dtype: str = "auto"
    tokens_per_block: int = 32
    enable_partial_reuse: bool = True
    max_gpu_total_bytes: Annotated[int, Field(ge=0)] = 0


class MoeConfig(_Strict):
    backend: Literal[
        "AUTO", "CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "DENSEGEMM", "VANILLA", "TRITON", "MARLIN"
    ] = "AUTO"
    max_num_tokens: int | None = None


class CudaGraphConfig(_Strict):
    batch_sizes: list[int] | None = None
    max_batch_size: Annotated[int, Field(ge=0)] = 0
    enable_padding: bool = False

    @model_validator(mode="after")
    def _agree(self) -> CudaGraphConfig:
        if self.batch_sizes and self.max_batch_size not in (0, max(self.batch_sizes)):
            raise ValueError("max_batch_size must equal max(batch_sizes)")
        return self


class _Drafts(_Strict):
    max_draft_len: Annotated[int, Field(ge=0)] | None = None
    max_total_draft_tokens: int | None = None
    speculative_model: str | Path | None = None
    max_concurrency: Annotated[int, Field(gt=0)] | None = None
    draft_len_schedule: dict[int, int] | None = None
    use_rejection_sampling: bool = False

    @model_validator(mode="after")
    def _schedule(self) -> _Drafts:
        schedule = self.draft_len_schedule
        if schedule is None:
            return self
        if min(schedule) < 1 or schedule[min(schedule)] != self.max_draft_len:
            raise ValueError("the smallest batch size must map to max_draft_len")
        if any(not 0 <= length <= (self.max_draft_len or 0) for length in schedule.values()):
            raise ValueError("all draft lengths must be <= max_draft_len")
        return self


class Eagle3DecodingConfig(_Drafts):
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int | None = None
    eagle3_layers_to_capture: set[int] | None = None
    eagle3_model_arch: Literal["llama3", "mistral_large3"] = "llama3"

    @model_validator(mode="after")
    def _tree(self) -> Eagle3DecodingConfig:
        if not self.max_draft_len or self.speculative_model is None:
            raise ValueError("max_draft_len must be > 0 and the draft model must be provided")
        if self.use_dynamic_tree:
            top_k, total = self.dynamic_tree_max_topK or 0, self.max_total_draft_tokens or 0
            if top_k < 1 or not self.max_draft_len <= total <= top_k * self.max_draft_len:
                raise ValueError("max_draft_len <= max_total_draft_tokens <= dynamic_tree_max_topK * max_draft_len")
        return self


class MTPDecodingConfig(_Drafts):
    use_relaxed_acceptance_for_thinking: bool = False
    use_mtp_vanilla: bool = False

    @model_validator(mode="after")
    def _length(self) -> MTPDecodingConfig:
        if self.max_draft_len is not None and self.max_draft_len <= 0:
            raise ValueError("max_draft_len must be > 0 for MTP")
        return self


class LlmArguments(_Strict):
    """Of LLM, those that are documented and of use here."""

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    moe_expert_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    enable_attention_dp: bool = False
    max_batch_size: int = 2048
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    max_beam_width: int = 1
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    cuda_graph_config: CudaGraphConfig | None = None
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    moe_config: MoeConfig = MoeConfig()
    speculative_config: Eagle3DecodingConfig | MTPDecodingConfig | None = None
    enable_iter_perf_stats: bool = False
    return_perf_metrics: bool = False
    orchestrator_type: Literal["rpc", "ray"] | None = None
    ray_worker_extension_cls: str | None = None

    @model_validator(mode="after")
    def _extension(self) -> LlmArguments:
        if self.ray_worker_extension_cls is not None and self.orchestrator_type != "ray":
            raise ValueError("ray_worker_extension_cls is only supported with orchestrator_type='ray'")
        return self
