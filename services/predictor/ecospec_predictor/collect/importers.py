"""One pure function per engine: a parsed response -> documents in the normal form.

A record is a response, or {"request": ..., "response": ..., "domain": ...}: the request adds what some engines do not repeat in
the response, the prompt's token ids and an offset of the routes. Every function raises TraceError with one sentence.

The formats are those of late 2026:
vLLM          https://docs.vllm.ai/en/latest/training/routed_experts/
SGLang        https://docs.sglang.io/docs/basic_usage/openai_api_completions.md, test/registered/rl/test_return_routed_experts.py
TensorRT-LLM  issue 17778, PR 18397
LightLLM      PR 1190, PR 1212
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ecospec_proto.traces import TraceDocument, TraceError, document_id

from .payload import decode_array, normal_routes, text_document, token_ids
from .target import Target

Importer = Callable[[Any, Target, str], list[TraceDocument]]


@dataclass(frozen=True)
class _Record:
    response: Any
    request: Mapping[str, Any]
    domain: str

    def setting(self, name: str) -> Any:
        """Of the request, at its top or among its sampling parameters."""
        nested = self.request.get("sampling_params")
        return self.request.get(name, nested.get(name) if isinstance(nested, Mapping) else None)

    def prompt(self, *places: Any) -> list[int]:
        """The first list among places, else the request's own."""
        named = (self.request.get(name) for name in ("prompt_token_ids", "input_ids", "token_ids", "prompt"))
        return token_ids(
            next((place for place in (*places, *named) if isinstance(place, list)), None), "prompt_token_ids"
        )


def _open(record: Any, domain: str) -> _Record:
    if isinstance(record, Mapping) and "response" in record:
        request, domain = record.get("request") or {}, record.get("domain", domain)
        if not isinstance(request, Mapping):
            raise TraceError("its request is no object.")
        return _Record(record["response"], request, domain)
    return _Record(record, {}, domain)


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TraceError(f"its {what} is no object; the engine's response is needed.")
    if "error" in value:
        raise TraceError(f"it is an error of the engine: {value['error']!r:.200}")
    return value


