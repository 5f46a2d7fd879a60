"""A stand-in for the package tensorrt_llm: its documented surface over stand_in_llm, for tests that put this folder's parent on the
path. There is no GPU and no model behind it."""

from __future__ import annotations

from typing import Any

from stand_in_llm import SamplingParams, StandInLlm

from . import llmapi

__all__ = ["LLM", "SamplingParams", "llmapi"]
__version__ = "1.3.0"


class LLM(StandInLlm):
    def __init__(self, model: str, **arguments: Any) -> None:
        self.arguments = llmapi.LlmArguments(model=model, **arguments)
        super().__init__(self.arguments.max_batch_size, 0.005)
