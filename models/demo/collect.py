"""Collect training data for the EAGLE-3 head and the expert predictor from the demo target's own text.

    python models/demo/collect.py --gguf FILE --tokenizer DIR --corpus DIR --gsm8k FILE --routers FILE --out DIR --traces DIR \
        --minutes 20

Writes the head's data as safetensors shards into --out: tokens int32 [N], lengths int32 [S] (tokens per sequence),
prompt_lengths int32 [S], features bfloat16 [N, 3 * hidden], final bfloat16 [N, hidden] (after the last norm); and router traces
of the same text, for `ecospec-predictor train`, into --traces, which may hold those of earlier runs.
Half of the answers are greedy, half sampled at temperature 0.8.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import prompts
import torch
from dense import Dense
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from ecospec_orchestrator.engine.torch.demo import LAYERS, TOP_K, routers_geometry
from ecospec_orchestrator.engine.torch.gguf_llama import load_dense_state
from ecospec_proto.traces import TraceDocument, TraceWriter, document_id

END, BATCH, NEW_TOKENS, DOCUMENT_TOKENS = 2, 128, 160, 256


class Collector:
    def __init__(self, model: Dense, routers: dict[str, torch.Tensor]) -> None:
        self.model = model
        self.gate = routers["weight"].float()
        self.bias = routers["e_score_correction_bias"]

    @torch.no_grad()
    def step(self, tokens, positions, cache, start, mask):
        """One forward; returns (features, final, routes uint8 [B, T, layers, k])."""
        routes = torch.empty(*tokens.shape, LAYERS, TOP_K, dtype=torch.uint8)

        def keep(layer: int, x: torch.Tensor) -> None:
            score = (x.float() @ self.gate[layer].T).sigmoid() + self.bias[layer]
            routes[:, :, layer] = score.topk(TOP_K).indices.to(torch.uint8)

        features, final = self.model.forward(tokens, positions, cache, start, mask, keep)
        return features, final, routes

    @torch.no_grad()
    def answers(self, sequences: list[list[int]]) -> dict[str, torch.Tensor]:
        batch, width = len(sequences), max(map(len, sequences))
        pad = torch.tensor([width - len(s) for s in sequences])
        tokens = torch.tensor([[0] * (width - len(s)) + s for s in sequences])
        valid = torch.arange(width + NEW_TOKENS)[None] >= pad[:, None]
        mask = (torch.ones(width, width).tril().bool()[None] & valid[:, None, :width]) | torch.eye(width).bool()[None]
        cache = self.model.new_cache(batch, width + NEW_TOKENS)
        positions = (torch.arange(width)[None] - pad[:, None]).clamp(min=0)
        parts = [self.step(tokens, positions, cache, 0, mask[:, None])]
        columns, alive = [tokens], torch.ones(batch, dtype=torch.bool)
        ends = torch.full((batch,), width)
        for at in range(width, width + NEW_TOKENS):
            logits = self.model.logits(parts[-1][1][:, -1]).float()
            token = logits.argmax(-1)
            sampled = torch.multinomial((logits[batch // 2 :] / 0.8).softmax(-1), 1)[:, 0]
            token[batch // 2 :] = sampled
            alive &= token != END
            if alive.float().mean() < 0.2:
                break
            ends[alive] = at + 1
            columns.append(token[:, None])
            parts.append(self.step(token[:, None], (at - pad)[:, None], cache, at, valid[:, None, None, : at + 1]))
        return self.pack(torch.cat(columns, 1), parts, pad, ends, torch.tensor([len(s) for s in sequences]))

    @torch.no_grad()
    def documents(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        batch, length = tokens.shape
        mask = torch.ones(length, length).tril().bool()[None, None]
        parts = [
            self.step(tokens, torch.arange(length).expand(batch, -1), self.model.new_cache(batch, length), 0, mask)
        ]
        zeros = torch.zeros(batch, dtype=torch.long)
        return self.pack(tokens, parts, zeros, zeros + length, zeros)

    @staticmethod
    def pack(tokens, parts, starts, ends, prompt_lengths):
        features, final, routes = (torch.cat([p[i] for p in parts], 1) for i in range(3))
        keep = [(i, slice(int(starts[i]), int(ends[i]))) for i in range(len(tokens))]
        join = lambda x: torch.cat([x[i, s] for i, s in keep])  # noqa: E731
        return {
            "tokens": join(tokens).int(),
            "lengths": (ends - starts).int(),
            "prompt_lengths": prompt_lengths.int(),
            "features": join(features),
            "final": join(final),
            "routes": join(routes),
        }


def save(data: dict[str, torch.Tensor], path: Path, domain: str, traces: TraceWriter) -> None:
    """Write a batch's shard for the head, and its sequences as trace documents. Answers to one question share the beginning
    of their id, so that the split keeps them on one side."""
    routes = data.pop("routes").to(torch.int16)
    save_file(data, path)
    at = 0
    for length, prompt in zip(data["lengths"].tolist(), data["prompt_lengths"].tolist(), strict=True):
        part = slice(at, at + length)
        at += length
        tokens, rows = data["tokens"][part].numpy(), np.arange(length, dtype=np.int32)
        name = f"{document_id(tokens[:prompt])[:16]}:{document_id(tokens)[:16]}" if prompt else document_id(tokens)
        traces.add(TraceDocument(name, domain, tokens, rows, rows - 1, routes[part].numpy(), np.ones(length, bool)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("gguf", "tokenizer", "corpus", "gsm8k", "routers", "out", "traces"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--document-shards", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0, help="another seed asks other questions")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    collector = Collector(Dense(load_dense_state(args.gguf, 9, 3)), load_file(args.routers))
    begin = time.monotonic()
    texts = prompts.documents(args.corpus, args.document_shards * 250_000, seed=2 + args.seed)
    ids = torch.tensor(tokenizer("\n".join(texts))["input_ids"], dtype=torch.long)
    rows = ids[: len(ids) // DOCUMENT_TOKENS * DOCUMENT_TOKENS].view(-1, DOCUMENT_TOKENS)
    with TraceWriter(args.traces, routers_geometry(args.routers), "ecospec-demo") as traces:
        total = 0
        for shard in range(min(args.document_shards, len(rows) // 96)):
            data = collector.documents(rows[shard * 96 : shard * 96 + 96])
            save(data, args.out / f"documents-{args.seed}-{shard:03}.safetensors", "documents", traces)
            total += len(data["tokens"])
            print(f"documents {shard}: {total} tokens, {time.monotonic() - begin:.0f} s", flush=True)
        questions = prompts.chat_prompts(40_000, args.corpus, args.gsm8k, seed=3 + args.seed)
        shard = 0
        while time.monotonic() - begin < args.minutes * 60 and (shard + 8) * BATCH < len(questions):
            group = [encode(tokenizer, q) for q in questions[shard * BATCH : (shard + 8) * BATCH]]
            group = sorted((s for s in group if len(s) <= 320), key=len)
            order = torch.randperm(len(group) // BATCH).tolist()
            for at in order:
                if time.monotonic() - begin > args.minutes * 60:
                    break
                data = collector.answers([group[i] for i in torch.randperm(BATCH).add(at * BATCH).tolist()])
                save(data, args.out / f"answers-{args.seed}-{shard:03}-{at}.safetensors", "answers", traces)
                total += len(data["tokens"])
                print(f"answers {shard}/{at}: {total} tokens, {time.monotonic() - begin:.0f} s", flush=True)
            shard += 8
    print(tokenizer.decode(data["tokens"][: int(data["lengths"][0])]))


def encode(tokenizer, prompt: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer(text)["input_ids"]


if __name__ == "__main__":
    main()
