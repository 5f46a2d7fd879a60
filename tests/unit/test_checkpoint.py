"""Headers against safetensors' own writer, and every kind of damage by name."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.engine.torch.checkpoint import INDEX, SINGLE, inspect, read_header

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b.weight": torch.tensor([1.5, -2.0]),
    "c.scales": torch.tensor([[7, 8, 9]], dtype=torch.uint8),
    "d.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
}


def write_config(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    write_config(tmp_path)
    save_file(TENSORS, tmp_path / SINGLE, metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_config(tmp_path)
    names = list(TENSORS)
    weight_map = {}
    for number, part in enumerate((names[:2], names[2:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({n: TENSORS[n] for n in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def change_header(file: Path, change) -> None:
    """Rewrite the header text of a file; the data stays."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    text = change(content[8 : 8 + length].decode()).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_tensors_lie_where_the_headers_say(layout: str, request: pytest.FixtureRequest) -> None:
    checkpoint = inspect(request.getfixturevalue(layout))
    assert checkpoint.quantisation == "none" and checkpoint.config["model_type"] == "qwen3_moe"
    assert {n: (i.dtype, i.shape) for n, i in checkpoint.tensors.items()} == {
        "a.weight": ("BF16", (2, 3)),
        "b.weight": ("F32", (2,)),
        "c.scales": ("U8", (1, 3)),
        "d.weight": ("F8_E4M3", (2, 2)),
    }
    for name, info in checkpoint.tensors.items():
        data = info.file.read_bytes()[info.begin : info.begin + info.bytes]
        assert data == TENSORS[name].view(torch.uint8).numpy().tobytes()


def test_a_single_file_counts_before_an_index(single: Path) -> None:
    (single / INDEX).write_text("{}")
    assert set(inspect(single).tensors) == set(TENSORS)


@pytest.mark.parametrize("missing", ["config.json", "model-00002-of-00002.safetensors"])
def test_a_missing_file_is_named(sharded: Path, missing: str) -> None:
    (sharded / missing).unlink()
    with pytest.raises(SettingsError, match=f"{missing} is missing"):
        inspect(sharded)


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere is not a directory"):
        inspect(tmp_path / "nowhere")


def test_a_directory_without_weights(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(SettingsError, match=f"neither {SINGLE} nor {INDEX}"):
        inspect(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        SettingsError, match="pytorch_model.bin, a format that can run code .* convert it to safetensors"
    ):
        inspect(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "\udcff"])
def test_a_configuration_that_is_no_object(single: Path, content: str) -> None:
    (single / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(SettingsError, match=r"config.json (is not JSON|holds a JSON list)"):
        inspect(single)


@pytest.mark.parametrize("keep", [0, 5, 8, 40])
def test_a_file_cut_within_its_header(single: Path, keep: int) -> None:
    file = single / SINGLE
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(SettingsError, match=f"{SINGLE} is truncated or not a safetensors file: {keep} bytes"):
        inspect(single)


def test_a_file_cut_within_its_data_names_the_tensor(single: Path) -> None:
    file = single / SINGLE
    last = max(read_header(file).items(), key=lambda item: item[1].begin)[0]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SettingsError, match=f"{SINGLE} is truncated: tensor {last} ends at byte"):
        inspect(single)


def test_bytes_behind_the_last_tensor(single: Path) -> None:
    with (single / SINGLE).open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(SettingsError, match=f"{SINGLE} has .* bytes where its tensors end"):
        inspect(single)


def test_a_git_lfs_pointer_is_recognised(single: Path) -> None:
    (single / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(SettingsError, match="is a Git LFS pointer.*git lfs pull"):
        inspect(single)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: "x" + t[1:], "header of .*model.safetensors is damaged"),
        (lambda t: "[]", "header of .*model.safetensors is damaged"),
        (lambda t: t.replace('"shape"', '"shap"', 1), "header of .*model.safetensors is damaged"),
        (lambda t: t.replace('"dtype":"BF16"', '"dtype":"Q4_K"'), "a.weight in .* has dtype Q4_K; allowed are BOOL"),
        (lambda t: t.replace("[2,3]", "[2,4]"), r"a.weight in .* has shape \[2, 4\] of BF16 and 12 bytes"),
        (lambda t: t.replace("b.weight", "a.weight"), "a.weight is twice in the header"),
    ],
)
def test_a_damaged_header_is_named(single: Path, change, message: str) -> None:
    change_header(single / SINGLE, change)
    with pytest.raises(SettingsError, match=message):
        inspect(single)


def test_overlapping_tensors_are_refused(single: Path) -> None:
    file = single / SINGLE
    moved = min((i for i in read_header(file).items() if i[1].begin > 8), key=lambda i: i[1].bytes)
    header = json.loads(file.read_bytes()[8:].split(b"}}")[0] + b"}}")
    begin, end = header[moved[0]]["data_offsets"]
    assert begin > 0
    old, new = f"[{begin},{end}]", f"[{begin - 1},{end - 1}]"
    change_header(file, lambda t: t.replace(old, new))
    with pytest.raises(SettingsError, match="begins at byte .*, where the data before it ends at byte"):
        inspect(single)


def test_an_index_at_odds_with_its_shards(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["e.weight"] = "model-00001-of-00002.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(SettingsError, match="e.weight is in model-00001-of-00002.safetensors, which does not hold it"):
        inspect(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    save_file(TENSORS, sharded / "model-00002-of-00002.safetensors")
    with pytest.raises(SettingsError, match="[ab].weight is in both .*00001.* and .*00002"):
        inspect(sharded)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(SettingsError, match="has no weight_map"):
        inspect(sharded)


def test_an_index_cannot_lead_outside_its_directory(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": {"a.weight": "../other.safetensors"}}')
    with pytest.raises(SettingsError, match="'../other.safetensors'; a file of the same directory"):
        inspect(sharded)
