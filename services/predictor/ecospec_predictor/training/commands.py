"""The commands train, eval and export of `ecospec-predictor`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ecospec_proto.token_table import TableError
from ecospec_proto.traces import TraceError, TraceReader

from ..errors import PredictorError, SettingsError
from ..live.commands import URL, add_live_routes

if TYPE_CHECKING:
    from .config import TrainConfig

log = logging.getLogger(__name__)
PLACES = ("traces", "out", "embeddings", "backbone.path")  # of this machine: the recorded command has names for them


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _register_train(commands)
    _register_eval(commands)
    _register_export(commands)


def _register_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "train an expert predictor on router traces; several processes by torchrun"
    parser = commands.add_parser("train", help=text, description=text)
    parser.add_argument("config", type=Path, help="a YAML file; models/demo/predictor.yaml is an example")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="NAME=VALUE",
        help="a setting that wins over the file's, for example optimiser.learning_rate=1e-3; may be given again",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, run one batch, write nothing")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in `out`")
    parser.add_argument(
        "--from-stream",
        action="store_true",
        help=f"first add the live routes in the state store (variable {URL}) to `traces`, as collect-stream does",
    )
    parser.set_defaults(run=_train)


def _register_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "score a predictor on held-out documents, beside baselines"
    parser = commands.add_parser("eval", help=text, description=text)
    parser.add_argument("directory", type=Path, help="a training run, or an exported predictor")
    parser.add_argument("--traces", type=Path, help="the traces (default: those of the run)")
    parser.add_argument("--embeddings", type=Path, help="the target's token embeddings (default: those of the run)")
    parser.add_argument("--tokens", type=_positive, default=200_000, help="held-out tokens to score (default 200000)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, help="where the figures and the token table go (default: the directory)")
    parser.set_defaults(run=_eval)


def _register_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "write a trained and evaluated predictor as a directory to serve or to hand on"
    parser = commands.add_parser("export", help=text, description=text)
    parser.add_argument("run_directory", type=Path, help="a training run that `eval` has been through")
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument(
        "--licence", required=True, help="an SPDX identifier for the model card, for example Apache-2.0"
    )
    parser.add_argument("--data-source", required=True, help="one sentence for the model card: which text was traced")
    parser.add_argument("--traces", type=Path, help="traces of the target that it is meant for, to be sure")
    parser.set_defaults(run=_export)


def run_command(options: argparse.Namespace) -> int:
    """Exit code of a command that register() added. Raises PredictorError: one sentence."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    try:
        options.run(options)
    except (TraceError, TableError) as error:
        raise PredictorError(str(error)) from None
    except ImportError as error:
        raise PredictorError(f"{error.name} is not installed; install ecospec-predictor[training].") from None
    return 0


def _train(options: argparse.Namespace) -> None:
    from .config import dump_config, load_config

    config = load_config(options.config, options.overrides)
    if options.from_stream and not options.dry_run:
        _add_live_routes(config)
    from .loop import dry_run, train  # heavy: torch; a wrong setting is told before it is imported

    if options.dry_run:
        if os.environ.get("RANK", "0") == "0":  # once, where torchrun started several of us
            print(dump_config(config), end="")
        dry_run(config)
        return
    stopping: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.append(number)
        signal.signal(number, signal.SIG_DFL)  # the second one does not wait for the step's end

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        train(config, recorded_command(options.config, options.overrides), options.resume, lambda: bool(stopping))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _add_live_routes(config: TrainConfig) -> None:
    from ..live.registry import geometry_in
    from .config import ExportedBackbone

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingsError(
            f"Option --from-stream is given to {os.environ['WORLD_SIZE']} processes, which would write the same traces; run "
            "ecospec-predictor collect-stream first."
        )
    if isinstance(config.backbone, ExportedBackbone):
        geometry = geometry_in(config.backbone.path)
    else:
        geometry = TraceReader(config.traces).geometry
    added = add_live_routes(geometry, config.traces)
    print(f"{added} new records of {geometry.name} are in {config.traces}.")


def recorded_command(config: Path, overrides: Sequence[str]) -> str:
    """The command for the model card: places of this machine are named instead of given."""
    words = ["ecospec-predictor", "train", config.name]
    for override in overrides:
        name, _, value = override.partition("=")
        words += ["--set", f"{name}={name.replace('.', '_').upper()}" if name in PLACES else f"{name}={value}"]
    return shlex.join(words)


def _eval(options: argparse.Namespace) -> None:
    from .config import load_config
    from .evaluate import evaluate, markdown
    from .export import EVALUATION, TABLE

    directory: Path = options.directory
    model_dir, traces, embeddings = directory, options.traces, options.embeddings
    if (directory / "best").is_dir():
        config = load_config(directory / "config.yaml")
        model_dir, traces, embeddings = directory / "best", traces or config.traces, embeddings or config.embeddings
    if traces is None:
        raise SettingsError(f"{directory} is no training run, so it does not tell its traces; give --traces DIR.")
    report, table = evaluate(model_dir, traces, embeddings, options.tokens, options.device)
    out = options.out or directory
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(report)
    (out / EVALUATION).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (out / EVALUATION).with_suffix(".md").write_text(text, encoding="utf-8")
    table.save(out / TABLE)
    print(text)


def _export(options: argparse.Namespace) -> None:
    from .export import export

    geometry = TraceReader(options.traces).geometry if options.traces else None
    export(options.run_directory, options.out, options.licence, options.data_source, geometry)
    print(f"Exported to {options.out}.")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
