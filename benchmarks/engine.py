"""How close the embedded engine is to what the memory allows, all in one run and interleaved, since a machine's own speed drifts:
plain reads of memory, plain decoding, transformers' generate() of the same mixture, verification against distinct experts, and 16
sequences at once.

python benchmarks/engine.py [--rounds 30] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import ROOT
from transformers import Glm4MoeForCausalLM

from ecospec_orchestrator.accounting.traffic import bytes_of_step, distinct_per_layer
from ecospec_orchestrator.engine.base import VerifyItem
from ecospec_orchestrator.engine.torch.demo import demo_config
from ecospec_orchestrator.engine.torch.engine import TorchEngine
from ecospec_orchestrator.engine.torch.fused_layer import FusedLayer
from ecospec_orchestrator.loading import in_own_thread, load
from ecospec_orchestrator.settings import Settings

CONTEXT, READ_BYTES, SEQUENCES, NEW_TOKENS = 128, 2**29, 16, 8
EXPERTS = ("eager", "batched_mm", "grouped_mm")  # transformers' own, of which the fastest is taken
TRANSFORMERS_SECONDS = 75  # one of its ways may take minutes
ROOT_TOKEN = np.array([-1])


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Reader:
    """Reads READ_BYTES that no cache holds: a sum over one of four buffers in turn, in parallel."""

    def __init__(self) -> None:
        self._buffers = [torch.from_numpy(np.ones(READ_BYTES // 4, np.float32)) for _ in range(4)]
        self._turn = 0

    def read(self) -> None:
        self._turn += 1
        self._buffers[self._turn % 4].sum()


class Decoder:
    """Plain decoding of one sequence at about CONTEXT tokens, or of several."""

    def __init__(self, engine: TorchEngine, sequences: int) -> None:
        self.engine, self.bytes = engine, 0
        self._sequences = [engine.new_sequence() for _ in range(sequences)]
        for number, sequence in enumerate(self._sequences):
            engine.prefill(sequence, np.arange(CONTEXT) * 37 % 40000 + 3 + number)
        self._tokens = [np.array([17 + number]) for number in range(sequences)]

    def step(self) -> None:
        items = [VerifyItem(s, t, ROOT_TOKEN) for s, t in zip(self._sequences, self._tokens, strict=True)]
        verified = self.engine.verify(items)
        self._tokens = [v.logits.argmax(1) for v in verified]
        for sequence in self._sequences:
            self.engine.commit(sequence, np.array([0]))
        experts = np.concatenate([v.experts for v in verified])
        distinct = distinct_per_layer(experts, self.engine.geometry.experts)
        context = sum(s.length for s in self._sequences)
        self.bytes = bytes_of_step(self.engine.step_bytes, distinct, len(experts), context).total


class Verifier:
    """Siblings under one root, of which some are the same token: steps of the same rows that hit fewer or more experts."""

    def __init__(self, engine: TorchEngine, rows: int, tokens: int) -> None:
        self._engine, self._sequence = engine, engine.new_sequence()
        engine.prefill(self._sequence, np.arange(CONTEXT) * 37 % 40000 + 3)
        ids = np.concatenate([[17], np.arange(rows - 1) % tokens * 911 + 100])
        self._item = VerifyItem(self._sequence, ids, np.array([-1] + [0] * (rows - 1)))
        self.rows = rows
        (verified,) = engine.verify([self._item])
        self.distinct = int(distinct_per_layer(verified.experts, engine.geometry.experts).sum())

    def step(self) -> None:
        self._engine.verify([self._item])


def transformers_model(engine: TorchEngine, dtype: torch.dtype) -> Any:
    """The same mixture in transformers' own code."""
    with torch.device("meta"):
        model = Glm4MoeForCausalLM(demo_config())
    ours = engine.model.model
    state = {"model.embed_tokens.weight": ours.embed_tokens.weight, "model.norm.weight": ours.norm.weight}
    for number, layer in enumerate(ours.layers):
        assert isinstance(layer, FusedLayer)
        state |= {f"model.layers.{number}.{name}": t for name, t in layer.original[0].state_dict().items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    kept = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    state = {name: t.to(dtype) for name, t in state.items() if name in kept}
    model.load_state_dict(state, strict=False, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = None
    return model.eval()


class Generate:
    """transformers' generate() of NEW_TOKENS more and of 1, so that the prompt's time can be taken off."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._prompt = torch.arange(CONTEXT)[None] * 37 % 40000 + 3

    @torch.inference_mode()
    def seconds_per_token(self) -> float:
        run = lambda tokens: self.model.generate(
            self._prompt, attention_mask=torch.ones_like(self._prompt), max_new_tokens=tokens, do_sample=False
        )
        run(1)
        first = min(seconds(lambda: run(1)) for _ in range(2))
        whole = min(seconds(lambda: run(1 + NEW_TOKENS)) for _ in range(2))
        return (whole - first) / NEW_TOKENS


def time_transformers(engine: TorchEngine) -> None:
    """Print, for each of its ways to compute experts, seconds per token and its name as a line of JSON."""
    for dtype in (torch.float32, torch.bfloat16):
        model = transformers_model(engine, dtype)
        for experts in EXPERTS:
            name = f"{str(dtype).removeprefix('torch.')}, {experts} experts"
            try:
                model.set_experts_implementation(experts)
                print(json.dumps([Generate(model).seconds_per_token(), name]), flush=True)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                print(f"transformers, {name}: does not run here ({str(error).splitlines()[0][:80]})", flush=True)


def fastest_transformers() -> tuple[float, str]:
    """Its fastest way on this machine, seconds per token and how, of those that were timed within TRANSFORMERS_SECONDS.

    In a process of its own, where no kernel of ours has started threads beside the framework's.
    """
    command = [sys.executable, __file__, "--transformers"]
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, timeout=TRANSFORMERS_SECONDS, check=True).stdout
    except subprocess.TimeoutExpired as stopped:
        output = stopped.stdout or b""
    timed = [tuple(json.loads(line)) for line in output.splitlines() if line.startswith(b"[")]
    for spent, name in timed:
        print(f"transformers, {name}: {1 / spent:.1f} tokens/s", flush=True)
    return min(timed)


def measure(engine: TorchEngine, rounds: int) -> dict[str, Any]:
    engine.enter_thread()
    reader, plain, many = Reader(), Decoder(engine, 1), Decoder(engine, SEQUENCES)
    verifiers = [Verifier(engine, rows, tokens) for rows in (4, 6, 8) for tokens in range(1, rows)]
    others = [fastest_transformers()]
    times: dict[str, list[float]] = {name: [] for name in ("read", "plain", "many")}
    verify: list[list[float]] = [[] for _ in verifiers]
    spent, repeats = time.monotonic(), 8
    plain.step()
    many.step()
    for number in range(rounds):
        # The best of a few tries in a row is what the machine can do just now.
        times["read"].append(min(seconds(reader.read) for _ in range(4)))
        times["plain"].append(min(seconds(plain.step) for _ in range(repeats)))
        times["read"].append(min(seconds(reader.read) for _ in range(4)))
        times["many"].append(min(seconds(many.step) for _ in range(3)))
        for verifier, found in zip(verifiers, verify, strict=True):
            found.append(min(seconds(verifier.step) for _ in range(3)))
        if number % 5 == 4:
            print(f"round {number + 1} of {rounds}, {time.monotonic() - spent:.0f} s", flush=True)
    others.append(fastest_transformers())  # before and after the rounds
    (transformers_seconds, how), best = min(others), {name: min(found) for name, found in times.items()}
    reads = np.minimum(times["read"][0::2], times["read"][1::2])
    shares = plain.bytes / np.array(times["plain"]) / (READ_BYTES / reads)
    bandwidth = READ_BYTES / best["read"]
    fit = np.array([[1, v.rows, v.distinct] for v in verifiers], float)
    slope = float(np.linalg.lstsq(fit, np.array([min(found) for found in verify]), rcond=None)[0][2])
    per_expert = engine.step_bytes.per_expert / bandwidth
    return {
        "read_gb_per_s": bandwidth / 1e9,
        "plain_ms": 1e3 * best["plain"],
        "plain_bytes": plain.bytes,
        "plain_gb_per_s": plain.bytes / best["plain"] / 1e9,
        "share_of_bandwidth": plain.bytes / best["plain"] / bandwidth,
        "share_by_round": {q: float(np.quantile(shares, q)) for q in (0.1, 0.5, 0.9)},
        "plain_tokens_per_s": 1 / best["plain"],
        "transformers": how,
        "transformers_tokens_per_s": 1 / transformers_seconds,
        "times_transformers": transformers_seconds / best["plain"],
        "verify_us_per_expert": 1e6 * slope,
        "bytes_over_bandwidth_us_per_expert": 1e6 * per_expert,
        "verify_over_bandwidth": slope / per_expert,
        "verify": [
            {"rows": v.rows, "distinct": v.distinct, "ms": 1e3 * min(found)}
            for v, found in zip(verifiers, verify, strict=True)
        ],
        "sequences": SEQUENCES,
        "sequences_tokens_per_s": SEQUENCES / best["many"],
    }


def table(r: dict[str, Any]) -> str:
    quantiles = ", ".join(f"{q:.0%}: {share:.0%}" for q, share in r["share_by_round"].items())
    rows = (
        ("plain parallel read of memory", f"{r['read_gb_per_s']:.1f} GB/s"),
        ("plain decoding, one sequence", f"{r['plain_ms']:.2f} ms a token, {r['plain_tokens_per_s']:.0f} tokens/s"),
        ("bytes that a step reads", f"{r['plain_bytes'] / 1e6:.0f} MB, {r['plain_gb_per_s']:.1f} GB/s"),
        ("share of the read bandwidth", f"{r['share_of_bandwidth']:.0%} (quantiles by round: {quantiles})"),
        (f"transformers generate ({r['transformers']})", f"{r['transformers_tokens_per_s']:.1f} tokens/s"),
        ("plain decoding against it", f"{r['times_transformers']:.1f} x"),
        ("verification, per distinct expert", f"{r['verify_us_per_expert']:.1f} us"),
        ("an expert's bytes over the bandwidth", f"{r['bytes_over_bandwidth_us_per_expert']:.1f} us"),
        ("ratio of these", f"{r['verify_over_bandwidth']:.2f}"),
        (f"{r['sequences']} sequences at once", f"{r['sequences_tokens_per_s']:.0f} tokens/s"),
    )
    return "\n".join(["| measure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--transformers", action="store_true", help="only time transformers, for the benchmark itself")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(demo_dir=ROOT / "models" / "demo", drafter="none", max_context_tokens=2048)
    engine = load(settings, lambda text: print(text, flush=True)).engine
    if args.transformers:
        return time_transformers(engine)
    found = in_own_thread(lambda: measure(engine, args.rounds))
    command = f"python benchmarks/engine.py --rounds {args.rounds}"
    machine = {"machine": f"{platform.machine()}, {platform.system()}", "cores": os.cpu_count()}
    result = {"command": command, "target": engine.geometry.name, **machine, **found}
    (args.out / "engine.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = table(found)
    (args.out / "engine.md").write_text(f"`{command}`\n\n{text}\n", encoding="utf-8")
    print(text)
    print(f"written: engine.json and engine.md in {args.out}")


if __name__ == "__main__":
    main()
