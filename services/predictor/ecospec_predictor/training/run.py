"""The directory of a training run: what is kept in it, and how a run is taken up again.

config.yaml      the resolved configuration
checkpoint.pt    weights, optimiser and place in the data, replaced whole
best/            the checkpoint directory of the best held-out accuracy so far
progress.jsonl   one line for each evaluation
tensorboard/     the same for TensorBoard
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import PredictorError
from .config import TrainConfig, dump_config

MAY_CHANGE = {  # on --resume: what does not decide what is learned from; batches, because the number of processes may change
    ("traces",),
    ("embeddings",),
    ("out",),
    ("training", "epochs"),
    ("training", "minutes"),
    ("training", "patience"),
    ("training", "batch_windows"),
    ("training", "accumulate"),
    ("training", "threads"),
    ("training", "device"),
    ("training", "tensorboard"),
    ("training", "checkpoint_every_steps"),
    ("training", "evaluate_every_steps"),
}


class RunDirectory:
    """Written by the first process only."""

    def __init__(self, path: Path, writes: bool, tensorboard: bool) -> None:
        self.path, self._writes = path, writes
        self._board: Any = _summary_writer(path / "tensorboard") if writes and tensorboard else None

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    def begin(self, config: TrainConfig) -> None:
        if self._writes:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "config.yaml").write_text(dump_config(config), encoding="utf-8")

    def save(self, state: dict[str, Any]) -> None:
        if self._writes:
            temporary = self.checkpoint.with_name("checkpoint.pt.tmp")
            torch.save(state, temporary)
            temporary.replace(self.checkpoint)

    def load(self, config: TrainConfig) -> dict[str, Any]:
        """The saved state. Raises PredictorError when it is missing or of a run with other settings."""
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise PredictorError(f"{self.path} holds no checkpoint.pt to resume; start it without --resume.") from None
        except Exception as error:  # unpickling raises nearly anything
            raise PredictorError(f"{self.checkpoint} cannot be read: {type(error).__name__}: {error}.") from None
        old, new = _flat(json.loads(state["config"])), _flat(config.model_dump(mode="json"))
        for name in sorted(old.keys() | new.keys()):
            if name not in MAY_CHANGE and old.get(name) != new.get(name):
                raise PredictorError(
                    f"Setting {'.'.join(name)} is {new.get(name)!r}, but the run in {self.path} began with {old.get(name)!r}; "
                    "resume it with that or choose another out."
                )
        self._forget_after(state["steps"])
        return state

    def _forget_after(self, step: int) -> None:
        """Evaluations behind the checkpoint come again."""
        path = self.path / "progress.jsonl"
        if self._writes and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), encoding="utf-8")

    def log(self, step: int, values: dict[str, Any]) -> None:
        """values: numbers, and lists of numbers by layer."""
        if not self._writes:
            return
        with (self.path / "progress.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                for at, number in enumerate(value) if isinstance(value, list) else [(None, value)]:
                    self._board.add_scalar(name if at is None else f"{name}/{at:03}", number, step)

    def save_best(self, network: nn.Module, note: dict[str, Any]) -> None:
        """The directory is replaced file by file; a run that dies in between writes it again when it is resumed."""
        if self._writes:
            network.save(self.path / "best", note)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def _summary_writer(path: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise PredictorError(
            "Setting training.tensorboard is true, but tensorboard is not installed; install ecospec-predictor[training] "
            "or set it to false."
        ) from None
    return SummaryWriter(str(path))


def _flat(values: dict[str, Any], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    flat: dict[tuple[str, ...], Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, (*above, name))
        else:
            flat[(*above, name)] = value
    return flat
