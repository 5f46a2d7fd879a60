"""One text as each engine documents its answer, built byte for byte, and the document that all of them mean."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ecospec_predictor.collect.target import Target
from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.traces import TraceDocument, document_id

GEOMETRY = TargetGeometry("tiny", "r1", vocab_size=1000, hidden_size=16, moe_layers=3, experts=16, top_k=2)
TARGET = Target(GEOMETRY)
PROMPT, OUTPUT = [11, 12, 13, 14], [21, 22, 23, 24, 25]
LAYERS, TOP_K = 3, 2


def make_routes(rows: int = 8, seed: int = 0, layers: int = LAYERS) -> np.ndarray:
    """int16 [rows, layers, TOP_K] without repeats in a row; the documented number of rows: all tokens but the last."""
    random = np.random.default_rng(seed).random((rows, layers, GEOMETRY.experts))
    return np.argsort(random, axis=2)[..., :TOP_K].astype(np.int16)


ROUTES = make_routes()


def expected(routes: np.ndarray = ROUTES, prompt: list[int] = PROMPT, output: list[int] = OUTPUT) -> TraceDocument:
    tokens = prompt + output
    count = len(tokens)
    whole = np.full((count, LAYERS, TOP_K), -1, np.int16)
    whole[: len(routes)] = routes
    return TraceDocument(
        f"{document_id(prompt)}:{document_id(tokens)[:24]}",
        "chat",
        np.array(tokens, np.int32),
        np.arange(count, dtype=np.int32),
        np.arange(-1, count - 1, dtype=np.int32),
        whole,
        np.ones(count, np.bool_),
    )


def npy(array: np.ndarray) -> bytes:
    """The .npy format 1.0 by hand: magic, version, header length, header padded to 64 bytes, data."""
    descr = {np.int16: "<i2", np.uint8: "|u1", np.int32: "<i4"}[array.dtype.type]
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {array.shape}, }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + array.tobytes()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def vllm_completion(routes: np.ndarray = ROUTES) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": "x",
        "prompt_token_ids": PROMPT,
        "token_ids": OUTPUT,
        "routed_experts": b64(npy(routes)),
    }
    return {"object": "text_completion", "choices": [choice]}


def vllm_chat(routes: np.ndarray = ROUTES) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant"}, "token_ids": OUTPUT, "routed_experts": b64(npy(routes))}
    return {"object": "chat.completion", "prompt_token_ids": PROMPT, "choices": [choice]}


def vllm_split() -> dict[str, Any]:
    """Version 0.21: the prompt's rows at the response, lists."""
    choice = {"token_ids": OUTPUT, "routed_experts": ROUTES[len(PROMPT) :].tolist()}
    return {"prompt_token_ids": PROMPT, "prompt_routed_experts": ROUTES[: len(PROMPT)].tolist(), "choices": [choice]}


def vllm_offset(start: int = 2) -> dict[str, Any]:
    response = vllm_completion(ROUTES[start:])
    return {"request": {"prompt": "abcd", "routed_experts_prompt_start": start}, "response": response}


def sglang_generate() -> dict[str, Any]:
    meta = {
        "prompt_tokens": 4,
        "completion_tokens": 5,
        "input_token_logprobs": [[None, PROMPT[0], None], *([-0.5, token, None] for token in PROMPT[1:])],
        "output_token_logprobs": [[-0.25, token, None] for token in OUTPUT],
        "routed_experts": b64(ROUTES.astype("<i4").tobytes()),
    }
    return {"text": "x", "output_ids": OUTPUT, "meta_info": meta}


def sglang_request() -> dict[str, Any]:
    """The prompt's ids in the request, the output's in output_ids only."""
    response = sglang_generate()
    for name in ("input_token_logprobs", "output_token_logprobs"):
        del response["meta_info"][name]
    return {"request": {"input_ids": PROMPT, "return_routed_experts": True}, "response": response}


def sglang_chat() -> dict[str, Any]:
    routed = b64(ROUTES.astype("<i4").tobytes())
    return {
        "choices": [{"index": 0, "message": {"content": "x"}, "sgl_ext": {"routed_experts": routed}}],
        "sglext": {"input_ids": PROMPT, "output_ids": [OUTPUT]},
    }


def tensorrt_llm() -> dict[str, Any]:
    return {"prompt_token_ids": PROMPT, "outputs": [{"token_ids": OUTPUT, "routed_experts": ROUTES.tolist()}]}


def lightllm(layers_first: bool) -> dict[str, Any]:
    array = np.ascontiguousarray(ROUTES.swapaxes(0, 1)) if layers_first else ROUTES.astype(np.uint8)
    routed = {"shape": list(array.shape), "dtype": str(array.dtype), "data": b64(array.tobytes())}
    tokens = [{"id": token, "text": "x"} for token in OUTPUT]
    return {"generated_text": ["x"], "tokens": tokens, "prompt_token_ids": PROMPT, "routed_experts": routed}


def ecospec() -> dict[str, Any]:
    document = expected()
    routed = {
        "data": b64(document.routes.astype("<i2").tobytes()),
        "shape": list(document.routes.shape),
        **{name: getattr(document, name).tolist() for name in ("tokens", "positions", "parents", "accepted")},
    }
    return {"choices": [{"index": 0, "text": "x", "routed_experts": routed}]}


def recording_pass(
    number: int, mode: int, tokens: list[int], first: int, routes: np.ndarray, **more: Any
) -> dict[str, Any]:
    """routes: logical, int [tokens, layers, TOP_K]; the file has physical ids, padded to eight a row."""
    import torch

    physical = np.full((routes.shape[1], len(tokens), 8), -1, np.int32)
    physical[..., :TOP_K] = PHYSICAL_OF[np.arange(routes.shape[1])[:, None, None], routes.swapaxes(0, 1)]
    record = {
        "forward_pass_id": number,
        "rank": 0,
        "input_ids": tokens,
        "positions": list(range(first, first + len(tokens))),
        "extend_seq_lens": [len(tokens)] if mode == 1 else None,
        "forward_mode": mode,
        "topk_ids_of_layer": torch.from_numpy(physical),
        "misc_objects": [],
    }
    return record | more


LOGICAL_OF = np.stack([np.random.default_rng(layer).permutation(GEOMETRY.experts) for layer in range(LAYERS)])
PHYSICAL_OF = np.argsort(LOGICAL_OF, axis=1)


def recording(records: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """By default: the prompt, then four decode passes; the last output token is computed by none."""
    import torch

    if records is None:
        records = [recording_pass(1, 1, PROMPT, 0, ROUTES[:4])]
        records += [recording_pass(2 + i, 2, [OUTPUT[i]], 4 + i, ROUTES[4 + i : 5 + i]) for i in range(4)]
    return {"records": records, "last_physical_to_logical_map": torch.from_numpy(LOGICAL_OF)}


def save_recording(path: Path, payload: Any, compression: int = zipfile.ZIP_STORED) -> Path:
    import torch

    if compression == zipfile.ZIP_STORED:
        torch.save(payload, path)
        return path
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(path, "w", compression) as packed:
        for entry in source.infolist():
            packed.writestr(entry.filename, source.read(entry))
    return path


def write_jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
