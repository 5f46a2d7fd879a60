"""Which directory is the current version, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_expert_model import GEOMETRY, FakeExpertModel

from ecospec_predictor import versions
from ecospec_predictor.errors import PredictorError, SettingsError
from ecospec_predictor.settings import load_settings
from ecospec_predictor.versions import Shelf, load_all, load_checked, shelves_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


def test_without_a_mark_the_directory_itself_is_the_version(root: Path) -> None:
    assert Shelf(root).current().directory == root and not Shelf(root).has_versions


def test_the_link_or_else_the_file_names_the_version_and_a_change_of_its_files_shows(root: Path) -> None:
    shelf = Shelf(root)
    (root / "CURRENT").write_text("b\n")
    assert shelf.current().directory == root / "b" and shelf.has_versions
    (root / "current").symlink_to("a")
    first = shelf.current()
    assert first.directory == root / "a"
    assert shelf.current() == first
    (root / "a" / "config.json").write_text("{ }")
    assert shelf.current() != first and shelf.current().directory == first.directory


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "/etc", "a/b", "x" * 300, "missing", "config.json\0"])
def test_a_file_that_names_no_directory_beside_it_is_one_sentence(root: Path, name: str) -> None:
    (root / "CURRENT").write_text(name)
    with pytest.raises(PredictorError, match="cannot be found") as caught:
        Shelf(root).current()
    assert len(str(caught.value)) < 700


def test_options_given_again_and_commas_both_name_several_targets(root: Path) -> None:
    a, b, table = str(root / "a"), str(root / "b"), root / "t.gguf"
    table.touch()
    expected = [Shelf(root / "a", table), Shelf(root / "b", table)]
    both = {"model_dir": [a, b], "embeddings": [str(table), str(table)]}
    assert shelves_of(load_settings(both, {})) == expected
    prefix = "ECOSPEC_PREDICTOR_SERVICE_"
    variables = {f"{prefix}MODEL_DIR": f"{a}, {b}", f"{prefix}EMBEDDINGS": f"{table},{table}"}
    assert shelves_of(load_settings({}, variables)) == expected
    assert shelves_of(load_settings({"model_dir": [a, b]}, {})) == [Shelf(root / "a"), Shelf(root / "b")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_dir": "a,missing"}, "missing', which is no directory"),
        ({"model_dir": "a,b", "embeddings": "t.gguf"}, "1 files for 2 directories"),
        ({"model_dir": "a", "embeddings": "none.gguf"}, "none.gguf', which does not exist"),
        ({"model_dir": "a", "watch_versions": "true"}, "watch_versions is true"),
        ({"model_dir": ","}, "model_dir"),
    ],
)
def test_wrong_places_are_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], words: str
) -> None:
    (root / "t.gguf").touch()
    monkeypatch.chdir(root)
    with pytest.raises(SettingsError) as caught:
        shelves_of(load_settings(options, {}))
    assert words in str(caught.value)


def test_two_models_for_one_target_are_refused_with_both_places(root: Path) -> None:
    with pytest.raises(PredictorError) as caught:
        load_all([Shelf(root / "a"), Shelf(root / "b")], lambda *_: FakeExpertModel())
    for words in (str(root / "a"), str(root / "b"), GEOMETRY.fingerprint):
        assert words in str(caught.value)


def test_a_version_that_does_not_fit_into_memory_is_refused_before_it_is_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "a" / "config.json").write_text(json.dumps({"target": {"vocab_size": 1000, "hidden_size": 500}}))
    (root / "a" / "model.safetensors").write_bytes(bytes(10**6))
    monkeypatch.setattr(versions, "available_memory_bytes", lambda: 6 * 10**6 - 1)
    table = root / "table.gguf"
    with pytest.raises(PredictorError, match="5 MiB"):
        load_checked(root / "a", table, lambda *_: pytest.fail("it was read"))
    load_checked(root / "a", table, lambda *_: FakeExpertModel(), beside=True)  # the table is there already
    load_checked(root / "a", None, lambda *_: FakeExpertModel())  # needs none
    monkeypatch.setattr(versions, "available_memory_bytes", lambda: 6 * 10**6)
    load_checked(root / "a", table, lambda *_: FakeExpertModel())
    monkeypatch.setattr(versions, "available_memory_bytes", lambda: 3 * 10**6 - 1)
    with pytest.raises(PredictorError, match="2 MiB"):
        load_checked(root / "a", table, lambda *_: pytest.fail("it was read"), beside=True)
