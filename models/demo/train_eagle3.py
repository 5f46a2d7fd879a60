"""Train the EAGLE-3 head of the demo target on collected shards.

    python models/demo/train_eagle3.py --gguf FILE --data DIR --out models/demo/eagle3 --minutes 40

Training-time test with three steps (the head is fed its own hidden states), soft cross-entropy to the target's own
distribution over the draft vocabulary. The layer starts from the target's last decoder layer. One shard of documents
and one of answers are held out.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from ecospec_orchestrator.drafting.eagle3_head import Eagle3Config, Eagle3Head
from ecospec_orchestrator.engine.torch.demo import FEATURE_LAYERS
from ecospec_orchestrator.engine.torch.gguf_llama import load_dense_state

DRAFT_VOCABULARY, WINDOW, BATCH, STEPS, HELD_OUT = 8192, 256, 12, 3, 2


def windows(shard: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut a shard into rows of WINDOW tokens; segment tells sequences apart, position counts from each one's start."""
    lengths = shard["lengths"].long()
    segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(len(segment)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    prompt = torch.repeat_interleave(shard["prompt_lengths"].long(), lengths)
    rows = len(segment) // WINDOW
    cut = lambda x: x[: rows * WINDOW].unflatten(0, (rows, WINDOW))  # noqa: E731
    return {
        "tokens": cut(shard["tokens"].long()),
        "segment": cut(segment),
        "position": cut(position),
        "answer": cut(position >= prompt - 2),
        "features": cut(shard["features"]),
        "final": cut(shard["final"]),
    }


def losses(head: Eagle3Head, embed: torch.Tensor, batch: dict[str, torch.Tensor], sample: float | None):
    """Per training-time-test step: (mean soft cross-entropy, top-1 agreement, top-2 agreement) over valid positions.

    sample: share of the positions whose loss is computed (the vocabulary product is half the cost), None for all.
    """
    tokens, segment, position = batch["tokens"], batch["segment"], batch["position"]
    embedding = embed[tokens[:, 1:]].float()  # of token p + 1, for positions 0 .. T - 2
    same = segment[:, 1:] == segment[:, :-1]  # token p + 1 continues the sequence of p
    length = embedding.shape[1]
    hidden = head.fc(batch["features"][:, :-1])
    teacher = batch["final"][:, 1:]
    attention = head.midlayer.self_attn
    segment, position = segment[:, :-1], position[:, :-1]
    causal = segment[:, :, None] == segment[:, None, :]
    delta = torch.arange(length)[:, None] - torch.arange(length)[None]
    valid = same & batch["answer"][:, :-1]
    keys, values, results = [], [], []
    for step in range(STEPS):
        x = head.midlayer.inputs(embedding, hidden)
        q, k, v = attention.qkv(x, position)
        keys.append(k)
        values.append(v)
        q = q.unflatten(1, (attention.kv_heads, -1))  # [B, kv, group, T, D]
        score = (q @ keys[0][:, :, None].transpose(-1, -2)).float()
        score = score.masked_fill(~(causal & (delta >= step))[:, None, None], float("-inf"))
        own = []  # keys of the head's own earlier steps lie on diagonals: step j at position p - (step - j)
        for j in range(1, step + 1):
            own.append((q * shift(keys[j], step - j)[:, :, None]).sum(-1, dtype=torch.float32))
        weight = (
            (torch.cat([score, *(o[..., None] for o in own)], -1) / attention.head_dim**0.5).softmax(-1).to(v.dtype)
        )
        attended = weight[..., :length] @ values[0][:, :, None]
        for j in range(1, step + 1):
            attended = attended + weight[..., length + j - 1, None] * shift(values[j], step - j)[:, :, None]
        attended = attended.flatten(1, 2).transpose(1, 2).flatten(2)
        hidden = head.midlayer.finish(hidden, attended)
        if step:
            valid = valid & (position >= step)
        at = torch.nonzero(valid.flatten()).flatten()
        if sample is not None:
            count = int(BATCH * WINDOW * sample)
            at = at[torch.randint(len(at), (count,))]  # a fixed count keeps one compiled kernel
        logits = head.lm_head(head.norm(hidden).flatten(0, 1)[at]).float()
        with torch.no_grad():
            target = F.linear(teacher.flatten(0, 1)[at], head.teacher_rows).float()
            probability = target.softmax(-1)
        loss = torch.logsumexp(logits, -1).mean() - (probability * logits).sum(-1).mean()
        with torch.no_grad():
            best = target.argmax(-1)
            hits = logits.topk(2).indices == best[:, None]
        results.append((loss, hits[:, 0].float().mean().item(), hits.any(-1).float().mean().item()))
        hidden = shift_time(hidden)  # position p continues from the head's own state of p - 1
    return results


def shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """x: [B, kv, T, D] moved `by` positions later in time."""
    return x if by == 0 else F.pad(x, (0, 0, by, 0))[:, :, :-by]


def shift_time(hidden: torch.Tensor) -> torch.Tensor:
    return F.pad(hidden, (0, 0, 1, 0))[:, :-1]


def new_head(state: dict[str, torch.Tensor], counts: torch.Tensor) -> Eagle3Head:
    """Draft vocabulary: the most frequent target ids; weights: the target's last layer, its last feature passed through."""
    config = Eagle3Config(576, 1536, 9, 3, 64, DRAFT_VOCABULARY, 49152, 1e-5, 1e5, FEATURE_LAYERS)
    head = Eagle3Head(config)
    ids = counts.topk(DRAFT_VOCABULARY).indices.sort().values
    head.d2t.copy_(ids - torch.arange(DRAFT_VOCABULARY))
    head.t2d[ids] = True
    hidden, last = config.hidden_size, "model.layers.29."
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, 2 * hidden :] = torch.eye(hidden)
        for name in ("q_proj", "k_proj", "v_proj"):
            layer = getattr(head.midlayer.self_attn, name)
            layer.weight[:, hidden:] = state[f"{last}self_attn.{name}.weight"]
            layer.weight[:, :hidden] *= 0.3
        head.midlayer.self_attn.o_proj.weight.copy_(state[last + "self_attn.o_proj.weight"])
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(head.midlayer.mlp, name).weight.copy_(state[f"{last}mlp.{name}.weight"])
        head.midlayer.hidden_norm.weight.copy_(state[last + "input_layernorm.weight"])
        head.midlayer.post_attention_layernorm.weight.copy_(state[last + "post_attention_layernorm.weight"])
        head.norm.weight.copy_(state["model.norm.weight"])
        head.lm_head.weight.copy_(state["model.embed_tokens.weight"][ids])
        scale = state["model.embed_tokens.weight"].float().pow(2).mean().sqrt()
        head.midlayer.input_layernorm.weight.fill_(1.0)
        print(f"embedding rms {scale:.3f}", flush=True)
    head.lm_head.weight.requires_grad_(
        False
    )  # the target's own rows: trained no further, which saves a third of the time
    return head


