"""Fit the demo target's routers: balanced spherical k-means of each layer's FFN inputs, folded into a linear gate.

python models/demo/fit_routers.py --gguf FILE --tokenizer DIR --corpus DIR --gsm8k FILE --out models/demo/routers.safetensors
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import prompts
import torch
import torch.nn.functional as F
from dense import Dense
from safetensors.torch import save_file
from transformers import AutoTokenizer

from ecospec_orchestrator.engine.torch.demo import EXPERTS, HIDDEN, LAYERS, TOP_K
from ecospec_orchestrator.engine.torch.gguf_llama import load_dense_state


@torch.no_grad()
def ffn_inputs(model: Dense, tokens: torch.Tensor) -> torch.Tensor:
    """tokens: [sequences, length] -> [layers, sequences * length, hidden] float32."""
    count, length = tokens.shape
    rows = torch.empty(LAYERS, count * length, HIDDEN, dtype=torch.bfloat16)
    mask = torch.ones(length, length).tril().bool()[None, None]
    for s in range(0, count, 16):
        part = tokens[s : s + 16]
        positions = torch.arange(length).expand(len(part), length)
        n = part.numel()

        def keep(layer: int, x: torch.Tensor, at: int = s * length, n: int = n) -> None:
            rows[layer, at : at + n] = x.reshape(n, HIDDEN)

        model.forward(part, positions, model.new_cache(len(part), length), 0, mask, keep)
    return rows


def fit(x: torch.Tensor, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """x: float32 [tokens, hidden] -> gate weight [experts, hidden], selection bias [experts], worst load / mean."""
    centred = F.normalize(x - x.mean(0), dim=-1)
    centroid = centred[torch.randperm(len(x))[:experts]].clone()
    bias = torch.zeros(experts)
    for _ in range(40):
        score = centred @ centroid.T
        chosen = (score + bias).topk(top_k).indices
        load = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel() * experts
        bias -= 0.02 * (load - 1).clamp(-1, 1)
        first = (score + bias).argmax(-1)
        total = torch.zeros_like(centroid).index_add_(0, first, centred)
        centroid = torch.where((total.norm(dim=-1) > 0)[:, None], F.normalize(total, dim=-1), centroid)
    label = torch.zeros(len(x), experts).scatter_(1, chosen, 1.0)
    scale = x.norm(dim=-1).mean()
    weight = (centroid * 8 / scale).requires_grad_()
    optimiser = torch.optim.Adam([weight], lr=0.02 / scale.item() * 8)
    offset = torch.zeros(experts, requires_grad=True)  # only helps the fit; the selection bias is found below
    optimiser.add_param_group({"params": [offset], "lr": 0.05})
    for _ in range(80):
        at = torch.randint(len(x), (4096,))
        loss = F.binary_cross_entropy_with_logits(x[at] @ weight.T + offset, label[at])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    score = (x @ weight.detach().T).sigmoid()
    correction = torch.zeros(experts)
    for i in range(200):
        load = torch.bincount((score + correction).topk(top_k).indices.flatten(), minlength=experts)
        load = load / load.float().mean()
        correction -= 0.02 * 0.98**i * (load - 1).clamp(-1, 1)
    return weight.detach(), correction, load.max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("gguf", "tokenizer", "corpus", "gsm8k", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    model = Dense(load_dense_state(args.gguf, 9, 3))
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    texts = prompts.documents(args.corpus, 150_000)
    texts += [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False)
        for p in prompts.chat_prompts(400, args.corpus, args.gsm8k, seed=1)
    ]
    random.shuffle(texts)
    ids = tokenizer("\n".join(texts))["input_ids"]
    length = 128
    tokens = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)[:240]
    print(f"{tokens.numel()} calibration tokens", flush=True)
    rows = ffn_inputs(model, tokens)
    weights, biases, loads, table = [], [], [], []
    flat = tokens.flatten()
    for layer in range(LAYERS):
        weight, bias, load = fit(rows[layer].float(), EXPERTS, TOP_K)
        weights.append(weight)
        biases.append(bias)
        loads.append(load)
        table.append(token_table_accuracy(flat, (rows[layer].float() @ weight.T).sigmoid() + bias))
    print("worst load / mean: " + " ".join(f"{v:.2f}" for v in loads))
    print("token table accuracy: " + " ".join(f"{v:.2f}" for v in table), sum(table) / len(table))
    save_file({"weight": torch.stack(weights), "e_score_correction_bias": torch.stack(biases)}, args.out)


def token_table_accuracy(tokens: torch.Tensor, score: torch.Tensor) -> float:
    """Share of top-k experts guessed by a token -> mean score table, fitted on one half and tested on seen tokens of the other."""
    half = len(tokens) // 2
    total = torch.zeros(int(tokens.max()) + 1, EXPERTS).index_add_(0, tokens[:half], score[:half])
    seen = torch.bincount(tokens[:half], minlength=len(total)) > 0
    test = torch.nonzero(seen[tokens[half:]]).flatten() + half
    guess = total[tokens[test]].topk(TOP_K).indices
    actual = score[test].topk(TOP_K).indices
    return (guess[:, :, None] == actual[:, None]).any(-1).float().mean().item()


if __name__ == "__main__":
    main()
