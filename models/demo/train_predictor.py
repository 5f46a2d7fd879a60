"""Train the demo target's expert predictor on collected router traces.

    python models/demo/train_predictor.py --gguf FILE --data DIR --routers FILE --out models/demo/predictor --minutes 12

The paper's loss: per-layer cross-entropy to a distribution that puts 1/K on each of the K activated experts. One shard
of documents and one of answers are held out.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from ecospec_orchestrator.engine.torch.demo import routers_geometry
from ecospec_predictor.model import load_embeddings
from ecospec_predictor.network import ExpertPredictor, PredictorConfig

WINDOW, BATCH, CONTEXT = 32, 96, 24


def windows(shard: dict[str, torch.Tensor], offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens [rows, WINDOW] and routes [rows, WINDOW, layers, k]; windows that cross a sequence border are left out."""
    lengths = shard["lengths"].long()
    segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[offset:]
    rows = len(segment) // WINDOW
    cut = lambda x: x[: rows * WINDOW].unflatten(0, (rows, WINDOW))  # noqa: E731
    inside = cut(segment)[:, 0] == cut(segment)[:, -1]
    return cut(shard["tokens"].long()[offset:])[inside], cut(shard["routes"][offset:])[inside]


def loss_and_overlap(network: ExpertPredictor, tokens: torch.Tensor, routes: torch.Tensor, from_position: int):
    """(cross-entropy, share of top-k experts found per layer [layers]) over positions from `from_position` on."""
    b, t = tokens.shape
    mask = torch.ones(t, t).tril().bool().expand(b, t, t)
    hidden = network(tokens, torch.arange(t).expand(b, t), mask)[:, from_position:]
    logits = network.logits(hidden.flatten(0, 1)).float()
    actual = routes[:, from_position:].flatten(0, 1).long()
    loss = (torch.logsumexp(logits, -1) - logits.gather(-1, actual).mean(-1)).mean()
    with torch.no_grad():
        chosen = logits.topk(actual.shape[-1]).indices
        overlap = (chosen[..., None] == actual[..., None, :]).any(-1).float().mean(-1).mean(0)
    return loss, overlap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("gguf", "data", "routers", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    geometry = routers_geometry(args.routers)
    network = ExpertPredictor(PredictorConfig(320, 4, 5, 1280, CONTEXT), geometry, load_embeddings(args.gguf))
    documents, answers = (sorted(args.data.glob(f"{k}-*.safetensors")) for k in ("documents", "answers"))
    keep = ("tokens", "routes", "lengths")
    shards = [{k: v for k, v in load_file(f).items() if k in keep} for f in documents[:-1] + answers[:-1]]
    print(
        f"{sum(len(s['tokens']) for s in shards)} tokens, {sum(p.numel() for p in network.parameters())} parameters",
        flush=True,
    )
    matrices = [p for p in network.parameters() if p.ndim > 1]
    vectors = [p for p in network.parameters() if p.ndim == 1]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    begin, at, step, epoch, total = time.monotonic(), 0, 0, 0, 0
    tokens = routes = order = torch.zeros(0)
    while (spent := (time.monotonic() - begin) / 60 / args.minutes) < 1:
        if at + BATCH > total:
            parts = [windows(s, int(torch.randint(WINDOW, ()))) for s in shards]
            tokens, routes = (torch.cat([p[i] for p in parts]) for i in range(2))
            total, at, epoch = len(tokens), 0, epoch + 1
            order = torch.randperm(total)
        pick = order[at : at + BATCH]
        at, step = at + BATCH, step + 1
        for group in optimiser.param_groups:
            group["lr"] = args.learning_rate * min(1, step / 100) * max(1 - spent, 0.01)
        with torch.autocast("cpu", torch.bfloat16):
            loss, overlap = loss_and_overlap(network, tokens[pick], routes[pick], 0)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0:
            rate = step * BATCH * WINDOW / (time.monotonic() - begin)
            print(
                f"step {step} epoch {epoch}: {rate:.0f} tokens/s, loss {loss.item():.3f}, top-k {overlap.mean():.3f}",
                flush=True,
            )
    note: dict[str, object] = {
        "command": "python models/demo/train_predictor.py --gguf FILE --data DIR --routers FILE --out models/demo/predictor"
        f" --minutes {args.minutes:g} --learning-rate {args.learning_rate:g} --threads {args.threads}",
        "version": "1",
        "epochs": epoch,
        "tokens_seen": step * BATCH * WINDOW,
    }
    for name, file in (("documents", documents[-1]), ("answers", answers[-1])):
        held_tokens, held_routes = windows(load_file(file), 0)
        with torch.no_grad():
            parts = [
                loss_and_overlap(network, held_tokens[i : i + BATCH], held_routes[i : i + BATCH], CONTEXT // 2)[1]
                for i in range(0, min(768, len(held_tokens) - BATCH), BATCH)
            ]
        per_layer = torch.stack(parts).mean(0)
        note[f"held_out_{name}_top_k_accuracy"] = round(per_layer.mean().item(), 4)
        note[f"held_out_{name}_top_k_accuracy_by_layer"] = [round(v, 3) for v in per_layer.tolist()]
    network.save(args.out, note)
    print(json.dumps(note))


if __name__ == "__main__":
    main()
