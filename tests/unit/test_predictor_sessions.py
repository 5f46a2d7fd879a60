"""Contexts kept between requests: the answers are those of the text, and the pool is bounded and private."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
import torch
from torch import nn

from ecospec_predictor.base import Query, Session
from ecospec_predictor.errors import Refused
from ecospec_predictor.kernels import add_norm, top_k
from ecospec_predictor.metrics import Metrics
from ecospec_predictor.model import LoadedExpertModel
from ecospec_predictor.network import ExpertPredictor, PredictorConfig
from ecospec_predictor.sessions import OVERHEAD_BYTES, Sessions
from ecospec_proto.geometry import TargetGeometry

GEOMETRY = TargetGeometry("tiny", "test", 61, 20, 3, 12, 3)
WINDOW = 7
CONFIG = PredictorConfig(hidden_size=32, layers=3, heads=4, mlp_size=48, max_context_tokens=WINDOW)


@pytest.fixture(scope="module")
def network() -> ExpertPredictor:
    torch.manual_seed(0)
    made = ExpertPredictor(CONFIG, GEOMETRY, torch.randn(61, 20).bfloat16())
    for parameter in made.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.4)
    return made.eval()


class Text:
    """One running text, and where its session began: before that the model has seen nothing."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.random, self.session = generator, Session()
        self.tokens: list[int] = []
        self.began = 0

    def grow(self, count: int) -> None:
        self.tokens += self.random.integers(0, 61, count).tolist()
        self.session.length = len(self.tokens)

    def query(self) -> Query:
        nodes = int(self.random.integers(0, 10))
        parents = np.array([int(self.random.integers(-1, n)) if n else -1 for n in range(nodes)], np.int64)
        drafts = self.random.integers(0, 61, nodes)
        return Query(np.array(self.tokens[-WINDOW:]), drafts, parents, self.session, len(self.tokens))


def logits_of_text(network: ExpertPredictor, tokens: list[int]) -> torch.Tensor:
    """[layers, experts] of the last token: the whole text at once, every row looking back WINDOW tokens."""
    at = torch.arange(len(tokens))
    mask = (at <= at[:, None]) & (at > at[:, None] - WINDOW)
    with torch.inference_mode():
        hidden = network(torch.tensor(tokens)[None], at[None], mask[None])
        return network.logits(hidden[0, -1:])[0].float()


def check(network: ExpertPredictor, text: Text, query: Query, answer: np.ndarray) -> None:
    assert answer.shape == (1 + len(query.draft_tokens), 3, 3)
    for node in range(-1, len(query.draft_tokens)):
        path, at = [], node
        while at >= 0:
            path.append(int(query.draft_tokens[at]))
            at = int(query.parents[at])
        wanted = logits_of_text(network, text.tokens[text.began :] + path[::-1])
        chosen = torch.from_numpy(answer[node + 1].astype(np.int64))
        assert all(len(set(row)) == 3 for row in chosen.tolist())
        torch.testing.assert_close(wanted.gather(1, chosen), wanted.topk(3).values, atol=1e-3, rtol=1e-3)


def test_a_session_answers_like_its_text_computed_at_once(network: ExpertPredictor) -> None:
    generator = np.random.default_rng(3)
    model = LoadedExpertModel(network, "test")
    texts = [Text(generator) for _ in range(5)]
    for _ in range(60):
        asked = [t for t in texts if generator.random() < 0.6]
        for text in asked:
            behind = text.session.state is None or text.session.state.end + WINDOW <= len(text.tokens)
            text.grow(int(generator.integers(0 if text.tokens else 1, 4)) + 20 * int(generator.random() < 0.05))
            if generator.random() < 0.1:  # evicted, and sent again with as much as a model can use
                text.session = Session(length=len(text.tokens))
            state = text.session.state
            if behind or state is None or len(text.tokens) - min(state.end, len(text.tokens) - 1) >= WINDOW:
                text.began = max(0, len(text.tokens) - WINDOW)
        queries = [text.query() for text in asked]
        if queries:
            for text, query, answer in zip(asked, queries, model.predict(queries), strict=True):
                check(network, text, query, answer)


def test_two_questions_of_one_session_in_one_run(network: ExpertPredictor) -> None:
    text, model = Text(np.random.default_rng(5)), LoadedExpertModel(network, "test")
    text.grow(5)
    first = text.query()
    model.predict([first])
    text.grow(2)
    second, began = text.query(), text.began
    text.grow(1)
    third = text.query()
    answers = model.predict([second, third])
    check(network, text, third, answers[1])
    text.tokens, text.began = text.tokens[:7], began
    check(network, text, second, answers[0])
    (again,) = model.predict([second])  # an old question after a newer one: computed from its own context
    check(network, text, second, again)
    assert text.session.state.end == 8


def test_nothing_of_a_draft_is_kept(network: ExpertPredictor) -> None:
    model, session, empty = LoadedExpertModel(network, "test"), Session(), np.zeros(0, np.int64)
    context = np.arange(4)
    model.predict([Query(context, np.arange(20, 30), np.arange(-1, 9), session, 4)])
    assert session.state.keys_values.shape == (3, 2, 4, 32) and session.state.end == 4
    assert session.state.keys_values.base is None  # the drafts' memory is not held either
    plain = Session()
    model.predict([Query(context, empty, empty, plain, 4)])
    np.testing.assert_allclose(session.state.keys_values, plain.state.keys_values, rtol=1e-4, atol=1e-5)
    assert session.state.keys_values.nbytes <= model.session_bytes


