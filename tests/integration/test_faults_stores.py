"""Redis and the disk fail under a live server: answers stay the target's own, limits stay limits, and the metrics and the log say what
happened. Redis by itself, with more faults: test_shared_quotas.py and test_state_store.py.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fake_engine import greedy
from live_system import GEOMETRY, TOKENS, Live
from redis_server import RedisServer

from ecospec_orchestrator.settings import load_settings
from ecospec_orchestrator.state import redis as redis_store
from ecospec_orchestrator.state import redis_quotas
from ecospec_orchestrator.state.sharing import Sharing, open_sharing
from ecospec_predictor.cli import main
from ecospec_proto.traces import TraceReader


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "BACKOFF_SECONDS", (0.02, 0.1))
    monkeypatch.setattr(redis_store, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(redis_quotas, "RETRY_SECONDS", 0.1)


def share(live: Live, redis: RedisServer, **environment: str) -> Sharing:
    """What the server shares through Redis, as its settings would have it."""
    variables = {"ECOSPEC_STATE_STORE_URL": redis.url, **environment}
    sharing = open_sharing(load_settings({}, variables), GEOMETRY, live.harness.ledger.state)
    live.server.app.state.service.quotas = sharing.store
    return sharing


def warnings(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if part in r.getMessage() and r.levelno >= logging.WARNING]


def test_redis_that_dies_fills_up_and_forgets_while_routes_are_sampled(caplog: pytest.LogCaptureFixture) -> None:
    with Live() as live, RedisServer() as redis:
        sharing = share(live, redis, ECOSPEC_TRACE_RATE_TOKENS_PER_SECOND="1000000")
        assert sharing.sampler is not None
        live.harness.scheduler.on_verified = sharing.sampler.observe

        def up() -> bool:
            return live.metric("state_store_up") == 1

        def written() -> float:
            return live.metric("trace_records_written_total")

        live.right_until(lambda: written() >= 3)
        redis.kill()
        live.right_until(lambda: not up())
        redis.start()  # without what it knew
        live.right_until(up)
        with redis.client() as client:
            client.config_set("maxmemory", "1")
            live.right_until(lambda: not up())
            client.config_set("maxmemory", "0")
        enough = written() + 3
        live.right_until(lambda: written() >= enough)
        live.harness.scheduler.on_verified = None
        sharing.close()
        with redis.client() as client:
            assert client.dbsize() >= 1
    assert 2 <= len(warnings(caplog, "state store")) <= 4


def test_limits_hold_while_redis_dies_fills_up_and_forgets(caplog: pytest.LogCaptureFixture) -> None:
    """Five answers a day: none is refused that may be asked for, and none beyond them is given, whether Redis is there or not."""
    day = {"key_tokens_per_day": 5 * (3 + TOKENS)}

    def statuses(live: Live, times: int) -> list[int]:
        answers = [live.ask([1, 2, 3]) for _ in range(times)]
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["token_ids"] == greedy([1, 2, 3], TOKENS)
            else:
                assert int(answer.headers["retry-after"]) > 0 and "tokens per day" in answer.json()["error"]["message"]
        return [answer.status_code for answer in answers]

    with Live(**day) as one, Live(**day) as two, RedisServer() as redis:
        stores = [share(one, redis), share(two, redis)]
        assert statuses(one, 2) == [200, 200]
        assert statuses(two, 4) == [200, 200, 200, 429], "together they have five"
        redis.kill()
        assert statuses(one, 4) == [200, 200, 200, 429], "its own two are remembered, those of the other one are not"
        assert statuses(two, 1) == [200]
        assert one.metric("quotas_degraded") == 1
        assert one.server.client.get("/ready").status_code == 200
        redis.start()  # full buckets
        time.sleep(2 * redis_quotas.RETRY_SECONDS)
        assert statuses(one, 3) == [200] * 3 and statuses(two, 3) == [200, 200, 429]
        assert one.metric("quotas_degraded") == 0
        with redis.client() as client:
            client.flushall()  # or what is refused need not be written
            client.config_set("maxmemory", "1")
            statuses(one, 1)
            assert one.metric("quotas_degraded") == 1
        for sharing in stores:
            sharing.close()
    assert "each replica applies them by itself" in warnings(caplog, "Quotas")[0]


def test_a_full_disk_while_traces_are_collected_loses_no_finished_shard(tmp_path: Path) -> None:
    """No file may grow beyond a limit, which the system says in the middle of a write, as it does for a full disk."""
    short, long = [[1 + i, 2] for i in range(6)], [3] * 33
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in (*short, long)))

    with Live("none") as live:
        live.server.app.state.service.info |= {"geometry": asdict(GEOMETRY), "fingerprint": GEOMETRY.fingerprint}
        common = ["collect", "--from", "ecospec", "--url", live.server.url, "--prompts", str(prompts)]
        common += ["--max-tokens", str(TOKENS), "--temperature", "0", "--concurrency", "1", "--max-shard-tokens", "1"]

        def arguments(name: str) -> list[str]:
            return [*common, "--out", str(tmp_path / name)]

        assert main(arguments("whole")) == 0
        sizes = sorted(path.stat().st_size for path in (tmp_path / "whole").glob("*.safetensors"))
        limit = (sizes[-2] + sizes[-1]) // 2  # room for all shards but that of the long prompt
        failed = subprocess.run(
            [sys.executable, "-m", "ecospec_predictor.cli", *arguments("full")],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert failed.returncode == 1 and "Traceback" not in failed.stderr, failed.stderr
        assert str(tmp_path / "full") in failed.stderr and "cannot be written" in failed.stderr
        assert told(tmp_path / "full") == {tuple(prompt): greedy(prompt, TOKENS) for prompt in short}
        asked = live.metric("request_success_total", finished_reason="length")
        assert main(arguments("full")) == 0, "there is room again"
        assert live.metric("request_success_total", finished_reason="length") == asked + 1
        assert told(tmp_path / "full") == {tuple(p): greedy(p, TOKENS) for p in (*short, long)}
        live.all_is_right()


def told(directory: Path) -> dict[Any, list[int]]:
    """Prompt -> answer of every document."""
    documents = [document.tokens[document.accepted].tolist() for document in TraceReader(directory, GEOMETRY)]
    return {tuple(tokens[:-TOKENS]): tokens[-TOKENS:] for tokens in documents}
