"""Is the output the target's own? Token ids of every policy and batch size against plain decoding, and plain decoding against
transformers on the dense base model. Every switch of `make bench`, too, on fewer prompts.

    python benchmarks/losslessness.py [--prompts 40] [--tokens 128]

Where the two best logits of the dense model lie within 1e-3 of each other, either token is right in floating point: runs are
compared up to there, and such ties are counted. Exit code 1 when anything else differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from cases import ALL_CASES, Switchboard
from harness import bench_system, load_prompts
from transformers import LlamaConfig, LlamaForCausalLM

from ecospec_orchestrator.engine.torch.gguf_llama import load_dense_state
from ecospec_orchestrator.loading import gguf_path
from ecospec_orchestrator.profiling import QUICK_SECONDS
from ecospec_orchestrator.settings import Settings

TIE = 1e-3
POLICIES = ("ar", "eagle3_g4", "ecospec_g4", "goodput")
BATCHES = (1, 4)
SWITCH_PROMPTS = 8  # of every other case, at the largest batch


def dense_model() -> LlamaForCausalLM:
    """The base model in transformers' own Llama class, float32, from the same rounded weights."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    state = {k: v.float() for k, v in load_dense_state(gguf_path(Settings()), 9, 3).items()}
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    return model


@torch.inference_mode()
def dense_choices(
    model: LlamaForCausalLM, prompt: Sequence[int], output: Sequence[int]
) -> tuple[list[int], list[float]]:
    """For every output position, given the prompt and the output before it: the dense model's greedy token and its margin over
    the second best. If every choice equals the output, greedy generation from the prompt gives this output."""
    logits = model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2)
    return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def compare(expected: Sequence[int], found: Sequence[int], margins: Sequence[float]) -> str:
    """ "equal", "tie" (the first difference is at a tie of the expected run) or "different"."""
    for i in range(max(len(expected), len(found))):
        if i >= len(expected) or i >= len(found) or expected[i] != found[i]:
            return "tie" if i < len(margins) and margins[i] < TIE else "different"
    return "equal"


def outputs_of(
    board: Switchboard, prompts: Sequence[tuple[int, ...]], case: str, batch: int, tokens: int
) -> list[tuple[int, ...]]:
    board.configure(ALL_CASES[case])
    outputs: list[tuple[int, ...]] = []
    for start in range(0, len(prompts), batch):
        outputs += board.bench.run(prompts[start : start + batch], tokens).outputs
    return outputs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    texts = [p for family in load_prompts(("chat", "code", "maths")).values() for p in family]
    texts = (texts + [f"{p} Answer in one short paragraph." for p in texts])[: args.prompts]
    bad = 0
    with bench_system(QUICK_SECONDS) as bench:
        board = Switchboard(bench)
        prompts = [bench.encode(p) for p in texts]
        print(f"{len(prompts)} prompts x {args.tokens} tokens, T=0", flush=True)
        plain = outputs_of(board, prompts, "ar", 1, args.tokens)
        model = dense_model()
        margins, results, positions, ties = [], [], 0, 0
        for prompt, output in zip(prompts, plain, strict=True):
            choices, margin = dense_choices(model, prompt, output)
            margins.append(margin)
            positions += len(margin)
            ties += sum(m < TIE for m in margin)
            results.append(compare(choices, output, margin))
        bad += results.count("different")
        print(
            f"plain decoding against transformers on the dense model: {results.count('equal')} equal, {results.count('tie')} up to a tie, "
            f"{results.count('different')} different; {positions} tokens, {ties} of them ties within {TIE}",
            flush=True,
        )
        cases = [(case, batch, len(prompts)) for case in POLICIES for batch in BATCHES if (case, batch) != ("ar", 1)]
        cases += [(case, BATCHES[-1], SWITCH_PROMPTS) for case in ALL_CASES if case not in POLICIES]
        for case, batch, count in cases:
            found = outputs_of(board, prompts[:count], case, batch, args.tokens)
            results = [compare(p, f, m) for p, f, m in zip(plain[:count], found, margins[:count], strict=True)]
            bad += results.count("different")
            print(
                f"{case}, batch {batch}, against plain decoding: {results.count('equal')} equal, {results.count('tie')} up to a tie, "
                f"{results.count('different')} different",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
