"""A whole system of engine tensorrt-llm, from settings to traces: the plug-in in the engine that starts, with stand-ins for the package
and its executor."""

from __future__ import annotations

import importlib
import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_server import wait_until
from routers_only import save_routers_only
from stand_in_llm import SamplingParams, StandInLlm
from trt_engine import decode, model_config, random_table, stand_in_engine

from ecospec_orchestrator.core import Request, SettingsError, TokenEvent
from ecospec_orchestrator.engine.tensorrt_llm import system as system_module
from ecospec_orchestrator.engine.tensorrt_llm.facts import read_facts
from ecospec_orchestrator.engine.tensorrt_llm.launcher import LaunchPlan
from ecospec_orchestrator.engine.tensorrt_llm.plugin import install as plugin_install
from ecospec_orchestrator.engine.tensorrt_llm.plugin.config import ENVIRONMENT
from ecospec_orchestrator.settings import Settings, load_settings
from ecospec_proto.token_table import TokenTable
from ecospec_proto.trace_record import decode_record

ARCHITECTURE = "Qwen3MoeForCausalLM"
PROMPTS = {11: [5, 9, 2], 12: [17]}


@pytest.fixture
def chosen(tmp_path: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Settings for a model with the stand-in engine's sizes, and everything that trees and graphs need."""
    monkeypatch.setattr(plugin_install, "_current", None)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    directory, head = tmp_path / "target", tmp_path / "head"
    head.mkdir()
    save_routers_only(directory, byte_tokenizer, layers=3, experts=16, hidden=8)
    experts = random_table(np.random.default_rng(3), 150, 3, 16, 2)
    table = TokenTable(
        read_facts(directory, "target").geometry, np.arange(149, dtype=np.int32), experts[:149], experts[149]
    )
    table.save(tmp_path / "table.safetensors")
    with stand_in_engine():
        yield load_settings(
            {
                "engine": "tensorrt-llm",
                "model": str(directory),
                "drafter": str(head),
                "policy": "ecospec",
                "token_table": tmp_path / "table.safetensors",
                "draft_depth": 3,
                "draft_top_k": 3,
                "gamma": 5,
                "max_running": 4,
                "trace_rate_tokens_per_second": 1e6,
            },
            {},
        )


def engine_that_decodes(plan: LaunchPlan) -> tuple[Any, Any]:
    """As create_llm: a rank builds the model that is registered, and decodes; here it does so before it answers anybody."""
    assert plan.selects
    model = importlib.import_module("tensorrt_llm._torch.models.modeling_utils").MODEL_CLASS_MAPPING[ARCHITECTURE](
        model_config()
    )
    metadata = importlib.import_module("tensorrt_llm._torch.speculative.eagle3").Eagle3OneModelSpecMetadata
    llm = StandInLlm(4, 0.002)
    llm.decode = lambda: decode(model, metadata, PROMPTS, 150)  # type: ignore[attr-defined]
    decode(model, metadata, PROMPTS, 5)  # before anybody counts
    return llm, SamplingParams


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_and_traces_of_the_plug_in_reach_metrics_and_the_store(
    chosen: Settings, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_module, "create_llm", engine_that_decodes)
    settings = (
        chosen if graphs else chosen.model_copy(update={"cuda_graphs": False, "predictor_address": "127.0.0.1:9"})
    )
    said: list[str] = []
    system = system_module.build_system(settings, said.append)
    assert system.installation is not None
    folder = system.installation.folder
    try:
        assert system.info["selection"] == ("graph" if graphs else "eager") and "chosen by EcoSpec" in said[0]
        system.scheduler.start()
        system.scheduler._llm.decode()  # type: ignore[attr-defined]
        events: queue.Queue[TokenEvent] = queue.Queue()
        system.scheduler.submit(Request("r", (1, 2, 3), 6), events.put)
        assert events.get(timeout=10).tokens == (1,)
        wait_until(lambda: 'ecospec_distinct_experts_by_layer_total{layer="2"}' in system.ledger.render().decode())
        wait_until(lambda: len(system.store.read_traces(9)) > 0)
        geometry = read_facts(Path(settings.model), "target").geometry
        for message in system.store.read_traces(9):
            document = decode_record(message, geometry)
            assert (document.routes >= 0).any() and document.accepted[0]
    finally:
        system.close()
    assert not folder.exists() and ENVIRONMENT not in os.environ


def test_an_engine_that_starts_without_the_plug_in_is_not_served(
    chosen: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[StandInLlm] = []

    def without(plan: LaunchPlan) -> tuple[Any, Any]:
        engines.append(StandInLlm())
        return engines[0], SamplingParams

    monkeypatch.setattr(system_module, "create_llm", without)
    with pytest.raises(SettingsError, match="has started without the plug-in .*--policy none"):
        system_module.build_system(chosen, lambda _: None)
    assert engines[0].shut_down and ENVIRONMENT not in os.environ
