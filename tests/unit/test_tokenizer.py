"""A model directory is files of someone else: its code is never run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.tokenizer import load_tokenizer


def test_code_of_a_model_directory_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, own = tmp_path / "ran", {"AutoTokenizer": ["own.Own", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_its_own", "auto_map": own}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": own}))
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whoever starts a server by hand may be asked
    with pytest.raises(SettingsError, match="has no tokenizer that can be read"):
        load_tokenizer(tmp_path)
    assert not ran.exists()
