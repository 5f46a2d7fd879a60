"""What documents say is so: links, commands, options, variables, metrics, defaults and figures are those of the code and results."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from documents import ROOT, anchors, code, commands, documents, links

from ecospec_orchestrator import cli as orchestrator_cli
from ecospec_orchestrator.settings import PREFIX, Settings
from ecospec_predictor import cli as predictor_cli
from ecospec_predictor.settings import PREFIX as PREDICTOR_PREFIX
from ecospec_predictor.settings import Settings as PredictorSettings

DOCUMENTS = documents()
MACHINE_PATHS = re.compile(r"/work/|/tmp/\w+/|/root/|/home/\w|~/work")
HOSTS = re.compile(r"https?://([\w.-]+)")
OUR_HOSTS = {"127.0.0.1", "localhost", "prometheus", "cache", "redis", "collector", "keepachangelog.com", "semver.org"}
PACKAGES = {"ecospec_orchestrator", "ecospec_predictor", "ecospec_proto", "ecospec_dashboards"}
OTHER_VARIABLES = {"ECOSPEC_API_KEY"}  # of `collect`, for the server that it asks


@pytest.fixture(scope="module", params=DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def document(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def text(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def _script(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module(name)


def test_links_lead_somewhere(document: Path, text: str) -> None:
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), f"{link} names no file"
        assert path.is_relative_to(ROOT), f"{link} leaves the repository"
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{link} names no heading"


def test_no_place_of_one_machine_is_named(text: str) -> None:
    assert not MACHINE_PATHS.findall(text)
    assert {host for host in HOSTS.findall(text) if not host.endswith("example.com")} <= OUR_HOSTS


def test_named_files_exist(text: str) -> None:
    tops = "|".join(("docs", "deploy", "docker", "tests", "benchmarks", "models", "services", "proto"))
    for name in re.findall(rf"`((?:{tops})/[\w./-]+)`", text):
        assert (ROOT / name.rstrip("/.")).exists(), f"{name} does not exist"


# Commands.


def _parsers(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    yield words, set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _parsers(below, (*words, name))


OPTIONS = {parser.prog: dict(_parsers(parser)) for parser in (orchestrator_cli._parser(), predictor_cli._parser())}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_commands_exist_with_their_options(text: str) -> None:
    for command in commands(text):
        if command.program in OPTIONS:
            _check_ours(command.program, command.words, command.flags)
        elif command.program == "make":
            assert command.words[0] in TARGETS or not re.fullmatch(r"[a-z-]+", command.words[0]), command
        elif command.words[0].endswith(".py"):
            script = ROOT / command.words[0]
            assert script.is_file(), command
            source = script.read_text(encoding="utf-8")
            assert all(f'"{flag}"' in source or f'"{flag[2:]}"' in source for flag in command.flags), command


def _check_ours(program: str, words: tuple[str, ...], flags: list[str]) -> None:
    known = OPTIONS[program]
    found = tuple(word for word in words[:2] if re.fullmatch(r"[a-z][a-z-]*", word))
    path = next((found[:length] for length in (2, 1) if found[:length] in known), ())
    if words[0][:1].islower() and words[0] != "...":
        assert path, f"{program} has no command {words[0]}"
    assert set(flags) <= (known[path] if path else set().union(*known.values())), (program, words)


def test_options_that_stand_alone_exist(text: str) -> None:
    known = set().union(*(options for parser in OPTIONS.values() for options in parser.values()))
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py"))
    for flag in (word for span in code(text) if span.startswith("--") for word in span.split()[:1]):
        name = flag.partition("=")[0]
        assert name in known or f'"{name}"' in scripts or name in OTHER_PROGRAMS, f"{name} is nobody's option"


OTHER_PROGRAMS = {
    "--no-deps",  # pip
    "--enable-return-routed-experts",  # vLLM and SGLang
    "--enable_return_routed_experts",  # LightLLM
    "--server-name",  # python -m ecospec_predictor.health
    "--live",
    "--dry-run",
}


def test_python_examples_are_python(text: str) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        ast.parse(block)


# Settings, variables, metrics.


def test_variables_exist(document: Path, text: str) -> None:
    compose = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docker-compose*.yml"))
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    known |= {PREDICTOR_PREFIX + name.upper() for name in PredictorSettings.model_fields}
    known |= OTHER_VARIABLES | {PREFIX, PREDICTOR_PREFIX} | set(re.findall(r"\$\{(\w+)", compose))
    for name, more in re.findall(r"\b(ECOSPEC_\w+)(\*?)", text):
        assert name in known or (more and any(each.startswith(name) for each in known)), f"{name} is no variable"


def test_metrics_exist(document: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if document.parent.name == "results":
        return  # written by the benchmarks, whose cases have such names, too
    page = _script(monkeypatch, "write_reference").metrics_page()
    known = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    known |= {name + end for name in known for end in ("_bucket", "_sum", "_count")}
    for name, more in re.findall(r"\b(ecospec_[a-z0-9_]+)(\*|\.|-)?", text):
        if name in PACKAGES or (more == "*" and any(each.startswith(name) for each in known)):
            continue
        assert name in known or f"{name}_total" in known, f"{name} is no metric"


def test_defaults_in_tables_are_the_settings(text: str) -> None:
    """Tables whose head is `| setting | default |`, with one or several settings in a row; reference/ is generated whole."""
    for table in re.findall(r"^\| setting \| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        for row in table.splitlines():
            names, values = (cell.replace("`", "").split(", ") for cell in row.split("|")[1:3])
            for name, value in zip((n.strip() for n in names), (v.strip() for v in values), strict=True):
                field = Settings.model_fields.get(name)
                if field is None:
                    continue  # of the predictor, or of training
                default = "none" if field.default is None else str(field.default)
                same = value.lower() == default.lower() or _number(value) == _number(default) is not None
                assert same or not value, f"{name} is {default} by default, not {value}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# What is generated.


def test_the_reference_is_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = _script(monkeypatch, "write_reference").render()
    kept = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").iterdir()}
    assert written.keys() == kept.keys()
    for name, text in written.items():
        assert text == kept[name], f"docs/reference/{name} is not what the code says; run make docs."


def test_figures_are_those_of_the_results(document: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = _script(monkeypatch, "write_figures")
    if document in figures.DOCUMENTS:
        assert figures.filled(text) == text, (
            f"{document.name} quotes other figures than benchmarks/results; run make docs."
        )
    else:
        assert "written by make docs" not in text.replace("`", "")


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, open_ = set(), [ROOT / "README.md"]
    while open_:
        page = open_.pop()
        reached.add(page)
        names = {link.partition("#")[0] for link in links(page.read_text(encoding="utf-8"))}
        found = {(page.parent / name).resolve() for name in names if name.endswith(".md") and ":" not in name}
        open_ += found - reached - set(open_)
    lost = sorted(str(path.relative_to(ROOT)) for path in set(DOCUMENTS) - reached)
    assert not lost


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


def test_markdown_is_taken_apart_as_github_does() -> None:
    text = (
        "# A `b` and C: d\n\n[x](y.md#z) `[no](link)`\n\n## Twice\n## Twice\n\n"
        "    make run  # make sense\n    ecospec-predictor eval RUN \\\n        --tokens 5 | tee --no\n\n"
        "Say `ecospec-orchestrator profile --out FILE`.\n```\npython a.py --x=1 -- --y\n# not a heading\n```\n"
    )
    assert anchors(text) == {"a-b-and-c-d", "twice", "twice-1"} and links(text) == ["y.md#z"]
    found = [(c.program, c.words[0], c.flags) for c in commands(text)]
    assert found == [
        ("make", "run", []),
        ("ecospec-predictor", "eval", ["--tokens"]),
        ("python", "a.py", ["--x"]),
        ("ecospec-orchestrator", "profile", ["--out"]),
    ]
    assert sum(1 for path in DOCUMENTS for _ in commands(path.read_text(encoding="utf-8"))) > 50
