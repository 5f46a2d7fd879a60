"""What the client sends of a context: new tokens only, against a model of the service that keeps texts."""

from __future__ import annotations

import numpy as np
import pytest

from ecospec_orchestrator.core import DraftTree
from ecospec_orchestrator.footprint.base import TreeContext
from ecospec_orchestrator.footprint.contexts import Asked, SentContexts
from ecospec_proto import predictor_pb2
from ecospec_proto.codec import CodecError

WINDOW = 5


def query(contexts: SentContexts, name: str, text: list[int]) -> tuple[predictor_pb2.TreeQuery, list[int]]:
    message = contexts.query(Asked.of(TreeContext(text, DraftTree.empty(), None, name), WINDOW))
    return message, np.frombuffer(message.context_tokens, "<i4").tolist()


def test_the_service_always_holds_a_tail_of_the_text() -> None:
    random, contexts = np.random.default_rng(2), SentContexts()
    texts: dict[str, list[int]] = {name: [] for name in "abc"}
    held: dict[int, list[int]] = {}
    sent = asked = 0
    for _ in range(2000):
        name = "abc"[int(random.integers(3))]
        text = texts[name]
        text += random.integers(
            0, 99, int(random.integers(0 if text else 1, 4)) + 9 * int(random.random() < 0.05)
        ).tolist()
        message, tokens = query(contexts, name, text)
        if message.context_start and (message.session_id not in held or random.random() < 0.05):
            held.pop(message.session_id, None)
            contexts.forget(name)
            again, tokens = query(contexts, name, text)
            assert again.session_id == message.session_id and again.context_start == 0
            message = again
        known = held[message.session_id] if message.context_start else []
        assert message.session_id and len(known) == message.context_start
        held[message.session_id] = known + tokens
        assert held[message.session_id][-WINDOW:] == text[-WINDOW:]
        sent, asked = sent + len(tokens), asked + 1
        if random.random() < 0.02:
            contexts.end(name)
            texts[name] = []
            (ended,) = contexts.take_ended()
            del held[ended]
            assert contexts.take_ended() == []
    assert sent < 3 * asked


def test_a_text_without_a_name_is_sent_each_time() -> None:
    contexts = SentContexts()
    for _ in range(2):
        message, tokens = query(contexts, "", list(range(9)))
        assert (message.session_id, message.context_start, tokens) == (0, 0, [4, 5, 6, 7, 8])
    contexts.end("")
    contexts.forget("never seen")
    assert contexts.take_ended() == []


def test_what_could_not_be_encoded_counts_as_not_sent() -> None:
    contexts = SentContexts()
    query(contexts, "a", [1, 2])
    with pytest.raises(CodecError):
        query(contexts, "a", [1, 2, 2**40])
    message, tokens = query(contexts, "a", [1, 2, 3])
    assert (message.context_start, tokens) == (2, [3])
