"""The demo as a user starts it: both processes, real weights, real HTTP and gRPC."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from api_server import wait_until
from demo_process import Demo, running, start
from server_process import health


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """Asks the predictor in every step."""
    with running(tmp_path_factory.mktemp("cache"), "--policy", "ecospec") as found:
        yield found


def test_measures_the_machine_once_and_decides_by_it(tmp_path: Path) -> None:
    prompt = "Write a Python function that adds two numbers."
    with running(tmp_path) as demo:
        assert len(list(tmp_path.glob("ecospec/profile-*.json"))) == 1
        assert demo.metric("ecospec_policy_profile_valid") == 1
        speculating = demo.complete(prompt, 48)["choices"][0]["message"]["content"]
        assert demo.metric("ecospec_policy_expected_seconds_total") > 0
        assert demo.metric("ecospec_policy_realised_seconds_total") > 0
    profile = next(tmp_path.glob("ecospec/profile-*.json"))
    measured = profile.stat().st_mtime_ns
    with running(tmp_path, "--probe-share", "0.02") as demo:
        assert profile.stat().st_mtime_ns == measured and demo.metric("ecospec_policy_profile_valid") == 1
    with running(tmp_path, "--policy", "none") as demo:
        assert demo.complete(prompt, 48)["choices"][0]["message"]["content"] == speculating


def test_answers_coherently_and_reports_what_it_cost(demo: Demo) -> None:
    body = demo.complete("What is the capital of France?")
    assert "Paris" in body["choices"][0]["message"]["content"]
    speculative, ours = body["metrics"]["speculative_decoding"], body["metrics"]["ecospec"]
    assert speculative["num_draft_tokens"] > 0
    assert speculative["mean_acceptance_length"] >= 1
    assert ours["bytes_per_token"] > 1e8  # a plain step reads about 0.5 GB
    assert body["usage"]["completion_tokens"] <= 24


def test_streams_python_token_by_token(demo: Demo) -> None:
    chunks, text = [], ""
    with httpx.stream(
        "POST",
        f"{demo.url}/v1/completions",
        timeout=120,
        json={
            "prompt": "def add(a, b):\n    return",
            "max_tokens": 12,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
    text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
    assert text.replace(" ", "").startswith("a+b")
    assert sum(bool(c["choices"]) for c in chunks) > 2
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 12


def test_the_experts_counted_were_predicted_by_the_service(demo: Demo) -> None:
    demo.complete("Name three colours.")
    predicted, both = (
        demo.metric("ecospec_predicted_experts_total"),
        demo.metric("ecospec_predicted_and_actual_experts_total"),
    )
    assert predicted > 0 and both / predicted > 0.6  # chance is 4 of 32
    experts, shared = (demo.metric("ecospec_bytes_read_total", f'{{component="{c}"}}') for c in ("experts", "shared"))
    assert experts > shared > 0


def test_a_request_may_wish_for_a_policy_and_gets_the_same_text(demo: Demo) -> None:
    assert {"none", "likelihood", "ecospec"} <= set(httpx.get(f"{demo.url}/version").json()["info"]["policies"])
    found = {
        policy: demo.complete("Name three colours.", ecospec={"policy": policy})
        for policy in ("none", "likelihood", "ecospec")
    }
    assert len({body["choices"][0]["message"]["content"] for body in found.values()}) == 1
    plain = found["none"]["metrics"]
    assert plain["ecospec"]["steps_not_speculated"] == plain["ecospec"]["steps"] > 0
    assert found["likelihood"]["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_sampling_with_a_seed_is_reproducible_in_company(demo: Demo) -> None:
    import concurrent.futures

    ask = lambda _: demo.complete("Tell me a story.", 16, temperature=1.0, seed=11)["choices"][0]["message"]["content"]
    alone = ask(0)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(4))) == {alone}


def test_fits_its_memory_promise(demo: Demo) -> None:
    pages = [
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (demo.process.pid, *demo.predictor_pids())
    ]
    assert sum(pages) * os.sysconf("SC_PAGE_SIZE") < 5e9


def test_a_dead_predictor_costs_no_request_and_is_used_again(demo: Demo) -> None:
    before = demo.complete("Count to ten.")["choices"][0]["message"]["content"]
    fallbacks = demo.metric("ecospec_predictor_fallbacks_total", '{reason="unavailable"}')
    (pid,) = demo.predictor_pids()
    os.kill(pid, signal.SIGKILL)
    assert demo.complete("Count to ten.")["choices"][0]["message"]["content"] == before
    assert demo.metric("ecospec_predictor_fallbacks_total", '{reason="unavailable"}') > fallbacks
    deadline = time.monotonic() + 90
    while True:
        seen = demo.metric("ecospec_predicted_experts_total")
        assert demo.complete("Count to ten.")["choices"][0]["message"]["content"] == before
        if demo.metric("ecospec_predicted_experts_total") > seen:
            break
        assert time.monotonic() < deadline, "the restarted predictor was never used again"
        time.sleep(1)


def test_interrupt_stops_both_processes(demo: Demo) -> None:
    pids = demo.predictor_pids()
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(60) == 0
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_a_signal_while_kernels_are_compiled_ends_both_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))  # there are none yet
    demo = start(tmp_path, "--policy", "ecospec")
    try:
        wait_until(lambda: list(tmp_path.glob("kernels/**/*.nbi")) and demo.predictor_pids(), 120)
        assert health(demo.url) == "loading"
        (predictor,) = demo.predictor_pids()
        demo.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert demo.process.wait(15) == 0
        print(f"ended after {time.monotonic() - began:.1f} s")
        with pytest.raises(ProcessLookupError):
            os.kill(predictor, 0)
    finally:
        demo.process.kill()
        demo.process.wait()
        assert demo.process.stdout is not None
        demo.process.stdout.close()
