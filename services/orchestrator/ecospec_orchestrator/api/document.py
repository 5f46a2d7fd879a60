"""The OpenAPI documents: what may be sent comes from the schemas themselves, what comes back is written here."""

from __future__ import annotations

import functools
from typing import Any

from pydantic.json_schema import models_json_schema

from ..live import LIVE
from ..settings import Settings
from .playground import MEDIA_TYPES
from .schemas import ChatRequest, CompletionRequest
from .tokenizing import DetokenizeRequest, TokenizeChat, TokenizeText

_ERROR_TEXTS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or not known.",
    404: "The model, or the route, is not served here.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    429: "Too much is asked for; `Retry-After` says when to try again.",
    500: "The server failed.",
    503: "The server loads, drains or has stopped.",
    504: "The request was not finished by its deadline.",
}
_STRING: dict[str, Any] = {"type": "string"}
_NULL_STRING = {"type": ["string", "null"]}
_COUNT = {"type": "integer", "minimum": 0}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "properties": required | optional, "required": list(required)}


_ERROR = _object({"error": _object({"message": _STRING, "type": _STRING, "param": _NULL_STRING, "code": _STRING})})
_STATUS = _object({"status": _STRING})
_USAGE = _object({"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT})
_REASON = {"enum": ["stop", "length", "abort", "tool_calls", None]}
_LOGPROBS = {"type": ["object", "null"]}


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    choices = {
        "type": "array",
        "items": _object({"index": _COUNT, "finish_reason": _REASON, "logprobs": _LOGPROBS} | choice),
    }
    head = {"id": _STRING, "object": {"const": kind}, "created": _COUNT, "model": _STRING}
    return _object(head | {"choices": choices, "usage": _USAGE}, metrics={"type": ["object", "null"]})


_MESSAGE = _object({"role": {"const": "assistant"}, "content": _NULL_STRING}, tool_calls={"type": "array"})
_NUMBERS = {"type": "array", "items": _COUNT}
_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_SECONDS = {"type": "number", "minimum": 0}
_ESTIMATE = {"type": ["number", "null"]}
_TOKEN = {"token": _COUNT, "text": _STRING}
_BOOLEAN = {"type": "boolean"}
_STEP = _object(
    {
        "index": _COUNT,
        "root": _object(_TOKEN),
        "candidates": {
            "type": "array",
            "items": _object(
                _TOKEN
                | {
                    "parent": {"type": "integer", "minimum": -1},
                    "probability": _SHARE,
                    "target_probability": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
                    "chosen": _BOOLEAN,
                    "accepted": _BOOLEAN,
                }
            ),
        },
        "tokens": {"type": "array", "items": _object(_TOKEN | {"drafted": _BOOLEAN})},
        "policy": _object(
            {
                "name": _STRING,
                "decided_by": _STRING,
                "not_speculated": _NULL_STRING,
                "probe": _BOOLEAN,
                "prediction": _STRING,
                "prediction_failed": _NULL_STRING,
                "expected_tokens": _ESTIMATE,
                "expected_seconds": _ESTIMATE,
                "plain_seconds": _ESTIMATE,
            }
        ),
        "batch": _object({"requests": _COUNT, "nodes": _COUNT, "tokens": _COUNT}),
        "experts": _object({"read": _NUMBERS, "plain": _NUMBERS, "predicted": {"type": ["object", "null"]}}),
        "bytes": _object({"read": _COUNT, "plain_estimated": _COUNT}),
        "seconds": _object({name: _SECONDS for name in ("step", "draft", "predict", "select", "verify")}),
    }
)
_RESPONSES = {
    "StepEvent": _STEP,  # choices[i].ecospec.step of a chunk; docs/step-events.md says what it means
    "Error": _ERROR,
    "Status": _STATUS,
    "Completion": _answer("text_completion", {"text": _STRING}),
    "ChatCompletion": _answer("chat.completion", {"message": _MESSAGE}),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": {"type": "array", "items": _COUNT},
            "token_strs": {"type": ["array", "null"]},
        }
    ),
    "Text": _object({"prompt": _STRING}),
    "Models": _object({"object": {"const": "list"}, "data": {"type": "array", "items": _object({"id": _STRING})}}),
    "Version": _object({"version": _STRING, "model": _NULL_STRING, "info": {"type": "object"}}),
    "Document": {"type": "object"},
}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(name)}}


def _errors(*statuses: int) -> dict[str, Any]:
    return {str(status): {"description": _ERROR_TEXTS[status], "content": _json("Error")} for status in statuses}


