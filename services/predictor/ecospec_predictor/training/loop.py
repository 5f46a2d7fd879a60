"""The training loop: take rows, descend, look at the held-out text now and then, keep the best.

Loss: paper section 3.1, per-layer cross-entropy to 1/K on each of the K activated experts. Rejected draft rows are trained
along their own branch. The mean is over all entries of a step, so that accumulation and more processes change nothing.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from tqdm import tqdm

from ecospec_proto.traces import TraceReader

from ..errors import PredictorError
from . import plan
from .config import TrainConfig
from .data import EpochRows, split
from .objective import Objective, collate, entries
from .predictions import predict, sample, windows
from .processes import Processes, join
from .run import RunDirectory
from .scores import Scores

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def train(
    config: TrainConfig,
    command: str,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train and return the note of the best checkpoint, which is in config.out / "best".

    command: recorded beside the weights. should_stop: asked after each step; True saves a checkpoint and ends the run.
    Raises SettingsError, PredictorError or TraceError: one sentence.
    """
    if not resume and (config.out / "checkpoint.pt").exists():
        raise PredictorError(f"{config.out} holds a run already; give --resume, or choose another out.")
    with join(config.training.device) as processes:
        trainer = Trainer(config, command, processes, say)
        try:
            return trainer.run(resume, should_stop)
        finally:
            trainer.directory.close()


def dry_run(config: TrainConfig, say: Callable[[str], None] = print) -> None:
    """Say what train() would do, and run one batch of it; writes nothing."""
    with join(config.training.device) as processes:
        trainer = Trainer(config, "", processes, say, writes=False)
        began = time.monotonic()
        loss, _ = trainer.step()
        if processes.first:
            say(f"one step: loss {loss:.3f}, {time.monotonic() - began:.1f} s")


