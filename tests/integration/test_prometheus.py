"""A real Prometheus scrapes a live orchestrator and a live predictor: every panel, rule and alert has data."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from api_server import serve
from fake_engine import ChainEngine
from monitoring import PROMETHEUS, dashboards, panels, rules
from ports import free_port
from predictor_server import predictor_process
from programs import require
from promql import selectors
from redis_server import RedisServer
from scheduler_harness import Harness

from ecospec_orchestrator.footprint.remote import RemoteFootprintSource
from ecospec_orchestrator.state.redis import RedisStore
from ecospec_orchestrator.state.route_sampler import RouteSampler
from ecospec_predictor.live import registry
from ecospec_proto.predictor_version import PredictorVersion
from ecospec_proto.shared_state import StoreAddress

GEOMETRY = ChainEngine.geometry
SCRAPE, WINDOW = "500ms", "10s"
SECONDS = 90.0  # until everything must have data
WINDOWS = {"$__rate_interval": WINDOW, "$__range": WINDOW, "$instance": ".*", "$predictor": ".*", "$model": ".*"}
LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")
KEY = "a-key-of-these-tests"
# What stays at zero where nothing fails; all other counters that are asked for must count.
FAULTS = {
    "ecospec_kv_cache_violations_total",
    "ecospec_policy_fallback_steps_total",
    "ecospec_predictor_contexts_resent_total",
    "ecospec_predictor_deadline_misses_total",
    "ecospec_predictor_fallbacks_total",
    "ecospec_predictor_sessions_dropped_total",
    "ecospec_predictor_swaps_total",
    "ecospec_predictor_trace_records_refused_total",
    "ecospec_predictor_version_changes_total",
    "ecospec_quota_local_decisions_total",
    "ecospec_slow_clients_total",
    "ecospec_trace_records_dropped_total",
}


def chosen(expr: str) -> str:
    """With Grafana's variables as in a dashboard that shows everything."""
    return re.sub(r"\$\w+", lambda name: WINDOWS.get(name[0], name[0]), expr)


def need(command: str) -> str:
    return require(command, "prometheus")


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_configuration_and_every_alert_fires_when_it_should(tmp_path: Path) -> None:
    promtool = need("promtool")
    assert "SUCCESS" in run(promtool, "check", "config", "prometheus.yml")
    assert "SUCCESS" in run(promtool, "test", "rules", "tests/rules_test.yml")
    # The test can fail: an alert with another threshold does not fire.
    cases = yaml.safe_load((PROMETHEUS / "tests/rules_test.yml").read_text("utf-8"))
    cases |= {"rule_files": ["recording.yml", "alerts.yml"]}
    cases["tests"] = [test for test in cases["tests"] if test["name"] == "EcoSpecPredictorFallbacks"]
    (tmp_path / "test.yml").write_text(yaml.safe_dump(cases), "utf-8")
    for threshold, works in (("> 0.1", True), ("> 0.3", False)):
        for name in cases["rule_files"]:
            text = (PROMETHEUS / name).read_text("utf-8")
            (tmp_path / name).write_text(
                text.replace("fallback_share:rate5m > 0.1", f"fallback_share:rate5m {threshold}"), "utf-8"
            )
        done = subprocess.run([promtool, "test", "rules", str(tmp_path / "test.yml")], capture_output=True)
        assert (done.returncode == 0) == works, done.stdout


