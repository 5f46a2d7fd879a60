"""/tokenize and /detokenize: what a text or a chat becomes, and back."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from .parsing import json_object, validate
from .prompts import chat_text, check_ids
from .schemas import ChatInput, check_chat
from .service import Service
from .strict import Strict


class TokenizeText(Strict):
    """An empty prompt has no tokens of its own."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(ChatInput):
    """The chat template writes its special tokens itself, so none are added."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """Special tokens are shown."""

    tokens: list[Annotated[int, Field(ge=0)]]
    model: str | None = None


async def tokenize(service: Service, raw: bytes) -> dict[str, Any]:
    """The answer to /tokenize. Raises InvalidRequestError and what require_scheduler() raises."""
    body = json_object(raw)
    request: TokenizeText | TokenizeChat
    if "messages" in body:
        request = validate(body, TokenizeChat)
        check_chat(request)
    else:
        request = validate(body, TokenizeText)
    service.require_scheduler()
    service.check_model(request.model)
    tokens, strings = await service.in_thread(_tokens, service.tokenizer, request)
    return {
        "count": len(tokens),
        "max_model_len": service.settings.max_context_tokens,
        "tokens": tokens,
        "token_strs": strings,
    }


def _tokens(tokenizer: Any, request: TokenizeText | TokenizeChat) -> tuple[list[int], list[str] | None]:
    text = chat_text(tokenizer, request) if isinstance(request, TokenizeChat) else request.prompt
    tokens = tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
    return tokens, tokenizer.convert_ids_to_tokens(tokens) if request.return_token_strs else None


async def detokenize(service: Service, raw: bytes) -> dict[str, Any]:
    """The answer to /detokenize. Raises InvalidRequestError and what require_scheduler() raises."""
    request = validate(json_object(raw), DetokenizeRequest)
    service.require_scheduler()
    service.check_model(request.model)
    check_ids(service.tokenizer, request.tokens, "tokens")
    return {"prompt": await service.in_thread(_text, service.tokenizer, request.tokens)}


def _text(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
