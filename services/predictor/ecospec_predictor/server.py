"""The gRPC server: the predictor, grpc.health.v1, reflection and the metrics, from start() to stop()."""

from __future__ import annotations

import asyncio
import logging
import signal

import grpc
import numpy as np
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ecospec_proto.telemetry import TelemetryError, traces

from .base import ExpertModel, Query
from .batching import Answer, Outcome
from .catalogue import Catalogue, Served
from .errors import PredictorError, SettingsError
from .live.baselines import Baselines
from .live.serving import check_live, end, start_live
from .metrics import Metrics, MetricsServer
from .service import SERVICE_NAME, ExpertPredictor
from .settings import Settings
from .tls import server_tls
from .versions import LOOK_SECONDS, Load, Loaded, Watch, load_all, shelves_of

log = logging.getLogger(__name__)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Callers ping every 30 s to find a dead connection; the default of gRPC takes that for an attack after a while.
SHORTEST_PING_MILLISECONDS = 25_000


class PredictorServer:
    """Serves one model for each target. Use it on one event loop. port and metrics_port hold the real ports after start().
    Raises SettingsError."""

    def __init__(self, settings: Settings, *models: ExpertModel) -> None:
        self._settings, self._models = settings, list(models)
        self._tls = server_tls(settings)
        self._stopped = False
        self._catalogue = Catalogue()
        self._replaced: set[asyncio.Task[None]] = set()  # each ends a model that is not served any more
        self.metrics = Metrics()
        self.port = self.metrics_port = 0

    async def start(self) -> None:
        """Listen, then run one prediction of every model; only then is the service SERVING. Raises PredictorError."""
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
        self._service = ExpertPredictor(self._catalogue, self.metrics, settings)
        self._health = health.aio.HealthServicer()
        await self._health.set("", SERVING)
        await self._health.set(SERVICE_NAME, NOT_SERVING)
        self._server.add_generic_rpc_handlers((self._service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        await self._server.start()
        try:
            while self._models:  # and keep none, or a model that is replaced would stay in memory
                await self.swap(self._models.pop(0))
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
        await asyncio.gather(*self._replaced, *(served.close() for served in self._catalogue.all()))
        await asyncio.to_thread(self._metrics_server.stop)

    def served(self) -> list[Served]:
        return self._catalogue.all()

    async def swap(self, model: ExpertModel) -> None:
        """Serve this model for its target as soon as it has made a prediction; what the one before has accepted, it answers.
        Raises PredictorError, and then the one before goes on."""
        geometry = model.geometry
        served = Served.start(model, self.metrics, self._settings)
        try:
            if not await _predicts(served):
                raise PredictorError(
                    f"The first prediction of model {model.version} for {geometry.name} failed, so it is not served; the log "
                    "has the cause."
                )
        except BaseException:  # a stop included
            await served.close()
            raise
        before = self._catalogue.swap(geometry.fingerprint, served)
        if before is not None:
            self.metrics.model_info.remove(geometry.name, geometry.fingerprint, before.model.version)
            ending = asyncio.create_task(before.close(finish=True))
            self._replaced.add(ending)
            ending.add_done_callback(self._replaced.discard)
        self.metrics.model_info.labels(geometry.name, geometry.fingerprint, model.version).set(1)


async def _predicts(served: Served) -> bool:
    query = Query(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, -1, np.int64))
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    served.batcher.submit([query], None, future.set_result)
    return isinstance(await future, Answer)


def run(settings: Settings, load: Load) -> None:
    """Serve until SIGTERM or SIGINT; prints one line when ready. SIGHUP looks for new versions. Raises PredictorError when the
    start fails."""
    server_tls(settings)  # what is wrong there is told before the models are loaded
    check_live(settings)
    baselines = Baselines()
    load = baselines.remember(load)
    # A call costs a tenth less than on the standard loop.
    try:
        with traces("ecospec-predictor"):
            uvloop.run(_run(settings, load_all(shelves_of(settings), load), load, baselines))
    except TelemetryError as error:
        raise SettingsError(str(error)) from error


async def _run(settings: Settings, loaded: list[Loaded], load: Load, baselines: Baselines) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = PredictorServer(settings, *(item.model for item in loaded))
    watch = Watch(loaded, load, server.swap, server.metrics)
    loop.add_signal_handler(signal.SIGHUP, watch.look_now)
    names = ", ".join(f"{item.model.version} for {item.model.geometry.name}" for item in loaded)
    loaded.clear()  # or a model that is replaced would stay in memory
    await server.start()
    watching = [asyncio.create_task(watch.run(LOOK_SECONDS if settings.watch_versions else None))]
    watching += start_live(settings, server.served, baselines.get, watch.offer, server.metrics.registry)
    metrics = f"http://{address(settings.metrics_host, server.metrics_port)}/metrics"
    where = address(settings.host, server.port)
    print(f"ecospec-predictor is ready on {where}: model {names}, metrics on {metrics}", flush=True)
    await stop.wait()
    log.info("Stopping.")
    await end(watching)
    await server.stop()


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def taken(host: str, port: int) -> PredictorError:
    return PredictorError(
        f"The predictor cannot listen on {address(host, port)}; stop what listens there or choose another host or port."
    )
