"""One question to the predictor, its messages, and the stream that carries them."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field

import grpc
import numpy as np

from ecospec_proto import predictor_pb2
from ecospec_proto.codec import CodecError, decode_experts, pack_bitsets
from ecospec_proto.geometry import TargetGeometry

from ..core import Footprints
from .contexts import Asked, SentContexts

Failure = tuple[str, str]  # reason and message of a FootprintUnavailableError


@dataclass(eq=False)
class Link:
    """One open stream, and what the service knows through it."""

    stream: grpc.aio.StreamStreamCall
    max_context_tokens: int
    max_trees: int  # of one message; 0 is any number
    contexts: SentContexts = field(default_factory=SentContexts)
    write: asyncio.Task[None] | None = None  # of the last question; not done while the service takes nothing
    ending: asyncio.Task[None] | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # a stream allows one write at a time


@dataclass(eq=False)
class Part:
    """The trees of one message."""

    asked: list[Asked]
    response: predictor_pb2.PredictResponse | None = None
    resent: bool = False

    def footprints(self, geometry: TargetGeometry) -> list[Footprints]:
        """What the answer says, all known. Raises CodecError when it does not fit the question."""
        response = self.response
        assert response is not None
        if len(response.trees) != len(self.asked):
            raise CodecError(f"it holds {len(response.trees)} trees; {len(self.asked)} were asked for.")
        if response.expert_dtype == predictor_pb2.EXPERT_DTYPE_UINT8 and geometry.experts > 256:
            raise CodecError(f"its experts are uint8; the target's {geometry.experts} experts need uint16.")
        result = []
        for asked, answer in zip(self.asked, response.trees, strict=True):
            rows = 1 + len(asked.tree)
            ids = decode_experts(answer.experts, response.expert_dtype, rows, geometry.moe_layers, geometry.top_k)
            result.append(Footprints(pack_bitsets(ids, geometry.experts), np.ones(rows, np.bool_)))
        return result


@dataclass(eq=False)
class Call:
    """One question. Written by the stream's thread only, before done is set. deadline: time.monotonic(); traceparent: of the
    span that asks, empty where it is not traced."""

    parts: list[Part]
    link: Link
    deadline: float
    failure: Failure | None = None
    traceparent: str = ""
    answered_at: float = 0.0  # time.monotonic()
    done: threading.Event = field(default_factory=threading.Event)

    def finish(self, failure: Failure | None = None) -> None:
        self.failure, self.answered_at = failure, time.monotonic()
        self.done.set()
