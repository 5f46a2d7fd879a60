"""What a client may send. Strict: unknown fields, wrong types and absurd numbers are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from ..core import InvalidRequestError
from .fields import shorten
from .messages import MAX_MESSAGES, MAX_TOOLS, TOOL_CHOICE_SCHEMA, Message, Tool, ToolChoice, check_tool_choice
from .strict import Strict, is_int, is_number

MAX_CHOICES = 64  # prompts x n of one HTTP request
MAX_ROUTED_CHOICES = 4  # with return_routed_experts: each may bring recording.MAX_BYTES
MAX_STEP_CHOICES = 4  # with ecospec.steps: a step of each may take some kilobytes
MAX_STOPS = 4
MAX_BIASES = 1024
MAX_TEMPLATE_KWARGS = 16
MAX_TOKENS_FIELD = 1_000_000  # anything above is a mistake, whatever the context
INT64 = 2**63

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT = {
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES},
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_CHOICES},
    ]
}
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": 1000}
_STOP = {"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOPS}]}
_BIAS = {
    "type": "object",
    "patternProperties": {"^[0-9]{1,9}$": {"type": "number", "minimum": -100, "maximum": 100}},
    "additionalProperties": False,
    "maxProperties": MAX_BIASES,
}
_TEMPLATE_KWARGS = {
    "type": "object",
    "additionalProperties": {"type": ["string", "number", "boolean"]},
    "maxProperties": MAX_TEMPLATE_KWARGS,
}


def _check_prompt(value: Any) -> Any:
    if isinstance(value, str):
        parts: list[Any] = [value]
    elif isinstance(value, list) and value and all(map(is_int, value)):
        parts = [value]
    elif isinstance(value, list) and value:
        parts = value
        lists = all(isinstance(part, list) for part in parts)
        if not all(isinstance(part, str) for part in parts) and not lists:
            raise ValueError("is a mixed list; allowed: a string, a list of strings, of token ids, or of lists of them")
        if lists and not all(is_int(token) for part in parts for token in part):
            raise ValueError("holds a token id that is not a whole number")
    elif isinstance(value, list):
        raise ValueError("is empty; at least one token is needed")
    else:
        raise ValueError("has the wrong type; allowed: a string, a list of strings, of token ids, or of lists of them")
    if any(len(part) == 0 for part in parts):
        raise ValueError("is empty; at least one token is needed")
    if len(parts) > MAX_CHOICES:
        raise ValueError(f"holds {len(parts)} prompts; allowed are at most {MAX_CHOICES}")
    return value


def _check_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"has the wrong type; allowed: a string or a list of up to {MAX_STOPS} strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"holds {len(stops)} strings; allowed are at most {MAX_STOPS}")
    if not all(0 < len(stop) <= 1000 for stop in stops):
        raise ValueError("holds a string that is empty or above 1000 characters")
    return stops


def _check_bias(value: Any) -> Any:
    """{"token id": number} -> ((token, number), ...)"""
    if not isinstance(value, dict):
        raise ValueError("has the wrong type; allowed: an object with token ids as keys and numbers from -100 to 100")
    if len(value) > MAX_BIASES:
        raise ValueError(f"holds {len(value)} tokens; allowed are at most {MAX_BIASES}")
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 9) or int(key) in pairs:
            raise ValueError(f"holds the key {shorten(key)}; each key must be another token id in decimal digits")
        if not is_number(bias) or not -100 <= bias <= 100:
            raise ValueError(f"holds {shorten(bias)} for token {key}; allowed are numbers from -100 to 100")
        pairs[int(key)] = float(bias)
    return tuple(pairs.items())


def _check_template_kwargs(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_KWARGS:
        raise ValueError(f"must be an object of at most {MAX_TEMPLATE_KWARGS} settings of the chat template")
    for name, each in value.items():
        if not name.isidentifier() or len(name) > 64:
            raise ValueError(f"holds the name {shorten(name)}, which no template can have")
        if not isinstance(each, (bool, int, float, str)) or (isinstance(each, str) and len(each) > 1000):
            raise ValueError(f"holds {shorten(each)} for '{name}'; allowed are numbers, true, false and short strings")
    return value


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Strict):
    """`strict` is accepted and always true: the answer fits by construction, or the schema is refused."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: Annotated[str, Field(max_length=20_000)] = ""
    strict: bool = True


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("must have a json_schema with the type 'json_schema', and with no other")
        return self


class EcoSpecOptions(Strict):
    """steps: every chunk of the stream tells of its decode step. policy: a wish, see docs/step-events.md; None: the server's own."""

    steps: bool = False
    policy: Literal["none", "likelihood", "ecospec", "goodput"] | None = None