def _choices(response: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Of the HTTP APIs, or the outputs of a RequestOutput."""
    choices = response.get("choices", response.get("outputs"))
    if not isinstance(choices, list) or not choices:
        raise TraceError("it has neither choices nor outputs; the engine's response is needed.")
    return [_object(choice, "choice") for choice in choices]


def _required(routed: Any, remedy: str) -> Any:
    if routed is None:
        raise TraceError(f"it has no routed_experts; {remedy}.")
    return routed


def _texts(opened: _Record, response: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], list[int], list[int]]]:
    """Every choice with the token ids of its prompt and of its output."""
    for choice in _choices(response):
        prompt = opened.prompt(choice.get("prompt_token_ids"), response.get("prompt_token_ids"))
        yield choice, prompt, token_ids(choice.get("token_ids"), "token_ids")


def from_vllm(record: Any, target: Target, domain: str) -> list[TraceDocument]:
    """choices[i].routed_experts is base64 of a .npy file, int16 (uint8 and int32 in some versions) [tokens, layers, top_k], from
    the prompt's first token (or routed_experts_prompt_start) to the last but one, -1 for positions that were cached. Version 0.21
    has the prompt's rows in prompt_routed_experts. Token ids come with return_token_ids. A RequestOutput as JSON has outputs
    in place of choices, and lists in place of base64."""
    opened = _open(record, domain)
    response = _object(opened.response, "response")
    documents = []
    for choice, prompt, output in _texts(opened, response):
        value = _required(choice.get("routed_experts"), "start the engine with --enable-return-routed-experts")
        start = value.get("start") if isinstance(value, Mapping) else None
        start = start or opened.setting("routed_experts_prompt_start") or 0
        routes = decode_array(value)
        if (before := response.get("prompt_routed_experts")) is not None:
            of_prompt = decode_array(before)
            if len(of_prompt) != len(prompt) or of_prompt.shape[1:] != routes.shape[1:]:
                raise TraceError(
                    f"its prompt_routed_experts have shape {of_prompt.shape} for {len(prompt)} tokens, its routed_experts "
                    f"{routes.shape}."
                )
            routes = np.concatenate([of_prompt, routes])
        documents.append(text_document(prompt, output, routes, target, opened.domain, start))
    return documents


def from_tensorrt_llm(record: Any, target: Target, domain: str) -> list[TraceDocument]:
    """A RequestOutput as JSON: prompt_token_ids, and for each of its outputs token_ids and routed_experts, int16
    [tokens - 1, MoE layers, top_k], as lists, base64 of a .npy file or {"data", "shape", "dtype"}."""
    opened = _open(record, domain)
    response = _object(opened.response, "response")
    documents = []
    for choice, prompt, output in _texts(opened, response):
        routes = decode_array(
            _required(choice.get("routed_experts"), "start the engine with enable_return_routed_experts")
        )
        documents.append(text_document(prompt, output, routes, target, opened.domain))
    return documents


def from_sglang(record: Any, target: Target, domain: str) -> list[TraceDocument]:
    """routed_experts is base64 of bare int32 [tokens - 1, layers, top_k] from routed_experts_start_len on: in meta_info of
    /generate, in sgl_ext of a choice or sglext of the whole response of the OpenAI API. Token ids: output_ids or
    output_token_logprobs, and input_token_logprobs of the whole prompt or the request's input_ids; sglext has both."""
    opened = _open(record, domain)
    many = opened.response if isinstance(opened.response, list) else [opened.response]
    return [document for one in many for document in _sglang_one(_object(one, "response"), opened, target)]


def _sglang_one(response: Mapping[str, Any], opened: _Record, target: Target) -> list[TraceDocument]:
    start = opened.setting("routed_experts_start_len") or 0
    if "meta_info" in response:
        meta = _object(response["meta_info"], "meta_info")
        prompt = opened.prompt(response.get("prompt_token_ids"), _ids_of_logprobs(meta, "input_token_logprobs"))
        output = token_ids(_ids_of_logprobs(meta, "output_token_logprobs") or response.get("output_ids"), "output_ids")
        for name, ids in (("prompt_tokens", prompt), ("completion_tokens", output)):
            if meta.get(name) not in (None, len(ids)):
                raise TraceError(f"it says {meta[name]!r:.40} {name} and brings {len(ids)} token ids for them.")
        return [_sglang_document(prompt, output, meta.get("routed_experts"), start, opened.domain, target)]
    shared = _extension(response)
    documents = []
    for index, choice in enumerate(_choices(response)):
        routed = _extension(choice).get("routed_experts") or _of_choice(shared.get("routed_experts"), index)
        prompt = opened.prompt(
            choice.get("prompt_token_ids"), response.get("prompt_token_ids"), shared.get("input_ids")
        )
        names = ("token_ids", "response_token_ids")
        output = next((choice[name] for name in names if name in choice), _of_choice(shared.get("output_ids"), index))
        output = token_ids(output, "output_ids")
        documents.append(_sglang_document(prompt, output, routed, start, opened.domain, target))
    return documents


def _extension(response: Mapping[str, Any]) -> Mapping[str, Any]:
    extension = response.get("sgl_ext", response.get("sglext"))
    return extension if isinstance(extension, Mapping) else {}


def _of_choice(value: Any, index: int) -> Any:
    """A response-level field is a list with one entry per choice, or the only choice's."""
    return (value[index] if index < len(value) else None) if isinstance(value, list) else value


def _ids_of_logprobs(meta: Mapping[str, Any], name: str) -> list[int] | None:
    """[[logprob, token id, text], ...] -> token ids."""
    entries = meta.get(name)
    if not isinstance(entries, list):
        return None
    return [entry[1] if isinstance(entry, list) and len(entry) > 1 else None for entry in entries]  # type: ignore[misc]


def _sglang_document(
    prompt: list[int], output: list[int], routed: Any, start: Any, domain: str, target: Target
) -> TraceDocument:
    flat = decode_array(_required(routed, "start the engine with --enable-return-routed-experts"), raw_dtype="<i4")
    if type(start) is not int:
        raise TraceError(f"its routed_experts_start_len is {start!r:.40}; a whole number is needed.")
    rows, top_k = len(prompt) + len(output) - 1 - start, target.geometry.top_k
    if rows < 1 or flat.size == 0 or flat.size % (rows * top_k):
        raise TraceError(
            f"its routed_experts have {flat.size} numbers, which are no whole number of layers for {rows} tokens and top_k "
            f"{top_k}."
        )
    return text_document(prompt, output, flat.reshape(rows, -1, top_k), target, domain, start)


def from_lightllm(record: Any, target: Target, domain: str) -> list[TraceDocument]:
    """/generate with return_details and return_routed_experts: routed_experts {"data", "shape", "dtype"}, uint8, int8, int16 or
    int32, of shape [layers, tokens, top_k] (PR 1190) or [tokens, layers, top_k] (later), the output's ids in tokens[i].id and the
    prompt's in prompt_token_ids or the request. One choice (best_of 1)."""
    opened = _open(record, domain)
    response = _object(opened.response, "response")
    prompt = opened.prompt(response.get("prompt_token_ids"))
    tokens = response.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, Mapping) for token in tokens):
        raise TraceError("it has no tokens of one choice; ask for return_details with best_of 1.")
    output = token_ids([token.get("id") for token in tokens], "tokens[].id")
    routes = decode_array(
        _required(response.get("routed_experts"), "start the engine with --enable_return_routed_experts")
    )
    return [
        text_document(prompt, output, _tokens_first(routes, len(prompt) + len(output), target), target, opened.domain)
    ]


