"""Tools: what the template is given, what is read from the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ecospec_orchestrator.api.schemas import ChatInput, ChatRequest
from ecospec_orchestrator.api.tools import CLOSE, OPEN, ToolCallParser, chat_messages, tools_grammar
from ecospec_orchestrator.core import InvalidRequestError

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": {"type": "object", "properties": {}}},
}
TIME = {"type": "function", "function": {"name": "time"}}


def call(arguments: str, id_: str = "c1") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": "weather", "arguments": arguments}}


TALK = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [call('{"city": "Köln"}'), call("", "c2")]},
    {"role": "tool", "tool_call_id": "c1", "content": "yes"},
    {"role": "tool", "tool_call_id": "c2", "content": "no"},
    {"role": "user", "content": "Sure?"},
]


def test_a_template_with_calls_is_given_them_as_objects() -> None:
    chat = ChatInput.model_validate({"messages": TALK, "tools": [WEATHER]})
    messages, tools = chat_messages(chat, f"... {OPEN} ...")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert [c["function"]["arguments"] for c in messages[2]["tool_calls"]] == [{"city": "Köln"}, {}]
    assert messages[3]["tool_call_id"] == "c1" and tools == [WEATHER]
    assert chat_messages(ChatInput.model_validate({"messages": TALK}), OPEN)[1] is None


def test_another_template_is_given_text() -> None:
    chat = ChatInput.model_validate({"messages": TALK, "tools": [WEATHER, TIME]})
    messages, tools = chat_messages(chat, "{{ messages }}")
    assert tools is None and [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "user",
    ]
    assert messages[0]["content"].startswith("Be brief.\n\n") and '"name": "weather"' in messages[0]["content"]
    first, second = messages[2]["content"].split(f"{CLOSE}\n")
    assert json.loads(first.removeprefix(OPEN)) == {"name": "weather", "arguments": {"city": "Köln"}}
    assert "<tool_response>\nyes\n</tool_response>\n<tool_response>\nno\n</tool_response>" == messages[3]["content"]
    assert all(set(message) == {"role", "content"} for message in messages)


def test_instructions_come_first_without_a_system_message() -> None:
    chat = ChatInput.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": [TIME]})
    messages, _ = chat_messages(chat, None)
    assert [message["role"] for message in messages] == ["system", "user"]
    untold, _ = chat_messages(ChatInput.model_validate({"messages": [{"role": "user", "content": "x"}]}), None)
    assert untold == [{"role": "user", "content": "x"}]


def test_arguments_that_are_no_json_are_refused() -> None:
    chat = ChatInput.model_validate({"messages": [{"role": "assistant", "tool_calls": [call("{")]}]})
    with pytest.raises(InvalidRequestError, match=r"messages\.0\.tool_calls"):
        chat_messages(chat, OPEN)


def read(*pieces: str) -> tuple[str, list[tuple[str, str]]]:
    parser, text, calls = ToolCallParser(), "", []
    for piece in pieces:
        shown, found = parser.push(piece)
        text += shown
        calls += [(c["function"]["name"], c["function"]["arguments"]) for c in found]
    return text + parser.flush(), calls


ONE = f'{OPEN}\n{{"name": "weather", "arguments": {{"city": "Köln"}}}}\n{CLOSE}'


def test_calls_are_taken_out_of_the_text() -> None:
    assert read("plain text") == ("plain text", [])
    assert read(ONE) == ("", [("weather", '{"city": "Köln"}')])
    assert read(f"Let me see.\n{ONE}\n{ONE}\n") == ("Let me see.\n", [("weather", '{"city": "Köln"}')] * 2)
    assert read(*f"a {ONE} b") == ("a b", [("weather", '{"city": "Köln"}')])


def test_a_closing_tag_within_a_string_is_text() -> None:
    inside = f'{OPEN}{{"name": "f", "arguments": {{"x": "{CLOSE}"}}}}{CLOSE}'
    assert read(inside) == ("", [("f", json.dumps({"x": CLOSE}))])


@pytest.mark.parametrize(
    "text", [OPEN, f"{OPEN}{{", f"{OPEN}[1]{CLOSE}", f'{OPEN}{{"arguments": 1}}{CLOSE}', OPEN[:-1]]
)
def test_what_is_no_call_is_shown_as_it_is(text: str) -> None:
    assert read(text) == (text, []) == read(*text)


def test_only_what_may_begin_a_call_is_held_back() -> None:
    parser = ToolCallParser()
    assert [parser.push(piece)[0] for piece in ("a <too", "k", " <", "b")] == ["a ", "<took", " ", "<b"]


def test_calls_are_numbered_and_named() -> None:
    parser = ToolCallParser()
    _, calls = parser.push(ONE + ONE)
    assert [c["index"] for c in calls] == [0, 1] and calls[0]["id"] != calls[1]["id"]
    assert all(c["id"].startswith("call_") and c["type"] == "function" for c in calls)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "time"}}])
@pytest.mark.parametrize("special", [False, True])
def test_a_grammar_names_the_allowed_functions(choice: Any, special: bool) -> None:
    request = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER, TIME], "tool_choice": choice}
    )
    text = tools_grammar(request, ["{}", "{}"], lambda _: special)
    assert ("weather" in text) == (not isinstance(choice, dict)) and "time" in text
    assert (f'"{OPEN}"' in text) == (not special)
