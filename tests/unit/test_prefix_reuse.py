"""The embedded engine on a tiny mixture: chunks and reused pages give what one fresh prefill gives."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
import torch
from tiny_heads import on_kernels
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.core import Request, SamplingParams, TokenEvent
from ecospec_orchestrator.drafting.eagle3 import Eagle3Drafter
from ecospec_orchestrator.drafting.eagle3_head import Eagle3Config, Eagle3Head
from ecospec_orchestrator.engine.base import StepBytes
from ecospec_orchestrator.engine.torch.cache import PAGE_TOKENS
from ecospec_orchestrator.engine.torch.engine import TorchEngine
from ecospec_orchestrator.scheduler import Limits, Scheduler
from ecospec_orchestrator.selection.factory import make_policy
from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.trace_document import TraceDocument

VOCABULARY, HIDDEN, LAYERS, EXPERTS, TOP_K = 50, 24, 3, 8, 2
RANDOM = np.random.default_rng(0)
COMMON = RANDOM.integers(3, VOCABULARY, 3 * PAGE_TOKENS + 50).tolist()


def build_engine(prefix_reuse: bool = True) -> TorchEngine:
    torch.manual_seed(7)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
    )
    model = AutoModelForCausalLM.from_config(config).eval().float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.25)
    geometry = TargetGeometry("qwen3_moe", "test", VOCABULARY, HIDDEN, LAYERS, EXPERTS, TOP_K)
    bytes_ = StepBytes(1, 1, 1, 1, 1)
    return TorchEngine(model, geometry, bytes_, (0, 1, 2), 1024, kv_pages=40, prefix_reuse=prefix_reuse)


def build_drafter(engine: TorchEngine) -> Eagle3Drafter:
    torch.manual_seed(3)
    head = Eagle3Head(Eagle3Config(HIDDEN, 40, 4, 2, 8, 30, VOCABULARY, 1e-5, 1e4, (0, 1, 2)))
    head.t2d[:30] = True
    head.midlayer.self_attn.layer_idx = 0
    return Eagle3Drafter(on_kernels(head), engine.model.model.embed_tokens, 3, 2, kv_pages=40)


def held(cache: Any) -> list[torch.Tensor]:
    return [part for layer in range(cache.pool.layout.layers) for part in cache.gather(layer, cache.length)]


def assert_same(found: Any, fresh: Any) -> None:
    for a, b in zip(held(found), held(fresh), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cuts", [[1], [64], [32, 64, 96, 130], [5, 6, 200]])
def test_chunks_give_what_one_prefill_gives(cuts: list[int]) -> None:
    engine = build_engine()
    drafter = build_drafter(engine)
    whole, chunked = engine.new_sequence(), engine.new_sequence()
    states = [drafter.new_state() for _ in range(2)]
    prompt = np.array(COMMON)
    features = engine.prefill(whole, prompt[:-1])
    drafter.extend(states[:1], [features], [prompt[1:]])
    for start, stop in zip([0, *cuts], [*cuts, len(prompt) - 1], strict=True):
        part = engine.prefill(chunked, prompt[start:stop])
        torch.testing.assert_close(part, features[start:stop], atol=1e-5, rtol=1e-5)
        drafter.extend(states[1:], [part], [prompt[start + 1 : stop + 1]])
    assert_same(chunked, whole)
    assert_same(states[1].cache, states[0].cache)
    one, other = drafter.draft(states)
    assert one.tokens.tolist() == other.tokens.tolist() and one.parents.tolist() == other.parents.tolist()


class Server:
    """A scheduler whose thread is the test's own, so that caches can be looked at between steps."""

    def __init__(self, prefix_reuse: bool) -> None:
        self.engine = build_engine(prefix_reuse)
        self.drafter = build_drafter(self.engine)
        policy = make_policy("likelihood", gamma=4)
        self.scheduler = Scheduler(self.engine, self.drafter, None, policy, Limits(4, 9, 1024), Ledger())
        self.events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self.routes: dict[str, TraceDocument | None] = {}
        self.at_first_step: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def run(self, *requests: Request) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
        for request in requests:
            self.scheduler.submit(request, self.events.put)
        while self.scheduler.running or self.scheduler.waiting:
            self.scheduler._admit()
            self.scheduler._prefiller.turn(self.scheduler._running, self.scheduler.ledger)
            for r in self.scheduler._running:
                if r.decodes and r.request.request_id not in self.at_first_step:
                    self.at_first_step[r.request.request_id] = held(r.sequence), held(r.draft_state.cache)
            if any(r.decodes for r in self.scheduler._running):
                self.scheduler.step()
        while not self.events.empty():
            event = self.events.get()
            tokens[event.request_id] += event.tokens
            self.routes[event.request_id] = event.routes
        assert self.engine.check_idle() is None and self.drafter.check_idle() is None
        return tokens


def test_reused_pages_hold_what_a_fresh_prefill_computes_and_the_text_is_the_same() -> None:
    found, fresh = Server(prefix_reuse=True), Server(prefix_reuse=False)
    first = Request("first", (*COMMON, 7, 8), 16)
    answer = found.run(first)["first"]
    assert answer == fresh.run(first)["first"]
    requests = [
        Request("same", first.prompt_tokens, 16),
        Request("other end", (*COMMON, 9), 16),
        Request("sampled", (*COMMON[:130], 4, 5), 16, SamplingParams(temperature=1.0, seed=5)),
        Request("chat", (*first.prompt_tokens, *answer, 11, 12), 16),
        Request("different", (3, *COMMON), 16),
    ]
    assert found.run(*requests) == fresh.run(*requests)
    for name, (sequence, state) in found.at_first_step.items():
        for ours, plain in zip(
            [*sequence, *state], [part for both in fresh.at_first_step[name] for part in both], strict=True
        ):
            torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    hits = found.scheduler.ledger.registry.get_sample_value("ecospec_prefix_cache_hits_total")
    # The chat reuses a page that decoding filled.
    in_pages = [len(COMMON) + 1, len(COMMON), 130, len(COMMON) + 2 + 15]
    assert hits == sum(n // PAGE_TOKENS * PAGE_TOKENS for n in in_pages)
    assert fresh.engine.cache_use().kept == 0 < found.engine.cache_use().kept


def test_recorded_routes_are_those_of_a_plain_forward_of_every_path() -> None:
    server = Server(prefix_reuse=True)
    prompt = COMMON[: PAGE_TOKENS + 9]
    server.run(Request("before", tuple(prompt), 2))
    answer = server.run(Request("recorded", tuple(prompt), 12, record_routes=True))["recorded"]
    routes = server.routes["recorded"]
    assert routes is not None and routes.tokens[routes.accepted].tolist() == prompt + answer
    assert not routes.accepted.all(), "no draft was rejected: the test shows nothing"
    plain = build_engine(prefix_reuse=False)

    def experts_of(path: list[int]) -> np.ndarray:
        """Sorted, because the order within a row means nothing."""
        sequence = plain.new_sequence()
        _, experts = plain.prefill_with_experts(sequence, np.array(path))
        plain.release(sequence)
        return np.sort(experts)

    for row in np.flatnonzero(~routes.accepted):
        path, at = [], int(row)
        while at >= 0:
            path.append(int(routes.tokens[at]))
            at = int(routes.parents[at])
        assert np.array_equal(experts_of(path[::-1])[-1], np.sort(routes.routes[row])), row
    assert np.array_equal(experts_of(prompt + answer[:-1]), np.sort(routes.routes[routes.accepted][:-1]))
    assert (routes.routes[-1] == -1).all()
