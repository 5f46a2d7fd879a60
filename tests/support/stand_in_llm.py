"""The documented asynchronous API of tensorrt_llm.LLM over an executor in another process: generate_async, whose result is
iterated over and aborted, get_stats and shutdown. Only what the documentation promises, and its traps: a result belongs to the loop that
runs when it is made, and is its own item, changed in place."""

from __future__ import annotations

import asyncio
import json
import queue
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """The documented fields that are used here; any other name is a TypeError, as in the original."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    n: int = 1
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    logprobs: int | None = None
    return_perf_metrics: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True


@dataclass
class _Completion:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    request_perf_metrics: Any = None


class Result:
    """What generate_async returns."""

    def __init__(self, request_id: int, llm: StandInLlm, logprobs: int | None) -> None:
        self.request_id, self._llm, self._logprobs = request_id, llm, logprobs
        self.outputs = [_Completion()]
        self.finished = False
        self._loop = asyncio.get_running_loop()
        self._responses: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def abort(self) -> None:
        self._llm.tell({"op": "abort", "id": self.request_id})

    def put(self, response: dict[str, Any]) -> None:
        """From the reader's thread."""
        try:
            self._loop.call_soon_threadsafe(self._responses.put_nowait, response)
        except RuntimeError:  # the loop is closed
            pass

    def __aiter__(self) -> Result:
        return self

    async def __anext__(self) -> Result:
        if self.finished:
            raise StopAsyncIteration
        response = await self._responses.get()
        if "error" in response:
            raise RuntimeError(response["error"])
        completion = self.outputs[0]
        completion.token_ids.extend(response["tokens"])
        if self._logprobs is not None:
            completion.logprobs += [self._scores(token) for token in response["tokens"]]
        if response["finish"] is not None:
            self.finished, completion.finish_reason = True, response["finish"]
            if "timing" in response:
                names = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
                times = {name: timedelta(seconds=at) for name, at in zip(names, response["timing"], strict=True)}
                completion.request_perf_metrics = SimpleNamespace(
                    timing_metrics=SimpleNamespace(**times),
                    speculative_decoding=SimpleNamespace(total_draft_tokens=response["drafts"]),
                )
        return self

    def _scores(self, token: int) -> dict[int, Any]:
        assert self._logprobs is not None
        return {token + i: SimpleNamespace(logprob=-0.5 - i, rank=i + 1) for i in range(max(1, self._logprobs))}


class StandInLlm:
    def __init__(self, max_batch_size: int = 8, step_seconds: float = 0.002, drafts: int = 4) -> None:
        """drafts: of a request in a step; up to 2 of them are accepted."""
        path = Path(__file__).with_name("stand_in_executor.py")
        command = [sys.executable, str(path), str(max_batch_size), str(step_seconds), str(drafts)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._results: dict[int, Result] = {}
        self._records: queue.Queue[dict[str, Any]] = queue.Queue()
        self._writing = threading.Lock()
        self._next = 0
        self.submitted: list[SamplingParams] = []
        self.aborted: list[tuple[int, float]] = []
        self.shut_down = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def generate_async(self, inputs: list[int], sampling_params: SamplingParams, *, streaming: bool = False) -> Result:
        if self.shut_down:
            raise RuntimeError("LLM is shutting down")
        assert streaming and isinstance(inputs, list) and sampling_params.end_id is not None
        self._next += 1
        result = self._results[self._next] = Result(self._next, self, sampling_params.logprobs)
        self.submitted.append(sampling_params)
        params = {name: value for name, value in asdict(sampling_params).items() if value is not None}
        self.tell({"op": "submit", "id": self._next, "prompt": inputs, "params": params})
        return result

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Waits for the first record, then takes what is there."""
        try:
            records = [self._records.get(timeout=timeout)]
        except queue.Empty:
            return []
        while not self._records.empty():
            records.append(self._records.get())
        return records

    def shutdown(self) -> None:
        self.shut_down = True
        self._child.kill()
        self._child.wait(10)
        self._reader.join(10)
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was left to write has nobody to read it
                pass

    def _check_health(self) -> bool:
        return not self.shut_down and self._child.poll() is None

    def crash(self) -> None:
        self.tell({"op": "crash"})

    def tell(self, message: dict[str, Any]) -> None:
        if message["op"] == "abort":
            self.aborted.append((message["id"], time.monotonic()))
        assert self._child.stdin is not None
        with self._writing:
            try:
                self._child.stdin.write(json.dumps(message) + "\n")
                self._child.stdin.flush()
            except OSError as error:
                raise RuntimeError("the executor is gone") from error

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            message = json.loads(line)
            if "record" in message:
                self._records.put(message["record"])
                continue
            result = self._results[message["id"]]
            if message.get("finish") is not None or "error" in message:
                del self._results[message["id"]]
            result.put(message)
