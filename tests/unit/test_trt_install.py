"""The plug-in in an engine: registered out of its tree, it chooses nodes, counts experts and samples traces, and changes no token."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trt_engine import STAND_IN, TREE, Decoded, decode, model_config, random_table, stand_in_engine

from ecospec_orchestrator.core import Footprints
from ecospec_orchestrator.engine.tensorrt_llm import registration
from ecospec_orchestrator.engine.tensorrt_llm.plugin import config as plugin_config
from ecospec_orchestrator.engine.tensorrt_llm.plugin import install
from ecospec_orchestrator.engine.tensorrt_llm.plugin.config import ENVIRONMENT, PluginConfig, PluginConfigError
from ecospec_orchestrator.engine.tensorrt_llm.plugin.install import InstallError, resolve
from ecospec_orchestrator.engine.tensorrt_llm.plugin.signatures import UnsupportedVersionError
from ecospec_orchestrator.engine.tensorrt_llm.plugin.spool import take_records
from ecospec_orchestrator.engine.tensorrt_llm.plugin.step_file import StepReader
from ecospec_orchestrator.engine.tensorrt_llm.plugin.token_state import pack_ids
from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.token_table import TokenTable
from ecospec_proto.trace_document import check_document

EXPERTS, TOP_K, VOCABULARY = 16, 2, 211
PROMPTS = {11: [5, 9, 2], 12: [17], 13: [100, 8]}  # above the ids that the engine warms up with
MOE_LAYERS = {"Qwen3MoeForCausalLM": 3, "GptOssForCausalLM": 3, "DeepseekV3ForCausalLM": 2}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(install, "_current", None)
    with stand_in_engine():
        yield


def geometry(architecture: str) -> TargetGeometry:
    return TargetGeometry("stand-in", "test", VOCABULARY, 8, MOE_LAYERS[architecture], EXPERTS, TOP_K)


def configuration(architecture: str, mode: str, folder: Path, **more: Any) -> PluginConfig:
    options = {"steps_file": str(folder / "steps"), "status_file": str(folder / "status")} | more
    return PluginConfig(
        mode,  # type: ignore[arg-type]
        geometry(architecture),
        TREE.max_total_draft_tokens,
        TREE.max_draft_len,
        TREE.max_batch_size,
        **options,
    )


def save_table(architecture: str, folder: Path) -> Path:
    rng = np.random.default_rng(3)
    experts = random_table(rng, 150, MOE_LAYERS[architecture], EXPERTS, TOP_K)
    path = folder / "table.safetensors"
    TokenTable(geometry(architecture), np.arange(149, dtype=np.int32), experts[:149], experts[149]).save(path)
    return path


def register(config: PluginConfig) -> None:
    """As the launcher does it."""
    os.environ[ENVIRONMENT] = config.encode()
    try:
        registration.register()
    finally:
        del os.environ[ENVIRONMENT]


def build(architecture: str, config: PluginConfig | None) -> Any:
    """The model that the engine builds for an architecture, with the plug-in or without."""
    if config is not None:
        register(config)
    module = importlib.import_module(f"tensorrt_llm._torch.models.{install.ARCHITECTURES[architecture]}")
    registry = importlib.import_module("tensorrt_llm._torch.models.modeling_utils")
    built = registry.MODEL_CLASS_MAPPING[architecture]
    assert (built is getattr(module, architecture)) is (config is None)
    return built(model_config())


def metadata_class() -> Any:
    return importlib.import_module("tensorrt_llm._torch.speculative.eagle3").Eagle3OneModelSpecMetadata


def expected(prompts: dict[int, list[int]], decoded: Decoded) -> dict[int, list[int]]:
    from tensorrt_llm._torch.speculative.eagle3_dynamic_tree import after

    outputs = {}
    for request, prompt in prompts.items():
        text = list(prompt)
        for _ in decoded.outputs[request]:
            text.append(after(text[-1]))
        outputs[request] = text[len(prompt) :]
    return outputs


def test_graph_mode_changes_the_nodes_and_no_token(engine: None, tmp_path: Path) -> None:
    architecture = "Qwen3MoeForCausalLM"
    table = save_table(architecture, tmp_path)
    model = build(architecture, configuration(architecture, "graph", tmp_path, table=str(table)))
    assert pickle.loads(pickle.dumps(type(model))) is type(model)  # as MPI sends it to the ranks
    worker = model.spec_worker
    assert model.epilogue == [worker] and type(worker).__name__ == "Eagle3OneModelDynamicTreeWorker"
    choices: list[tuple[list[list[int]], list[list[int]]]] = []
    inner = worker.ecospec_select

    def spy(worker: Any, batch: int, stock: Any) -> Any:
        tokens, indices = inner(worker, batch, stock)
        choices.append((indices.tolist(), stock()[1].tolist()))
        return tokens, indices

    worker.ecospec_select = spy
    decoded = decode(model, metadata_class(), PROMPTS, 40, join_at={13: 5}, padding=1)
    assert decoded.outputs == expected(PROMPTS, decoded)
    assert sum(ours != stock for ours, stock in choices) > 5
    assert json.loads((tmp_path / "status").read_text()) | {"pid": 0} == {
        "mode": "graph",
        "rank": 0,
        "ranks": 1,
        "pid": 0,
        "worker": "Eagle3OneModelDynamicTreeWorker",
    }


@pytest.mark.parametrize("architecture", sorted(MOE_LAYERS))
def test_the_counts_are_what_the_experts_saw(engine: None, tmp_path: Path, architecture: str) -> None:
    """Also where the gate is never called, and without the layers and rows that are not the target's."""
    model = build(architecture, configuration(architecture, "stock", tmp_path))
    layers = [
        layer.mlp.experts
        for layer in model.model.decoder_layers()[: model.model.target_layers]
        if hasattr(layer.mlp, "experts")
    ]
    reader: list[StepReader] = []
    wanted, found = [], []

    class Metadata(metadata_class()):  # type: ignore[misc]
        def prepare(self) -> None:
            super().prepare()
            if not reader and (tmp_path / "steps").exists():
                reader.append(StepReader(tmp_path / "steps"))
            for r in reader:
                found.extend(r.poll())

    decoded = decode(model, Metadata, PROMPTS, 60, join_at={12: 4}, padding=1)
    for step, (real, prompts, lengths) in enumerate(decoded.steps):
        if prompts:
            continue
        rows = sum(lengths[:real])
        wanted.append((real, rows, [len(torch.unique(layer.seen[step][:rows])) for layer in layers]))
    assert len(layers) == MOE_LAYERS[architecture]
    assert len(found) > 10
    assert [(c.requests, c.rows, c.distinct_experts.tolist()) for c in found] == wanted[: len(found)]
    assert all(c.emitted == int((c.accepted * np.arange(1, len(c.accepted) + 1)).sum()) for c in found)


