"""The n-gram drafter's index against a scan of the whole text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_orchestrator.core import ROOT, DraftTree, SettingsError
from ecospec_orchestrator.drafting.load import feature_layers_of, load_drafter
from ecospec_orchestrator.drafting.ngram import NgramDrafter


def scan(tokens: list[int], depth: int, branches: int, max_n: int, min_n: int) -> tuple[int, list[list[int]]]:
    """(length of the longest suffix that came before, the chains read after its latest places with different followers)."""
    for n in range(max_n, min_n - 1, -1):
        chains: list[list[int]] = []
        for start in range(len(tokens) - n - 1, -1, -1):
            if len(tokens) < n or tokens[start : start + n] != tokens[len(tokens) - n :]:
                continue
            text = list(tokens)
            while len(text) < len(tokens) + depth:
                text.append(text[start + n + len(text) - len(tokens)])
            chain = text[len(tokens) :]
            if chain[0] not in [c[0] for c in chains]:
                chains.append(chain)
        if chains:
            return n, chains[:branches]
    return 0, []


def chains_of(tree: DraftTree) -> list[list[int]]:
    leaves = sorted(set(range(len(tree))) - set(tree.parents.tolist()))
    found = []
    for node in leaves:
        path = []
        while node != ROOT:
            path.insert(0, int(tree.tokens[node]))
            node = int(tree.parents[node])
        found.append(path)
    return found


def fed(drafter: NgramDrafter, tokens: list[int], cut: int):
    state = drafter.new_state()
    for part in (tokens[:cut], tokens[cut:]):
        drafter.extend([state], [None], [np.array(part, np.int64)])
    return state


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(0, 40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_the_index_finds_what_a_scan_finds(
    tokens: list[int], cut: int, depth: int, branches: int, min_n: int, more: int
) -> None:
    drafter = NgramDrafter(depth, branches, min_n + more, min_n)
    state = fed(drafter, tokens, cut)
    (tree,) = drafter.draft([state])
    n, chains = scan(tokens, depth, branches, min_n + more, min_n)
    assert chains_of(tree) == chains
    if not chains:
        return
    assert tree.depths.tolist() == [d for d in range(1, depth + 1) for _ in chains]
    above = np.where(tree.parents == ROOT, 1.0, tree.probabilities[tree.parents])
    assert (tree.probabilities < above).all() and (tree.probabilities > 0).all()
    first = tree.probabilities[: len(chains)]
    assert (np.diff(first) < 0).all() and first.sum() == pytest.approx(n / (n + 1))
    assert first.dtype == np.float32 and tree.tokens.dtype == tree.parents.dtype == tree.depths.dtype == np.int32


def test_drafting_stops_at_the_level_that_is_not_wanted_and_leaves_nothing_behind() -> None:
    drafter = NgramDrafter(depth=3, branches=2)
    text = [1, 2, 3, 4, 1, 2, 5, 6, 1, 2]
    states = [fed(drafter, text, 4), drafter.new_state()]
    seen: list[tuple[int, int]] = []

    def another_level(trees: list[DraftTree], level: int) -> bool:
        seen.append((level, len(trees[0])))
        return level < 2

    whole = drafter.draft(states)
    short = drafter.draft(states, another_level)
    assert seen == [(1, 2), (2, 4)] and len(short[0]) == 4 and len(short[1]) == len(whole[1]) == 0
    assert short[0].tokens.tolist() == whole[0].tokens[:4].tolist() == [5, 3, 6, 4]
    assert drafter.draft(states)[0].tokens.tolist() == whole[0].tokens.tolist()


def test_a_longer_match_is_trusted_more() -> None:
    drafter = NgramDrafter(depth=2)
    short, long = fed(drafter, [9, 1, 2, 3, 8, 1, 2], 0), fed(drafter, [1, 2, 3, 4, 5, 1, 2, 3, 4], 0)
    a, b = drafter.draft([short, long])
    np.testing.assert_allclose(a.probabilities, [2 / 3, 2 / 4])
    np.testing.assert_allclose(b.probabilities, [4 / 5, 4 / 6])


def test_it_reads_no_weights_and_needs_no_features() -> None:
    drafter = load_drafter("ngram", None, depth=3, top_k=2, kv_pages=1)
    assert isinstance(drafter, NgramDrafter) and (drafter.max_levels, drafter.max_nodes, drafter.top_k) == (3, 6, 2)
    assert feature_layers_of("ngram", 30) == () and drafter.bytes_read(3, True) == 0
    state = drafter.new_state()
    joined = drafter.join([np.empty((2, 0)), np.empty((1, 0))])
    drafter.extend([state], [joined[:2]], [np.array([4, 5])])
    assert state.tokens == [4, 5] and len(joined) == 3 and drafter.check_idle() is None
    drafter.release(state)
    assert not state.tokens and not state.followers


@pytest.mark.parametrize("options", [{"min_n": 0}, {"min_n": 3, "max_n": 2}, {"depth": 0}, {"branches": 0}])
def test_impossible_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(SettingsError, match="all are at least 1, and min_n is not above max_n"):
        NgramDrafter(**{"depth": 3, **options})
