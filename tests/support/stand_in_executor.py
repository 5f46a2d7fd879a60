"""The process behind stand_in_llm: batches requests and answers each with its own prompt, 1, 2, 3, 1, ... tokens an iteration,
or fewer with fewer drafts.

It reads one JSON object per line and writes one per line. A seed below 1000 skips so many tokens of the prompt. A request with top_k 13
fails after its second response; one with top_k 17 is never answered, nor is its abort.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

FAILS, DEAF = 13, 17


class Executor:
    def __init__(self, batch: int, step_seconds: float, drafts: int) -> None:
        self.batch, self.step_seconds, self.drafts = batch, step_seconds, drafts
        self.jobs: dict[int, dict[str, Any]] = {}  # in the order of their arrival
        self.lock = threading.Lock()
        self.iteration = 0

    def read(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if message["op"] == "crash":
                os._exit(1)
            with self.lock:
                if message["op"] == "submit":
                    self.jobs[message["id"]] = message | {"sent": 0, "responses": 0, "arrival": time.monotonic()}
                elif message["op"] == "abort" and message["id"] in self.jobs:
                    if self.jobs[message["id"]]["params"].get("top_k") != DEAF:
                        del self.jobs[message["id"]]
                        self.say({"id": message["id"], "tokens": [], "finish": "cancelled"})
        os._exit(0)  # the server is gone

    def run(self) -> None:
        while True:
            time.sleep(self.step_seconds)
            with self.lock:
                batch = list(self.jobs.values())[: self.batch]
                began, prompts, drafting, accepted = time.monotonic(), 0, 0, 0
                for job in batch:
                    if job["responses"]:
                        drafting += 1
                        accepted += self.accepts(job)
                    else:
                        prompts += len(job["prompt"])
                        job["scheduled"] = began
                    self.answer(job)
                if batch:
                    self.iteration += 1
                    self.say({"record": self.record(len(batch), prompts, drafting, accepted)})

    def accepts(self, job: dict[str, Any]) -> int:
        return min(int(job["responses"]) % 3, self.drafts)

    def answer(self, job: dict[str, Any]) -> None:
        params, prompt = job["params"], job["prompt"]
        if params.get("top_k") == DEAF:
            return
        if params.get("top_k") == FAILS and job["responses"] == 2:
            del self.jobs[job["id"]]
            self.say({"id": job["id"], "error": "The stand-in broke."})
            return
        seed = params.get("seed", 0)
        begin = job["sent"] + (seed if seed < 1000 else 0)
        count = min(1 + self.accepts(job), params["max_tokens"] - job["sent"])
        tokens = [prompt[(begin + i) % len(prompt)] for i in range(count)]
        finish = None
        for at, token in enumerate(tokens):
            if token == params["end_id"]:  # the end token stays in the output
                tokens, finish = tokens[: at + 1], "stop"
                break
            if token in (params.get("stop_token_ids") or ()):  # a stop word does not
                tokens, finish = tokens[:at], "stop"
                break
        job["sent"] += count
        job["responses"] += 1
        if finish is None and job["sent"] >= params["max_tokens"]:
            finish = "length"
        answer = {"id": job["id"], "tokens": tokens, "finish": finish}
        if job["responses"] == 1:
            job["first"] = time.monotonic()
        if finish is not None:
            del self.jobs[job["id"]]
            answer["timing"] = [job["arrival"], job["scheduled"], job["first"], time.monotonic()]
            answer["drafts"] = self.drafts * (job["responses"] - 1)
        self.say(answer)

    def record(self, scheduled: int, prompt_tokens: int, drafting: int, accepted: int) -> dict[str, Any]:
        return {
            "iter": self.iteration,
            "iterLatencyMS": 1e3 * self.step_seconds,
            "numActiveRequests": len(self.jobs),
            "inflightBatchingStats": {
                "numScheduledRequests": scheduled,
                "numContextRequests": scheduled - drafting,
                "numGenRequests": drafting,
                "numCtxTokens": prompt_tokens,
            },
            "specDecodingStats": {
                "numDraftTokens": self.drafts * drafting,
                "numAcceptedTokens": accepted,
                "numRequestsWithDraftTokens": drafting if self.drafts else 0,
            },
            "kvCacheStats": {"maxNumBlocks": 100, "usedNumBlocks": len(self.jobs), "tokensPerBlock": 32},
        }

    @staticmethod
    def say(message: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    executor = Executor(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
    threading.Thread(target=executor.read, daemon=True).start()
    executor.run()
