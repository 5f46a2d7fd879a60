"""The HTTP application: thin handlers. What they need is in app.state.service."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from ..accounting.ledger import Ledger
from ..core import EcoSpecError
from ..settings import Settings
from ..tracing import request_span
from .auth import KeyRing
from .base import SchedulerLike
from .document import openapi
from .errors import BodyTooLargeError, UnsupportedRouteError, body_of, headers_of, status_of
from .limits import Guard
from .parsing import parse
from .playground import MEDIA_TYPES, serve_file
from .responses import Collected, Shape
from .schemas import ChatRequest, CompletionRequest, StreamOptions
from .service import Service
from .streaming import ClientGoneError, EventStream, stream_chunks, unless_gone
from .tokenizing import detokenize, tokenize

log = logging.getLogger(__name__)
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_CLOSED = 499  # nobody reads it; it keeps such requests apart in an access log


def create_app(
    scheduler: SchedulerLike | None,
    tokenizer: Any,
    model_id: str,
    settings: Settings,
    ledger: Ledger,
    info: dict[str, Any] | None = None,
) -> FastAPI:
    """scheduler and tokenizer may be None and come later through attach(): until then /health says "loading".

    tokenizer: a transformers PreTrainedTokenizerFast with a chat template. info: facts for /version;
    its "eos_token_ids" are the tokens that end an answer (default: the tokenizer's).
    """
    service = Service(settings, ledger, model_id=model_id)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="EcoSpec", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.service = service
    app.state.keys = KeyRing(settings.keys, settings.api_keys_file)
    app.add_middleware(Guard, service=service, keys=app.state.keys)
    app.add_exception_handler(Exception, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    for known in (EcoSpecError, ClientGoneError, ClientDisconnect):
        app.add_exception_handler(known, _on_error)
    for path, handler, methods in (
        ("/v1/completions", _completions, ["POST"]),
        ("/v1/chat/completions", _chat, ["POST"]),
        ("/v1/responses", _responses, ["POST"]),
        ("/tokenize", _tokenize, ["POST"]),
        ("/detokenize", _detokenize, ["POST"]),
        ("/v1/models", _models, ["GET"]),
        ("/health", _health, ["GET"]),
        ("/ready", _ready, ["GET"]),
        ("/version", _version, ["GET"]),
        ("/metrics", _metrics, ["GET"]),
        ("/openapi.json", _openapi, ["GET"]),
        *((path, serve_file, ["GET"]) for path in MEDIA_TYPES),
    ):
        app.add_api_route(path, handler, methods=methods, response_model=None)
    if scheduler is not None:
        attach(app, scheduler, tokenizer, model_id, info or {})
    return app


def attach(app: FastAPI, scheduler: SchedulerLike, tokenizer: Any, model_id: str, info: dict[str, Any]) -> None:
    """Give a loading application its model."""
    service: Service = app.state.service
    service.ledger.bind(lambda: scheduler.running, lambda: scheduler.waiting)
    service.tokenizer, service.model_id, service.info = tokenizer, model_id, info
    service.scheduler = scheduler  # last: from here on requests are taken


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGoneError | ClientDisconnect):
        log.info("A client left before its answer was there; its request is cancelled.")
        return Response(status_code=CLIENT_CLOSED)
    status = status_of(error)
    if request.url.path.startswith("/v1/"):
        request.app.state.service.ledger.observe_refused(status)
    if status == 500:
        log.error("%s %s failed.", request.method, request.url.path, exc_info=error)
    return JSONResponse(body_of(error), status, headers_of(error))


async def _body(request: Request) -> bytes:
    """Raises BodyTooLargeError before more than the allowed bytes are held."""
    limit = request.app.state.service.settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    parts: list[bytes] = []
    if size <= limit:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                break
            parts.append(part)
    if size > limit:
        raise BodyTooLargeError(f"The request body has {size} bytes or more; at most {limit} are allowed.")
    return b"".join(parts)


async def _completions(request: Request) -> Response:
    return await _generate(request, parse(await _body(request), CompletionRequest))


async def _chat(request: Request) -> Response:
    return await _generate(request, parse(await _body(request), ChatRequest))


async def _responses(request: Request) -> Response:
    raise UnsupportedRouteError("This server has no /v1/responses; use /v1/chat/completions instead.")


async def _tokenize(request: Request) -> Response:
    return JSONResponse(await tokenize(request.app.state.service, await _body(request)))


async def _detokenize(request: Request) -> Response:
    return JSONResponse(await detokenize(request.app.state.service, await _body(request)))


async def _generate(request: Request, wanted: CompletionRequest | ChatRequest) -> Response:
    service: Service = request.app.state.service
    with request_span(request.headers, *_told(service, wanted)) as span:
        generation, shape = await service.begin(wanted, span)
    if wanted.stream:
        chunks = stream_chunks(generation, shape, wanted.stream_options or StreamOptions())
        return EventStream(chunks, on_end=lambda: service.end(generation, shape))
    try:
        return await unless_gone(request.receive, _whole(generation, shape))
    finally:
        service.end(generation, shape)


def _told(service: Service, wanted: CompletionRequest | ChatRequest) -> tuple[str, dict[str, Any]]:
    """What a trace says of a request: the operation, and its settings."""
    operation = "chat" if isinstance(wanted, ChatRequest) else "text_completion"
    settings = {
        "gen_ai.request.model": service.model_id,
        "gen_ai.request.temperature": wanted.temperature,
        "gen_ai.request.top_p": wanted.top_p,
        "gen_ai.request.max_tokens": wanted.max_tokens,
        "gen_ai.request.seed": wanted.seed,
        "gen_ai.request.choice.count": wanted.n,
        "ecospec.stream": wanted.stream,
    }
    return operation, settings


async def _whole(generation: Any, shape: Shape) -> Response:
    results = [Collected() for _ in generation.choices]
    async for update in generation.updates():
        results[update.choice].add(update)
    await generation.settle()
    # In a thread: the log-probabilities of a long answer take seconds to write, in which nobody else may have to wait.
    return await asyncio.to_thread(lambda: JSONResponse(shape.whole(results, generation.choices)))


async def _models(request: Request) -> Response:
    service: Service = request.app.state.service
    service.require_scheduler()
    model = {
        "id": service.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "ecospec",
        "max_model_len": service.settings.max_context_tokens,
    }
    if "geometry" in service.info:
        model["ecospec"] = {"geometry": service.info["geometry"], "fingerprint": service.info["fingerprint"]}
    return JSONResponse({"object": "list", "data": [model]})


async def _health(request: Request) -> Response:
    state = request.app.state.service.health()
    return JSONResponse({"status": state}, 200 if state == "ok" else 503)


async def _ready(request: Request) -> Response:
    await request.app.state.service.check_ready()
    return JSONResponse({"status": "ready"})


async def _version(request: Request) -> Response:
    service: Service = request.app.state.service
    return JSONResponse({"version": version(), "model": service.model_id or None, "info": service.info})


async def _metrics(request: Request) -> Response:
    return Response(request.app.state.service.ledger.render(), media_type=PROMETHEUS_TEXT)


async def _openapi(request: Request) -> Response:
    return JSONResponse(openapi(version()))


def version() -> str:
    try:
        return importlib.metadata.version("ecospec-orchestrator")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "0+unknown"
