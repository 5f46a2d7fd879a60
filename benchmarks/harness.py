"""Run prompts through the real system in this process (target, head, predictor service) and record every step."""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ecospec_orchestrator.core import Request, SamplingParams, StepReport, TokenEvent
from ecospec_orchestrator.predictor_process import PredictorProcess, predictor_command
from ecospec_orchestrator.selection.factory import make_policy
from ecospec_orchestrator.settings import Settings
from ecospec_orchestrator.system import System, build_system, gguf_path

ROOT = Path(__file__).resolve().parent.parent
END_TOKEN = 2


@dataclass(frozen=True)
class Run:
    """outputs: token ids per prompt; steps: every decode step of the batch."""

    outputs: list[tuple[int, ...]]
    steps: list[StepReport]


class Bench:
    def __init__(self, system: System) -> None:
        self.system = system
        self.scheduler = system.scheduler
        self.top_k = self.scheduler.engine.geometry.top_k

    def encode(self, prompt: str) -> tuple[int, ...]:
        chat = [{"role": "user", "content": prompt}]
        text = self.system.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return tuple(self.system.tokenizer(text)["input_ids"])

    def policy(self, name: str, gamma: int) -> None:
        options = {"none": {}, "likelihood": {"gamma": gamma}, "ecospec": {"gamma": gamma, "top_k": self.top_k}}
        self.scheduler.policy = make_policy(name, **options[name])

    def run(self, prompts: Sequence[tuple[int, ...]], max_tokens: int, temperature: float = 0.0) -> Run:
        """All prompts as one batch; returns when all are done."""
        events: queue.Queue[TokenEvent] = queue.Queue()
        steps: list[StepReport] = []
        self.scheduler.on_step = steps.append
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=temperature, seed=i)
            self.scheduler.submit(Request(str(i), prompt, max_tokens, sampling, frozenset({END_TOKEN})), events.put)
        outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        open_requests = len(prompts)
        while open_requests:
            event = events.get(timeout=600)
            outputs[event.request_id] += event.tokens
            if event.finish_reason in ("error", "abort"):
                raise RuntimeError(f"request {event.request_id} ended with {event.finish_reason}: {event.error}")
            open_requests -= event.finish_reason is not None
        return Run([tuple(outputs[str(i)]) for i in range(len(prompts))], steps)


@contextmanager
def bench_system() -> Iterator[Bench]:
    """The demo system with its predictor in a process of its own, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    settings = Settings(demo_dir=ROOT / "models" / "demo", predictor_address=address, predictor_deadline_ms=1000)
    os.environ["ECOSPEC_PREDICTOR_SERVICE_METRICS_PORT"] = "0"  # any free one: a server may be running here, too
    predictor = PredictorProcess(predictor_command(settings, gguf_path(settings)))
    predictor.start()
    try:
        system = build_system(settings, lambda text: print(text, flush=True))
        if not predictor.wait_until_serving(address, 120):
            raise RuntimeError("the expert predictor did not come up; run it alone to see why")
        system.scheduler.start()
        try:
            yield Bench(system)
        finally:
            system.close()
    finally:
        predictor.stop()


def load_prompts() -> dict[str, list[str]]:
    """Our own prompts by family; nothing is trained on them."""
    return json.loads((ROOT / "benchmarks" / "prompts.json").read_text(encoding="utf-8"))


logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
