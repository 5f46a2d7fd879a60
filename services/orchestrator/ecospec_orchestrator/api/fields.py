"""Known request fields that this server does not support, and the values that mean the same as leaving them out.

A field that would change the answer and is not supported is refused by name; it is never ignored.
"""

from __future__ import annotations

from typing import Any

from .errors import UnsupportedFieldError

_NEUTRAL_COMMON: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_request": (),
    "metadata": ({},),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = _NEUTRAL_COMMON | {
    "best_of": (1,),
    "prompt_embeds": (),
    "suffix": ("",),
}
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = _NEUTRAL_COMMON | {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
}


def _same(value: Any, neutral: Any) -> bool:
    """Equality in JSON: true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def drop_neutral(body: dict[str, Any], neutral: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The body without unsupported fields at their neutral values (null always is one).

    Raises UnsupportedFieldError that names the field, the value and what is allowed.
    """
    kept = {}
    for name, value in body.items():
        if name not in neutral:
            kept[name] = value
        elif value is not None and not any(_same(value, each) for each in neutral[name]):
            allowed = " or ".join(["leaving it out", *(repr(each) for each in neutral[name])])
            raise UnsupportedFieldError(
                f"Field '{name}' is {shorten(value)}, which this server does not support; allowed: {allowed}.", name
            )
    return kept


def shorten(value: Any, limit: int = 60) -> str:
    """repr() for an error message."""
    text = repr(value[: limit * 2] if isinstance(value, (str, list)) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def first_line(text: str, limit: int = 300) -> str:
    """Of somebody else's error message, for one of ours: without the full stop."""
    lines = text.strip().splitlines() or [""]
    line = lines[0].strip().rstrip(".")
    return line if len(line) <= limit else line[: limit - 3] + "..."
