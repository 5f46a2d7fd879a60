"""`ecospec-predictor collect` from files: trace directories that go on, refusals by name, and targets."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import engine_payloads as payloads
import pytest
from engine_payloads import GEOMETRY, OUTPUT, PROMPT, b64, expected, make_routes, npy, write_jsonl

from ecospec_predictor.cli import main
from ecospec_predictor.collect import files
from ecospec_predictor.collect.target import load_target
from ecospec_predictor.errors import SettingsError
from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.hf_config import geometry_from_config, routed_layers
from ecospec_proto.traces import TraceReader


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "geometry.json"
    path.write_text(json.dumps(asdict(GEOMETRY)))
    return path


def answer(seed: int) -> dict[str, Any]:
    """vLLM's, for a text of its own."""
    routes = make_routes(6, seed)
    return {
        "prompt_token_ids": [seed, 2, 3],
        "choices": [{"token_ids": [4, 5, 6, 7], "routed_experts": b64(npy(routes))}],
    }


def collect(out: Path, target: Path, *paths: Path, engine: str = "vllm", more: tuple[str, ...] = ()) -> int:
    arguments = ["collect", "--from", engine, "--out", str(out), "--target", str(target), "--domain", "chat"]
    return main([*arguments, *more, "--in", *map(str, paths)])


def test_all_engines_write_the_same_trace(tmp_path: Path, target: Path) -> None:
    records = {
        "vllm": payloads.vllm_completion(),
        "sglang": payloads.sglang_generate(),
        "tensorrt-llm": payloads.tensorrt_llm(),
        "lightllm": payloads.lightllm(True),
    }
    shards = set()
    for engine, record in records.items():
        out = tmp_path / engine
        assert collect(out, target, write_jsonl(tmp_path / f"{engine}.jsonl", record), engine=engine) == 0
        reader = TraceReader(out, GEOMETRY)
        assert reader.sources == (engine,) and len(reader) == 1
        shards.add((out / "shard-00000.safetensors").read_bytes())
    assert len(shards) == 1
    recorded = payloads.save_recording(tmp_path / "dump.pt", payloads.recording())
    assert collect(tmp_path / "recorder", target, recorded, engine="sglang-recorder") == 0
    assert len(next(iter(TraceReader(tmp_path / "recorder"))).tokens) == len(PROMPT) + len(OUTPUT) - 1


