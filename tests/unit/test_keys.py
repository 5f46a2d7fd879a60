"""The file of API keys: a key is shown once, its hash is kept, and what is wrong with the file is one sentence without a secret."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from ecospec_orchestrator.cli import main
from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.keys import MAX_KEYS, KeyLimits, add_key, digest_of, read_keys, remove_key

HASH = "0" * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_is_kept_as_its_hash_with_its_limits(path: Path) -> None:
    key = add_key(path, "alice", {"tokens_per_day": 1000, "max_concurrent": None})
    assert key.startswith("eco-") and len(key) >= 43 and key not in path.read_text()
    (known,) = read_keys(path)
    assert known.name == "alice" and known.digest == sha256(key.encode()).digest() == digest_of(key.encode())
    assert known.limits == KeyLimits(tokens_per_day=1000) and known.limits.requests_per_minute is None
    assert known.digest.hex() not in repr(known)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_keys_are_random_and_come_and_go(path: Path) -> None:
    made = {add_key(path, name, {}) for name in ("a", "b", "c")}
    assert len(made) == 3
    path.chmod(0o640)
    remove_key(path, "b")
    assert [key.name for key in read_keys(path)] == ["a", "c"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640, "who may read it is for the operator to say"
    assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing else is left behind"
    with pytest.raises(SettingsError, match="'b' is not in .*; there are: a, c"):
        remove_key(path, "b")
    with pytest.raises(SettingsError, match="'a' is in .* already"):
        add_key(path, "a", {})


BAD_FILES = [
    ("", "cannot be used"),
    ("[]", "no JSON object"),
    ('{"a": {}}', "bad sha256"),
    ('{"a": 5}', "bad entry"),
    ('{"a": {"sha256": "abc"}}', "bad sha256"),
    (f'{{"a": {{"sha256": "{HASH}", "colour": 1}}}}', "bad colour"),
    (f'{{"a": {{"sha256": "{HASH}", "tokens_per_day": 0}}}}', "bad tokens_per_day"),
    (f'{{"a": {{"sha256": "{HASH}", "tokens_per_day": "9"}}}}', "bad tokens_per_day"),
    (f'{{"a b": {{"sha256": "{HASH}"}}}}', "bad name"),
    (f'{{"": {{"sha256": "{HASH}"}}}}', "bad name"),
    (f'{{"a\\n": {{"sha256": "{HASH}"}}}}', "bad name"),
    (f'{{"a": {{"sha256": "{HASH}"}}, "a": {{"sha256": "{HASH}"}}}}', "twice"),
    (f'{{"a": {{"sha256": "{HASH}"}}, "b": {{"sha256": "{HASH}"}}}}', "one key under two names"),
    ("[" * 100_000, "cannot be used"),
    (" " * (2**20 + 1), "larger than"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES, ids=[message for _, message in BAD_FILES])
def test_a_bad_file_is_one_sentence(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(SettingsError, match=message) as caught:
        read_keys(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_key_in_the_wrong_place_is_not_shown(path: Path) -> None:
    path.write_text(json.dumps({"a": {"sha256": "eco-very-secret"}}))
    with pytest.raises(SettingsError) as caught:
        read_keys(path)
    assert "very-secret" not in str(caught.value)
    path.write_text(json.dumps({"eco-very-secret": {"sha256": HASH}}))
    with pytest.raises(SettingsError, match="names are shown") as caught:
        read_keys(path)
    assert "very-secret" not in str(caught.value)


def test_there_is_an_end_to_keys(path: Path) -> None:
    path.write_text(json.dumps({f"k{i}": {"sha256": f"{i:064x}"} for i in range(MAX_KEYS)}))
    assert len(read_keys(path)) == MAX_KEYS
    with pytest.raises(SettingsError, match="revoke one first"):
        add_key(path, "more", {})


def test_a_missing_file_and_a_missing_folder(path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read.*key new NAME"):
        read_keys(path)
    with pytest.raises(SettingsError, match="cannot be written"):
        add_key(path / "deep" / "er", "a", {})


def test_commands_at_the_same_time_lose_no_key(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from ecospec_orchestrator.keys import add_key\n"
        "for i in range(10): add_key(Path(sys.argv[1]), f'{sys.argv[2]}{i}', {})"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    children = [
        subprocess.Popen([sys.executable, "-c", program, str(path), letter], env=environment) for letter in "ab"
    ]
    assert [child.wait(60) for child in children] == [0, 0]
    assert len(read_keys(path)) == 20


def test_the_command_prints_a_key_once_and_the_file_lets_it_be_revoked(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECOSPEC_API_KEYS_FILE", str(path))
    assert main(["key", "new", "bob", "--tokens-per-minute", "500"]) == 0
    said = capsys.readouterr()
    key = said.out.strip()
    assert read_keys(path)[0].digest == digest_of(key.encode()) and key not in said.err and "only time" in said.err
    assert main(["key", "new", "carol"]) == 0
    capsys.readouterr()
    assert main(["key", "list"]) == 0
    listed = capsys.readouterr().out
    assert listed.splitlines() == ["bob: tokens_per_minute 500", "carol: limits of the server"]
    assert main(["key", "revoke", "bob", "--file", str(path)]) == 0
    assert [known.name for known in read_keys(path)] == ["carol"]
    capsys.readouterr()
    assert main(["key", "new", "no good"]) == 2
    assert "bad name" in capsys.readouterr().err
    monkeypatch.delenv("ECOSPEC_API_KEYS_FILE")
    assert main(["key", "list"]) == 2
    assert "No file of API keys is named" in capsys.readouterr().err
