"""For administrators, on a port and with a key of their own: look at the server, change live settings, drain."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import pydantic_core
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..core import EcoSpecError, InvalidRequestError, SettingsError, ShuttingDownError
from ..live import LiveSettings
from .app import version
from .auth import KeyRing
from .document import admin_openapi
from .errors import BodyTooLargeError, NotReadyError, body_of, headers_of, status_of
from .service import Service

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 2**16


@dataclass
class Control:
    """What administrators have in hand. live: None while the model loads; stopping: the process is about to end."""

    service: Service
    keys: KeyRing
    live: LiveSettings | None = None
    stopping: bool = False

    def state(self) -> dict[str, Any]:
        scheduler = self.service.scheduler
        return {
            "state": self.service.health(),
            "model": self.service.model_id or None,
            "running": 0 if scheduler is None else scheduler.running,
            "waiting": 0 if scheduler is None else scheduler.waiting,
            "keys": self.keys.names(),
            "settings": self.live.shown() if self.live is not None else None,
            "changed": self.live.changes if self.live is not None else None,
        }

    def require_live(self) -> LiveSettings:
        """Raises NotReadyError."""
        if self.live is None:
            raise NotReadyError("The model is still loading; settings can be changed when /ready answers 200.")
        return self.live


def create_admin(control: Control, key: str) -> Starlette:
    """Every path needs `Authorization: Bearer KEY`, with this key alone.

    GET /admin/status; PATCH /admin/settings with {name: value, null: as started}; POST /admin/drain takes no new requests, DELETE
    /admin/drain takes them again; GET /admin/openapi.json describes them. Errors have the shape of the API's.
    """
    app = Starlette(
        routes=[
            Route("/admin/status", _status, methods=["GET"]),
            Route("/admin/settings", _change, methods=["PATCH"]),
            Route("/admin/drain", _drain, methods=["POST", "DELETE"]),
            Route("/admin/openapi.json", _document, methods=["GET"]),
        ],
        exception_handlers={kind: _on_error for kind in (EcoSpecError, HTTPException, Exception)},
    )
    app.state.control, app.state.keys = control, KeyRing([key])
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    status = status_of(error)
    if status == 500:
        log.error("%s %s failed.", request.method, request.url.path, exc_info=error)
    return JSONResponse(body_of(error), status, headers_of(error))


def _control(request: Request) -> Control:
    """Raises AuthenticationError."""
    request.app.state.keys.check(request.headers.get("authorization"))
    return request.app.state.control


async def _status(request: Request) -> Response:
    return JSONResponse(_control(request).state())


async def _document(request: Request) -> Response:
    _control(request)
    return JSONResponse(admin_openapi(version()))


async def _change(request: Request) -> Response:
    control = _control(request)
    live, changes = control.require_live(), await _object(request)
    try:
        shared = await asyncio.to_thread(live.change, changes)
    except SettingsError as error:
        raise InvalidRequestError(str(error)) from error
    return JSONResponse({"settings": live.shown(), "changed": live.changes, "shared": shared})


async def _drain(request: Request) -> Response:
    control = _control(request)
    if control.stopping:
        raise ShuttingDownError("The server is shutting down.")
    control.service.draining = request.method == "POST"
    log.info("An administrator %s.", "drains the server" if control.service.draining else "ends draining")
    return JSONResponse(control.state())


async def _object(request: Request) -> dict[str, Any]:
    """The JSON object in the body. Raises InvalidRequestError."""
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"The request body has more than {MAX_BODY_BYTES} bytes.")
    try:
        body = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise InvalidRequestError("The request body must be a JSON object of settings.")
    return body