def test_bfloat16_answers_nearly_alike(network: ExpertPredictor) -> None:
    generator = np.random.default_rng(6)
    queries = []
    for _ in range(20):
        text = Text(generator)
        text.grow(9)
        queries.append(text.query())
    wide, narrow = (
        np.concatenate(LoadedExpertModel(network, "test", dtype).predict(queries))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert (wide[..., None] == narrow[..., None, :]).any(-1).mean() > 0.93


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_against_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    bits = lambda t: (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).numpy()  # noqa: E731
    x, more, out = torch.randn(5, 64), torch.randn(5, 64).to(dtype), torch.empty(5, 64, dtype=dtype)
    total = x + more.float()
    add_norm(x.numpy(), bits(more), bits(out))
    torch.testing.assert_close(x, total)
    torch.testing.assert_close(out, nn.functional.rms_norm(total, (64,)).to(dtype))
    scores = torch.randn(50, 40).to(dtype)
    scores[:, 7] = scores[:, 3]
    scores[0] = -0.5
    found = np.empty((50, 6), np.uint8)
    top_k(bits(scores), found)
    wanted = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :6]  # of equals the first
    assert found.tolist() == wanted.tolist()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pool(metrics: Metrics, sessions: int = 3, clock: Clock | None = None) -> Sessions:
    budget = sessions * (1000 + 8 * WINDOW + OVERHEAD_BYTES)
    made = Sessions(WINDOW, 1000, budget, 60.0, metrics, clock or Clock())
    assert made.capacity == sessions
    return made


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"ecospec_predictor_{name}", labels) or 0.0


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def lost(sessions: Sessions, caller: object, session_id: int, start: int) -> bool:
    with pytest.raises(Refused) as caught:
        sessions.extend(caller, session_id, start, tokens(1), 1)
    assert str(session_id) in caught.value.message and "context_start 0" in caught.value.message
    return caught.value.code is grpc.StatusCode.NOT_FOUND


def test_a_session_grows_and_keeps_a_tail() -> None:
    metrics = Metrics()
    sessions = pool(metrics)
    one = sessions.extend("a", 9, 0, tokens(1, 2, 3), 3)
    held = one.tokens
    assert sessions.extend("a", 9, 3, tokens(4, 5, 6, 7, 8), 5) is one
    assert one.tokens.tolist() == [2, 3, 4, 5, 6, 7, 8] and one.length == 8 and held.tolist() == [1, 2, 3]
    assert lost(sessions, "a", 9, 7) and lost(sessions, "a", 9, 9) and one.length == 8
    sessions.extend("a", 9, 8, tokens(*range(10, 17)), 1000)  # only the tail of what was sent comes here
    assert one.length == 1008 and one.tokens.tolist() == list(range(10, 17))
    anew = sessions.extend("a", 9, 0, tokens(5), 1)
    assert anew is not one and anew.length == 1 and len(sessions) == 1
    assert value(metrics, "session_uses_total", result="hit") == 2
    assert value(metrics, "session_uses_total", result="started") == 2
    assert value(metrics, "session_uses_total", result="lost") == 2


def test_callers_never_reach_each_others_sessions() -> None:
    sessions = pool(Metrics())
    sessions.extend("a", 9, 0, tokens(1, 2), 2)
    assert lost(sessions, "b", 9, 2)
    mine = sessions.extend("b", 9, 0, tokens(7, 8), 2)
    sessions.end("b", [9, 10])
    assert sessions.extend("a", 9, 2, tokens(3), 1).tokens.tolist() == [1, 2, 3] and mine.length == 2
    sessions.end_caller("a")
    sessions.end_caller("nobody")
    assert lost(sessions, "a", 9, 3) and len(sessions) == 0


def test_the_least_recently_used_and_the_idle_go() -> None:
    metrics, clock = Metrics(), Clock()
    sessions = pool(metrics, 3, clock)
    for session_id in (1, 2, 3):
        sessions.extend("a", session_id, 0, tokens(1), 1)
    sessions.extend("a", 1, 1, tokens(2), 1)
    sessions.extend("b", 4, 0, tokens(1), 1)
    assert len(sessions) == 3 and lost(sessions, "a", 2, 1)
    assert value(metrics, "sessions_dropped_total", cause="evicted") == 1
    clock.now += 59
    sessions.extend("a", 3, 1, tokens(2), 1)
    clock.now += 2
    assert lost(sessions, "a", 1, 2) and len(sessions) == 1
    assert value(metrics, "sessions_dropped_total", cause="idle") == 2
    assert value(metrics, "sessions") == 1
    sessions.close()
    assert len(sessions) == 0 and value(metrics, "sessions") == 0


def test_random_use_of_the_pool_against_plain_lists() -> None:
    generator, metrics = np.random.default_rng(8), Metrics()
    sessions = pool(metrics, 4)
    texts: dict[tuple[int, int], list[int]] = {}
    hits = 0
    for _ in range(3000):
        key = int(generator.integers(3)), int(generator.integers(1, 4))
        text = texts.setdefault(key, [])
        new = generator.integers(0, 61, int(generator.integers(0 if text else 1, 5))).tolist()
        if generator.random() < 0.05:
            sessions.end(key[0], [key[1]])
        try:
            session = sessions.extend(*key, len(text), np.array(new, np.int64), len(new))
            hits += bool(text)
        except Refused:
            text = texts[key] = text[-WINDOW:]
            session = sessions.extend(*key, 0, np.array(text + new, np.int64), len(text) + len(new))
        text += new
        assert session.tokens.tolist() == text[-WINDOW:] and session.length == len(text)
        assert len(sessions) == value(metrics, "sessions") <= 4
    assert 500 < hits < 2500  # both ways were taken
