"""Every family decodes the same tokens under every policy, with a drafter of its own kind, as with none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_decoding import CASES, TOKENS, decode, load_tiny


@pytest.mark.parametrize(("family", "drafter"), CASES)
def test_every_policy_gives_the_targets_own_tokens(
    family: str, drafter: str, tmp_path: Path, byte_tokenizer: Any
) -> None:
    loaded = load_tiny(family, drafter, tmp_path / "model", byte_tokenizer)
    plain, _ = decode(loaded, "none")
    assert all(len(tokens) == TOKENS for tokens in plain.values())
    accepted = 0
    for policy in ("likelihood", "ecospec", "goodput"):
        outputs, reports = decode(loaded, policy)
        assert outputs == plain, policy
        assert any(report.speculated for report in reports), policy
        accepted += sum(sum(report.accepted) for report in reports)
    if drafter == "ngram":  # a random draft layer is hardly ever right
        assert accepted > 0
    assert loaded.engine.check_idle() is None
