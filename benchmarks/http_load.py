"""The demo server under many HTTP clients for minutes: errors, memory, waiting, and what HTTP costs beside the steps.

    python benchmarks/http_load.py [--minutes 10] [--clients 64] [--port PORT] [--output FILE]

Every client streams one chat answer after another, of mixed prompt and answer lengths, some sampled, and leaves one in twenty in the
middle. An answer counts only if it ends with its reason and with the tokens that its usage names. One answered 429 waits as long as
Retry-After says.

- Memory: resident size of the server and of the predictor, median of the first minute after a fifth of the time against the last one.
- Waiting: seconds to the first token; 64 clients at 8 places wait for their turn, so the longest is compared with the median.
- HTTP: processor seconds of the server's event-loop thread (parsing, tokenizing, streaming) over the seconds of all steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

PROMPTS = Path(__file__).parent / "prompts.json"
ANSWER_TOKENS = (4, 16, 48, 96, 160)
LEAVE_SHARE, SAMPLED_SHARE, LONG_SHARE = 0.05, 0.25, 0.1
SAMPLE_SECONDS, START_SECONDS, WARM_SHARE = 2.0, 600.0, 0.2


@dataclass
class Tally:
    """What the clients saw."""

    first_seconds: list[float] = field(default_factory=list)
    answers: Counter[int] = field(default_factory=Counter)  # whole ones, by client
    errors: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    left: int = 0
    refused: int = 0  # 429


@dataclass(frozen=True)
class Sample:
    seconds: float
    server_bytes: int
    predictor_bytes: int


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def demo(port: int) -> Iterator[tuple[psutil.Process, str]]:
    """The real command with its predictor, as a user starts it. Yields the server's process and its address."""
    predictor = free_port()
    command = [sys.executable, "-m", "ecospec_orchestrator.cli", "demo", "--port", str(port)]
    command += ["--predictor-address", f"127.0.0.1:{predictor}"]
    child = subprocess.Popen(command)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            if child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("The demo server did not start; its own messages above say why.")
            try:
                if httpx.get(f"{address}/ready", timeout=10).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        yield psutil.Process(child.pid), address
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(60)


