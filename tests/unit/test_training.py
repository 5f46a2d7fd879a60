"""Train, evaluate and export: a network learns what a table cannot, and a resumed run is the uninterrupted one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_traces import GEOMETRY, make_document, write_run_inputs, write_traces

from ecospec_predictor.base import Query
from ecospec_predictor.cli import main
from ecospec_predictor.errors import PredictorError
from ecospec_predictor.model import load_model
from ecospec_predictor.networks import load_embeddings
from ecospec_predictor.training.commands import recorded_command
from ecospec_predictor.training.config import load_config
from ecospec_predictor.training.evaluate import evaluate
from ecospec_predictor.training.loop import train
from ecospec_proto.token_table import TokenTable
from ecospec_proto.traces import TraceWriter

EXPORT = ("--licence", "Apache-2.0", "--data-source", "Random numbers.")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in it that was trained and evaluated by the commands."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_run_inputs(folder, drafts=True)
    assert main(["train", str(config), "--set", "training.tensorboard=true"]) == 0
    assert main(["eval", str(folder / "run")]) == 0
    return folder


def figures(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run/evaluation.json").read_text(encoding="utf-8"))


def test_it_learns_what_the_token_alone_does_not_tell(trained: Path) -> None:
    predictors = figures(trained)["predictors"]
    assert max(predictors[name]["union_recall"] for name in ("previous_token", "popularity")) < 0.6
    ours, table = predictors["predictor"], predictors["token_table"]
    assert ours["accuracy"] > 0.9 > 0.7 > table["accuracy"] > predictors["popularity"]["accuracy"]
    assert table["by_layer"][0] == 1.0 > 0.7 > table["by_layer"][1]  # layer 0 follows from the token
    assert ours["union_recall"] > 0.95 and ours["union_recall"] > table["union_recall"]
    assert set(ours["by_depth"]) == {"0", "1", "2"} and min(ours["by_depth"].values()) > 0.85
    assert set(ours["by_domain"]) == {"even", "odd"}
    calibration = figures(trained)["calibration"]
    assert 0 <= calibration["expected_calibration_error"] < 0.1
    assert sum(b["predictions"] for b in calibration["bins"]) == figures(trained)["tokens"] * 6
    text = (trained / "run/evaluation.md").read_text(encoding="utf-8")
    assert f"| top-2 accuracy | {100 * ours['accuracy']:.1f} % |" in text


def test_the_run_keeps_what_it_did(trained: Path) -> None:
    lines = [json.loads(line) for line in (trained / "run/progress.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] and len(lines[0]["held_out_top_k_accuracy_by_layer"]) == 3
    assert list((trained / "run/tensorboard").glob("events.*"))
    assert main(["train", str(trained / "predictor.yaml")]) == 1  # it would write over it


def test_an_exported_predictor_serves_its_own_target_only(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = trained / "exported"
    export = ["export", str(trained / "run"), "--out", str(out), "--traces", str(trained / "traces"), *EXPORT]
    assert main(export) == 0 and main(export) == 0  # again into the same place
    card = (out / "README.md").read_text(encoding="utf-8")
    for part in ("license: Apache-2.0", "Random numbers.", "ecospec-predictor train predictor.yaml", "token table"):
        assert part in card
    assert str(trained) not in card + (out / "config.json").read_text(encoding="utf-8")
    assert {v.dtype for v in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert TokenTable.load(out / "token_table.safetensors", GEOMETRY).lookup(np.array([1])).shape == (1, 3, 2)

    embeddings = trained / "embeddings.safetensors"
    model = load_model(out, embeddings, 1, GEOMETRY)
    document = make_document(7)
    (answer,) = model.predict(
        [Query(document.tokens[:8].astype(np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))]
    )
    found = [len(set(a) & set(b)) for a, b in zip(answer[0].tolist(), document.routes[7].tolist(), strict=True)]
    assert sum(found) >= 5
    with pytest.raises(ValueError, match="another target: revision 'r1' instead of 'r2'"):
        load_model(out, embeddings, 1, replace(GEOMETRY, revision="r2"))
    capsys.readouterr()
    assert main(["eval", str(out)]) == 2 and "give --traces" in capsys.readouterr().err
    assert main(["eval", str(out), "--traces", str(trained / "traces"), "--embeddings", str(embeddings)]) == 0


def test_an_export_whose_parts_do_not_belong_together_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = trained / "run", tmp_path / "traces"
    write_traces(other, 3, geometry=replace(GEOMETRY, name="other"))
    assert main(["export", str(run), "--out", str(tmp_path / "x"), "--traces", str(other), *EXPORT]) == 1
    assert "name 'tiny' instead of 'other'" in capsys.readouterr().err and not (tmp_path / "x").exists()

    evaluation = run / "evaluation.json"
    saved = evaluation.read_text(encoding="utf-8")
    try:
        evaluation.write_text(json.dumps({**json.loads(saved), "model": "0" * 32}), encoding="utf-8")
        assert main(["export", str(run), "--out", str(tmp_path / "x"), *EXPORT]) == 1
        assert "the weights '000" in capsys.readouterr().err
        evaluation.unlink()
        assert main(["export", str(run), "--out", str(tmp_path / "x"), *EXPORT]) == 1
        assert "ecospec-predictor eval" in capsys.readouterr().err
    finally:
        evaluation.write_text(saved, encoding="utf-8")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "run/checkpoint.pt", weights_only=True)["weights"]


SHORT = (
    "training.epochs=3",
    "training.evaluate_every_steps=5",
    "training.checkpoint_every_steps=4",
    "training.accumulate=2",
)


def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    straight = load_config(write_run_inputs(tmp_path / "a"), SHORT)
    note = train(straight, "c")
    stopped = load_config(write_run_inputs(tmp_path / "b"), SHORT)
    left = 6

    def should_stop() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    with pytest.raises(PredictorError, match="Stopped at step 6"):
        train(stopped, "c", should_stop=should_stop)
    before = weights(tmp_path / "b")
    with (tmp_path / "b/run/progress.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 7}\n')  # as if it had been killed after an evaluation that no checkpoint knows of
    resumed = train(stopped, "c", resume=True)
    first, second = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], before[name]) for name in first)
    assert note == resumed
    for name in ("best/model.safetensors", "best/config.json", "progress.jsonl"):
        assert (tmp_path / "a/run" / name).read_bytes() == (tmp_path / "b/run" / name).read_bytes()
    other = load_config(tmp_path / "b/predictor.yaml", (*SHORT, "training.seed=3"))
    with pytest.raises(PredictorError, match="training.seed is 3, but the run in .* began with 0"):
        train(other, "c", resume=True)
    with pytest.raises(PredictorError, match="no checkpoint.pt to resume"):
        train(load_config(tmp_path / "b/predictor.yaml", (f"out={tmp_path}/none",)), "c", resume=True)


def test_training_ends_when_the_held_out_accuracy_stands_still_or_the_time_is_over(tmp_path: Path) -> None:
    path = write_run_inputs(tmp_path, documents=12)
    stuck = ("optimiser.learning_rate=1e-30", "training.evaluate_every_steps=1", "training.patience=2")
    assert train(load_config(path, stuck), "c")["steps"] == 1  # the best is the first; two more ended it
    assert len((tmp_path / "run/progress.jsonl").read_text().splitlines()) == 3
    late = (f"out={tmp_path}/late", "training.minutes=1e-9")
    assert train(load_config(path, late), "c")["steps"] == 1


def test_it_goes_on_from_an_exported_predictor(trained: Path, tmp_path: Path) -> None:
    overrides = [
        f"backbone={{kind: exported, path: {trained}/run/best}}",
        f"out={tmp_path}/run",
        "optimiser.learning_rate=1e-9",
        "training.epochs=1",
    ]
    note = train(load_config(trained / "predictor.yaml", overrides), "c")
    assert note["held_out_top_k_accuracy"] > 0.9


def test_a_dry_run_tells_the_plan_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run_inputs(tmp_path, documents=12)
    assert main(["train", str(path), "--dry-run", "--set", "training.tensorboard=true"]) == 0
    text = capsys.readouterr().out
    for part in (
        "draft_rows: 8",
        "parameters",
        "steps: at least",
        "memory (estimated)",
        "one step: loss",
        "held out: ",
    ):
        assert part in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["traces=missing"], "missing is no directory"),
        (["embeddings=null"], "needs the target's token embeddings"),
        (["embeddings=missing.safetensors"], "missing.safetensors cannot be read"),
        (["backbone.heads=3"], "backbone.hidden_size is 32; allowed: a multiple of twice backbone.heads, 6"),
        (["backbone.context_tokens=99"], "data.window_tokens is 16, but the predictor will look at 99"),
        (["data.held_out=0.0001"], "none is held out with data.held_out 0.0001"),
        (["optimiser.learning_rate=1e30", "optimiser.warmup_steps=0"], "The loss is nan at step"),
        (["training.bogus=1"], "no setting has this name"),
        (["backbone={kind: exported, path: missing}"], "missing holds no config.json"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], words: str
) -> None:
    path = write_run_inputs(tmp_path, documents=12)
    assert main(["train", str(path), *(word for o in overrides for word in ("--set", o))]) in (1, 2)
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_broken_weights_are_refused(trained: Path, tmp_path: Path) -> None:
    source = trained / "run/best"
    tensors = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    for change, words in (
        ({"norm": tensors["norm"] * float("nan")}, "no numbers in norm"),
        ({"norm": tensors["norm"][:-1].clone()}, r"has norm of shape \[31\], but config.json needs \[32\]"),
    ):
        save_file(tensors | change, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            load_model(tmp_path, trained / "embeddings.safetensors", 1)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for predictor, words in (
        ({"hidden_size": 2**20}, r"blocks.0.attention_norm of shape \[32\], but config.json needs \[1048576\]"),
        ({"layers": 10**9}, "1000000000 layers; at most 1024"),
        ({"kind": "large"}, "kind 'large'"),
    ):
        text = json.dumps({**config, "predictor": config["predictor"] | predictor})
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            load_model(tmp_path, trained / "embeddings.safetensors", 1)
    (tmp_path / "config.json").write_text(json.dumps(config | {"training": {}}), encoding="utf-8")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(PredictorError, match="does not tell held_out_share"):  # so nobody knows what it was trained on
        evaluate(tmp_path, trained / "traces", trained / "embeddings.safetensors", 100, "cpu")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="cannot be read"):
        load_model(tmp_path, trained / "embeddings.safetensors", 1)


def test_the_recorded_command_names_no_place_of_the_machine() -> None:
    overrides = ["traces=/a/b", "training.epochs=3", "backbone.path=/c"]
    assert recorded_command(Path("/d/predictor.yaml"), overrides) == (
        "ecospec-predictor train predictor.yaml --set traces=TRACES --set training.epochs=3 "
        "--set backbone.path=BACKBONE_PATH"
    )


def test_rows_with_unknown_routes_do_not_disturb_training(tmp_path: Path) -> None:
    path = write_run_inputs(tmp_path, documents=2)
    with TraceWriter(tmp_path / "traces", GEOMETRY, "test") as writer:
        for seed in range(100, 140):
            document = make_document(seed)
            routes = document.routes.copy()
            routes[::3] = -1
            routes[:, 2] = np.where(np.arange(40)[:, None] % 2, -1, routes[:, 2])
            writer.add(replace(document, routes=routes))
    note = train(load_config(path, ("training.epochs=20",)), "c")
    assert note["held_out_top_k_accuracy"] > 0.8


def test_bfloat16_learns_as_well(tmp_path: Path) -> None:
    path = write_run_inputs(tmp_path, documents=30)
    note = train(load_config(path, ("training.precision=bfloat16", "training.epochs=25")), "c")
    assert note["held_out_top_k_accuracy"] > 0.85


def test_accumulated_batches_are_one_large_batch(tmp_path: Path) -> None:
    found = []
    for name, windows, accumulate in (("whole", 8, 1), ("parts", 2, 4)):
        (tmp_path / name).mkdir()
        path = write_run_inputs(tmp_path / name, documents=20, drafts=True)
        overrides = (f"training.batch_windows={windows}", f"training.accumulate={accumulate}", "training.epochs=2")
        train(load_config(path, overrides), "c")
        found.append(weights(tmp_path / name))
    for key in found[0]:
        torch.testing.assert_close(found[0][key], found[1][key], rtol=1e-3, atol=1e-5)


def test_embeddings_are_found_in_a_sharded_model_directory(tmp_path: Path) -> None:
    table = torch.randn(16, 12).bfloat16()
    save_file({"model.embed_tokens.weight": table, "x": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "model-00002-of-00002.safetensors"}}))
    assert torch.equal(load_embeddings(tmp_path), table)
    for names, words in (
        ({"model.embed_tokens.weight": "../x.safetensors"}, "outside its directory"),
        ({"a": "b"}, "names none of the tensors"),
    ):
        index.write_text(json.dumps({"weight_map": names}))
        with pytest.raises(ValueError, match=words):
            load_embeddings(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds none of the tensors"):
        load_embeddings(tmp_path / "other.safetensors")
