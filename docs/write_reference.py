"""Writes docs/reference from the code: python docs/write_reference.py [DIRECTORY]

settings.md, commands.md, http.md, metrics.md, openapi.json, admin-openapi.json. What they say is what the code says; tests/unit/test_docs.py holds both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from schema_words import allowed

from ecospec_orchestrator import cli as orchestrator_cli
from ecospec_orchestrator import settings as orchestrator_settings
from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.api.app import version
from ecospec_orchestrator.api.document import admin_openapi, openapi
from ecospec_orchestrator.live import LIVE
from ecospec_orchestrator.selection.base import PolicyHealth
from ecospec_predictor import cli as predictor_cli
from ecospec_predictor import settings as predictor_settings
from ecospec_predictor.live.metrics import LiveMetrics
from ecospec_predictor.metrics import Metrics
from ecospec_predictor.training.config import (
    Data,
    ExportedBackbone,
    HfBackbone,
    Optimiser,
    SmallBackbone,
    TrainConfig,
    Training,
)

HERE = Path(__file__).resolve().parent / "reference"
NOTE = "Written by `make docs` from the code; change the code, not this file."
DESCRIBED = ("CompletionRequest", "ChatRequest", "TokenizeText", "TokenizeChat", "DetokenizeRequest")


def render() -> dict[str, str]:
    """File name -> content; the same code gives the same text."""
    document, admin = openapi(version()), admin_openapi(version())
    return {
        "settings.md": settings_page(),
        "commands.md": commands_page(),
        "http.md": http_page(document, admin),
        "metrics.md": metrics_page(),
        "openapi.json": json.dumps(document, indent=1, sort_keys=True) + "\n",
        "admin-openapi.json": json.dumps(admin, indent=1, sort_keys=True) + "\n",
    }


# Settings.


def settings_page() -> str:
    ours, theirs = orchestrator_settings, predictor_settings
    return _page(
        "Settings",
        "Orchestrator and predictor take each setting as an option (its name with hyphens) or as a variable; options win. A wrong or unknown "
        "one stops the start. Secrets are variables only, because a command line is visible to every user of the machine. For the "
        "predictor of the command `demo` the variables of the predictor hold, too.",
        f"## Orchestrator\n\nVariables: `{ours.PREFIX}` and the name in capitals. *Live*: may change while serving, see "
        "[guarding.md](../guarding.md#administrators).\n",
        _settings_table(ours.Settings, ours.PREFIX, ours.SECRETS, LIVE),
        f"\n## Predictor\n\nVariables: `{theirs.PREFIX}` and the name in capitals.\n",
        _settings_table(theirs.Settings, theirs.PREFIX, theirs.SECRETS, ()),
        "\n## Training\n\nThe YAML file of `ecospec-predictor train`, or `--set NAME=VALUE`. Unknown names are refused.\n",
        _table(("setting", "default", "allowed"), _training_rows()),
    )


def _settings_table(settings: type[BaseModel], prefix: str, secrets: Sequence[str], live: Sequence[str]) -> str:
    rows = []
    for name, field in settings.model_fields.items():
        default = "required" if field.is_required() else "" if name in secrets else _value(field.default)
        notes = [field.description or ""]
        notes += ["*secret*"] if name in secrets else []
        notes += ["*live*"] if name in live else []
        rows.append((f"`{name}`", default, "; ".join(notes), f"`{prefix}{name.upper()}`"))
    return _table(("setting", "default", "allowed", "variable"), rows)


def _training_rows() -> Iterator[tuple[str, str, str]]:
    sections: tuple[tuple[str, type[BaseModel]], ...] = (
        ("", TrainConfig),
        ("backbone (small)", SmallBackbone),
        ("backbone (hf)", HfBackbone),
        ("backbone (exported)", ExportedBackbone),
        ("data", Data),
        ("optimiser", Optimiser),
        ("training", Training),
    )
    for section, model in sections:
        schema = model.model_json_schema()
        for name, field in model.model_fields.items():
            if section == "" and name in ("backbone", "data", "optimiser", "training"):
                continue  # each has rows of its own
            default = "required" if field.is_required() else _value(field.default)
            kind, _, of = section.partition(" ")
            shown = f"`{kind + '.' if kind else ''}{name}`{' ' + of if of else ''}"
            yield shown, default, allowed(schema["properties"][name], schema.get("$defs", {}))


def _value(default: Any) -> str:
    if default is None or default in ((), "") or default is PydanticUndefined:
        return ""
    shown = str(default.value) if isinstance(default, Enum) else str(default)
    return f"`{shown.lower() if isinstance(default, bool) else shown}`"


# Commands.


def commands_page() -> str:
    parts = []
    for parser, settings, secrets in (
        (orchestrator_cli._parser(), orchestrator_settings.Settings, orchestrator_settings.SECRETS),
        (predictor_cli._parser(), predictor_settings.Settings, predictor_settings.SECRETS),
    ):
        parts.append(f"## {parser.prog}\n")
        for command, text, found in _commands(parser):
            dests = {a.dest for a in found._actions}
            taken = set(settings.model_fields) - set(secrets) <= dests  # others have options of the same name
            own = [a for a in found._actions if a.dest != "help" and not (taken and a.dest in settings.model_fields)]
            parts.append(f"### {command}\n\n{text[0].upper()}{text[1:]}.\n")
            if taken:
                section = "orchestrator" if settings is orchestrator_settings.Settings else "predictor"
                parts.append(f"Takes [the settings of the {section}](settings.md#{section}) as options.\n")
            if rows := [(_option(a), _help(a)) for a in own if not isinstance(a, argparse._SubParsersAction)]:
                parts.append(_table(("option", "what"), rows) + "\n")
    return (
        _page("Commands", "Each has `--help`. `make help` lists the commands of the repository.", *parts).rstrip()
        + "\n"
    )


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """(words, what it is for, parser) of every command that has no commands of its own."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, found in action.choices.items():
            below = list(_commands(found))
            for words, text, each in below:
                yield f"{name} {words}", text, each
            if not below:
                yield name, texts[name], found


