"""Tools: how they are told to the model, what its calls must look like, and how they are read.

A call is written as <tool_call>, a JSON object with name and arguments, </tool_call>: what the Qwen and Hermes families were
trained to write. A model whose chat template knows that form gets its own prompt; others are told in a system message.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ..core import InvalidRequestError
from .messages import Message, Tool
from .schemas import ChatInput, ChatRequest
from .text import possible_start

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ANY_TEXT = r"/(.|\n)*/"


# Telling.


def chat_messages(chat: ChatInput, template: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """(messages, tools) for the chat template, which is a string or a dict of them. Raises InvalidRequestError."""
    messages = [_plain(message, f"messages.{at}") for at, message in enumerate(chat.messages)]
    if OPEN in str(template):
        return messages, [_described(tool) for tool in chat.tools] or None
    messages = _without_tool_roles(messages)
    return (_with_instructions(messages, chat.tools) if chat.tools else messages), None


def _plain(message: Message, field: str) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content,
    }
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, field)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _arguments(text: str, field: str) -> Any:
    """Templates write them themselves, so they get the object. Raises InvalidRequestError."""
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"Field '{field}.tool_calls' holds arguments that are not valid JSON: {error}.", f"{field}.tool_calls"
        ) from error


def _described(tool: Tool) -> dict[str, Any]:
    function = tool.function
    described = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": "function", "function": described}


def _call_text(name: str, arguments: Any) -> str:
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


def _without_tool_roles(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls as the text that they were, results as what the user says; results in a row are one message."""
    told: list[dict[str, Any]] = []
    results = False  # the last one told holds some
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if results:
                told[-1]["content"] += f"\n{content}"
            else:
                told.append({"role": "user", "content": content})
            results = True
            continue
        results = False
        calls = [_call_text(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        told.append({"role": message["role"], "content": "\n".join([content, *calls] if content else calls or [""])})
    return told


def _with_instructions(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """In the system message, which is put in front where there is none."""
    lines = [json.dumps(_described(tool)["function"], ensure_ascii=False) for tool in tools]
    text = "\n".join(
        [
            "You can call functions. These are available, one JSON description per line:",
            *lines,
            "To call one, answer with its name and arguments in this form:",
            f'{OPEN}\n{{"name": "function name", "arguments": {{"argument": "value"}}}}\n{CLOSE}',
            "Its result is then given to you between <tool_response> and </tool_response>.",
        ]
    )
    if messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


# Constraining.


def tools_grammar(request: ChatRequest, schemas: Sequence[str], is_special: Callable[[str], bool]) -> str:
    """Lark text for llguidance. schemas: the JSON schema of each tool's arguments; is_special: whether the tokenizer has a
    token of its own for a tag, which plain text then does not become.

    "auto": any text, in which every call is complete and fits its schema; "required": calls only, at least one.
    """
    choice = request.choice_of_tools
    bodies = []
    rules = []
    for at, (tool, schema) in enumerate(zip(request.tools, schemas, strict=True)):
        if choice.function in (None, tool.function.name):
            bodies.append(f"body_{at}")
            head = f'{{"name": {json.dumps(tool.function.name)}, "arguments": '
            rules += [f'body_{at}: {json.dumps(head)} arguments_{at} "}}"', f"arguments_{at}: %json {schema}"]
    special = is_special(OPEN) and is_special(CLOSE)
    opening, closing = (OPEN, CLOSE) if special else (json.dumps(OPEN), json.dumps(CLOSE))
    rules += [f"body: {' | '.join(bodies)}", f'rest: "\\n" body "\\n" {closing}']
    if special or choice.mode == "required":
        rules.append(f"call: {opening} rest")
    if choice.mode == "required":
        start = 'call ("\\n" call)*' if request.parallel_tool_calls else "call"
    elif special:
        start = "text (call text)*" if request.parallel_tool_calls else "text call?"
        rules.append(f"text: {ANY_TEXT}")
    else:
        # The opening tag ends a lazy terminal wherever it comes, so that it is never part of the text after it.
        start = "(opened rest)* last" if request.parallel_tool_calls else "opened rest | last"
        rules += [f"opened[lazy]: TEXT {opening}", "last: TEXT", f"TEXT: {ANY_TEXT}"]
    return "\n".join([f"start: {start}", *rules])


# Reading.


class ToolCallParser:
    """Takes calls out of text that arrives in pieces. What may be the start of a call is held back; what turns out to be none is
    text."""

    def __init__(self) -> None:
        self._buffer = ""
        self._inside = False
        self._behind_call = False  # and nothing but whitespace since
        self._searched = 0  # characters of a call's buffer in which no closing tag can begin any more
        self.calls = 0

    def push(self, piece: str) -> tuple[str, list[dict[str, Any]]]:
        """(text to show, calls that became complete). Whitespace behind a call is left out."""
        self._buffer += piece
        content = ""
        calls: list[dict[str, Any]] = []
        while True:
            if self._inside:
                call = self._complete_call()
                if call is None:
                    return content, calls
                calls.append(call)
                continue
            before, found, behind = self._buffer.partition(OPEN)
            if not found:
                keep = possible_start(before, (OPEN,))
                self._buffer = before[len(before) - keep :]
                return content + self._shown(before[: len(before) - keep]), calls
            content += self._shown(before)
            self._buffer, self._inside, self._searched = behind, True, 0

    def flush(self) -> str:
        """The rest, now that no more text comes: a call that was never closed is shown as the text that it is."""
        rest, self._buffer = self._buffer, ""
        if self._inside:
            self._inside = False
            return OPEN + rest
        return self._shown(rest)

    def _shown(self, text: str) -> str:
        if self._behind_call:
            text = text.lstrip()
            self._behind_call = not text
        return text

    def _complete_call(self) -> dict[str, Any] | None:
        """A closing tag may be part of a JSON string, so the first one behind valid JSON counts."""
        while (at := self._buffer.find(CLOSE, self._searched)) >= 0:
            call = _read_call(self._buffer[:at], self.calls)
            self._searched = at + 1
            if call is not None:
                self._buffer, self._inside = self._buffer[at + len(CLOSE) :], False
                self.calls += 1
                self._behind_call = True
                return call
        self._searched = max(self._searched, len(self._buffer) - len(CLOSE) + 1)
        return None


def _read_call(text: str, index: int) -> dict[str, Any] | None:
    """As the OpenAI API tells a call; None for what is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return {
        "index": index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {
            "name": call["name"],
            "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False),
        },
    }