def _tokens_first(routes: np.ndarray, text_tokens: int, target: Target) -> np.ndarray:
    if routes.ndim != 3:
        raise TraceError(f"its routes have shape {routes.shape}; three axes are needed.")
    rows, layers = {text_tokens, text_tokens - 1}, {target.geometry.moe_layers}
    if target.routed_layers:
        layers.add(1 + max(target.routed_layers))
    new, old = (axis in rows for axis in routes.shape[:2])  # [tokens, layers] or [layers, tokens]
    if new and old:
        new, old = routes.shape[1] in layers, routes.shape[0] in layers
    if new and old:
        raise TraceError(
            f"its routes have shape {routes.shape}, which may be [tokens, layers] or [layers, tokens]; leave this text out."
        )
    return routes.swapaxes(0, 1) if old else routes


def from_ecospec(record: Any, target: Target, domain: str) -> list[TraceDocument]:
    """Our orchestrator: choices[i].routed_experts {"data": base64 of int16, "shape", "tokens", "positions", "parents",
    "accepted"}, rejected drafts included."""
    opened = _open(record, domain)
    documents = []
    for choice in _choices(_object(opened.response, "response")):
        routed = _object(_required(choice.get("routed_experts"), "ask for return_routed_experts"), "routed_experts")
        routes = decode_array({"dtype": "int16", **routed})
        columns = {name: _column(routed, name, len(routes)) for name in ("tokens", "positions", "parents")}
        accepted = routed.get("accepted")
        if not isinstance(accepted, list) or len(accepted) != len(routes) or not set(map(type, accepted)) <= {bool}:
            raise TraceError(f"its accepted is no list of {len(routes)} truth values.")
        flags = np.array(accepted, np.bool_)
        text = columns["tokens"][flags]
        documents.append(
            TraceDocument(
                document_id(text), opened.domain, **columns, routes=normal_routes(routes, target), accepted=flags
            )
        )
    return documents


def _column(routed: Mapping[str, Any], name: str, rows: int) -> np.ndarray:
    values = routed.get(name)
    if not isinstance(values, list) or len(values) != rows or not set(map(type, values)) <= {int}:
        raise TraceError(f"its {name} is no list of {rows} whole numbers.")
    if values and not (-(2**31) <= min(values) and max(values) < 2**31):
        raise TraceError(f"its {name} holds a number beyond 32 bits.")
    return np.array(values, np.int32)


IMPORTERS: dict[str, Importer] = {
    "vllm": from_vllm,
    "sglang": from_sglang,
    "tensorrt-llm": from_tensorrt_llm,
    "lightllm": from_lightllm,
    "ecospec": from_ecospec,
}