class Trainer:
    def __init__(
        self,
        config: TrainConfig,
        command: str,
        processes: Processes,
        say: Callable[[str], None],
        writes: bool = True,
    ) -> None:
        self.config, self.command, self.processes, self.say = config, command, processes, say
        reader = TraceReader(config.traces)
        self.geometry, self._sources = reader.geometry, reader.sources
        self.counts = plan.count(reader, config, quiet=not processes.first)
        plan.seed(config)
        network = plan.build_network(config, reader.geometry)
        if processes.first:
            say(plan.describe(config, reader.geometry, self.counts, network, processes.world))
        training, held_out = split(reader, config.data.held_out)
        data = config.data
        self.rows = EpochRows(training, data.window_tokens, data.draft_rows, data.shuffle_tokens, config.training.seed)
        documents = sample(held_out, self.counts[1].rows, data.held_out_tokens)
        self._held_out = windows(documents, data.window_tokens, data.draft_rows, network.config.max_context_tokens)
        self._reach = network.config.max_context_tokens
        # the whole network beside the shards, for writing it; only the first process needs it
        self._whole = copy.deepcopy(network) if processes.world > 1 and processes.first else network
        self.objective = Objective(network.to(processes.device))
        processes.shard(network, self.objective)
        self.optimiser = _optimiser(self.objective, config)
        options = config.training
        self.directory = RunDirectory(config.out, writes and processes.first, options.tensorboard)
        self.steps, self.rows_seen, self.minutes = 0, 0, 0.0
        self.best, self.stale = -1.0, 0
        self._total_rows = options.epochs * self.counts[0].rows
        self._note: dict[str, Any] = {}

    @property
    def progress(self) -> float:
        """0 to 1 and a little beyond: of the epochs or of the minutes, whichever is further."""
        minutes = self.config.training.minutes
        return max(self.rows_seen / self._total_rows, self.minutes / minutes if minutes else 0.0)

    def run(self, resume: bool, should_stop: Callable[[], bool]) -> dict[str, Any]:
        options, first = self.config.training, self.processes.first
        if resume:
            self._restore(self.directory.load(self.config))
        self.directory.begin(self.config)
        began, before = time.monotonic(), self.minutes
        stopped, looked = False, -1
        with tqdm(total=self._total_rows, initial=self.rows_seen, unit="tokens", disable=not first or None) as bar:
            while self.progress < 1 and self.stale < options.patience and not stopped:
                loss, rows = self.step()
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update(rows)
                if self.steps % options.evaluate_every_steps == 0:
                    self.evaluate(loss)
                    looked = self.steps
                minutes = before + (time.monotonic() - began) / 60
                self.minutes, stop = self.processes.largest(minutes, float(should_stop()))
                stopped = bool(stop)
                if stopped or self.steps % options.checkpoint_every_steps == 0:
                    self.save()
        if stopped:
            raise PredictorError(
                f"Stopped at step {self.steps}, which is saved in {self.config.out}; go on with --resume."
            )
        if looked != self.steps:
            self.evaluate(loss if self.steps else math.nan)
        self.save()
        return self._note

    def step(self) -> tuple[float, int]:
        """One step of the optimiser; (mean loss of the step, rows it trained on)."""
        options, processes, rate = self.config.training, self.processes, self._learning_rate()
        taken = self.rows.take(options.batch_windows * options.accumulate * processes.world)
        total = max(entries(taken), 1)
        device = processes.device
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.objective.train()
        self.optimiser.zero_grad()
        share = torch.zeros((), dtype=torch.float64, device=device)
        size = options.batch_windows
        for start in range(processes.rank * size, len(taken), processes.world * size):
            batch = collate(taken[start : start + size], self.rows.width, self._reach).to(device)
            bfloat16 = options.precision == "bfloat16"
            with torch.device(device), torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
                loss, _ = self.objective(batch)
            loss = loss / total
            (loss * processes.world).backward()  # gradients are averaged over the processes
            share += loss.detach()
        loss_mean = processes.sum(share)
        if not math.isfinite(loss_mean):
            raise PredictorError(
                f"The loss is {loss_mean} at step {self.steps + 1}; lower optimiser.learning_rate, now "
                f"{self.config.optimiser.learning_rate:g}, and start again."
            )
        nn.utils.clip_grad_norm_(self.objective.parameters(), self.config.optimiser.clip_norm)
        self.optimiser.step()
        rows = sum(len(window.tokens) for windows_of_row in taken for window in windows_of_row)
        self.steps, self.rows_seen = self.steps + 1, self.rows_seen + rows
        return loss_mean, rows

    def _learning_rate(self) -> float:
        settings = self.config.optimiser
        warm = min(1.0, (self.steps + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
        return settings.learning_rate * warm * max(1 - self.progress, settings.final_share)

    def evaluate(self, loss: float) -> None:
        """Score the held-out sample, and keep the weights if they are the best so far."""
        options = self.config.training
        scores = Scores(self.geometry.moe_layers)
        self.objective.eval()
        bfloat16 = options.precision == "bfloat16"
        for window, rows, experts, _ in predict(
            self.objective, self._held_out, self.rows.width, options.batch_windows, self.processes.device, bfloat16
        ):
            scores.add(experts, window.routes[rows], window.depths[rows], window.domain)
        report = scores.report()
        better = scores.accuracy > self.best
        self.stale = 0 if better else self.stale + 1
        rate = self.optimiser.param_groups[0]["lr"]
        self.directory.log(
            self.steps,
            {
                "loss": round(loss, 5),
                "learning_rate": rate,
                "epoch": round(self.rows_seen / self.counts[0].rows, 3),
                "held_out_top_k_accuracy": scores.accuracy,
                "held_out_top_k_accuracy_by_layer": report["by_layer"],
            },
        )
        if self.processes.first:
            self.say(f"step {self.steps}: loss {loss:.3f}, held-out top-k accuracy {scores.accuracy:.4f}")
        if better:
            self.best, self._note = scores.accuracy, self._describe(report)
            if self.processes.world > 1:
                state = get_model_state_dict(self.objective, options=FULL)
                if self.processes.first:
                    self._whole.load_state_dict({k.removeprefix("network."): v for k, v in state.items()})
            self.directory.save_best(self._whole, self._note)

    def _describe(self, report: dict[str, Any]) -> dict[str, Any]:
        training, held_out = self.counts
        return {
            "command": self.command,
            "version": self.config.version,
            "steps": self.steps,
            "epochs": round(self.rows_seen / training.rows, 2),
            "tokens_seen": self.rows_seen,
            "sources": list(self._sources),
            "training_documents": training.documents,
            "training_tokens": training.rows,
            "held_out_documents": held_out.documents,
            "held_out_tokens": held_out.rows,
            "held_out_share": self.config.data.held_out,
            "window_tokens": self.config.data.window_tokens,
            "draft_rows": self.config.data.draft_rows,
            "held_out_top_k_accuracy": report["accuracy"],
            "held_out_top_k_accuracy_by_layer": report["by_layer"],
            "held_out_top_k_accuracy_by_domain": report["by_domain"],
        }

    def save(self) -> None:
        weights, moments = get_state_dict(self.objective, self.optimiser, options=FULL)
        self.directory.save(
            {
                "config": self.config.model_dump_json(),
                "weights": weights,
                "optimiser": moments,
                "rows": self.rows.state(),
                "steps": self.steps,
                "rows_seen": self.rows_seen,
                "minutes": self.minutes,
                "best": self.best,
                "stale": self.stale,
                "note": self._note,
                "random": torch.get_rng_state(),
            }
        )

    def _restore(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.objective,
            self.optimiser,
            model_state_dict=state["weights"],
            optim_state_dict=state["optimiser"],
            options=FULL,
        )
        self.rows.restore(state["rows"])
        self.steps, self.rows_seen, self.minutes = state["steps"], state["rows_seen"], state["minutes"]
        self.best, self.stale, self._note = state["best"], state["stale"], state["note"]
        torch.set_rng_state(state["random"])


def _optimiser(objective: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    settings = config.optimiser
    trained = [p for p in objective.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2))
