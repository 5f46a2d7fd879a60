"""Our requests as TensorRT-LLM's SamplingParams, field by field. What the engine would drop or read differently is refused by name.

Source: TensorRT-LLM's SamplingParams reference; what one-model speculation cannot honour: its SpecSampler's validation (pull
requests 16590, 17701, 17955 and 18401) and, for seeds, pull request 17599 and issue 19487.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from ...core import InvalidRequestError, Request, SamplingParams, TokenLogprob

NO_END = -1  # as end_id: no token ends the output by itself
# Fields of a request that are not sampling parameters of the engine, or are mapped in arguments_of() itself.
HANDLED = {"request_id", "prompt_tokens", "max_tokens", "sampling", "stop_token_ids", "logprobs", "span"}
# Of SamplingParams: our name -> the engine's arguments for a value that is not the default.
ALWAYS: dict[str, Callable[[Any, Request], dict[str, Any]]] = {
    "temperature": lambda value, _: {},  # see _distribution()
    "top_p": lambda value, _: {},
    "top_k": lambda value, _: {},
    "seed": lambda value, _: {},
}
# What needs the target's logits edited, which speculation's sampler cannot do.
PLAIN_ONLY: dict[str, Callable[[Any, Request], dict[str, Any]]] = {
    "min_p": lambda value, _: {"min_p": value},
    "min_tokens": lambda value, _: {"min_tokens": value},
    "repetition_penalty": lambda value, _: {"repetition_penalty": value},
    # Here these two look at the output alone; the engine's look at the prompt, too, unless told how much of it to leave out.
    "presence_penalty": lambda value, request: {
        "presence_penalty": value,
        "prompt_ignore_length": len(request.prompt_tokens),
    },
    "frequency_penalty": lambda value, request: {
        "frequency_penalty": value,
        "prompt_ignore_length": len(request.prompt_tokens),
    },
}


def arguments_of(request: Request, speculates: bool) -> dict[str, Any]:
    """Keyword arguments of tensorrt_llm.SamplingParams. speculates: the engine drafts. Raises InvalidRequestError."""
    for field in fields(request):
        if field.name not in HANDLED and getattr(request, field.name) != _default(field):
            raise _refusal(field.name, "engine tensorrt-llm does not have it")
    arguments: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "n": 1,  # several choices come as requests of their own
        "detokenize": False,
        "add_special_tokens": False,
        "return_perf_metrics": True,
        **_ends(request.stop_token_ids),
        **_distribution(request.sampling),
    }
    for field in fields(request.sampling):
        value = getattr(request.sampling, field.name)
        if value == _default(field):
            continue
        if field.name in PLAIN_ONLY and not speculates:
            arguments |= PLAIN_ONLY[field.name](value, request)
        elif field.name in PLAIN_ONLY:
            raise _refusal(
                field.name, "speculative decoding in TensorRT-LLM cannot honour it; serve with --policy none"
            )
        elif field.name not in ALWAYS:
            raise _refusal(field.name, "engine tensorrt-llm does not have it")
    if request.logprobs is not None:
        if speculates:
            raise _refusal(
                "logprobs", "speculative decoding in TensorRT-LLM does not report them; serve with --policy none"
            )
        arguments["logprobs"] = request.logprobs
    return arguments


def until_stop(tokens: Sequence[int], stops: frozenset[int]) -> tuple[tuple[int, ...], bool]:
    """The tokens before the first that ends the output, and whether there was one: the engine cuts a stop word off, but leaves the
    end token."""
    at = next((i for i, token in enumerate(tokens) if token in stops), None)
    return (tuple(tokens), False) if at is None else (tuple(tokens[:at]), True)


def finish_reason_of(reason: str | None) -> str:
    """Ours for the engine's, which are stop, length, timeout and cancelled."""
    return {"stop": "stop", "length": "length", "cancelled": "abort"}.get(reason or "", "error")


def logprobs_of(tokens: Sequence[int], found: Sequence[Any], alternatives: int) -> tuple[TokenLogprob, ...]:
    """found: one entry per token, a dict from token id to an object with logprob, or the chosen token's number alone."""
    return tuple(_logprob(token, entry, alternatives) for token, entry in zip(tokens, found, strict=False))


def _logprob(token: int, entry: Any, alternatives: int) -> TokenLogprob:
    if not isinstance(entry, dict):
        return TokenLogprob(token, float(entry))
    numbers = {int(k): float(v.logprob if hasattr(v, "logprob") else v) for k, v in entry.items()}
    best = sorted(numbers.items(), key=lambda pair: (-pair[1], pair[0]))[:alternatives]
    return TokenLogprob(token, numbers[token], tuple(best))


def _ends(stops: frozenset[int]) -> dict[str, Any]:
    """Which tokens end it is decided here for every request, never by the engine's tokenizer."""
    if not stops:
        return {"end_id": NO_END, "pad_id": 0}
    first, *others = sorted(stops)
    return {"end_id": first, "pad_id": first} | ({"stop_token_ids": others} if others else {})


def _distribution(sampling: SamplingParams) -> dict[str, Any]:
    """Greedy is temperature 0 and nothing else. Otherwise a seed is always given: requests without one share one stream of random
    numbers, and answers to the same prompt come out alike. (With speculation, versions before pull request 17599 heed none.)"""
    if sampling.temperature == 0:
        return {"temperature": 0.0}
    filters: dict[str, Any] = {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
    if sampling.top_k > 0:
        filters["top_k"] = sampling.top_k
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    return {"temperature": sampling.temperature, "seed": seed, **filters}


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _refusal(name: str, reason: str) -> InvalidRequestError:
    shown = {
        "record_routes": "return_routed_experts",
        "grammar": "response_format",
        "policy": "ecospec.policy",
        "step_events": "ecospec.steps",
    }.get(name, name)
    return InvalidRequestError(f"Field '{shown}' is not supported by this server: {reason}; leave it out.", shown)