ANSWERS: dict[str, Any] = {}


def make_predictor(**arguments: Any) -> Any:
    """Found by its name, as the launcher gives it; answers with a table, and keeps what it was asked."""
    ANSWERS["arguments"], ANSWERS["asked"] = arguments, []

    def predict(asked: Any) -> list[Footprints]:
        ANSWERS["asked"].append([(t.request_id, list(t.context_tokens)) for t in asked])
        found = []
        for tree in asked:
            rows = [tree.context_tokens[-1], *tree.tree.tokens.tolist()]
            bits = pack_ids(ANSWERS["table"][rows], EXPERTS).reshape(len(rows), -1, 1)
            found.append(Footprints(bits, np.ones(len(rows), np.bool_)))
        return found

    return predict


def test_eager_mode_asks_with_the_texts_and_samples_traces(engine: None, tmp_path: Path) -> None:
    architecture = "Qwen3MoeForCausalLM"
    ANSWERS["table"] = random_table(np.random.default_rng(4), VOCABULARY, 3, EXPERTS, TOP_K)
    sys.modules["trt_test_predictor"] = SimpleNamespace(make=make_predictor)  # type: ignore[assignment]
    config = configuration(
        architecture,
        "eager",
        tmp_path,
        predictor="trt_test_predictor:make",
        predictor_arguments={"address": "here"},
        deadline_seconds=30.0,
        traces_folder=str(tmp_path / "traces"),
        traces_pause_seconds=1e-9,
    )
    try:
        model = build(architecture, config)
        decoded = decode(model, metadata_class(), PROMPTS, 150, join_at={13: 3})
    finally:
        del sys.modules["trt_test_predictor"]
    assert ANSWERS["arguments"] == {"address": "here"}
    assert decoded.outputs == expected(PROMPTS, decoded)
    texts = {str(r): [*prompt, *decoded.outputs[r]] for r, prompt in PROMPTS.items()}
    asked = [question for step in ANSWERS["asked"] for question in step]
    assert len(asked) > 100 and all(texts[name][: len(context)] == context for name, context in asked)
    check_traces(model, tmp_path / "traces", texts, architecture)


