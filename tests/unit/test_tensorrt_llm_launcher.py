"""The arguments of LLM for the three targets on 8 H200s, against the documented configurations, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_configs import DEEPSEEK_V31, GPT_OSS_120B, PUBLISHED_BYTES, QWEN3_235B
from safetensors.numpy import save_file

from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.engine.tensorrt_llm.facts import ModelFacts, facts_of, local_directory, read_facts
from ecospec_orchestrator.engine.tensorrt_llm.launcher import (
    check_memory,
    create_llm,
    graph_batch_sizes,
    memory_need,
    plan_launch,
)
from ecospec_orchestrator.settings import Settings, load_settings

PACKAGES = Path(__file__).resolve().parents[1] / "support" / "packages"
H200_BYTES = 143_771 << 20
QWEN = facts_of(QWEN3_235B, "qwen3", PUBLISHED_BYTES["qwen3"])
GPT_OSS = facts_of(GPT_OSS_120B, "gpt-oss", PUBLISHED_BYTES["gpt-oss"])
DEEPSEEK = facts_of(DEEPSEEK_V31, "deepseek", PUBLISHED_BYTES["deepseek"])


@pytest.fixture
def head(tmp_path: Path) -> str:
    directory = tmp_path / "head"
    directory.mkdir()
    return str(directory)


def settings(**values: Any) -> Settings:
    return load_settings({"engine": "tensorrt-llm", "model": "/models/target", **values}, {})


def test_qwen3_235b_drafts_trees_that_the_plug_in_chooses_from(head: str) -> None:
    plan = plan_launch(
        settings(drafter=head, policy="ecospec", draft_depth=6, draft_top_k=10, gamma=32, max_context_tokens=32768),
        QWEN,
    )
    assert (plan.shape, plan.nodes, plan.selects, plan.notes) == ("tree", 32, True, ())
    assert plan.arguments == {
        "model": "/models/target",
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "tensor_parallel_size": 8,
        "moe_expert_parallel_size": 8,
        "enable_attention_dp": False,
        "max_batch_size": 8,
        "max_num_tokens": 8192,
        "max_seq_len": 32768,
        "max_beam_width": 1,
        "enable_chunked_prefill": True,
        "disable_overlap_scheduler": False,
        "cuda_graph_config": {"batch_sizes": [1, 2, 3, 4, 5, 6, 7, 8]},
        "kv_cache_config": {"enable_block_reuse": True, "free_gpu_memory_fraction": 0.85},
        "moe_config": {"backend": "CUTLASS"},
        "speculative_config": {
            "decoding_type": "Eagle3",
            "speculative_model": head,
            "max_draft_len": 6,
            "max_total_draft_tokens": 32,
            "use_dynamic_tree": True,
            "dynamic_tree_max_topK": 10,
        },
        "enable_iter_perf_stats": True,
        "return_perf_metrics": True,
    }


def test_gpt_oss_drafts_chains_because_of_its_sliding_window(head: str) -> None:
    plan = plan_launch(settings(drafter=head, policy="likelihood", draft_depth=4, draft_top_k=4, gamma=8), GPT_OSS)
    assert (plan.shape, plan.nodes, plan.selects) == ("chain", 4, False)
    assert plan.arguments["speculative_config"] == {
        "decoding_type": "Eagle3",
        "speculative_model": head,
        "max_draft_len": 4,
    }
    assert plan.arguments["moe_config"] == {"backend": "TRITON"}
    assert not plan.arguments["enable_chunked_prefill"] and "sliding window" in plan.notes[0]


def test_deepseek_drafts_with_its_own_module_and_goodput_decides_how_long() -> None:
    plan = plan_launch(settings(gamma=3), DEEPSEEK, {4: 3, 16: 1, 8: 2})
    assert (plan.shape, plan.nodes, plan.selects) == ("chain", 3, False)
    assert plan.arguments["speculative_config"] == {
        "decoding_type": "MTP",
        "max_draft_len": 3,
        "draft_len_schedule": {4: 3, 8: 2, 16: 1},
    }
    unmeasured = plan_launch(settings(gamma=3, draft_top_k=1), DEEPSEEK)
    assert "draft_len_schedule" not in unmeasured.arguments["speculative_config"]
    assert any("no measured draft lengths" in note for note in unmeasured.notes)
    several = plan_launch(settings(gamma=3), replace(DEEPSEEK, draft_layers=3), {4: 3})
    assert any("ignores draft_len_schedule with 3 MTP modules" in note for note in several.notes)
    assert not any("ignores" in note or "nothing is drafted" in note for note in plan.notes)
    for gap in ({4: 3}, {4: 3, 8: 0}):
        assert any("with more than 4 requests" in note for note in plan_launch(settings(gamma=3), DEEPSEEK, gap).notes)


def test_likelihood_leaves_the_engines_own_choice_and_none_drafts_nothing(head: str) -> None:
    stock = plan_launch(settings(drafter=head, policy="likelihood"), QWEN)
    assert stock.shape == "tree" and not stock.selects
    chain = plan_launch(settings(drafter=head, draft_top_k=1), QWEN)
    assert (chain.shape, chain.nodes) == ("chain", 3) and not chain.selects
    blind = plan_launch(settings(drafter=head, policy="ecospec", footprints="none"), QWEN)
    assert not blind.selects and "without predictions" in blind.notes[0]
    unused = plan_launch(settings(drafter=head, policy="ecospec"), QWEN, {4: 3})
    assert "draft_len_schedule is not used" in unused.notes[0]
    plain = plan_launch(settings(drafter=head, policy="none"), QWEN)
    assert (plain.shape, plain.nodes, plain.arguments["speculative_config"], plain.notes) == ("none", 0, None, ())
    assert plan_launch(settings(), QWEN).notes == ("no drafter: every step decodes one token of a request",)


def test_without_graphs_the_host_is_in_the_loop(head: str) -> None:
    arguments = plan_launch(settings(drafter=head, cuda_graphs=False), QWEN).arguments
    assert arguments["cuda_graph_config"] is None and arguments["disable_overlap_scheduler"]


def test_every_batch_size_has_its_graph_up_to_a_bound() -> None:
    assert graph_batch_sizes(3) == [1, 2, 3]
    assert graph_batch_sizes(64) == list(range(1, 65))
    assert graph_batch_sizes(90) == [*range(1, 65), 72, 80, 88]


def test_the_kv_budget_becomes_tokens(head: str) -> None:
    # 94 layers and the head's, one head of 128 keys and values in bfloat16 on each GPU: 4 heads are fewer than 8 GPUs
    per_token = 95 * 2 * 128 * 2
    arguments = plan_launch(settings(drafter=head, kv_cache_mib=1024, max_context_tokens=4096), QWEN).arguments
    assert arguments["kv_cache_config"]["max_tokens"] == (1024 << 20) // per_token
    with pytest.raises(SettingsError, match="kv_cache_mib is 100.*which holds"):
        plan_launch(settings(drafter=head, kv_cache_mib=100, max_context_tokens=4096), QWEN)


@pytest.mark.parametrize(("facts", "gigabytes"), [(QWEN, 58.8), (GPT_OSS, 8.2), (DEEPSEEK, 86.1)])
def test_each_target_fits_on_eight_h200s(facts: ModelFacts, gigabytes: float) -> None:
    chosen = settings(max_context_tokens=32768, policy="none")
    need = memory_need(chosen, facts, plan_launch(chosen, facts))
    assert need.weights / 1e9 == pytest.approx(gigabytes, abs=0.1)
    check_memory(need, H200_BYTES)
    assert need.all_requests == 8 * need.longest_request == 8 * 32768 * facts.kv_bytes_per_token(8)


def test_too_little_memory_is_told_with_both_numbers() -> None:
    chosen = settings(tensor_parallel_size=4, policy="none")
    need = memory_need(chosen, DEEPSEEK, plan_launch(chosen, DEEPSEEK))
    with pytest.raises(SettingsError, match=r"needs 1\d\d\.\d GB \(172\.1 weights.*has 150\.8 GB"):
        check_memory(need, H200_BYTES)


def test_a_latent_is_cached_whole_on_every_gpu() -> None:
    assert DEEPSEEK.kv_bytes_per_token(8) == DEEPSEEK.kv_bytes_per_token(1) == 61 * (512 + 64) * 2
    assert GPT_OSS.kv_bytes_per_token(8) * 8 == GPT_OSS.kv_bytes_per_token(1) == 36 * 8 * 2 * 64 * 2
    assert (QWEN.attention, GPT_OSS.attention, DEEPSEEK.attention) == ("full", "sliding", "latent")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "cpu"}, "Setting device is 'cpu'"),
        ({"threads": 4}, "Setting threads is '4'"),
        ({"gguf": "x.gguf"}, "Setting gguf"),
        ({"prefill_share": 0.5}, "Setting prefill_share"),
        ({"expert_buffer": "request"}, "Setting expert_buffer"),
        ({"seed_root": False}, "Setting seed_root"),
        ({"footprints": "oracle"}, "Setting footprints is 'oracle'"),
        ({"model": "demo"}, "Setting model is 'demo'"),
        ({"drafter": "ngram"}, "Setting drafter is 'ngram'"),
        ({"drafter": "mtp"}, "no multi-token prediction module"),
        ({"drafter": "/nowhere"}, "Setting drafter is '/nowhere'"),
        ({"tensor_parallel_size": 6}, "does not divide the 64 attention heads"),
        ({"expert_parallel_size": 3}, "Setting expert_parallel_size is 3"),
        ({"max_context_tokens": 50_000}, "knows 40960 positions"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        plan_launch(settings(**values), QWEN)


@pytest.mark.parametrize("gamma", [2, 7])
def test_a_tree_that_the_engine_has_no_room_for_is_refused(head: str, gamma: int) -> None:
    with pytest.raises(SettingsError, match=f"Setting gamma is {gamma}.*3 to 6 nodes"):
        plan_launch(settings(drafter=head, gamma=gamma), QWEN)


@pytest.mark.parametrize("schedule", [{}, {0: 3}, {4: 4}, {4: 2, 8: 3}, {4: 3, 8: -1}])
def test_a_schedule_that_the_engine_would_refuse_is_refused_here(schedule: dict[int, int]) -> None:
    with pytest.raises(SettingsError, match="schedule of draft lengths"):
        plan_launch(settings(gamma=3), DEEPSEEK, schedule)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(PACKAGES))
    monkeypatch.setenv("TRTLLM_NO_USAGE_STATS", "1")
    yield
    for name in [name for name in sys.modules if name == "tensorrt_llm" or name.startswith("tensorrt_llm.")]:
        del sys.modules[name]


@pytest.mark.parametrize("facts", [QWEN, GPT_OSS, DEEPSEEK])
@pytest.mark.parametrize("policy", ["none", "likelihood", "goodput"])
def test_the_documented_classes_take_the_arguments(stand_in: None, head: str, facts: ModelFacts, policy: str) -> None:
    drafter = "mtp" if facts.draft_layers else head
    plan = plan_launch(settings(drafter=drafter, policy=policy), facts)
    llm, parameters = create_llm(plan)
    try:
        taken = llm.arguments
        assert (taken.max_batch_size, taken.tensor_parallel_size, taken.moe_expert_parallel_size) == (8, 8, 8)
        assert (taken.speculative_config is None) == (policy == "none")
        assert parameters(max_tokens=3).max_tokens == 3
    finally:
        llm.shutdown()


@pytest.mark.parametrize("policy", ["none", "ecospec"])
def test_ray_is_told_of_the_plug_in_where_there_is_one(stand_in: None, head: str, policy: str) -> None:
    plan = plan_launch(settings(drafter=head, policy=policy, distributed_executor="ray", tensor_parallel_size=16), QWEN)
    assert plan.arguments["orchestrator_type"] == "ray"
    llm, _ = create_llm(plan)
    llm.shutdown()
    extension = plan.arguments.get("ray_worker_extension_cls")
    assert (extension is None) == (policy == "none")
    if extension is not None:
        module, _, name = extension.rpartition(".")
        assert importlib.util.find_spec(module) is not None and name == "WorkerExtension"


def test_mpi_is_the_engines_own_way(head: str) -> None:
    for policy in ("none", "ecospec"):
        arguments = plan_launch(settings(drafter=head, policy=policy), QWEN).arguments
        assert not {"orchestrator_type", "ray_worker_extension_cls"} & arguments.keys()


def test_what_the_engine_refuses_is_one_sentence(stand_in: None) -> None:
    plan = plan_launch(settings(policy="none"), QWEN)
    wrong = replace(plan, arguments=plan.arguments | {"moe_config": {"backend": "FASTEST"}})
    with pytest.raises(SettingsError, match="TensorRT-LLM refuses its arguments .*doctor") as caught:
        create_llm(wrong)
    assert "\n" not in str(caught.value)


def test_a_rank_that_cannot_start_is_one_sentence(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorrt_llm

    def broken(**_: Any) -> None:
        raise RuntimeError("Executor worker returned error") from ValueError("no\nmemory")

    monkeypatch.setattr(tensorrt_llm, "LLM", broken)
    with pytest.raises(SettingsError, match="could not start: Executor worker returned error no memory; the log"):
        create_llm(plan_launch(settings(policy="none"), QWEN))


def test_a_package_that_the_engine_lacks_is_one_sentence(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorrt_llm

    def without_ray(**_: Any) -> None:
        raise ModuleNotFoundError("Cannot import Ray")

    monkeypatch.setattr(tensorrt_llm, "LLM", without_ray)
    with pytest.raises(SettingsError, match="lacks a package .*Cannot import Ray"):
        create_llm(plan_launch(settings(policy="none", distributed_executor="ray"), QWEN))


def test_without_tensorrt_llm_it_says_where_to_run() -> None:
    with pytest.raises(SettingsError, match="run inside NVIDIA's TensorRT-LLM image"):
        create_llm(plan_launch(settings(policy="none"), QWEN))


def _tiny(directory: Path, dtype: str) -> dict[str, np.ndarray]:
    config = {
        "model_type": "qwen3_moe",
        **{k: v for k, v in QWEN3_235B.items() if k != "model_type"},
        "num_hidden_layers": 2,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    values = {f"model.layers.{i}.mlp.gate.weight": np.arange(6, dtype=dtype).reshape(2, 3) + i for i in (1, 0)}
    save_file(values, directory / "model.safetensors")
    return values


def test_the_revision_is_a_digest_of_the_routers(tmp_path: Path) -> None:
    _tiny(tmp_path / "a", "float32")
    _tiny(tmp_path / "b", "float16")
    first, same = read_facts(tmp_path / "a", "x"), read_facts(tmp_path / "b", "x")
    assert first.geometry.revision == same.geometry.revision != "unknown"
    assert len(first.geometry.revision) == 16 and first.weight_bytes > 48
    values = _tiny(tmp_path / "c", "float32")
    save_file({name: value + 1 for name, value in values.items()}, tmp_path / "c" / "model.safetensors")
    assert read_facts(tmp_path / "c", "x").geometry.revision != first.geometry.revision


def test_a_configuration_without_weights_has_their_size_from_the_index(tmp_path: Path) -> None:
    _tiny(tmp_path / "a", "float32")
    (tmp_path / "a" / "model.safetensors").unlink()
    assert read_facts(tmp_path / "a", "x").weight_bytes == 0
    (tmp_path / "a" / "model.safetensors.index.json").write_text(
        '{"metadata": {"total_size": 123}, "weight_map": {"model.layers.0.mlp.gate.weight": "model-1.safetensors"}}'
    )
    facts = read_facts(tmp_path / "a", "x")
    assert (facts.weight_bytes, facts.geometry.revision) == (123, "unknown")


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert local_directory(str(tmp_path)) == tmp_path


def test_routes_are_sampled_only_where_nodes_are_chosen(head: str) -> None:
    rate = {"trace_rate_tokens_per_second": 5}
    assert plan_launch(settings(drafter=head, **rate), QWEN).selects
    for facts, drafter in ((QWEN, "none"), (GPT_OSS, head), (DEEPSEEK, "mtp")):
        with pytest.raises(SettingsError, match="trace_rate_tokens_per_second is 5; .* set it to 0"):
            plan_launch(settings(drafter=drafter, **rate), facts)
