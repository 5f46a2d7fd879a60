"""The repository's Markdown files, taken apart: links, anchors, code and what commands it calls."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "examples", "models", "benchmarks", "deploy", "docker", "proto", "services", "tests")
_FENCE = re.compile(r"^ *```.*?\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_COMMAND = re.compile(
    r"(?:^|[\s`(/])(ecospec-orchestrator|ecospec-predictor|make|python3?|torchrun)((?: +[^\s|;&#]+)+)"
)


def documents() -> list[Path]:
    """Every Markdown file of ours."""
    below = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))
    return sorted(path for path in (*ROOT.glob("*.md"), *below) if "node_modules" not in path.parts)


def prose(text: str) -> str:
    """Without fenced and indented code."""
    return re.sub(r"^    .*$", "", _FENCE.sub("", text), flags=re.MULTILINE)


def links(text: str) -> list[str]:
    return _LINK.findall(_INLINE.sub("", prose(text)))


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings: lower case, without punctuation, spaces as hyphens, numbered when they come again."""
    found: Counter[str] = Counter()
    made = set()
    for heading in _HEADING.findall(prose(text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        made.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return made


def code(text: str) -> list[str]:
    """Lines of fenced and indented code, continuations joined, and what stands between backticks."""
    blocks = _FENCE.findall(text)
    rest = _FENCE.sub("", text)
    lines = [line.strip() for line in re.findall(r"^(?:    |\t)(.*)$", re.sub(r"\\\n *", "", rest), re.MULTILINE)]
    lines += [line.strip() for block in blocks for line in re.sub(r"\\\n *", "", block).splitlines()]
    return lines + _INLINE.findall(re.sub(r"^    .*$", "", rest, flags=re.MULTILINE))


@dataclass(frozen=True)
class Command:
    """words: what follows the program, without comments and what is piped on. flags: its options, not those behind a bare `--`."""

    program: str
    words: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        own = self.words[: self.words.index("--")] if "--" in self.words else self.words
        return [word.partition("=")[0] for word in own if re.match(r"--[a-z]", word)]


def commands(text: str) -> Iterator[Command]:
    for line in code(text):
        for program, rest in _COMMAND.findall(re.sub(r"(^|\s)#.*", "", line)):
            try:
                words = shlex.split(rest)
            except ValueError:  # an open quote: the line went on behind what was cut off
                words = rest.split()
            yield Command(program, tuple(word.strip("[],.:)") for word in words))
