"""Traces from a running orchestrator of ours: prompts in, routes of prompt, output and rejected drafts out."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.traces import TraceDocument, TraceError

from ..errors import PredictorError, SettingsError
from .importers import from_ecospec
from .target import Target

KEY_VARIABLE = "ECOSPEC_API_KEY"
MAX_ANSWER_BYTES = 512 << 20
MAX_PROMPT_BYTES = 16 << 20
ANSWER_SECONDS = 3600.0  # a long answer takes its time
TRIES = 8  # of one prompt while the orchestrator is busy or away
_BUSY = (429, 502, 503, 504)


@dataclass(frozen=True)
class Prompt:
    """body: its part of the request; line: in the file."""

    document_id: str
    path: str
    body: dict[str, Any]
    domain: str
    line: int


def read_prompts(file: Path, domain: str) -> Iterator[Prompt]:
    """One JSON object per line: "prompt" (text or token ids) or "messages", and a "domain" where it is not the given one.
    The document's id follows from the prompt alone, so that an interrupted collection goes on. Raises PredictorError."""
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(MAX_PROMPT_BYTES + 1):
            number += 1
            if not line.strip():
                continue
            try:
                if len(line) > MAX_PROMPT_BYTES:
                    raise ValueError(f"it has more than {MAX_PROMPT_BYTES} bytes")
                record = json.loads(line)
                names = [name for name in ("prompt", "messages") if name in record]
                unknown = record.keys() - {"prompt", "messages", "domain"}
                if len(names) != 1 or unknown or not isinstance(record.get("domain", ""), str):
                    raise ValueError(f"it has the fields {', '.join(sorted(record))}")
            except (AttributeError, RecursionError, TypeError, ValueError) as error:
                raise PredictorError(
                    f"{file}, line {number} is no prompt: {error}; an object with 'prompt' or 'messages', and maybe "
                    "'domain', is needed."
                ) from None
            body = {names[0]: record[names[0]]}
            text = json.dumps(body, sort_keys=True, separators=(",", ":"))
            path = "/v1/chat/completions" if names[0] == "messages" else "/v1/completions"
            digest = hashlib.sha256(text.encode()).hexdigest()[:32]
            yield Prompt(digest, path, body, record.get("domain", domain), number)


@asynccontextmanager
async def connect(url: str, concurrency: int) -> AsyncIterator[httpx.AsyncClient]:
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=concurrency)
    timeout = httpx.Timeout(30, read=ANSWER_SECONDS)
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise SettingsError(f"Option --url is {url!r}; an address such as http://127.0.0.1:8000 is needed.")
    # The key goes to this address alone, through no proxy that happens to be set.
    async with httpx.AsyncClient(
        base_url=parsed, headers=headers, limits=limits, timeout=timeout, trust_env=False
    ) as client:
        yield client


async def fetch_target(client: httpx.AsyncClient) -> tuple[str, Target]:
    """The served model's name and geometry. Raises PredictorError."""
    try:
        model = (await _ask(client, "GET", "/v1/models", None))["data"][0]
        geometry = TargetGeometry(**model["ecospec"]["geometry"])
        if geometry.fingerprint != model["ecospec"]["fingerprint"]:
            raise ValueError("its fingerprint is not that of its geometry")
        return str(model["id"]), Target(geometry)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise PredictorError(
            f"{client.base_url} does not tell its target's geometry in /v1/models ({error}); an EcoSpec orchestrator of this "
            "release is needed."
        ) from None


async def collect(
    client: httpx.AsyncClient,
    target: Target,
    prompts: Iterator[Prompt],
    request: dict[str, Any],
    concurrency: int,
    take: Callable[[Prompt, TraceDocument | TraceError], None],
) -> None:
    """Sends each prompt with `request`, at most `concurrency` at a time, and hands over what came of it. A failure of any
    ends all. Raises PredictorError and what take raises."""

    async def work() -> None:
        for prompt in prompts:  # shared: each worker takes the next one
            # The same text again when asked again, and another one for every prompt.
            body = {**request, **prompt.body, "seed": int(prompt.document_id[:12], 16), "return_routed_experts": True}
            answer = await _ask(client, "POST", prompt.path, body)
            try:
                (document,) = await asyncio.to_thread(from_ecospec, answer, target, prompt.domain)
                take(prompt, replace(document, document_id=prompt.document_id))
            except TraceError as error:
                take(prompt, TraceError(f"the answer to line {prompt.line}: {error}"))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())


async def _ask(client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None) -> Any:
    """The parsed answer. Waits and asks again while the orchestrator is busy, starting or away for a moment."""
    problem = ""
    for attempt in range(TRIES):
        wait = min(2.0**attempt / 4, 15.0)
        try:
            async with client.stream(method, path, json=body) as response:
                data = await _read(response)
            if response.status_code == 200:
                return json.loads(data)
            problem = f"{response.status_code} {data[:500].decode(errors='replace')}"
            if response.status_code not in _BUSY:
                break
            asked = response.headers.get("retry-after", "")
            wait = max(wait, min(float(asked), 60.0)) if asked.isdecimal() else wait
        except httpx.RequestError as error:
            problem = f"{type(error).__name__} {error}".strip()
        except (RecursionError, ValueError) as error:
            problem = f"an answer that is no JSON: {error}"
            break
        await asyncio.sleep(wait)
    raise PredictorError(f"{method} {client.base_url.join(path)} failed: {problem}")


async def _read(response: httpx.Response) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise PredictorError(f"{response.url} answers with more than {MAX_ANSWER_BYTES} bytes; lower --max-tokens.")
        parts.append(part)
    return b"".join(parts)
