"""A predictor of 0.6B parameters for Qwen3-235B-A22B (94 MoE layers, 128 experts, top-8): does it load, serve, and how fast?

The decoder of Qwen3-0.6B's shape (28 layers, 1024 wide, 16 heads over 8 key/value heads, 3072 inner) with random bfloat16
weights, in a temporary directory; served by the real command in a process of its own, on the CPU and where there is one on a
CUDA device, and asked over gRPC for a tree of 60 nodes below 64 context tokens. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from micro_predictor import CONTEXT, GEOMETRY, NODES
from safetensors.torch import save_file

from ecospec_predictor.base import Query
from ecospec_predictor.hf_network import HfConfig, HfExpertPredictor
from ecospec_predictor.network import FORMAT_VERSION
from ecospec_proto import predictor_pb2, predictor_pb2_grpc
from ecospec_proto.codec import decode_experts, encode_tree

BACKBONE = {
    "model_type": "qwen3",
    "vocab_size": GEOMETRY.vocab_size,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
}
CONFIG = HfConfig("hf", BACKBONE, CONTEXT)
TREE = Query(
    np.arange(CONTEXT, dtype=np.int64), np.arange(NODES, dtype=np.int64), (np.arange(NODES, dtype=np.int64) - 1) // 2
)


def write_predictor(directory: Path) -> int:
    """A checkpoint directory with random weights; returns the number of parameters."""
    with torch.device("meta"):
        shapes = HfExpertPredictor(CONFIG, GEOMETRY).state_dict()
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(value.shape, generator=generator).mul_(0.02).bfloat16()
        if value.dim() > 1
        else torch.ones(value.shape, dtype=torch.bfloat16)
        for name, value in shapes.items()
    }
    save_file(weights, directory / "model.safetensors")
    config = {
        "model_type": "ecospec_expert_predictor",
        "format_version": FORMAT_VERSION,
        "predictor": asdict(CONFIG),
        "target": asdict(GEOMETRY),
        "training": {"version": "random"},
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return sum(value.numel() for value in weights.values())


def ask(port: int, calls: int) -> tuple[list[float], list[float]]:
    """Seconds of every call, and of the model in it. The first answer is checked."""
    context, tokens, parents = encode_tree(TREE.context_tokens, TREE.draft_tokens, TREE.parents)
    tree = predictor_pb2.TreeQuery(context_tokens=context, draft_tokens=tokens, parents=parents)
    message = predictor_pb2.PredictRequest(target_fingerprint=GEOMETRY.fingerprint, trees=[tree])
    seconds, model_seconds = [], []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = predictor_pb2_grpc.ExpertPredictorServiceStub(channel)
        for _ in range(calls):
            begin = time.perf_counter()
            answer = stub.Predict(message)
            seconds.append(time.perf_counter() - begin)
            model_seconds.append(answer.model_nanoseconds / 1e9)
    experts = decode_experts(
        answer.trees[0].experts, answer.expert_dtype, 1 + NODES, GEOMETRY.moe_layers, GEOMETRY.top_k
    )
    if experts.max() >= GEOMETRY.experts or any(len(set(row)) < GEOMETRY.top_k for row in experts[:, 0].tolist()):
        raise SystemExit("The answer is no choice of 8 different experts of 128.")
    return seconds, model_seconds


def memory_mib(pid: int) -> dict[str, int]:
    """Resident now, and at most so far."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: int(fields[key].split()[0]) >> 10 for name, key in (("resident", "VmRSS"), ("peak", "VmHWM"))}


def device_free_mib(device: str) -> int:
    return torch.cuda.mem_get_info()[0] >> 20 if device == "cuda" else 0


def serve_and_ask(directory: Path, device: str, threads: int, calls: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "ecospec_predictor.cli", "serve", "--model-dir", str(directory), "--port", "0"]
    command += ["--metrics-port", "0", "--threads", str(threads), "--device", device]
    begin, free_before = time.perf_counter(), device_free_mib(device)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "127.0.0.1:" not in line:
                raise SystemExit("The predictor did not start; its message is above.")
            ready = time.perf_counter() - begin
            seconds, model_seconds = ask(int(line.split("127.0.0.1:")[1].split(":")[0]), calls)
            return {
                "threads": threads,
                "seconds_to_ready": round(ready, 1),
                "memory_mib": memory_mib(process.pid) | {"device": free_before - device_free_mib(device)},
                "call_ms": round(1e3 * float(np.median(seconds)), 1),
                "model_ms": round(1e3 * float(np.median(model_seconds)), 1),
            }
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--calls", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        parameters = write_predictor(Path(name))
        result: dict[str, Any] = {"parameters": parameters, "nodes": NODES, "context_tokens": CONTEXT}
        for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
            result[device] = serve_and_ask(Path(name), device, options.threads, options.calls)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
