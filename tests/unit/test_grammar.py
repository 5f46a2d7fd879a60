"""Grammars with the real library: random walks over what is allowed give answers that fit, whoever walks beside them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ecospec_orchestrator.api.errors import UnsupportedFieldError
from ecospec_orchestrator.api.grammar import GrammarCompiler, needs_grammar
from ecospec_orchestrator.api.schemas import ChatRequest, CompletionRequest
from ecospec_orchestrator.api.tools import CLOSE, OPEN, ToolCallParser
from ecospec_orchestrator.core import Grammar, GrammarState, InvalidRequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 2},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["name", "size", "inner"],
    "additionalProperties": False,
    "$defs": {"inner": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]


@pytest.fixture(scope="module")
def compiler(byte_tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer, [byte_tokenizer.eos_token_id])


def completion(format_: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", "response_format": format_})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields})


def json_schema(schema: dict[str, Any]) -> CompletionRequest:
    return completion({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def walk(state: GrammarState, seed: int, tokenizer: Any, longest: int = 3000) -> str | None:
    """Random allowed tokens until an end is drawn; ends are preferred, and so are printable ASCII and what closes a value.
    None where that takes too long."""
    random, end, tokens = np.random.default_rng(seed), tokenizer.eos_token_id, []
    weights = np.array([_weight(tokenizer.decode([token])) for token in range(len(tokenizer))])
    weights[end] = 100
    while len(tokens) < longest:
        allowed = state.allowed()
        assert allowed.dtype == np.bool_ and allowed.any() and state.error is None
        chances = weights[: len(allowed)] * allowed
        token = int(random.choice(len(allowed), p=chances / chances.sum()))
        if token == end:
            return tokenizer.decode(tokens)
        state.advance(token)
        tokens.append(token)
    return None


def _weight(text: str) -> float:
    return 8.0 if text in ('"', "}", "]") else 1.0 if text.isascii() and text.isprintable() else 0.02


def advance(state: GrammarState, text: str, tokenizer: Any) -> None:
    for token in tokenizer.encode(text):
        assert state.allowed()[token], (text, tokenizer.decode([token]))
        state.advance(token)


def started(grammar: Grammar | None) -> GrammarState:
    assert grammar is not None
    return grammar.start()


def test_free_answers_have_no_grammar(compiler: GrammarCompiler) -> None:
    free = CompletionRequest.model_validate({"prompt": "x"})
    assert not needs_grammar(free) and compiler.compile(free) is None
    assert not needs_grammar(chat(tool_choice="none")) and compiler.compile(chat(tool_choice="none")) is None
    assert needs_grammar(chat()) and needs_grammar(completion({"type": "json_object"}))


def test_a_schema_gives_answers_that_fit(compiler: GrammarCompiler, byte_tokenizer: Any) -> None:
    grammar = compiler.compile(json_schema(SCHEMA))
    texts = [text for seed in range(12) if (text := walk(started(grammar), seed, byte_tokenizer)) is not None]
    assert len(set(texts)) > 5
    for text in texts:
        found = json.loads(text)
        assert set(found) <= set(SCHEMA["properties"]) and len(found["name"]) <= 5
        assert type(found["size"]) is int and 0 <= found["size"] <= 99
        assert set(found.get("tags", [])) <= {"a", "é"} and type(found["inner"]["x"]) is bool


def test_json_object_gives_objects(compiler: GrammarCompiler, byte_tokenizer: Any) -> None:
    grammar = compiler.compile(completion({"type": "json_object"}))
    texts = [text for seed in range(12) if (text := walk(started(grammar), seed, byte_tokenizer)) is not None]
    assert len(texts) > 5 and all(isinstance(json.loads(text), dict) for text in texts)


def test_a_text_may_end_exactly_where_it_is_whole(compiler: GrammarCompiler, byte_tokenizer: Any) -> None:
    state, end = started(compiler.compile(json_schema({"type": "integer"}))), byte_tokenizer.eos_token_id
    assert not state.allowed()[end]
    advance(state, "1", byte_tokenizer)
    assert state.allowed()[end]
    allowed = state.allowed()
    assert {byte_tokenizer.decode([t]) for t in np.flatnonzero(allowed) if t != end} >= set("0123456789")
    assert not allowed[byte_tokenizer.encode("a")[0]]
    begin = byte_tokenizer.encode("<|im_start|>")[0]
    assert not allowed[begin], "no special token is text"


def test_texts_of_one_grammar_do_not_know_of_each_other(compiler: GrammarCompiler, byte_tokenizer: Any) -> None:
    grammar = compiler.compile(json_schema(SCHEMA))
    alone = walk(started(grammar), 3, byte_tokenizer)
    first, second = started(grammar), started(grammar)
    advance(second, '{"name"', byte_tokenizer)
    assert walk(first, 3, byte_tokenizer) == alone
    advance(second, ':"', byte_tokenizer)


def test_asking_changes_nothing(compiler: GrammarCompiler, byte_tokenizer: Any) -> None:
    state, other = (started(compiler.compile(json_schema(SCHEMA))) for _ in range(2))
    for character in '{"name": "ab", "size": 7':
        (token,) = byte_tokenizer.encode(character)
        for _ in range(3):
            np.testing.assert_array_equal(state.allowed(), other.allowed())
            state.allowed()
        for each in (state, other):
            each.advance(token)


def test_a_wrong_token_is_an_error_and_no_exception(compiler: GrammarCompiler, byte_tokenizer: Any) -> None:
    state = started(compiler.compile(json_schema({"type": "integer"})))
    state.advance(byte_tokenizer.encode("x")[0])
    assert state.error is not None and state.error.endswith(".")
    assert state.allowed().all()
    state.advance(0)


@pytest.mark.parametrize(
    "schema",
    [{"type": 5}, {"type": "string", "pattern": "("}, {"$ref": "#/nowhere"}, {"$ref": "https://example.org/x"}],
)
def test_schemas_that_cannot_be_used_are_refused(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidRequestError, match="Field 'response_format' holds a schema that cannot be used"
    ) as error:
        compiler.compile(json_schema(schema))
    assert error.value.param == "response_format" and len(str(error.value)) < 500


def test_a_tokenizer_without_an_end_cannot_be_used(byte_tokenizer: Any) -> None:
    with pytest.raises(UnsupportedFieldError, match="this model's tokenizer"):
        GrammarCompiler(byte_tokenizer, [])
    with pytest.raises(UnsupportedFieldError, match="this model's tokenizer"):
        GrammarCompiler(object(), [1])


# Tools.


def read(text: str) -> tuple[str, list[dict[str, Any]]]:
    parser = ToolCallParser()
    shown, calls = parser.push(text)
    return shown + parser.flush(), [call["function"] for call in calls]


@pytest.mark.parametrize("parallel", [False, True])
def test_required_calls_are_calls_alone(compiler: GrammarCompiler, byte_tokenizer: Any, parallel: bool) -> None:
    grammar = compiler.compile(chat(tool_choice="required", parallel_tool_calls=parallel))
    names = set()
    for seed in range(10):
        text = walk(started(grammar), seed, byte_tokenizer)
        if text is None:
            continue
        shown, calls = read(text)
        assert shown == "" and calls and (parallel or len(calls) == 1)
        for call in calls:
            names.add(call["name"])
            arguments = json.loads(call["arguments"])
            assert isinstance(arguments, dict) and (call["name"] == "time" or type(arguments["inner"]["x"]) is bool)
    assert names == {"weather", "time"}


def test_a_named_function_is_the_one_that_is_called(compiler: GrammarCompiler, byte_tokenizer: Any) -> None:
    state = started(compiler.compile(chat(tool_choice={"type": "function", "function": {"name": "time"}})))
    advance(state, f'{OPEN}\n{{"name": "time", "arguments": {{', byte_tokenizer)


def test_auto_is_free_until_a_call_begins(compiler: GrammarCompiler, byte_tokenizer: Any) -> None:
    end = byte_tokenizer.eos_token_id
    state = started(compiler.compile(chat()))
    assert state.allowed()[end]
    advance(state, f"Häh? 1 < 2\n{OPEN}", byte_tokenizer)
    assert np.flatnonzero(state.allowed()).tolist() == byte_tokenizer.encode("\n"), (
        "now it must be one of the functions"
    )
    advance(state, '\n{"name": "', byte_tokenizer)
    assert {byte_tokenizer.decode([t]) for t in np.flatnonzero(state.allowed())} == {"w", "t"}
    advance(state, f'time", "arguments": {{}}}}\n{CLOSE}', byte_tokenizer)
    assert state.allowed()[end]
    advance(state, f" and {OPEN}\n", byte_tokenizer)


def test_auto_without_parallel_calls_ends_behind_one(compiler: GrammarCompiler, byte_tokenizer: Any) -> None:
    state = started(compiler.compile(chat(parallel_tool_calls=False)))
    advance(state, f'{OPEN}\n{{"name": "time", "arguments": {{}}}}\n{CLOSE}', byte_tokenizer)
    assert np.flatnonzero(state.allowed()).tolist() == [byte_tokenizer.eos_token_id]


def integers(*multiples: float) -> dict[str, Any]:
    return {"type": "array", "items": {"anyOf": [{"type": "integer", "multipleOf": each} for each in multiples]}}


def patterns(count: int) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {f"^x{i}y": {"type": "string"} for i in range(count)}}


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (integers(10_007), "multipleOf"),
        (integers(-0.10007), "multipleOf"),
        (integers(101, 103), "multipleOf"),  # met together they would be one of 10403
        (integers(*[9973] * 101), "multipleOf"),
        ({**integers(9973), "$defs": {f"d{i}": {"$ref": "#/$defs/a"} for i in range(100)}}, "multipleOf"),
        ({"properties": {"enum": {"properties": {"const": integers(10_007)}}}}, "multipleOf"),
        (patterns(65), "65 patternProperties"),
    ],
)
def test_schemas_that_compile_for_minutes_are_refused(
    compiler: GrammarCompiler, schema: dict[str, Any], problem: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for field, request in (("response_format", json_schema(schema)), ("tools", chat(tools=[tool]))):
        with pytest.raises(InvalidRequestError, match=f"'{field}' holds {problem}.* too long to compile") as refused:
            compiler.compile(request)
        assert refused.value.param == field


def test_the_tools_of_a_request_count_together(compiler: GrammarCompiler) -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": patterns(33)}} for i in range(2)]
    assert compiler.compile(chat(tools=tools[:1])) is not None
    with pytest.raises(InvalidRequestError, match="66 patternProperties"):
        compiler.compile(chat(tools=tools))


def test_ordinary_numbers_and_patterns_are_taken(compiler: GrammarCompiler) -> None:
    many = [0.01, 0.5, 0.25, 1, 5, 12, 60, 1000, 1e-9, 1e6] * 30
    for schema in (integers(*many), integers(9973), patterns(64), {"properties": {"multipleOf": {"type": "number"}}}):
        assert compiler.compile(json_schema(schema)) is not None


def test_a_pattern_that_explodes_ends_its_own_answer_soon(compiler: GrammarCompiler, byte_tokenizer: Any) -> None:
    """With the library's own limits a mask of this pattern takes a second, for which every request would wait."""
    state = started(compiler.compile(json_schema({"type": "string", "pattern": "^((((a{100}){100}){100}){100})$"})))
    for text in ('"', "a"):
        if state.error is None:
            state.allowed()
            state.advance(byte_tokenizer.encode(text)[0])
    assert state.allowed().all() and state.error is not None and "too many expressions" in state.error
