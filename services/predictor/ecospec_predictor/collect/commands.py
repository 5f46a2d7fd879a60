"""`ecospec-predictor collect`: options in, a trace directory out."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ecospec_proto.traces import TraceDocument, TraceError, TraceWriter

from ..errors import PredictorError, SettingsError
from .files import RECORDER, documents_of
from .importers import IMPORTERS
from .target import load_target

if TYPE_CHECKING:
    from .live import Prompt

_DESCRIPTION = """write router traces, which experts a target used for which tokens, for training

From our own engine, rejected drafts included:
  ecospec-predictor collect --from ecospec --url http://127.0.0.1:8000 --prompts prompts.jsonl --max-tokens 512 --out traces
Every line of prompts.jsonl has "prompt" or "messages", and maybe "domain". A key for the API is taken from ECOSPEC_API_KEY.

From answers of another engine, one JSON response per line, or {"request", "response"} where only the request has the prompt's
token ids; from .pt files of SGLang's expert-distribution recorder in per_token mode with --from sglang-recorder:
  ecospec-predictor collect --from vllm --in answers.jsonl --target models/Qwen3-235B-A22B --out traces

A collection that was stopped goes on where it was: run the same command again.
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "collect",
        help=_DESCRIPTION.splitlines()[0],
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_collect)
    add = parser.add_argument
    add("--from", dest="engine", required=True, choices=[*IMPORTERS, RECORDER], help="the engine that made the traces")
    add("--out", type=Path, required=True, help="the trace directory, new or of the same target")
    add("--domain", default="", help='of texts that name none, such as "chat" or "code"')
    add("--max-shard-tokens", type=_positive, default=65536, help="rows per file (default %(default)s)")
    add("--skip-invalid", action="store_true", help="report a text that is refused and go on, instead of stopping")
    files = parser.add_argument_group("from files")
    files.add_argument("--in", dest="paths", type=Path, nargs="+", metavar="PATH", help=".jsonl, .json or .pt files")
    files.add_argument(
        "--target", type=Path, help="the target's Hugging Face directory, or a JSON file with its geometry"
    )
    files.add_argument(
        "--revision", help="of the routers, with a Hugging Face directory: as in /v1/models of the orchestrator"
    )
    server = parser.add_argument_group("from a running orchestrator (--from ecospec)")
    server.add_argument("--url", help="its address, such as http://127.0.0.1:8000")
    server.add_argument("--prompts", type=Path, help="a .jsonl file")
    server.add_argument("--limit", type=_positive, help="prompts to take at most (default: all)")
    server.add_argument(
        "--max-tokens", type=_positive, default=256, help="output tokens per prompt (default %(default)s)"
    )
    server.add_argument("--concurrency", type=_positive, default=4, help="prompts at a time (default %(default)s)")
    server.add_argument("--temperature", type=float, default=1.0, help="of the answers (default %(default)s)")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _collect(options: argparse.Namespace) -> None:
    """Raises SettingsError for a wrong option, PredictorError for any other failure; exits with 130 when interrupted."""
    try:
        with _stopped_in_order():
            print(asyncio.run(_from_server(options)) if options.url else _from_files(options))
    except TraceError as error:
        raise PredictorError(str(error)) from None
    except OSError as error:
        raise PredictorError(f"{options.out} cannot be written, or an input not be read: {error}.") from None
    except BaseExceptionGroup as group:  # of the workers, which end with the first that fails
        first = group.exceptions[0]
        if not isinstance(first, PredictorError | TraceError | OSError):
            raise
        raise PredictorError(str(first)) from None
    except KeyboardInterrupt:
        print("Stopped; run the same command again to go on.", file=sys.stderr)
        raise SystemExit(130) from None


@contextmanager
def _stopped_in_order() -> Iterator[None]:
    """SIGTERM ends like Ctrl-C, so that what was collected is written."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Sink:
    """Writes documents, counts, and decides what a refused one does."""

    def __init__(self, writer: TraceWriter, skip_invalid: bool, progress: tqdm[Any]) -> None:
        self.writer, self._skip, self._progress = writer, skip_invalid, progress
        self.taken = self.rows = self.known = self.refused = 0

    def take(self, document: TraceDocument | TraceError) -> None:
        """Raises TraceError for a refused one unless those are skipped."""
        try:
            if isinstance(document, TraceError):
                raise document
            added = self.writer.add(document)
        except TraceError as error:
            if not self._skip:
                raise
            self.refused += 1
            self._progress.write(f"left out: {error}", file=sys.stderr)
            return
        self.known += not added
        if added and not isinstance(document, TraceError):
            self.taken, self.rows = self.taken + 1, self.rows + len(document.tokens)
        self._progress.set_postfix(texts=self.taken, rows=self.rows, refresh=False)

    def summary(self) -> str:
        text = f"{self.taken} texts with {self.rows} rows written to {self.writer.directory}"
        if self.known:
            text += f", {self.known} were there already"
        if self.refused:
            text += f", {self.refused} left out"
        return text + "."


def _from_files(options: argparse.Namespace) -> str:
    """What was written, for a person."""
    if not options.paths or options.target is None:
        needs = " or --url and --prompts" if options.engine == "ecospec" else ""
        raise SettingsError(f"--from {options.engine} needs --in and --target{needs}.")
    target = load_target(options.target, options.revision)
    for path in options.paths:
        if not path.is_file():
            raise SettingsError(f"Option --in has '{path}', which is no file.")
    size = sum(path.stat().st_size for path in options.paths)
    with (
        TraceWriter(options.out, target.geometry, options.engine, options.max_shard_tokens) as writer,
        tqdm(total=size, unit="B", unit_scale=True, desc="reading") as progress,
    ):
        sink = _Sink(writer, options.skip_invalid, progress)
        for document in documents_of(options.paths, options.engine, target, options.domain, progress):
            sink.take(document)
    return sink.summary()


async def _from_server(options: argparse.Namespace) -> str:
    from . import live  # an HTTP client, which no other command needs

    if options.engine != "ecospec" or options.prompts is None or options.paths or options.target or options.revision:
        raise SettingsError(
            "--url needs --from ecospec and --prompts, and takes neither --in nor --target nor --revision."
        )
    if not options.prompts.is_file():
        raise SettingsError(f"Option --prompts is '{options.prompts}', which is no file.")

    def prompts() -> Iterator[Prompt]:
        return islice(live.read_prompts(options.prompts, options.domain), options.limit)

    total = sum(1 for _ in prompts())  # also shows a broken line before anything is sent
    async with live.connect(options.url, options.concurrency) as client:
        model, target = await live.fetch_target(client)
        with (
            TraceWriter(options.out, target.geometry, "ecospec", options.max_shard_tokens) as writer,
            tqdm(total=total, unit="prompt", desc=model) as progress,
        ):
            sink = _Sink(writer, options.skip_invalid, progress)
            there = set(writer.document_ids)

            def missing() -> Iterator[Prompt]:
                for prompt in prompts():
                    if prompt.document_id in there:
                        sink.known += 1
                        progress.update()
                    else:
                        there.add(prompt.document_id)  # a prompt that comes twice is asked once
                        yield prompt

            def take(_: Prompt, document: TraceDocument | TraceError) -> None:
                sink.take(document)
                progress.update()

            request = {"max_tokens": options.max_tokens, "temperature": options.temperature}
            await live.collect(client, target, missing(), request, options.concurrency, take)
    return sink.summary()
