"""Configuration of a training run: overrides win, and whatever is wrong is named in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from ecospec_predictor.errors import SettingsError
from ecospec_predictor.training.config import SmallBackbone, TrainConfig, dump_config, load_config

TEXT = "traces: a\nout: b\nbackbone: {kind: small, layers: 2}\noptimiser: {learning_rate: 1e-4}\n"


def load(tmp_path: Path, text: str = TEXT, *overrides: str) -> TrainConfig:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def test_overrides_win_and_reach_every_section(tmp_path: Path) -> None:
    config = load(
        tmp_path, TEXT, "optimiser.learning_rate=1e-3", "training.minutes=2.5", "backbone.layers=3", "out=c=d"
    )
    assert config.optimiser.learning_rate == 1e-3 and config.training.minutes == 2.5 and config.out == Path("c=d")
    assert isinstance(config.backbone, SmallBackbone) and config.backbone.layers == 3
    assert load(tmp_path, dump_config(config)) == config


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optimiser.learning_rat=1"], r"optimiser.learning_rat in .* is 1, .*allowed: learning_rate, weight_decay"),
        (["backbone.size=1"], r"backbone.size .*allowed: kind, hidden_size"),
        (["epochs=1"], r"Setting epochs .*allowed: traces, out"),
        (["optimiser.learning_rate=-1"], r"optimiser.learning_rate .* is -1; allowed: input should be greater than 0"),
        (["backbone.layers=none"], r"backbone.layers .* is 'none'; allowed: input should be a valid integer"),
        (["training.device=tpu"], r"training.device .* is 'tpu'; allowed: .*'auto', 'cpu' or 'cuda'"),
        (["backbone.kind=large"], r"backbone.kind .* is 'large'; allowed: small, hf, exported"),
        (["backbone={kind: hf}"], r"backbone.path is missing"),
        (["training.epochs"], r"'training.epochs'; allowed: NAME=VALUE"),
        (["traces.x=1"], r"traces.x names a part of traces, which is no section"),
        (["traces={[}"], r"no YAML"),
        (["data.held_out=1"], r"data.held_out .* is 1"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        load(tmp_path, TEXT, *overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "words"), [("[", "is no YAML"), ("", "holds no settings"), ("1: 2", "no text")])
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load(tmp_path, text)
    with pytest.raises(SettingsError, match="cannot be read"):
        load_config(tmp_path / "missing.yaml")