def test_a_second_run_goes_on_and_counts_what_was_there(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, first = tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", *map(answer, range(5)))
    assert collect(out, target, first) == 0
    assert "5 texts with 35 rows written" in capsys.readouterr().out
    second = tmp_path / "b.json"
    second.write_text(json.dumps([answer(4), answer(5)]))
    assert collect(out, target, first, second, more=("--max-shard-tokens", "10")) == 0
    assert "1 texts with 7 rows written" in (said := capsys.readouterr().out) and "6 were there already" in said
    assert [d.tokens[0] for d in TraceReader(out)] == [0, 1, 2, 3, 4, 5]


def test_a_bad_answer_stops_the_run_by_file_and_line_and_what_was_good_is_kept(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, path = tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", answer(1), {"choices": []}, answer(2))
    assert collect(out, target, path) == 1
    assert f"{path}, line 2: it has neither choices nor outputs" in capsys.readouterr().err
    assert len(TraceReader(out)) == 1
    assert collect(out, target, path, more=("--skip-invalid",)) == 0
    captured = capsys.readouterr()
    assert f"left out: {path}, line 2" in captured.err and "1 left out" in captured.out
    assert [d.tokens[0] for d in TraceReader(out)] == [1, 2]


def test_broken_lines_are_named_and_the_others_read(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 5000)
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(answer(1)), '{"choices": [', "[" * 3000, "", '"' + "x" * 20_000 + '"', json.dumps(answer(2))]
    path.write_text("\n".join(lines))
    assert collect(tmp_path / "out", target, path, more=("--skip-invalid",)) == 0
    told = capsys.readouterr().err
    for line, problem in ((2, "no JSON"), (3, "no JSON|response is no object"), (5, "more than 5000 bytes")):
        assert any(f"line {line}: it" in part or f"line {line}: its" in part for part in told.splitlines()), problem
    assert "more than 5000 bytes" in told
    assert [d.tokens[0] for d in TraceReader(tmp_path / "out")] == [1, 2]


def test_a_document_beyond_the_target_is_refused_by_the_trace_format(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = answer(1) | {"prompt_token_ids": [1, 2, 5000]}
    assert collect(tmp_path / "out", target, write_jsonl(tmp_path / "a.jsonl", record)) == 1
    assert "token id 5000; 0 to 999 is allowed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "vllm"], "--from vllm needs --in and --target."),
        (["--from", "ecospec"], "--from ecospec needs --in and --target or --url and --prompts."),
        (["--from", "vllm", "--url", "http://127.0.0.1:1"], "--url needs --from ecospec"),
        (["--from", "ecospec", "--url", "http://127.0.0.1:1", "--prompts", "/nowhere"], "--prompts is '/nowhere'"),
        (["--from", "vllm", "--in", "/nowhere", "--target", "TARGET"], "'/nowhere', which is no file"),
        (["--from", "vllm", "--in", "TARGET", "--target", "/nowhere"], "/nowhere cannot be read"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    options = [str(target) if each == "TARGET" else each for each in arguments]
    assert main(["collect", "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_traces_of_another_target_are_not_mixed(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", answer(1))
    assert collect(tmp_path / "out", target, path) == 0
    target.write_text(json.dumps(asdict(GEOMETRY) | {"revision": "r2"}))
    assert collect(tmp_path / "out", target, path) == 1
    assert "traced on another target: revision is 'r1', 'r2' is needed" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect(target, target, write_jsonl(tmp_path / "a.jsonl", answer(1))) == 1
    assert f"{target} cannot be written" in capsys.readouterr().err


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 129280,
    "hidden_size": 7168,
}


def test_a_hugging_face_directory_describes_its_target(tmp_path: Path) -> None:
    directory = tmp_path / "DeepSeek-V3.1"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(DEEPSEEK))
    target = load_target(directory, "abc")
    assert target.geometry == TargetGeometry("DeepSeek-V3.1", "abc", 129280, 7168, 58, 256, 8)
    assert target.routed_layers == tuple(range(3, 61))
    (directory / "config.json").write_text(json.dumps({"text_config": DEEPSEEK}))
    assert load_target(directory / "config.json", "abc") == target


def test_every_familys_name_for_its_experts_is_known() -> None:
    sizes = {"num_hidden_layers": 4, "num_experts_per_tok": 2, "vocab_size": 9, "hidden_size": 8}
    for key in ("n_routed_experts", "num_experts", "num_local_experts"):
        assert geometry_from_config(sizes | {key: 16}, "m", "r").experts == 16
    assert routed_layers({"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}) == (1, 5)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], "holds no JSON object"),
        ({"name": "x"}, "it has the fields name"),
        (asdict(GEOMETRY) | {"name": 3}, "must be text"),
        (asdict(GEOMETRY) | {"top_k": 99}, "top_k 99 above its 16 experts"),
        ({"num_hidden_layers": 4, "num_experts_per_tok": 2}, "none of n_routed_experts"),
        (DEEPSEEK | {"num_hidden_layers": 10**12}, "num_hidden_layers 1000000000000"),
        (DEEPSEEK | {"first_k_dense_replace": 61}, "moe_layers is 0"),
        (DEEPSEEK | {"vocab_size": None}, "vocab_size is None"),
    ],
)
def test_a_target_that_describes_none_is_refused(tmp_path: Path, record: Any, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(record))
    with pytest.raises(SettingsError, match=message):
        load_target(path, None)


def test_a_revision_beside_a_whole_geometry_is_refused(target: Path) -> None:
    with pytest.raises(SettingsError, match="leave --revision out"):
        load_target(target, "abc")
    assert load_target(target, None).geometry == GEOMETRY and expected().domain == "chat"
