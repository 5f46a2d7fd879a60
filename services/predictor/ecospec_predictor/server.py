"""The gRPC server: the predictor, grpc.health.v1, reflection and the metrics, from start() to stop()."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

import grpc
import numpy as np
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from .base import ExpertModel, Query
from .batching import Answer, Outcome
from .catalogue import Catalogue, Served
from .errors import PredictorError
from .metrics import Metrics, MetricsServer
from .service import SERVICE_NAME, ExpertPredictor
from .settings import Settings
from .tls import server_tls

log = logging.getLogger(__name__)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Callers ping every 30 s to find a dead connection; the default of gRPC takes that for an attack after a while.
SHORTEST_PING_MILLISECONDS = 25_000


class PredictorServer:
    """Use it on one event loop. port and metrics_port hold the real ports after start(). Raises SettingsError."""

    def __init__(self, settings: Settings, model: ExpertModel) -> None:
        self._settings, self._model = settings, model
        self._tls = server_tls(settings)
        self._stopped = False
        self.metrics = Metrics()
        self.port = self.metrics_port = 0

    async def start(self) -> None:
        """Listen, then run one prediction; only then is the service SERVING. Raises PredictorError."""
        settings = self._settings
        options = [
            ("grpc.so_reuseport", 0),  # or a second server would share the port in silence
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", SHORTEST_PING_MILLISECONDS),
        ]
        self._metrics_server = MetricsServer(self.metrics, settings.metrics_host, settings.metrics_port)
        self._server = grpc.aio.server(options=options)
        try:
            where = address(settings.host, settings.port)
            self.port = (
                self._server.add_insecure_port(where)
                if self._tls is None
                else self._server.add_secure_port(where, self._tls.credentials())
            )
        except RuntimeError:
            self._metrics_server.stop()
            raise taken(settings.host, settings.port) from None
        self.metrics_port = self._metrics_server.port
        self._catalogue = Catalogue()
        self._served = Served.start(self._model, self.metrics, settings)
        self._catalogue.swap(self._model.geometry.fingerprint, self._served)
        self._service = ExpertPredictor(self._catalogue, self.metrics, settings)
        self._health = health.aio.HealthServicer()
        await self._health.set("", SERVING)
        await self._health.set(SERVICE_NAME, NOT_SERVING)
        self._server.add_generic_rpc_handlers((self._service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        await self._server.start()
        try:
            await self._warm_up()
        except PredictorError:
            await self.stop()
            raise
        await self._health.set(SERVICE_NAME, SERVING)

    async def stop(self) -> None:
        """NOT_SERVING, no new calls, up to grace_seconds for accepted requests, then the end. Safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        await self._health.enter_graceful_shutdown()
        self._service.drain()
        await self._server.stop(self._settings.grace_seconds)
        await self._served.close()
        await asyncio.to_thread(self._metrics_server.stop)

    async def _warm_up(self) -> None:
        query = Query(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, -1, np.int64))
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._served.batcher.submit([query], None, future.set_result)
        outcome = await future
        if not isinstance(outcome, Answer):
            raise PredictorError(
                "The model's first prediction failed, so the service does not start; the log has the cause."
            )


def run(settings: Settings, load: Callable[[], ExpertModel]) -> None:
    """Serve until SIGTERM or SIGINT; prints one line when ready. Raises PredictorError when the start fails."""
    model = load()
    uvloop.run(_run(settings, model))  # a call costs a tenth less than on the standard loop


async def _run(settings: Settings, model: ExpertModel) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = PredictorServer(settings, model)
    await server.start()
    metrics = f"http://{address(settings.metrics_host, server.metrics_port)}/metrics"
    where = address(settings.host, server.port)
    print(f"ecospec-predictor is ready on {where}: model {model.version}, metrics on {metrics}", flush=True)
    await stop.wait()
    log.info("Stopping.")
    await server.stop()


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def taken(host: str, port: int) -> PredictorError:
    return PredictorError(
        f"The predictor cannot listen on {address(host, port)}; stop what listens there or choose another host or port."
    )