def _get(summary: str, name: str, *statuses: int, unhealthy: bool = False) -> dict[str, Any]:
    responses = {"200": {"description": summary, "content": _json(name)}, **_errors(*statuses)}
    if unhealthy:
        responses["503"] = {"description": "It cannot serve now.", "content": _json(name)}
    return {"get": {"summary": summary, "responses": responses}}


def _file(path: str) -> dict[str, Any]:
    content = {MEDIA_TYPES[path].partition(";")[0]: {"schema": _STRING}}
    return {
        "get": {
            "summary": "The playground",
            "security": [],
            "responses": {"200": {"description": "A file", "content": content}},
        }
    }


def _post(summary: str, bodies: list[str], name: str | None, *statuses: int, stream: bool = False) -> dict[str, Any]:
    schema: dict[str, Any] = _ref(bodies[0]) if len(bodies) == 1 else {"anyOf": [_ref(body) for body in bodies]}
    responses: dict[str, Any] = {}
    if name is not None:
        content = _json(name)
        if stream:
            content["text/event-stream"] = {}  # events of JSON chunks, then [DONE]
        responses["200"] = {"description": summary, "content": content}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": {"summary": summary, "requestBody": body, "responses": {**responses, **_errors(*statuses)}}}


@functools.cache
def openapi(version: str) -> dict[str, Any]:
    """The document as JSON; the same for every server of this version."""
    kinds = (CompletionRequest, ChatRequest, TokenizeText, TokenizeChat, DetokenizeRequest)
    _, found = models_json_schema([(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}")
    every = (400, 401, 404, 408, 413, 429, 500, 503, 504)
    tokenizing = (400, 401, 404, 408, 413, 429, 500, 503)
    metrics = {"200": {"description": "Prometheus text", "content": {"text/plain": {"schema": _STRING}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "EcoSpec", "version": version},
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/completions": _post("Continue prompts", ["CompletionRequest"], "Completion", *every, stream=True),
            "/v1/chat/completions": _post("Answer a chat", ["ChatRequest"], "ChatCompletion", *every, stream=True),
            "/v1/responses": _post("Not served: answers 404", ["Document"], None, 400, 401, 404, 429),
            "/tokenize": _post("Text or chat to tokens", ["TokenizeText", "TokenizeChat"], "Tokens", *tokenizing),
            "/detokenize": _post("Tokens to text", ["DetokenizeRequest"], "Text", *tokenizing),
            "/v1/models": _get("What is served", "Models", 400, 401, 503),
            "/health": _get("Whether it lives", "Status", unhealthy=True),
            "/ready": _get("Whether it can generate, which is tried", "Status", 503),
            "/version": _get("Version, model and what is set", "Version", 400, 401),
            "/metrics": {"get": {"summary": "Metrics", "responses": metrics}},
            "/openapi.json": _get("This document", "Document", 400, 401),
            **{path: _file(path) for path in MEDIA_TYPES},
        },
        "components": {
            "schemas": found["$defs"] | _RESPONSES,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


_SETTINGS = {"type": ["object", "null"]}
_STATE = _object(
    {"state": _STRING, "model": _NULL_STRING, "running": _COUNT, "waiting": _COUNT},
    keys={"type": "array", "items": _STRING},
    settings=_SETTINGS,
    changed=_SETTINGS,
)


@functools.cache
def admin_openapi(version: str) -> dict[str, Any]:
    """The document of the administrators' port."""
    known = Settings.model_json_schema()["properties"]
    changes = {name: {"anyOf": [known[name], {"type": "null"}]} for name in LIVE}
    changed = _object({"settings": {"type": "object"}, "changed": {"type": "object"}, "shared": {"type": "boolean"}})
    drain = {
        method: {
            "summary": summary,
            "responses": {"200": {"description": "As /admin/status", "content": _json("State")}, **_errors(401, 503)},
        }
        for method, summary in (("post", "Take no new requests"), ("delete", "Take requests again"))
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "EcoSpec, for administrators", "version": version},
        "security": [{"key": []}],
        "paths": {
            "/admin/status": _get("What the server does, and its live settings", "State", 401),
            "/admin/settings": {
                "patch": {
                    **_post("Change live settings", ["Changes"], "Changed", 400, 401, 413, 503)["post"],
                    "description": "All changes or none; null goes back to what the server was started with.",
                }
            },
            "/admin/drain": drain,
            "/admin/openapi.json": _get("This document", "Document", 401),
        },
        "components": {
            "schemas": {
                "Error": _ERROR,
                "Document": {"type": "object"},
                "State": _STATE,
                "Changes": {"type": "object", "properties": changes, "additionalProperties": False},
                "Changed": changed,
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
