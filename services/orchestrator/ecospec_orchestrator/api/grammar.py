"""Grammars of answers, with llguidance: what an answer must look like becomes a mask over the target's next tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..core import InvalidRequestError
from .errors import UnsupportedFieldError
from .fields import first_line
from .schema_costs import check_costs
from .schemas import ChatRequest, CompletionRequest, ResponseFormat
from .tools import tools_grammar

MAX_SCHEMA_CHARACTERS = 100_000
# Indentation is allowed, but not whitespace without end, which a small model may fall into.
SCHEMA_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
# A fifth of the usual fuel, with which some short patterns would hold up the steps of all requests for a second. Errors go to the client.
_LIMITS = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)


class MatcherState:
    """Implements core.GrammarState. ends: the tokens that end an answer."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: np.ndarray) -> None:
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, ends
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        return self._error

    def allowed(self) -> np.ndarray:
        if self._error is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, bitorder="little", count=self._vocabulary).view(np.bool_)
            allowed[self._ends] = self._matcher.is_accepting()
            if self._matcher.is_error() or not allowed.any():
                self._fail()
        if self._error is not None:
            return np.ones(self._vocabulary, np.bool_)
        return allowed

    def advance(self, token: int) -> None:
        if self._error is None and not self._matcher.consume_token(token):
            self._fail()

    def _fail(self) -> None:
        reason = first_line(self._matcher.get_error()) or "no token can come next"
        self._error = f"The answer cannot go on as its schema asks for: {reason}."


class CompiledGrammar:
    """Implements core.Grammar. One may start many texts."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: np.ndarray) -> None:
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, ends

    def start(self) -> MatcherState:
        return MatcherState(self._matcher.deep_copy(), self._vocabulary, self._ends)


class GrammarCompiler:
    """Compiles for one tokenizer. Making one takes about a second; one thread at a time may use it."""

    def __init__(self, tokenizer: Any, ends: Sequence[int]) -> None:
        """tokenizer: a fast one of transformers; ends: the tokens that end an answer.

        Raises UnsupportedFieldError for a tokenizer that cannot be masked.
        """
        try:
            document = json.loads(tokenizer.backend_tokenizer.to_str())
            document["padding"] = document["truncation"] = None
            self._tokenizer = LLTokenizer(json.dumps(document), eos_token=ends[0])
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedFieldError(
                f"Fields 'response_format' and 'tools' cannot be used with this model's tokenizer: {first_line(str(error))}."
            ) from error
        self._vocabulary = int(self._tokenizer.vocab_size)
        self._ends = np.array([token for token in ends if token < self._vocabulary], np.int64)
        self._added: dict[str, int] = tokenizer.get_added_vocab()

    def compile(self, request: CompletionRequest | ChatRequest) -> CompiledGrammar | None:
        """None where the answer is free. Raises InvalidRequestError."""
        if isinstance(request, ChatRequest) and request.choice_of_tools.mode != "none":
            schemas = _checked([tool.function.parameters for tool in request.tools], "tools")
            source = tools_grammar(request, schemas, self._is_special)
            return self._compiled(LLMatcher.grammar_from_lark(source), "tools")
        schema = _schema_of(request.response_format)
        if schema is None:
            return None
        (text,) = _checked([schema], "response_format")
        return self._compiled(LLMatcher.grammar_from_json_schema(text), "response_format")

    def _is_special(self, text: str) -> bool:
        """Whether the tokenizer has a token of its own for text, which plain text does not become."""
        return text in self._added and self._tokenizer.is_special_token(self._added[text])

    def _compiled(self, grammar: str, field: str) -> CompiledGrammar:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidRequestError(
                f"Field '{field}' holds a schema that cannot be used: {first_line(matcher.get_error())}.", field
            )
        return CompiledGrammar(matcher, self._vocabulary, self._ends)


def needs_grammar(request: CompletionRequest | ChatRequest) -> bool:
    calls = isinstance(request, ChatRequest) and request.choice_of_tools.mode != "none"
    return calls or request.response_format.type != "text"


def _schema_of(format_: ResponseFormat) -> dict[str, Any] | None:
    if format_.json_schema is not None:
        return format_.json_schema.schema_
    return {"type": "object"} if format_.type == "json_object" else None


def _checked(schemas: Sequence[dict[str, Any]], field: str) -> list[str]:
    """The schemas' texts with this server's options. Raises InvalidRequestError."""
    texts = [json.dumps({**schema, "x-guidance": SCHEMA_OPTIONS}) for schema in schemas]
    longest = max(map(len, texts))
    if longest > MAX_SCHEMA_CHARACTERS:
        raise InvalidRequestError(
            f"Field '{field}' holds a schema of {longest} characters; at most {MAX_SCHEMA_CHARACTERS} are allowed.",
            field,
        )
    check_costs(schemas, field)
    return texts