class Client:
    def __init__(self, number: int, http: httpx.AsyncClient, prompts: list[str], tally: Tally) -> None:
        self._number, self._http, self._prompts, self._tally = number, http, prompts, tally
        self._random = np.random.default_rng(number)

    async def run(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            try:
                await self._answer()
            except (httpx.HTTPError, ValueError) as error:
                self._tally.errors[f"{type(error).__name__}: {error}"[:120]] += 1

    def _body(self) -> dict[str, Any]:
        random = self._random
        prompt = self._prompts[random.integers(len(self._prompts))]
        if random.random() < LONG_SHARE:
            prompt = " ".join([prompt] * 8)
        return {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": int(random.choice(ANSWER_TOKENS)),
            "temperature": float(random.random() < SAMPLED_SHARE),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _answer(self) -> None:
        tally, leaves = self._tally, self._random.random() < LEAVE_SHARE
        began, chunks, finished, usage = time.monotonic(), 0, False, None
        async with self._http.stream("POST", "/v1/chat/completions", json=self._body()) as response:
            if response.status_code == 429:
                tally.refused += 1
                await asyncio.sleep(float(response.headers["Retry-After"]))
                return
            if response.status_code != 200:
                tally.errors[f"{response.status_code}: {(await response.aread()).decode()}"[:120]] += 1
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ValueError(chunk["error"]["message"])
                usage = chunk.get("usage") or usage
                finished = finished or any(choice["finish_reason"] for choice in chunk["choices"])
                if any(choice["delta"].get("content") for choice in chunk["choices"]):
                    chunks += 1
                    if chunks == 1:
                        tally.first_seconds.append(time.monotonic() - began)
                    elif leaves:
                        tally.left += 1
                        return
        if not finished or usage is None:
            raise ValueError("a stream ended without finish reason or usage")
        tally.answers[self._number] += 1
        tally.tokens += usage["completion_tokens"]


def step_figures(address: str) -> np.ndarray:
    """float64 [2]: decode steps, and the seconds that they took, since the server's start."""
    figures = np.zeros(2)
    for family in text_string_to_metric_families(httpx.get(f"{address}/metrics", timeout=30).text):
        for sample in family.samples:
            if sample.name == "ecospec_step_seconds_count" and sample.labels["phase"] == "total":
                figures[0] = sample.value
            if sample.name == "ecospec_step_seconds_sum" and sample.labels["phase"] == "total":
                figures[1] = sample.value
    return figures


def loop_seconds(process: psutil.Process) -> float:
    """Processor seconds of the main thread, where the event loop runs."""
    return next(t.user_time + t.system_time for t in process.threads() if t.id == process.pid)


async def load(server: psutil.Process, address: str, seconds: float, clients: int) -> tuple[Tally, list[Sample]]:
    tally, samples = Tally(), []
    prompts = [prompt for family in json.loads(PROMPTS.read_text(encoding="utf-8")).values() for prompt in family]
    predictor = next(child for child in server.children() if child.is_running())
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as http:
        began = time.monotonic()
        tasks = [asyncio.create_task(Client(n, http, prompts, tally).run(began + seconds)) for n in range(clients)]
        with tqdm(total=round(seconds), unit="s", mininterval=5) as bar:
            while (passed := time.monotonic() - began) < seconds:
                samples.append(Sample(passed, server.memory_info().rss, predictor.memory_info().rss))
                bar.set_postfix(
                    answers=sum(tally.answers.values()), refused=tally.refused, errors=sum(tally.errors.values())
                )
                bar.update(round(passed) - bar.n)
                await asyncio.sleep(SAMPLE_SECONDS)
        await asyncio.gather(*tasks)
    return tally, samples


def growth(samples: list[Sample], seconds: float, name: str) -> tuple[float, float, float]:
    """(MiB after warm-up, MiB at the end, ratio)."""
    window = min(60.0, seconds / 5)
    first = [getattr(s, name) for s in samples if WARM_SHARE * seconds <= s.seconds < WARM_SHARE * seconds + window]
    last = [getattr(s, name) for s in samples if s.seconds >= seconds - window]
    before, after = statistics.median(first) / 2**20, statistics.median(last) / 2**20
    return before, after, after / before


def report(
    tally: Tally,
    samples: list[Sample],
    seconds: float,
    clients: int,
    step_seconds: float,
    steps: float,
    loop: float,
) -> str:
    waits = np.array(tally.first_seconds)
    each = [tally.answers[n] for n in range(clients)]
    server, predictor = (growth(samples, seconds, name) for name in ("server_bytes", "predictor_bytes"))
    errors = "; ".join(f"{count} x {text}" for text, count in tally.errors.most_common(5)) or "none"
    rows = {
        "whole answers": f"{sum(each)}, {tally.tokens} tokens",
        "left in the middle by the client": str(tally.left),
        "answered 429": str(tally.refused),
        "other errors": errors,
        "seconds to the first token: median, 99 %, longest": ", ".join(
            f"{value:.1f}" for value in (np.median(waits), np.quantile(waits, 0.99), waits.max())
        ),
        "answers of one client: fewest, median, most": f"{min(each)}, {statistics.median(each):g}, {max(each)}",
        "server's memory after warm-up and at the end": f"{server[0]:.0f} and {server[1]:.0f} MiB ({server[2]:.3f})",
        "predictor's memory": f"{predictor[0]:.0f} and {predictor[1]:.0f} MiB ({predictor[2]:.3f})",
        "steps": f"{steps:.0f}, {1e3 * step_seconds / steps:.1f} ms each",
        "HTTP's processor time": f"{1e3 * loop / steps:.2f} ms a step, {100 * loop / step_seconds:.1f} % of it",
    }
    head = f"| {clients} clients, {seconds / 60:g} minutes | |\n|---|---|\n"
    return head + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--port", type=int, default=0, help="of the server, for a Prometheus that looks on; 0: any")
    parser.add_argument("--output", type=Path, help="write the table here as well")
    options = parser.parse_args()
    seconds = 60 * options.minutes
    os.environ.setdefault("ECOSPEC_LOG_LEVEL", "warning")
    with demo(options.port or free_port()) as (server, address):
        before, loop = step_figures(address), loop_seconds(server)
        tally, samples = asyncio.run(load(server, address, seconds, options.clients))
        (steps, step_seconds), loop = step_figures(address) - before, loop_seconds(server) - loop
    table = report(tally, samples, seconds, options.clients, step_seconds, steps, loop)
    print(table)
    if options.output is not None:
        options.output.write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
