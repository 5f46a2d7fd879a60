"""Fixtures that several test folders share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# pytest runs in importlib mode, which leaves the test folders off the path: what tests share lies in these.
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("integration", "support")]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_byte_tokenizer() -> Any:
    """One token per byte (ids 0 to 255), so a character beyond ASCII takes several tokens, and two specials."""
    vocabulary = {symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    return make_byte_tokenizer()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-inputs", type=int, default=500, help="inputs of each test in tests/unit/test_fuzz.py")
