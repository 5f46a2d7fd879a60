"""Files that were measured or trained elsewhere: the draft lengths of chains by batch size, and a predictor's token table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ecospec_proto.token_table import TableError, TokenTable

from ...core import SettingsError
from ...settings import Settings
from .facts import ModelFacts


def read_schedule(path: Path | None) -> dict[int, int] | None:
    """A JSON object, batch size up to which -> draft length. Raises SettingsError."""
    if path is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"Setting draft_len_schedule is {path}, which cannot be read as JSON: {error}.") from None
    entries = content.items() if isinstance(content, dict) else ()
    if not entries or not all(key.isdecimal() and type(length) is int for key, length in entries):
        raise SettingsError(
            f'Setting draft_len_schedule is {path}, which holds something else; an object like {{"4": 3, "8": 1}} is needed, batch '
            "size up to which -> draft length."
        )
    return {int(key): length for key, length in entries}


def checked_schedule(schedule: Mapping[int, int], longest: int) -> dict[int, int]:
    """As the engine demands: upper bounds of batch sizes, the smallest of which has the full length. Raises SettingsError."""
    ordered = dict(sorted(schedule.items()))
    if not ordered or min(ordered) < 1 or not all(0 <= length <= longest for length in ordered.values()):
        raise SettingsError(
            f"the schedule of draft lengths is {dict(schedule)}; batch sizes from 1 with lengths of 0 to {longest} are needed."
        )
    if next(iter(ordered.values())) != longest:
        raise SettingsError(
            f"the schedule of draft lengths is {dict(schedule)}; its smallest batch size must have the full length {longest}."
        )
    return ordered


def checked_table(settings: Settings, facts: ModelFacts) -> Path:
    """The token table that nodes are chosen by. Raises SettingsError."""
    table = settings.token_table
    if table is None:
        raise SettingsError(
            "Setting token_table is missing; inside CUDA graphs nodes are chosen by the table of a trained predictor (its "
            "token_table.safetensors): give it, or set cuda_graphs to false to ask the predictor in every step, which is slow."
        )
    try:
        TokenTable.load(table, facts.geometry)
    except TableError as error:
        raise SettingsError(f"Setting token_table cannot be used: {error}") from None
    return table.resolve()
