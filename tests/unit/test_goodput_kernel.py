"""The goodput kernel against the exact optimum, the minimum cut against brute force, and prices recomputed from sets."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from ecospec_orchestrator.core import DraftTree, Footprints
from ecospec_orchestrator.selection import goodput_kernel
from ecospec_orchestrator.selection.goodput_kernel import best_closure, warm_up
from ecospec_orchestrator.selection.kernel import BUFFER_BATCH, BUFFER_NONE, BUFFER_REQUEST
from ecospec_orchestrator.selection.pack import Pack, pack

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from exact_selection import best_closure_at_rate, best_closure_exact, new_pairs, objective  # noqa: E402

COSTS = {"fixed_seconds": 1.0, "plain_seconds": 1.0, "token_seconds": 0.05, "pair_seconds": 0.05}


def tree(parents: list[int]) -> DraftTree:
    n = len(parents)
    return DraftTree(
        np.arange(n, dtype=np.int32), np.array(parents, np.int32), np.ones(n, np.float32), np.ones(n, np.int32)
    )


def footprint(*rows: tuple[int, ...] | None) -> Footprints:
    """One layer; each row given by its expert ids, None for a row without a prediction."""
    experts = np.array([[[sum(1 << e for e in row or ())]] for row in rows], np.uint64)
    return Footprints(experts, np.array([row is not None for row in rows]))


def random_pack(generator, trees, nodes, layers, experts_count, top_k, known_share=1.0, values="dyadic") -> Pack:
    drafted, probabilities, footprints = [], [], []
    for _ in range(trees):
        size = int(generator.integers(0, nodes + 1))
        parents = [int(generator.integers(-1, n)) for n in range(size)]
        drafted.append(tree(parents))
        value = np.zeros(size)
        for n, parent in enumerate(parents):
            share = generator.integers(1, 9) / 8 if values == "dyadic" else generator.beta(1.5, 1.5)
            value[n] = share * (1.0 if parent < 0 or values == "wild" else value[parent])
        probabilities.append(value)
        used = np.zeros((size + 1, layers, -(-experts_count // 64) * 64), bool)
        ids = generator.random((size + 1, layers, experts_count)).argsort(axis=-1)[..., :top_k]
        np.put_along_axis(used, ids, True, axis=-1)
        bits = np.packbits(used, axis=-1, bitorder="little").view("<u8").astype(np.uint64)
        footprints.append(Footprints(bits, generator.random(size + 1) < known_share))
    return pack(drafted, footprints, probabilities)


def choose(packed: Pack, **options):
    return best_closure(packed.experts, packed.known, packed.values, packed.parents, packed.offsets, **options)


def small_case(generator, **options):
    layers, experts_count = int(generator.integers(1, 4)), int(generator.choice([4, 6, 16, 70]))
    top_k = int(generator.integers(1, 4))
    packed = random_pack(generator, int(generator.integers(1, 4)), 6, layers, experts_count, top_k, **options)
    costs = {
        "fixed_seconds": 1.0,
        "plain_seconds": float(generator.choice([0.75, 1.0])),
        "token_seconds": float(generator.choice([0.0, 0.0625, 0.125])),
        "pair_seconds": float(generator.choice([1, 4, 12, 32])) / 64 / (layers * top_k),
    }
    return packed, {"layers": layers, "experts_count": experts_count, "top_k": top_k, **costs}


def all_closed(packed: Pack) -> list[tuple[int, ...]]:
    rows = [row for row in range(len(packed.parents)) if packed.parents[row] >= 0]
    return [
        chosen
        for size in range(len(rows) + 1)
        for chosen in combinations(rows, size)
        if all(packed.parents[packed.parents[row]] < 0 or packed.parents[row] in chosen for row in chosen)
    ]


def mask(packed: Pack, rows) -> np.ndarray:
    chosen = np.zeros(len(packed.parents), bool)
    chosen[list(rows)] = True
    return chosen


def test_minimum_cut_equals_brute_force():
    generator = np.random.default_rng(1)
    speculated = partly = 0
    for _ in range(400):
        packed, options = small_case(generator)
        if not 0 < len(packed.parents) - len(packed.offsets) + 1 <= 9:
            continue
        token, pair = Fraction(options["token_seconds"]), Fraction(options["pair_seconds"])
        pairs, trees = new_pairs(packed), len(packed.offsets) - 1
        rate = Fraction(int(generator.integers(1, 17)), 8)
        priced = [objective(packed, mask(packed, rows), pairs, token, pair) for rows in all_closed(packed)]
        cut = best_closure_at_rate(packed, pairs, rate, token, pair)
        gain, extra = objective(packed, cut, pairs, token, pair)
        assert gain - rate * extra == pytest.approx(max(g - rate * e for g, e in priced), rel=1e-7, abs=1e-7)
        _, tokens, seconds = best_closure_exact(packed, 1.0, float(token), float(pair))
        assert tokens / seconds == pytest.approx(float(max((trees + g) / (1 + e) for g, e in priced)), rel=1e-7)
        speculated += cut.any()
        partly += 0 < cut.sum() < len(packed.parents) - trees
    assert speculated > 100 and partly > 60


def bit_set(row: np.ndarray) -> set[int]:
    return {64 * word + bit for word, value in enumerate(row.tolist()) for bit in range(64) if value >> bit & 1}


def recompute(packed: Pack, chosen: np.ndarray, options: dict) -> tuple[float, float, list[float]]:
    """(R + sum of P, seconds, sum of P per tree) of a set, from Python sets and the docstring alone."""
    masks = options.get("rank_masks")
    ranks = [set(range(64 * packed.experts.shape[1]))] if masks is None else [bit_set(row) for row in masks]
    layers, count, top_k = options["layers"], options["experts_count"], options["top_k"]
    words = packed.experts.shape[1] // layers
    mode, seed = options.get("buffer_mode", BUFFER_BATCH), options.get("seed_root", True)
    factor, share = options.get("known_factor", 1.0), options.get("unknown_share", 1.0)
    bits = [bit_set(row) if known else set() for row, known in zip(packed.experts, packed.known, strict=True)]

    def cost(buffer: set[int]) -> int:
        layer = [{bit for bit in buffer if bit // (64 * words) == at} for at in range(layers)]
        return sum(max(len(part & rank) for rank in ranks) for part in layer)

    def new(rows: list[int], roots: list[int]) -> float:
        base = set().union(*(bits[root] for root in roots)) if seed else set()
        union = float(len(base))
        if seed and not all(packed.known[root] for root in roots):
            guess = options.get("root_pairs", 0.0)
            union = max(union, guess if mode == BUFFER_BATCH else min(guess, top_k * layers))
        buffer = base.union(*(bits[row] for row in rows))
        total = factor * (cost(buffer) - cost(base))
        union += factor * (len(buffer) - len(base))
        for row in rows:  # one unknown node after the other, each on what the former leave
            if not packed.known[row]:
                expected = share * top_k * layers * max(0.0, 1.0 - union / (layers * count))
                total += expected / len(ranks)
                union += expected
        return total

    value = np.array(packed.values)
    by_tree: list[list[int]] = []
    for start, end in zip(packed.offsets[:-1], packed.offsets[1:], strict=True):
        value[start] = 1.0
        for row in range(start + 1, end):
            value[row] = min(value[row], value[packed.parents[row]])
        by_tree.append([row for row in range(start + 1, end) if chosen[row]])
    roots = packed.offsets[:-1].tolist()
    if mode == BUFFER_BATCH:
        pairs = new([row for rows in by_tree for row in rows], roots)
    elif mode == BUFFER_REQUEST:
        pairs = sum(new(rows, [root]) for rows, root in zip(by_tree, roots, strict=True))
    else:
        pairs = 0.0
        for rows, root in zip(by_tree, roots, strict=True):
            for row in rows:
                above = []
                while packed.parents[row] >= 0:
                    above.append(row)
                    row = int(packed.parents[row])
                pairs += new(above, [root]) - new(above[1:], [root])
    gains = [float(value[rows].sum()) for rows in by_tree]
    seconds = options["fixed_seconds"] + options["token_seconds"] * chosen.sum() + options["pair_seconds"] * pairs
    return len(roots) + sum(gains), seconds, gains


def assert_closed(packed: Pack, chosen: np.ndarray, max_nodes: int = 10**6) -> None:
    assert chosen.dtype == np.bool_ and not chosen[packed.parents < 0].any()
    for row in np.flatnonzero(chosen):
        parent = packed.parents[row]
        assert packed.parents[parent] < 0 or chosen[parent]
    for nodes in packed.nodes(chosen):
        assert nodes.dtype == np.int32 and (np.diff(nodes) > 0).all() and len(nodes) <= max_nodes


def test_prices_are_right_and_sets_closed_capped_and_allowed_in_every_mode():
    generator = np.random.default_rng(2)
    seen: dict[str, int] = {"speculated": 0, "mixed": 0, "capped": 0, "slowed": 0}
    for case in range(1500):
        wild = {"known_share": float(generator.choice([1.0, 0.6, 0.0])), "values": "wild" if case % 5 == 0 else "beta"}
        packed, options = small_case(generator, **wild)
        options |= {
            "rate": float(generator.choice([0.0, 0.5, 2.0])),
            "buffer_mode": int(generator.choice([BUFFER_BATCH, BUFFER_REQUEST, BUFFER_NONE])),
            "seed_root": bool(generator.integers(4)),
            "known_factor": float(generator.choice([1.0, 0.7, 1.5])),
            "unknown_share": float(generator.choice([1.0, 0.5])),
            "root_pairs": float(generator.integers(0, 8)),
            "max_slowdown": float(generator.choice([np.inf, 1.1])),
            "max_nodes": int(generator.choice([100, 2])),
        }
        if generator.integers(2):
            shares = generator.integers(0, 3, 64 * packed.experts.shape[1])
            rows = np.array([shares == rank for rank in range(3)])
            options["rank_masks"] = np.packbits(rows, axis=1, bitorder="little").view("<u8").astype(np.uint64)
        chosen, tokens, seconds = choose(packed, **options)
        assert_closed(packed, chosen, options["max_nodes"])
        right_tokens, right_seconds, gains = recompute(packed, chosen, options)
        assert (tokens, seconds) == (pytest.approx(right_tokens), pytest.approx(right_seconds))
        slowdown = 1 + (seconds - options["fixed_seconds"]) / options["plain_seconds"]
        assert not chosen.any() or (1 + min(gains)) * options["max_slowdown"] >= slowdown - 1e-9
        trees = len(packed.offsets) - 1
        rate = options["rate"] or trees / options["fixed_seconds"]
        assert tokens - rate * seconds >= trees - rate * options["fixed_seconds"] - 1e-9  # no worse than the empty set
        seen["speculated"] += chosen.any()
        seen["mixed"] += 0 < packed.known[chosen].sum() < chosen.sum()
        seen["capped"] += any(len(nodes) == options["max_nodes"] for nodes in packed.nodes(chosen))
        seen["slowed"] += bool(chosen.any() and options["max_slowdown"] < 2)
    assert min(seen.values()) > 80, seen


def test_within_a_percent_of_the_exact_optimum_and_never_beyond(record_property):
    generator = np.random.default_rng(3)
    gaps: dict[str, list[float]] = {"ratio": [], "rate": []}
    for case in range(3000):
        packed, options = small_case(generator, values="beta")
        rate = float(generator.uniform(0.3, 3.0)) if case % 2 else 0.0
        costs = {key: options[key] for key in ("fixed_seconds", "token_seconds", "pair_seconds")}
        best, tokens, seconds = best_closure_exact(packed, **costs, rate=rate)
        if not best.any():
            assert not choose(packed, **options, rate=rate)[0].any()
            continue
        _, reached_tokens, reached_seconds = choose(packed, **options, rate=rate)
        if rate:
            trees = len(packed.offsets) - 1
            optimum = tokens - trees - rate * (seconds - 1.0)
            if optimum < 1e-3:
                continue  # a share of next to nothing says nothing
            reached = reached_tokens - trees - rate * (reached_seconds - 1.0)
        else:
            optimum, reached = tokens / seconds, reached_tokens / reached_seconds
        gaps["rate" if rate else "ratio"].append(1 - reached / optimum)
    for name, values in gaps.items():
        record_property(f"mean_gap_{name}", float(np.mean(values)))
        print(f"{name}: mean gap {np.mean(values):.3%}, worst {np.max(values):.2%} of {len(values)}")
        assert len(values) > 800
        assert min(values) >= -1e-6
        assert np.mean(values) <= 0.01


def test_a_child_that_pays_pulls_in_a_parent_that_does_not():
    # The parent alone: 0.5 for 4 new pairs and a token. The child adds 0.45 for a token only.
    packed = pack([tree([-1, 0])], [footprint((0,), (1, 2, 3, 4), (1, 2, 3, 4))], [np.array([0.5, 0.45])])
    geometry = {"layers": 1, "experts_count": 64, "top_k": 4}
    costs = {**COSTS, "pair_seconds": 0.1}
    chosen, tokens, seconds = choose(packed, **geometry, **costs, rate=1.5)
    assert chosen.tolist() == [False, True, True]
    assert (tokens, seconds) == (pytest.approx(1.95), pytest.approx(1.5))
    parent_alone = replace(packed, values=np.array([1.0, 0.5, 0.0]))
    assert not choose(parent_alone, **geometry, **costs, rate=1.5)[0].any()


def test_nothing_is_chosen_where_nothing_pays():
    packed = pack([tree([-1]), DraftTree.empty()], [footprint((0,), (1, 2)), footprint((0,))], [np.array([0.5]), []])
    geometry = {"layers": 1, "experts_count": 64, "top_k": 2}
    chosen, tokens, seconds = choose(packed, **geometry, **COSTS, rate=100.0)
    assert not chosen.any() and (tokens, seconds) == (2.0, 1.0)
    assert choose(packed, **geometry, **COSTS, rate=1.0)[0].tolist() == [False, True, False]


def test_no_request_pays_for_the_others():
    # Tree 0 would gain a lot; tree 1 has nothing to gain and would wait 30 % longer.
    trees = [tree([-1, 0]), DraftTree.empty()]
    packed = pack(trees, [footprint((0,), (1, 2), (3, 4)), footprint((0,))], [np.array([0.9, 0.8]), np.empty(0)])
    options = {"layers": 1, "experts_count": 64, "top_k": 2, **COSTS, "rate": 1.0}
    assert choose(packed, **options)[0].sum() == 2
    assert choose(packed, **options, max_slowdown=1.2)[0].sum() == 1
    assert choose(packed, **options, max_slowdown=1.1)[0].sum() == 0


def test_unknown_nodes_are_charged_with_and_without_footprints():
    trees, values = [tree([-1, -1])], [np.array([0.5, 0.4])]
    options = {"layers": 1, "experts_count": 8, "top_k": 2, **COSTS, "token_seconds": 0.0, "rate": 1e-6}
    chosen, _, seconds = choose(pack(trees, None, values), **options, root_pairs=2.0)
    assert chosen.sum() == 2
    # 2 * (1 - 2/8) = 1.5 pairs, then 2 * (1 - 3.5/8) = 1.125.
    assert seconds == pytest.approx(1 + 0.05 * 2.625)
    known = pack(trees, [footprint((0, 1), (0, 1), None)], values)
    assert choose(known, **options)[2] == pytest.approx(1 + 0.05 * 1.5)
    assert choose(known, **{**options, "rate": 8.0})[0].tolist() == [False, True, False]


def test_the_order_of_the_trees_does_not_matter():
    generator = np.random.default_rng(4)
    for case in range(200):
        single = [random_pack(generator, 1, 8, 2, 16, 2, values="beta") for _ in range(4)]
        orders = [list(range(4)), generator.permutation(4).tolist()]
        found = []
        for order in orders:
            starts = np.cumsum([0] + [len(single[at].parents) for at in order])
            parents = np.concatenate(
                [
                    np.where(single[at].parents < 0, -1, single[at].parents + start)
                    for at, start in zip(order, starts[:-1], strict=True)
                ]
            )
            parts = {
                name: np.concatenate([getattr(single[at], name) for at in order])
                for name in ("experts", "known", "values")
            }
            packed = Pack(**parts, parents=parents, offsets=starts.astype(np.int64), layers=2)
            costs = {**COSTS, "rate": 0.5 * (case % 3)}
            nodes = packed.nodes(choose(packed, layers=2, experts_count=16, top_k=2, **costs)[0])
            found.append({at: chosen.tolist() for at, chosen in zip(order, nodes, strict=True)})
        assert found[0] == found[1]


def test_no_input_of_a_request_compiles_the_kernel_again():
    warm_up()
    before = len(goodput_kernel._best_closure.signatures)
    packed = pack([tree([-1, 0])], [footprint((0,), (1,), (1,))], [np.array([0.9, 0.8])])
    read_only = replace(packed, experts=np.frombuffer(packed.experts.tobytes(), np.uint64).reshape(3, 1))
    strided = replace(packed, experts=np.repeat(packed.experts, 2, axis=0)[::2], known=np.repeat(packed.known, 2)[::2])
    whole = {**COSTS, "fixed_seconds": 1, "rate": 0, "max_slowdown": 3, "root_pairs": 0}
    for given in (packed, read_only, strided):
        for costs in (COSTS, whole):
            assert choose(given, layers=1, experts_count=8, top_k=1, **costs)[0].sum() == 2
    assert before == len(goodput_kernel._best_closure.signatures) == 1


def test_arrays_and_costs_that_do_not_fit_are_refused():
    packed = pack([tree([-1])], [footprint((0,), (1,))])
    geometry = {"layers": 1, "experts_count": 8, "top_k": 1}
    with pytest.raises(ValueError, match="have 2, 1, 2 and 2 rows and offsets end at 2"):
        choose(replace(packed, known=packed.known[:1]), **geometry, **COSTS)
    with pytest.raises(ValueError, match="experts have 1 words, rank_masks 1; both need 2 layers"):
        choose(packed, **{**geometry, "layers": 2}, **COSTS)
    with pytest.raises(ValueError, match="experts have 1 words, rank_masks 2"):
        choose(packed, **geometry, **COSTS, rank_masks=np.zeros((3, 2), np.uint64))
    for wrong in ({"fixed_seconds": 0.0}, {"pair_seconds": -1.0}, {"token_seconds": float("nan")}):
        with pytest.raises(ValueError, match="all finite"):
            choose(packed, **geometry, **{**COSTS, **wrong})
