"""What the predictor at the other end of one stream has been told about every request: only new tokens are sent."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ecospec_proto import predictor_pb2
from ecospec_proto.codec import encode_tree

from ..core import DraftTree
from .base import TreeContext


@dataclass(frozen=True)
class Asked:
    """One tree of a question. tail: the last tokens of a text of `length`, as many as the predictor can use, at the time of
    asking; request_id "" is a text that is asked about once."""

    request_id: str
    tail: Sequence[int]
    length: int
    tree: DraftTree

    @classmethod
    def of(cls, item: TreeContext, max_context_tokens: int) -> Asked:
        """max_context_tokens 0: all of them."""
        tail = tuple(item.context_tokens[-max_context_tokens:])
        return cls(item.request_id, tail, len(item.context_tokens), item.tree)


@dataclass
class _Sent:
    """A session of the predictor: it was started at index `start` of the text and has been sent all before index `end`."""

    session_id: int
    start: int
    end: int
    lost: bool = False


class SentContexts:
    """Belongs to one stream: the predictor's sessions end with it. The stream keeps the order of what is written, so a token
    counts as known once it is written."""

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}
        self._ended: list[int] = []

    def query(self, asked: Asked) -> predictor_pb2.TreeQuery:
        """The message of one tree; write it. Raises CodecError, and then nothing counts as sent."""
        sent, tokens, session, before = self._sent.get(asked.request_id), asked.tail, 0, 0
        if asked.request_id:
            new = asked.length - sent.end if sent is not None and not sent.lost else -1
            if sent is not None and 0 <= new < len(asked.tail):
                tokens, before = asked.tail[len(asked.tail) - new :], sent.end - sent.start
            else:  # a new one, or so far behind that a fresh start is cheaper
                session_id = sent.session_id if sent is not None else 1 + secrets.randbelow(2**64 - 1)
                sent = _Sent(session_id, asked.length - len(asked.tail), 0)
            session = sent.session_id
        context, nodes, parents = encode_tree(tokens, asked.tree.tokens, asked.tree.parents)
        if sent is not None:
            sent.end = asked.length
            self._sent[asked.request_id] = sent
        return predictor_pb2.TreeQuery(
            context_tokens=context,
            draft_tokens=nodes,
            parents=parents,
            session_id=session,
            context_start=before,
        )

    def forget(self, request_id: str) -> None:
        """The predictor has lost it: the next question sends the whole context."""
        if (sent := self._sent.get(request_id)) is not None:
            sent.lost = True

    def end(self, request_id: str) -> None:
        if (sent := self._sent.pop(request_id, None)) is not None:
            self._ended.append(sent.session_id)

    def take_ended(self) -> list[int]:
        """Sessions to end at the predictor; each is returned once."""
        ended, self._ended = self._ended, []
        return ended
