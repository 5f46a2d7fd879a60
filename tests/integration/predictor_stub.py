"""A predictor service whose faults are set from outside. As a script (port): one in its own process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from ecospec_proto import predictor_pb2 as pb
from ecospec_proto import predictor_pb2_grpc
from ecospec_proto.geometry import TargetGeometry

GEOMETRY = TargetGeometry("stub", "1", vocab_size=1000, hidden_size=8, moe_layers=3, experts=130, top_k=2)


def experts_of(token: int, geometry: TargetGeometry) -> np.ndarray:
    """uint8 [layers, k]: the arbitrary rule that the tests' oracle shares with the service."""
    layers, k = np.indices((geometry.moe_layers, geometry.top_k))
    return ((token * 7 + layers * 13 + k) % geometry.experts).astype(np.uint8)


class Stub(predictor_pb2_grpc.ExpertPredictorServiceServicer):
    """Answers by experts_of. fault: "", "length", "trees", "dtype" or "range"; version: of the model; refuse_code: of a
    StreamError for every request; delay: seconds before each answer."""

    def __init__(self, geometry: TargetGeometry = GEOMETRY, max_context_tokens: int = 4) -> None:
        self.geometry, self.max_context_tokens = geometry, max_context_tokens
        self.fault = ""
        self.version = "v"
        self.delay = 0.0
        self.refuse_code = 0
        self.stopped = threading.Event()
        self.requests: list[pb.PredictStreamRequest] = []

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.ServicerContext) -> pb.GetModelInfoResponse:
        g = self.geometry
        return pb.GetModelInfoResponse(
            model_version=self.version, target_name=g.name, target_revision=g.revision, target_fingerprint=g.fingerprint,
            max_context_tokens=self.max_context_tokens,
        )  # fmt: skip

    def PredictStream(
        self, requests: Iterator[pb.PredictStreamRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.PredictStreamResponse]:
        for message in requests:
            self.requests.append(message)
            if self.delay and self.stopped.wait(self.delay):
                return
            yield self.answer(message)

    def answer(self, message: pb.PredictStreamRequest) -> pb.PredictStreamResponse:
        if self.refuse_code:
            error = pb.StreamError(code=self.refuse_code, message="No.")
            return pb.PredictStreamResponse(request_id=message.request_id, error=error)
        trees = []
        for tree in message.request.trees:
            root = np.frombuffer(tree.context_tokens, "<i4")[-1:]
            tokens = np.concatenate([root, np.frombuffer(tree.draft_tokens, "<i4")])
            trees.append(
                pb.TreePrediction(experts=b"".join(experts_of(int(t), self.geometry).tobytes() for t in tokens))
            )
        response = pb.PredictResponse(expert_dtype=pb.EXPERT_DTYPE_UINT8, trees=trees, model_version=self.version)
        if self.fault == "length":
            response.trees[0].experts = response.trees[0].experts[:-1]
        elif self.fault == "trees":
            del response.trees[-1]
        elif self.fault == "dtype":
            response.expert_dtype = pb.EXPERT_DTYPE_UINT16
        elif self.fault == "range":
            response.trees[0].experts = b"\xff" * len(response.trees[0].experts)
        return pb.PredictStreamResponse(request_id=message.request_id, response=response)


def serve(stub: Stub, port: int = 0) -> tuple[grpc.Server, int]:
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    predictor_pb2_grpc.add_ExpertPredictorServiceServicer_to_server(stub, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, bound


if __name__ == "__main__":
    running, listening = serve(Stub(), int(sys.argv[1]))  # a server without a reference stops
    print(listening, flush=True)
    time.sleep(60)