def save(head: Eagle3Head, out: Path, note: dict[str, object]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        k: v.bfloat16() if v.is_floating_point() else v for k, v in head.state_dict().items() if k != "teacher_rows"
    }
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLMEagle3"], "format_version": 1, **asdict(head.config), "training": note}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("gguf", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", type=Path, help="a head to go on from")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    state = load_dense_state(args.gguf, 9, 3)
    embed = state["model.embed_tokens.weight"]
    answers = sorted(args.data.glob("answers-*.safetensors"))
    files = sorted(args.data.glob("documents-*.safetensors"))[:-1] + answers[:-1]
    held_out = {"documents": sorted(args.data.glob("documents-*.safetensors"))[-1], "answers": answers[-1]}
    counts = torch.zeros(49152)
    shards = []
    for file in files:
        shard = windows(load_file(file))
        counts += torch.bincount(shard["tokens"].flatten(), minlength=49152)
        shards.append(shard)
    head = new_head(state, counts)
    if args.resume is not None:
        head.load_state_dict(
            {
                k: v.float() if v.is_floating_point() else v
                for k, v in load_file(args.resume / "model.safetensors").items()
            }
        )
    head.register_buffer("teacher_rows", embed[head.target_ids].contiguous())
    tokens = {k: torch.cat([s[k] for s in shards]) for k in shards[0]}
    del shards
    print(
        f"{tokens['tokens'].numel()} tokens, draft vocabulary covers {counts[head.target_ids].sum() / counts.sum():.3f}",
        flush=True,
    )
    trained = [p for p in head.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    begin, seen, at, step = time.monotonic(), 0, 10**9, 0
    while (spent := (time.monotonic() - begin) / 60 / args.minutes) < 1:
        if at + BATCH > len(tokens["tokens"]):
            order, at = torch.randperm(len(tokens["tokens"])), 0
        batch = {k: v[order[at : at + BATCH]] for k, v in tokens.items()}
        at, step, seen = at + BATCH, step + 1, seen + BATCH * WINDOW
        for group in optimiser.param_groups:
            group["lr"] = args.learning_rate * min(1, step / 50) * (1 - spent) ** 0.7 + 1e-6
        with torch.autocast("cpu", torch.bfloat16):
            results = losses(head, embed, batch, 0.3)
        loss = sum(r[0] for r in results) / STEPS
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        if step % 50 == 0:
            rate = seen / (time.monotonic() - begin)
            print(
                f"step {step}: {seen} tokens, {rate:.0f}/s, loss {loss.item():.3f}, "
                + " ".join(f"{a:.2f}/{b:.2f}" for _, a, b in results),
                flush=True,
            )
        if step % 400 == 0:
            save(head, args.out, {"tokens_seen": seen, "complete": False})
    note: dict[str, object] = {
        "command": "python models/demo/train_eagle3.py --gguf FILE --data DIR --out models/demo/eagle3"
        f" --minutes {args.minutes:g} --learning-rate {args.learning_rate:g} --threads {args.threads}"
        + (" --resume HEAD" if args.resume else ""),
        "tokens": tokens["tokens"].numel(),
        "tokens_seen": seen,
    }
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for name, file in held_out.items():
            shard = windows(load_file(file))
            scores = [
                losses(head, embed, {k: v[i : i + BATCH] for k, v in shard.items()}, None)
                for i in range(0, min(72, len(shard["tokens"])), BATCH)
            ]
            note[f"held_out_{name}_top1_by_depth"] = [
                round(sum(s[d][1] for s in scores) / len(scores), 3) for d in range(STEPS)
            ]
            note[f"held_out_{name}_top2_by_depth"] = [
                round(sum(s[d][2] for s in scores) / len(scores), 3) for d in range(STEPS)
            ]
    save(head, args.out, note)
    print(json.dumps(note))


if __name__ == "__main__":
    main()
