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
from typing import Any

from ecospec_orchestrator.core import Request, SamplingParams, StepReport, TokenEvent
from ecospec_orchestrator.footprint.base import FootprintSource
from ecospec_orchestrator.footprint.oracle import OracleFootprintSource
from ecospec_orchestrator.loading import gguf_path
from ecospec_orchestrator.predictor_process import PredictorProcess, predictor_command
from ecospec_orchestrator.selection.base import SelectionPolicy
from ecospec_orchestrator.selection.factory import make_policy
from ecospec_orchestrator.settings import Settings
from ecospec_orchestrator.system import System, build_system, goodput_policy, load_profile

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
        self.drafter = self.scheduler.drafter  # the system's own: a benchmark may put another one in its place
        self.top_k = self.scheduler.engine.geometry.top_k
        self._runs = 0
        self._sources: dict[float | None, FootprintSource | None] = {None: self.scheduler.footprint_source}

    def encode(self, prompt: str) -> tuple[int, ...]:
        chat = [{"role": "user", "content": prompt}]
        text = self.system.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return tuple(self.system.tokenizer(text)["input_ids"])

    def policy_for(self, name: str, gamma: int, **switches: Any) -> SelectionPolicy:
        """A new policy. gamma: of the policies that verify a fixed number of nodes; switches: further options by name, for
        goodput fields of the settings. Raises SettingsError, and ProfileError for goodput on a machine without profile."""
        engine, drafter = self.scheduler.engine, self.drafter
        if name == "goodput":  # the one place that builds it, as the server does
            settings = self.system.settings.model_copy(update=switches)
            return goodput_policy(
                settings, load_profile(settings, engine, drafter, self._sources[None]), engine, drafter
            )
        options = {"none": {}, "likelihood": {"gamma": gamma}, "ecospec": {"gamma": gamma, "top_k": self.top_k}}
        return make_policy(name, **options[name], **switches)

    def source_for(self, accuracy: float | None) -> FootprintSource | None:
        """Who says which experts the drafts use: None for the predictor, else an oracle of which that share is right."""
        if accuracy is not None and accuracy not in self._sources:
            self._sources[accuracy] = OracleFootprintSource(self.scheduler.engine, accuracy)
        return self._sources[accuracy]

    def run(self, prompts: Sequence[tuple[int, ...]], max_tokens: int, temperature: float = 0.0) -> Run:
        """All prompts as one batch; returns when all are done."""
        events: queue.Queue[TokenEvent | StepReport] = queue.Queue()
        steps: list[StepReport] = []
        self.scheduler.on_step = events.put
        self._runs += 1
        names = [f"{self._runs}-{i}" for i in range(len(prompts))]  # a policy remembers requests by name
        for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            sampling = SamplingParams(temperature=temperature, seed=i)
            self.scheduler.submit(Request(name, prompt, max_tokens, sampling, frozenset({END_TOKEN})), events.put)
        outputs: dict[str, list[int]] = {name: [] for name in names}
        open_requests = len(prompts)
        item: TokenEvent | StepReport | None = None
        while open_requests or not isinstance(item, StepReport):  # a step's report follows its tokens
            event = item = events.get(timeout=600)
            if isinstance(event, StepReport):
                steps.append(event)
                continue
            outputs[event.request_id] += event.tokens
            if event.finish_reason in ("error", "abort"):
                raise RuntimeError(f"request {event.request_id} ended with {event.finish_reason}: {event.error}")
            open_requests -= event.finish_reason is not None
        return Run([tuple(outputs[name]) for name in names], steps)


@contextmanager
def bench_system(profile_seconds: float = 0.0) -> Iterator[Bench]:
    """The demo system with its predictor in a process of its own, on a free port. profile_seconds above 0: measure first what a
    step costs on this machine, where that is not known, for the goodput policy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    settings = Settings(
        demo_dir=ROOT / "models" / "demo",
        predictor_address=address,
        predictor_deadline_ms=1000,
        policy="goodput" if profile_seconds else "ecospec",
    )
    os.environ["ECOSPEC_PREDICTOR_SERVICE_METRICS_PORT"] = "0"  # any free one: a server may be running here, too
    predictor = PredictorProcess(predictor_command(settings, gguf_path(settings)))
    predictor.start()
    try:
        system = build_system(settings, lambda text: print(text, flush=True))
        if not predictor.wait_until_serving(address, 120):
            raise RuntimeError("the expert predictor did not come up; run it alone to see why")
        try:
            if profile_seconds:
                system.profile_if_missing(profile_seconds, lambda text: print(text, flush=True))
            if not system.scheduler.alive:
                system.scheduler.start()
            yield Bench(system)
        finally:
            system.close()
    finally:
        predictor.stop()


def load_prompts(families: Sequence[str] = ()) -> dict[str, list[str]]:
    """Our own prompts by family, all or the named ones; nothing is trained on them."""
    found = json.loads((ROOT / "benchmarks" / "prompts.json").read_text(encoding="utf-8"))
    return {family: found[family] for family in families or found}


logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