def check_traces(model: Any, folder: Path, texts: dict[str, list[int]], architecture: str) -> None:
    documents = list(take_records(folder, geometry(architecture)))
    assert 1 <= len(documents) <= len(PROMPTS)
    for document in documents:
        check_document(document, geometry(architecture))
        chain = document.tokens[document.accepted].tolist()
        start = int(document.positions[0])
        assert any(text[start : start + len(chain)] == chain for text in texts.values())
        routed = (document.routes >= 0).all((1, 2))
        assert routed.sum() >= 12 and (~document.accepted).sum() > 5
        logits = routes_of(model, document.tokens[routed])
        np.testing.assert_array_equal(np.sort(document.routes[routed], 2), logits)


def test_graph_mode_samples_traces_from_what_its_steps_left_on_the_device(engine: None, tmp_path: Path) -> None:
    architecture = "Qwen3MoeForCausalLM"
    config = configuration(
        architecture,
        "graph",
        tmp_path,
        table=str(save_table(architecture, tmp_path)),
        traces_folder=str(tmp_path / "traces"),
        traces_pause_seconds=1e-9,
    )
    model = build(architecture, config)
    decoded = decode(model, metadata_class(), PROMPTS, 150, join_at={13: 3}, padding=1)
    assert decoded.outputs == expected(PROMPTS, decoded)
    texts = {str(r): [*prompt, *decoded.outputs[r]] for r, prompt in PROMPTS.items()}
    check_traces(model, tmp_path / "traces", texts, architecture)


def routes_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """int [rows, layers, k], sorted: what the stand-in's layers, which see a token alone, route it to."""
    for layer in model.model.layers:
        layer.mlp.experts.seen.clear()
    with torch.inference_mode():
        model.model(torch.from_numpy(tokens.astype(np.int64)))
    return torch.stack([layer.mlp.experts.seen[0] for layer in model.model.layers], 1).numpy()


@pytest.mark.parametrize(("module", "name"), install.METADATA)
def test_steps_are_seen_whichever_metadata_the_engine_prepares(
    engine: None, tmp_path: Path, module: str, name: str
) -> None:
    """Multi-token prediction has its own for several modules, and that of EAGLE-3 for one."""
    architecture = "DeepseekV3ForCausalLM"
    build(architecture, configuration(architecture, "stock", tmp_path))
    plugin = install.current()
    assert plugin is not None
    seen: list[Any] = []
    plugin.before_step = lambda *step: seen.append(step)  # type: ignore[assignment,method-assign]
    prepared = getattr(importlib.import_module(f"tensorrt_llm._torch.speculative.{module}"), name)
    prepared(request_ids=[11, 12], seq_lens=[7, 4], num_generations=1).prepare()
    assert seen == [([11, 12], [7, 4], 1)]


def test_the_engine_may_build_its_model_twice(engine: None, tmp_path: Path) -> None:
    architecture = "Qwen3MoeForCausalLM"
    config = configuration(architecture, "graph", tmp_path, table=str(save_table(architecture, tmp_path)))
    build(architecture, config)
    model = build_again = importlib.import_module("tensorrt_llm._torch.models.modeling_utils").MODEL_CLASS_MAPPING[
        architecture
    ](model_config())
    steps = []
    plugin = install.current()
    assert plugin is not None and build_again is model
    inner = plugin.before_step
    plugin.before_step = lambda *step: (steps.append(len(step[0])), inner(*step))  # type: ignore[assignment,method-assign]
    decoded = decode(model, metadata_class(), PROMPTS, 10)
    assert decoded.outputs == expected(PROMPTS, decoded) and len(steps) == len(decoded.steps)