class Server:
    """Prometheus on a free port, with the checked-in rules and scrape jobs, pointed at other addresses, at a faster pace."""

    def __init__(self, directory: Path, targets: dict[str, str]) -> None:
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text("utf-8"))
        config["global"] = {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": "1s"}
        jobs = [job for job in config["scrape_configs"] if job["job_name"] in targets]
        for job in jobs:
            job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
        config["scrape_configs"] = jobs
        for name in config["rule_files"]:
            rule_file = yaml.safe_load((PROMETHEUS / name).read_text("utf-8"))
            for group in rule_file["groups"]:
                group.pop("interval", None)
            (directory / name).write_text(yaml.safe_dump(rule_file), "utf-8")
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
        self.port = free_port()
        self._log = (directory / "log").open("w")
        self._process = subprocess.Popen(
            [
                need("prometheus"),
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=10)

    def ready(self) -> bool:
        assert self._process.poll() is None, "Prometheus has ended; see its log"
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/-/ready").status_code == 200
        return False

    def query(self, expr: str) -> list[float]:
        """The values of its series now, without those that are no number."""
        answer = self.client.post("/api/v1/query", data={"query": expr})
        body = answer.json()
        assert body["status"] == "success", (expr, body)
        values = [float(series["value"][1]) for series in body["data"]["result"]]
        return [value for value in values if not math.isnan(value)]

    def rules(self) -> list[dict[str, Any]]:
        groups = self.client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def close(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()
        self._log.close()


class Load:
    """Callers that keep the server busy until the end."""

    def __init__(self, url: str) -> None:
        self._url, self._stop = url, threading.Event()
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(3)]
        for thread in self._threads:
            thread.start()

    def _run(self, seed: int) -> None:
        key = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=self._url, trust_env=False, timeout=20) as client:
            at = seed
            while not self._stop.wait(0.02):
                at += 1
                body = {
                    "prompt": [*range(1, 21)] * 4 + [1 + at % 20],  # its first page is found in the cache
                    "max_tokens": 40,
                    "temperature": (0.0, 1.0)[at % 2],
                    "seed": at,
                }
                answer = client.post("/v1/completions", json=body, headers=key)
                if answer.status_code != 200:
                    self.failed.append(answer.text)
                if at % 10 == 0:
                    for status, change, headers in (
                        (400, {"max_tokens": -1}, key),
                        (401, {}, {}),
                        (504, {}, key | {"X-Request-Timeout-Seconds": "0.0001"}),
                    ):
                        answer = client.post("/v1/completions", json=body | change, headers=headers)
                        if answer.status_code != status:
                            self.failed.append(f"{status} was due: {answer.text}")

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def model_directory(root: Path) -> Path:
    directory = root / "one"
    directory.mkdir()
    config = {"format_version": 1, "target": dataclasses.asdict(GEOMETRY), "training": {"held_out_top_k_accuracy": 0.9}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@contextlib.contextmanager
def live_system(tokenizer: Any, directory: Path) -> Iterator[dict[str, str]]:
    """Orchestrator, predictor and Redis under load -> addresses to scrape, by job."""
    with contextlib.ExitStack() as stack:
        redis_server = stack.enter_context(RedisServer())
        with redis_server.client() as client:
            registry.publish(client, PredictorVersion(GEOMETRY.fingerprint, "one", "/models", "a" * 64, {}, 1.0))
        metrics_port = free_port()
        _, port = stack.enter_context(
            predictor_process(
                GEOMETRY,
                model_dir=str(model_directory(directory)),
                metrics_port=metrics_port,
                state_store_url=redis_server.url,
                score_tokens_per_second=1000,
            )
        )
        harness = Harness("goodput", max_context_tokens=128)
        scheduler, ledger = harness.scheduler, harness.ledger
        scheduler.footprint_source = RemoteFootprintSource(
            f"127.0.0.1:{port}",
            GEOMETRY,
            0.25,
            ledger.observe_predictor_call,
            None,
            ledger.state.observe_version_in_use,
            ledger.observe_context_resent,
        )
        policy: Any = scheduler.policy
        policy.another_level = lambda trees, level: True
        policy.wants_footprints = lambda trees: True
        scheduler.on_step = None  # reports would pile up
        ledger.bind(lambda: scheduler.running, lambda: scheduler.waiting, harness.engine.cache_use)
        ledger.bind_policy(lambda: scheduler.policy.health())
        ledger.model.describe(GEOMETRY.name, GEOMETRY.revision, "cpu", 1e9)
        store = RedisStore(StoreAddress.parse(redis_server.url), GEOMETRY.fingerprint, 1000, ledger.state)
        stack.callback(store.close)
        sampler = RouteSampler(GEOMETRY, 1e6, store.append_trace, ledger.state.sampled_tokens.inc)
        stack.callback(sampler.close)
        scheduler.on_verified = sampler.observe
        server = stack.enter_context(serve(tokenizer, scheduler, ledger=ledger, api_keys=KEY))
        load = Load(server.url)
        stack.callback(load.close)
        yield {
            "ecospec-orchestrator": server.url.removeprefix("http://"),
            "ecospec-predictor": f"127.0.0.1:{metrics_port}",
        }
    assert not load.failed, load.failed[:3]


def asked_for() -> dict[str, str]:
    """Where -> PromQL that must have data. An alert that is quiet has none, but what it looks at has."""
    found, selected = {}, []
    for where, panel in panels():
        for target in panel["targets"]:
            found[f"{where}, {target['refId']}"] = chosen(target["expr"])
            selected += selectors(target["expr"])
    for file, dashboard in dashboards().items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                asked = LABEL_VALUES.fullmatch(variable["query"])
                assert asked, variable["query"]
                found[f"{file}, variable {variable['name']}"] = f"count by ({asked[2]}) ({chosen(asked[1])})"
    for rule in rules("recording.yml"):
        found[f"recording.yml: {rule.name}"] = rule.name
        selected += selectors(rule.expr)
    for rule in rules("alerts.yml"):
        for at, selector in enumerate(selectors(rule.expr)):
            found[f"alerts.yml: {rule.name}, {at}"] = selector.series
            selected.append(selector)
    counters = {selector.name for selector in selected if selector.before in ("rate", "increase")}
    assert counters > FAULTS, f"nothing looks at {FAULTS - counters}"
    return found | {f"{name} has counted": f"sum({name}) > 0" for name in sorted(counters - FAULTS)}


def test_every_expression_has_data_while_the_system_works(byte_tokenizer: Any, tmp_path: Path) -> None:
    need("prometheus")
    expressions = asked_for()
    assert len(expressions) > 250
    with live_system(byte_tokenizer, tmp_path) as targets:
        server = Server(tmp_path, targets)
        try:
            deadline, empty = time.monotonic() + SECONDS, list(expressions)
            while not server.ready():
                assert time.monotonic() < deadline, (tmp_path / "log").read_text("utf-8")
                time.sleep(0.1)
            while empty and time.monotonic() < deadline:
                time.sleep(1)
                empty = [where for where, expr in expressions.items() if where in empty and not server.query(expr)]
            assert not empty, {where: expressions[where] for where in empty}
            assert server.query("up") == [1.0, 1.0]
            found = server.rules()
            assert len(found) == len(rules("recording.yml")) + len(rules("alerts.yml"))
            assert {rule["health"] for rule in found} == {"ok"}, [r for r in found if r["health"] != "ok"]
            assert not [rule["name"] for rule in found if rule.get("alerts") and rule["labels"]["severity"] == "page"]
        finally:
            server.close()
