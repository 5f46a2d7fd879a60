"""The plug-in's way into an engine that starts: its configuration, classes that the ranks find by name, and its sign of life."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from trt_engine import STAND_IN, model_config, random_table, stand_in_engine

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.engine.tensorrt_llm.artifacts import checked_table, read_schedule
from ecospec_orchestrator.engine.tensorrt_llm.facts import ModelFacts
from ecospec_orchestrator.engine.tensorrt_llm.installation import install, mode_of
from ecospec_orchestrator.engine.tensorrt_llm.launcher import LaunchPlan
from ecospec_orchestrator.engine.tensorrt_llm.plugin import install as plugin_install
from ecospec_orchestrator.engine.tensorrt_llm.plugin.config import ENVIRONMENT, decode
from ecospec_orchestrator.engine.tensorrt_llm.plugin.spool import TraceSpool
from ecospec_orchestrator.engine.tensorrt_llm.plugin.step_file import StepShape, StepWriter
from ecospec_orchestrator.engine.tensorrt_llm.predictor_link import connect
from ecospec_orchestrator.engine.tensorrt_llm.steps import StepTally
from ecospec_orchestrator.engine.tensorrt_llm.system import TensorRtSystem
from ecospec_orchestrator.engine.tensorrt_llm.traces import TraceIntake
from ecospec_orchestrator.live import LiveSettings
from ecospec_orchestrator.settings import Settings, load_settings
from ecospec_orchestrator.state.memory import MemoryStore
from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.token_table import TokenTable
from ecospec_proto.trace_record import encode_record
from ecospec_proto.trace_rows import TraceRows

ARCHITECTURE = "Qwen3MoeForCausalLM"
GEOMETRY = TargetGeometry("stand-in", "test", 211, 8, 3, 16, 2)
FACTS = ModelFacts("qwen3", GEOMETRY, 3, "full", 8, 2, 8, "none", 1000, 4096, 0)
TREE = LaunchPlan({"max_num_tokens": 8192}, "tree", 5, 3, True)  # as trt_engine.TREE
CHAIN = LaunchPlan({"max_num_tokens": 8192}, "chain", 3, 3, False)
REGISTRY = "tensorrt_llm._torch.models.modeling_utils"


def settings(**values: Any) -> Settings:
    return load_settings({"engine": "tensorrt-llm", "model": "m", "max_running": 4, **values}, {})


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_install, "_current", None)
    monkeypatch.delenv(ENVIRONMENT, raising=False)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    experts = random_table(np.random.default_rng(3), 20, 3, 16, 2)
    path = tmp_path / "token_table.safetensors"
    TokenTable(GEOMETRY, np.arange(19, dtype=np.int32), experts[:19], experts[19]).save(path)
    return path


def test_the_mode_follows_from_who_chooses_and_where() -> None:
    assert mode_of(settings(), TREE) == "graph"
    assert mode_of(settings(cuda_graphs=False), TREE) == "eager"
    assert mode_of(settings(), CHAIN) == mode_of(settings(cuda_graphs=False), CHAIN) == "stock"


def test_the_plug_in_arrives_in_the_model_that_the_engine_builds(table: Path) -> None:
    with stand_in_engine():
        installation = install(settings(token_table=table, eps=2.5, max_running=4), FACTS, TREE)
        config = decode(os.environ[ENVIRONMENT])
        assert (config.mode, config.geometry, config.nodes, config.levels) == ("graph", GEOMETRY, 5, 3)
        assert (config.eps, config.max_batch_size, config.table) == (2.5, 4, str(table))
        assert config.rendezvous.startswith("127.0.0.1:") and installation.folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(SettingsError, match="has started without the plug-in"):
            installation.confirm()
        importlib.import_module(REGISTRY).MODEL_CLASS_MAPPING[ARCHITECTURE](model_config())
        installation.confirm()
        StepTally(installation.steps, Ledger()).poll()
        with pytest.raises(SettingsError, match="it works in mode graph"):
            replace(installation, mode="stock").confirm()
        installation.close()
    assert not installation.folder.exists() and ENVIRONMENT not in os.environ


def test_a_rank_finds_the_classes_by_their_names(table: Path) -> None:
    """TensorRT-LLM pickles its registry of model classes for the ranks, which put it over their own."""
    child = (
        "import pickle, sys\n"
        "found = pickle.load(sys.stdin.buffer)\n"
        "import importlib; registry = importlib.import_module(sys.argv[1])\n"
        "registry.MODEL_CLASS_MAPPING.update(found)\n"
        "from trt_engine import model_config\n"
        "model = registry.MODEL_CLASS_MAPPING[sys.argv[2]](model_config())\n"
        "print(type(model).__name__, type(model).__module__, model.spec_worker.ecospec_select.__self__.config.eps)\n"
    )
    with stand_in_engine():
        installation = install(settings(token_table=table, eps=2.5), FACTS, TREE)
        mapping = pickle.dumps(importlib.import_module(REGISTRY).MODEL_CLASS_MAPPING)
        path = os.pathsep.join([str(STAND_IN), str(STAND_IN.parent), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", child, REGISTRY, ARCHITECTURE],
            input=mapping,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": path},
            timeout=100,
        )
        assert done.returncode == 0, done.stderr.decode()
        name, module, eps = done.stdout.decode().split()
        assert (name, eps) == (ARCHITECTURE, "2.5") and module.endswith("tensorrt_llm.registration")
        installation.confirm()
        installation.close()


def test_where_the_engine_chooses_it_only_counts() -> None:
    with stand_in_engine():
        installation = install(settings(), FACTS, CHAIN)
        config = decode(os.environ[ENVIRONMENT])
        assert (config.mode, config.table, config.predictor) == ("stock", "", "")
        assert config.steps_file == str(installation.steps)
        installation.close()


def test_without_graphs_the_predictor_is_asked() -> None:
    with stand_in_engine():
        chosen = settings(cuda_graphs=False, predictor_address="127.0.0.1:9", predictor_deadline_ms=20)
        installation = install(chosen, FACTS, TREE)
        config = decode(os.environ[ENVIRONMENT])
        installation.close()
    assert (config.mode, config.deadline_seconds) == ("eager", 0.02)
    assert config.predictor_arguments["geometry"] == asdict(GEOMETRY)
    assert plugin_install.resolve(config.predictor) is connect


def test_with_ray_the_ranks_of_other_nodes_find_rank_0(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(token_table=table, distributed_executor="ray")
    with stand_in_engine():
        with pytest.raises(
            SettingsError, match="distributed_executor is 'ray', which cannot be imported .* argument RAY"
        ):
            install(chosen, FACTS, TREE)
        monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
        monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace(get_node_ip_address=lambda: "10.1.2.3"))
        installation = install(chosen, FACTS, TREE)
        config = decode(os.environ[ENVIRONMENT])
        installation.close()
    assert config.rendezvous.startswith("10.1.2.3:") and config.rendezvous.removeprefix("10.1.2.3:").isdigit()


def test_what_cannot_be_installed_is_a_sentence(tmp_path: Path, table: Path) -> None:
    with pytest.raises(SettingsError, match="Setting token_table is missing.*cuda_graphs to false"):
        install(settings(), FACTS, TREE)
    other = replace(FACTS, geometry=replace(GEOMETRY, revision="other"))
    with pytest.raises(SettingsError, match="Setting token_table cannot be used: .*build a table from its own traces"):
        checked_table(settings(token_table=table), other)
    with pytest.raises(SettingsError, match="The plug-in for TensorRT-LLM cannot be installed: TensorRT-LLM is not"):
        install(settings(token_table=table), FACTS, TREE)  # which is not here
    wrong = settings(cuda_graphs=False, predictor_tls_ca=tmp_path / "none.pem")
    with stand_in_engine(), pytest.raises(SettingsError, match="predictor_tls_ca"):
        install(wrong, FACTS, TREE)
    assert ENVIRONMENT not in os.environ


def test_experts_of_steps_reach_the_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger, file = Ledger(), tmp_path / "steps"
    writer = StepWriter(file, StepShape(3, 2, 4))
    tally = StepTally(file, ledger)
    writer.append(np.array([1, 3, 2, 0, 1, 0, 5, 6, 7], np.int32))
    tally.poll()
    tally.poll()
    assert 'ecospec_distinct_experts_by_layer_total{layer="2"} 7.0' in ledger.render().decode()
    for _ in range(9):
        writer.append(np.array([1, 3, 2, 0, 1, 0, 1, 1, 1], np.int32))
    tally.poll()
    assert "steps were not counted in time" in caplog.text
    StepTally(tmp_path / "missing", ledger).poll()
    assert "cannot be counted" in caplog.text


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"a": 1}', '{"4": 1.5}', '{"4": true}', '{"-1": 2}', "null"])
def test_a_file_that_is_no_schedule_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(content)
    with pytest.raises(SettingsError, match="Setting draft_len_schedule is"):
        read_schedule(path)


def test_a_schedule_is_read_with_its_batch_sizes_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps({8: 1, 4: 3}))
    assert read_schedule(path) == {8: 1, 4: 3}
    assert read_schedule(None) is None
    with pytest.raises(SettingsError, match="cannot be read"):
        read_schedule(tmp_path / "nowhere")


def test_sampled_traces_reach_the_state_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger, folder = Ledger(), tmp_path / "traces"
    store = MemoryStore(4, ledger.state)
    intake = TraceIntake(folder, GEOMETRY, store, ledger.state)
    intake.poll()  # the engine has not made the folder yet
    spool = TraceSpool(folder)
    rows = TraceRows(GEOMETRY.moe_layers, GEOMETRY.top_k)
    rows.add_chain(np.array([3]))
    rows.add_chain(np.array([7, 8]), np.zeros((2, 3, 2), np.int64) + [0, 5])
    spool.put(message := encode_record(rows.document("ab" * 16), GEOMETRY))
    spool.put(b"broken")
    intake.poll()
    intake.poll()
    assert store.read_traces(9) == [message] and "is left out" in caplog.text
    assert "ecospec_trace_sampled_tokens_total 2.0" in ledger.render().decode()


@pytest.mark.parametrize("graphs", [True, False])
def test_routes_are_sampled_where_nodes_are_chosen(table: Path, graphs: bool) -> None:
    with stand_in_engine():
        chosen = settings(token_table=table, cuda_graphs=graphs, trace_rate_tokens_per_second=64)
        installation = install(chosen, FACTS, TREE)
        config = decode(os.environ[ENVIRONMENT])
        installation.close()
    assert (config.traces_folder, config.traces_pause_seconds) == (str(installation.traces), 2.0)
    assert config.max_tokens == 8192


def system_of(chosen: Settings, waiting: list[int]) -> TensorRtSystem:
    scheduler = SimpleNamespace(change=waiting.append)
    return TensorRtSystem(scheduler, None, "m", Ledger(), {}, chosen, SimpleNamespace(store="the store"), None)  # type: ignore[arg-type]


def test_live_settings_are_used_or_refused_by_name() -> None:
    waiting: list[int] = []
    start = settings(policy="ecospec")
    system = system_of(start, waiting)
    live = LiveSettings(start, system.reconfigure, None)
    live.change({"max_waiting": 3, "max_prompt_tokens": 10})
    assert waiting == [3] and system.store == "the store"  # type: ignore[comparison-overlap]
    for name, value in (("policy", "likelihood"), ("gamma", 5), ("max_running", 2), ("prefill_share", 0.25)):
        with pytest.raises(SettingsError, match=f"Setting {name} is '{value}'; engine tensorrt-llm keeps .*restart"):
            live.change({name: value})
    assert waiting == [3] and live.changes == {"max_waiting": 3, "max_prompt_tokens": 10}
