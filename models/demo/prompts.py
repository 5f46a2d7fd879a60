"""Chat prompts and documents for training, made from what packages on the machine ship.

Sources: the Python standard library (code and docstrings), Debian `wordnet-base` (nouns and glosses) and
`python3.11-doc` (HTML manual), GSM8K training questions. Evaluation sets are never read here, and the last
500 GSM8K questions are left out for evaluation.
"""

from __future__ import annotations

import ast
import html
import json
import random
import re
import sysconfig
from pathlib import Path

HELD_OUT_GSM8K = 500

TOPIC_TEMPLATES = [
    "What is {a}?",
    "Explain {a} to a beginner.",
    "Write a short story about {a}.",
    "Give me five tips about {a}.",
    "What is the difference between {a} and {b}?",
    "Write a paragraph about the history of {a}.",
    "Why is {a} important?",
    "Write a poem about {a} and {b}.",
    "List the advantages and disadvantages of {a}.",
    "How does {a} work?",
    "Write an email to a friend about {a}.",
    "Imagine you are an expert on {a}. What would you tell a student?",
    "Compose an engaging blog post about {a}.",
    "Describe {a} in simple terms.",
    "How can I learn more about {a}?",
    "What are the main causes of {a}, and how is it related to {b}?",
    "Pretend you are {a}. Introduce yourself.",
    "Suggest some interview questions about {a}.",
    "Could you write a short dialogue between {a} and {b}?",
    "Summarize what you know about {a} in three sentences.",
    "Define {a} and use it in a sentence.",
    "Write a product review of {a}.",
    "What should I consider before buying {a}?",
    'Translate into French: "{g}"',
    'Rewrite this sentence in a formal tone: "{g}"',
    'Summarize the following text: "{g}. {h}."',
    'Extract the key terms from this text: "{g}. {h}."',
    "Is it true that {a} is {g}?",
    "Who invented {a}?",
    "Write a step by step guide to {a}.",
    "What are some examples of {a}?",
    "Discuss the impact of {a} on society.",
]
CODE_TEMPLATES = [
    "Write a Python function `{f}` that does this: {d}",
    "Complete this Python function:\n\n{s}",
    "Explain what this Python function does:\n\n{s}",
    "Write unit tests for this function:\n\n{s}",
    "How do I {d2} in Python? Show an example.",
    "Write a Python program that works with {a}.",
    "Implement a function in Python to {d2}.",
    "Fix and improve this code:\n\n{s}",
]


def wordnet(root: Path) -> list[tuple[str, str]]:
    """(noun, gloss) pairs."""
    pairs = []
    for line in (root / "usr/share/wordnet/data.noun").read_text(encoding="latin-1").splitlines():
        if line[:1].isdigit() and "|" in line:
            word = line.split()[4].replace("_", " ")
            pairs.append((word, line.split("|", 1)[1].split(";")[0].split('"')[0].strip()))
    return pairs


def python_functions() -> list[tuple[str, str, str]]:
    """(name, first docstring line, signature with docstring) of documented standard library functions."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in str(path) or "test" in path.parts:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)) and len(doc) > 20:
                segment = ast.get_source_segment(source, node) or ""
                if len(segment) < 1200:
                    found.append((node.name, doc.split("\n")[0], segment))
    return found


def gsm8k(path: Path) -> list[str]:
    rows = [json.loads(line)["question"] for line in path.read_text(encoding="utf-8").splitlines()]
    return rows[:-HELD_OUT_GSM8K]


def chat_prompts(count: int, corpus: Path, gsm8k_path: Path, seed: int = 0) -> list[str]:
    """`count` prompts: half general, a quarter code, a quarter mathematics."""
    rng = random.Random(seed)
    nouns, functions, questions = wordnet(corpus), python_functions(), gsm8k(gsm8k_path)
    prompts = []
    for i in range(count):
        (a, g), (b, h) = rng.choice(nouns), rng.choice(nouns)
        name, doc, source = rng.choice(functions)
        if i % 4 == 3:
            prompts.append(rng.choice(questions))
        elif i % 4 == 2:
            prompts.append(
                rng.choice(CODE_TEMPLATES).format(f=name, d=doc, s=source[:700], a=a, d2=doc.rstrip(".").lower())
            )
        else:
            prompts.append(rng.choice(TOPIC_TEMPLATES).format(a=a, b=b, g=g, h=h))
    return prompts


def documents(corpus: Path, chars: int, seed: int = 0) -> list[str]:
    """Text chunks of about 1,500 characters: manual pages, standard library code, glosses."""
    rng = random.Random(seed)
    texts = [
        html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"(?s)<(script|style).*?</\1>", "", p.read_text("utf-8"))))
        for p in sorted(corpus.rglob("*.html"))
    ]
    texts += [source for _, _, source in python_functions()]
    texts += [". ".join(f"{a}: {g}" for a, g in rng.sample(wordnet(corpus), 20)) for _ in range(200)]
    chunks = []
    for text in texts:
        text = re.sub(r"\n{3,}", "\n\n", text)
        chunks += [text[i : i + 1500] for i in range(0, len(text), 1500) if len(text[i : i + 1500]) > 300]
    rng.shuffle(chunks)
    return chunks[: chars // 1500]