class Common(Strict):
    """Fields of both endpoints. `user` is accepted and has no effect."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] = 0  # -1 and 0 switch it off
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_check_bias), WithJsonSchema(_BIAS)] = ()
    n: Annotated[int, Field(ge=1, le=16)] = 1
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: Annotated[list[str], BeforeValidator(_check_stop), WithJsonSchema(_STOP)] = []
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] = []
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS_FIELD)] = 0
    ignore_eos: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat = ResponseFormat(type="text")
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    return_token_ids: bool = False
    return_routed_experts: bool = False
    skip_special_tokens: bool = True
    ecospec: EcoSpecOptions = EcoSpecOptions()
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None


class CompletionRequest(Common):
    # str | list[str] | list[int] | list[list[int]]
    prompt: Annotated[Any, BeforeValidator(_check_prompt), WithJsonSchema(_PROMPT)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_FIELD)] = 16
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool = False

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt, whichever of the four forms was sent."""
        if isinstance(self.prompt, str) or is_int(self.prompt[0]):
            return [self.prompt]
        return self.prompt

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        """How many alternatives of the prompt's tokens are needed; None where nobody looks at them."""
        echoed = self.logprobs if self.echo else None
        wanted = [each for each in (echoed, self.prompt_logprobs) if each is not None]
        return max(wanted, default=None)


class ChatInput(Strict):
    """What becomes the prompt of a chat."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[
        dict[str, Any], BeforeValidator(_check_template_kwargs), WithJsonSchema(_TEMPLATE_KWARGS)
    ] = {}


class ChatRequest(ChatInput, Common):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_FIELD)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_FIELD)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tool_choice: Annotated[
        ToolChoice | None, BeforeValidator(check_tool_choice), WithJsonSchema(TOOL_CHOICE_SCHEMA)
    ] = None
    parallel_tool_calls: bool = True

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt_alternatives(self) -> int | None:
        return self.prompt_logprobs

    @property
    def choice_of_tools(self) -> ToolChoice:
        return self.tool_choice or ToolChoice("auto" if self.tools else "none")


def check_chat(chat: ChatInput) -> None:
    """Rules that involve two fields of a prompt. Raises InvalidRequestError."""
    names = [tool.function.name for tool in chat.tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequestError(
            f"Field 'tools' holds the function '{twice}' twice; each name may come once.", "tools"
        )
    if chat.continue_final_message:
        if chat.add_generation_prompt:
            raise InvalidRequestError(
                "Field 'continue_final_message' is true together with 'add_generation_prompt'; set the latter to false.",
                "continue_final_message",
            )
        if chat.messages[-1].role != "assistant" or not chat.messages[-1].content:
            raise InvalidRequestError(
                "Field 'continue_final_message' is true and the last message has no text of the role 'assistant' to continue.",
                "continue_final_message",
            )


def check_together(request: CompletionRequest | ChatRequest) -> None:
    """Rules that involve two fields. Raises InvalidRequestError."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("Field 'stream_options' is only allowed with 'stream': true.", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError(
            "Field 'prompt_logprobs' is set together with 'stream'; the prompt is scored in whole answers only: leave one out.",
            "prompt_logprobs",
        )
    choices = request.n * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
    if request.return_routed_experts and request.stream:
        raise InvalidRequestError(
            "Field 'return_routed_experts' is true together with 'stream'; routes are told in whole answers only: leave one out.",
            "return_routed_experts",
        )
    if request.return_routed_experts and choices > MAX_ROUTED_CHOICES:
        raise InvalidRequestError(
            f"Field 'return_routed_experts' is true for {choices} choices; at most {MAX_ROUTED_CHOICES} are allowed in one request.",
            "return_routed_experts",
        )
    if request.ecospec.steps and not request.stream:
        raise InvalidRequestError(
            "Field 'ecospec.steps' is true without 'stream'; steps are told in streams only: set 'stream' to true.",
            "ecospec.steps",
        )
    if request.ecospec.steps and choices > MAX_STEP_CHOICES:
        raise InvalidRequestError(
            f"Field 'ecospec.steps' is true for {choices} choices; at most {MAX_STEP_CHOICES} are allowed in one request.",
            "ecospec.steps",
        )
    if request.ignore_eos and request.response_format.type != "text":
        raise InvalidRequestError(
            "Field 'ignore_eos' is true together with 'response_format', which says where an answer ends; leave one out.",
            "ignore_eos",
        )
    if isinstance(request, ChatRequest):
        _check_chat_request(request)
    elif choices > MAX_CHOICES:
        raise InvalidRequestError(
            f"Field 'n' is {request.n} for {len(request.prompts)} prompts; at most {MAX_CHOICES} choices are"
            " allowed in one request.",
            "n",
        )


def _check_chat_request(request: ChatRequest) -> None:
    check_chat(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("Field 'top_logprobs' is only allowed with 'logprobs': true.", "top_logprobs")
    both = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(both) == 2:
        raise InvalidRequestError(
            f"Field 'max_completion_tokens' is {request.max_completion_tokens} and 'max_tokens' is {request.max_tokens}"
            "; send one of them.",
            "max_completion_tokens",
        )
    choice = request.choice_of_tools
    if choice.mode == "none":
        return
    names = [tool.function.name for tool in request.tools]
    if not names or choice.function not in (None, *names):
        known = f"the functions are {', '.join(names)}" if names else "there are no 'tools'"
        raise InvalidRequestError(f"Field 'tool_choice' cannot be met: {known}.", "tool_choice")
    for field, clashes in (
        ("response_format", request.response_format.type != "text"),
        ("ignore_eos", request.ignore_eos),
    ):
        if clashes:
            raise InvalidRequestError(
                f"Field '{field}' is set together with 'tools', which say what an answer looks like; leave one out, or set "
                "'tool_choice' to \"none\".",
                field,
            )