def test_what_the_plug_in_cannot_work_in_is_refused(engine: None, tmp_path: Path) -> None:
    architecture = "Qwen3MoeForCausalLM"
    config = configuration(architecture, "graph", tmp_path, table="t")
    model = SimpleNamespace(spec_worker=None)
    with pytest.raises(InstallError, match="EAGLE-3 or MTP is needed"):
        install.install(model, model_config(), config)
    model.spec_worker = torch.nn.Identity()
    with pytest.raises(InstallError, match="worker is Identity"):
        install.install(model, model_config(), config)
    with pytest.raises(InstallError, match="rendezvous is empty; host:port is needed for 8 ranks"):
        install.install(model, model_config(ranks=8), config)
    other = configuration("DeepseekV3ForCausalLM", "stock", tmp_path)
    built = build(architecture, None)
    with pytest.raises(InstallError, match="has 3 MoE layers; the target stand-in has 2"):
        install.install(built, model_config(), other)
    with pytest.raises(InstallError, match="'nothing.here:at_all' cannot be found"):
        resolve("nothing.here:at_all")


def test_an_unknown_version_is_not_installed_in(engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "require_supported", lambda: (_ for _ in ()).throw(UnsupportedVersionError("no")))
    with pytest.raises(UnsupportedVersionError):
        register(configuration("Qwen3MoeForCausalLM", "stock", tmp_path))
    assert "tensorrt_llm._torch" not in sys.modules


def test_the_configuration_travels_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration("GptOssForCausalLM", "graph", tmp_path, table="t", predictor_arguments={"a": 1})
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert plugin_config.from_environment() is None
    monkeypatch.setenv(ENVIRONMENT, config.encode())
    assert plugin_config.from_environment() == config
    values = json.loads(config.encode())
    for change, message in (
        ({"nodes": 0}, "nodes is 0; a whole number from 1"),
        ({"mode": "fast"}, "mode is 'fast'; one of graph, eager, stock"),
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"eps": 0}, "eps is 0; a number above 0"),
        ({"table": ""}, "mode graph needs a token table"),
        ({"mode": "eager"}, "mode eager needs one"),
        ({"traces_folder": "x", "mode": "stock"}, "traces need mode graph or eager"),
        ({"max_tokens": 0}, "max_tokens is 0; a whole number from 1"),
        ({"geometry": {"name": "x"}}, "cannot be read as a plug-in configuration"),
    ):
        monkeypatch.setenv(ENVIRONMENT, json.dumps(values | change))
        with pytest.raises(PluginConfigError, match=message):
            plugin_config.from_environment()
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "plugin.json"))
    with pytest.raises(PluginConfigError, match="cannot be read"):
        plugin_config.from_environment()


PROBE = """
import importlib.abc, json, pkgutil, sys

class NotInstalled(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numba", "llvmlite", "grpc", "transformers", "fastapi", "pydantic", "redis", "scipy", "safetensors"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotInstalled())
import ecospec_orchestrator.engine.tensorrt_llm.plugin as plugin
names = [m.name for m in pkgutil.iter_modules(plugin.__path__)]
for name in names:
    __import__(f"{plugin.__name__}.{name}")
print(json.dumps([names, sorted(n for n in sys.modules if n.startswith("tensorrt_llm"))]))
"""


def test_the_plug_in_needs_torch_and_numpy_and_no_tensorrt_llm() -> None:
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    names, engine_modules = json.loads(run.stdout)
    assert len(names) > 10 and engine_modules == []


RAY = """
import json
import os
import pickle
from ecospec_orchestrator.engine.tensorrt_llm.plugin.ray_extension import WorkerExtension
from tensorrt_llm._torch.models.modeling_utils import MODEL_CLASS_MAPPING
from trt_engine import model_config
before = WorkerExtension().ecospec_status()
MODEL_CLASS_MAPPING["Qwen3MoeForCausalLM"](model_config())
print(json.dumps([before, WorkerExtension().ecospec_status()]))
"""


def test_rays_workers_register_it_when_they_import_the_extension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, configuration("Qwen3MoeForCausalLM", "stock", tmp_path).encode())
    path = [str(STAND_IN), str(STAND_IN.parent), *sys.path]
    monkeypatch.setenv("PYTHONPATH", ":".join(entry for entry in path if entry))
    run = subprocess.run([sys.executable, "-c", RAY], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    before, after = json.loads(run.stdout)
    assert before is None and (after["mode"], after["rank"]) == ("stock", 0)
