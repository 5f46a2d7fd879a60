"""What a record asks of a model, how right the answers are, and when that is an alarm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_expert_model import FakeExpertModel
from hypothesis import given
from hypothesis import strategies as st
from trace_records import GEOMETRY, random_record

from ecospec_predictor.errors import SettingsError
from ecospec_predictor.live.baselines import Baselines, baseline_in
from ecospec_predictor.live.drift import BACK, ROLLING_WINDOWS, WINDOW_ROWS, Counts, Rolling, count, observe
from ecospec_predictor.live.questions import DEPTH, questions_of
from ecospec_predictor.live.serving import check_live
from ecospec_predictor.settings import PREFIX, load_settings
from ecospec_proto.trace_document import TraceDocument


def text_before(record: TraceDocument, row: int) -> list[int]:
    """Token ids from the first row to this one, up its parents."""
    found: list[int] = []
    while row >= 0:
        found.append(int(record.tokens[row]))
        row = int(record.parents[row])
    return found[::-1]


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 20), st.integers(1, 16))
def test_every_row_is_asked_about_once_with_its_own_text(seed: int, rows: int, unrouted: int, context: int) -> None:
    record = random_record(np.random.default_rng(seed), rows, min(rows, unrouted))
    asked: list[int] = []
    for question in questions_of(record, context, max_nodes=1000):
        query = question.query
        asked += question.rows.tolist()
        assert 1 <= len(query.context_tokens) <= context and record.accepted[question.rows[0]]
        assert sum(record.accepted[question.rows]) <= DEPTH
        texts = [query.context_tokens.tolist()]
        for node, (token, parent) in enumerate(zip(query.draft_tokens, query.parents, strict=True)):
            assert -1 <= parent < node
            texts.append([*texts[1 + parent], int(token)])
        for row, text in zip(question.rows.tolist(), texts, strict=True):
            whole = text_before(record, row)
            assert text == whole[-len(text) :] and (len(text) == len(whole) or len(text) >= context)
    assert len(asked) == len(set(asked))
    routed = np.flatnonzero((record.routes >= 0).any((1, 2))).tolist()
    first = next((r for r in routed if record.accepted[r]), rows)
    for row in set(routed) - set(asked):  # it hangs from the context, where no root is above it; the sampler makes none
        assert accepted_above(record, row) < first


def accepted_above(record: TraceDocument, row: int) -> int:
    while not record.accepted[row]:
        row = int(record.parents[row])
    return row


def test_a_record_without_routes_asks_nothing_and_a_wide_tree_is_cut() -> None:
    record = random_record(np.random.default_rng(1), rows=9, unrouted=9)
    assert questions_of(record, 8, 100) == []
    record = random_record(np.random.default_rng(2), rows=40, unrouted=0)
    cut = questions_of(record, 8, max_nodes=2)
    assert max(len(q.query.draft_tokens) for q in cut) == 2
    assert all((q.query.parents < np.arange(len(q.query.parents))).all() for q in cut)


def test_a_perfect_model_counts_as_perfect() -> None:
    model = FakeExpertModel()
    record = random_record(np.random.default_rng(3), rows=50, unrouted=6)
    total = Counts.none(GEOMETRY.moe_layers)
    for question in questions_of(record, model.max_context_tokens, 100):
        (predicted,) = model.predict([question.query])
        total = total + count(predicted, predicted.astype(np.int16))
    assert total.accuracy == 1 and (total.by_layer == 1).all()


@given(st.integers(0, 2**32))
def test_counting_agrees_with_sets(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, layers, k, experts = 5, 3, 4, 9
    draw = lambda: random.random((rows, layers, experts)).argsort(2)[:, :, :k]
    predicted, used = draw().astype(np.uint8), draw().astype(np.int16)
    used[random.random(used.shape) < 0.3] = -1
    counts = count(predicted, used)
    for layer in range(layers):
        sets = [(set(predicted[r, layer].tolist()), set(used[r, layer].tolist()) - {-1}) for r in range(rows)]
        assert counts.used[layer] == sum(len(u) for _, u in sets)
        assert counts.predicted[layer] == sum(len(p & u) for p, u in sets)


def test_nothing_counted_is_no_accuracy() -> None:
    none = Counts.none(2)
    assert np.isnan(none.accuracy) and np.isnan(none.by_layer).all()
    assert not Rolling(none).drifts


def of_accuracy(share: float) -> Counts:
    """A window of one layer."""
    return Counts(np.array([1000]), np.array([round(1000 * share)]))


def after(shares: list[float], baseline: float | None, margin: float = 0.05) -> list[bool]:
    """Whether it is an alarm, after each window of these accuracies."""
    state, alarms = Rolling(Counts.none(1)), []
    for share in shares:
        state = observe(state, of_accuracy(share), WINDOW_ROWS, baseline, margin)
        alarms.append(state.drifts)
    return alarms


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 3 * WINDOW_ROWS // 2)), max_size=60),
    st.integers(0, 100),
    st.integers(1, 100),
)
def test_the_alarm_follows_the_mean_that_is_shown(
    steps: list[tuple[int, int]], baseline_percent: int, margin_percent: int
) -> None:
    """It needs a full set of windows, begins beyond the margin, ends within its half, and in between stays what it was."""
    baseline, margin = baseline_percent / 100, margin_percent / 100
    state, rows_seen = Rolling(Counts.none(1)), 0
    for percent, rows in steps:
        before, rows_seen = state.drifts, rows_seen + rows
        state = observe(state, Counts(np.array([100 * rows]), np.array([percent * rows])), rows, baseline, margin)
        accuracy, full = state.counts.accuracy, len(state.windows) == ROLLING_WINDOWS
        if rows_seen < ROLLING_WINDOWS * WINDOW_ROWS:
            assert not full
        if not full or accuracy >= baseline - margin * BACK:
            assert not state.drifts
        elif accuracy < baseline - margin:
            assert state.drifts
        else:
            assert state.drifts == before


def test_bad_windows_alone_are_no_alarm() -> None:
    """Of a mean of 0.79, with 0.82 when it was trained and a margin of 0.05."""
    assert not any(after([0.85, 0.84, 0.85, 0.70, 0.71, 0.72, 0.83, 0.82] * 5, 0.82))


def test_an_alarm_stays_until_the_mean_is_well_back() -> None:
    full = ROLLING_WINDOWS
    assert after([0.80] * full + [0.70] * full, 0.9) == [False] * (full - 1) + [True] * (full + 1)
    assert after([0.80] * full + [0.86] * full, 0.9)[-1]
    assert not after([0.80] * full + [0.88] * full, 0.9)[-1]
    assert not any(after([0.86] * 3 * full, 0.9))


def test_without_a_baseline_there_is_no_alarm() -> None:
    assert not any(after([0.0] * 20, None))


def test_a_window_ends_by_its_rows_and_only_the_latest_are_kept() -> None:
    state = Rolling(Counts.none(1))
    for _ in range(WINDOW_ROWS - 1):
        state = observe(state, Counts(np.array([2]), np.array([1])), 1, 0.9, 0.05)
    assert not state.windows and state.counts.accuracy == 0.5
    state = observe(state, Counts(np.array([2]), np.array([1])), 1, 0.9, 0.05)
    assert len(state.windows) == 1 and state.current_rows == 0
    for _ in range(ROLLING_WINDOWS):
        state = observe(state, of_accuracy(1.0), WINDOW_ROWS, 0.9, 0.05)
    assert len(state.windows) == ROLLING_WINDOWS and state.counts.accuracy == 1


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"held_out_top_k_accuracy": 0.8}, 0.8),
        ({"held_out_documents_top_k_accuracy": 0.82, "held_out_answers_top_k_accuracy": 0.87}, 0.82),
        ({}, None),
        ({"held_out_top_k_accuracy": "high"}, None),
        ({"held_out_top_k_accuracy": float("nan")}, None),
        ({"held_out_top_k_accuracy": 80}, None),
    ],
)
def test_the_baseline_is_the_held_out_accuracy(
    tmp_path: Path, training: dict[str, Any], expected: float | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"training": training}))
    assert baseline_in(tmp_path) == expected
    baselines, model = Baselines(), FakeExpertModel()
    assert baselines.get(model) is None
    assert baselines.remember(lambda _directory, _embeddings: model)(tmp_path, None) is model
    assert baselines.get(model) == expected


def test_the_demos_predictor_has_a_baseline() -> None:
    demo = Path(__file__).parents[2] / "models/demo/predictor"
    assert 0.5 < (baseline_in(demo) or 0) < 1
    assert baseline_in(demo / "missing") is None


def test_the_stores_address_is_checked_and_never_told() -> None:
    made = load_settings({"model_dir": "."}, {f"{PREFIX}STATE_STORE_URL": "redis://:hush@cache:1/0"})
    assert "hush" not in repr(made) and made.score_tokens_per_second == 20 and not made.follow_registry
    for name, value in (("STATE_STORE_URL", "http://:hush@cache"), ("STATE_STORE_PASWORD", "hush")):
        with pytest.raises(SettingsError, match="state_store_url|STATE_STORE_PASWORD") as caught:
            load_settings({"model_dir": "."}, {PREFIX + name: value})
        assert "hush" not in str(caught.value) and "\n" not in str(caught.value)


def test_following_needs_a_store() -> None:
    check_live(load_settings({"model_dir": "."}, {}))
    with pytest.raises(SettingsError, match="follow_registry is true, but state_store_url is empty"):
        check_live(load_settings({"model_dir": ".", "follow_registry": "true"}, {}))
