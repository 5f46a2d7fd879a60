"""From our settings and a model's facts to the arguments of tensorrt_llm.LLM, as a pure function; then the edge that creates it.

Source: TensorRT-LLM's LLM API reference (LLM, KvCacheConfig, MoeConfig, CudaGraphConfig, Eagle3DecodingConfig,
MTPDecodingConfig). Every argument that decides how a step runs is given, so that a changed default changes nothing here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core import SettingsError
from ...settings import Settings
from .facts import ModelFacts
from .speculation import Shape, speculation_of

FREE_MEMORY_FRACTION = 0.85  # of what the weights leave, for keys and values; graphs and activations need the rest
RESERVE_BYTES = 8 << 30  # estimated: activations, CUDA graphs, communication and attention workspaces of one GPU
PREFILL_TOKENS = 8192  # of all prompts in one iteration; a longer prompt is computed in parts
MOST_GRAPHS = 64  # batch sizes with a graph of their own; each may take 200 MB
# What the engine decides itself or does not have: with it these settings must stay as they are.
ONLY_EMBEDDED = {
    "device": "the GPUs are those that CUDA_VISIBLE_DEVICES names",
    "gguf": "only the demo has a GGUF file",
    "threads": "nothing is computed on the CPU",
    "prefill_share": "TensorRT-LLM decides how prompts and answers share an iteration",
    "footprint_accuracy": "there is no oracle",
    "expert_placement": "expert parallelism places the experts",
    "expert_buffer": "all requests of a step share their experts",
    "seed_root": "the root's experts count as paid for",
    "profile": "costs are measured on the GPUs; see draft_len_schedule",
}
CONFIGURATIONS = {
    "kv_cache_config": "KvCacheConfig",
    "moe_config": "MoeConfig",
    "cuda_graph_config": "CudaGraphConfig",
}
WORKER_EXTENSION = "ecospec_orchestrator.engine.tensorrt_llm.plugin.ray_extension.WorkerExtension"
SPECULATION = {"Eagle3": "Eagle3DecodingConfig", "MTP": "MTPDecodingConfig"}
CANNOT_IMPORT = (
    "Setting engine is 'tensorrt-llm', which cannot be imported ({}); run inside NVIDIA's TensorRT-LLM image, with this package "
    "installed there."
)


@dataclass(frozen=True)
class LaunchPlan:
    """arguments: keyword arguments of LLM, its configurations as nested dicts. shape: of the drafts. nodes: draft nodes verified per
    request and step; levels: draft forwards in it; both 0 without drafts. selects: our plug-in chooses the nodes. notes: for a person,
    where a setting could not be taken literally."""

    arguments: dict[str, Any]
    shape: Shape
    nodes: int
    levels: int
    selects: bool
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Of one iteration at most, prompts and drafts."""
        return int(self.arguments["max_num_tokens"])


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on each GPU. longest_request: keys and values of one request of max_context_tokens; all_requests: of max_running of
    them. reserve is an estimate."""

    weights: int
    reserve: int
    longest_request: int
    all_requests: int

    @property
    def least(self) -> int:
        """Below this nothing can be served."""
        return self.weights + self.reserve + self.longest_request


def plan_launch(
    settings: Settings, facts: ModelFacts, draft_len_schedule: Mapping[int, int] | None = None
) -> LaunchPlan:
    """draft_len_schedule: batch size up to which -> draft length, for chains under goodput; beyond its largest batch size nothing
    is drafted. Raises SettingsError."""
    _check_settings(settings)
    _check_parallel(settings, facts)
    _check_context(settings, facts)
    speculation, shape, nodes, notes = speculation_of(settings, facts, draft_len_schedule)
    tensor_parallel = settings.tensor_parallel_size
    rows = settings.max_running * (1 + nodes)
    tokens = max(PREFILL_TOKENS, rows)
    arguments: dict[str, Any] = {
        "model": settings.model,
        "skip_tokenizer_init": True,  # prompts come as token ids, and text is made of ours
        "trust_remote_code": False,
        "tensor_parallel_size": tensor_parallel,
        "moe_expert_parallel_size": settings.expert_parallel_size or tensor_parallel,
        "enable_attention_dp": False,  # all ranks must see one batch, and choose the same nodes for it
        "max_batch_size": settings.max_running,
        "max_num_tokens": tokens,
        "max_seq_len": settings.max_context_tokens,
        "max_beam_width": 1,
        "enable_chunked_prefill": settings.max_context_tokens > tokens,
        "disable_overlap_scheduler": not settings.cuda_graphs,
        "cuda_graph_config": {"batch_sizes": graph_batch_sizes(settings.max_running)} if settings.cuda_graphs else None,
        "kv_cache_config": _kv_cache(settings, facts, nodes),
        "moe_config": {"backend": "TRITON" if facts.quantisation == "mxfp4" else "CUTLASS"},
        "speculative_config": speculation,
        "enable_iter_perf_stats": True,
        "return_perf_metrics": True,
        **_processes(settings, speculation is not None),
    }
    wanted = shape == "tree" and settings.policy in ("ecospec", "goodput")
    selects = wanted and settings.footprints != "none"
    if wanted and not selects:
        notes += ("without predictions the engine chooses nodes by their probability",)
    if settings.trace_rate_tokens_per_second and not selects:
        raise SettingsError(
            f"Setting trace_rate_tokens_per_second is {settings.trace_rate_tokens_per_second:g}; engine tensorrt-llm samples routes only "
            "where EcoSpec chooses the nodes of draft trees, which it does not here: set it to 0."
        )
    levels = 0 if speculation is None else speculation["max_draft_len"]
    if draft_len_schedule is not None and "draft_len_schedule" not in (speculation or {}):
        notes += ("draft_len_schedule is not used: only chains under policy 'goodput' have one",)
    return LaunchPlan(arguments, shape, nodes, levels, selects, notes)


def memory_need(settings: Settings, facts: ModelFacts, plan: LaunchPlan, drafter_bytes: int = 0) -> MemoryNeed:
    """drafter_bytes: of a head in a directory of its own, counted in full on each GPU."""
    tensor_parallel = settings.tensor_parallel_size
    longest = (settings.max_context_tokens + plan.nodes) * _kv_bytes(settings, facts, plan.shape)
    weights = -(-facts.weight_bytes // tensor_parallel) + drafter_bytes
    return MemoryNeed(weights, RESERVE_BYTES, longest, settings.max_running * longest)


def check_memory(need: MemoryNeed, gpu_bytes: int) -> None:
    """gpu_bytes: memory of the smallest of the GPUs. Raises SettingsError with both numbers."""
    if need.least > gpu_bytes:
        gb = lambda count: f"{count / 1e9:.1f}"
        raise SettingsError(
            f"each GPU needs {gb(need.least)} GB ({gb(need.weights)} weights, {gb(need.reserve)} estimated for activations and "
            f"graphs, {gb(need.longest_request)} for one request's keys and values) and has {gb(gpu_bytes)} GB; raise "
            "tensor_parallel_size, lower max_context_tokens, or take a smaller or quantised model."
        )


def graph_batch_sizes(max_running: int) -> list[int]:
    """Every batch size up to MOST_GRAPHS, so that no batch is padded with rows that are routed and read experts for nothing; above
    that every eighth, and a batch in between runs without a graph."""
    return [*range(1, min(max_running, MOST_GRAPHS) + 1), *range(MOST_GRAPHS + 8, max_running + 1, 8)]


def create_llm(plan: LaunchPlan) -> tuple[Any, Any]:
    """The edge: imports TensorRT-LLM and loads the model, which takes minutes; returns the LLM and the class SamplingParams. Raises
    SettingsError."""
    os.environ.setdefault("TRTLLM_NO_USAGE_STATS", "1")  # it reports its usage to its maker unless told not to
    try:
        from tensorrt_llm import LLM, SamplingParams, llmapi
    except ImportError as error:
        raise SettingsError(CANNOT_IMPORT.format(error)) from None
    arguments = dict(plan.arguments)
    try:
        for name, class_name in CONFIGURATIONS.items():
            if arguments[name] is not None:
                arguments[name] = getattr(llmapi, class_name)(**arguments[name])
        if arguments["speculative_config"] is not None:
            values = dict(arguments["speculative_config"])
            arguments["speculative_config"] = getattr(llmapi, SPECULATION[values.pop("decoding_type")])(**values)
        return LLM(**arguments), SamplingParams
    except (ValueError, TypeError, AttributeError) as error:  # pydantic's errors are ValueErrors
        raise SettingsError(
            f"TensorRT-LLM refuses its arguments ({' '.join(str(error).split())}); run ecospec-orchestrator doctor --engine "
            "tensorrt-llm, which names what differs from the supported version."
        ) from error
    except ImportError as error:
        raise SettingsError(
            f"TensorRT-LLM lacks a package for what the settings ask of it ({error}); install it in the image."
        ) from error
    except RuntimeError as error:  # of a rank: out of memory, a broken checkpoint, a plug-in that cannot be installed
        reasons = " ".join(f"{error} {error.__cause__ or ''}".split())
        raise SettingsError(f"TensorRT-LLM could not start: {reasons}; the log of its ranks has more.") from error


def _check_settings(settings: Settings) -> None:
    fields = Settings.model_fields
    for name, reason in ONLY_EMBEDDED.items():
        value = getattr(settings, name)
        if value != fields[name].default:
            raise SettingsError(
                f"Setting {name} is {str(value)!r}, which has no meaning with engine tensorrt-llm ({reason}); leave it out."
            )
    if settings.footprints == "oracle":
        raise SettingsError(
            "Setting footprints is 'oracle', which engine tensorrt-llm does not have; predictor or none."
        )
    if settings.model == "demo":
        raise SettingsError(
            "Setting model is 'demo', which only the embedded engine serves; give the directory or the Hub name of a model."
        )


def _check_parallel(settings: Settings, facts: ModelFacts) -> None:
    tensor, expert = settings.tensor_parallel_size, settings.expert_parallel_size or settings.tensor_parallel_size
    if facts.heads % tensor:
        raise SettingsError(
            f"Setting tensor_parallel_size is {tensor}, which does not divide the {facts.heads} attention heads of "
            f"{facts.geometry.name}."
        )
    if tensor % expert or facts.geometry.experts % expert:
        raise SettingsError(
            f"Setting expert_parallel_size is {expert}; a divisor of tensor_parallel_size {tensor} and of the "
            f"{facts.geometry.experts} experts of {facts.geometry.name} is needed."
        )


def _check_context(settings: Settings, facts: ModelFacts) -> None:
    if facts.max_positions is not None and settings.max_context_tokens > facts.max_positions:
        raise SettingsError(
            f"Setting max_context_tokens is {settings.max_context_tokens}; {facts.geometry.name} knows {facts.max_positions} "
            "positions: lower the setting."
        )


def _processes(settings: Settings, drafts: bool) -> dict[str, Any]:
    """Who starts the ranks. Without the extension, which is allowed with Ray only, they would not know of the plug-in."""
    if settings.distributed_executor == "mpi":
        return {}
    return {"orchestrator_type": "ray", **({"ray_worker_extension_cls": WORKER_EXTENSION} if drafts else {})}


def _kv_bytes(settings: Settings, facts: ModelFacts, shape: Shape) -> int:
    """Per token and GPU; an EAGLE-3 head or an MTP module caches like one more layer."""
    target = facts.kv_bytes_per_token(settings.tensor_parallel_size)
    return target if shape == "none" else target + target // facts.layers


def _kv_cache(settings: Settings, facts: ModelFacts, nodes: int) -> dict[str, Any]:
    cache: dict[str, Any] = {
        "enable_block_reuse": settings.prefix_reuse,
        "free_gpu_memory_fraction": FREE_MEMORY_FRACTION,
    }
    if settings.kv_cache_mib:
        tokens = (settings.kv_cache_mib << 20) // _kv_bytes(settings, facts, "chain" if nodes else "none")
        if tokens < settings.max_context_tokens + nodes:
            raise SettingsError(
                f"Setting kv_cache_mib is {settings.kv_cache_mib}, which holds {tokens} tokens of {facts.geometry.name} on each GPU; "
                f"one request may need {settings.max_context_tokens + nodes}: raise it or lower max_context_tokens."
            )
        cache["max_tokens"] = tokens
    return cache
