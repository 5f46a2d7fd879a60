from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.settings import Settings, load_settings


def test_options_win_over_the_environment_which_wins_over_defaults() -> None:
    settings = load_settings({"gamma": "6"}, {"ECOSPEC_GAMMA": "5", "ECOSPEC_PORT": "9000", "PATH": "/bin"})
    assert (settings.gamma, settings.port, settings.max_running) == (6, 9000, 8)


def test_defaults_are_the_documented_ones() -> None:
    settings = load_settings({}, {})
    assert (settings.host, settings.port, settings.predictor_address) == ("127.0.0.1", 8000, "127.0.0.1:50051")
    assert (settings.policy, settings.gamma, settings.eps, settings.seed_root) == ("goodput", 4, 1.0, True)
    assert (settings.model, settings.drafter, settings.probe_share) == ("demo", "auto", 0.005)
    assert settings.device == "auto" and load_settings({"device": "cuda:1"}, {}).device == "cuda:1"
    assert (settings.draft_depth, settings.draft_top_k, settings.max_waiting) == (3, 2, 64)
    assert (settings.max_context_tokens, settings.max_body_bytes, settings.predictor_deadline_ms) == (2048, 2**20, 50)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("gamma", "0", "1 to 64"),
        ("gamma", "four", "1 to 64"),
        ("port", "70000", "65535"),
        ("policy", "fastest", "none, likelihood, ecospec or goodput"),
        ("eps", "nan", "above 0"),
        ("eps", "-1", "above 0"),
        ("predictor_deadline_ms", "0", "above 0"),
        ("predictor_address", "localhost", "host:port"),
        ("predictor_address", "localhost:0", "host:port"),
        ("seed_root", "perhaps", "true or false"),
        ("log_level", "loud", "debug, info"),
        ("probe_share", "0.5", "0 to 0.2"),
        ("max_slowdown", "0.5", "1 to 100"),
        ("expert_buffer", "all", "batch, request or none"),
        ("footprints", "guess", "predictor, oracle"),
        ("footprint_accuracy", "1.5", "0 to 1"),
        ("max_body_bytes", "1", "1024"),
        ("kv_cache_mib", "-1", "or 0 for"),
        ("prefill_share", "0", "above 0"),
        ("prefix_reuse", "maybe", "true or false"),
        ("trace_rate_tokens_per_second", "-1", "0 (none leave) to 1000000"),
        ("trace_max_records", "0", "1 to 1000000"),
        ("device", "gpu", "cpu, cuda or cuda:N"),
        ("device", "cuda:", "cpu, cuda or cuda:N"),
        ("device", "cuda:-1", "cpu, cuda or cuda:N"),
        ("key_tokens_per_day", "-1", "or 0 for any number"),
        ("max_request_seconds", "inf", "or 0 for any"),
        ("drain_seconds", "inf", "as long as a request may take"),
        ("profile_seconds", "601", "or 0 for never"),
        ("client_write_seconds", "0", "above 0"),
        ("max_connections", "0", "1 to 100000"),
        ("admin_port", "70000", "a port"),
        ("memory_bandwidth_gb_per_second", "-1", "0 where it is not known"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(name: str, value: str, allowed: str) -> None:
    for arguments in (({name: value}, {}), ({}, {f"ECOSPEC_{name.upper()}": value})):
        with pytest.raises(SettingsError) as caught:
            load_settings(*arguments)
        message = str(caught.value)
        assert name in message and repr(value) in message and allowed in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 3600),
        ({"max_request_seconds": 600}, 600),
        ({"max_request_seconds": 600, "drain_seconds": 5}, 5),
        ({"drain_seconds": 0}, 0),
        ({"max_request_seconds": 0}, 86_400),
    ],
)
def test_what_may_run_may_finish_at_shutdown(settings: dict[str, float], seconds: float) -> None:
    assert load_settings(settings, {}).drain_limit_seconds == seconds


def test_an_unknown_variable_is_refused_with_a_suggestion() -> None:
    with pytest.raises(SettingsError, match=r"ECOSPEC_GAMA is not known.*ECOSPEC_GAMMA"):
        load_settings({}, {"ECOSPEC_GAMA": "4"})
    with pytest.raises(SettingsError, match="ECOSPEC_ZZZ is not known"):
        load_settings({}, {"ECOSPEC_ZZZ": "4"})


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(SettingsError, match="colour is not known"):
        load_settings({"colour": "red"}, {})


def test_keys_are_split_and_never_shown() -> None:
    settings = load_settings({}, {"ECOSPEC_API_KEYS": "key-a, key-b,,"})
    assert settings.keys == ("key-a", "key-b")
    assert "key-a" not in repr(settings)


def test_the_administrators_key_is_never_shown() -> None:
    settings = load_settings({}, {"ECOSPEC_ADMIN_KEY": "a-long-word"})
    assert "a-long-word" not in repr(settings) and settings.admin_key.get_secret_value() == "a-long-word"
    assert "--admin-key" not in run_cli("serve", "--help").stdout


def test_the_state_stores_address_is_checked_and_its_password_never_shown() -> None:
    settings = load_settings({}, {"ECOSPEC_STATE_STORE_URL": "redis://:hush@cache:1/0"})
    assert "hush" not in repr(settings) and settings.trace_rate_tokens_per_second == 0
    with pytest.raises(SettingsError, match=r"state_store_url .* is a secret; allowed: .*redis://host") as caught:
        load_settings({}, {"ECOSPEC_STATE_STORE_URL": "http://:hush@cache"})
    assert "hush" not in str(caught.value)


def test_every_setting_says_what_is_allowed() -> None:
    assert all(field.description for field in Settings.model_fields.values())


def run_cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    full: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-m", "ecospec_orchestrator.cli", *arguments]
    return subprocess.run(command, env=full, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (("serve", "--gamma", "0"), {}, "gamma"),
        (("demo",), {"ECOSPEC_POLICY": "magic"}, "ECOSPEC_POLICY"),
        (("serve",), {"ECOSPEC_GAMA": "1"}, "ECOSPEC_GAMA"),
    ],
)
def test_the_start_stops_with_one_sentence(
    arguments: tuple[str, ...], environment: dict[str, str], expected: str
) -> None:
    done = run_cli(*arguments, **environment)
    assert done.returncode == 2
    assert expected in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
