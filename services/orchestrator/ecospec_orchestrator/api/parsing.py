"""From the bytes of a request body to a checked request, or to an error that names the field."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from ..core import InvalidRequestError
from .fields import NEUTRAL_CHAT, NEUTRAL_COMPLETION, drop_neutral, shorten
from .schemas import ChatRequest, CompletionRequest, check_together

Request = TypeVar("Request", CompletionRequest, ChatRequest)
Model = TypeVar("Model", bound=BaseModel)


def parse(raw: bytes, kind: type[Request]) -> Request:
    """A request to generate. Raises InvalidRequestError with the field's name as param."""
    neutral = NEUTRAL_CHAT if kind is ChatRequest else NEUTRAL_COMPLETION
    request = validate(drop_neutral(json_object(raw), neutral), kind)
    check_together(request)
    return request


def json_object(raw: bytes) -> dict[str, Any]:
    """Raises InvalidRequestError."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"The request body is not valid UTF-8: byte 0x{raw[error.start]:02x} at position {error.start}."
        ) from error
    try:
        body = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise InvalidRequestError(f"The request body is {shorten(body)}; a JSON object is needed.")
    return body


def validate(body: dict[str, Any], kind: type[Model]) -> Model:
    """Raises InvalidRequestError with the field's name as param."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _first(error, kind) from error


def _first(error: ValidationError, kind: type[BaseModel]) -> InvalidRequestError:
    problem = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in problem["loc"]) or None
    value = shorten(problem["input"])
    if problem["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(problem["loc"][-1]), list(kind.model_fields), 1)
        hint = f"; did you mean '{close[0]}'?" if close else "; remove it."
        return InvalidRequestError(f"Field '{param}' is not known{hint}", param)
    if problem["type"] == "missing":
        return InvalidRequestError(f"Field '{param}' is missing; it is required.", param)
    if problem["type"] == "value_error":
        return InvalidRequestError(f"Field '{param}' {problem['ctx']['error']} (it is {value}).", param)
    return InvalidRequestError(f"Field '{param}' is {value}: {problem['msg'].removeprefix('Input ')}.", param)
