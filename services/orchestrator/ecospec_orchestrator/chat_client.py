"""One streamed answer of a server over HTTP, with the figures of its steps."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from .core import EcoSpecError

CONNECT_SECONDS = 10.0
READ_SECONDS = 120.0  # between two pieces of an answer; a long prompt comes before the first


class ChatError(EcoSpecError):
    """status: the server's; None: it did not answer, or not in full. param: the field that it refused."""

    def __init__(self, message: str, status: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


@dataclass
class Figures:
    """Of one answer so far. experts: summed over the steps, distinct ones per layer; seconds: of the steps."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    experts: float = 0.0
    policy: str = ""

    def add(self, step: dict[str, Any]) -> None:
        read = step["experts"]["read"]
        self.tokens += len(step["tokens"])
        self.steps += 1
        self.seconds += step["seconds"]["step"]
        self.experts += sum(read) / len(read)
        self.policy = step["policy"]["name"]

    def line(self) -> str:
        """For a person."""
        if not self.steps or not self.seconds:
            return "no steps told"
        return (
            f"{self.policy}: {self.tokens} tokens, {self.tokens / self.seconds:.1f} tokens/s, "
            f"{self.tokens / self.steps:.2f} tokens/step, {self.experts / self.steps:.1f} experts per layer and step"
        )


@dataclass
class ChatClient:
    """url: of the server, without a path. steps: False once the server has refused to tell them."""

    url: str
    key: str = ""
    model: str | None = None
    policy: str | None = None
    max_tokens: int = 512
    temperature: float = 0.0
    steps: bool = True
    figures: Figures = field(default_factory=Figures)  # of the last answer

    def __post_init__(self) -> None:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
        except (httpx.InvalidURL, ValueError) as error:
            raise ChatError(f"'{self.url}' is no address ({error}); give one like http://127.0.0.1:8000.") from error

    def close(self) -> None:
        self._http.close()

    def facts(self) -> dict[str, Any]:
        """What /version tells. Raises ChatError."""
        with _told(self.url):
            answer = self._http.get("/version")
            _require(answer)
            return dict(_json_object(answer.text))

    def answer(self, messages: Sequence[dict[str, str]]) -> Generator[str]:
        """Pieces of the text as they come; closing the iterator ends the answer on the server, too. Raises ChatError."""
        self.figures = Figures()
        try:
            yield from self._stream(messages)
        except ChatError as error:
            if not (self.steps and self.policy is None and error.param == "ecospec.steps"):
                raise
            self.steps = False  # an engine that batches by itself tells none
            yield from self._stream(messages)

    def _stream(self, messages: Sequence[dict[str, str]]) -> Iterator[str]:
        wanted: dict[str, Any] = {"steps": True} if self.steps else {}
        if self.policy is not None:
            wanted["policy"] = self.policy
        body: dict[str, Any] = {
            "messages": list(messages),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if wanted:
            body["ecospec"] = wanted
        if self.model is not None:
            body["model"] = self.model
        with _told(self.url), self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.is_error:
                answer.read()
            _require(answer)
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield from self._pieces(_json_object(line.removeprefix("data: ")))
            raise ChatError("The server was lost in the middle of the answer.")

    def _pieces(self, chunk: dict[str, Any]) -> Iterator[str]:
        if "error" in chunk:
            raise _error_of(chunk, 500)
        try:
            for choice in chunk["choices"]:
                step = choice.get("ecospec", {}).get("step")
                if step is not None:
                    self.figures.add(step)
                if choice["delta"].get("content"):
                    yield str(choice["delta"]["content"])
        except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
            raise _foreign() from error


@contextmanager
def _told(url: str) -> Iterator[None]:
    """What goes wrong on the way becomes a ChatError."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ChatError(
            f"No server answers at {url} ({error or 'no answer in time'}); start one with 'ecospec-orchestrator demo', or give "
            "another --url."
        ) from error
    except httpx.TimeoutException as error:
        raise ChatError(f"The server at {url} fell silent for {READ_SECONDS:g} seconds.") from error
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise ChatError(f"'{url}' is no address; give one like http://127.0.0.1:8000.") from error
    except httpx.HTTPError as error:
        raise ChatError(f"The server at {url} was lost ({error}).") from error


def _require(answer: httpx.Response) -> None:
    """Raises ChatError for anything but success."""
    if answer.is_success:
        return
    try:
        raise _error_of(json.loads(answer.text), answer.status_code)
    except (ValueError, KeyError, TypeError):
        raise ChatError(f"The server answered {answer.status_code}.", answer.status_code) from None


def _error_of(body: dict[str, Any], status: int) -> ChatError:
    error = body["error"]
    return ChatError(str(error["message"]), status, error["param"])


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _foreign()
    return found


def _foreign() -> ChatError:
    return ChatError("What answers there is no EcoSpec server: it sends something else than what is asked for.")
