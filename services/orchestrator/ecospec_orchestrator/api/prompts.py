"""From what a client sent to prompt tokens. Everything here may take as long as the text is long: call it in a thread."""

from __future__ import annotations

import inspect
from typing import Any

from jinja2 import TemplateError

from ..core import InvalidRequestError
from .fields import first_line
from .generation import Echo
from .schemas import ChatInput, CompletionRequest
from .text import Detokenizer
from .tools import chat_messages

# What a template raises about the messages that it was given, or about settings that it cannot work with.
_TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)


def completion_prompts(tokenizer: Any, request: CompletionRequest) -> list[list[int]]:
    """Raises InvalidRequestError."""
    tokenized = []
    for prompt in request.prompts:
        tokens = prompt if isinstance(prompt, list) else tokenizer.encode(prompt, add_special_tokens=True)
        check_ids(tokenizer, tokens, "prompt")
        if not tokens:
            raise InvalidRequestError("Field 'prompt' is empty; at least one token is needed.", "prompt")
        tokenized.append(list(tokens))
    return tokenized


def check_ids(tokenizer: Any, tokens: list[int], field: str) -> None:
    """Raises InvalidRequestError for an id beyond the vocabulary."""
    vocabulary = len(tokenizer)
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise InvalidRequestError(f"Field '{field}' holds token id {wrong}; allowed are 0 to {vocabulary - 1}.", field)


def chat_prompt(tokenizer: Any, chat: ChatInput) -> list[int]:
    """Raises InvalidRequestError."""
    tokens = tokenizer.encode(chat_text(tokenizer, chat), add_special_tokens=False)
    if not tokens:
        raise InvalidRequestError("Field 'messages' makes an empty prompt; at least one token is needed.", "messages")
    return tokens


def chat_text(tokenizer: Any, chat: ChatInput) -> str:
    """Raises InvalidRequestError."""
    reserved = {"messages", "conversations", *inspect.signature(tokenizer.apply_chat_template).parameters}
    wrong = next((name for name in chat.chat_template_kwargs if name in reserved), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"Field 'chat_template_kwargs' sets '{wrong}', which is not the template's to set; remove it.",
            "chat_template_kwargs",
        )
    messages, tools = chat_messages(chat, tokenizer.chat_template)
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            **chat.chat_template_kwargs,
        )
    except _TEMPLATE_ERRORS as error:
        raise InvalidRequestError(
            f"Field 'messages' does not fit the chat template: {first_line(str(error))}.", "messages"
        ) from error


def echo_of(tokenizer: Any, sent: object, tokens: list[int], skip_special_tokens: bool, scored: bool) -> Echo:
    """The text as it was sent, or what the tokens that were sent decode to; with offsets, which never lie beyond its end, where
    the tokens are scored."""
    text = (
        sent
        if isinstance(sent, str)
        else tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )
    if not scored:
        return Echo(text)
    detokenizer, characters, offsets = Detokenizer(tokenizer, skip_special_tokens), 0, []
    for token in tokens:
        offsets.append(min(characters, len(text)))
        characters += len(detokenizer.push(token))
    return Echo(text, tuple(offsets))
