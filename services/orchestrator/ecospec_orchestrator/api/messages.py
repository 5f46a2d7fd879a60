"""The messages of a chat, and the tools that it may call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from .strict import Strict

MAX_MESSAGES = 1024
MAX_TOOLS = 128
FUNCTION_NAME = r"^[A-Za-z0-9_-]{1,64}$"
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}


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


class FunctionCall(Strict):
    """arguments: JSON text, as the model wrote it."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    arguments: str


class ToolCall(Strict):
    id: Annotated[str, Field(max_length=128)]
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """content: the text, its parts joined; "" for an assistant that only called tools."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_check_content), WithJsonSchema(_CONTENT)]
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] = []
    tool_call_id: Annotated[str, Field(max_length=128)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_content(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("role") == "assistant" and data.get("tool_calls"):
            return {**data, "content": data.get("content") or ""}
        return data

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("has tool_calls, which only the role 'assistant' has; remove them")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("must have a tool_call_id with the role 'tool', and with no other")
        return self


class Function(Strict):
    """parameters: a JSON schema; `strict` is accepted and always true: calls fit their schema by construction."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: Annotated[str, Field(max_length=20_000)] = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    strict: bool = True


class Tool(Strict):
    type: Literal["function"]
    function: Function


@dataclass(frozen=True)
class ToolChoice:
    """mode: "none", "auto" or "required"; function: the only one that may be called, with "required"."""

    mode: str
    function: str | None = None


TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        },
    ]
}


def check_tool_choice(value: Any) -> ToolChoice:
    if isinstance(value, ToolChoice):
        return value
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return ToolChoice(value)
    if isinstance(value, dict) and set(value) == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if isinstance(function, dict) and set(function) == {"name"} and isinstance(function["name"], str):
            return ToolChoice("required", function["name"])
    raise ValueError(
        'is not known; allowed: "none", "auto", "required" or {"type": "function", "function": {"name": string}}'
    )
