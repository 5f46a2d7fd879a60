"""A model's tokenizer and the tokens that end its answers, from its own files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .core import SettingsError


def load_tokenizer(directory: Path) -> Any:
    """Raises SettingsError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).split("\n")[0]
        raise SettingsError(
            f"{directory} has no tokenizer that can be read ({reason}); download tokenizer.json and tokenizer_config.json, too."
        ) from error


def end_tokens(directory: Path, config: Mapping[str, Any], tokenizer: Any) -> tuple[int, ...]:
    """As generation_config.json says, else config.json, else the tokenizer."""
    path = directory / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for ends in (generation.get("eos_token_id"), config.get("eos_token_id"), tokenizer.eos_token_id):
        if ends is not None:
            return tuple(ends) if isinstance(ends, list) else (ends,)
    return ()
