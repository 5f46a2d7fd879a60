"""What a client may send. Strict: unknown fields, wrong types and absurd numbers are refused by name."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ..core import InvalidRequestError
from .fields import NEUTRAL_CHAT, NEUTRAL_COMPLETION, drop_neutral, shorten

MAX_CHOICES = 64  # prompts x n of one HTTP request
MAX_ROUTED_CHOICES = 4  # with return_routed_experts: each may bring recording.MAX_BYTES
MAX_STOPS = 4
MAX_TOKENS_FIELD = 1_000_000  # anything above is a mistake, whatever the context
INT64 = 2**63


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_prompt(value: Any) -> Any:
    if isinstance(value, str):
        parts: list[Any] = [value]
    elif isinstance(value, list) and value and all(map(_is_int, value)):
        parts = [value]
    elif isinstance(value, list) and value:
        parts = value
        lists = all(isinstance(part, list) for part in parts)
        if not all(isinstance(part, str) for part in parts) and not lists:
            raise ValueError("is a mixed list; allowed: a string, a list of strings, of token ids, or of lists of them")
        if lists and not all(_is_int(token) for part in parts for token in part):
            raise ValueError("holds a token id that is not a whole number")
    elif isinstance(value, list):
        raise ValueError("is empty; at least one token is needed")
    else:
        raise ValueError("has the wrong type; allowed: a string, a list of strings, of token ids, or of lists of them")
    if any(len(part) == 0 for part in parts):
        raise ValueError("is empty; at least one token is needed")
    if len(parts) > MAX_CHOICES:
        raise ValueError(f"holds {len(parts)} prompts; allowed are at most {MAX_CHOICES}")
    return value


def _check_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"has the wrong type; allowed: a string or a list of up to {MAX_STOPS} strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"holds {len(stops)} strings; allowed are at most {MAX_STOPS}")
    if not all(0 < len(stop) <= 1000 for stop in stops):
        raise ValueError("holds a string that is empty or above 1000 characters")
    return stops


def _check_content(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError('has the wrong type; allowed: a string or a list of {"type": "text", "text": string}')
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError('holds a part that is not text; allowed: {"type": "text", "text": string}')
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('holds a malformed part; allowed: {"type": "text", "text": string}')
    return "".join(part["text"] for part in value)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Common(_Strict):
    """Fields of both endpoints. null means the default, as in the OpenAI API. `user` is accepted and has no effect."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = 0  # -1 and 0 switch it off
    n: Annotated[int, Field(ge=1, le=16)] | None = 1
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: Annotated[list[str], BeforeValidator(_check_stop)] = []
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    ignore_eos: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    return_token_ids: bool | None = False
    return_routed_experts: bool | None = False
    skip_special_tokens: bool | None = True
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class CompletionRequest(_Common):
    prompt: Annotated[Any, BeforeValidator(_check_prompt)]  # str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_FIELD)] = 16
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt, whichever of the four forms was sent."""
        if isinstance(self.prompt, str) or _is_int(self.prompt[0]):
            return [self.prompt]
        return self.prompt

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class Message(_Strict):
    role: Literal["system", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_check_content)]


class ChatRequest(_Common):
    messages: Annotated[list[Message], Field(min_length=1, max_length=1024)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_FIELD)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_FIELD)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


Model = TypeVar("Model", CompletionRequest, ChatRequest)


def parse(raw: bytes, kind: type[Model]) -> Model:
    """Raises InvalidRequestError with the field's name as param."""
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
    body = drop_neutral(body, NEUTRAL_CHAT if kind is ChatRequest else NEUTRAL_COMPLETION)
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise _first(error, kind) from error
    _check_together(request)
    return request


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


def _check_together(request: CompletionRequest | ChatRequest) -> None:
    """Rules that involve two fields."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("Field 'stream_options' is only allowed with 'stream': true.", "stream_options")
    choices = (request.n or 1) * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
    if request.return_routed_experts and request.stream:
        raise InvalidRequestError(
            "Field 'return_routed_experts' is true together with 'stream'; routes are told in whole answers only: leave one out.",
            "return_routed_experts",
        )
    if request.return_routed_experts and choices > MAX_ROUTED_CHOICES:
        raise InvalidRequestError(
            f"Field 'return_routed_experts' is true for {choices} choices; at most {MAX_ROUTED_CHOICES} are allowed in one request.",
            "return_routed_experts",
        )
    if isinstance(request, CompletionRequest):
        if choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"Field 'n' is {request.n} for {len(request.prompts)} prompts; at most {MAX_CHOICES} choices are"
                " allowed in one request.",
                "n",
            )
        return
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("Field 'top_logprobs' is only allowed with 'logprobs': true.", "top_logprobs")
    both = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(both) == 2:
        raise InvalidRequestError(
            f"Field 'max_completion_tokens' is {request.max_completion_tokens} and 'max_tokens' is {request.max_tokens}"
            "; send one of them.",
            "max_completion_tokens",
        )
