"""Exceptions of the HTTP layer, and the one table that gives every exception its HTTP status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

from ..core import EcoSpecError, InvalidRequestError, QueueFullError, SettingsError, ShuttingDownError

# EcoSpecError
# |- InvalidRequestError
# |  |- UnsupportedFieldError   a known option that this server does not have
# |  |- UnknownModelError
# |  |- BodyTooLargeError
# |  |- UnsupportedRouteError    a known route that this server does not have
# |- AuthenticationError
# |- RateLimitError             a QueueFullError: a key is over its rate, its quota or its requests at a time
# |- DeadlineError
# |- NotReadyError              loading, draining or without a probe token
# |- EngineError                the step loop failed under a request


class UnsupportedFieldError(InvalidRequestError):
    pass


class UnknownModelError(InvalidRequestError):
    pass


class BodyTooLargeError(InvalidRequestError):
    pass


class UnsupportedRouteError(InvalidRequestError):
    pass


class AuthenticationError(EcoSpecError):
    pass


class RateLimitError(QueueFullError):
    pass


class DeadlineError(EcoSpecError):
    pass


class NotReadyError(EcoSpecError):
    pass


class EngineError(EcoSpecError):
    pass


@dataclass(frozen=True)
class _Row:
    status: int
    type: str
    code: str


# The first row whose class matches wins, so subclasses come before their parents.
TABLE: tuple[tuple[type[Exception], _Row], ...] = (
    (UnsupportedFieldError, _Row(400, "invalid_request_error", "unsupported_field")),
    (UnknownModelError, _Row(404, "not_found_error", "model_not_found")),
    (BodyTooLargeError, _Row(413, "invalid_request_error", "body_too_large")),
    (UnsupportedRouteError, _Row(404, "not_found_error", "unsupported_route")),
    (InvalidRequestError, _Row(400, "invalid_request_error", "invalid_value")),
    (AuthenticationError, _Row(401, "authentication_error", "invalid_api_key")),
    (RateLimitError, _Row(429, "rate_limit_error", "rate_limit_exceeded")),
    (QueueFullError, _Row(429, "rate_limit_error", "queue_full")),
    (DeadlineError, _Row(504, "timeout_error", "deadline_exceeded")),
    (ShuttingDownError, _Row(503, "service_unavailable_error", "shutting_down")),
    (NotReadyError, _Row(503, "service_unavailable_error", "not_ready")),
    (EngineError, _Row(500, "server_error", "engine_error")),
    (SettingsError, _Row(500, "server_error", "settings")),
    (Exception, _Row(500, "server_error", "internal_error")),
)


def _row(exception: Exception) -> _Row:
    if isinstance(exception, HTTPException):  # unknown path, wrong method
        kind = "not_found_error" if exception.status_code == 404 else "invalid_request_error"
        return _Row(exception.status_code, kind, "unknown_route" if exception.status_code == 404 else "http_error")
    return next(row for known, row in TABLE if isinstance(exception, known))


def status_of(exception: Exception) -> int:
    return _row(exception).status


def body_of(exception: Exception) -> dict[str, Any]:
    """The nested error object of the OpenAI API: {"error": {message, type, param, code}}."""
    row = _row(exception)
    if isinstance(exception, EcoSpecError):
        message = str(exception)
    elif isinstance(exception, HTTPException):
        message = f"{exception.detail}: no such route and method here; see /v1/models, /v1/completions and so on."
    else:  # internals stay in the log
        message = "The server failed on this request; its log says why."
    error = {"message": message, "type": row.type, "param": getattr(exception, "param", None), "code": row.code}
    return {"error": error}


def headers_of(exception: Exception) -> dict[str, str]:
    if isinstance(exception, QueueFullError):
        return {"Retry-After": str(max(1, int(exception.retry_after_seconds)))}
    if isinstance(exception, AuthenticationError):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(exception, DeadlineError):
        return {"x-should-retry": "false"}  # the openai client would ask twice more
    return {}