def _option(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.dest.upper()}`"
    takes = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return f"`{', '.join(action.option_strings)}{takes}`"


def _help(action: argparse.Action) -> str:
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    if action.choices is not None:
        text = "; ".join(filter(None, (text, ", ".join(map(str, action.choices)))))
    return f"{text}; required" if action.required and action.option_strings else text


# HTTP.


def http_page(document: Mapping[str, Any], admin: Mapping[str, Any]) -> str:
    schemas, parts = document["components"]["schemas"], [_routes(document)]
    for name in DESCRIBED:
        schema = schemas[name]
        rows = [
            (
                f"`{field}`",
                "required" if field in schema.get("required", ()) else _json_default(about),
                allowed(about, schemas),
            )
            for field, about in schema["properties"].items()
        ]
        parts.append(f"\n## {name}\n\n" + _table(("field", "default", "allowed"), rows))
    parts.append(
        "\n## Administrators\n\nOn `admin_port`, with `admin_key`; see [guarding.md](../guarding.md#administrators). The settings that may change "
        "are those marked *live* in [settings.md](settings.md#orchestrator).\n\n" + _routes(admin)
    )
    return _page(
        "HTTP",
        "The OpenAPI documents ([openapi.json](openapi.json), [admin-openapi.json](admin-openapi.json); also `GET /openapi.json` and `GET "
        "/admin/openapi.json`) as tables; [api.md](../api.md) says what the fields mean together. null means the default; unknown fields are "
        "refused by name.",
        *parts,
    )


def _routes(document: Mapping[str, Any]) -> str:
    return _table(
        ("route", "what it does", "statuses"),
        (
            (f"`{method.upper()} {path}`", operation["summary"], ", ".join(sorted(operation["responses"])))
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ),
    )


def _json_default(about: Mapping[str, Any]) -> str:
    return "" if about.get("default") in (None, "", [], {}) else f"`{json.dumps(about['default'])}`"


# Metrics.


def metrics_page() -> str:
    ledger = Ledger()
    ledger.bind(lambda: 0, lambda: 0)
    ledger.bind_policy(lambda: PolicyHealth({"greedy": 0.0}))
    predictor = Metrics()
    LiveMetrics(predictor.registry)
    head = ("metric", "type", "labels", "what")
    return _page(
        "Metrics",
        "As `/metrics` shows them, beside the usual `process_*`. Histograms have `_bucket`, `_sum` and `_count`. Labels are bounded: never an "
        "expert or a request. Seconds and bytes throughout. [operating.md](../operating.md) says which dashboard and alert uses what.",
        "## Orchestrator\n",
        _table(head, _metrics(ledger.registry)),
        "\n## Predictor\n\nOn `metrics_host` and `metrics_port` of the predictor.\n",
        _table(head, _metrics(predictor.registry)),
    )


def _metrics(registry: CollectorRegistry) -> Iterator[tuple[str, str, str, str]]:
    for family in sorted(registry.collect(), key=lambda each: each.name):
        if not family.name.startswith("ecospec_"):
            continue
        # A family without samples does not tell its labels; what made it does.
        source = registry._names_to_collectors.get(family.name)
        labels = getattr(family, "_labelnames", None) or getattr(source, "_labelnames", None)
        labels = labels or tuple({name: None for s in family.samples for name in s.labels if name != "le"})
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield f"`{name}`", family.type, ", ".join(f"`{label}`" for label in labels), family.documentation


# Markdown.


def _page(title: str, text: str, *parts: str) -> str:
    return "\n".join([f"# {title}", "", f"{NOTE} {text}", "", *parts]).rstrip() + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in render().items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
